r"""# AFT-local and AFT-conv in linear memory

A tile of rows sees a span of keys as AFT-full sees all keys. All other
keys act as one more key: their running mean, computed as in AFT-simple
(e1).
"""

import torch
from torch import Tensor

from fwlab.ops import chunks
from fwlab.ops.aft.full.efficient import Tile, flat
from fwlab.ops.aft.simple.efficient import before_each, means

#: Rows per tile.
TILE = 64


def causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Tensor,
    log_sum: Tensor,
    mean: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Row $t$ sees past and present; called as the naive version."""
    time, width = q.shape[1], band.shape[-1]
    n = chunks.count(time, TILE)
    # A tile's worth of keys leaves the window at a time.
    gone = means(k[:, :time], v[:, :time], TILE)
    L, m = before_each(*gone, log_sum, mean)
    outside = [(L[:, :n], m[:, :n])]
    index = _window_of(width, q.device)
    w = _spread(band, time, index, width - 1 - index)
    back = n * TILE - time
    y = _tiles(q, k, v, w, outside, (0, back), width - 1)
    return y, L[:, -1], m[:, -1]


def not_causal(q: Tensor, k: Tensor, v: Tensor, band: Tensor) -> Tensor:
    """Every row sees all steps; arguments as in the naive version."""
    time, width = q.shape[1], band.shape[-1]
    n, half = chunks.count(time, TILE), width // 2
    starts = torch.arange(n, device=q.device) * TILE
    before = (starts - half).clamp(min=0)
    behind = (starts + TILE + half).clamp(max=time)
    outside = _outside(k, v, before, time - behind)
    # Columns count the steps back, and then those ahead.
    index = _window_of(width, q.device)
    column = torch.where(index > half, index, half - index)
    w = _spread(band, time, index, column)
    back = n * TILE + half - time
    return _tiles(q, k, v, w, outside, (half, back), None)


def image(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    height: int,
    width: int,
) -> Tensor:
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


def _window_of(width: int, device: torch.device) -> Tensor:
    """The index of each key of a span in the window of each row.

    The window of row $r$ begins with key $r$ of the span; an index
    below 0, or from `width` on, is outside of it.
    """
    keys = torch.arange(TILE + width - 1, device=device)
    return keys - torch.arange(TILE, device=device)[:, None]


def _spread(
    band: Tensor, time: int, index: Tensor, column: Tensor
) -> Tensor:
    """The biases of all tiles, `[tiles or 1, groups, row, key]`.

    - `index`: `[row, key]`, of the key in the window of the row.
    - `column`: `[row, key]`, of its bias in the band.
    """
    if band.shape[1] == 1:  # the same for all steps
        band = band[:, None].expand(-1, 1, TILE, -1)
    else:
        n = chunks.count(time, TILE)
        band = torch.nn.functional.pad(band, (0, 0, 0, n * TILE - time))
        band = band.unflatten(1, (n, TILE))
    width = band.shape[-1]
    inside = (index >= 0) & (index < width)
    column = column.clamp(0, width - 1).expand(*band.shape[:2], -1, -1)
    w = torch.where(inside, band.gather(-1, column), 0)  # Eq. 4
    return w.transpose(0, 1)


def _outside(
    k: Tensor, v: Tensor, before: Tensor, behind: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """The running means of the steps before and behind each tile.

    - `before`, `behind`: `[tiles]`, the number of these steps.
    """
    batch, _, channels = k.shape
    empty = (
        k.new_full((batch, channels), -torch.inf),
        k.new_zeros(batch, channels),
    )
    L, m = before_each(k, v, *empty)
    means = [(L[:, before], m[:, before])]
    L, m = before_each(k.flip(1), v.flip(1), *empty)
    return [*means, (L[:, behind], m[:, behind])]


def _tiles(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    outside: list[tuple[Tensor, Tensor]],
    edges: tuple[int, int],
    reach: int | None,
) -> Tensor:
    """Tiles that each see a span of keys, and means of all others.

    - `q`: `[batch, time, channels]`.
    - `k`, `v`: `[batch, keys, channels]`. Counting the edges, tile `i`
      of `r` rows sees the `span` keys from `i * r` on.
    - `w`: `[tiles or 1, groups, r, span]`.
    - `outside`: running means `[batch, tiles, channels]` of the other
      keys; by (e1) each is one more key, with bias 0.
    - `edges`: the number of empty keys to add before and after.
    - `reach`: row `r` sees the keys up to `r + reach` of its span.
    """
    r, span = w.shape[-2:]
    spans = []
    for index, (x, fill) in enumerate(((k, -torch.inf), (v, 0))):
        x = torch.nn.functional.pad(x, (0, 0, *edges), value=fill)
        more = [mean[index][:, :, None] for mean in outside]
        spans.append(_spans(x, r, span, w.shape[1], more))
    w = torch.nn.functional.pad(w, (len(outside), 0))
    reach = None if reach is None else reach + len(outside)
    m = flat(Tile.apply(*spans, w, reach), q)
    return torch.sigmoid(q) * m[:, : q.shape[1]]  # Eq. 2


def _spans(
    x: Tensor, r: int, span: int, groups: int, more: list[Tensor]
) -> Tensor:
    """`more`, then `span` keys from every `r`-th key on.

    A span is some whole pieces of `r` keys, and the beginning of
    another one. (The gradient of `unfold` takes longer than all
    products.)

    - `more`: each `[batch, tiles, 1, channels]`.
    - Returns `[tiles, groups, keys, batch * c]`, like `grouped`.
    """
    n = (x.shape[1] - span) // r + 1
    pieces = [*more]
    for first in range(0, span, r):
        here = x[:, first : first + n * r]
        missing = n * r - here.shape[1]
        here = torch.nn.functional.pad(here, (0, 0, 0, missing))
        pieces.append(here.unflatten(1, (n, r))[:, :, : span - first])
    ordered = [
        piece.unflatten(3, (groups, -1)).permute(1, 3, 2, 0, 4)
        for piece in pieces
    ]
    return torch.cat(ordered, 2).flatten(3)
