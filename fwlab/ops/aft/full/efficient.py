r"""# AFT-full in tiles

A *tile* of rows takes two matrix products, as long as no factor is too
large. Rows with larger factors are computed on their own, by a softmax.
AFT-local and AFT-conv use the same tiles, over the keys of a window.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab.ops.aft.operator import apply, form
from fwlab.ops.call.operators import Context
from fwlab.ops.parts import autograd

#: Rows per tile.
TILE = 128
#: Keys of unsafe rows that are computed together, counted in scalars.
ROOM = 2**20
#: Bounds for the matrix products, far from the limits of float32: the
#: maximum size of a factor, and the minimum sum of weights.
MAX_FACTOR, MIN_SUM = 1e12, 1e-10
#: How far the maximum of the keys may move while tiles share factors.
MAX_DRIFT = 10.0

#: Keys and values, each `[tiles, groups, keys, batch, c]`. Only the
#: last pair has biases.
Pairs = list[tuple[Tensor, Tensor]]


class Tile(NamedTuple):
    """Some rows, and the keys that they see.

    - `rows`: their indices.
    - `end`: the number of keys that any of them sees; None: all.
    - `reach`: row `r` of the tile sees the keys up to `r + reach`;
      None: all keys.
    """

    rows: slice
    end: int | None
    reach: int | None


class Tiles(torch.autograd.Function):
    r"""Eq. 2 for the rows of some tiles.

    With $c$ the maximum of the keys that *all* rows see,

    $$E = e^{w}, \quad X = e^{K - c}, \quad
      m = \frac{E\, (X \odot V)}{E\, X} \tag{e5}$$

    takes two matrix products. They are exact as long as no factor that
    the row sees is large and the sum is not tiny. A row that fails this
    test is computed by its own softmax. A key that a row does not see
    has $E = 0$: it adds an exact 0 to the sums and does not enter the
    test, so it does not change a bit.

    - `q`: `[batch, rows, channels]`; `k`, `v`: `[batch, keys,
      channels]`.
    - `w`: `[tiles or 1, groups, rows, keys]`; channels of a group have
      the same biases.
    - `L`, `m`: more keys and values of each tile, with bias 0, that all
      of its rows see: `[batch, tiles * more, channels]`, or None.
    - `tiles`: one below the other, with the same $c$.
    - `count`: instead, cut the only tile into this many, side by side.
      Each sees as many keys as `w` has columns, and begins as many keys
      after the one before it as `w` has rows.
    - `keep`: keep `X` and `XV` for the backward pass, not `k` and `v`.

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
        count: int = 1,
        keep: bool = True,
    ) -> Tensor:
        """Weights, sums and outputs of one tile after the other."""
        inputs: tuple[Tensor | None, ...] = k, v, L, m
        ctx.shapes = [None if x is None else x.shape for x in inputs]
        ctx.tiles, ctx.count = tiles, count
        pairs, kept = _seen(k, v, w, L, m, count), []
        both, bad = _keys(pairs, tiles[0].reach)
        X, XV = both
        columns = X.shape[3:]
        gate, y = torch.sigmoid(q), torch.empty_like(q)
        for tile in tiles:
            E = _biases(w, tile, X.shape[2] - w.shape[3])
            x, xv = _until(E, X), _until(E, XV)
            total, mean = torch.matmul(E, x), torch.matmul(E, xv)
            indices = None
            # Comparisons with NaN are False.
            fine = (total.amin() >= MIN_SUM) & (E.amax() <= MAX_FACTOR)
            if bad is not None or not fine:
                wrong = _unsafe(E, bad, tile, X.shape[2] - w.shape[3])
                wrong = wrong | ~(total >= MIN_SUM)
                total.masked_fill_(wrong, 1)
                indices = wrong.unflatten(3, columns).nonzero()
            mean.div_(total)  # (e5)
            total, mean = (
                sums.unflatten(3, columns) for sums in (total, mean)
            )
            for at in _pieces(indices, E):
                weights, values = _softmax(pairs, w, tile, at)
                mean[tuple(at.T)] = (weights * values).sum(-1)
            gate_t, y_t = (
                _rows(x[:, tile.rows], w, count) for x in (gate, y)
            )
            torch.mul(gate_t, mean, out=y_t)  # Eq. 2
            kept += [total, indices]
        # Only single rows need the inputs as well.
        if keep and all(x is None for x in kept[1::2]):
            inputs = (None,) * 4
        factors = both if keep else None
        ctx.save_for_backward(gate, y, w, factors, *inputs, *kept)
        return y

    @staticmethod
    @autograd.backward_pass
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        r"""With $p = E X / (E X)$ the weights of a row,
        $dV = p^\top dm$, and $w$ and $K$ both get $p\, dm\, (V - m)$,
        summed over the rows or columns that share them:

        $$G = \frac{dm}{E X}, \qquad dV = X \odot E^\top G \tag{e6}$$
        $$dK = X \odot \big(V \odot E^\top G - E^\top (G m)\big)
          \tag{e7}$$
        $$dw = E \odot \big(G\, (X V)^\top - (G m)\, X^\top\big)
          \tag{e8}$$

        The gate is part of both factors: $dm = \sigma(q)\, dy$, and
        $y = \sigma(q)\, m$.
        """
        gate, y, w, both, k, v, L, m, *kept = ctx.saved_tensors
        pairs: Pairs = []
        if k is not None:
            pairs = _seen(k, v, w, L, m, ctx.count)
        if both is None:
            both, _ = _keys(pairs, ctx.tiles[0].reach)
        X, XV = both
        dq = dy * y
        dq.addcmul_(dq, gate, value=-1)
        dw, more = torch.zeros_like(w), X.shape[2] - w.shape[3]
        # $E^\top (G m)$ and $E^\top G$, and gradients by single rows.
        products: list[Tensor] = []
        single: list[Tensor] = []
        # The last tile sees all keys.
        for tile in reversed(ctx.tiles):
            *kept, total, indices = kept
            gate_t, y_t, dy_t = (
                _rows(x[:, tile.rows], w, ctx.count)
                for x in (gate, y, dy)
            )
            G = torch.div(dy_t, total)
            if indices is not None:
                G[tuple(indices.T)] = 0
            slopes = [
                x.flatten(3)
                for x in (torch.mul(G, y_t), G.mul_(gate_t))
            ]
            E = _biases(w, tile, more)
            if indices is not None:
                E.masked_fill_(_wide(E), 0)
            dE, less = (
                torch.matmul(slope, _until(E, x).mT)
                for slope, x in zip(slopes[::-1], (XV, X), strict=True)
            )
            dE.sub_(less).mul_(E)  # (e8)
            if not products:
                products = [torch.matmul(E.mT, x) for x in slopes]
            else:
                for sums, x in zip(products, slopes, strict=True):
                    sums = sums[0, :, : E.shape[3]]
                    sums.baddbmm_(E[0].mT, x[0])
            del G, slopes, less
            for at in _pieces(indices, E):
                single = single or [torch.zeros_like(x) for x in (X, X)]
                weights, values = _softmax(pairs, w, tile, at)
                mean = (weights * values).sum(-1, keepdim=True)
                slope = gate_t[tuple(at.T)] * dy_t[tuple(at.T)]
                dV = weights * slope[:, None]
                dK = dV * (values - mean)
                number, group, row, *column = at.T
                key = number, group, *column
                for sums, part in zip(single, (dK, dV), strict=True):
                    sums = sums[:, :, : E.shape[3]].movedim(2, -1)
                    sums.index_put_(key, part, accumulate=True)
                dE.index_put_((number, group, row), dK, accumulate=True)
            dw_t = dw[:, :, tile.rows, : tile.end]
            dw_t.copy_(dE[..., more:].sum_to_size(dw_t.shape))
            del E, dE
        Rm, R = (x.view(X.shape) for x in products)
        gradients: list[Any] = [
            None if shape is None else gate.new_zeros(shape)
            for shape in ctx.shapes
        ]
        dk, dv, dL, dm = gradients
        for here, *add in _places(dk, dv, w, dL, dm, ctx.count):
            x, xv, r, rm = (z[:, :, here] for z in (X, XV, R, Rm))
            add[0].addcmul_(xv, r).addcmul_(x, rm, value=-1)  # (e7)
            add[1].addcmul_(x, r)  # (e6)
            for sums, part in zip(add, single, strict=False):
                sums.add_(part[:, :, here])
        return dq, dk, dv, dw, dL, dm, None, None, None

    @staticmethod
    def first(sums: list[Tensor], *arguments: Any) -> Tensor:
        """Compute `Tiles`, and append the sums that a gradient needs.

        - `sums`: gets the sums of all rows, `[batch, rows, channels]`;
          0 is a row that was computed on its own.
        """
        ctx: Any = Context()
        q, k, v, w, L, m, tiles, *more = arguments
        count = more[0] if more else 1
        y = Tiles.forward(ctx, q, k, v, w, L, m, tiles, count, False)
        kept = ctx.saved_tensors[8:]
        sums.append(torch.empty_like(q))
        for tile, total, single in zip(
            tiles, kept[::2], kept[1::2], strict=True
        ):
            if single is not None:
                total[tuple(single.T)] = 0
            _rows(sums[-1][:, tile.rows], w, count).copy_(total)
        return y

    @staticmethod
    def second(rows: Any, *arguments: Any) -> Tensor:
        """Return known outputs, with the backward pass of `Tiles`.

        - `rows`: a function of a number of rows; it returns the
          outputs and the sums of the next rows, as `first` found them.
        - `arguments`: those of `Tiles`.
        """
        return _Again.apply(*rows(arguments[0].shape[1]), *arguments)


