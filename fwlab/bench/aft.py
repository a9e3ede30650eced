"""Cases of the Attention Free Transformer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab import ops
from fwlab.bench.case import Case, Problem

BATCH, WIDTH, WINDOW, HEADS = 4, 128, 32, 4


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """All pairs of steps at once, as AFT is often implemented: products of
    a T x T matrix (one per head) with the exponentials of the keys.

    It subtracts one maximum over all keys, and is thus correct only for
    keys of similar size.
    """
    weights = bias.exp().tril()
    e = (k - k.amax(1, keepdim=True)).exp()
    num = torch.einsum("hts,bshc->bthc", weights, e * v)
    den = torch.einsum("hts,bshc->bthc", weights, e)
    return torch.sigmoid(q) * num / den


def toeplitz(band: Tensor, time: int) -> Tensor:
    """Move the rows of `[heads, time, window]` to their positions in
    `[heads, time, time]`, with 0 outside the window.
    """
    window = band.shape[-1]
    wide = F.pad(band.flip(-1), (0, time))[:, :, : time + window - 1]
    # Shift each row one step further to the right than the row above.
    wide = F.pad(wide, (0, 1)).flatten(1)[:, : time * (time + window - 1)]
    return wide.unflatten(1, (time, time + window - 1))[:, :, window - 1 :]


def simple_dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """AFT-simple as AFT-full, with a bias of 0."""
    return full_dense(q, k, v, k.new_zeros(k.shape[1], k.shape[1]))


def full_dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """AFT-full as two matrix products."""
    q, k, v = (x[:, :, None] for x in (q, k, v))
    return dense(q, k, v, bias[None])[:, :, 0]


def local_dense(q: Tensor, k: Tensor, v: Tensor, band: Tensor) -> Tensor:
    """AFT-local as AFT-full, with a bias that is mostly 0."""
    return full_dense(q, k, v, toeplitz(band[None], q.shape[1])[0])


def conv_dense(q: Tensor, k: Tensor, v: Tensor, kernel: Tensor) -> Tensor:
    """AFT-conv as AFT-full, with one bias matrix per head."""
    time = q.shape[1]
    return dense(q, k, v, toeplitz(kernel[:, None].expand(-1, time, -1), time))


def problem(
    dtype: torch.dtype,
    *,
    time: int,
    bias: tuple[int, ...],
    batch: int = BATCH,
    width: int = WIDTH,
    heads: int | None = None,
) -> Problem:
    """Seeded inputs, split into heads where the bias is that of heads."""
    generator = torch.Generator().manual_seed(0)
    shape: tuple[int, ...] = (batch, time, width)
    if heads is not None:
        shape = (batch, time, heads, width // heads)
    inputs = [torch.randn(shape, generator=generator) for _ in range(3)]
    if bias:
        inputs.append(torch.randn(bias, generator=generator))
    dy = torch.randn(shape, generator=generator).to(dtype)
    return [x.to(dtype).requires_grad_() for x in inputs], dy


def _case(
    op: Callable[..., Any],
    other: tuple[str, Callable[..., Any]],
    *bias: int,
    time: int,
    **more: int,
) -> Case:
    return Case(
        op.__name__,
        {"T": time, "batch": BATCH, "width": WIDTH, **more},
        partial(problem, time=time, bias=bias, heads=more.get("heads")),
        {other[0]: other[1], "efficient": partial(op, implementation="efficient")},
        exact=other[0],
        rounds=3,
    )


CASES = (
    _case(ops.aft_full, ("dense einsum", full_dense), 1024, 1024, time=1024),
    _case(
        ops.aft_simple,
        ("naive loop", partial(ops.aft_simple, implementation="naive")),
        time=2048,
    ),
    _case(
        ops.aft_local,
        ("dense einsum", local_dense),
        4096,
        WINDOW,
        time=4096,
        window=WINDOW,
    ),
    _case(
        ops.aft_conv,
        ("dense einsum", conv_dense),
        HEADS,
        WINDOW,
        time=2048,
        window=WINDOW,
        heads=HEADS,
    ),
)
