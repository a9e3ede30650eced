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
TILE = 64
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

    takes two matrix products. They are exact as long as no exponent
    that the row sees is large and the sum is not tiny. A row that fails
    this test is computed by its own softmax. A key that a row does not
    see has $E = 0$: it adds an exact 0 to the sums and does not enter
    the test, so it does not change a bit.
    """

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, w: Tensor, reach: int | None
    ) -> Tensor:
        E, X, XV, unsafe = _factors(k, v, w, reach)
        total = torch.matmul(E, X)
        mean = torch.matmul(E, XV)
        unsafe = unsafe | ~(total >= MIN_SUM)
        total.masked_fill_(unsafe, 1)
        mean.div_(total).masked_fill_(unsafe, 0)  # (e5)
        indices = unsafe.nonzero()
        for index in indices.split(max(ROOM // k.shape[2], 1)):
            weights, values = _softmax(k, v, w, reach, index)
            mean[tuple(index.T)] = (weights * values).sum(-1)
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
        E, X, XV, _ = _factors(k, v, w, ctx.reach)
        G = dm / total
        G[tuple(indices.T)] = 0
        Gm = G * mean
        R, Rm = torch.matmul(E.mT, G), torch.matmul(E.mT, Gm)
        dv = X * R  # (e6)
        dk = XV * R - X * Rm  # (e7)
        dw = torch.matmul(G, XV.mT) - torch.matmul(Gm, X.mT)
        dw *= E  # (e8)
        if len(w) < len(dw):
            dw = dw.sum(0, keepdim=True)
        for index in indices.split(max(ROOM // k.shape[2], 1)):
            tile, group, row, column = index.T
            weights, values = _softmax(k, v, w, ctx.reach, index)
            at = tuple(index.T)
            dV = weights * dm[at][:, None]
            dK = dV * (values - mean[at][:, None])
            key = tile, group, column
            dv.mT.index_put_(key, dV, accumulate=True)
            dk.mT.index_put_(key, dK, accumulate=True)
            bias = tile % len(w), group, row
            dw.index_put_(bias, dK, accumulate=True)
        return dk, dv, dw, None


def _factors(
    k: Tensor, v: Tensor, w: Tensor, reach: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`E`, `X` and `XV` of (e5), clamped, and a mask of unsafe rows.

    An unsafe row sees an entry beyond the bounds.
    """
    visible = _visible(w, reach)
    common = k[:, :, : _common(w, reach)]
    top = torch.zeros_like(k[:, :, :1])
    if common.shape[2]:
        top = common.amax(2, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0)
    E = w.clamp(max=MAX_EXPONENT).exp_()
    E = E if visible is None else E.mul_(visible)
    exponent = k - top
    X = exponent.clamp(max=MAX_EXPONENT).exp_()
    XV = X * v
    bad = (exponent > MAX_EXPONENT) | ~(XV.abs() < MAX_VALUE)
    wide = (
        w > MAX_EXPONENT
        if visible is None
        else (w > MAX_EXPONENT) & visible
    )
    unsafe = wide.any(-1, keepdim=True)
    if bad.any():
        XV = XV.masked_fill(bad, 0)
        sees = (
            torch.ones_like(w)
            if visible is None
            else visible.to(w.dtype)
        )
        unsafe = unsafe | (torch.matmul(sees, bad.to(w.dtype)) > 0)
    return E, X, XV, unsafe


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


def _visible(w: Tensor, reach: int | None) -> Tensor | None:
    """Row $r$ sees the keys up to $r$ + `reach`; None: all keys."""
    if reach is None:
        return None
    return torch.ones(
        w.shape[-2:], dtype=torch.bool, device=w.device
    ).tril(reach)


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