class _Again(torch.autograd.Function):
    """Pass the outputs of `Tiles` on; their gradient is its own."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        total: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor,
        L: Tensor | None,
        m: Tensor | None,
        tiles: Sequence[Tile],
        count: int = 1,
        keep: bool = False,
    ) -> Tensor:
        """Save outputs and sums; added rows fill up the last tile."""
        missing = q.shape[1] - y.shape[1]
        if missing:
            more = (0, 0, 0, missing)
            y = torch.nn.functional.pad(y, more)
            total = torch.nn.functional.pad(total, more, value=1)
        ctx.save_for_backward(q, k, v, w, L, m, y, total)
        ctx.tiles, ctx.count = tiles, count
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Call the backward pass of `Tiles`.

        Rows whose sum is 0 were computed one by one.
        """
        q, k, v, w, L, m, y, total = ctx.saved_tensors
        inner: Any = Context()
        inner.tiles, inner.count = ctx.tiles, ctx.count
        inner.shapes = [
            None if x is None else x.shape for x in (k, v, L, m)
        ]
        kept = []
        for tile in ctx.tiles:
            sums = _rows(total[:, tile.rows], w, ctx.count).contiguous()
            single = sums == 0
            some = bool(single.any())
            kept += [
                sums.masked_fill(single, 1),
                single.nonzero() if some else None,
            ]
        gate = torch.sigmoid(q)
        inner.saved_tensors = gate, y, w, None, k, v, L, m, *kept
        return None, None, *Tiles.backward(inner, dy)


