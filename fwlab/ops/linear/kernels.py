r"""# Fast weights on a GPU, in chunks

The tensors are in HBM, the main memory of a GPU. In the time that HBM takes to deliver
one scalar, the tensor cores could compute about two hundred products. The registers and
the shared memory of a multiprocessor are as fast as its cores, and have room for one
state $W$ and the rows of one chunk. So the plan is: *load a chunk once, compute all its
products there, and store only the outputs and one state per chunk.*

One kernel loops over time, with $W$ in registers, and computes all terms that depend on
earlier chunks (`forward`, and `backward_state` from the end). Everything else is
computed for all chunks side by side (`read`, `backward_inputs`).

The equations are those of the chunked version, with an error $E$ instead of the
values, so that one set of kernels serves two recurrences. For the sum rule and the
gated rule $E = V$; for the delta rules $E = V - \bar V$ comes from a triangular system.
$s$ is the strength (the delta rule's $\beta$), and $U = s E$ is what is written:

$$Y = \gamma\, Q W^\top
  + \big(\mathrm{tril}(Q K^\top) \odot \Gamma\big)\, s E \tag{c1}$$
$$W' = \gamma_C W + (s E)^\top (\Gamma_C K) \tag{c2}$$

The normaliser is one more column of $V$, in which all values are 1: its row of $W$ is
$z$, and its column of $Y$ is the denominator of Eq. 19.

Backward, $G$ is the gradient of $Y$, $dW'$ that of the state after the chunk, and $dP =
G\, U^\top \odot \Gamma$ in the lower triangle:

$$dQ = \gamma\, G\, W + dP\, K \tag{c3}$$
$$dK = dP^\top Q + \Gamma_C\, U\, dW' \tag{c4}$$
$$dU = P^\top G + \Gamma_C K\, dW'^\top \tag{c5}$$
$$dW = \gamma_C\, dW' + G^\top (\gamma Q) \tag{c6}$$
$$ds = \mathrm{rowsum}(E \odot dU) \tag{c7}$$

**Costs** per step and head, forward, with $b$ bytes per scalar. Bytes: $b\,(2K + 2V)$
for $q, k, v, y$, and $b\,K V / C$ for the states when a backward pass follows.
Operations: $2 C (K + V) + 4 K V$. With $K = V = C = 64$ and bfloat16 that is 640 bytes
and 32,768 operations, 51 per byte. A GPU that can do 180 per byte is bound by HBM: the
lower bound is the bytes over the bandwidth.
"""

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fwlab.ops import _triton
from fwlab.ops._recurrence import Recurrence, Results, Tensors
from fwlab.ops._rules import Inputs
from fwlab.ops.triton_tiles import (
    contiguous,
    count,
    decays,
    one_precision,
    padded_width,
    per_head,
    precision,
    product,
    put_decays,
    put_rows,
    put_scalars,
    reciprocal,
    row_products,
    rows,
    scalars,
    state_tile,
    this_chunk,
)


@triton.jit(do_not_specialize=["time", "heads", "programs"])
def multiply_decays(decay, gammas, products, time, heads, programs, C: tl.constexpr):
    r"""Compute the products of decays of one chunk, $\gamma$ and $\Gamma$.

    This kernel stores b C bytes per step and head.
    """
    index, origin, remaining = this_chunk(time, heads, programs, C)
    t = tl.arange(0, C)
    put_decays(decay, gammas, products, index, origin, t, remaining, heads, C)


