r"""# AFT-full in tiles

A *tile* of rows takes two matrix products, as long as no factor is too
large. Rows with larger factors are computed on their own, by a softmax.
AFT-local and AFT-conv use the same tiles, over the keys of a window.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab.ops import autograd

#: Rows per tile.
TILE = 128
#: Keys of unsafe rows that are computed together, counted in scalars.
ROOM = 2**20
#: Bounds for the matrix products, far from the limits of float32: the
#: maximum size of a factor, and the minimum sum of weights.
MAX_FACTOR, MIN_SUM = 1e12, 1e-10


class Tile(NamedTuple):
    """Tiles of equal size, side by side.

    - `rows`: the rows of all of them.
    - `keys`: the keys that any of them sees.
    - `count`: the number of tiles. Tile `i` sees as many keys as `w` has
      columns, from the `i`-th multiple of its number of rows on.
    - `reach`: row `r` sees the keys up to `r + reach` of its tile; None:
      all keys.
    """

    rows: slice
    keys: slice
    count: int
    reach: int | None


#: Keys and values, each `[tiles, groups, keys, batch, c]`. Only the
#: last pair has biases.
Pairs = list[tuple[Tensor, Tensor]]


class Tiles(torch.autograd.Function):
    r"""Eq. 2 for the rows of some tiles.

    With $c$ the maximum of the keys that *all* rows of a tile see,

    $$E = e^{w}, \quad X = e^{K - c}, \quad
      m = \frac{E\, (X \odot V)}{E\, X} \tag{e5}$$

    takes two matrix products, computed as one of $E$ with `Z`, which is
    $[X, X \odot V]$. They are exact as long as no factor that the row
    sees is large and the sum is not tiny. A row that fails this test is
    computed by its own softmax. A key that a row does not see has
    $E = 0$: it adds an exact 0 to the sums and does not enter the test,
    so it does not change a bit.

    - `q`: `[batch, rows, channels]`; `k`, `v`: `[batch, keys,
      channels]`.
    - `w`: `[tiles or 1, groups, rows, keys]`; channels of a group have
      the same biases.
    - `L`, `m`: more keys and values of each tile, with bias 0, that all
      of its rows see: `[batch, tiles * more, channels]`, or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor,
        L: Tensor | None,
        m: Tensor | None,
        tiles: Sequence[Tile],
    ) -> Tensor:
        given = k, v, w, L, m
        gate, y = torch.sigmoid(q), torch.empty_like(q)
        ctx.tiles, ctx.safe, kept = tiles, [], []
        for tile in tiles:
            seen = _seen(tile, *given)
            E, Z, unsafe = _factors(*seen, tile.reach)
            ctx.safe.append(unsafe is None)
            sums = torch.matmul(E, Z.flatten(3))
            sums = sums.unflatten(3, Z.shape[3:])
            total, mean = sums.unbind(3)
            indices = None
            if unsafe is not None or not total.amin() >= MIN_SUM:
                wrong = ~(total >= MIN_SUM)
                wrong = wrong if unsafe is None else wrong | unsafe
                total.masked_fill_(wrong, 1)
                indices = wrong.nonzero()
            mean.div_(total)  # (e5)
            for at in _pieces(indices, E):
                weights, values = _softmax(*seen, tile.reach, at)
                mean[tuple(at.T)] = (weights * values).sum(-1)
            gate_t, y_t = (_rows(tile, x, w) for x in (gate, y))
            torch.mul(gate_t, mean, out=y_t)  # Eq. 2
            kept += [sums, indices]
        # The factors of a single tile take the place of the inputs: they
        # are no larger. Those of several tiles are computed again.
        ctx.shapes = [None if x is None else x.shape for x in given]
        ctx.factors = len(tiles) == 1 and indices is None
        inputs = (E, Z) if ctx.factors else given
        ctx.save_for_backward(gate, *inputs, *kept)
        return y

    @staticmethod
    @autograd.backward_pass
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        r"""With $p = E X / (E X)$ the weights of a row,
        $dV = p^\top dm$, and $w$ and $K$ both get
        $p\, dm\, (V - m)$, summed over the rows or columns that share
        them:

        $$G = \frac{dm}{E X}, \qquad dV = X \odot E^\top G \tag{e6}$$
        $$dK = X \odot \big(V \odot E^\top G - E^\top (G m)\big)
          \tag{e7}$$
        $$dw = E \odot \big(G\, (X V)^\top - (G m)\, X^\top\big)
          \tag{e8}$$
        """
        gate, *kept = ctx.saved_tensors
        inputs = [kept.pop(0) for _ in range(2 if ctx.factors else 5)]
        dq, gradients = torch.empty_like(gate), []
        for tile, safe in zip(ctx.tiles, ctx.safe, strict=True):
            sums, indices = kept.pop(0), kept.pop(0)
            total, mean = sums.unbind(3)
            gate_t, dq_t, dy_t = (
                _rows(tile, x, sums) for x in (gate, dq, dy)
            )
            # $[-G m, G]$, as `Z` is $[X, X V]$.
            both = torch.empty_like(sums)
            Gm, G = both.unbind(3)
            torch.mul(gate_t, dy_t, out=G)
            torch.mul(G, mean, out=Gm)
            torch.addcmul(Gm, Gm, gate_t, value=-1, out=dq_t)
            G.div_(total)
            if indices is not None:
                G[tuple(indices.T)] = 0
            torch.mul(G, mean, out=Gm).neg_()
            if ctx.factors:
                E, Z = inputs
            else:
                seen = _seen(tile, *inputs)
                E, Z, _ = _factors(*seen, tile.reach, safe)
            both = both.flatten(3)
            dE = torch.matmul(both, Z.flatten(3).mT).mul_(E)  # (e8)
            R = torch.matmul(E.mT, both).unflatten(3, Z.shape[3:])
            del both, Gm, G  # here, memory is at its peak
            gradients = gradients or [
                None if shape is None else gate.new_zeros(shape)
                for shape in ctx.shapes
            ]
            (X, XV), (Rm, R) = Z.unbind(3), R.unbind(3)
            places = _places(tile, *gradients)
            for at, dk, dv in places:
                dv.addcmul_(X[:, :, at], R[:, :, at])  # (e6)
                dk.addcmul_(X[:, :, at], Rm[:, :, at])
                dk.addcmul_(XV[:, :, at], R[:, :, at])  # (e7)
            if indices is not None:
                dK, dV = torch.zeros_like(Z).unbind(3)
                for row in _pieces(indices, E):
                    weights, values = _softmax(*seen, tile.reach, row)
                    dy_r, gate_r, mean_r = (
                        x[tuple(row.T)][:, None]
                        for x in (dy_t, gate_t, mean)
                    )
                    dV_r = weights * (dy_r * gate_r)
                    dK_r = dV_r * (values - mean_r)
                    index, group, t, *column = row.T
                    for x, key, d in (
                        (dV.movedim(2, -1), column, dV_r),
                        (dK.movedim(2, -1), column, dK_r),
                        (dE, [t], dK_r),
                    ):
                        key = index, group, *key
                        x.index_put_(key, d, accumulate=True)
                for at, dk, dv in places:
                    dk.add_(dK[:, :, at])
                    dv.add_(dV[:, :, at])
            dw = gradients[2][:, :, tile.rows, tile.keys]
            dE = dE[..., -dw.shape[3] :]
            dw.copy_(dE.sum_to_size(dw.shape))
        return dq, *gradients, None


