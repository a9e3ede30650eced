r"""# The running mean of AFT-simple on a GPU

The running mean is exact wherever $K$ is finite, because each sum is kept together with
its maximum. Each channel has a triple:

$$(M, s, a) = \Big(\max_i x_i,\ \sum_i e^{x_i - M} u_i,\
  \sum_i e^{x_i - M} w_i\Big) \tag{k1}$$

Two triples combine into a third, in any order: the larger maximum stays, and the sums
of the other triple are scaled down. Forward, $x$ is a key, $u = 1$ and $w$ its value.
Backward, each step $t$ passes its gradients to all keys before it, with $x = -L_t$, $u
= dm_t$ and $w = -m_t\,dm_t$ (e3): the same sums from the end.

The sequence is divided into segments. `summarize` reduces each segment to one triple,
`carry` combines them in order, and `outputs` starts each segment from the triple before
it. Besides the inputs, only the triples of segments are kept for the backward pass.

Within a segment there is no scan over pairs of triples: each thread computes one
channel, keeps one triple in registers, and adds the steps in order.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fwlab.ops import _triton
from fwlab.ops._recurrence import Recurrence, Results, Tensors
from fwlab.ops.triton_tiles import contiguous, count

#: The number of steps per segment.
SEGMENT = 16
#: The number of segments that `carry` loads at a time.
AHEAD = 8
#: The number of channels per program, one for each thread of four warps.
NARROW = 128

#: The key of a masked step.
LOW = tl.constexpr(float("-inf"))
#: The lowest finite number in float32.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def exp(x):
    """Compute the exponential; results below 1e-38 are 0, which is faster."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def combine(m1, s1, a1, m2, s2, a2):
    """Combine two triples of maximum and sums (Eq. k1); either may be empty."""
    e = tl.where(m1 == m2, 1.0, exp(-tl.abs(m1 - m2)))
    e1, e2 = tl.where(m1 < m2, e, 1.0), tl.where(m2 < m1, e, 1.0)
    return tl.maximum(m1, m2), s1 * e1 + s2 * e2, a1 * e1 + a2 * e2


@triton.jit
def _load(x, t, c, remaining, D, other):
    """Load a tile `[R, BD]` of `[time, D]`, in float32."""
    inside = (t < remaining)[:, None] & (c < D)[None, :]
    at = t[:, None] * D + c[None, :]
    return tl.load(x + at, mask=inside, other=other).to(tl.float32)


@triton.jit
def elements(x, u, w):
    """Return steps as triples of maximum and sums (Eq. k1), empty for a key of -inf."""
    empty = x == float("-inf")
    return x, tl.where(empty, 0.0, u), tl.where(empty, 0.0, w)


@triton.jit
def load_triple(top, s, a, at, inside):
    """Load each channel's maximum and sums (Eq. k1); padding gets -inf and 0."""
    return (
        tl.load(top + at, mask=inside, other=float("-inf")),
        tl.load(s + at, mask=inside, other=0.0),
        tl.load(a + at, mask=inside, other=0.0),
    )


@triton.jit
def _store_triple(top, s, a, at, inside, M, S, A):
    """Store the maximum and the two sums (Eq. k1) of each channel."""
    tl.store(top + at, M, mask=inside)
    tl.store(s + at, S, mask=inside)
    tl.store(a + at, A, mask=inside)


@triton.jit
def _row(x, t, c, remaining, D, other):
    """Load one row `[BD]` of `[time, D]`, in float32."""
    inside = (t < remaining) & (c < D)
    return tl.load(x + t * D + c, mask=inside, other=other).to(tl.float32)


