r"""Train the two models of the home page, which differ in one term.

    python docs/tools/pair.py --rule sum
    python docs/tools/pair.py --rule delta

Both have the same parameters with the same initial values, the same keys
of length 1 and no normaliser, and see the same texts. One adds, the other
writes only the difference:

$$W_t = W_{t-1} + \beta_t\, v_t \otimes k_t, \qquad
W_t = W_{t-1} + \beta_t\, (v_t - W_{t-1} k_t) \otimes k_t$$

They have a single layer. With two, the first could look up what a key
holds, and the second write the difference, also with the sum rule.
"""

import math
import random
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
import tyro
from export_web import write_web
from moves import NAMES, PLACES, WORDS, Moves, moves
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import ops
from fwlab.feature_maps import Identity
from fwlab.files import destination, write_json
from fwlab.layers import FastWeightAttention
from fwlab.layers.causal import Causal, with_state
from fwlab.models import LanguageModel, Mixer
from fwlab.provenance import provenance


@dataclass(frozen=True)
class PairConfig:
    """One model of the pair."""

    rule: Literal["sum", "delta"] = "delta"
    """What a write does: add, or correct."""
    layers: int = 1
    """Number of blocks."""
    heads: int = 1
    """Heads per block."""
    d_model: int = 32
    """Width of the model, and of keys and values."""
    d_ff: int = 64
    """Width inside the MLP."""
    conv_size: int = 4
    """Words that a query, key or value is made of."""
    people: int = 8
    """People in each text."""
    sentences: int = 24
    """Statements and questions in each text."""
    batch: int = 32
    """Texts per step."""
    steps: int = 1500
    """Total number of optimiser steps."""
    lr: float = 1e-2
    """Learning rate after the warm-up; falls to 0 along half a cosine."""
    warmup: int = 50
    """Steps of linear warm-up."""
    clip: float = 1.0
    """Maximum norm of the gradient."""
    eval_every: int = 250
    """Steps between two rows of the curve."""
    eval_texts: int = 2000
    """Unseen texts with which the finished model is tested."""
    seed: int = 1337
    """Seed of the initial weights and of all texts."""

    def lr_at(self, step: int) -> float:
        """Return the learning rate of the step after this many, from 0."""
        rise = min(1.0, (step + 1) / max(self.warmup, 1))
        return self.lr * rise * 0.5 * (1 + math.cos(math.pi * step / self.steps))


class StrengthSum(FastWeightAttention):
    r"""The sum rule with a write strength: $W + \beta\, v \otimes k$.

    All of the delta rule but its correction. Adding $\beta v$ is enough,
    so this layer shares every line of the ordinary sum rule.

    - `d_model`, `heads`, `options`: as for `FastWeightAttention`.
    """

    step = Causal.step  # by way of `_mix`

    def _apply_rule(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Any,
        fading: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """Add the values times their strengths."""
        options |= {"normalize": False, "state": state}
        v = self.gates["beta"](x, k)[..., None] * v
        return with_state(ops.sum_rule(q, k, v, **options))


#: What both layers of the pair are given.
MATCHED: dict[str, Any] = {
    "feature_map": Identity(),
    "key_norm": "l2",
    "normalize": False,
}
LAYERS = {"sum": StrengthSum, "delta": FastWeightAttention}


def pair_model(config: PairConfig) -> LanguageModel:
    """Make an untrained model; those of both rules begin with the same weights.

    - `config`: the run.
    - Returns the model.
    """
    layer = LAYERS[config.rule]
    mixer = Mixer(
        lambda s: layer(s.d_model, s.heads, conv_size=config.conv_size, **MATCHED)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LanguageModel(
            len(WORDS),
            mixer,
            layers=config.layers,
            heads=config.heads,
            d_model=config.d_model,
            d_ff=config.d_ff,
        )
    if config.rule == "sum":
        twin = pair_model(replace(config, rule="delta"))
        model.load_state_dict(twin.state_dict())
    return model


class Scores(NamedTuple):
    """Shares of questions that are answered correctly.

    - `given`: those for a place that was given once.
    - `changed`: those for a person who has moved.
    """

    given: float
    changed: float


@torch.no_grad()
def score(model: LanguageModel, texts: Moves) -> Scores:
    """Ask a model the questions of some texts.

    - `model`: of the pair.
    - `texts`: from `moves`.
    - Returns the `Scores`.
    """
    right = model(texts.tokens).argmax(-1) == texts.labels
    given, changed = texts.moved == 0, texts.moved > 0
    return Scores(*(right[asked].float().mean().item() for asked in (given, changed)))


def train_pair(
    config: PairConfig, model: LanguageModel
) -> Iterator[tuple[int, float, Scores | None]]:
    """Train one model of the pair on the answers to questions.

    - `config`: the run.
    - `model`: from `pair_model`; trained in place.
    - Returns an iterator of `(step, loss, scores)`; each item trains one
      step, and scores come every `eval_every` steps.
    - Raises `FloatingPointError` if a loss is not finite.
    """
    rng = random.Random(config.seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), config.lr, betas=(0.9, 0.99), weight_decay=0.01
    )
    unseen = moves(300, config.sentences, config.people, random.Random(config.seed + 1))
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.lr_at(step)
        texts = moves(config.batch, config.sentences, config.people, rng)
        logits = model(texts.tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, texts.labels.flatten(), ignore_index=-1)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"training diverged: the loss of step {step + 1} is not finite"
            )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        due = (step + 1) % config.eval_every == 0
        yield step + 1, loss.item(), score(model, unseen) if due else None


