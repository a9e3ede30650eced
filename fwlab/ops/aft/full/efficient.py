r"""# AFT-full in tiles

A *tile* of rows takes two matrix products, as long as no factor is too large. Rows with
larger factors are recomputed in small blocks, each at most as long as all blocks before
it, since few keys exceed all earlier keys by far. The remaining rows need a softmax.
AFT-local and AFT-conv use the same tiles, over the keys of a window.
"""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab.ops._recurrence import Recurrence

#: Minimum and maximum number of rows per block, and per small block for large factors.
BLOCK, SMALL = (128, 256), (4, 32)
#: Maximum number of (row, key) pairs in one softmax, to limit its memory.
ROOM = 2**20
#: Bounds for the matrix products, far from the limits of float32: the maximum of $e^w$,
#: the maximum of $e^{K - c}$ and of its product with $V$, and the minimum sum.
MAX_WEIGHT, MAX_FACTOR, MIN_SUM = 1e8, 1e18, 1e-10
#: Keys this far below the maximum get a weight of 0, because processors are slow with
#: numbers near the lower limit of float32.
FAINT = -80.0


def aft_full(q: Tensor, k: Tensor, v: Tensor, w: Tensor, causal: bool) -> Tensor:
    """Compute AFT-full as a single tile, with the arguments of the naive version."""
    reach = k.shape[1] - q.shape[1] if causal else -1
    return tiles((q, k, v, w[None, None], None, None), reach)[0]


#: Keys and values, `[tiles, groups, keys, batch, c]`. Only the last pair has biases.
Pairs = list[tuple[Tensor, Tensor]]


def _forward(x: Any, keep: bool, reach: int) -> Any:
    r"""Compute AFT (Eq. 2) for the rows of all tiles.

    With $c$ the maximum of the keys that *all* rows of a block see,

    $$E = e^{w}, \quad X = e^{K - c}, \quad
      m = \frac{E\, (X \odot V)}{E\, X} \tag{e5}$$

    takes one matrix product for each sum. It is exact as long as no factor that the row
    sees is large and the sum is not tiny. A row that fails this test is recomputed in a
    small block, which has another $c$, and the negative inverse of its sum is saved. If
    the row fails there as well, a softmax computes it, and 0 is saved. A key that a row
    does not see has $E = 0$: it adds exactly 0 to the sums and is not tested, so it
    changes no bit of the result.

    - `x`: the arguments of `tiles`.
    """
    q, (_, groups, rows, _) = x[0], x[3].shape
    y, made, blocks = torch.empty_like(q), [], [slice(0, rows)]
    if reach >= 0 and rows > BLOCK[0]:
        blocks = _blocks(0, rows, *BLOCK)
    for block in blocks:
        inverse, mean, single, _ = _means(x, reach, block)
        if single is not None:
            _compute_singles(x, reach, block, single, inverse, mean)
        made.append((inverse, mean))
    inverse, mean = made[0]
    if len(made) > 1:
        inverse, mean = (torch.cat(parts, 2) for parts in zip(*made, strict=True))
    gate = _steps(torch.sigmoid(q), rows, rows, groups)
    torch.mul(gate, mean, out=_steps(y, rows, rows, groups))  # Eq. 2
    return (y,), ((inverse,) if keep else ())


def _means(
    x: Any, reach: int, block: slice
) -> tuple[Tensor, Tensor, Tensor | None, Pairs]:
    """Compute the mean of each row of a block by matrix products (Eq. e5).

    - Returns the inverse of the sums, 0 for rows that fail the test; the means; which
      rows fail, or None; and the keys and values that the block sees.
    """
    pairs, E, factors, unsafe = _terms(x, reach, block)
    total, mean = (
        (E @ part.flatten(3)).unflatten(3, part.shape[3:]) for part in factors
    )
    if unsafe is None and total.amin() >= MIN_SUM:
        inverse = total.reciprocal_()
        return inverse, mean.mul_(inverse), None, pairs
    single = ~(total >= MIN_SUM)  # NaN also fails this test.
    if unsafe is not None:
        single |= unsafe
    inverse = total.reciprocal_().masked_fill_(single, 0)
    return inverse, mean.mul_(inverse), single, pairs


