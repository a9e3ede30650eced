"""Cutting the time axis into chunks, and joining it again."""

from collections.abc import Iterator

import torch
from torch import Tensor

#: Steps per chunk.
LENGTH = 32

#: Rows (steps of all heads of all sequences) computed together. On a CPU
#: few enough that what lies in between stays in the caches; elsewhere
#: enough to keep the device busy.
ROWS = {"cpu": 2048}
ROWS_ELSEWHERE = 65536


def length(decay: Tensor | None) -> int:
    """Steps per chunk. Decays per key channel take half as many: their
    products are formed for all pairs of steps and every channel.
    """
    channels = decay is not None and decay.shape[-1] > 1
    return -(-LENGTH // 2) if channels else LENGTH


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
