r"""# AFT-local and AFT-conv in linear memory

A tile of rows sees a span of keys as AFT-full sees all keys. All other
keys act as one more key: their running mean, computed as in AFT-simple
(e1). A sequence that is not much longer than a tile is computed as one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab.ops.aft.full.efficient import (
    MAX_FACTOR,
    MIN_SUM,
    Tile,
    Tiles,
)
from fwlab.ops.aft.operator import apply, form, inside
from fwlab.ops.aft.simple.efficient import before_each, means
from fwlab.ops.parts import autograd, chunks

#: Rows per tile. Up to twice as many are one tile, as in AFT-full: the
#: product is larger, but no key needs a running mean.
TILE = 64


@form("window")
def causal(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, log_sum: Tensor,
    mean: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Row $t$ sees past and present; called as the naive version."""
    time, width = q.shape[1], band.shape[-1]
    r = _rows(time)
    n = chunks.count(time, r)
    # A tile's worth of keys leaves the window at a time.
    gone = means(k, v, r, time)
    L, m = before_each(*gone, log_sum, mean)
    w = _spread(band.flip(-1), r)
    outside = L[:, :n], m[:, :n]
    edges = 0, n * r - time
    y = _tiles(q, k, v, w, outside, edges, width - 1)
    return y, L[:, -1], m[:, -1]


@form("window, whole")
def whole(q: Tensor, k: Tensor, v: Tensor, band: Tensor) -> Tensor:
    """`causal` without a state before the sequence or after it.

    - `k`, `v`: `[batch, time, channels]`.
    """
    time, before = q.shape[1], band.shape[-1] - 1
    if _rows(time) == time:  # no tile has a key before it
        w = _spread(band.flip(-1), time, before)
        if len(band) == 1 and not inside():
            made = factors(k, v, w[0, 0])
            if made is not None:
                return Whole.apply(q, k, v, w[0, 0], *made)
        return _tiles(q, k, v, w, None, (0, 0), 0)
    log_sum, mean = _empty(q)
    k, v = (
        torch.cat([fill[:, None].expand(-1, before, -1), x], 1)
        for x, fill in ((k, log_sum), (v, mean))
    )
    return causal(q, k, v, band, log_sum, mean)[0]


