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
from dataclasses import asdict, dataclass
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
from fwlab.files import write_json
from fwlab.fit import answer_loss, fit
from fwlab.layers import FastWeightAttention
from fwlab.layers.causal import Causal
from fwlab.layers.fast_weight_attention import RULES
from fwlab.models import LanguageModel, Mixer
from fwlab.provenance import provenance


def strong_sum(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, **options: Any) -> Any:
    """Apply the sum rule with write strengths: the delta rule without correction."""
    return ops.sum_rule(q, k, beta[..., None] * v, **options)


class Layer(FastWeightAttention):
    """Extend `FastWeightAttention` by the rule "strong_sum"."""

    rules = RULES | {"strong_sum": RULES["delta"]._replace(operation=strong_sum)}
    step = Causal.step  # The fast step supports only operations of the package.


@dataclass(frozen=True)
class PairConfig:
    """Configure the training of one model of the pair."""

    rule: Literal["sum", "delta"] = "delta"  # Update rule: add, or correct.
    layers: int = 1  # Number of blocks of the model.
    heads: int = 1  # Number of heads per block.
    d_model: int = 32  # Width of the model, and of keys and values.
    d_ff: int = 64  # Width inside the MLP.
    conv_size: int = 4  # Width of the short convolution, in words.
    people: int = 8  # Number of people in each text.
    sentences: int = 24  # Number of statements and questions in each text.
    batch: int = 32  # Number of texts per optimiser step.
    steps: int = 1500  # Total number of optimiser steps.
    lr: float = 1e-2  # Highest learning rate; falls to 0 along half a cosine.
    warmup: int = 50  # Steps of linear warm-up.
    clip: float = 1.0  # Maximum norm of the gradient.
    eval_every: int = 250  # Optimiser steps between two rows of the curve.
    eval_texts: int = 2000  # Number of unseen texts that test the finished model.
    seed: int = 1337  # Seed of the initial weights and of all texts.


def pair_model(config: PairConfig) -> LanguageModel:
    """Build an untrained model. The models of both rules have equal initial weights."""
    rule = {"sum": "strong_sum", "delta": "delta"}[config.rule]
    options = {"key_norm": "l2", "normalize": False, "conv_size": config.conv_size}
    mixer = Mixer(lambda s: Layer(s.d_model, s.heads, Identity(), rule, **options))
    sizes = config.layers, config.heads, config.d_model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return LanguageModel(len(WORDS), mixer, *sizes, d_ff=config.d_ff)


def texts(config: PairConfig, batch: int, seed: int) -> Moves:
    """Generate test texts with a seed that training does not use."""
    return moves(batch, config.sentences, config.people, random.Random(seed))


@torch.no_grad()
def score(model: LanguageModel, asked: Moves) -> dict[str, float]:
    """Return the accuracy for people who never moved, and for people who moved."""
    right = model(asked.tokens).argmax(-1) == asked.labels
    kinds = {"given once": asked.moved == 0, "changed": asked.moved > 0}
    return {k: round(right[of].float().mean().item(), 4) for k, of in kinds.items()}


def train_pair(config: PairConfig, model: LanguageModel) -> list[list[float]]:
    """Train one model of the pair, in place, on the answers to questions.

    - Returns the curve: rows of a step and the scores on texts that it has not seen.
    """
    rng, unseen = random.Random(config.seed), texts(config, 300, config.seed + 1)
    curve: list[list[float]] = []

    def evaluate(step: int) -> float:
        curve.append([step, *score(model, unseen).values()])
        print(*curve[-1], flush=True)
        return curve[-1][-1]

    def rate(step: int) -> float:
        rise = min(1.0, (step + 1) / max(config.warmup, 1))
        return rise * 0.5 * (1 + math.cos(math.pi * step / config.steps))

    fit(
        model,
        lambda step: moves(config.batch, config.sentences, config.people, rng)[:2],
        answer_loss,
        config.steps,
        config.lr,
        optimizer=partial(torch.optim.AdamW, betas=(0.9, 0.99), weight_decay=0.01),
        schedule=lambda optimizer, *_: LambdaLR(optimizer, rate),
        clip=config.clip,
        every=config.eval_every,
        evaluate=evaluate,
    )
    return curve


def main(config: PairConfig) -> None:
    """Train a model, and write weights and results into runs/pair-RULE."""
    out, model = Path("runs", f"pair-{config.rule}"), pair_model(config)
    curve = train_pair(config, model)
    about: dict[str, Any] = {
        "mixer": config.rule,
        **{n: getattr(config, n) for n in ("layers", "heads", "d_model", "conv_size")},
        **{"feature_map": "unit", "strength": True, "normalize": False},
        **{"names": NAMES, "places": PLACES, "words": WORDS},
    }
    size = write_web(out / f"{config.rule}.safetensors", model, about)
    model.half().float()
    asked = texts(config, config.eval_texts, config.seed + 2)
    result = {
        "config": asdict(config),
        "parameters": model.num_parameters(),
        "state_size": model.state_size(0),
        "columns": ["step", "given once", "changed"],
        "curve": curve,
        "right": score(model, asked),
        "bytes": size,
    }
    command = shlex.join(["python", "docs/tools/pair.py", *sys.argv[1:]])
    write_json(out / "result.json", result | provenance(command))
    print(out)


if __name__ == "__main__":
    main(tyro.cli(PairConfig))
