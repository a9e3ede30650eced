r"""# AFT-local and AFT-conv in linear memory

A tile of rows sees a span of keys as AFT-full sees all keys. All other keys act as one
more key: their running mean, computed as in AFT-simple (e1). A sequence that is not
much longer than a tile is computed as one tile. Tiles and running means have custom
backward passes; autograd does the rest.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab.ops._operation import unseen
from fwlab.ops._recurrence import is_traced
from fwlab.ops.aft.full.efficient import tiles
from fwlab.ops.aft.simple.efficient import before_each

#: Rows per tile. A tile has up to twice as many rows if it is the whole sequence, and
#: so needs no running mean, or if the window is wide.
TILE = 64


def causal(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, log_sum: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute causal AFT-local or AFT-conv, with the arguments of the naive version."""
    time, width = q.shape[1], band.shape[-1]  # In a traced call, sizes are symbolic.
    usual = is_traced(q) or (width <= TILE and time > 2 * TILE)
    r = TILE if usual else min(time, 2 * TILE)
    n = -(-time // r)
    # With each tile, as many keys leave the window as the tile has rows.
    L, m = before_each(*_means(k[:, :time], v[:, :time], r), log_sum, mean)
    w = _spread(band.flip(-1), r)
    k, v = _padded(k, v, 0, n * r - time)
    y = _tiles(q, k, v, w, (L[:, :n], m[:, :n]), width - 1)
    return y, L[:, -1], m[:, -1]


def causal_without_state(q: Tensor, k: Tensor, v: Tensor, band: Tensor) -> Tensor:
    """Compute causal AFT-local or AFT-conv without an initial and a final state.

    - `k`, `v`: `[batch, time, channels]`.
    """
    time, before = q.shape[1], band.shape[-1] - 1
    if not is_traced(q) and time <= 2 * TILE:  # One tile sees all keys.
        w = _spread(band.flip(-1), time, before)
        return tiles((q, k, v, w, None, None), 0)[0]
    return causal(q, *_padded(k, v, before, 0), band, *unseen(q, q[:, 0].shape))[0]


def not_causal(q: Tensor, k: Tensor, v: Tensor, band: Tensor) -> Tensor:
    """Compute AFT-local or AFT-conv without a causal mask; rows see all steps."""
    # The first columns count steps back, and the other columns count steps ahead.
    half = band.shape[-1] // 2
    back, ahead = band[..., : half + 1], band[..., half + 1 :]
    w = _spread(torch.cat([back.flip(-1), ahead], -1), TILE)
    return _both_sides(q, k, v, w, half)


def image(
    q: Tensor, k: Tensor, v: Tensor, kernel: Tensor, height: int, width: int
) -> Tensor:
    """Compute AFT-conv of an image, with the arguments of the naive version.

    A line of the image is a tile. It sees the lines that the kernel covers.
    """
    half = kernel.shape[-1] // 2
    # The biases between a line and the lines around it are the same for all lines.
    column = torch.arange(width, device=q.device)
    right = column - column[:, None] + half
    inside = (right >= 0) & (right <= 2 * half)
    w = kernel[:, :, right.clamp(0, 2 * half)]  # The shape is [heads, lines, row, key].
    w = torch.where(inside, w, 0).transpose(1, 2).flatten(2)
    return _both_sides(q, k, v, w[None], half * width)


def _both_sides(q: Tensor, k: Tensor, v: Tensor, w: Tensor, reach: int) -> Tensor:
    """Compute tiles that see `reach` keys on both sides and the means of other keys.

    - `w`: as in `_tiles`.
    """
    r = w.shape[2]
    n = -(-q.shape[1] // r)
    k, v = _padded(k, v, reach, n * r + reach - q.shape[1])
    before, behind = (
        before_each(
            *_means(keys[:, : n * r], values[:, : n * r], r), *unseen(q, q[:, 0].shape)
        )
        for keys, values in ((k, v), (k.flip(1), v.flip(1)))
    )
    L, m = (
        torch.stack([x[:, :n], y[:, :n].flip(1)], 2).flatten(1, 2)
        for x, y in zip(before, behind, strict=True)
    )
    return _tiles(q, k, v, w, (L, m), -1)


def _tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    outside: tuple[Tensor, Tensor],
    reach: int,
) -> Tensor:
    """Compute tiles that each see a span of keys and the means of all other keys.

    - `q`: `[batch, time, channels]`; `k`, `v`: `[batch, keys, channels]`. Tile `i` of
      `r` rows sees the keys from `i * r` on, as many as `w` has columns.
    - `w`: `[tiles or 1, groups, r, span]`.
    - `outside`: running means of the other keys, `[batch, tiles * n, channels]` for `n`
      per tile; by (e1) each is one more key, with bias 0.
    - `reach`: row `r` sees the keys up to `r + reach` of its span; -1 = all.
    """
    time, r = q.shape[1], w.shape[2]
    count = -(-time // r)
    if is_traced(q) or time % r:
        q = F.pad(q, (0, 0, 0, count * r - time))
    return tiles((q, k, v, w, *outside), reach)[0][:, :time]


def _spread(band: Tensor, r: int, skip: int = 0) -> Tensor:
    """Return the biases of tiles of `r` rows, `[tiles, groups, r, keys]` (Eq. 4).

    Each row of the band begins one key after the previous row: in memory, a row of keys
    is one entry shorter than a row of the band with `r` zeros after it.

    - `band`: `[groups, time or 1, width]`, in the order of the keys; 1 = the same for
      all steps.
    - `skip`: the number of keys to drop.
    """
    groups, time, width = band.shape
    n, line = 1 if time == 1 else -(-time // r), width + r
    if time == 1:
        band = band.expand(-1, r, -1)
    padded = F.pad(band, (0, r, 0, n * r - band.shape[1]))
    sizes, strides = (
        (n, groups, r, line - 1 - skip),
        (r * line, n * r * line, line - 1, 1),
    )
    return padded.as_strided(sizes, strides, skip)


def _means(k: Tensor, v: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Return the log sum and mean (Eq. e1) of each piece of `steps` keys.

    - `k`, `v`: `[batch, keys, channels]`. The last piece may be short.
    - Returns `log_sum` and `mean`, `[batch, pieces, channels]`.
    """
    n = -(-k.shape[1] // steps)
    k, v = _padded(k, v, 0, n * steps - k.shape[1])
    k, v = (x.unflatten(1, (n, steps)) for x in (k, v))
    top = k.detach().amax(2, keepdim=True)
    top = top.masked_fill(top == -math.inf, 0)
    weights = (k - top).exp()
    s = weights.sum(2)
    empty = s == 0
    s = s.masked_fill(empty, 1)
    L = (top[:, :, 0] + s.log()).masked_fill(empty, -math.inf)
    return L, (weights * v).sum(2) / s


def _padded(k: Tensor, v: Tensor, before: int, behind: int) -> tuple[Tensor, Tensor]:
    """Pad time with keys of -inf, which no row sees, and with values of 0."""
    if not is_traced(k) and not before and not behind:
        return k, v
    edges = 0, 0, before, behind
    return F.pad(k, edges, value=-math.inf), F.pad(v, edges)
