"""The feedback stack: original, shared, and with the memory as it is."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from fwlab import ops
from fwlab.ops.feedback import efficient
from problems.row import Inputs, Row

HEADS, WIDTH, LAYERS = 2, 6, 2


def weights(
    generator: Generator,
    *,
    layers: int,
    d: int,
    d_ff: int,
    features: int,
    shared: bool,
    normalize: bool,
    heads: int = HEADS,
) -> ops.FeedbackWeights:
    """Random weights in float64 that keep the residual stream in range."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def scales(n: int) -> Tensor:
        return 1 + 0.2 * random(n, d)

    groups = 1 if shared else layers
    return ops.FeedbackWeights(
        merge=random(layers + 1),
        norm_mixer=scales(layers),
        to_q=random(layers, d, d) / d**0.5,
        to_k=random(groups, d, d) / d**0.5,
        to_v=random(groups, d, d) / d**0.5,
        positions=random(d // heads, features),
        to_out=random(layers, d, d) / d**0.5,
        norm_mlp=scales(layers),
        expand=random(layers, d_ff, d) / d**0.5,
        contract=random(layers, d, d_ff) / d_ff**0.5,
        norm_memory=scales(groups) if normalize else None,
    )


def feedback(*inputs: Tensor, heads: int = HEADS, **options: Any) -> Any:
    x, *tensors = inputs
    return ops.feedback(x, ops.FeedbackWeights(*tensors), heads=heads, **options)


def make(
    time: int, generator: Generator, with_state: bool, *, shared: bool, normalize: bool
) -> tuple[Inputs, ops.FeedbackState | None]:
    d, layers, past = WIDTH, LAYERS, 3

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    w = weights(
        generator,
        layers=layers,
        d=d,
        d_ff=5,
        features=4,
        shared=shared,
        normalize=normalize,
    )
    inputs = [random(2, time, d), *(x for x in w if x is not None)]
    if not with_state:
        return inputs, None
    shape = (2, past, len(w.to_k), HEADS, d // HEADS)
    return inputs, ops.FeedbackState(random(*shape), random(*shape), None)


def cut(inputs: Inputs, start: int, stop: int) -> Inputs:
    x, *tensors = inputs
    return [x[:, start:stop], *tensors]


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficient, "BLOCK", 2)


def large(time: int, *, shared: bool, normalize: bool) -> Inputs:
    """Narrow except for the first row: naive saves gigabytes."""
    d = 128 if normalize and not shared else 32
    generator = torch.Generator().manual_seed(0)
    w = weights(
        generator,
        layers=1,
        d=d,
        d_ff=4 * d,
        features=16,
        shared=shared,
        normalize=normalize,
    )
    x = torch.randn(1, time, d, generator=generator)
    return [x, *(part.float() for part in w if part is not None)]


def _row(**form: bool) -> Row:
    return Row(
        feedback, partial(make, **form), partial(large, **form), cut=cut, small=small
    )


ROWS = {
    "feedback": _row(shared=False, normalize=True),
    "feedback-shared": _row(shared=True, normalize=True),
    "feedback-plain-memory": _row(shared=False, normalize=False),
}