def pair_result(config: PairConfig, path: Path) -> dict[str, Any]:
    """Train one model of the pair, and write its weights for the site.

    - `config`: the run.
    - `path`: of the file of weights.
    - Returns the result as plain values, without its provenance. The
      final scores are those of the weights as written, in float16.
    """
    model, curve, begin = pair_model(config), [], time.perf_counter()
    for step, loss, scores in train_pair(config, model):
        if scores:
            curve.append([step, *(round(x, 4) for x in (loss, *scores))])
            print(f"step {step}: loss {loss:.3f}, {scores}", flush=True)
    seconds = time.perf_counter() - begin
    about = {
        "mixer": config.rule,
        "layers": config.layers,
        "heads": config.heads,
        "d_model": config.d_model,
        "conv_size": config.conv_size,
        "feature_map": "unit",
        "strength": True,
        "normalize": MATCHED["normalize"],
        "names": NAMES,
        "places": PLACES,
        "words": WORDS,
    }
    size = write_web(path, model, about)
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    rng = random.Random(config.seed + 2)
    texts = moves(config.eval_texts, config.sentences, config.people, rng)
    given, changed = score(model, texts)
    return {
        "config": asdict(config),
        "feature_map": "identity",
        "key_norm": MATCHED["key_norm"],
        "normalize": MATCHED["normalize"],
        "parameters": model.num_parameters(),
        "state_size": model.state_size(0),
        "shapes": {name: list(p.shape) for name, p in model.named_parameters()},
        "columns": ["step", "training loss", "given once", "changed"],
        "curve": curve,
        "questions": {
            "given once": int((texts.moved == 0).sum()),
            "changed": int((texts.moved > 0).sum()),
        },
        "right": {"given once": round(given, 4), "changed": round(changed, 4)},
        "bytes": size,
        "seconds": round(seconds, 1),
    }


def main(
    config: Annotated[PairConfig, tyro.conf.arg(name="")], out: Path | None = None
) -> None:
    """Train one of the two models on the home page of the site.

    They differ only in the rule: sum or delta.

    Args:
        config: The run.
        out: Folder for RULE.safetensors and result.json; default:
            runs/pair-RULE.
    """
    out = out or Path("runs", f"pair-{config.rule}")
    weights, about = out / f"{config.rule}.safetensors", out / "result.json"
    for path in (weights, about):
        destination(path)
    command = shlex.join(["python", "docs/tools/pair.py", *sys.argv[1:]])
    write_json(about, pair_result(config, weights) | provenance(command))
    print(out)


if __name__ == "__main__":
    tyro.cli(main)