@triton.jit
def _put_row(x, value, t, c, remaining, D):
    """Store one row `[BD]` of `[time, D]`."""
    inside = (t < remaining) & (c < D)
    tl.store(x + t * D + c, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _start(top, s, a, at, inside):
    """Load each channel's maximum, made finite for `_step`, and sums (Eq. k1)."""
    M, S, A = load_triple(top, s, a, at, inside)
    return tl.maximum(M, LOWEST), S, A


@triton.jit
def _log(S):
    """Return the logarithm of a sum, or 0 for a sum of 0."""
    return tl.log(tl.where(S == 0, 1.0, S))


@triton.jit
def _step(M, S, A, k, v):
    """Add one step to the maximum and the two sums (Eq. k1) of each channel.

    Also return the factors of the old sums and of the new step. The larger factor is 1,
    so this takes one exponential.
    """
    e = exp(-tl.abs(M - k))
    old, new = tl.where(k > M, e, 1.0), tl.where(k > M, 1.0, e)
    v = tl.where(k > LOW, v, 0.0)
    return (
        tl.maximum(M, k), S * old + new, A * old + new * v, old, new,
    )  # fmt: skip


@triton.jit(do_not_specialize=["time", "D", "stride"])
def summarize(
    x, u, w, top, s, a, time, D, stride,
    R: tl.constexpr, BD: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Reduce each segment of a sequence to a maximum and two sums (Eq. k1) per channel.

    The kernel loads x and w (and u) once from HBM: 2 b bytes per scalar, where a scalar
    has b bytes. Lower bound: the bytes over the bandwidth. One exponential per scalar.
    """
    n, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BD + tl.arange(0, BD)
    t, remaining = tl.arange(0, R), time - n * R
    origin = batch * stride * D + n.to(tl.int64) * R * D
    X = _load(x + origin, t, c, remaining, D, 0.0) * SIGN
    X = tl.where((t < remaining)[:, None], X, float("-inf"))
    W = _load(w + origin, t, c, remaining, D, 0.0)
    U = tl.full(W.shape, 1.0, tl.float32)
    if u is not None:
        U = _load(u + origin, t, c, remaining, D, 0.0)
    # A row that sees no key has no gradients.
    X = tl.where(X < -LOW, X, float("-inf"))
    X, U, W = elements(X, U, W)
    M = tl.max(X, 0)
    e = exp(X - tl.where(M > LOW, M, 0.0)[None, :])
    S, A = tl.sum(e * U, 0), tl.sum(e * W, 0)
    at = (batch * tl.num_programs(0) + n) * D + c
    _store_triple(top, s, a, at, c < D, M, S, A)


@triton.jit(do_not_specialize=["segments", "D"])
def carry(
    top, s, a, top_start, s_start, a_start, top_end, s_end, a_end, segments, D,
    BD: tl.constexpr, AHEAD: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Replace each segment's triple (Eq. k1) by the triple of all earlier segments.

    It moves 24 bytes per segment and channel. The lower bound is the latency: segments
    are combined one after another. `AHEAD` segments are loaded at a time.
    """
    batch = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = c < D
    start = batch * D + c
    M, S, A = load_triple(top_start, s_start, a_start, start, inside)
    for first in range(0, segments, AHEAD):
        triples: tl.tuple = ()
        for i in tl.static_range(AHEAD):
            n = first + i
            if REVERSE:
                n = segments - 1 - n
            at = (batch * segments + n) * D + c
            real = inside & (first + i < segments)
            triples += ((at, real, load_triple(top, s, a, at, real)),)
        for i in tl.static_range(AHEAD):
            at, real, triple = triples[i]
            m, s_n, a_n = triple
            _store_triple(top, s, a, at, real, M, S, A)
            M, S, A = combine(M, S, A, m, s_n, a_n)
    _store_triple(top_end, s_end, a_end, start, inside, M, S, A)


@triton.jit(do_not_specialize=["time", "D"])
def outputs(q, k, v, top, s, a, y, time, D, R: tl.constexpr, BD: tl.constexpr):
    """Compute the outputs (Eq. 5) of one segment from the sums before it (Eq. k1).

    The kernel loads q, k, v and stores y, 4 b bytes per scalar; with `summarize` 6 b
    bytes and 3 exponentials. Lower bound: the bytes over the bandwidth. Each thread
    computes one channel: it loads all steps of the segment, then adds them in order.
    """
    n, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BD + tl.arange(0, BD)
    remaining = time - n * R
    origin = (batch * time + n.to(tl.int64) * R) * D
    q, k, v, y = q + origin, k + origin, v + origin, y + origin
    at = (batch * tl.num_programs(0) + n) * D + c
    M, S, A = _start(top, s, a, at, c < D)
    rows: tl.tuple = ()
    for t in tl.static_range(R):
        key = _row(k, t, c, remaining, D, float("-inf"))
        value = _row(v, t, c, remaining, D, 0.0)
        query = _row(q, t, c, remaining, D, 0.0)
        rows += ((key, value, query),)
    for t in tl.static_range(R):
        key, value, query = rows[t]
        M, S, A, _, _ = _step(M, S, A, key, value)
        total = tl.where(S == 0, 1.0, S) * (1 + exp(-query))
        _put_row(y, A / total, t, c, remaining, D)


@triton.jit(do_not_specialize=["time", "D"])
def outputs_backward(
    q, k, v, dy, top, s, a, top_after, s_after, a_after, dq, dk, dv,
    time, D, R: tl.constexpr, BD: tl.constexpr, ONLY: tl.constexpr,
):  # fmt: skip
    """Compute a segment's gradients (Eqs. e3, e4), or only its sums (Eq. k1) if `ONLY`.

    The two launches load q, k, v, dy twice and store dq, dk, dv: 11 b bytes per scalar,
    4 exponentials. Lower bound: the bytes over the bandwidth.

    The sums over later steps are relative to $-L_t$. The weight of key t in row t is
    $e^{K_t - L_t}$, and $e^{L_{t-1} - L_t}$ leads from row t to row t - 1. Both are at
    most 1, and quotients of numbers that the running mean computes anyway.
    """
    n, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BD + tl.arange(0, BD)
    remaining = time - n * R
    origin = (batch * time + n.to(tl.int64) * R) * D
    q, k, v, dy = q + origin, k + origin, v + origin, dy + origin
    dq, dk, dv = dq + origin, dk + origin, dv + origin
    at = (batch * tl.num_programs(0) + n) * D + c
    M, S, A = _start(top, s, a, at, c < D)
    before = tl.where(S == 0, LOW, -M - _log(S))
    rows: tl.tuple = ()
    kept: tl.tuple = ()
    for t in tl.static_range(R):
        key = _row(k, t, c, remaining, D, float("-inf"))
        value = _row(v, t, c, remaining, D, 0.0)
        query = _row(q, t, c, remaining, D, 0.0)
        g = _row(dy, t, c, remaining, D, 0.0)
        rows += ((key, value, query, g),)
    for t in tl.static_range(R):
        key, value, query, g = rows[t]
        last = S
        M, S, A, old, new = _step(M, S, A, key, value)
        each = tl.where(S == 0, 0.0, 1 / tl.where(S == 0, 1.0, S))
        m, gate = A * each, tl.sigmoid(query)
        dm = g * gate
        if not ONLY:
            d = dm * m * (1 - gate)
            _put_row(dq, d, t, c, remaining, D)
        fade, share = last * old * each, new * each
        kept += ((fade, share, value, dm, m * dm),)
    U, W = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    if not ONLY:
        X, U, W = load_triple(top_after, s_after, a_after, at, c < D)
        none = (S == 0) | (X == LOW)
        e = exp(tl.where(none, LOW, X + M + _log(S)))
        U, W = U * e, W * e
    for t in tl.static_range(R - 1, -1, -1):
        fade, share, value, dm, mdm = kept[t]
        U, W = U + dm, W - mdm
        if not ONLY:
            _put_row(dv, share * U, t, c, remaining, D)
            d = share * (value * U + W)
            _put_row(dk, d, t, c, remaining, D)
        U, W = U * fade, W * fade
    if ONLY:
        _store_triple(top_after, s_after, a_after, at, c < D, before, U, W)


def channels(width: int, limit: int = NARROW) -> int:
    """Return the number of channels per program, a power of two for Triton."""
    return min(triton.next_power_of_2(width), limit)


def _warps(BD: int) -> int:
    """Return the number of warps with one thread per channel."""
    return max(BD // 32, 1)


def _triples(like: Tensor, n: int) -> list[Tensor]:
    """Allocate three tensors for the maximum and two sums (Eq. k1) of each segment."""
    batch, _, D = like.shape
    shape = (batch, n, D)
    return [
        torch.empty(shape, dtype=torch.float32, device=like.device) for _ in range(3)
    ]


def summary(
    x: Tensor, u: Tensor | None, w: Tensor, time: int, R: int, sign: int
) -> list[Tensor]:
    """Return the maximum and sums (Eq. k1) of keys `sign * x` for every `R` steps."""
    batch, stride, D = x.shape
    n, BD = count(time, R), channels(D)
    out = _triples(x, n)
    _triton.launch(
        summarize, (n, batch, count(D, BD)),
        *(x, u, w, *out, time, D, stride), R=R, BD=BD, SIGN=sign,
        warps=_warps(BD),
    )  # fmt: skip
    return out


def carried(triples: list[Tensor], start: list[Tensor], reverse: bool) -> list[Tensor]:
    """Launch `carry` on segments' triples, and return the triple of the sequence."""
    batch, n, D = triples[0].shape
    BD = channels(D, 32)
    end = [torch.empty_like(x) for x in start]
    _triton.launch(
        carry, (batch, count(D, BD)),
        *(*triples, *start, *end, n, D), BD=BD, AHEAD=AHEAD,
        REVERSE=reverse, warps=1,
    )  # fmt: skip
    return end


def as_triple(log_sum: Tensor, mean: Tensor) -> list[Tensor]:
    """Convert a state (log sum, mean) to a maximum and two sums (Eq. k1)."""
    nonempty = (log_sum != -torch.inf).to(mean.dtype)
    return [log_sum.contiguous(), nonempty, mean.contiguous()]


def as_state(top: Tensor, s: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a maximum and two sums (Eq. k1) to a state (log sum, mean)."""
    empty = s == 0
    whole = torch.where(empty, 1, s)
    log_sum = torch.where(empty, -torch.inf, top + whole.log())
    return log_sum, torch.where(empty, 0, a / whole)


def _end_gradients(L: Tensor, m: Tensor, dL: Tensor, dm: Tensor) -> list[Tensor]:
    """Return the final state's gradients as a triple (Eq. k1), to start `carry`."""
    empty = torch.isinf(L)
    return [
        torch.where(empty, L, -L),
        torch.where(empty, 0, dm),
        torch.where(empty, 0, dL - m * dm),
    ]


def state_gradients(
    total: list[Tensor], log_sum: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """Return gradients of the initial state, which acts as one more step (Eq. e4)."""
    top, s, a = total
    empty = (top == -torch.inf) | (log_sum == -torch.inf)
    share = torch.where(empty, 0, (log_sum + top).exp())
    return share * (mean * s + a), share * s


def causal_forward(x: Tensors, keep: bool) -> Results:
    """Launch the forward kernels; return outputs, final state, and saved triples.

    `summary` and `carried` come first, then all segments are computed at once.
    """
    q, k, v, *state = contiguous(*x)
    batch, time, D = k.shape
    triples = summary(k, None, v, time, SEGMENT, 1)
    end = as_state(*carried(triples, as_triple(*state), False))
    y, BD = torch.empty_like(v), channels(D)
    _triton.launch(
        outputs, (triples[0].shape[1], batch, count(D, BD)),
        *(q, k, v, *triples, y, time, D), R=SEGMENT, BD=BD,
        warps=_warps(BD),
    )  # fmt: skip
    return [y, *end], triples if keep else []


def causal_backward(
    x: Tensors, kept: Tensors, gradients: Tensors, needed: Sequence[bool]
) -> Tensors:
    """Launch the backward kernels; return the gradients of the inputs `x`.

    The segments are read twice: for their triples, and then, with the triples of later
    segments, for the gradients.
    """
    q, k, v, log_sum, mean = contiguous(*x)
    *triples, L, m = contiguous(*kept)
    dy, dL, dm = (
        torch.zeros_like(part) if dx is None else dx
        for part, dx in zip((v, L, m), contiguous(*gradients), strict=True)
    )
    batch, time, D = k.shape
    n, BD = triples[0].shape[1], channels(D)
    after = _triples(k, n)
    made = [torch.empty_like(part) for part in (q, k, v)]
    tensors = (q, k, v, dy, *triples, *after, *made)
    for only in (True, False):
        _triton.launch(
            outputs_backward, (n, batch, count(D, BD)),
            *(*tensors, time, D), R=SEGMENT, BD=BD, ONLY=only,
            warps=_warps(BD),
        )  # fmt: skip
        if only:
            total = carried(after, _end_gradients(L, m, dL, dm), True)
    return *made, *state_gradients(total, log_sum, mean)


_causal = Recurrence(
    "aft_simple_kernels",
    "Tensor q, Tensor k, Tensor v, Tensor log_sum, Tensor mean",
    "",
    causal_forward,
    causal_backward,
    causal_forward,
    reads=(1, 2),
)


def causal(
    q: Tensor, k: Tensor, v: Tensor, log_sum: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute causal AFT-simple (Eq. 5); return the outputs and the final state."""
    return tuple(_causal((q, k, v, log_sum, mean)))
