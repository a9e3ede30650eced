r"""# The delta rules on a GPU

In chunks, a delta rule is an additive rule that writes *errors* instead
of values: the kernels are those of the sum rule. What remains is the
triangular system of the efficient version, with
$L = \mathrm{stril}(K K^\top) \odot \Gamma$:

$$(I + L \beta)\, E = V - \gamma K W^\top \tag{d4}$$

Its matrix does not depend on $W$, so the inverses of all chunks are
computed side by side, before any kernel walks through time.

For short sequences, single steps, and GPUs whose tensor cores Triton
does not use, a kernel computes the recurrence as it is, one step after
the other, with $W$ in registers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fwlab.feature_maps import DPFP, sum_normalize
from fwlab.ops.additive.kernels import Chunked, Form, operator
from fwlab.ops.call import launcher
from fwlab.ops.call.operators import Operator, traced
from fwlab.ops.parts import autograd, chunks
from fwlab.ops.triton_tiles import (
    causal_mask,
    contiguous,
    features,
    one_precision,
    padded_width,
    per_head,
    precision,
    put_decays,
    put_scalars,
    row_products,
    scalars,
)

#: Maximum number of steps to compute one by one, without chunks. At 16
#: steps, forward and backward, an H200 was already 1.5 to 4.5 times as
#: fast in chunks. The lines through its times of `steps` at 16 and 64
#: steps reach those of chunks at 1 to 7 steps, at 4 on average.
SHORT = 4
#: Steps between two states that are kept for the backward pass, of a
#: sequence of up to 64 steps and of a longer one.
SEGMENT, LONG_SEGMENT = 16, 64


@triton.jit
def joined(
    X, A, size: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr
):
    """(k1) for all pairs of blocks of this size."""
    i = tl.arange(0, C)
    pair = (i // (2 * size))[:, None] == (i // (2 * size))[None, :]
    same = (i // size)[:, None] == (i // size)[None, :]
    off = tl.where(pair & ~same, A, 0.0)
    off = tl.dot(off, X, input_precision=PRECISION)
    return X - tl.dot(X, off, input_precision=PRECISION)


@triton.jit
def inverse(A, C: tl.constexpr, PRECISION: tl.constexpr):
    r"""$(I + A)^{-1}$ of a strictly lower triangular $A$, `[C, C]`.

    Of a block of size 2, it is $I - A$. Neighbours are then joined,
    until there is one block:

    $$\begin{pmatrix} B_1 & \\ A_{21} & B_2 \end{pmatrix}^{-1} =
      \begin{pmatrix} X_1 & \\ -X_2 A_{21} X_1 & X_2 \end{pmatrix}
      \tag{k1}$$

    No power of $A$ is ever formed. So this is as stable as
    substitution, while a product of powers is not. Up to size 16, each
    warp joins blocks of its own.
    """
    N: tl.constexpr = C // 16
    j = tl.arange(0, 16)
    b = tl.arange(0, N)
    diagonal = (b[:, None] == b[None, :])[:, None, :, None]
    D = tl.sum(
        tl.where(diagonal, tl.reshape(A, [N, 16, N, 16]), 0.0), 2
    )
    pair = (j // 2)[:, None] == (j // 2)[None, :]
    X = tl.where(j[:, None] == j[None, :], 1.0, tl.where(pair, -D, 0.0))
    X = joined(X, D, 2, 16, PRECISION)
    X = joined(X, D, 4, 16, PRECISION)
    X = joined(X, D, 8, 16, PRECISION)
    X = tl.reshape(tl.where(diagonal, X[:, :, None, :], 0.0), [C, C])
    if C > 16:
        X = joined(X, A, 16, C, PRECISION)
    if C > 32:
        X = joined(X, A, 32, C, PRECISION)
    return X


@triton.jit(do_not_specialize=["time", "heads", "programs"])
def prepare(
    q, k, decay, gammas, products, beta, q_total, k_total, X, time,
    heads, programs,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    NU: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The inverse of (d4) for one chunk; and with DPFP, Eq. 29's sums.

    Loads k and stores X: b (K + C) bytes per step and head (with DPFP
    it loads the d scalars of q and k). Operations: 2 C K, and 8 C^2 for
    the inverse of a chunk of 64.
    """
    TYPE: tl.constexpr = k.dtype.element_ty
    index = tl.program_id(0).to(tl.int64)
    program, n = index % programs, index // programs
    start = program // heads * time * heads + program % heads
    t = tl.arange(0, C)
    origin, remaining = (
        start + n * C * heads,
        (time - n * C).to(tl.int32),
    )
    key = features(k, None, origin, t, remaining, heads, 0, K, BK, NU)
    if NU > 0:
        query = features(
            q, None, origin, t, remaining, heads, 0, K, BK, NU
        )
        s = tl.sum(query, 1)
        put_scalars(q_total, s, origin, t, remaining, heads)
        s = tl.sum(key, 1)
        put_scalars(k_total, s, origin, t, remaining, heads)
        s = tl.where(s == 0, 1.0, s)
        key = key / s[:, None]
    A = row_products(key, key, TYPE, PRECISION)
    G = causal_mask(C)
    if decay is not None:
        G = put_decays(
            decay, gammas, products, index, origin, t, remaining, heads,
            C,
        )  # fmt: skip
    A = tl.where(t[:, None] > t[None, :], A * G, 0.0)
    A *= scalars(beta, origin, t, remaining, heads, 0.0)[None, :]
    x = inverse(A, C, PRECISION)
    at = X + index * C * C + t[:, None] * C + t[None, :]
    tl.store(at, x.to(TYPE))