def _compute_singles(
    x: Any, reach: int, block: slice, single: Tensor, inverse: Tensor, mean: Tensor
) -> None:
    """Recompute inexact means (Eq. e5) in smaller blocks, or else by a softmax."""
    x, n = _first_tiles(x, single)
    for small in _blocks(block.start, block.stop, *SMALL) if reach >= 0 else [block]:
        now = slice(small.start - block.start, small.stop - block.start)
        here, to_inverse, to_mean = (x[:n, :, now] for x in (single, inverse, mean))
        inverses, means, alone, pairs = _means(x, reach, small)
        to_inverse.copy_(torch.where(here, -inverses, to_inverse))
        to_mean.copy_(torch.where(here, means, to_mean))
        if alone is None:
            continue
        alone, rows = alone & here, to_mean.movedim(2, -1)
        for at in _columns(alone, pairs):
            weights, values = _softmax(pairs, x[3], reach, small, at)
            means = (weights @ values[..., None])[..., 0]
            rows[at] = torch.where(alone.movedim(2, -1)[at], means, rows[at])


def _first_tiles(x: Any, single: Tensor) -> tuple[Any, int]:
    """Return inputs up to the last tile with a row in `single`, and count the tiles."""
    q, k, v, w, L, m = x
    rows, size = w.shape[2:]
    n = int(single.flatten(1).any(1).nonzero().amax()) + 1
    keys = (n - 1) * rows + size
    if L is not None:
        L, m = (part[:, : part.shape[1] // len(single) * n] for part in (L, m))
    return (q[:, : n * rows], k[:, :keys], v[:, :keys], w[:n], L, m), n


def _backward(x: Any, kept: Any, gradients: Any, needed: Any, reach: int) -> Any:
    r"""Recompute the means (Eq. e5), and return the gradients of all inputs of `tiles`.

    With $p = E X / (E X)$ the weights of a row, $dV = p^\top dm$, and $w$ and $K$ both
    get $p\, dm\, (V - m)$, summed over the rows or columns that share them:

    $$G = \frac{dm}{E X}, \qquad dV = X \odot E^\top G \tag{e6}$$
    $$dK = X \odot \big(V \odot E^\top G - E^\top (G m)\big) \tag{e7}$$
    $$dw = E \odot \big(G\, (X V)^\top - (G m)\, X^\top\big) \tag{e8}$$

    The gate is part of the gradient, $dm = \sigma(q)\, dy$, and $y = \sigma(q)\, m$.
    """
    q, w = x[0], x[3]
    _, groups, rows, _ = w.shape
    inverse, y = kept
    gate, dy = torch.sigmoid(q), gradients[0]
    dq = dy * y
    dq.addcmul_(dq, gate, value=-1)
    slopes = q.new_empty(2, *inverse.shape)  # The slopes are $G m$ and $G$.
    gate, dy, y = (_steps(part, rows, rows, groups) for part in (gate, dy, y))
    torch.mul(torch.mul(dy, inverse, out=slopes[1]), y, out=slopes[0])
    slopes[1].mul_(gate)
    dw, made, blocks = torch.zeros_like(w), [], [slice(0, rows)]
    if reach >= 0 and rows > BLOCK[0]:
        blocks = _blocks(0, rows, *BLOCK)
    for block in blocks:
        here, slope = inverse[:, :, block], slopes[:, :, :, block]
        if here.amin() > 0:
            made.append(_pull(x, reach, block, slope, dw))
            continue
        single = here <= 0
        slope = slope.masked_fill(single, 0)
        made.append(_pull(x, reach, block, slope, dw, single & False))
        first, n = _first_tiles(x, single)
        for small in (
            _blocks(block.start, block.stop, *SMALL) if reach >= 0 else [block]
        ):
            here, by_y, to_y = (part[:n, :, small] for part in (inverse, gate, dy))
            slope = slopes[:, :n, :, small].neg().masked_fill_(here >= 0, 0)
            dm = (by_y * to_y).masked_fill_(here != 0, 0)
            made.append(_pull(first, reach, small, slope, dw[:n], here == 0, dm))
    if len(made) == len(inverse) == 1 and x[4] is None:  # One block sees all keys.
        dk, dv = (part[0].permute(2, 1, 0, 3).flatten(2) for part in made[0])
        return dq, dk, dv, dw, None, None
    sums = [part if part is None else torch.zeros_like(part) for part in x[1:]]
    for dK, dV in made:
        _add(sums, w, len(inverse), dK, dV)
    return dq, *sums[:2], dw, *sums[3:]


def _pull(
    x: Any, reach: int, block: slice, slope: Tensor, dw: Tensor,
    single: Tensor | None = None, dm: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of a block's keys and values, and add to `dw` (Eqs. e6-e8).

    - `slope`: $G m$ and $G$, 0 for rows that are not computed here.
    - `single`: rows that need a softmax, None = no row; `dm`: gradients of their means.
    """
    pairs, E, factors, _ = _terms(x, reach, block, single is not None)
    slope, seen = slope.flatten(4), factors.flatten(4).mT
    dE = (slope[1] @ seen[1]).sub_(slope[0] @ seen[0]).mul_(E)  # (e8)
    Rm, R = ((E.mT @ part).view(factors[0].shape) for part in slope)
    X, dK = factors
    dK.mul_(R).addcmul_(X, Rm, value=-1)  # (e7)
    dV = X.mul_(R)  # (e6)
    for at in () if single is None else _columns(single, pairs):
        weights, values = _softmax(pairs, x[3], reach, block, at)
        mean = weights @ values[..., None]
        p = weights.mul_(dm.movedim(2, -1)[at][..., None])
        slant = (values[:, None] - mean).mul_(p)
        dE.flatten(0, 1).index_add_(0, at[0] * dE.shape[1] + at[1], slant)
        for sums, part in ((dV, p), (dK, slant)):
            sums.movedim(2, -1)[at] += part.sum(1)
    keys = pairs[-1][0].shape[2]
    dw = dw[:, :, block, :keys]
    dw += dE[..., -keys:].sum_to_size(dw.shape)
    return dK, dV


def _shapes(x: Any, keep: bool, reach: int) -> Any:
    """Return empty tensors with the shapes of the results of `_forward`."""
    q, (_, groups, rows, _) = x[0], x[3].shape
    size = q.shape[1] // rows, groups, rows, q.shape[0], q.shape[2] // groups
    return [torch.empty_like(q)], [q.new_empty(size)] * keep


tiles = Recurrence(
    "aft_tiles",
    "Tensor q, Tensor k, Tensor v, Tensor w, Tensor? L, Tensor? m",
    "SymInt reach",
    _forward,
    _backward,
    _shapes,
    reads=(0,),
)
"""Compute AFT (Eq. 2) for tiles of rows with different biases.

- `q`: `[batch, rows, channels]`; `k`, `v`: `[batch, keys, channels]`.
- `w`: `[tiles or 1, groups, rows, keys]`; channels of a group have the same biases.
- `L`, `m`: additional keys and values of each tile, with bias 0, that all of its rows
  see: `[batch, tiles * more, channels]`; None = no additional keys.
  All tiles have the same number of rows and of keys. The keys of a tile begin as many
  keys after those of the previous tile as a tile has rows.
- `reach`: row `r` sees the keys up to `r + reach`; -1 = all.
"""


def _blocks(start: int, stop: int, least: int, most: int) -> list[slice]:
    """Split rows into blocks, each at most as long as all blocks before it.

    A block omits the keys that none of its rows sees, and has its own $c$, the maximum
    of keys that all of its rows see, so later keys change no bit of earlier outputs.
    """
    made, first = [], start
    while first < stop:
        end = min(first + min(max(first - start, least), most), stop)
        made.append(slice(first, end))
        first = end
    return made


def _add(made: Any, w: Tensor, count: int, dK: Tensor, dV: Tensor) -> None:
    """Add the gradients of the first tiles to the gradients of keys and values.

    Keys that several tiles see are added piece by piece, without overlap.
    """
    dk, dv, _, dL, dm = made
    (_, groups, rows, _), tiles = w.shape, len(dK)
    more = 0 if dL is None else dL.shape[1] // count
    if more:
        for sums, part in ((dL, dK), (dm, dV)):
            _steps(sums, more, more, groups)[:tiles].add_(part[:, :, :more])
    size = dK.shape[2] - more
    length = rows if tiles > 1 else size
    for first in range(0, size, length):
        n = min(length, size - first)
        here = slice(more + first, more + first + n)
        for sums, part in ((dk, dK), (dv, dV)):
            _steps(sums[:, first:], n, length, groups)[:tiles].add_(part[:, :, here])


def _terms(
    x: Any, reach: int, block: slice, check: bool = True
) -> tuple[Pairs, Tensor, Tensor, Tensor | None]:
    """Return the keys that a block sees and their factors (Eq. e5), 0 if out of bounds.

    Usually all factors are within the bounds, which their extremes show. Such factors
    have the same bits in both cases.

    - `check`: False = all factors are within the bounds.
    - Returns keys and values, `E`, factors `[2, tiles, groups, keys, batch, c]`, and
      which rows see factors out of bounds; None = no row.
    """
    q, k, v, w, L, m = x
    _, groups, rows, size = w.shape
    end = size if reach < 0 else reach + block.stop
    k, v = (_steps(part, end, rows, groups) for part in (k, v))
    top = k[:, :, : end if reach < 0 else reach + block.start + 1].amax(2, keepdim=True)
    pairs, more = [(k, v)], 0
    if L is not None:
        more = L.shape[1] * rows // q.shape[1]
        L, m = (_steps(part, more, more, groups) for part in (L, m))
        top, pairs = torch.maximum(top, L.amax(2, keepdim=True)), [(L, m), *pairs]
    top.masked_fill_(top == -torch.inf, 0)
    factors = k.new_empty(2, *k.shape[:2], more + end, *k.shape[3:])
    parts = factors.split([key.shape[2] for key, _ in pairs], 3)
    for (key, value), (X, XV) in zip(pairs, parts, strict=True):
        torch.sub(key, top, out=X).clamp_(min=FAINT).exp_()
        torch.mul(torch.threshold_(X, 2 * math.exp(FAINT), 0), value, out=XV)
    w, unsafe = w[:, :, block, :end], None
    E = (F.pad(w, (more, 0)) if more else w).exp()
    if reach >= 0:
        E.tril_(more + reach + block.start)
    if not check:
        return pairs, E, factors, None
    low, high = factors.aminmax()
    if not torch.maximum(-low, high) <= MAX_FACTOR:  # NaN also fails this test.
        bad = ~(torch.maximum(factors[0], factors[1].abs()) <= MAX_FACTOR)
        factors.masked_fill_(bad, 0)
        own = E.shape[2] if reach >= 0 else 1  # All rows see all older keys.
        older, unsafe = bad[:, :, :-own], bad[:, :, -own:]
        unsafe[:, :, 0] |= older.any(2)
        for before, now in pairwise(unsafe.unbind(2)):
            now |= before
    if not E.amax() <= MAX_WEIGHT:
        wide = ~(E <= MAX_WEIGHT)
        E.masked_fill_(wide, 0)
        rows_of = wide.any(-1)[..., None, None]
        unsafe = rows_of if unsafe is None else unsafe | rows_of
    return pairs, E, factors, unsafe


def _columns(single: Tensor, pairs: Pairs) -> list[tuple[Tensor, ...]]:
    """Split the columns with rows that need a softmax into groups that fit into memory.

    Each is an index of a tile, a group, a sequence and a channel.
    """
    size = single.shape[2] * sum(key.shape[2] for key, _ in pairs)
    columns = single.any(2).nonzero().split(max(ROOM // size, 1))
    return [part.unbind(1) for part in columns if len(part)]


def _softmax(
    pairs: Pairs, w: Tensor, reach: int, block: slice, at: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Return softmax weights `[columns, rows, keys]`, and the values of columns."""
    keys, values = (
        torch.cat([x.movedim(2, -1)[at] for x in parts], -1)
        for parts in zip(*pairs, strict=True)
    )
    end = pairs[-1][0].shape[2]
    more = keys.shape[1] - end
    w = F.pad(w[:, :, block, :end], (more, 0))
    exponent = w[at[0] % len(w), at[1]].add_(keys[:, None])
    if reach >= 0:
        seen = torch.ones_like(exponent[0], dtype=torch.bool)
        exponent.masked_fill_(~seen.tril_(more + reach + block.start), -torch.inf)
    top = exponent.amax(-1, keepdim=True)
    exponent.masked_fill_(exponent < top + FAINT, -torch.inf)
    empty = top == -torch.inf  # A softmax over no keys is NaN.
    return torch.softmax(exponent, -1).masked_fill_(empty, 0), values


def _steps(x: Tensor, size: int, every: int, groups: int) -> Tensor:
    """View a sequence as spans of `size` steps that start every `every` steps.

    - `x`: `[batch, time, channels]`.
    - Returns `[tiles, groups, size, batch, c]`: channels with the same biases are in
      one matrix.
    """
    (batch, time, channels), (sequence, step, one) = x.shape, x.stride()
    c, n = channels // groups, (time - size) // every + 1
    sizes, strides = (
        (n, groups, size, batch, c),
        (step * every, one * c, step, sequence, one),
    )
    return x.as_strided(sizes, strides, x.storage_offset())
