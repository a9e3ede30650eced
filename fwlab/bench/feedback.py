"""Cases of the Feedback Transformer."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fwlab import ops
from fwlab.bench.case import Case, Problem

BATCH, HEADS, WIDTH = 4, 4, 128


def problem(
    dtype: torch.dtype,
    *,
    time: int,
    layers: int,
    groups: int,
    batch: int = BATCH,
    width: int = WIDTH,
    heads: int = HEADS,
) -> Problem:
    """Weights that keep the residual stream and the scores in range."""
    generator = torch.Generator().manual_seed(0)
    d, key = width, width // heads

    def random(*shape: int, into: int = 1) -> Tensor:
        return torch.randn(shape, generator=generator) / into**0.5

    inputs = [
        random(batch, time, d),
        random(layers + 1),
        1 + 0.1 * random(layers, d),
        random(layers, d, d, into=d),
        random(groups, d, d, into=d),
        random(groups, d, d, into=d),
        random(key, key, into=key),
        random(layers, d, d, into=d),
        1 + 0.1 * random(layers, d),
        random(layers, 4 * d, d, into=d),
        random(layers, d, 4 * d, into=4 * d),
        1 + 0.1 * random(groups, d),
    ]
    dy = random(batch, time, d).to(dtype)
    return [x.to(dtype).requires_grad_() for x in inputs], dy


def stack(x: Tensor, *weights: Tensor, implementation: str, heads: int = HEADS) -> Any:
    """The operation as a function of tensors."""
    return ops.feedback(
        x, ops.FeedbackWeights(*weights), heads=heads, implementation=implementation
    )


def _case(layers: int, groups: int, time: int, rounds: int) -> Case:
    naive, efficient = (
        partial(stack, implementation=name) for name in ("naive", "efficient")
    )
    return Case(
        "feedback-shared" if groups < layers else "feedback",
        {"T": time, "layers": layers, "batch": BATCH, "heads": HEADS, "width": WIDTH},
        partial(problem, time=time, layers=layers, groups=groups),
        {"re-projecting loop": naive, "efficient": efficient},
        exact="re-projecting loop",
        rounds=rounds,
    )


CASES = (
    _case(layers=1, groups=1, time=512, rounds=3),
    _case(layers=4, groups=4, time=256, rounds=1),
    _case(layers=4, groups=1, time=256, rounds=1),
)
