"""Cutting the time axis into chunks, and joining it again."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

#: Steps per chunk.
LENGTH = 32

#: Rows (steps of all heads of all sequences) computed together. On a CPU
#: few enough that what lies in between stays in the caches; elsewhere
#: enough to keep the device busy.
ROWS = {"cpu": 2048}
ROWS_ELSEWHERE = 65536


def groups(x: Tensor, chunk: int) -> list[tuple[slice, slice]]:
    """Cut the time axis of `[batch, time, heads, d]` into groups.

    A group is some whole chunks, of which the last may be ragged.
    Returns for each its time steps, and the places of its chunks among
    all chunks.
    """
    batch, time, heads, _ = x.shape
    rows = ROWS.get(x.device.type, ROWS_ELSEWHERE)
    per_chunk = max(batch * heads * chunk, 1)
    length = max(rows // per_chunk, 1) * chunk
    out = []
    for start in range(0, time, length):
        stop = min(start + length, time)
        first = start // chunk
        last = first + count(stop - start, chunk)
        out.append((slice(start, stop), slice(first, last)))
    return out


def count(time: int, chunk: int) -> int:
    """Chunks needed for so many steps; the last may be ragged."""
    return -(-time // chunk)


def split(
    x: Tensor, chunk: int, dtype: torch.dtype, fill: float = 0
) -> Tensor:
    """`[batch, time, heads, d]` to `[chunks * batch * heads, chunk, d]`.

    A ragged end is filled with zeros: a zero key writes nothing, and
    what a zero query reads is cut off by `join`. (A decay is filled
    with ones.)
    """
    batch, time, heads, d = x.shape
    n = count(time, chunk)
    out = torch.empty(
        n, batch, heads, chunk, d, dtype=dtype, device=x.device
    )
    whole = time // chunk
    if whole:
        cut = x[:, : whole * chunk].reshape(
            batch, whole, chunk, heads, d
        )
        out[:whole] = cut.permute(1, 0, 3, 2, 4)
    if n > whole:
        ragged = time - whole * chunk
        out[-1, :, :, :ragged] = x[:, whole * chunk :].transpose(1, 2)
        out[-1, :, :, ragged:] = fill
    return out.flatten(0, 2)


def join(x: Tensor, out: Tensor) -> None:
    """The way back, into `out` `[batch, time, heads, d]`."""
    batch, time, heads, d = out.shape
    chunk = x.shape[1]
    n = count(time, chunk)
    x = x.view(n, batch, heads, chunk, d)
    whole = time // chunk
    if whole:
        cut = x[:whole].permute(1, 0, 3, 2, 4)
        out[:, : whole * chunk].view(
            batch, whole, chunk, heads, d
        ).copy_(cut)
    if n > whole:
        out[:, whole * chunk :] = x[
            -1, :, :, : time - whole * chunk
        ].transpose(1, 2)


def each(n: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors that `split` made, one chunk after the other."""
    return zip(*(x.unflatten(0, (n, -1)) for x in tensors), strict=True)


def room(x: Tensor | None) -> Any:
    """Where the gradient of `x` goes; None for what was not given."""
    return None if x is None else x.new_empty(x.shape)


def full_precision(x: Tensor) -> AbstractContextManager:
    """Autocast would push sums on the device of `x` into half precision;
    inside, it is off.
    """
    device = x.device.type
    if not torch.amp.is_autocast_available(device):  # such as "meta"
        return nullcontext()
    return torch.autocast(device, enabled=False)


def backward_pass(function: Callable) -> Callable:
    """Decorator of a custom backward pass written by hand.

    It runs in full precision also under autocast, and says so when it
    is asked for a second derivative: autograd runs a backward pass with
    gradients enabled only if it is to be differentiated again.
    """

    @functools.wraps(function)
    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the efficient implementation has no second "
                "derivative; call the operation with "
                "implementation='naive' for create_graph=True"
            )
        with full_precision(ctx.saved_tensors[0]):
            return function(ctx, *gradients)

    return run


def will_go_back(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may follow, for which states are kept."""
    return torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in tensors
    )
