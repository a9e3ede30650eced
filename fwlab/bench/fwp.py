"""Cases of the fast weight programmer of 1991."""

from functools import partial

import torch
from torch import Tensor

from fwlab import ops
from fwlab.bench.case import Case, Problem

BATCH, HEADS, WIDTH = 4, 4, 32


def problem(dtype: torch.dtype, *, time: int) -> Problem:
    """Writes that are small enough not to saturate tanh."""
    generator = torch.Generator().manual_seed(0)
    a, b, x, dy = (
        torch.randn(BATCH, time, HEADS, WIDTH, generator=generator) for _ in range(4)
    )
    inputs = [(part / scale).to(dtype) for part, scale in ((a, 4), (b, 4), (x, 1))]
    return [part.requires_grad_() for part in inputs], dy.to(dtype)


def stored(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """The same loop as in efficient, but it keeps all states."""
    W, states = a.new_zeros(*a.shape[:1], *a.shape[2:], b.shape[-1]), []
    for outer in (a[..., :, None] * b[..., None, :]).unbind(1):
        W = torch.tanh(W + outer)
        states.append(W)
    return (torch.stack(states, 1) * x[..., None, :]).sum(-1)


def _case(time: int) -> Case:
    return Case(
        "fwp",
        {"T": time, "batch": BATCH, "heads": HEADS, "width": WIDTH},
        partial(problem, time=time),
        {
            "states kept": stored,
            "naive": partial(ops.fwp, implementation="naive"),
            "efficient": partial(ops.fwp, implementation="efficient"),
        },
    )


CASES = (_case(1024),)
