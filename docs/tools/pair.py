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
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from export_web import write_web
from moves import NAMES, PLACES, WORDS, Moves, moves
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from fwlab import ops
from fwlab.feature_maps import Identity
from fwlab.files import destination, write_json
from fwlab.fit import answer_loss, fit
from fwlab.layers import FastWeightAttention
from fwlab.layers.causal import Causal, with_state
from fwlab.models import LanguageModel, Mixer
from fwlab.provenance import provenance


@dataclass(frozen=True)
class PairConfig:
    """One model of the pair."""

    rule: Literal["sum", "delta"] = "delta"  # What a write does: add, or correct.
    layers: int = 1  # Number of blocks.
    heads: int = 1  # Heads per block.
    d_model: int = 32  # Width of the model, and of keys and values.
    d_ff: int = 64  # Width inside the MLP.
    conv_size: int = 4  # Words that a query, key or value is made of.
    people: int = 8  # People in each text.
    sentences: int = 24  # Statements and questions in each text.
    batch: int = 32  # Texts per step.
    steps: int = 1500  # Total number of optimiser steps.
    lr: float = 1e-2  # Highest learning rate; falls to 0 along half a cosine.
    warmup: int = 50  # Steps of linear warm-up.
    clip: float = 1.0  # Maximum norm of the gradient.
    eval_every: int = 250  # Steps between two rows of the curve.
    eval_texts: int = 2000  # Unseen texts that test the finished model.
    seed: int = 1337  # Seed of the initial weights and of all texts.


class StrengthSum(FastWeightAttention):
    r"""The sum rule with a write strength: $W + \beta\, v \otimes k$.

    All of the delta rule but its correction. Adding $\beta v$ is enough,
    so this layer shares every line of the ordinary sum rule.
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
    """Build an untrained model; those of both rules begin with the same weights."""
    layer = LAYERS[config.rule]
    mixer = Mixer(
        lambda s: layer(s.d_model, s.heads, conv_size=config.conv_size, **MATCHED)
    )
    sizes = config.layers, config.heads, config.d_model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LanguageModel(len(WORDS), mixer, *sizes, d_ff=config.d_ff)
    if config.rule == "sum":
        twin = pair_model(replace(config, rule="delta"))
        model.load_state_dict(twin.state_dict())
    return model


def texts(config: PairConfig, batch: int, seed: int) -> Moves:
    """Draw texts that no training sees."""
    return moves(batch, config.sentences, config.people, random.Random(seed))


@torch.no_grad()
def score(model: LanguageModel, asked: Moves) -> list[float]:
    """Ask a model the questions of some texts.

    - Returns the shares of right answers: for places that were given once, and for
      people who have moved.
    """
    right = model(asked.tokens).argmax(-1) == asked.labels
    kinds = asked.moved == 0, asked.moved > 0
    return [round(right[kind].float().mean().item(), 4) for kind in kinds]


def train_pair(config: PairConfig, model: LanguageModel) -> list[list[float]]:
    """Train one model of the pair, in place, on the answers to questions.

    - Returns the curve: rows of a step and the scores on texts that it has not seen.
    """
    rng, unseen = random.Random(config.seed), texts(config, 300, config.seed + 1)
    curve: list[list[float]] = []

    def draw(step: int) -> tuple[Tensor, Tensor]:
        made = moves(config.batch, config.sentences, config.people, rng)
        return made.tokens, made.labels

    def evaluate(step: int) -> float:
        curve.append([step, *score(model, unseen)])
        print(*curve[-1], flush=True)
        return curve[-1][-1]

    def rate(step: int) -> float:
        rise = min(1.0, (step + 1) / max(config.warmup, 1))
        return rise * 0.5 * (1 + math.cos(math.pi * step / config.steps))

    fit(
        *(model, draw, answer_loss, config.steps, config.lr),
        optimizer=partial(torch.optim.AdamW, betas=(0.9, 0.99), weight_decay=0.01),
        schedule=lambda optimizer, *_: LambdaLR(optimizer, rate),
        clip=config.clip,
        every=config.eval_every,
        evaluate=evaluate,
    )
    return curve


def pair_result(config: PairConfig, path: Path) -> dict[str, Any]:
    """Train one model of the pair, and write its weights for the site.

    - `path`: of the file of weights.
    - Returns the result as plain values, without its provenance. The
      final scores are those of the weights as written, in float16.
    """
    model, begin = pair_model(config), time.perf_counter()
    curve = train_pair(config, model)
    seconds = time.perf_counter() - begin
    about = {
        "mixer": config.rule,
        **{n: getattr(config, n) for n in ("layers", "heads", "d_model", "conv_size")},
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
    asked = texts(config, config.eval_texts, config.seed + 2)
    kinds = "given once", "changed"
    numbers = int((asked.moved == 0).sum()), int((asked.moved > 0).sum())
    return {
        "config": asdict(config),
        "feature_map": "identity",
        "key_norm": MATCHED["key_norm"],
        "normalize": MATCHED["normalize"],
        "parameters": model.num_parameters(),
        "state_size": model.state_size(0),
        "columns": ["step", *kinds],
        "curve": curve,
        "questions": dict(zip(kinds, numbers, strict=True)),
        "right": dict(zip(kinds, score(model, asked), strict=True)),
        "bytes": size,
        "seconds": round(seconds, 1),
    }


def main(config: PairConfig) -> None:
    """Write the weights and the result into runs/pair-RULE."""
    out = Path("runs", f"pair-{config.rule}")
    weights, about = out / f"{config.rule}.safetensors", out / "result.json"
    for path in (weights, about):
        destination(path)
    command = shlex.join(["python", "docs/tools/pair.py", *sys.argv[1:]])
    write_json(about, pair_result(config, weights) | provenance(command))
    print(out)


if __name__ == "__main__":
    main(tyro.cli(PairConfig))
