r"""# The running mean of AFT-simple on a GPU

The running mean is exact wherever $K$ is finite, because each sum is
kept together with its maximum. Each channel has a triple:

$$(M, s, a) = \Big(\max_i x_i,\ \sum_i e^{x_i - M} u_i,\
  \sum_i e^{x_i - M} w_i\Big) \tag{k1}$$

Two triples combine into a third, in any order: the larger maximum
stays, and the sums of the other triple are scaled down. Forward, $x$ is
a key, $u = 1$ and $w$ its value. Backward, each step $t$ passes its
gradients to all keys before it, with $x = -L_t$, $u = dm_t$ and
$w = -m_t\,dm_t$ (e3): the same sums from the end.

The sequence is divided into segments. `summarize` reduces each segment
to one triple, `carry` combines them in order, and `outputs` starts each
segment from the triple before it. Besides the inputs, only the triples
of segments are kept for the backward pass.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fwlab.ops import autograd, chunks, gpu

#: Steps per segment.
SEGMENT = 64
#: Channels per program.
NARROW = 32

#: The key of a step that no row sees.
LOW = tl.constexpr(float("-inf"))


@triton.jit
def combine(m1, s1, a1, m2, s2, a2):
    """(k1) of two triples; two empty ones stay empty."""
    top = tl.maximum(m1, m2)
    e1 = tl.where(m1 == top, 1.0, tl.exp(m1 - top))
    e2 = tl.where(m2 == top, 1.0, tl.exp(m2 - top))
    return top, s1 * e1 + s2 * e2, a1 * e1 + a2 * e2


@triton.jit
def _load(x, t, c, remaining, D, other):
    """Load a tile `[R, BD]` of `[time, D]`, in float32."""
    inside = (t < remaining)[:, None] & (c < D)[None, :]
    at = t[:, None] * D + c[None, :]
    return tl.load(x + at, mask=inside, other=other).to(tl.float32)


@triton.jit
def _store(x, value, t, c, remaining, D):
    """Store a tile `[R, BD]` of `[time, D]`."""
    inside = (t < remaining)[:, None] & (c < D)[None, :]
    at = t[:, None] * D + c[None, :]
    tl.store(x + at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def elements(x, u, w):
    """Steps as triples; a key that no row sees adds nothing."""
    empty = x == float("-inf")
    return x, tl.where(empty, 0.0, u), tl.where(empty, 0.0, w)


@triton.jit
def load_triple(top, s, a, at, inside):
    """Load (k1); outside it is the empty triple."""
    return (
        tl.load(top + at, mask=inside, other=float("-inf")),
        tl.load(s + at, mask=inside, other=0.0),
        tl.load(a + at, mask=inside, other=0.0),
    )


@triton.jit
def _store_triple(top, s, a, at, inside, M, S, A):
    """Store (k1), one number of each per channel."""
    tl.store(top + at, M, mask=inside)
    tl.store(s + at, S, mask=inside)
    tl.store(a + at, A, mask=inside)


@triton.jit
def _reduced(x, u, w):
    """One triple for all rows of a tile: (k1)."""
    M = tl.max(x, 0)
    e = tl.exp(x - tl.where(M > LOW, M, 0.0)[None, :])
    return M, tl.sum(e * u, 0), tl.sum(e * w, 0)


@triton.jit
def _running(k, v, M, S, A):
    """L and m of each row, starting from the triple M, S, A."""
    x, u, w = elements(k, tl.full(k.shape, 1.0, tl.float32), v)
    x, u, w = tl.associative_scan((x, u, w), 0, combine)
    M, S, A = M[None, :], S[None, :], A[None, :]
    x, u, w = combine(x, u, w, M, S, A)
    empty = u == 0
    return (
        tl.where(
            empty, float("-inf"), x + tl.log(tl.where(empty, 1.0, u))
        ),
        tl.where(empty, 0.0, w / tl.where(empty, 1.0, u)),
    )


@triton.jit(do_not_specialize=["time", "D", "stride"])
def summarize(
    x, u, w, top, s, a, time, D, stride,
    R: tl.constexpr, BD: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """The triple of each segment of one sequence.

    Loads x and w once (and u) from HBM: 2 b bytes per scalar, where a
    scalar has b bytes. Lower bound: those bytes over the bandwidth. One
    exponential per scalar.
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
    # A row that sees nothing has no gradients to pass on.
    X = tl.where(X < -LOW, X, float("-inf"))
    X, U, W = elements(X, U, W)
    M, S, A = _reduced(X, U, W)
    at = (batch * tl.num_programs(0) + n) * D + c
    _store_triple(top, s, a, at, c < D, M, S, A)


