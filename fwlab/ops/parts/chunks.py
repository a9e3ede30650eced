"""Cutting the time axis into chunks, and joining it again."""

from collections.abc import Iterator

import torch
from torch import Tensor

#: Steps per chunk.
LENGTH = 32
#: The maximum steps of a sequence without states that is one chunk: all
#: pairs of steps of a longer one cost more than to carry a state.
WHOLE = 80

#: Rows (steps of all heads of all sequences) computed together. On a
#: CPU few enough that intermediate results stay in the caches; on other
#: devices enough to keep them busy.
ROWS = {"cpu": 3072}
ROWS_ELSEWHERE = 65536


def length(decay: Tensor | None) -> int:
    """Steps per chunk; half as many with one decay per key channel.

    Their products are formed for all pairs of steps and every channel.
    """
    channels = decay is not None and decay.shape[-1] > 1
    return -(-LENGTH // 2) if channels else LENGTH


def groups(x: Tensor, chunk: int) -> list[tuple[slice, slice]]:
    """Cut the time axis of `[batch, time, heads, d]` into groups.

    A group is a number of chunks, of which the last may be shorter. Returns two slices
    for each group: its steps, and the indices of its chunks.
    """
    batch, time, heads, _ = x.shape
    rows = ROWS.get(x.device.type, ROWS_ELSEWHERE)
    per_chunk = max(batch * heads * chunk, 1)
    length = max(rows // per_chunk, 1) * chunk
    out = []
    for start in range(0, time, length):
        stop = min(start + length, time)
        first = start // chunk
        end = first + count(stop - start, chunk)
        out.append((slice(start, stop), slice(first, end)))
    return out


def count(time: int, chunk: int) -> int:
    """How many chunks hold `time` steps; the last may be shorter."""
    return -(-time // chunk)


def split(
    parts: list[Tensor], chunk: int, dtype: torch.dtype, fill: float = 0
) -> Tensor:
    """Cut the time axis into chunks, in another precision.

    - `parts`: tensors `[batch, time, heads, d]`. A chunk holds the rows of the first
      one, then those of the next.
    - Returns `[chunks * batch * heads, len(parts) * chunk, d]` in `dtype`. If the
      whole sequence is one chunk, it may be a view.

    A short last chunk is filled up with zeros: a zero key writes nothing, and `join`
    drops what a zero query reads. (Decays are filled up with ones.)
    """
    batch, time, heads, d = parts[0].shape
    if time == chunk:  # the same in fewer operators
        first, *more = (x.transpose(1, 2).to(dtype) for x in parts)
        one = torch.cat([first, *more], 2) if more else first
        return one.reshape(batch * heads, -1, d)
    n, rows = count(time, chunk), len(parts) * chunk
    shape = n, batch, heads, rows, d
    out = torch.empty(shape, dtype=dtype, device=parts[0].device)
    whole = time // chunk
    for x, place in zip(parts, out.split(chunk, 3), strict=True):
        if whole:
            cut = x[:, : whole * chunk].reshape(batch, whole, chunk, heads, d)
            place[:whole] = cut.permute(1, 0, 3, 2, 4)
        if n > whole:
            ragged = time - whole * chunk
            end = x[:, whole * chunk :].transpose(1, 2)
            place[-1, :, :, :ragged] = end
            place[-1, :, :, ragged:] = fill
    return out.flatten(0, 2)


def join(x: Tensor, out: Tensor) -> None:
    """Copy chunks `x`, as `split` returns them for one tensor, into `out`
    `[batch, time, heads, d]`.
    """
    batch, time, heads, d = out.shape
    chunk = x.shape[1]
    n = count(time, chunk)
    x = x.unflatten(0, (n, batch, heads))
    whole = time // chunk
    if whole:
        cut = x[:whole].permute(1, 0, 3, 2, 4)
        out[:, : whole * chunk].view(batch, whole, chunk, heads, d).copy_(cut)
    if n > whole:
        out[:, whole * chunk :] = x[-1, :, :, : time - whole * chunk].transpose(1, 2)


def each(n: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors that `split` returned, chunk by chunk."""
    return zip(*(x.unflatten(0, (n, -1)) for x in tensors), strict=True)
