"""The fast weight programmer of 1991, with and without an activation."""

from functools import partial

import pytest
import torch
from torch import Generator, Tensor

from fwlab import ops
from fwlab.ops.fwp import efficient
from problems import rules
from problems.row import Inputs, Row

KEY, VALUE, HEADS = 6, 5, 3


def make(
    time: int, generator: Generator, with_state: bool
) -> tuple[Inputs, Tensor | None]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = [random(2, time, HEADS, width) / 2 for width in (VALUE, KEY, KEY)]
    for x in inputs:
        x[:, 2::7] = 0.0
    return inputs, random(2, HEADS, VALUE, KEY) if with_state else None


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficient, "SEGMENT", 2)
    rules.small(monkeypatch)


def large(time: int) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, time, 4, 32, generator=generator) / 8 for _ in range(3)]


ROWS = {
    "fwp-tanh": Row(partial(ops.fwp, activation=torch.tanh), make, large, small=small),
    "fwp-linear": Row(partial(ops.fwp, activation=None), make, large, small=small),
}
