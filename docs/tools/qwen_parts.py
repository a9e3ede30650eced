"""Measure the effect of each part of Qwen3.5's layer, by removing it.

    python docs/tools/qwen_parts.py recall
    python docs/tools/qwen_parts.py shakespeare

Each writes a table of `fwlab/data/results/qwen-parts.json`, which notebook 11 prints:
three seeds, a few minutes on one thread. Seeds may follow, as in `recall 4 5`.
"""

import json
import math
import sys
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from fwlab import ops
from fwlab.data import corpus
from fwlab.exercises.course.to_qwen import recall_text
from fwlab.feature_maps import l2_normalize
from fwlab.fit import answer_loss, fit
from fwlab.provenance import provenance

OUT = Path(__file__).parents[2] / "fwlab" / "data" / "results" / "qwen-parts.json"
#: Code of the part that a model lacks, by the part's name in the table.
PARTS = {
    "nothing": "",
    "convolution": "conv",
    "unit keys": "unit",
    "scale": "scale",
    "decay": "decay",
    "strength": "beta",
    "norm": "norm",
    "gate": "gate",
}


class Delta(nn.Module):
    """Apply Qwen3.5's layer without one part, with one key head per value head."""

    def __init__(self, d: int, heads: int, width: int, without: str):
        super().__init__()
        self.heads, self.width, self.without = heads, width, without
        wide = heads * width
        self.qkv = nn.Linear(d, 3 * wide, bias=False)
        self.conv = nn.Parameter(torch.empty(3 * wide, 1, 4).uniform_(-0.5, 0.5))
        self.z = nn.Linear(d, wide, bias=False)
        self.b = nn.Linear(d, heads, bias=False)
        self.a = nn.Linear(d, heads, bias=False)
        # Start with half-lives of a few to hundreds of tokens, as Gated DeltaNet does.
        A = torch.empty(heads).uniform_(1, 16)
        dt = torch.exp(torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.A_log, self.dt = nn.Parameter(A.log()), nn.Parameter(dt.expm1().log())
        self.norm = nn.Parameter(torch.ones(width))
        self.out = nn.Linear(wide, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x_qkv, less = self.qkv(x), self.without
        if less != "conv":
            padded = F.pad(x_qkv.mT, (3, 0))
            x_qkv = F.conv1d(padded, self.conv, groups=len(self.conv)).mT
        q, k, v = F.silu(x_qkv).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        if less != "unit":
            q, k = l2_normalize(q), l2_normalize(k)
        beta = torch.sigmoid(self.b(x))
        if less == "beta":
            beta = torch.ones_like(beta)
        log_decay = -self.A_log.exp() * F.softplus(self.a(x) + self.dt)
        if less == "decay":
            log_decay = torch.zeros_like(log_decay)
        scale = None if less == "scale" else self.width**-0.5
        y = ops.gated_delta_rule(q, k, v, beta, log_decay, scale=scale)
        if less != "norm":
            y = F.rms_norm(y, (self.width,), self.norm, 1e-6)
        if less != "gate":
            y = y * F.silu(self.z(x)).unflatten(-1, (self.heads, -1))
        return self.out(y.flatten(-2))


class Model(nn.Module):
    """Build a language model from blocks of the layer and, if `mlp` is set, an MLP."""

    def __init__(
        self, tokens: int, layers: int, d: int, heads: int, mlp: bool, without: str
    ):
        super().__init__()
        self.embed = nn.Embedding(tokens, d)
        nn.init.normal_(self.embed.weight, std=0.5)
        self.mixers = nn.ModuleList(Delta(d, heads, 16, without) for _ in range(layers))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
            for _ in range(layers * mlp)
        )
        self.head = nn.Linear(d, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for mixer, mlp in zip_longest(self.mixers, self.mlps):
            x = x + mixer(F.rms_norm(x, x.shape[-1:]))
            if mlp:
                x = x + mlp(F.rms_norm(x, x.shape[-1:]))
        return self.head(F.rms_norm(x, x.shape[-1:]))


def text(length: int = 64, batch: int = 8) -> tuple[Any, Any, int]:
    """Return functions that sample training and test text, and the vocabulary size."""
    characters = corpus("shakespeare")
    letters = sorted(set(characters))
    codes = torch.tensor([letters.index(c) for c in characters])
    parts = codes.split([len(codes) * 9 // 10, len(codes) - len(codes) * 9 // 10])

    def draw(part: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        at = torch.randint(len(part) - length, (batch, 1), generator=generator)
        windows = part[at + torch.arange(length + 1)]
        return windows[:, :-1], windows[:, 1:]

    return *(lambda g, p=p: draw(p, g) for p in parts), len(letters)


def train(model: nn.Module, draw: Any, steps: int, seed: int, rate: float) -> None:
    """Train a model with AdamW, a warm-up and a cosine schedule."""
    generator = Generator().manual_seed(seed)

    def factor(step: int) -> float:
        return min(1, step / 50) * (0.55 + 0.45 * math.cos(math.pi * step / steps))

    fit(
        *(model, lambda step: draw(generator), answer_loss, steps, rate),
        optimizer=partial(torch.optim.AdamW, betas=(0.9, 0.98)),
        schedule=lambda optimizer, *_: LambdaLR(optimizer, factor),
    )


@torch.no_grad()
def test(model: nn.Module, draw: Any, batches: int) -> dict[str, float]:
    """Return the loss and accuracy of a model on data from a separate seed."""
    generator, losses, right = Generator().manual_seed(10**6), [], []
    for _ in range(batches):
        tokens, answers = draw(generator)
        logits, asked = model(tokens), answers >= 0
        losses.append(F.cross_entropy(logits[asked], answers[asked]).item())
        right.append((logits.argmax(-1) == answers)[asked].float().mean().item())
    found = {"loss": losses, "right": right}
    return {name: round(fmean(each), 4) for name, each in found.items()}


def main(name: str, seeds: list[int]) -> None:
    """Train and test the layer without each part, and add the runs to the file."""
    torch.set_num_threads(1)
    if name == "recall":
        sizes = {"tokens": 19, "layers": 1, "d": 32, "heads": 1, "mlp": False}
        draw, unseen, steps, batches = recall_text, recall_text, 300, 20
    else:
        draw, unseen, tokens = text()
        sizes = {"tokens": tokens, "layers": 2, "d": 32, "heads": 2, "mlp": True}
        steps, batches = 200, 100
    config, runs = {"model": sizes, "steps": steps, "rate": 1e-2}, []
    for seed in seeds:
        for row, part in PARTS.items():
            torch.manual_seed(seed)
            model = Model(**sizes, without=part)
            train(model, draw, steps, seed, config["rate"])
            found = test(model, unseen, batches)
            runs.append({"row": row, "seed": seed} | found)
            print(runs[-1], flush=True)
    known = json.loads(OUT.read_text()) if OUT.exists() else {}
    kept = [r for r in known.get(name, {}).get("runs", []) if r["seed"] not in seeds]
    source = provenance(f"python docs/tools/qwen_parts.py {name}")
    known[name] = config | {"runs": kept + runs, "provenance": source}
    OUT.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], [int(seed) for seed in sys.argv[2:]] or [1, 2, 3])