def _factors(
    pairs: Pairs, w: Tensor, reach: int | None, safe: bool | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`E` and `[X, XV]` of (e5), and a mask of unsafe rows, or None.

    A row is unsafe if it sees a factor beyond the bound, which is 0
    here. Usually there is none: the extremes of all factors say so, and
    then no row needs a test of its own. Either way the factors within
    the bound are the same bits.

    - `pairs`: keys and values; the last ones are those with biases.
    - `safe`: whether no factor is beyond the bound, if that is known.
    """
    k = pairs[-1][0]
    top = k[:, :, : _common(w, reach)].amax(2, keepdim=True)
    for more, _ in pairs[:-1]:
        top = torch.maximum(top, more.amax(2, keepdim=True))
    top.masked_fill_(top == -torch.inf, 0)
    sizes = [x.shape[2] for x, _ in pairs]
    extra = sum(sizes[:-1])
    tiles, groups, _, *columns = k.shape
    Z = k.new_empty(tiles, groups, sum(sizes), 2, *columns)
    X, XV = Z.unbind(3)
    for (key, _), part in zip(pairs, X.split(sizes, 2), strict=True):
        torch.sub(key, top, out=part)
    X.exp_()
    parts = X.split(sizes, 2), XV.split(sizes, 2)
    for (_, value), x, xv in zip(pairs, *parts, strict=True):
        torch.mul(x, value, out=xv)
    E = torch.nn.functional.pad(w, (extra, 0)).exp_()
    if reach is not None:
        E.tril_(extra + reach)
    if safe is None:  # comparisons with NaN are False
        largest = torch.maximum(Z.amax(), E.amax())
        safe = (largest < MAX_FACTOR) & (XV.amin() > -MAX_FACTOR)
    if safe:
        return E, Z, None
    wide, bad = E > MAX_FACTOR, ~(Z.abs() <= MAX_FACTOR).all(3)
    E.masked_fill_(wide, 0)
    Z.masked_fill_(bad[:, :, :, None], 0)
    visible = _visible(E, extra, reach).to(E.dtype)
    seen = torch.matmul(visible, bad.flatten(3).to(E.dtype)) > 0
    unsafe = seen.unflatten(3, columns)
    return E, Z, unsafe | wide.any(-1)[..., None, None]


def _pieces(indices: Tensor | None, E: Tensor) -> tuple[Tensor, ...]:
    """Unsafe rows, as many at a time as there is room for."""
    if indices is None:
        return ()
    return indices.split(max(ROOM // E.shape[3], 1))


def _softmax(
    pairs: Pairs, w: Tensor, reach: int | None, index: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights and values of single rows, `[rows, keys]` each.

    - `index`: `[rows, 5]`: tile, group, row, sequence and channel.
    """
    tile, group, row, *column = index.T
    keys, values = (
        torch.cat(
            [x.movedim(2, -1)[tile, group, *column] for x in xs], -1
        )
        for xs in zip(*pairs, strict=True)
    )
    extra = keys.shape[1] - w.shape[3]
    keys[:, extra:] += w[tile % len(w), group, row]
    if reach is not None:
        order = torch.arange(keys.shape[1], device=keys.device)
        hidden = order > row[:, None] + extra + reach
        keys.masked_fill_(hidden, -torch.inf)
    empty = (keys == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(keys.masked_fill_(empty, 0), -1)
    return weights.masked_fill_(empty, 0), values


def _visible(E: Tensor, extra: int, reach: int | None) -> Tensor:
    """Row $r$ sees the keys up to $r$ + `reach`; None: all keys."""
    all_ = torch.ones_like(E, dtype=torch.bool)
    return all_ if reach is None else all_.tril_(extra + reach)


def _common(w: Tensor, reach: int | None) -> int:
    """The number of keys that all rows see."""
    keys = w.shape[-1]
    return keys if reach is None else min(reach + 1, keys)


def _seen(
    tile: Tile,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    L: Tensor | None,
    m: Tensor | None,
) -> tuple[Pairs, Tensor]:
    """The keys and values that the tiles see, and their biases."""
    bias = w[:, :, tile.rows, tile.keys]
    _, groups, rows, size = bias.shape
    k, v = (
        _steps(x[:, tile.keys], size, rows, groups) for x in (k, v)
    )
    if L is None or m is None:
        return [(k, v)], bias
    size = L.shape[1] // tile.count
    L, m = (_steps(x, size, size, groups) for x in (L, m))
    return [(L, m), (k, v)], bias


def _places(
    tile: Tile,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    L: Tensor | None,
    m: Tensor | None,
) -> list[tuple[slice, Tensor, Tensor]]:
    """Where the keys that the tiles see come from, without overlap.

    - Returns pieces of them: a slice, its keys and its values.
    """
    _, groups, rows, size = w[:, :, tile.rows, tile.keys].shape
    k, v, start, places = k[:, tile.keys], v[:, tile.keys], 0, []
    if L is not None and m is not None:
        start = L.shape[1] // tile.count
        views = (_steps(x, start, start, groups) for x in (L, m))
        places.append((slice(start), *views))
    # Of one tile, all keys are one piece.
    length = rows if tile.count > 1 else size
    for first in range(0, size, length):
        n = min(length, size - first)
        views = (
            _steps(x[:, first:], n, length, groups)[: tile.count]
            for x in (k, v)
        )
        at = start + first
        places.append((slice(at, at + n), *views))
    return places


def _rows(tile: Tile, x: Tensor, w: Tensor) -> Tensor:
    """The rows of the tiles, `[tiles, groups, rows, batch, c]`."""
    x = x[:, tile.rows]
    size = x.shape[1] // tile.count
    return _steps(x, size, size, w.shape[1])


def _steps(x: Tensor, size: int, every: int, groups: int) -> Tensor:
    """`size` steps from every `every`-th step on, as a view.

    - `x`: `[batch, time, channels]`.
    - Returns `[tiles, groups, size, batch, c]`: channels with the same
      biases are in one matrix.
    """
    x = x.unfold(1, size, every).unflatten(2, (groups, -1))
    return x.permute(1, 2, 4, 0, 3)


def causal(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Row $t$ sees past and present; called as the naive version."""
    time, keys = w.shape
    tiles = []
    for start in range(0, time, TILE):
        stop, reach = min(start + TILE, time), keys - time + start
        seen = slice(keys - time + stop)
        tiles.append(Tile(slice(start, stop), seen, 1, reach))
    return Tiles.apply(q, k, v, w[None, None], None, None, tiles)


def not_causal(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Every row sees all steps; arguments as in the naive version."""
    tile = Tile(slice(None), slice(None), 1, None)
    return Tiles.apply(q, k, v, w[None, None], None, None, [tile])