def _keys(
    pairs: Pairs, reach: int | None
) -> tuple[Tensor, Tensor | None]:
    """`X` and `XV` of (e5), and where one is beyond the bound.

    Both are 0 there. Usually there is no such place: the extremes of
    all factors say so, and None is returned. Either way the factors
    within the bound are the same bits.

    - `reach`: of the first row.
    - Returns `[2, tiles, groups, keys, batch, c]`.
    """
    k = pairs[-1][0]
    common = k.shape[2] if reach is None else reach + 1
    top = k[:, :, :common].amax(2, keepdim=True)
    for key, _ in pairs[:-1]:
        top = torch.maximum(top, key.amax(2, keepdim=True))
    top.masked_fill_(top == -torch.inf, 0)
    tiles, groups, _, *columns = k.shape
    count, start = sum(key.shape[2] for key, _ in pairs), 0
    both = k.new_empty(2, tiles, groups, count, *columns)
    X, XV = both
    for key, value in pairs:
        here = slice(start, start + key.shape[2])
        x = torch.sub(key, top, out=X[:, :, here]).exp_()
        torch.mul(x, value, out=XV[:, :, here])
        start = here.stop
    low, high = both.aminmax()
    if torch.maximum(-low, high) <= MAX_FACTOR:  # False with NaN
        return both, None
    bad = ~((X <= MAX_FACTOR) & (XV.abs() <= MAX_FACTOR))
    both.masked_fill_(bad, 0)
    return both, bad