@torch.no_grad()
def factors(
    k: Tensor, v: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    r"""$E$, $(X, X \odot V)$ and both sums of (e5) for all steps.

    None if one of them is out of bounds: see `Tiles`. Row 0 sees only
    key 0, so $c = K_0$.

    - `w`: `[time, time]`.
    """
    time, batch, c = k.shape[1], len(k), k.shape[2]
    E = w.exp().tril_()
    both = k.new_empty(2, time, batch, c)
    X, XV = both
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    torch.sub(k, k[:1], out=X).exp_()
    torch.mul(X, v, out=XV)
    # The products of `Tiles`: where a key is out of bounds, the rows
    # before it stay as they are, to the last bit.
    sums = torch.stack([E.mm(x.view(time, -1)) for x in (X, XV)])
    low, high = both.aminmax()
    high = torch.maximum(torch.maximum(high, -low), E.amax())
    # Comparisons with NaN are False.
    fine = (high <= MAX_FACTOR) & (sums[0].amin() >= MIN_SUM)
    return (E, both, sums.view_as(both)) if fine else None


class Whole(torch.autograd.Function):
    """A sequence that is one tile: (e5) to (e8) without its cases.

    - `E`, `both`, `sums`: those of `factors`.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, w: Tensor, E: Tensor,
        both: Tensor, sums: Tensor,
    ) -> Tensor:  # fmt: skip
        """Eq. 2."""
        total, mean = sums
        gate, y = torch.sigmoid(q), torch.empty_like(q)
        torch.div(mean, total, out=mean)
        torch.mul(gate, mean.transpose(0, 1), out=y)
        ctx.save_for_backward(gate, y, E, both, total)
        return y

    @staticmethod
    @autograd.backward_pass
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """As in `Tiles`."""
        gate, y, E, both, total = ctx.saved_tensors
        dq = dy * y
        slopes = torch.empty_like(both)
        Gm, G = slopes
        torch.div(dy.transpose(0, 1), total, out=G)
        torch.mul(G, y.transpose(0, 1), out=Gm)
        G.mul_(gate.transpose(0, 1))
        dq.addcmul_(dq, gate, value=-1)
        X, XV = both
        Gm, G, x, xv = (z.view(len(E), -1) for z in (Gm, G, X, XV))
        dw = G.mm(xv.mT).addmm_(Gm, x.mT, alpha=-1).mul_(E)  # (e8)
        Rm, R = (E.mT.mm(z).view_as(X) for z in (Gm, G))
        dk = (XV * R).addcmul_(X, Rm, value=-1).transpose(0, 1)  # (e7)
        dv = (X * R).transpose(0, 1)  # (e6)
        return dq, dk, dv, dw, None, None, None


@form("window, not causal")
def not_causal(q: Tensor, k: Tensor, v: Tensor, band: Tensor) -> Tensor:
    """Every row sees all steps; arguments as in the naive version."""
    time, half = q.shape[1], band.shape[-1] // 2
    n = chunks.count(time, TILE)
    starts = torch.arange(n, device=q.device) * TILE
    before = (starts - half).clamp(min=0)
    behind = (starts + TILE + half).clamp(max=time)
    outside = _outside(k, v, before, time - behind)
    # Columns count the steps back, and then those ahead.
    back, ahead = band[..., : half + 1], band[..., half + 1 :]
    w = _spread(torch.cat([back.flip(-1), ahead], -1), TILE)
    edges = half, n * TILE + half - time
    return _tiles(q, k, v, w, outside, edges, None)


@form("image")
def image(
    q: Tensor, k: Tensor, v: Tensor, kernel: Tensor, height: int,
    width: int,
) -> Tensor:  # fmt: skip
    """AFT-conv of an image; arguments as in the naive version.

    A line of the image is a tile. It sees the lines that the kernel
    covers; all lines above them are one key, and all below another.
    """
    half = kernel.shape[-1] // 2
    line = torch.arange(height, device=q.device)
    above = (line - half).clamp(min=0) * width
    below = (height - 1 - line - half).clamp(min=0) * width
    outside = _outside(k, v, above, below)
    # One line and the lines around it: the same for all lines.
    column = torch.arange(width, device=q.device)
    right = column - column[:, None] + half
    inside = (right >= 0) & (right <= 2 * half)
    w = kernel[
        :, :, right.clamp(0, 2 * half)
    ]  # [heads, lines, row, key]
    w = torch.where(inside, w, 0).transpose(1, 2).flatten(2)
    edges = half * width, half * width
    return _tiles(q, k, v, w[None], outside, edges, None)


def _rows(time: int) -> int:
    """The number of rows of a causal tile."""
    return time if time <= 2 * TILE else TILE


class _Spread(torch.autograd.Function):
    """The biases of tiles of `r` rows, `[tiles, groups, r, keys]`.

    Each row of the band begins one key after the row before it: in
    memory, a row of keys is one entry shorter than a row of the band
    with `r` zeros behind it.

    - `band`: `[groups, time, width]`, in the order of the keys.
    - `skip`: the number of keys to drop.
    """

    @staticmethod
    def forward(ctx: Any, band: Tensor, r: int, skip: int) -> Tensor:
        """Copy the band along the diagonals of the tiles."""
        ctx.sizes, ctx.r, ctx.skip = band.shape, r, skip
        w, inside = _skewed(band, band.shape, r, skip)
        inside.copy_(band)
        return w  # Eq. 4

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
        """Copy it back out of the tiles."""
        w, inside = _skewed(dw, ctx.sizes, ctx.r, ctx.skip)
        w.copy_(dw)
        return inside, None, None


def _skewed(
    like: Tensor, sizes: torch.Size, r: int, skip: int
) -> tuple[Tensor, Tensor]:
    """Zeros of `_Spread`, as the biases of tiles and as a band."""
    groups, time, width = sizes
    n = chunks.count(time, r)
    padded = like.new_zeros(groups, n * r, width + r)
    w = padded.unflatten(1, (n, r)).flatten(2)[..., :-r]
    w = w.unflatten(2, (r, width + r - 1)).transpose(0, 1)
    return w[..., skip:], padded[:, :time, :width]


def _spread(band: Tensor, r: int, skip: int = 0) -> Tensor:
    """`_Spread` of the band, or of its only row."""
    if band.shape[1] == 1:  # the same for all steps
        band = band.expand(-1, r, -1)
    return _Spread.apply(band, r, skip)


def _empty(k: Tensor) -> tuple[Tensor, Tensor]:
    """The running mean of no steps."""
    size = len(k), k.shape[2]
    return k.new_full(size, -torch.inf), k.new_zeros(size)


def _outside(
    k: Tensor, v: Tensor, before: Tensor, behind: Tensor
) -> tuple[Tensor, Tensor]:
    """The running means of the steps before and behind each tile.

    - `before`, `behind`: `[tiles]`, the number of these steps.
    - Returns `[batch, tiles * 2, channels]` each.
    """
    empty = _empty(k)
    first = before_each(k, v, *empty)
    last = before_each(k.flip(1), v.flip(1), *empty)
    L, m = (
        torch.stack([x[:, before], y[:, behind]], 2).flatten(1, 2)
        for x, y in zip(first, last, strict=True)
    )
    return L, m


def _tiles(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor,
    outside: tuple[Tensor, Tensor] | None, edges: tuple[int, int],
    reach: int | None,
) -> Tensor:  # fmt: skip
    """Tiles that each see a span of keys, and means of all others.

    - `q`: `[batch, time, channels]`.
    - `k`, `v`: `[batch, keys, channels]`. Counting the edges, tile `i`
      of `r` rows sees the `span` keys from `i * r` on.
    - `w`: `[tiles or 1, groups, r, span]`.
    - `outside`: running means of the other keys, `[batch, tiles * n,
      channels]` for `n` per tile; by (e1) each is one more key, with
      bias 0.
    - `edges`: the number of empty keys to add before and after.
    - `reach`: row `r` sees the keys up to `r + reach` of its span.
    """
    time, r = q.shape[1], w.shape[2]
    if any(edges):
        k = F.pad(k, (0, 0, *edges), value=-torch.inf)
        v = F.pad(v, (0, 0, *edges))
    if missing := -time % r:
        q = F.pad(q, (0, 0, 0, missing))
    tiles, count = [Tile(slice(None), None, reach)], q.shape[1] // r
    L, m = outside or (None, None)
    return apply(Tiles, q, k, v, w, L, m, tiles, count)[:, :time]
