r"""# AFT-full in tiles

A *tile* of rows is two matrix products, as long as its exponents are
harmless. Rows whose exponents are not are computed exactly, one by one.
AFT-local and AFT-conv use the same tiles, over the keys of a window.
"""

from typing import Any

import torch
from torch import Tensor

from fwlab.ops import autograd

#: Rows per tile.
TILE = 64
#: Elements of the keys of unsafe rows that are computed together.
ROOM = 2**20
#: Bounds of what a matrix product may take, far from the ends of
#: float32: the largest exponent, the smallest sum of weights and the
#: largest value.
MAX_EXPONENT, MIN_SUM, MAX_VALUE = 20.0, 1e-10, 1e25


class Tile(torch.autograd.Function):
    r"""Eq. 2 for the rows of some tiles.

    With the largest key $c$ that *all* rows of a tile see,

    $$E = e^{w}, \quad X = e^{K - c}, \quad
      m = \frac{E\, (X \odot V)}{E\, X} \tag{e5}$$

    are two matrix products. They are exact as long as no exponent that
    the row sees is large and the sum is not tiny. A row that
    fails this test is computed by its own softmax. A key that a row
    does not see, with $E = 0$, adds an exact 0 to its sums and does not
    enter the test: it changes no bit.
    """

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, w: Tensor, last: int | None
    ) -> Tensor:
        E, X, XV, unsafe = _factors(k, v, w, last)
        total = torch.matmul(E, X)
        mean = torch.matmul(E, XV)
        unsafe = unsafe | ~(total >= MIN_SUM)
        total.masked_fill_(unsafe, 1)
        mean.div_(total).masked_fill_(unsafe, 0)  # (e5)
        places = unsafe.nonzero()
        for place in places.split(max(ROOM // k.shape[2], 1)):
            weights, values = _softmax(k, v, w, last, place)
            mean[tuple(place.T)] = (weights * values).sum(-1)
        ctx.save_for_backward(k, v, w, total, mean, places)
        ctx.last = last
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
        k, v, w, total, mean, places = ctx.saved_tensors
        E, X, XV, _ = _factors(k, v, w, ctx.last)
        G = dm / total
        G[tuple(places.T)] = 0
        Gm = G * mean
        R, Rm = torch.matmul(E.mT, G), torch.matmul(E.mT, Gm)
        dv = X * R  # (e6)
        dk = XV * R - X * Rm  # (e7)
        dw = torch.matmul(G, XV.mT) - torch.matmul(Gm, X.mT)
        dw *= E  # (e8)
        if len(w) < len(dw):
            dw = dw.sum(0, keepdim=True)
        for place in places.split(max(ROOM // k.shape[2], 1)):
            tile, group, row, column = place.T
            weights, values = _softmax(k, v, w, ctx.last, place)
            at = tuple(place.T)
            dV = weights * dm[at][:, None]
            dK = dV * (values - mean[at][:, None])
            key = tile, group, column
            dv.mT.index_put_(key, dV, accumulate=True)
            dk.mT.index_put_(key, dK, accumulate=True)
            bias = tile % len(w), group, row
            dw.index_put_(bias, dK, accumulate=True)
        return dk, dv, dw, None


def _factors(
    k: Tensor, v: Tensor, w: Tensor, last: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`E`, `X` and `XV` of (e5), clamped, and the rows that see an
    entry beyond the bounds.
    """
    seen = _visible(w, last)
    common = k[:, :, : _common(w, last)]
    top = torch.zeros_like(k[:, :, :1])
    if common.shape[2]:
        top = common.amax(2, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0)
    E = w.clamp(max=MAX_EXPONENT).exp_()
    E = E if seen is None else E.mul_(seen)
    exponent = k - top
    X = exponent.clamp(max=MAX_EXPONENT).exp_()
    XV = X * v
    bad = (exponent > MAX_EXPONENT) | ~(XV.abs() < MAX_VALUE)
    wide = (
        w > MAX_EXPONENT if seen is None else (w > MAX_EXPONENT) & seen
    )
    unsafe = wide.any(-1, keepdim=True)
    if bad.any():
        XV = XV.masked_fill(bad, 0)
        sees = torch.ones_like(w) if seen is None else seen.to(w.dtype)
        unsafe = unsafe | (torch.matmul(sees, bad.to(w.dtype)) > 0)
    return E, X, XV, unsafe


def _softmax(
    k: Tensor, v: Tensor, w: Tensor, last: int | None, place: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights and values of single rows, `[places, keys]` each.

    - `place`: `[places, 4]`: tile, group, row and column.
    """
    tile, group, row, column = place.T
    exponent = k.mT[tile, group, column] + w[tile % len(w), group, row]
    if last is not None:
        keys = torch.arange(k.shape[2], device=k.device)
        unseen = keys > row[:, None] + last
        exponent.masked_fill_(unseen, -torch.inf)
    empty = (exponent == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(exponent.masked_fill_(empty, 0), -1)
    return weights.masked_fill_(empty, 0), v.mT[tile, group, column]


def _visible(w: Tensor, last: int | None) -> Tensor | None:
    """Row $r$ sees the keys up to $r$ + `last`; None: all keys."""
    if last is None:
        return None
    return torch.ones(
        w.shape[-2:], dtype=torch.bool, device=w.device
    ).tril(last)


def _common(w: Tensor, last: int | None) -> int:
    """How many keys all rows see."""
    keys = w.shape[-1]
    return keys if last is None else max(min(last + 1, keys), 0)


def causal(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Row $t$ sees past and present; called as the naive version is."""
    return _rows(q, k, v, w, k.shape[1] - q.shape[1])


def not_causal(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Every row sees all steps; called as the naive version is."""
    return _rows(q, k, v, w, None)


def _rows(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, last: int | None
) -> Tensor:
    """Row $t$ sees the keys up to $t$ + `last`; None: all keys."""
    keys = k.shape[1]
    K, V = (grouped(x[:, None], 1) for x in (k, v))
    means = []
    for i, tile in enumerate(w.split(TILE)):
        reach = None if last is None else last + i * TILE
        end = keys if reach is None else min(reach + TILE, keys)
        means.append(
            Tile.apply(
                K[:, :, :end],
                V[:, :, :end],
                tile[None, None, :, :end],
                reach,
            )
        )
    return torch.sigmoid(q) * flat(torch.cat(means, 2), q)  # Eq. 2


def grouped(x: Tensor, groups: int) -> Tensor:
    """`[batch, tiles, keys, groups * c]` to `[tiles, groups, keys,
    batch * c]`: channels that share their biases share a matrix.
    """
    x = x.unflatten(3, (groups, -1))
    return x.permute(1, 3, 2, 0, 4).flatten(3)


def flat(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of `grouped`: `[batch, tiles * rows, channels]`."""
    x = x.unflatten(3, (len(like), -1))
    return x.permute(3, 0, 2, 1, 4).flatten(3).flatten(1, 2)
