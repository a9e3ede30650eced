r"""# The Attention Free Transformer on a GPU

Two things are computed: a running mean of values, and means over a
window with biases. Both are exact wherever $K + w$ is finite, because
no sum is ever kept without its maximum: three numbers per channel,

$$(M, s, a) = \Big(\max_i x_i,\ \sum_i e^{x_i - M} u_i,\
  \sum_i e^{x_i - M} w_i\Big) \tag{k1}$$

Two of them meet in a third, in any order: the larger maximum stays, and
the sums of the other fade. Forward, $x$ is a key, $u = 1$ and $w$ its
value. Backward, a step $t$ asks of all keys before it with
$x = -L_t$, $u = dm_t$ and $w = -m_t\,dm_t$ (e3): the same sums from the
end.

**Running means.** Time is cut into segments. `summarize` reduces each
to one triple, `carry` walks through the triples, and `outputs` starts
each segment from what came before it. Only triples of segments are
kept for the way back.

**Windows.** A program holds a tile of rows, and takes key after key of
its window, with a maximum per row and channel: the elementwise form of
the diagonal. Everything older is one more triple. No matrix product is
taken: its rows would share a maximum, and a future key could own it.

What has no kernel is that of the efficient version: rows that see the
future, and images.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fwlab.ops import autograd, chunks, gpu
from fwlab.ops.aft import efficient

#: Steps per segment of a running mean, and rows per tile of a window.
SEGMENT, TILE = 64, 16
#: Channels per program, of a segment and of a tile.
NARROW, WIDE = 32, 64

#: A key that nobody sees.
LOW = tl.constexpr(float("-inf"))

image = efficient.image


@triton.jit
def _meet(m1, s1, a1, m2, s2, a2):
    """(k1): nothing and nothing is nothing."""
    top = tl.maximum(m1, m2)
    e1 = tl.where(m1 == top, 1.0, tl.exp(m1 - top))
    e2 = tl.where(m2 == top, 1.0, tl.exp(m2 - top))
    return top, s1 * e1 + s2 * e2, a1 * e1 + a2 * e2


@triton.jit
def _rows(x, t, c, rest, D, other):
    """A block `[R, BD]` of `[time, D]`, in float32."""
    inside = (t < rest)[:, None] & (c < D)[None, :]
    at = t[:, None] * D + c[None, :]
    return tl.load(x + at, mask=inside, other=other).to(tl.float32)


@triton.jit
def _put(x, value, t, c, rest, D):
    inside = (t < rest)[:, None] & (c < D)[None, :]
    at = t[:, None] * D + c[None, :]
    tl.store(x + at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _elements(x, u, w):
    """Of a key that nobody sees nothing is left, also not its value."""
    none = x == float("-inf")
    return x, tl.where(none, 0.0, u), tl.where(none, 0.0, w)


@triton.jit
def _triple(top, s, a, at, inside):
    return (
        tl.load(top + at, mask=inside, other=float("-inf")),
        tl.load(s + at, mask=inside, other=0.0),
        tl.load(a + at, mask=inside, other=0.0),
    )


@triton.jit
def _put_triple(top, s, a, at, inside, M, S, A):
    tl.store(top + at, M, mask=inside)
    tl.store(s + at, S, mask=inside)
    tl.store(a + at, A, mask=inside)


@triton.jit
def _reduced(x, u, w):
    M = tl.max(x, 0)
    e = tl.exp(x - tl.where(M > LOW, M, 0.0)[None, :])
    return M, tl.sum(e * u, 0), tl.sum(e * w, 0)


@triton.jit
def _running(k, v, M, S, A):
    """L and m of each row, starting from a triple."""
    x, u, w = _elements(k, tl.full(k.shape, 1.0, tl.float32), v)
    x, u, w = tl.associative_scan((x, u, w), 0, _meet)
    M, S, A = M[None, :], S[None, :], A[None, :]
    x, u, w = _meet(x, u, w, M, S, A)
    none = u == 0
    return (
        tl.where(
            none, float("-inf"), x + tl.log(tl.where(none, 1.0, u))
        ),
        tl.where(none, 0.0, w / tl.where(none, 1.0, u)),
    )


@triton.jit(do_not_specialize=["time", "D", "stride"])
def summarize(
    x, u, w, top, s, a, time, D, stride,
    R: tl.constexpr, BD: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """The triple of each segment of one sequence.

    Reads x and w once (and u): b + b bytes per number. Floor: those
    bytes over the bandwidth. One exponential per number.
    """
    n, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BD + tl.arange(0, BD)
    t, rest = tl.arange(0, R), time - n * R
    here = batch * stride * D + n.to(tl.int64) * R * D
    X = _rows(x + here, t, c, rest, D, 0.0) * SIGN
    X = tl.where((t < rest)[:, None], X, float("-inf"))
    W = _rows(w + here, t, c, rest, D, 0.0)
    U = tl.full(W.shape, 1.0, tl.float32)
    if u is not None:
        U = _rows(u + here, t, c, rest, D, 0.0)
    # A row that saw nothing asks for nothing.
    X = tl.where(X < -LOW, X, float("-inf"))
    X, U, W = _elements(X, U, W)
    M, S, A = _reduced(X, U, W)
    at = (batch * tl.num_programs(0) + n) * D + c
    _put_triple(top, s, a, at, c < D, M, S, A)


@triton.jit(do_not_specialize=["segments", "D"])
def carry(
    top, s, a, top_start, s_start, a_start, top_end, s_end, a_end,
    segments, D, BD: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """From segment to segment, in place: what came before each.

    24 bytes per segment and channel. Floor: as many steps, one after
    the other, as there are segments.
    """
    batch = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = c < D
    start = batch * D + c
    M, S, A = _triple(top_start, s_start, a_start, start, inside)
    for i in range(segments):
        n = i
        if REVERSE:
            n = segments - 1 - i
        at = (batch * segments + n) * D + c
        m, s_n, a_n = _triple(top, s, a, at, inside)
        _put_triple(top, s, a, at, inside, M, S, A)
        M, S, A = _meet(M, S, A, m, s_n, a_n)
    _put_triple(top_end, s_end, a_end, start, inside, M, S, A)


@triton.jit(do_not_specialize=["time", "D"])
def outputs(
    q, k, v, top, s, a, y, time, D, R: tl.constexpr, BD: tl.constexpr
):
    """Eq. 5 for one segment: reads q, k, v, writes y, 4 b per number.

    With `summarize` 6 b; 6 to 8 exponentials. Floor: the bytes.
    """
    n, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BD + tl.arange(0, BD)
    t, rest = tl.arange(0, R), time - n * R
    here = (batch * time + n.to(tl.int64) * R) * D
    K = _rows(k + here, t, c, rest, D, float("-inf"))
    V = _rows(v + here, t, c, rest, D, 0.0)
    at = (batch * tl.num_programs(0) + n) * D + c
    M, S, A = _triple(top, s, a, at, c < D)
    _, m = _running(K, V, M, S, A)
    gate = tl.sigmoid(_rows(q + here, t, c, rest, D, 0.0))
    _put(y + here, gate * m, t, c, rest, D)


@triton.jit(do_not_specialize=["time", "D"])
def outputs_backward(
    q, k, v, dy, top, s, a, top_after, s_after, a_after, dq, dk, dv,
    time, D, R: tl.constexpr, BD: tl.constexpr, ONLY: tl.constexpr,
):  # fmt: skip
    """(e3), (e4) for one segment; with `ONLY` its triple (k1) alone.

    Reads q, k, v, dy twice and writes dq, dk, dv: 11 b per number, some
    15 exponentials. Floor: the bytes.
    """
    n, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BD + tl.arange(0, BD)
    t, rest = tl.arange(0, R), time - n * R
    here = (batch * time + n.to(tl.int64) * R) * D
    K = _rows(k + here, t, c, rest, D, float("-inf"))
    V = _rows(v + here, t, c, rest, D, 0.0)
    at = (batch * tl.num_programs(0) + n) * D + c
    M, S, A = _triple(top, s, a, at, c < D)
    L, m = _running(K, V, M, S, A)
    gate = tl.sigmoid(_rows(q + here, t, c, rest, D, 0.0))
    g = _rows(dy + here, t, c, rest, D, 0.0)
    dm = g * gate
    there = (L > LOW) & (t < rest)[:, None]
    X = tl.where(there, -L, float("-inf"))
    X, U, W = _elements(X, dm, -m * dm)
    if ONLY:
        M, S, A = _reduced(X, U, W)
        _put_triple(top_after, s_after, a_after, at, c < D, M, S, A)
    else:
        X, U, W = tl.associative_scan((X, U, W), 0, _meet, reverse=True)
        M, S, A = _triple(top_after, s_after, a_after, at, c < D)
        X, U, W = _meet(X, U, W, M[None, :], S[None, :], A[None, :])
        share = tl.exp(tl.where(X > LOW, K + X, float("-inf")))
        _put(dq + here, dm * m * (1 - gate), t, c, rest, D)
        _put(dv + here, share * U, t, c, rest, D)
        _put(dk + here, share * (V * U + W), t, c, rest, D)


@triton.jit
def _bias(band, t, p, inside, W, last):
    """What row t adds to key p: a bias, 0 for an older key, or nothing.

    `last` is None for a window of W keys, of which p = t is the oldest;
    otherwise row t sees all keys up to t + last, W of them in all.
    """
    if last is None:
        column = t + W - 1 - p
        w = tl.load(
            band + column,
            mask=inside & (column >= 0) & (column < W),
            other=0.0,
        )
        w = tl.where(column < 0, float("-inf"), w)
    else:
        w = tl.load(band + p, mask=inside, other=0.0)
        w = tl.where(p > t + last, float("-inf"), w)
    return tl.where(inside, w, float("-inf"))


@triton.jit(
    do_not_specialize=["time", "keys", "W", "last", "D", "rows"]
)
def window_forward(
    q, k, v, band, top, s, a, y, L, m, time, keys, W, last, D, rows,
    H: tl.constexpr, R: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Eq. 2 for a tile of rows and some channels of a group.

    Reads R + W keys and values, and q, writes y, L and m. 2 (R + W)
    exponentials per row and channel, which are the floor: some 16 per
    clock and multiprocessor.
    """
    n, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(D // H, BD)
    head, block = tl.program_id(2) // blocks, tl.program_id(2) % blocks
    inner = block * BD + tl.arange(0, BD)
    c, channel = head * (D // H) + inner, inner < D // H
    t = n * R + tl.arange(0, R)
    q += batch * time * D
    k += batch * keys * D
    v += batch * keys * D
    row = tl.where(t < time, t, 0) % rows
    band += (head * rows + row).to(tl.int64) * W
    M = tl.full([R, BD], float("-inf"), tl.float32)
    S = tl.zeros([R, BD], tl.float32)
    A = tl.zeros([R, BD], tl.float32)
    if last is None:
        at = (batch * tl.num_programs(0) + n) * D + c
        m1, s1, a1 = _triple(top, s, a, at, channel)
        M, S, A = _meet(M, S, A, m1[None, :], s1[None, :], a1[None, :])
        begin, end = n * R, tl.minimum(n * R + R + W - 1, keys)
    else:
        begin, end = 0, tl.minimum(keys, n * R + R + last)
    for p in range(begin, end):
        key = tl.load(k + p * D + c, mask=channel, other=float("-inf"))
        value = tl.load(v + p * D + c, mask=channel, other=0.0)
        x = _bias(band, t, p, t < time, W, last)[:, None]
        x = x + key.to(tl.float32)[None, :]
        x, u, w = _elements(
            x,
            tl.full(x.shape, 1.0, tl.float32),
            value.to(tl.float32)[None, :],
        )
        M, S, A = _meet(M, S, A, x, u, w)
    none = S == 0
    log_sum = tl.where(
        none, float("-inf"), M + tl.log(tl.where(none, 1.0, S))
    )
    mean = tl.where(none, 0.0, A / tl.where(none, 1.0, S))
    inside = (t < time)[:, None] & channel[None, :]
    at = t[:, None] * D + c[None, :]
    gate = tl.sigmoid(
        tl.load(q + at, mask=inside, other=0.0).to(tl.float32)
    )
    out = batch * time * D + at
    tl.store(y + out, (gate * mean).to(y.dtype.element_ty), mask=inside)
    if L is not None:
        out = batch * (time + 1) * D + at
        tl.store(L + out, log_sum, mask=inside)
        tl.store(m + out, mean, mask=inside)


@triton.jit(
    do_not_specialize=[
        "time",
        "keys",
        "W",
        "last",
        "D",
        "rows",
        "segments",
    ]
)
def window_backward_keys(
    k, v, band, L, dm, db, top, s, a, dk, dv,
    time, keys, W, last, D, rows, segments,
    H: tl.constexpr, R: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """(e6) and (e7) for a tile of keys: the rows that see it, pulled.

    Reads L, dm and db of R + W rows, k and v, writes dk and dv. R + W
    exponentials per key and channel, each at most 1.
    """
    n, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(D // H, BD)
    head, block = tl.program_id(2) // blocks, tl.program_id(2) % blocks
    inner = block * BD + tl.arange(0, BD)
    c, channel = head * (D // H) + inner, inner < D // H
    p = n * R + tl.arange(0, R)
    inside = (p < keys)[:, None] & channel[None, :]
    at = batch * keys * D + p[:, None] * D + c[None, :]
    key = tl.load(k + at, mask=inside, other=float("-inf")).to(
        tl.float32
    )
    value = tl.load(v + at, mask=inside, other=0.0).to(tl.float32)
    none = key == float("-inf")
    value = tl.where(none, 0.0, value)
    L += batch * (time + 1) * D
    dm += batch * (time + 1) * D
    db += batch * (time + 1) * D
    U = tl.zeros([R, BD], tl.float32)
    B = tl.zeros([R, BD], tl.float32)
    if last is None:
        # Row `time` is the state that is handed on: older keys only.
        begin, end = (
            tl.maximum(n * R - W + 1, 0),
            tl.minimum(n * R + R, time + 1),
        )
    else:
        begin, end = tl.maximum(n * R - last, 0), time
    for t in range(begin, end):
        norm = tl.load(L + t * D + c, mask=channel, other=float("-inf"))
        dm_t = tl.load(dm + t * D + c, mask=channel, other=0.0)
        db_t = tl.load(db + t * D + c, mask=channel, other=0.0)
        row = head * rows + tl.minimum(t, time - 1) % rows
        seen = p < tl.where(t < time, keys, time)
        x = _bias(band + row.to(tl.int64) * W, t, p, seen, W, last)[
            :, None
        ]
        void = none | (norm == float("-inf"))[None, :]
        x = tl.where(
            void,
            float("-inf"),
            x
            + key
            - tl.where(norm == float("-inf"), 0.0, norm)[None, :],
        )
        e = tl.exp(x)
        U += e * dm_t[None, :]
        B += e * db_t[None, :]
    if last is None:
        at_n = (batch * segments + n) * D + c
        later = channel & (n < segments)
        m1, s1, a1 = _triple(top, s, a, at_n, later)
        x = m1[None, :] + key
        e = tl.exp(
            tl.where(
                none | (m1 == float("-inf"))[None, :], float("-inf"), x
            )
        )
        U += e * s1[None, :]
        B += e * a1[None, :]
    tl.store(dv + at, U.to(dv.dtype.element_ty), mask=inside)
    tl.store(
        dk + at, (value * U + B).to(dk.dtype.element_ty), mask=inside
    )


@triton.jit(
    do_not_specialize=[
        "time",
        "keys",
        "W",
        "last",
        "D",
        "rows",
        "batch",
    ]
)
def window_backward_band(
    k, v, band, L, m, dm, dband, time, keys, W, last, D, rows, batch,
    H: tl.constexpr, R: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """(e8): one column of the band for a tile of rows.

    The batch is summed inside, in a fixed order. Reads k, v, L, m and
    dm once per column, mostly from the cache; W exponentials per row
    and channel.
    """
    n, column, head = (
        tl.program_id(0),
        tl.program_id(1),
        tl.program_id(2),
    )
    t = n * R + tl.arange(0, R)
    if last is None:
        p = t + W - 1 - column
        seen = (t < time) & (p < keys)
    else:
        p = tl.full([R], 0, tl.int32) + column
        seen = (t < time) & (p <= t + last)
    row = head * rows + tl.where(t < time, t, 0) % rows
    w = tl.load(
        band + row.to(tl.int64) * W + column, mask=seen, other=0.0
    )
    total = tl.zeros([R, BD], tl.float32)
    for b in range(batch):
        for block in range(tl.cdiv(D // H, BD)):
            inner = block * BD + tl.arange(0, BD)
            c, channel = head * (D // H) + inner, inner < D // H
            inside = seen[:, None] & channel[None, :]
            at = p[:, None] * D + c[None, :]
            here = tl.cast(b, tl.int64) * keys * D
            key = tl.load(
                k + here + at, mask=inside, other=float("-inf")
            )
            value = tl.load(v + here + at, mask=inside, other=0.0)
            at = t[:, None] * D + c[None, :]
            here = tl.cast(b, tl.int64) * (time + 1) * D
            norm = tl.load(
                L + here + at, mask=inside, other=float("-inf")
            )
            mean = tl.load(m + here + at, mask=inside, other=0.0)
            g = tl.load(dm + here + at, mask=inside, other=0.0)
            key = key.to(tl.float32)
            none = (key == float("-inf")) | (norm == float("-inf"))
            x = w[:, None] + key - tl.where(none, 0.0, norm)
            e = tl.exp(tl.where(none, float("-inf"), x))
            total += (
                e
                * g
                * (tl.where(none, 0.0, value.to(tl.float32)) - mean)
            )
    out = (head * time + t).to(tl.int64) * W + column
    tl.store(dband + out, tl.sum(total, 1), mask=t < time)


def _channels(width: int, most: int = NARROW) -> int:
    return min(triton.next_power_of_2(width), most)


def _triples(like: Tensor, n: int) -> list[Tensor]:
    batch, _, D = like.shape
    shape = (batch, n, D)
    return [
        torch.empty(shape, dtype=torch.float32, device=like.device)
        for _ in range(3)
    ]


def _summarize(
    x: Tensor, u: Tensor | None, w: Tensor, time: int, R: int, sign: int
) -> list[Tensor]:
    batch, stride, D = x.shape
    n, BD = chunks.count(time, R), _channels(D)
    out = _triples(x, n)
    gpu.launch(
        summarize,
        (n, batch, chunks.count(D, BD)),
        *(x, u, w, *out, time, D, stride),
        R=R,
        BD=BD,
        SIGN=sign,
        warps=4,
    )
    return out


def _carry(
    triples: list[Tensor], start: list[Tensor], reverse: bool
) -> list[Tensor]:
    """`triples` become what came before each; returns the total."""
    batch, n, D = triples[0].shape
    BD = _channels(D)
    end = [torch.empty_like(x) for x in start]
    gpu.launch(
        carry,
        (batch, chunks.count(D, BD)),
        *(*triples, *start, *end, n, D),
        BD=BD,
        REVERSE=reverse,
        warps=1,
        stages=4,
    )
    return end


def _before(log_sum: Tensor, mean: Tensor) -> list[Tensor]:
    """A state as a triple."""
    there = (log_sum != -torch.inf).to(mean.dtype)
    return [log_sum.contiguous(), there, mean.contiguous()]


def _state(top: Tensor, s: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """A triple as a state."""
    none = s == 0
    whole = torch.where(none, 1, s)
    log_sum = torch.where(none, -torch.inf, top + whole.log())
    return log_sum, torch.where(none, 0, a / whole)


def _asked(
    L: Tensor, m: Tensor, dL: Tensor, dm: Tensor
) -> list[Tensor]:
    """What one who reads a state asks of all before, as a triple."""
    none = torch.isinf(L)
    return [
        torch.where(none, L, -L),
        torch.where(none, 0, dm),
        torch.where(none, 0, dL - m * dm),
    ]


def _of_state(
    total: list[Tensor], log_sum: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of a state, which is one step more (e4)."""
    top, s, a = total
    none = (top == -torch.inf) | (log_sum == -torch.inf)
    share = torch.where(none, 0, (log_sum + top).exp())
    return share * (mean * s + a), share * s


class _Simple(torch.autograd.Function):
    """Eq. 5 and the last state; kept are inputs, and a triple per
    segment.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, *state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x.contiguous() for x in (q, k, v))
        batch, time, D = k.shape
        triples = _summarize(k, None, v, time, SEGMENT, 1)
        end = _state(*_carry(triples, _before(*state), False))
        y, BD = torch.empty_like(v), _channels(D)
        gpu.launch(
            outputs,
            (triples[0].shape[1], batch, chunks.count(D, BD)),
            *(q, k, v, *triples, y, time, D),
            R=SEGMENT,
            BD=BD,
            warps=4,
        )
        ctx.save_for_backward(q, k, v, *state, *triples, *end)
        return y, end[0], end[1]

    @staticmethod
    @autograd.backward_pass
    def backward(
        ctx: Any, dy: Tensor, dL: Tensor, dm: Tensor
    ) -> tuple[Tensor, ...]:
        q, k, v, log_sum, mean, *rest = ctx.saved_tensors
        triples, end = rest[:3], rest[3:]
        batch, time, D = k.shape
        n, BD = triples[0].shape[1], _channels(D)
        after = _triples(k, n)
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        given = (q, k, v, dy.contiguous(), *triples, *after, *gradients)
        grid = n, batch, chunks.count(D, BD)
        for only in (True, False):
            gpu.launch(
                outputs_backward,
                grid,
                *(*given, time, D),
                R=SEGMENT,
                BD=BD,
                ONLY=only,
                warps=8,
            )
            if only:
                total = _carry(
                    after, _asked(end[0], end[1], dL, dm), True
                )
        return *gradients, *_of_state(total, log_sum, mean)


class _Window(torch.autograd.Function):
    """Eq. 2 over a window and all before it (`last` is None), or over
    all keys up to `last` steps ahead.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        band: Tensor,
        log_sum: Tensor,
        mean: Tensor,
        last: int | None,
        keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, band = (x.contiguous() for x in (q, k, v, band))
        (batch, time, D), keys = q.shape, k.shape[1]
        groups, rows, W = band.shape
        triples: list[Any] = [None] * 3
        end = log_sum, mean
        if last is None:
            triples = _summarize(k, None, v, time, TILE, 1)
            end = _state(*_carry(triples, _before(*end), False))
        y, L, m = torch.empty_like(q, dtype=v.dtype), None, None
        if keep:
            L, m = (
                mean.new_empty(batch, time + 1, D) for _ in range(2)
            )
            L[:, time], m[:, time] = end
        BD = _channels(D // groups, WIDE)
        blocks = groups * chunks.count(D // groups, BD)
        gpu.launch(
            window_forward,
            (chunks.count(time, TILE), batch, blocks),
            *(q, k, v, band, *triples, y, L, m),
            *(time, keys, W, last, D, rows),
            H=groups,
            R=TILE,
            BD=BD,
            warps=4,
        )
        if keep:
            ctx.save_for_backward(q, k, v, band, log_sum, mean, L, m)
        ctx.last = last
        return y, end[0].clone(), end[1].clone()

    @staticmethod
    @autograd.backward_pass
    def backward(
        ctx: Any, dy: Tensor, dL: Tensor, dm_end: Tensor
    ) -> tuple[Tensor | None, ...]:
        q, k, v, band, log_sum, mean, L, m = ctx.saved_tensors
        (batch, time, D), keys = q.shape, k.shape[1]
        groups, rows, W = band.shape
        gate = torch.sigmoid(q.float())
        dm = torch.empty_like(m)
        torch.mul(dy, gate, out=dm[:, :time])
        dm[:, time] = dm_end
        db = -m * dm
        db[:, time] += dL
        dq = (dm * m)[:, :time] * (1 - gate)
        after: list[Any] = [None] * 3
        if ctx.last is None:
            after = _summarize(L, dm, db, time + 1, TILE, -1)
            none = torch.zeros_like(mean)
            empty = [torch.full_like(mean, -torch.inf), none, none]
            total = _carry(after, empty, True)
            dstate = _of_state(total, log_sum, mean)
        else:
            dstate = dL, dm_end
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        BD = _channels(D // groups, WIDE)
        blocks = groups * chunks.count(D // groups, BD)
        sizes = (time, keys, W, ctx.last, D, rows)
        gpu.launch(
            window_backward_keys,
            (chunks.count(keys, TILE), batch, blocks),
            *(k, v, band, L, dm, db, *after, dk, dv, *sizes),
            chunks.count(time + 1, TILE),
            H=groups,
            R=TILE,
            BD=BD,
            warps=4,
        )
        dband = band.new_empty(groups, time, W)
        gpu.launch(
            window_backward_band,
            (chunks.count(time, TILE), W, groups),
            *(k, v, band, L, m, dm, dband, *sizes, batch),
            H=groups,
            R=TILE,
            BD=BD,
            warps=4,
        )
        if rows == 1:
            dband = dband.sum(1, keepdim=True)
        return dq.to(q.dtype), dk, dv, dband, *dstate, None, None


def simple(
    q: Tensor, k: Tensor, v: Tensor, log_sum: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """AFT-simple; arguments and results of the naive version."""
    return _Simple.apply(q, k, v, log_sum, mean)


def rows(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, last: int | None
) -> Tensor:
    """AFT-full, causal; arguments and results of the naive version."""
    assert last is not None
    state = q.new_zeros(2, len(q), q.shape[-1], dtype=torch.float32)
    given = (q, k, v, w, *state, last)
    return _Window.apply(*given, autograd.will_go_back(q, k, v, w))[0]


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
    assert causal
    given = (q, k, v, band, log_sum, mean)
    return _Window.apply(*given, None, autograd.will_go_back(*given))