def _biases(w: Tensor, tile: Tile, more: int) -> Tensor:
    """`E` of (e5), with the bias 0 of `more` keys in front."""
    w = w[:, :, tile.rows, : tile.end]
    if more:
        w = torch.nn.functional.pad(w, (more, 0))
    E = w.exp()
    return E if tile.reach is None else E.tril_(more + tile.reach)


def _until(E: Tensor, x: Tensor) -> Tensor:
    """The keys that a tile sees, as a matrix."""
    return x[:, :, : E.shape[3]].flatten(3)


def _unsafe(
    E: Tensor, bad: Tensor | None, tile: Tile, more: int
) -> Tensor:
    """Whether a row sees a factor beyond the bound; in `E` it is 0."""
    wide = _wide(E)
    E.masked_fill_(wide, 0)
    wrong = wide.any(-1, keepdim=True)
    if bad is None:
        return wrong
    visible = torch.ones_like(E)
    if tile.reach is not None:
        visible.tril_(more + tile.reach)
    return wrong | (
        torch.matmul(visible, _until(E, bad).to(E.dtype)) > 0
    )


def _wide(E: Tensor) -> Tensor:
    """Where `E` is beyond the bound, or NaN."""
    return ~(E <= MAX_FACTOR)


def _pieces(indices: Tensor | None, E: Tensor) -> tuple[Tensor, ...]:
    """Unsafe rows, as many at a time as there is room for."""
    if indices is None:
        return ()
    return indices.split(max(ROOM // E.shape[3], 1))


def _softmax(
    pairs: Pairs, w: Tensor, tile: Tile, index: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights and values of single rows, `[rows, keys]` each.

    - `index`: `[rows, 5]`: tile, group, row, sequence and channel.
    """
    number, group, row, *column = index.T
    w = w[:, :, tile.rows, : tile.end]
    *others, (k, v) = pairs
    pairs = [*others, (k[:, :, : tile.end], v[:, :, : tile.end])]
    keys, values = (
        torch.cat(
            [x.movedim(2, -1)[number, group, *column] for x in xs], -1
        )
        for xs in zip(*pairs, strict=True)
    )
    more = keys.shape[1] - w.shape[3]
    keys[:, more:] += w[number % len(w), group, row]
    if tile.reach is not None:
        order = torch.arange(keys.shape[1], device=keys.device)
        hidden = order > row[:, None] + more + tile.reach
        keys.masked_fill_(hidden, -torch.inf)
    empty = (keys == -torch.inf).all(-1, keepdim=True)
    weights = torch.softmax(keys.masked_fill_(empty, 0), -1)
    return weights.masked_fill_(empty, 0), values


def _seen(
    k: Tensor, v: Tensor, w: Tensor, L: Tensor | None, m: Tensor | None,
    count: int,
) -> Pairs:  # fmt: skip
    """All keys and values that the tiles see, as views."""
    _, groups, rows, size = w.shape
    pair = [_steps(x, size, rows, groups) for x in (k, v)]
    if L is None or m is None:
        return [(pair[0], pair[1])]
    return [
        (_rows(L, w, count), _rows(m, w, count)),
        (pair[0], pair[1]),
    ]


def _places(
    k: Tensor, v: Tensor, w: Tensor, L: Tensor | None, m: Tensor | None,
    count: int,
) -> Iterator[tuple[slice, Tensor, Tensor]]:  # fmt: skip
    """Where the keys that the tiles see come from, without overlap.

    - Yields pieces of them: a slice, its keys and its values.
    """
    _, groups, rows, size = w.shape
    start = 0
    if L is not None and m is not None:
        start = L.shape[1] // count
        yield slice(start), _rows(L, w, count), _rows(m, w, count)
    length = rows if count > 1 else size
    for first in range(0, size, length):
        n = min(length, size - first)
        key, value = (
            _steps(x[:, first:], n, length, groups)[:count]
            for x in (k, v)
        )
        yield slice(start + first, start + first + n), key, value


def _rows(x: Tensor, w: Tensor, count: int) -> Tensor:
    """Cut into `count` parts of equal length; shapes as in `_steps`."""
    size = x.shape[1] // count
    return _steps(x, size, size, w.shape[1])


def _steps(x: Tensor, size: int, every: int, groups: int) -> Tensor:
    """View spans of `size` steps, each `every` steps after the last.

    - `x`: `[batch, time, channels]`.
    - Returns `[tiles, groups, size, batch, c]`: channels with the same
      biases are in one matrix.
    """
    x = x.unfold(1, size, every).unflatten(2, (groups, -1))
    return x.permute(1, 2, 4, 0, 3)


@form("full")
def causal(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Row $t$ sees past and present; called as the naive version."""
    past, y = k.shape[1] - q.shape[1], []
    runs = _runs(k, past)
    for start, stop in runs:
        rows, end = slice(start, stop), past + stop
        tiles = [
            Tile(
                slice(t, t + TILE),
                min(past + start + t + TILE, end),
                past + start + t,
            )
            for t in range(0, stop - start, TILE)
        ]
        visible = (x[:, :end] for x in (k, v))
        bias = w[None, None, rows, :end]
        more = None, None, tiles, 1, len(runs) == 1
        y.append(apply(Tiles, q[:, rows], *visible, bias, *more))
    return y[0] if len(y) == 1 else torch.cat(y, 1)


def _runs(k: Tensor, past: int) -> list[tuple[int, int]]:
    """The first row, and the end, of each run of tiles with one $c$.

    The maximum of the keys that all rows of a tile see must be close to
    $c$. It is a matter of these keys alone, so that later keys do not
    change a bit. Usually all rows are one run.
    """
    time = k.shape[1] - past
    starts = range(0, time, TILE)
    if len(starts) == 1:
        return [(0, time)]
    tops, before = [], 0
    for t in starts:
        tops.append(k[:, before : past + t + 1].amax(1))
        before = past + t + 1
    top = torch.stack(tops).detach().cummax(0)[0]
    top.masked_fill_(top == -torch.inf, 0)
    runs = []
    while len(starts):
        near = (top - top[0]).abs().amax((1, 2)) <= MAX_DRIFT
        n = [*near.tolist()[1:], False].index(False) + 1
        rest, top = starts[n:], top[n:]
        runs.append((starts[0], rest[0] if rest else time))
        starts = rest
    return runs


@form("full, not causal")
def not_causal(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Every row sees all steps; arguments as in the naive version."""
    tile = Tile(slice(None), None, None)
    return apply(Tiles, q, k, v, w[None, None], None, None, [tile])
