r"""# The Attention Free Transformer in linear memory

Two pieces make every form. A *running mean* (AFT-simple) is a linear
recurrence, computed in two levels in $O(T)$. A *tile* of rows with
biases is a matrix product, as long as its exponents are harmless, and
where they are not, those rows are computed exactly, one by one.
AFT-full has tiles over all keys; AFT-local and AFT-conv have tiles over
the keys of a window, and one more key that stands for all the others:
by (e1) a running mean acts as a single step with key $L$ and value $m$.

$$\sum_{t' \in A} e^{K_{t'}} V_{t'} = e^{L} m, \qquad
  \sum_{t' \in A} e^{K_{t'}} = e^{L} \tag{e1}$$
"""

import math
from typing import Any

import torch
from torch import Tensor

from fwlab.ops import autograd, chunks

#: Rows per tile.
TILE = 64
#: Numbers of a tile's keys that are computed together.
ROOM = 2**20
#: Largest exponent that a product of matrices takes, the least sum that
#: it must give, and the largest value: far from the ends of float32.
HIGHEST, LEAST, LARGEST = 20.0, 1e-10, 1e25


def recur(
    g: Tensor, parts: list[Tensor], start: list[Tensor]
) -> Tensor:
    r"""$x_t = g_t\, x_{t-1} + u_t$, in two levels.

    About $\sqrt T$ stretches go side by side, and are then joined one
    after the other: $2\sqrt T$ operations on long vectors in place of
    $T$ on short ones. All $g$ are at most 1; their products may
    underflow, and then nothing is lost.

    - `g`, each $u$ of `parts`: `[batch, time, channels]`.
    - `start`: $x_0$ of each part, `[batch, channels]`.
    - Returns `[parts, batch, time, channels]`.
    """
    batch, time, channels = g.shape
    length = max(math.isqrt(time), 1)
    n = chunks.count(time, length)

    def stretch(x: Tensor, out: Tensor, fill: float) -> None:
        # Step i of all stretches is one piece of memory.
        whole = x[:, : (n - 1) * length].unflatten(1, (n - 1, length))
        out[:, :, :-1] = whole.permute(2, 0, 1, 3)
        rest = time - (n - 1) * length
        out[:rest, :, -1] = x[:, (n - 1) * length :].transpose(0, 1)
        out[rest:, :, -1] = fill

    G = g.new_empty(length, batch, n, channels)
    X = g.new_empty(length, len(parts), batch, n, channels)
    stretch(g, G, 1)
    for place, u in enumerate(parts):
        stretch(u, X[:, place], 0)
    for i in range(1, length):
        X[i].addcmul_(G[i], X[i - 1])
        G[i].mul_(G[i - 1])
    before = torch.empty_like(X[0])
    before[:, :, 0] = torch.stack(start)
    for j in range(1, n):
        last = before[:, :, j - 1]
        before[:, :, j] = torch.addcmul(
            X[-1, :, :, j - 1], G[-1, :, j - 1], last
        )
    X.addcmul_(G[:, None], before)
    X = X.permute(1, 2, 3, 0, 4).flatten(2, 3)
    return X[:, :, :time]