def solve(
    q: Tensor, k: Tensor, decay: Tensor | None, gammas: Tensor | None,
    products: Tensor | None, beta: Tensor, form: Form, nu: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The inverses of all chunks, `[chunks * batch * heads, C, C]`."""
    batch, time, heads, d = k.shape
    programs = batch * heads
    n, K = chunks.count(time, form.C) * programs, d * (2 * nu or 1)
    X = k.new_empty(n, form.C, form.C)
    totals = [
        beta.new_empty(beta.shape, dtype=torch.float32) if nu else None
        for _ in range(2)
    ]
    launcher.launch(
        prepare, (n,),
        *(q, k, decay, gammas, products, beta, *totals, X),
        *(time, heads, programs), K=K, BK=padded_width(K), C=form.C,
        NU=nu, PRECISION=precision(k.dtype),
        warps=1 if K <= 128 and form.C < 64 and not nu else 4,
    )  # fmt: skip
    return X, totals[0], totals[1]


@triton.jit
def _vector(x, row, first, width: tl.constexpr, B: tl.constexpr):
    """Load one row, in float32."""
    column = first + tl.arange(0, B)
    value = tl.load(
        x + row * width + column, mask=column < width, other=0.0
    )
    return value.to(tl.float32)


@triton.jit
def _put(x, value, row, first, width: tl.constexpr, B: tl.constexpr):
    """Store one row."""
    column = first + tl.arange(0, B)
    value = value.to(x.dtype.element_ty)
    tl.store(x + row * width + column, value, mask=column < width)


@triton.jit
def _gate(x, row):
    """Load one scalar; a gate that is missing is 1."""
    value = 1.0
    if x is not None:
        value = tl.load(x + row).to(tl.float32)
    return value


@triton.jit
def _step(W, k, v, d, b):
    """(n1): the decayed weights, the error, and the new weights."""
    W = d * W
    e = v - tl.sum(W * k[None, :], 1)  # Eq. 20
    return W, e, W + (b * e)[:, None] * k[None, :]  # Eq. 24


@triton.jit(do_not_specialize=["time", "heads"])
def steps(
    q, k, v, decay, beta, W_start, y, states, W_end, time, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """All steps of one head, one after the other, for some rows of W.

    Registers: W. Loads q, k, v and stores y: b (2 K + 2 V) bytes per
    step and head. 6 K V operations on ordinary cores. Each step waits
    for the previous one, so the minimum is `time` times the latency of
    two sums over a row.
    """
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    start = program // heads * time * heads + program % heads
    first = tl.program_id(1) * BV
    value, key = first + tl.arange(0, BV), tl.arange(0, BK)
    at = program * V * K + value[:, None] * K + key[None, :]
    mask = (value < V)[:, None] & (key < K)[None, :]
    W = tl.zeros([BV, BK], tl.float32)
    if W_start is not None:
        W = tl.load(W_start + at, mask=mask, other=0.0)
    for t in range(time):
        row = start + t * heads.to(tl.int64)
        if (states is not None) and (t % SEGMENT == 0):
            n = (t // SEGMENT) * programs.to(tl.int64) * V * K
            tl.store(states + n + at, W, mask=mask)
        k_t = _vector(k, row, 0, K, BK)
        v_t = _vector(v, row, first, V, BV)
        d, b = _gate(decay, row), _gate(beta, row)
        _, _, W = _step(W, k_t, v_t, d, b)
        q_t = _vector(q, row, 0, K, BK)
        _put(y, tl.sum(W * q_t[None, :], 1), row, first, V, BV)
    tl.store(W_end + at, W, mask=mask)


@triton.jit(do_not_specialize=["time", "heads"])
def steps_backward(
    q, k, v, decay, beta, dy, states, dW_end, scratch, dq, dk, dv,
    ddecay, dbeta, dW, time, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """Repeat each segment forward, then go backward through it.

    Its states go into `scratch`, which stays in the cache. No step is
    undone: W - u k would drift, and a decay of 0 has no inverse. 20 K V
    operations per step and head. The gradients of q, k and the gates
    are sums over all rows of W: each program stores the part of its own
    rows.
    """
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    start = program // heads * time * heads + program % heads
    block = tl.program_id(1)
    first = block * BV
    part = block.to(tl.int64) * (programs // heads) * time * heads
    value, key = first + tl.arange(0, BV), tl.arange(0, BK)
    at = program * V * K + value[:, None] * K + key[None, :]
    mask = (value < V)[:, None] & (key < K)[None, :]
    stride = programs.to(tl.int64) * V * K
    D = tl.zeros([BV, BK], tl.float32)
    if dW_end is not None:
        D = tl.load(dW_end + at, mask=mask, other=0.0)
    segments = tl.cdiv(time, SEGMENT)
    for back in range(segments):
        n = segments - 1 - back
        begin = n * SEGMENT
        length = tl.minimum(SEGMENT, time - begin)
        W = tl.load(states + n * stride + at, mask=mask, other=0.0)
        # Another warp may still load what is overwritten here.
        tl.debug_barrier()
        for i in range(length):
            tl.store(scratch + i * stride + at, W, mask=mask)
            row = start + (begin + i) * heads.to(tl.int64)
            k_t = _vector(k, row, 0, K, BK)
            v_t = _vector(v, row, first, V, BV)
            d, b = _gate(decay, row), _gate(beta, row)
            _, _, W = _step(W, k_t, v_t, d, b)
        tl.debug_barrier()
        for j in range(length):
            i = length - 1 - j
            row = start + (begin + i) * heads.to(tl.int64)
            q_t = _vector(q, row, 0, K, BK)
            k_t = _vector(k, row, 0, K, BK)
            v_t = _vector(v, row, first, V, BV)
            g_t = _vector(dy, row, first, V, BV)
            d, b = _gate(decay, row), _gate(beta, row)
            before = tl.load(
                scratch + i * stride + at, mask=mask, other=0.0
            )
            faded, e, W = _step(before, k_t, v_t, d, b)
            D += g_t[:, None] * q_t[None, :]
            du = tl.sum(D * k_t[None, :], 1)
            dv_t = b * du
            _put(dv, dv_t, row, first, V, BV)
            dq_t = tl.sum(W * g_t[:, None], 0)
            _put(dq, dq_t, part + row, 0, K, BK)
            dk_t = tl.sum(
                D * (b * e)[:, None] - faded * dv_t[:, None], 0
            )
            _put(dk, dk_t, part + row, 0, K, BK)
            tl.store(dbeta + part + row, tl.sum(du * e))
            D -= dv_t[:, None] * k_t[None, :]
            if decay is not None:
                tl.store(ddecay + part + row, tl.sum(D * before))
            D = d * D
    if dW is not None:
        tl.store(dW + at, D, mask=mask)


class _Steps(torch.autograd.Function):
    """The recurrence step by step, with gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None,
        beta: Tensor, W: Tensor | None, keep: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """For the backward pass, keep a state every few steps."""
        inputs = q, k, v, decay, beta, W
        q, k, v, decay, beta, W = contiguous(*inputs)
        batch, time, heads, K = q.shape
        V, programs = v.shape[-1], batch * heads
        y, shape = torch.empty_like(v), (batch, heads, V, K)
        W_end = v.new_empty(shape, dtype=torch.float32)
        states = None
        if keep:
            n = chunks.count(time, segment(time))
            states = W_end.new_empty(n, *shape)
        launcher.launch(
            steps,
            (programs, chunks.count(V, rows_of_W(K, V))),
            *(q, k, v, decay, beta, W, y, states, W_end, time, heads),
            **_sizes(K, V, time),
        )
        if keep:
            ctx.save_for_backward(q, k, v, decay, beta, states)
        ctx.set_materialize_grads(False)
        return y, W_end

    @staticmethod
    @autograd.backward_pass
    def backward(
        ctx: Any, dy: Tensor | None, dW_end: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Each program has some rows of $W$, and its own part of the
        gradients of queries, keys and gates: they are added up.
        """
        q, k, v, decay, beta, states = ctx.saved_tensors
        batch, time, heads, K = q.shape
        V, programs = v.shape[-1], batch * heads
        dy = torch.zeros_like(v) if dy is None else dy.contiguous()
        (dW_end,) = contiguous(dW_end)
        parts = chunks.count(V, rows_of_W(K, V))
        dv = torch.empty_like(v)
        begins = ctx.needs_input_grad[5]
        dW = torch.empty_like(states[0]) if begins else None
        dq, dk, db = (
            x.new_empty(parts, *x.shape, dtype=torch.float32)
            for x in (q, k, beta)
        )
        dd = None if decay is None else torch.empty_like(db)
        scratch = states.new_empty(
            min(segment(time), time), *states.shape[1:]
        )
        launcher.launch(
            steps_backward,
            (programs, parts),
            *(q, k, v, decay, beta, dy, states, dW_end),
            *(scratch, dq, dk, dv, dd, db, dW, time, heads),
            **_sizes(K, V, time),
        )
        dq, dk, db = (
            x.sum(0, dtype=like.dtype)
            for x, like in ((dq, q), (dk, k), (db, beta))
        )
        dd = dd if dd is None else dd.sum(0)
        return dq, dk, dv, dd, db, dW, None


def rows_of_W(K: int, V: int) -> int:
    """Rows of W per program of the recurrence."""
    return min(16 if K <= 64 else 8, triton.next_power_of_2(V))


def segment(time: int) -> int:
    """Steps between two states that are kept."""
    return SEGMENT if time <= LONG_SEGMENT else LONG_SEGMENT


def _sizes(K: int, V: int, time: int) -> dict[str, int]:
    """What `steps` and `steps_backward` are compiled for."""
    BK = triton.next_power_of_2(K)
    return {
        "K": K,
        "V": V,
        "BK": BK,
        "BV": rows_of_W(K, V),
        "SEGMENT": segment(time),
        "warps": 1 if BK <= 128 else BK // 128,
    }


_operator = operator("correcting_kernels", solve)
_step_operator = Operator(
    "correcting_steps",
    _Steps,
    "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor beta, "
    "Tensor? W, bool keep",
    2,
)


def _by_steps(q: Tensor, nu: int) -> bool:
    """Whether the recurrence is computed step by step.

    Features from PyTorch take longer than all chunks of a short
    sequence, so with DPFP only old GPUs do.
    """
    old = launcher.capability(q.device) < launcher.TENSOR_CORES
    return old or (q.shape[1] <= SHORT and not nu)


def correcting(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    strength: Tensor,
    W: Tensor | None,
    nu: int = 0,
) -> tuple[Tensor, Tensor]:
    r"""Arguments and results of the chunked version.

    With `nu` > 0, the kernels themselves make DPFP features of `q` and
    `k` and divide them by their sum (Eqs. 37 and 29): they load $d$
    scalars per key, and never store its $2 d \nu$ features in HBM.
    """
    by_steps = _by_steps(q, nu)
    if by_steps and nu:
        phi, nu = DPFP(nu), 0
        q, k = (sum_normalize(phi(x.float())) for x in (q, k))
    decay, beta = per_head(decay), per_head(strength)
    inputs = (*one_precision(q, k, v), decay, beta, W)
    keep = autograd.will_go_back(*inputs)
    if by_steps:
        run = _step_operator if traced(q) else _Steps.apply
        return run(*inputs, keep)
    run = _operator if traced(q) else Chunked.apply
    y, W, _ = run(*inputs, None, nu, keep, solve)
    return y, W
