"""Cutting the time axis into chunks, and joining it again."""

from collections.abc import Iterator

import torch
from torch import Tensor

#: Steps computed together, in several chunks: what lies in between for
#: so many still fits into the caches. More would only cost memory.
GROUP = 256


def groups(time: int, chunk: int) -> Iterator[tuple[slice, slice]]:
    """Walk over the time axis in groups of whole chunks.

    Yields the time steps of each group, and the places of its chunks
    among all chunks.
    """
    length = max(GROUP // chunk, 1) * chunk
    for start in range(0, time, length):
        stop = min(start + length, time)
        first = start // chunk
        yield (
            slice(start, stop),
            slice(first, first + count(stop - start, chunk)),
        )


def count(time: int, chunk: int) -> int:
    """Chunks needed for so many steps; the last may be ragged."""
    return -(-time // chunk)


def split(x: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
    """`[batch, time, heads, d]` to `[chunks * batch * heads, chunk, d]`.

    A ragged end is filled with zeros: a zero key writes nothing, and
    what a zero query reads is cut off by `join`.
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
        out[-1, :, :, ragged:] = 0
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


def refuse_second_derivative() -> None:
    """Call first in a custom backward pass.

    Autograd runs a backward pass with gradients enabled only if it is
    asked to differentiate that pass again.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the efficient implementation has no second derivative; "
            "call the operation with implementation='naive' for create_graph=True"
        )