def _forward(
    k: Tensor, v: Tensor, log_sum: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    r"""(n1) of the naive version for all steps at once.

    With $M_t$ the largest key so far, numerator and denominator in
    units of $e^{M_t}$ are linear recurrences:

    $$s_t = e^{M_{t-1} - M_t} s_{t-1} + e^{K_t - M_t}, \quad
      L_t = M_t + \log s_t \tag{e2}$$

    By (e1) the state to begin with is one step more.
    """
    top = torch.maximum(running_max(k), log_sum[:, None])
    fade = torch.empty_like(k)
    fade[:, :1] = _share(log_sum[:, None], top[:, :1])
    fade[:, 1:] = _share(top[:, :-1], top[:, 1:])
    new = _share(k, top)
    start = [torch.ones_like(mean), mean]
    s, total = recur(fade, [new, new * v], start)  # (e2)
    return top + s.log(), torch.where(s == 0, 0, total / s)


def _backward(
    given: tuple[Tensor, ...],
    after: tuple[Tensor, Tensor],
    dL: Tensor,
    dm: Tensor,
) -> tuple[Tensor, ...]:
    r"""Step $t'$ has the share $e^{K_{t'} - L_t}$ in row $t$. What all
    later rows ask of it is a recurrence that runs backward:

    $$a_t = dm_t + e^{L_t - L_{t+1}} a_{t+1}, \quad
      b_t = dL_t - m_t\, dm_t + e^{L_t - L_{t+1}} b_{t+1} \tag{e3}$$
    $$dV_t = e^{K_t - L_t} a_t, \qquad
      dK_t = e^{K_t - L_t} (V_t\, a_t + b_t) \tag{e4}$$

    The state to begin with gets the same as a step would.
    """
    k, v, log_sum, mean = given
    L, m = after
    fade = torch.ones_like(k)
    fade[:, 1:] = _share(L[:, :-1], L[:, 1:]).flip(1)
    none = torch.zeros_like(mean)
    parts = [dm.flip(1), (dL - m * dm).flip(1)]
    a, b = recur(fade, parts, [none, none]).flip(2)  # (e3)
    share = _share(k, L)
    first = _share(log_sum, L[:, 0])
    dmean = first * a[:, 0]
    dlog_sum = first * (mean * a[:, 0] + b[:, 0])
    return share * (v * a + b), share * a, dlog_sum, dmean  # (e4)


class _RunningMean(torch.autograd.Function):
    """`log_sum` and `mean` `[batch, time, channels]` of each step."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        after = _forward(*given)
        ctx.save_for_backward(*given, *after)
        return after

    @staticmethod
    @autograd.backward_pass
    def backward(
        ctx: Any, dL: Tensor, dm: Tensor
    ) -> tuple[Tensor, ...]:
        given, after = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
        return _backward(given, after, dL, dm)


class _Simple(torch.autograd.Function):
    """Eq. 5 and the last state. Only the inputs are kept: the running
    means are computed once more on the way back.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, *given: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        L, m = _forward(*given)
        ctx.save_for_backward(q, *given)
        ends = L[:, -1].clone(), m[:, -1].clone()
        return torch.sigmoid(q).mul_(m), *ends  # Eq. 5

    @staticmethod
    @autograd.backward_pass
    def backward(
        ctx: Any, dy: Tensor, dL_end: Tensor, dm_end: Tensor
    ) -> tuple[Tensor, ...]:
        q, *given = ctx.saved_tensors
        after = _forward(*given)
        gate = torch.sigmoid(q)
        dm, dL = dy * gate, torch.zeros_like(dy)
        dq = dm * after[1] * (1 - gate)
        dm[:, -1] += dm_end
        dL[:, -1] = dL_end
        return dq, *_backward(tuple(given), after, dL, dm)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """`exp(part - whole)`; nothing has no share in nothing."""
    whole = whole.clamp(min=torch.finfo(whole.dtype).min)
    return (part - whole).exp_()


def running_max(x: Tensor) -> Tensor:
    """The largest of all steps so far, by doubling: `torch.cummax` is
    slower by far.
    """
    x, reach = x.clone(), 1
    while reach < x.shape[1]:
        x[:, reach:] = torch.maximum(x[:, reach:], x[:, :-reach])
        reach *= 2
    return x


class _Tile(torch.autograd.Function):
    r"""Eq. 2 for the rows of some tiles.

    With the largest key $c$ that *all* rows of a tile see,

    $$E = e^{w}, \quad X = e^{K - c}, \quad
      m = \frac{E\, (X \odot V)}{E\, X} \tag{e5}$$

    are two matrix products. They are exact as long as no exponent that
    the row sees is large and the sum is not tiny. Whatever fails that
    is computed by the softmax of its row. A key that a row does not
    see, with $E = 0$, adds an exact 0 to its sums and has no say in the
    choice: it changes not one bit.
    """

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, w: Tensor, last: int | None
    ) -> Tensor:
        E, X, XV, unsafe = _factors(k, v, w, last)
        total = torch.matmul(E, X)
        mean = torch.matmul(E, XV)
        unsafe = unsafe | ~(total >= LEAST)
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
        $p\, dm\, (V - m)$, summed over what shares them:

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
    """`E`, `X` and `XV` of (e5), made harmless, and the rows that see
    something that is not.
    """
    seen = _visible(w, last)
    common = k[:, :, : _common(w, last)]
    top = torch.zeros_like(k[:, :, :1])
    if common.shape[2]:
        top = common.amax(2, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0)
    E = w.clamp(max=HIGHEST).exp_()
    E = E if seen is None else E.mul_(seen)
    exponent = k - top
    X = exponent.clamp(max=HIGHEST).exp_()
    XV = X * v
    bad = (exponent > HIGHEST) | ~(XV.abs() < LARGEST)
    wide = w > HIGHEST if seen is None else (w > HIGHEST) & seen
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