@triton.jit(do_not_specialize=["segments", "D"])
def carry(
    top, s, a, top_start, s_start, a_start, top_end, s_end, a_end,
    segments, D, BD: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Replace each triple by that of all segments before it.

    24 bytes per segment and channel. The lower bound is the latency:
    the segments are combined one after the other.
    """
    batch = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BD + tl.arange(0, BD)
    inside = c < D
    start = batch * D + c
    M, S, A = load_triple(top_start, s_start, a_start, start, inside)
    for i in range(segments):
        n = i
        if REVERSE:
            n = segments - 1 - i
        at = (batch * segments + n) * D + c
        m, s_n, a_n = load_triple(top, s, a, at, inside)
        _store_triple(top, s, a, at, inside, M, S, A)
        M, S, A = combine(M, S, A, m, s_n, a_n)
    _store_triple(top_end, s_end, a_end, start, inside, M, S, A)


@triton.jit(do_not_specialize=["time", "D"])
def outputs(
    q, k, v, top, s, a, y, time, D, R: tl.constexpr, BD: tl.constexpr
):
    """Eq. 5 for one segment: loads q, k, v and stores y, 4 b bytes.

    With `summarize` 6 b bytes per scalar, and 6 to 8 exponentials.
    Lower bound: the bytes.
    """
    n, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BD + tl.arange(0, BD)
    t, remaining = tl.arange(0, R), time - n * R
    origin = (batch * time + n.to(tl.int64) * R) * D
    K = _load(k + origin, t, c, remaining, D, float("-inf"))
    V = _load(v + origin, t, c, remaining, D, 0.0)
    at = (batch * tl.num_programs(0) + n) * D + c
    M, S, A = load_triple(top, s, a, at, c < D)
    _, m = _running(K, V, M, S, A)
    gate = tl.sigmoid(_load(q + origin, t, c, remaining, D, 0.0))
    _store(y + origin, gate * m, t, c, remaining, D)


@triton.jit(do_not_specialize=["time", "D"])
def outputs_backward(
    q, k, v, dy, top, s, a, top_after, s_after, a_after, dq, dk, dv,
    time, D, R: tl.constexpr, BD: tl.constexpr, ONLY: tl.constexpr,
):  # fmt: skip
    """(e3), (e4) for one segment; with `ONLY` just its triple (k1).

    The two launches load q, k, v, dy twice and store dq, dk, dv: 11 b
    bytes per scalar, about 15 exponentials. Lower bound: the bytes.
    """
    n, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * BD + tl.arange(0, BD)
    t, remaining = tl.arange(0, R), time - n * R
    origin = (batch * time + n.to(tl.int64) * R) * D
    K = _load(k + origin, t, c, remaining, D, float("-inf"))
    V = _load(v + origin, t, c, remaining, D, 0.0)
    at = (batch * tl.num_programs(0) + n) * D + c
    M, S, A = load_triple(top, s, a, at, c < D)
    L, m = _running(K, V, M, S, A)
    gate = tl.sigmoid(_load(q + origin, t, c, remaining, D, 0.0))
    g = _load(dy + origin, t, c, remaining, D, 0.0)
    dm = g * gate
    nonempty = (L > LOW) & (t < remaining)[:, None]
    X = tl.where(nonempty, -L, float("-inf"))
    X, U, W = elements(X, dm, -m * dm)
    if ONLY:
        M, S, A = _reduced(X, U, W)
        _store_triple(top_after, s_after, a_after, at, c < D, M, S, A)
    else:
        X, U, W = tl.associative_scan(
            (X, U, W), 0, combine, reverse=True
        )
        M, S, A = load_triple(top_after, s_after, a_after, at, c < D)
        X, U, W = combine(X, U, W, M[None, :], S[None, :], A[None, :])
        share = tl.exp(tl.where(X > LOW, K + X, float("-inf")))
        _store(dq + origin, dm * m * (1 - gate), t, c, remaining, D)
        _store(dv + origin, share * U, t, c, remaining, D)
        _store(dk + origin, share * (V * U + W), t, c, remaining, D)


def channels(width: int, limit: int = NARROW) -> int:
    """Channels per program: a power of two, as Triton needs it."""
    return min(triton.next_power_of_2(width), limit)


def _triples(like: Tensor, n: int) -> list[Tensor]:
    """Empty tensors for one triple per segment."""
    batch, _, D = like.shape
    shape = (batch, n, D)
    return [
        torch.empty(shape, dtype=torch.float32, device=like.device)
        for _ in range(3)
    ]


def summary(
    x: Tensor, u: Tensor | None, w: Tensor, time: int, R: int, sign: int
) -> list[Tensor]:
    """The triple (k1) of each segment of `R` steps of `sign * x`."""
    batch, stride, D = x.shape
    n, BD = chunks.count(time, R), channels(D)
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


def carried(
    triples: list[Tensor], start: list[Tensor], reverse: bool
) -> list[Tensor]:
    """Replace each triple by that of all segments before it.

    Returns the triple of the whole sequence.
    """
    batch, n, D = triples[0].shape
    BD = channels(D)
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


def as_triple(log_sum: Tensor, mean: Tensor) -> list[Tensor]:
    """A state as a triple."""
    nonempty = (log_sum != -torch.inf).to(mean.dtype)
    return [log_sum.contiguous(), nonempty, mean.contiguous()]


def as_state(
    top: Tensor, s: Tensor, a: Tensor
) -> tuple[Tensor, Tensor]:
    """A triple as a state."""
    empty = s == 0
    whole = torch.where(empty, 1, s)
    log_sum = torch.where(empty, -torch.inf, top + whole.log())
    return log_sum, torch.where(empty, 0, a / whole)


def _end_gradients(
    L: Tensor, m: Tensor, dL: Tensor, dm: Tensor
) -> list[Tensor]:
    """The gradients of a state, as a triple for all steps before it."""
    empty = torch.isinf(L)
    return [
        torch.where(empty, L, -L),
        torch.where(empty, 0, dm),
        torch.where(empty, 0, dL - m * dm),
    ]


def state_gradients(
    total: list[Tensor], log_sum: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of an initial state, one more step (e4)."""
    top, s, a = total
    empty = (top == -torch.inf) | (log_sum == -torch.inf)
    share = torch.where(empty, 0, (log_sum + top).exp())
    return share * (mean * s + a), share * s


class _Simple(torch.autograd.Function):
    """Eq. 5 and the final state.

    The inputs and one triple per segment are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, *state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`summary` and `carry`, then all segments at once."""
        q, k, v = (x.contiguous() for x in (q, k, v))
        batch, time, D = k.shape
        triples = summary(k, None, v, time, SEGMENT, 1)
        end = as_state(*carried(triples, as_triple(*state), False))
        y, BD = torch.empty_like(v), channels(D)
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
        """Twice over the segments: their triples first, and then, with
        what later segments carry back, the gradients.
        """
        q, k, v, log_sum, mean, *saved = ctx.saved_tensors
        triples, end = saved[:3], saved[3:]
        batch, time, D = k.shape
        n, BD = triples[0].shape[1], channels(D)
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
                total = carried(
                    after, _end_gradients(end[0], end[1], dL, dm), True
                )
        return *gradients, *state_gradients(total, log_sum, mean)


def causal(
    q: Tensor, k: Tensor, v: Tensor, log_sum: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Row $t$ sees past and present; called as the naive version."""
    return _Simple.apply(q, k, v, log_sum, mean)
