r"""# AFT-full in tiles

A *tile* of rows takes two matrix products, as long as no exponent is
too large. Rows with larger exponents are computed on their own, by a
softmax. AFT-local and AFT-conv use the same tiles, over the keys of a
window.
"""

from typing import Any

import torch
from torch import Tensor

from fwlab.ops import autograd

#: Rows per tile.
TILE = 128
#: Keys of unsafe rows that are computed together, counted in scalars.
ROOM = 2**20
#: Bounds for the matrix products, far from the limits of float32: the
#: maximum exponent, the minimum sum of weights and the maximum value.
MAX_EXPONENT, MIN_SUM, MAX_VALUE = 20.0, 1e-10, 1e25


class Tile(torch.autograd.Function):
    r"""Eq. 2 for the rows of some tiles.

    With $c$ the maximum of the keys that *all* rows of a tile see,

    $$E = e^{w}, \quad X = e^{K - c}, \quad
      m = \frac{E\, (X \odot V)}{E\, X} \tag{e5}$$

    takes two matrix products, computed as one of $E$ with `Z`, which is
    $[X, X \odot V]$. They are exact as long as no exponent that the row
    sees is large and the sum is not tiny. A row that fails this test is
    computed by its own softmax. A key that a row does not see has
    $E = 0$: it adds an exact 0 to the sums and does not enter the test,
    so it does not change a bit.
    """

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, w: Tensor, reach: int | None
    ) -> Tensor:
        E, Z, unsafe = _factors(k, v, w, reach)
        total, mean = torch.matmul(E, Z).chunk(2, -1)
        indices = None
        if unsafe is not None or not total.amin() >= MIN_SUM:
            wrong = ~(total >= MIN_SUM)
            wrong = wrong if unsafe is None else wrong | unsafe
            total, indices = (
                total.masked_fill(wrong, 1),
                wrong.nonzero(),
            )
        mean = mean / total  # (e5)
        for at in _pieces(indices, k):
            weights, values = _softmax(k, v, w, reach, at)
            mean[tuple(at.T)] = (weights * values).sum(-1)
        total = total.contiguous()  # without the other half
        ctx.save_for_backward(k, v, w, total, mean, indices)
        ctx.reach = reach
        return mean

    @staticmethod
    @autograd.backward_pass
    def backward(ctx: Any, dm: Tensor) -> tuple[Tensor | None, ...]:
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
        k, v, w, total, mean, indices = ctx.saved_tensors
        E, Z, _ = _factors(k, v, w, ctx.reach)
        # $[-G m, G]$, as `Z` is $[X, X V]$.
        both = Z.new_empty(*mean.shape[:-1], Z.shape[-1])
        Gm, G = both.chunk(2, -1)
        torch.div(dm, total, out=G)
        if indices is not None:
            G[tuple(indices.T)] = 0
        torch.mul(G, mean, out=Gm).neg_()
        X, XV = Z.chunk(2, -1)
        Rm, R = torch.matmul(E.mT, both).chunk(2, -1)
        dv = X * R  # (e6)
        dk = (X * Rm).addcmul_(XV, R)  # (e7)
        dw = torch.matmul(both, Z.mT).mul_(E)  # (e8)
        if len(w) < len(dw):
            dw = dw.sum(0, keepdim=True)
        for at in _pieces(indices, k):
            tile, group, row, column = at.T
            weights, values = _softmax(k, v, w, ctx.reach, at)
            dm_at, mean_at = (
                x[tuple(at.T)][:, None] for x in (dm, mean)
            )
            dV = weights * dm_at
            dK = dV * (values - mean_at)
            key = tile, group, column
            dv.mT.index_put_(key, dV, accumulate=True)
            dk.mT.index_put_(key, dK, accumulate=True)
            bias = tile % len(w), group, row
            dw.index_put_(bias, dK, accumulate=True)
        return dk, dv, dw, None