def simple(
    q: Tensor, k: Tensor, v: Tensor, log_sum: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """AFT-simple; arguments and results of the naive version."""
    return _Simple.apply(q, k, v, log_sum, mean)


def before_each(
    k: Tensor, v: Tensor, log_sum: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """The running mean before each step, and that after the last one.

    - Returns `log_sum` and `mean`, `[batch, time + 1, channels]`.
    """
    L, m = _RunningMean.apply(k, v, log_sum, mean)
    return (
        torch.cat([log_sum[:, None], L], 1),
        torch.cat([mean[:, None], m], 1),
    )


def rows(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, last: int | None
) -> Tensor:
    """AFT-full; arguments and results of the naive version."""
    groups, keys = len(w), k.shape[1]
    K, V = (_grouped(x[:, None], groups) for x in (k, v))
    means = []
    for i, tile in enumerate(w.split(TILE, 1)):
        reach = None if last is None else last + i * TILE
        end = keys if reach is None else min(reach + TILE, keys)
        means.append(
            _Tile.apply(
                K[:, :, :end],
                V[:, :, :end],
                tile[None, :, :, :end],
                reach,
            )
        )
    return torch.sigmoid(q) * _flat(torch.cat(means, 2), q)  # Eq. 2


def windows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    outside: list[tuple[Tensor, Tensor]],
    last: int | None,
) -> Tensor:
    """Tiles that each see a stretch of keys, and means of all others.

    - `q`: `[batch, time, channels]`.
    - `k`, `v`: `[batch, keys, channels]`. Tile `i` of `r` rows sees the
      `span` keys from `i * r` on.
    - `w`: `[tiles or 1, groups, r, span]`.
    - `outside`: running means `[batch, tiles, channels]` of what a tile
      does not see; by (e1) each is one key more, with bias 0.
    - `last`: row `r` sees the keys up to `r + last` of its stretch.
    """
    r, span = w.shape[-2:]
    stretches = []
    for x, place in ((k, 0), (v, 1)):
        cut = x.unfold(1, span, r).transpose(2, 3)
        more = [mean[place][:, :, None] for mean in outside]
        stretches.append(
            _grouped(torch.cat([*more, cut], 2), w.shape[1])
        )
    w = torch.nn.functional.pad(w, (len(outside), 0))
    last = None if last is None else last + len(outside)
    m = _flat(_Tile.apply(*stretches, w, last), q)
    return torch.sigmoid(q) * m[:, : q.shape[1]]


def window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Tensor,
    log_sum: Tensor,
    mean: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """AFT-local and AFT-conv, called as the naive version is."""
    time, width = q.shape[1], band.shape[-1]
    n = chunks.count(time, TILE)
    starts = torch.arange(n, device=q.device) * TILE
    if causal:
        L, m = before_each(k[:, :time], v[:, :time], log_sum, mean)
        log_sum, mean = L[:, -1], m[:, -1]
        outside = [(L[:, starts], m[:, starts])]
        front = 0
    else:
        front = width // 2
        before = (starts - front).clamp(min=0)
        behind = (starts + TILE + front).clamp(max=time)
        L, m = before_each(k, v, log_sum, mean)
        outside = [(L[:, before], m[:, before])]
        L, m = before_each(k.flip(1), v.flip(1), log_sum, mean)
        outside += [(L[:, time - behind], m[:, time - behind])]
    back = n * TILE + width - 1 - k.shape[1] - front
    k, v = (
        torch.nn.functional.pad(x, (0, 0, front, back), value=fill)
        for x, fill in ((k, -torch.inf), (v, 0))
    )
    if band.shape[1] == 1:  # the same for all steps
        band = band[:, None].expand(-1, 1, TILE, -1)
    else:
        band = torch.nn.functional.pad(band, (0, 0, 0, n * TILE - time))
        band = band.unflatten(1, (n, TILE))
    # Row r sees its window from place p = 0 on; columns of a band count
    # the steps back, and then those ahead.
    p = torch.arange(TILE + width - 1, device=q.device)
    p = p - torch.arange(TILE, device=q.device)[:, None]
    column = (
        width - 1 - p
        if causal
        else torch.where(p > front, p, front - p)
    )
    inside = (p >= 0) & (p < width)
    column = column.clamp(0, width - 1).expand(*band.shape[:2], -1, -1)
    w = torch.where(inside, band.gather(-1, column), 0).transpose(0, 1)
    y = windows(q, k, v, w, outside, width - 1 if causal else None)
    return y, log_sum, mean


def image(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    height: int,
    width: int,
) -> Tensor:
    """AFT-conv of an image; arguments and results of the naive version.

    A line of the image is a tile: it sees the lines that the kernel
    reaches, and all above and below them as one key each.
    """
    batch, _, channels = q.shape
    half = kernel.shape[-1] // 2
    empty = (
        q.new_full((batch, channels), -torch.inf),
        q.new_zeros(batch, channels),
    )
    line = torch.arange(height, device=q.device)
    above = (line - half).clamp(min=0) * width
    below = (height - 1 - line - half).clamp(min=0) * width
    L, m = before_each(k, v, *empty)
    outside = [(L[:, above], m[:, above])]
    L, m = before_each(k.flip(1), v.flip(1), *empty)
    outside += [(L[:, below], m[:, below])]
    edge = (0, 0, half * width, half * width)
    k = torch.nn.functional.pad(k, edge, value=-torch.inf)
    v = torch.nn.functional.pad(v, edge)
    # One line against the lines around it: the same for all lines.
    place = torch.arange(width, device=q.device)
    right = place - place[:, None] + half
    inside = (right >= 0) & (right <= 2 * half)
    w = kernel[
        :, :, right.clamp(0, 2 * half)
    ]  # [heads, lines, row, key]
    w = torch.where(inside, w, 0).transpose(1, 2).flatten(2)
    return windows(q, k, v, w[None], outside, None)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """`[batch, tiles, keys, groups * c]` to `[tiles, groups, keys,
    batch * c]`: what shares its biases stands in one matrix.
    """
    x = x.unflatten(3, (groups, -1))
    return x.permute(1, 3, 2, 0, 4).flatten(3)


def _flat(x: Tensor, like: Tensor) -> Tensor:
    """The way back: `[batch, tiles * rows, channels]`."""
    x = x.unflatten(3, (len(like), -1))
    return x.permute(3, 0, 2, 1, 4).flatten(3).flatten(1, 2)