@triton.jit(do_not_specialize=["time", "heads"])
def forward(
    q, k, v, gammas, products, strength, X, W, z, y, total, E, states, z_states, W_end,
    z_end, time, heads, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute all chunks of one head, one after another, for some rows of W.

    W is in registers. For each chunk, the kernel loads q, k, v (X, and the products of
    decays), and stores y, and for a backward pass the state and E. Operations per step
    and head: 2 C (K + V) + 4 K V, and 2 K V + 2 C V more with X.
    """
    TYPE: tl.constexpr = v.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    start = program // heads * time * heads + program % heads
    first = tl.program_id(1) * BV
    column = tl.arange(0, BK)
    at, mask = state_tile(first, 0, V, K, BV, BK)
    offset = program * V * K
    S = tl.zeros([BV, BK], tl.float32)
    if W is not None:
        S = tl.load(W + offset + at, mask=mask, other=0.0)
    t = tl.arange(0, C)
    sums = tl.zeros([BK], tl.float32)
    if z is not None:
        sums = tl.load(z + program * K + column, mask=column < K, other=0.0)
    for n in range(tl.cdiv(time, C)):
        origin = start + n * C * heads.to(tl.int64)
        remaining = time - n * C
        index = n * programs.to(tl.int64) + program
        if states is not None:
            tl.store(states + index * V * K + at, S.to(TYPE), mask=mask)
        key = rows(k, origin, t, remaining, heads, 0, K, BK)
        e = rows(v, origin, t, remaining, heads, first, V, BV)
        gamma, G, fade, last = decays(
            gammas, products, index, origin, t, remaining, heads, C
        )
        s = scalars(strength, origin, t, remaining, heads, 0.0)
        if X is not None:  # (d4)
            x = tl.load(X + index * C * C + t[:, None] * C + t[None, :])
            retrieved = row_products(key, S, TYPE, PRECISION)
            e = product(x, e - gamma[:, None] * retrieved, TYPE, PRECISION)
        if E is not None:
            put_rows(E, e, origin, t, remaining, heads, first, V, BV)
        u = e * s[:, None]
        if y is not None:  # (c1), (d2)
            query = rows(q, origin, t, remaining, heads, 0, K, BK)
            P = row_products(query, key, TYPE, PRECISION) * G
            out = row_products(query, S, TYPE, PRECISION)
            out = out * gamma[:, None]
            out = out + product(P, u, TYPE, PRECISION)
            if z is not None:
                denominator = tl.sum(query * sums[None, :], 1) * gamma
                denominator += tl.sum(P * s[None, :], 1)
                # A subnormal number counts as 0: see `divide`.
                none = tl.abs(denominator) < 1.1754944e-38
                denominator = tl.where(none, 0.0, denominator)
                out *= reciprocal(denominator)[:, None]  # Eq. 19
                if first == 0:
                    put_scalars(total, denominator, origin, t, remaining, heads)
            put_rows(y, out, origin, t, remaining, heads, first, V, BV)
        if z is not None:
            if z_states is not None and first == 0:
                tl.store(z_states + index * K + column, sums, mask=column < K)
            sums = sums * last
            sums += tl.sum(key * (s * fade)[:, None], 0)
        S = S * last  # (c2), (d3)
        S += product(tl.trans(u * fade[:, None]), key, TYPE, PRECISION)
    tl.store(W_end + offset + at, S, mask=mask)
    if z is not None and first == 0:
        tl.store(z_end + program * K + column, sums, mask=column < K)


@triton.jit(do_not_specialize=["time", "heads", "programs"])
def read(
    q, k, E, gammas, products, strength, states, y, time, heads, programs,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs (Eq. c1) of one chunk, for some columns of y.

    When few heads leave most of the GPU idle, `forward` only computes the states, and
    this kernel computes the outputs of all chunks side by side. It loads the states and
    E once more: 2 b (V + K V / C) bytes per step.
    """
    TYPE: tl.constexpr = E.dtype.element_ty
    index, origin, remaining = this_chunk(time, heads, programs, C)
    first = tl.program_id(1) * BV
    t = tl.arange(0, C)
    at, mask = state_tile(first, 0, V, K, BV, BK)
    S = tl.load(states + index * V * K + at, mask=mask, other=0.0)
    query = rows(q, origin, t, remaining, heads, 0, K, BK)
    key = rows(k, origin, t, remaining, heads, 0, K, BK)
    e = rows(E, origin, t, remaining, heads, first, V, BV)
    s = scalars(strength, origin, t, remaining, heads, 0.0)
    gamma, G, _, _ = decays(gammas, products, index, origin, t, remaining, heads, C)
    P = product(query, tl.trans(key), TYPE, PRECISION) * G
    out = product(query, tl.trans(S), TYPE, PRECISION) * gamma[:, None]
    out += product(P, e * s[:, None], TYPE, PRECISION)
    put_rows(y, out, origin, t, remaining, heads, first, V, BV)


@triton.jit(do_not_specialize=["time", "heads"])
def backward_state(
    q, k, dy, gammas, products, strength, X, y, total, dW_end, dz_end, dv, afters,
    z_afters, dtotal, dW, dz, time, heads, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, AV: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the state, from the last chunk to the first.

    dW is in registers. Each chunk loads q, k, dy (and X), and stores dv and the
    gradient of the state after it: (c5) and (c6), or with X (d5) and (d6). Operations
    per step and head: 2 C (K + V) + 4 K V, and 2 K V + 2 C V more with X.
    """
    TYPE: tl.constexpr = dy.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    start = program // heads * time * heads + program % heads
    first = tl.program_id(1) * BV
    column = tl.arange(0, BK)
    at, mask = state_tile(first, 0, V, K, BV, BK)
    offset = program * V * K
    D = tl.zeros([BV, BK], tl.float32)
    if dW_end is not None:
        D = tl.load(dW_end + offset + at, mask=mask, other=0.0)
    t = tl.arange(0, C)
    sums = tl.zeros([BK], tl.float32)
    if dz_end is not None:
        sums = tl.load(dz_end + program * K + column, mask=column < K, other=0.0)
    count = tl.cdiv(time, C)
    for back in range(count):
        n = count - 1 - back
        origin = start + n * C * heads.to(tl.int64)
        remaining = time - n * C
        index = n * programs.to(tl.int64) + program
        tl.store(afters + index * V * K + at, D.to(TYPE), mask=mask)
        query = rows(q, origin, t, remaining, heads, 0, K, BK)
        key = rows(k, origin, t, remaining, heads, 0, K, BK)
        g = rows(dy, origin, t, remaining, heads, first, V, BV)
        gamma, G, fade, last = decays(
            gammas, products, index, origin, t, remaining, heads, C
        )
        s = scalars(strength, origin, t, remaining, heads, 0.0)
        unit = 1.0
        if total is not None:
            reciprocals = reciprocal(scalars(total, origin, t, remaining, heads, 0.0))
            # Small values would underflow in float16, so they are divided by the
            # maximum of the chunk.
            unit = tl.max(tl.abs(reciprocals), 0)
            g = g * (reciprocals * reciprocal(unit))[:, None]
            if first == 0:
                # The gradient of a denominator is -dy y / denominator.
                tl.store(z_afters + index * K + column, sums, mask=column < K)
                dy_rows = rows(dy, origin, t, remaining, heads, 0, V, AV)
                out = rows(y, origin, t, remaining, heads, 0, V, AV)
                dd = tl.sum(dy_rows.to(tl.float32) * out.to(tl.float32), 1)
                dd = -dd * reciprocals
                put_scalars(dtotal, dd, origin, t, remaining, heads)
                sums = sums * last
                sums += tl.sum(query * (gamma * dd)[:, None], 0)
        P = row_products(query, key, TYPE, PRECISION) * G
        du = product(tl.trans(P), g, TYPE, PRECISION) * unit  # (c5)
        du += fade[:, None] * row_products(key, D, TYPE, PRECISION)
        g_v = du * s[:, None]
        D = D * last  # (c6), (d6)
        g = g * gamma[:, None]
        D += product(tl.trans(g), query, TYPE, PRECISION) * unit
        if X is not None:
            x = tl.load(X + index * C * C + t[:, None] * C + t[None, :])
            g_v = product(tl.trans(x), g_v, TYPE, PRECISION)  # (d5)
            faded = tl.trans(g_v * gamma[:, None])
            D -= product(faded, key, TYPE, PRECISION)
        put_rows(dv, g_v, origin, t, remaining, heads, first, V, BV)
    if dW is not None:
        tl.store(dW + offset + at, D, mask=mask)
    if dz is not None and first == 0:
        tl.store(dz + program * K + column, sums, mask=column < K)


@triton.jit(do_not_specialize=["time", "heads", "programs"])
def backward_inputs(
    q, k, E, dy, dv, gammas, products, strength, total, dtotal, states, afters,
    z_states, z_afters, dq, dk, ddecay, dstrength, time, heads, programs,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk's inputs (Eqs. c3, c4, c7, d7 and d8).

    A program computes one chunk and `BK` columns of q and k. It loads q, k, E, dy (and
    dv) and the two states, and stores dq and dk: b (4 K + 3 V + 2 K V / C) bytes per
    step. Operations: 6 C K + 2 C V + 4 K V, and 4 C K + 2 C V + 2 K V more with dv.

    dq is complete before dk begins, so that few tiles are in registers at any time.
    """
    TYPE: tl.constexpr = dy.dtype.element_ty
    index, origin, remaining = this_chunk(time, heads, programs, C)
    first_key = tl.program_id(1) * BK
    column, t = first_key + tl.arange(0, BK), tl.arange(0, C)
    gamma, G, fade, _ = decays(gammas, products, index, origin, t, remaining, heads, C)
    s = scalars(strength, origin, t, remaining, heads, 0.0)
    reciprocals, unit = tl.full([C], 1.0, tl.float32), 1.0
    if total is not None:
        reciprocals = reciprocal(scalars(total, origin, t, remaining, heads, 0.0))
        unit = tl.max(tl.abs(reciprocals), 0)
        dd = scalars(dtotal, origin, t, remaining, heads, 0.0)

    # Compute the gradients of the weights with which steps read earlier writes.
    YE = tl.zeros([C, C], tl.float32)
    VE = tl.zeros([C, C], tl.float32)
    for first in range(0, V, BV):
        e = rows(E, origin, t, remaining, heads, first, V, BV)
        g = rows(dy, origin, t, remaining, heads, first, V, BV)
        YE += product(g, tl.trans(e), TYPE, PRECISION)
        if dv is not None:
            g = rows(dv, origin, t, remaining, heads, first, V, BV)
            VE += product(g, tl.trans(e), TYPE, PRECISION)
    if total is not None:
        # The terms below cancel, as Eq. 19 does not depend on the length of q. So dy
        # is multiplied before it is rounded.
        YE = YE * reciprocals[:, None] + dd[:, None]
    strict = t[:, None] > t[None, :]
    if dstrength is not None or products is not None:
        query = rows(q, origin, t, remaining, heads, first_key, K, BK)
        key = rows(k, origin, t, remaining, heads, first_key, K, BK)
        # The sum starts at 0, because the compiler then spills fewer registers.
        pairs = tl.zeros([C, C], tl.float32)
        pairs += product(query, tl.trans(key), TYPE, PRECISION) * YE
        if dv is not None:
            KK = product(key, tl.trans(key), TYPE, PRECISION)
            pairs -= tl.where(strict, KK * VE, 0.0)
        d_s = tl.sum(pairs * G, 0)  # (c7), (d7)
    fading = G * s[None, :]
    R = (YE * fading * reciprocal(unit)).to(TYPE)
    N = tl.where(strict, VE * fading, 0.0).to(TYPE)
    N = tl.where(strict, N, tl.trans(N))

    query = rows(q, origin, t, remaining, heads, first_key, K, BK)
    key = rows(k, origin, t, remaining, heads, first_key, K, BK)
    g_q = tl.zeros([C, BK], tl.float32)
    for first in range(0, V, BV):
        at, mask = state_tile(first, first_key, V, K, BV, BK)
        S = tl.load(states + index * V * K + at, mask=mask, other=0.0)
        g = rows(dy, origin, t, remaining, heads, first, V, BV)
        g_q += product(g, S, TYPE, PRECISION)
    if total is not None:
        at_z = index * K + column
        z = tl.load(z_states + at_z, mask=column < K, other=0.0)
        g_q *= reciprocals[:, None]
        g_q += dd[:, None] * z[None, :]
    read = tl.sum(g_q * query, 1)
    g_q *= gamma[:, None]
    g_q += product(R, key, TYPE, PRECISION) * unit  # (c3)
    put_rows(dq, g_q, origin, t, remaining, heads, first_key, K, BK)

    g_k, ends = tl.zeros([C, BK], tl.float32), 0.0
    for first in range(0, V, BV):
        at, mask = state_tile(first, first_key, V, K, BV, BK)
        D = tl.load(afters + index * V * K + at, mask=mask, other=0.0)
        e = rows(E, origin, t, remaining, heads, first, V, BV)
        g_k += product(e, D, TYPE, PRECISION)
        if products is not None:
            S = tl.load(states + index * V * K + at, mask=mask, other=0.0)
            ends += tl.sum(S.to(tl.float32) * D.to(tl.float32))
    if total is not None:
        after = tl.load(z_afters + at_z, mask=column < K, other=0.0)
        g_k += after[None, :]
        ends += tl.sum(z * after)
    stored = tl.sum(g_k * key, 1)
    g_k *= (fade * s)[:, None]
    # (c4), (d8)
    g_k += unit * product(tl.trans(R), query, TYPE, PRECISION)
    if dv is not None:
        g_k -= product(N, key, TYPE, PRECISION)
        d_retrieved = tl.zeros([C, BK], tl.float32)
        for first in range(0, V, BV):
            at, mask = state_tile(first, first_key, V, K, BV, BK)
            S = tl.load(states + index * V * K + at, mask=mask, other=0.0)
            g = rows(dv, origin, t, remaining, heads, first, V, BV)
            d_retrieved += product(g, S, TYPE, PRECISION)
        read -= tl.sum(d_retrieved * key, 1)
        g_k -= d_retrieved * gamma[:, None]
    put_rows(dk, g_k, origin, t, remaining, heads, first_key, K, BK)
    part = tl.program_id(1).to(tl.int64) * (programs // heads)
    part *= time.to(tl.int64) * heads
    if dstrength is not None:
        d_s += fade * stored
        put_scalars(dstrength + part, d_s, origin, t, remaining, heads)
    if products is not None:
        # As in `DecayProducts`, steps i >= t read what steps j < t have written. The
        # last column, which no step j < t uses, contains the state.
        at = products + index * C * C + t[:, None] * C + t[None, :]
        G = tl.load(at).to(tl.float32)
        front = scalars(gammas, origin, tl.maximum(t - 1, 0), remaining, heads, 1.0)
        front = tl.where(t == 0, 1.0, front)
        state = t == C - 1
        met = tl.where(strict, pairs * s[None, :], 0.0)
        met = tl.where(state[None, :], read[:, None], met)
        met = tl.dot(tl.trans(G), met, input_precision=PRECISION)
        written = tl.where(state, ends, stored * s)
        met += fade[:, None] * written[None, :]
        # The product of the decays strictly between two steps is in the row above.
        H = tl.load(at - C, mask=(t > 0)[:, None], other=0.0)
        H = tl.where(state[None, :], front[:, None], H)
        d_d = tl.sum(met * H, 1)
        put_scalars(ddecay + part, d_d, origin, t, remaining, heads)


class Form(NamedTuple):
    """Hold the tile sizes and launch options of the kernels.

    - `C`: steps per chunk.
    - `BV`, `warps`, `stages`: rows of W and warps per program, and pipeline stages, in
      the kernels that loop over time.
    - `BK`, `AV`, `chunk_warps`: columns of q and k, columns of v and warps per program,
      in the kernels that compute one chunk each.
    - `split`: True if a separate kernel computes the outputs.
    """

    C: int
    BV: int
    warps: int
    stages: int
    BK: int
    AV: int
    chunk_warps: int
    split: bool = False


#: Tile sizes for widths of 64 and 128 in half precision on Hopper were tuned on an H200
#: (docs/kernels/index.md). A model of one multiprocessor determined all other sizes.
#: Only Hopper has chunks of 64, because its matrix products have at least 64 rows.
NARROW = Form(64, BV=32, warps=4, stages=3, BK=64, AV=64, chunk_warps=4)
BROAD = Form(64, BV=64, warps=4, stages=2, BK=128, AV=128, chunk_warps=4)
#: With a decay, `backward_inputs` has too few registers for all columns of V.
FADING = BROAD._replace(AV=64)
#: A delta rule also loads an inverse. Two programs fit on a multiprocessor only
#: without prefetching.
FADING_DELTA = FADING._replace(stages=1, chunk_warps=8)
HALF = Form(32, BV=32, warps=4, stages=2, BK=64, AV=64, chunk_warps=2)
HALF_BROAD = HALF._replace(BK=128, AV=128, chunk_warps=4)
WIDE = Form(16, BV=16, warps=4, stages=2, BK=32, AV=32, chunk_warps=4)
FULL = Form(16, BV=32, warps=8, stages=2, BK=32, AV=32, chunk_warps=4)
FULL_WIDE = FULL._replace(BV=16)


def form(v: Tensor, K: int, fades: bool, corrects: bool) -> Form:
    """Choose the tile sizes for values `v` and keys of width K.

    Chunks are short where registers are scarce: for wide heads, for float32, and on
    GPUs other than Hopper.
    """
    batch, _, heads, V = v.shape
    full = v.dtype == torch.float32
    hopper = _triton.capability(v.device)[0] == 9
    cores = _triton.multiprocessors(v.device)
    # `int` specialises a traced call to these sizes.
    known = int(batch * heads), int(K), int(V)
    return _form(*known, full, fades, corrects, hopper, cores)


@functools.cache
def _form(
    heads: int, K: int, V: int, full: bool,
    fades: bool, corrects: bool, hopper: bool, cores: int,
) -> Form:  # fmt: skip
    """Choose tile sizes for `heads` heads in total, and `cores` multiprocessors."""
    width = max(K, V)
    if full:
        plan = FULL if K <= 128 else FULL_WIDE
    elif width <= 64:
        plan = NARROW if hopper else HALF
    elif K > 128:
        plan = WIDE
    elif not hopper:
        plan = HALF_BROAD
    elif fades and K > 64:
        plan = FADING_DELTA if corrects else FADING
    else:
        plan = BROAD
    plan = plan._replace(
        BV=min(plan.BV, padded_width(V)),
        BK=min(plan.BK, padded_width(K)),
        AV=min(plan.AV, padded_width(V)),
    )
    # Rows of W are independent, so a few heads can be split among more programs.
    programs = heads * count(V, plan.BV)
    while plan.BV > 16 and programs < cores:
        plan = plan._replace(BV=plan.BV // 2)
        programs = heads * count(V, plan.BV)
    return plan._replace(split=programs < cores // 2)


def chunked_forward(x: Tensors, keep: bool, solve: Callable | None) -> Results:
    """Launch the forward kernels; with `keep`, return what the backward pass needs.

    `forward` carries the state from chunk to chunk. If that leaves most of the GPU
    idle, `read` computes the outputs.

    - `x`: q, k, v; decay, strength (in float32), W and z, or None.
    - `solve(k, decay, gammas, products, strength, form)` fills in the products of
      decays, and returns the triangular inverses of a delta rule; None = a linear
      rule, which writes the values themselves.
    """
    q, k, v, decay, strength, W, z = contiguous(*x)
    (batch, time, heads, K), V = q.shape, v.shape[-1]
    plan = form(v, K, decay is not None, solve is not None)
    split = plan.split and z is None
    n, programs = count(time, plan.C), batch * heads
    y, W_end = torch.empty_like(v), q.new_empty(batch, heads, V, K, dtype=torch.float32)
    gammas = products = X = states = z_states = total = z_end = None
    if decay is not None:
        gammas = torch.empty_like(decay)
        # A normaliser may be close to 0, so its decays have the dtype of `z`, float32.
        products = (v if z is None else z).new_empty(n * programs, plan.C, plan.C)
    if solve is not None:
        X = solve(k, decay, gammas, products, strength, plan)
    elif decay is not None:
        _triton.launch(
            multiply_decays,
            (n * programs,),
            *(decay, gammas, products, time, heads, programs),
            C=plan.C,
            warps=1,
        )
    if keep or split:
        states = v.new_empty(n * programs, V, K)
    # A linear rule writes the values themselves, so it needs no errors E.
    E = None if X is None or states is None else torch.empty_like(v)
    if z is not None:
        z_end, total = torch.empty_like(z), z.new_empty(v.shape[:3])
        z_states = z.new_empty(n * programs, K) if keep else None
    _triton.launch(
        forward,
        (programs, count(V, plan.BV)),
        *(q, k, v, gammas, products, strength, X, W, z),
        *(None if split else y, total, E, states, z_states, W_end, z_end),
        *(time, heads),
        BV=plan.BV,
        warps=plan.warps,
        stages=plan.stages,
        **sizes(v, K, plan),
    )
    if split:
        _triton.launch(
            read,
            (n * programs, count(V, plan.AV)),
            *(q, k, v if E is None else E, gammas, products, strength),
            *(states, y, time, heads, programs),
            BV=plan.AV,
            warps=plan.chunk_warps,
            **sizes(v, K, plan),
        )
    kept = [states, X, E, gammas, products, total, z_states]
    return present(y, W_end, z_end), present(*kept) if keep else []


def chunked_backward(
    x: Tensors, kept: Tensors, gradients: Tensors, needed: Sequence[bool]
) -> Tensors:
    """Launch the backward kernels; return the gradients of the inputs `x`.

    `backward_state` carries the gradient of the state back; then `backward_inputs`
    computes all chunks at once.
    """
    q, k, v, decay, strength, W, z = contiguous(*x)
    dy, dW_end, *rest = contiguous(*gradients)
    dz_end = rest[0] if rest else None
    states, *saved = contiguous(*kept)
    X = gammas = products = total = z_states = y = None
    if z is not None:
        *saved, total, z_states, y = saved
    if decay is not None:
        *saved, gammas, products = saved
    if saved:
        X, v = saved  # A delta rule writes the errors E in place of the values.
    (batch, time, heads, K), V = q.shape, v.shape[-1]
    plan = form(v, K, decay is not None, X is not None)
    n, programs = count(time, plan.C), batch * heads
    dy = torch.zeros_like(v) if dy is None else dy
    dW, dz = like(W if needed[5] else None), like(z if needed[6] else None)
    dtotal, z_afters = map(like, (total, z_states))
    dv, afters = torch.empty_like(v), torch.empty_like(states)
    _triton.launch(
        backward_state,
        (programs, count(V, plan.BV)),
        *(q, k, dy, gammas, products, strength, X, y, total, dW_end),
        *(dz_end, dv, afters, z_afters, dtotal, dW, dz, time, heads),
        BV=plan.BV,
        AV=padded_width(V),
        warps=plan.warps,
        stages=plan.stages,
        **sizes(v, K, plan),
    )
    parts = count(K, plan.BK)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    dd, ds = (
        None if gate is None else gate.new_empty(parts, *gate.shape)
        for gate in (decay, strength)
    )
    _triton.launch(
        backward_inputs,
        (n * programs, parts),
        *(q, k, v, dy, None if X is None else dv, gammas, products),
        *(strength, total, dtotal, states, afters, z_states, z_afters),
        *(dq, dk, dd, ds, time, heads, programs),
        BV=plan.AV,
        warps=plan.chunk_warps,
        **sizes(v, K, plan) | {"BK": plan.BK},
    )
    dd, ds = (x if x is None else x[0] if parts == 1 else x.sum(0) for x in (dd, ds))
    return dq, dk, dv, dd, ds, dW, dz


def like(x: Tensor | None) -> Tensor | None:
    """Return an empty tensor of the shape of `x`, or None if `x` is None."""
    return None if x is None else torch.empty_like(x)


def sizes(v: Tensor, K: int, plan: Form) -> dict[str, Any]:
    """Return the compile-time constants that all kernels take."""
    widths = {"K": K, "V": v.shape[-1], "C": plan.C, "BK": padded_width(K)}
    return widths | {"PRECISION": precision(v.dtype)}


def present(*tensors: Tensor | None) -> list[Tensor]:
    """Return the list of the tensors that are not None."""
    return [x for x in tensors if x is not None]


def recurrence(
    name: str, solve: Callable | None = None, reads: Sequence[int] = ()
) -> Recurrence:
    """Make the `Recurrence` of linear rules or, with `solve`, of delta rules."""
    there = partial(chunked_forward, solve=solve)
    x = "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? strength, "
    x += "Tensor? W, Tensor? z"
    # The backward pass of a delta rule needs the errors instead of the values.
    spares = () if solve is None else (2,)
    return Recurrence(name, x, "", there, chunked_backward, there, reads, spares)


_sum = recurrence("linear_kernels")
# The gradient of a quotient needs the quotient itself.
_mean = recurrence("normalized_linear_kernels", reads=(0,))


def linear(
    x: Inputs, W: Tensor, z: Tensor | None, alone: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch the kernels; return `y` and the final state, `W` and `z`.

    - `alone`: `W` is empty, and the caller does not use the final state.
    """
    gates = per_head(x.decay), per_head(x.strength)
    inputs = (*one_precision(x.q, x.k, x.v), *gates, None if alone else W, z)
    y, W, *rest = (_sum if z is None else _mean)(inputs)
    return y, W, rest[0] if rest else None