def _factors(
    k: Tensor, v: Tensor, w: Tensor, reach: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`E` and `[X, XV]` of (e5), and a mask of unsafe rows, or None.

    A row is unsafe if it sees an entry beyond the bounds, which is
    clamped here. Usually there is none: the extremes of all entries say
    so, and then no row needs a test of its own. Either way `E` and the
    entries within the bounds are the same bits.
    """
    common = k[:, :, : _common(w, reach)]
    top = torch.zeros_like(k[:, :, :1])
    if common.shape[2]:
        top = common.amax(2, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0)
    exponent, n = k - top, k.shape[-1]
    Z = k.new_empty(*k.shape[:-1], 2 * n)
    X, XV = Z[..., :n], Z[..., n:]
    torch.clamp(exponent, max=MAX_EXPONENT, out=X).exp_()
    least, most = torch.mul(X, v, out=XV).aminmax()
    E = w.clamp(max=MAX_EXPONENT).exp_()
    E = E if reach is None else E.tril_(reach)
    # Comparisons with NaN are False.
    safe = (exponent.amax() <= MAX_EXPONENT) & (least > -MAX_VALUE)
    if safe & (most < MAX_VALUE) & (w.amax() <= MAX_EXPONENT):
        return E, Z, None
    visible = _visible(w, reach)
    wide = (w > MAX_EXPONENT) & visible
    bad = (exponent > MAX_EXPONENT) | ~(XV.abs() < MAX_VALUE)
    XV.masked_fill_(bad, 0)
    seen = torch.matmul(visible.to(w.dtype), bad.to(w.dtype)) > 0
    return E, Z, seen | wide.any(-1, keepdim=True)


def _pieces(indices: Tensor | None, k: Tensor) -> tuple[Tensor, ...]:
    """Unsafe rows, as many at a time as there is room for."""
    if indices is None:
        return ()
    return indices.split(max(ROOM // k.shape[2], 1))


def _softmax(
    k: Tensor, v: Tensor, w: Tensor, reach: int | None, index: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights and values of single rows, `[rows, keys]` each.

    - `index`: `[rows, 4]`: tile, group, row and column.
    """
    tile, group, row, column = index.T
    exponent = k.mT[tile, group, column] + w[tile % len(w), group, row]
    if reach is not None:
        keys = torch.arange(k.shape[2], device=k.device)
        hidden = keys > row[:, None] + reach
        exponent.masked_fill_(hidden, -torch.inf)
    empty = (exponent == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(exponent.masked_fill_(empty, 0), -1)
    return weights.masked_fill_(empty, 0), v.mT[tile, group, column]


def _visible(w: Tensor, reach: int | None) -> Tensor:
    """Row $r$ sees the keys up to $r$ + `reach`; None: all keys."""
    all_ = torch.ones_like(w, dtype=torch.bool)
    return all_ if reach is None else all_.tril(reach)


def _common(w: Tensor, reach: int | None) -> int:
    """The number of keys that all rows see."""
    keys = w.shape[-1]
    return keys if reach is None else max(min(reach + 1, keys), 0)


def causal(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Row $t$ sees past and present; called as the naive version."""
    return _rows(q, k, v, w, k.shape[1] - q.shape[1])


def not_causal(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Every row sees all steps; arguments as in the naive version."""
    return _rows(q, k, v, w, None)


def _rows(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, reach: int | None
) -> Tensor:
    """Row $t$ sees the keys up to $t$ + `reach`; None: all keys."""
    keys = k.shape[1]
    K, V = (grouped(x[:, None], 1) for x in (k, v))
    means = []
    for i, tile in enumerate(w.split(TILE)):
        tile_reach = None if reach is None else reach + i * TILE
        end = (
            keys if tile_reach is None else min(tile_reach + TILE, keys)
        )
        means.append(
            Tile.apply(
                K[:, :, :end],
                V[:, :, :end],
                tile[None, None, :, :end],
                tile_reach,
            )
        )
    return torch.sigmoid(q) * flat(torch.cat(means, 2), q)  # Eq. 2


def grouped(x: Tensor, groups: int) -> Tensor:
    """`[batch, tiles, keys, groups * c]` to `[tiles, groups, keys,
    batch * c]`: channels with the same biases are in one matrix.
    """
    x = x.unflatten(3, (groups, -1))
    return x.permute(1, 3, 2, 0, 4).flatten(3)


def flat(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `grouped`: `[batch, tiles * rows, channels]`."""
    x = x.unflatten(3, (len(like), -1))
    return x.permute(3, 0, 2, 1, 4).flatten(3).flatten(1, 2)
