"""What the parts of Qwen3.5's layer are for: each taken away in turn.

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

from fwlab.data import corpus
from fwlab.exercises.course.to_qwen import recall_text
from fwlab.fit import answer_loss, fit
from fwlab.layers import FastWeightAttention
from fwlab.provenance import provenance

OUT = Path(__file__).parents[2] / "fwlab" / "data" / "results" / "qwen-parts.json"
#: What is taken from the layer, as options of it; a convolution over the token itself
#: leaves the SiLU.
PARTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "convolution": {"conv_size": 1},
    "unit keys": {"key_norm": None, "key_eps": 0},
    "scale": {"scale": None},
    "decay": {"rule": "delta"},
    "strength": {},  # see `Full`
    "norm": {"out_norm": False},
    "gate": {"out_gate": False},
}


class Full(nn.Module):
    """Write with strength 1, in place of a gate."""

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return k.new_ones(k.shape[:-1])


def layer(d: int, heads: int, without: str) -> FastWeightAttention:
    """Make the layer of Qwen3.5, less one part."""
    options = {"head_width": 16, **PARTS[without]}
    made = FastWeightAttention.like("qwen3.5", d, heads, **options)
    if without == "strength":
        made.gates["beta"] = Full()
    return made


class Model(nn.Module):
    """Blocks of the layer and, where it is wanted, an MLP."""

    def __init__(
        self, tokens: int, layers: int, d: int, heads: int, mlp: bool, without: str
    ):
        super().__init__()
        self.embed = nn.Embedding(tokens, d)
        nn.init.normal_(self.embed.weight, std=0.5)
        self.mixers = nn.ModuleList(layer(d, heads, without) for _ in range(layers))
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
    """Draws windows of Tiny Shakespeare: of its first 90 %, and of the rest."""
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
    """Adam, with a warm-up and a cosine."""
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
    """Loss, and the share of right answers, on data of its own seed."""
    generator, losses, right = Generator().manual_seed(10**6), [], []
    for _ in range(batches):
        tokens, answers = draw(generator)
        logits, asked = model(tokens), answers >= 0
        losses.append(F.cross_entropy(logits[asked], answers[asked]).item())
        right.append((logits.argmax(-1) == answers)[asked].float().mean().item())
    found = {"loss": losses, "right": right}
    return {name: round(fmean(each), 4) for name, each in found.items()}


def main(name: str, seeds: list[int]) -> None:
    """Train and test every row, and add the runs to the file."""
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
        for row in PARTS:
            torch.manual_seed(seed)
            model = Model(**sizes, without=row)
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
