r"""# AFT-full in tiles

A *tile* of rows takes two matrix products, as long as no factor is too large. Columns
of a tile with larger factors are computed on their own, by a softmax. AFT-local and
AFT-conv use the same tiles, over the keys of a window.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab.ops._recurrence import Recurrence

#: Rows per tile.
TILE = 128
#: Pairs of rows and keys of unsafe columns that are computed together.
ROOM = 2**20
#: Bounds for the matrix products, far from the limits of float32: the maximum of a
#: weight by a bias and of a factor by a key, and the minimum sum of weights.
MAX_WEIGHT, MAX_FACTOR, MIN_SUM = 1e8, 1e18, 1e-10
#: How far the maximum of the keys may move while tiles share factors.
MAX_DRIFT = 10.0


def causal(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Let row $t$ see past and present; called as the naive version."""
    past = k.shape[1] - q.shape[1]
    return tiles((q, k, v, w[None, None], None, None), 1, past, True)[0]


def not_causal(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Let every row see all steps; arguments as in the naive version."""
    return tiles((q, k, v, w[None, None], None, None), 1, -1, False)[0]


#: Keys and values, each `[tiles, groups, keys, batch, c]`. Only the last pair has biases.
Pairs = list[tuple[Tensor, Tensor]]


class Tile(NamedTuple):
    """Hold some rows, and the keys that they see.

    - `rows`: their indices.
    - `end`: the number of keys that any of them sees; None = all.
    - `reach`: row `r` of the tile sees the keys up to `r + reach`; -1 = all keys.
    """

    rows: slice
    end: int | None
    reach: int


def _forward(x: Any, keep: bool, count: int, reach: int, cut: bool) -> Any:
    r"""Compute Eq. 2 for the rows of some tiles.

    With $c$ the maximum of the keys that *all* rows see,

    $$E = e^{w}, \quad X = e^{K - c}, \quad
      m = \frac{E\, (X \odot V)}{E\, X} \tag{e5}$$

    takes one matrix product for both sums. It is exact as long as no factor that the
    row sees is large and the sum is not tiny. A row that fails this test is computed by
    a softmax; the inverse of its sum is kept as 0. A key that a row does not see has $E
    = 0$: it adds an exact 0 to the sums and does not enter the test, so it does not
    change a bit.

    - `x`: the arguments of `tiles`.
    """
    q, w = x[0], x[3]
    _, groups, rows, size = w.shape
    gate = _steps(torch.sigmoid(q), rows, rows, groups)
    inverse, means = (q.new_empty(gate.shape) for _ in range(2))
    tile = Tile(slice(None), None, reach)
    for run in _runs(x, reach) if cut and rows > TILE else [[tile]]:
        pairs, factors, bad = _factors(x, count, run)
        more = factors.shape[3] - (run[-1].end or size)
        for tile in run:
            E, wide = _weights(w, tile, more)
            total, mean = sums = inverse[:, :, tile.rows], means[:, :, tile.rows]
            for factor, part in zip(factors, sums, strict=True):
                seen = factor[:, :, : E.shape[3]].flatten(3)
                torch.matmul(E, seen, out=part.flatten(3))
            if bad is None and wide is None and total.amin() >= MIN_SUM:
                mean.mul_(total.reciprocal_())  # (e5)
                continue
            single = ~(total >= MIN_SUM)  # or NaN
            if wide is not None:
                single |= wide.any(-1)[..., None, None]
            if bad is not None:
                visible = torch.ones_like(E)
                if tile.reach >= 0:
                    visible.tril_(more + tile.reach)
                found = visible @ bad[:, :, : E.shape[3]].flatten(3).to(E.dtype)
                single |= found.view(total.shape) > 0
            mean.mul_(total.reciprocal_().masked_fill_(single, 0))
            for at in _columns(single, E):
                weights, values = _softmax(pairs, w, tile, at)
                alone, now = (weights @ values[..., None])[..., 0], mean.movedim(2, -1)
                now[at] = torch.where(single.movedim(2, -1)[at], alone, now[at])
    y = torch.empty_like(q)
    torch.mul(gate, means, out=_steps(y, rows, rows, groups))  # Eq. 2
    return (y,), ((inverse,) if keep else ())


def _backward(
    x: Any, kept: Any, gradients: Any, needed: Any, count: int, reach: int, cut: bool
) -> Any:
    r"""Compute factors again, but no softmax of safe rows.

    With $p = E X / (E X)$ the weights of a row, $dV = p^\top dm$, and $w$ and $K$ both
    get $p\, dm\, (V - m)$, summed over the rows or columns that share them:

    $$G = \frac{dm}{E X}, \qquad dV = X \odot E^\top G \tag{e6}$$
    $$dK = X \odot \big(V \odot E^\top G - E^\top (G m)\big) \tag{e7}$$
    $$dw = E \odot \big(G\, (X V)^\top - (G m)\, X^\top\big) \tag{e8}$$

    The gate is part of the gradient, $dm = \sigma(q)\, dy$, and $y = \sigma(q)\, m$.
    """
    q, w = x[0], x[3]
    _, groups, rows, size = w.shape
    inverse, y = kept
    gate, dy = torch.sigmoid(q), gradients[0]
    dq = dy * y
    dq.addcmul_(dq, gate, value=-1)
    slopes = q.new_empty(2, *inverse.shape)  # $G m$ and $G$
    gate, dy, y = (_steps(part, rows, rows, groups) for part in (gate, dy, y))
    torch.mul(torch.mul(dy, inverse, out=slopes[1]), y, out=slopes[0])
    slopes[1].mul_(gate)
    some = bool(inverse.amin() == 0)
    dw, made = torch.zeros_like(w), list[Any]()
    tile = Tile(slice(None), None, reach)
    runs = _runs(x, reach) if cut and rows > TILE else [[tile]]
    for run in runs:
        pairs, factors, _ = _factors(x, count, run, some)
        more = factors.shape[3] - (run[-1].end or size)
        products: Any = None  # $E^\top$ times the slopes
        singles = torch.zeros_like(factors) if some else None
        for tile in reversed(run):  # the last one sees all keys
            E, _ = _weights(w, tile, more, some)
            end = E.shape[3]
            slope = slopes[:, :, :, tile.rows].flatten(4)
            seen = factors[:, :, :, :end].flatten(4).mT
            dE = (slope[1] @ seen[1]).sub_(slope[0] @ seen[0]).mul_(E)  # (e8)
            if products is None:
                products = [E.mT @ part for part in slope]
            else:
                for sums, part in zip(products, slope, strict=True):
                    sums[0, :, :end].baddbmm_(E[0].mT, part[0])
            if singles is not None:
                at = tile.rows
                here = inverse[:, :, at], gate[:, :, at], dy[:, :, at]
                _backward_of_singles(pairs, w, tile, *here, dE, singles)
            dw_t = dw[:, :, tile.rows, : tile.end]
            dw_t.copy_(dE[..., more:].sum_to_size(dw_t.shape))
        Rm, R = (part.view(factors[0].shape) for part in products)
        X, dK = factors
        dK.mul_(R).addcmul_(X, Rm, value=-1)  # (e7)
        dV = X.mul_(R)  # (e6)
        if singles is not None:
            dK += singles[1]
            dV += singles[0]
        if len(runs) == count == 1 and not more:  # each key was seen once
            dk, dv = (part[0].permute(2, 1, 0, 3).flatten(2) for part in (dK, dV))
            return dq, dk, dv, dw, None, None
        made = made or [x if x is None else torch.zeros_like(x) for x in x[1:]]
        _add(made, w, more, dK, dV)
    return dq, *made[:2], dw, *made[3:]


def _shapes(x: Any, keep: bool, count: int, reach: int, cut: bool) -> Any:
    """Return empty tensors as `_forward` does."""
    q, (_, groups, rows, _) = x[0], x[3].shape
    size = count, groups, rows, q.shape[0], q.shape[2] // groups
    return [torch.empty_like(q)], [q.new_empty(size)] * keep


tiles = Recurrence(
    "aft_tiles",
    "Tensor q, Tensor k, Tensor v, Tensor w, Tensor? L, Tensor? m",
    "SymInt count, SymInt reach, bool cut",
    _forward,
    _backward,
    _shapes,
    reads=(0,),
)
"""Eq. 2 with other biases for tiles of rows.

- `q`: `[batch, rows, channels]`; `k`, `v`: `[batch, keys, channels]`.
- `w`: `[tiles or 1, groups, rows, keys]`; channels of a group have the same biases.
- `L`, `m`: more keys and values of each tile, with bias 0, that all of its rows see:
  `[batch, tiles * more, channels]`; None = no more.
- `count`: cut the rows into this many tiles, side by side. Each sees as many keys as `w`
  has columns, and begins as many keys after the one before it as `w` has rows.
- `reach`: row `r` sees the keys up to `r + reach`; -1 = all.
- `cut`: compute the rows of the only tile in several, without the keys that none sees.
"""


def _runs(x: Any, reach: int) -> list[list[Tile]]:
    """Return tiles with one $c$, and then the next such tiles.

    The maximum of the keys that all rows of a tile see must be close to $c$. It is a
    matter of these keys alone, so that later keys do not change a bit. Usually all
    tiles are one run.
    """
    time, k = x[0].shape[1], x[1]
    tops, tiles = [], []
    for t in range(0, time, TILE):
        end = reach + t + 1  # the keys that the first row sees
        tops.append(k[:, end - TILE if t else 0 : end].amax(1))
        tiles.append(
            Tile(slice(t, t + TILE), min(end + TILE - 1, reach + time), end - 1)
        )
    top = torch.stack(tops).cummax(0)[0]
    top.masked_fill_(top == -torch.inf, 0)
    runs, first = [[tiles[0]]], top[0]
    for tile, now in zip(tiles[1:], top[1:], strict=True):
        if (now - first).abs().amax() > MAX_DRIFT:
            runs.append([])
            first = now
        runs[-1].append(tile)
    return runs


def _add(made: Any, w: Tensor, more: int, dK: Tensor, dV: Tensor) -> None:
    """Add gradients of what tiles see to those of keys and values.

    What several tiles see is added piece by piece, each without overlap.
    """
    dk, dv, _, dL, dm = made
    tiles, groups, rows, size = len(dK), w.shape[1], w.shape[2], dK.shape[2] - more
    if more:
        _steps(dL, more, more, groups).add_(dK[:, :, :more])
        _steps(dm, more, more, groups).add_(dV[:, :, :more])
    length = rows if tiles > 1 else size
    for first in range(0, size, length):
        n = min(length, size - first)
        here = slice(more + first, more + first + n)
        for sums, part in ((dk, dK), (dv, dV)):
            _steps(sums[:, first:], n, length, groups)[:tiles].add_(part[:, :, here])


def _factors(
    x: Any, count: int, run: list[Tile], check: bool = True
) -> tuple[Pairs, Tensor, Tensor | None]:
    """Return what tiles see, `X` and `XV` of (e5), and where one is beyond the bound.

    Both are 0 there. Usually there is no such place: the extremes of all factors say
    so, and None is returned. Either way the factors within the bound are the same bits.

    - `check`: False = there is no such place: every row is safe, and each key is seen.
    - Returns keys and values, factors `[2, tiles, groups, keys, batch, c]`, and places.
    """
    _, k, v, w, L, m = x
    _, groups, rows, size = w.shape
    size, reach = run[-1].end or size, run[0].reach
    k, v = (_steps(part, size, rows, groups) for part in (k, v))
    top = k[:, :, : size if reach < 0 else reach + 1].amax(2, keepdim=True)
    pairs, more = [(k, v)], 0
    if L is not None:
        more = L.shape[1] // count
        L, m = (_steps(part, more, more, groups) for part in (L, m))
        top, pairs = torch.maximum(top, L.amax(2, keepdim=True)), [(L, m), *pairs]
    top.masked_fill_(top == -torch.inf, 0)
    factors = k.new_empty(2, *k.shape[:2], more + size, *k.shape[3:])
    parts = factors.split([key.shape[2] for key, _ in pairs], 3)
    for (key, value), (X, XV) in zip(pairs, parts, strict=True):
        torch.mul(torch.sub(key, top, out=X).exp_(), value, out=XV)
    if not check:
        return pairs, factors, None
    low, high = factors.aminmax()
    if torch.maximum(-low, high) <= MAX_FACTOR:  # False with NaN
        return pairs, factors, None
    bad = ~(factors.abs() <= MAX_FACTOR).all(0)
    return pairs, factors.masked_fill_(bad, 0), bad


def _weights(
    w: Tensor, tile: Tile, more: int, check: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return `E` of (e5), with the bias 0 of `more` keys in front.

    Where it is beyond the bound it is 0; the second result says where, or is None.
    """
    w = w[:, :, tile.rows, : tile.end]
    E = (F.pad(w, (more, 0)) if more else w).exp()
    if tile.reach >= 0:
        E.tril_(more + tile.reach)
    if not check or E.amax() <= MAX_WEIGHT:
        return E, None
    wide = ~(E <= MAX_WEIGHT)
    return E.masked_fill_(wide, 0), wide


def _columns(single: Tensor, E: Tensor) -> list[tuple[Any, ...]]:
    """Return the columns with unsafe rows, as many at a time as there is room for.

    They are of one tile and group: two numbers, then indices of sequence and channel.
    """
    some, room = single.any(2), max(ROOM // E[0, 0].numel(), 1)
    return [
        (tile, group, *part.unbind(1))
        for tile, group in some.flatten(2).any(2).nonzero().tolist()
        for part in some[tile, group].nonzero().split(room)
    ]


def _backward_of_singles(
    pairs: Pairs,
    w: Tensor,
    tile: Tile,
    inverse: Tensor,
    gate: Tensor,
    dy: Tensor,
    dE: Tensor,
    gradients: Tensor,
) -> None:
    """Add the gradients by single rows to those of biases, keys and values."""
    single = inverse == 0
    for at in _columns(single, dE):
        weights, values = _softmax(pairs, w, tile, at)
        slope, up, alone = (x.movedim(2, -1)[at] for x in (gate, dy, single))
        mean = weights @ values[..., None]
        p = weights.mul_((slope * up).masked_fill_(~alone, 0)[..., None])
        dK = (values[:, None] - mean).mul_(p)
        dE[at[:2]] += dK.sum(0)
        for sums, part in zip(gradients, (p, dK), strict=True):
            sums[:, :, : dE.shape[3]].movedim(2, -1)[at] += part.sum(1)


def _softmax(
    pairs: Pairs, w: Tensor, tile: Tile, at: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Return the weights of columns, `[columns, rows, keys]`, and the values."""
    w = w[at[0] % len(w), at[1], tile.rows, : tile.end]
    keys, values = (
        torch.cat([x.movedim(2, -1)[at] for x in parts], -1)
        for parts in zip(*pairs, strict=True)
    )
    more = sum(key.shape[2] for key, _ in pairs[:-1])
    keys, values = (x[:, : more + w.shape[1]] for x in (keys, values))
    exponent = keys[:, None] + F.pad(w, (more, 0))
    if tile.reach >= 0:
        seen = torch.ones_like(exponent[0], dtype=torch.bool).tril_(more + tile.reach)
        exponent.masked_fill_(~seen, -torch.inf)
    empty = exponent.amax(-1, keepdim=True) == -torch.inf  # where the softmax is NaN
    return torch.softmax(exponent, -1).masked_fill_(empty, 0), values


def _steps(x: Tensor, size: int, every: int, groups: int) -> Tensor:
    """View spans of `size` steps, each `every` steps after the one before.

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
