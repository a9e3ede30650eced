r"""# Fast weights on a GPU, in chunks

A GPU has two memories. The large one holds the tensors and gives about
a number for every two hundred products that the tensor cores could do
with it. The small one, registers and shared memory of a
multiprocessor, is as fast as the cores, and has room for one state $W$
and the rows of one chunk. So the plan is: *a chunk is read once, all
its products are done in the small memory, and what goes back are the
outputs and one state per chunk.*

What depends on the chunks before it stands in one kernel that walks
through time, with $W$ in registers (`forward`, and `backward_state`
from the end). Everything else is computed for all chunks side by side
(`read`, `backward_inputs`).

The equations are those of the efficient version: here with an error
$E$ in place of the values, so that one set of kernels serves two
recurrences. For the sum rule and the gated rule $E = V$; for the delta
rules $E = V - \bar V$ comes from a triangular system. $s$ is the
strength (the delta rule's $\beta$), and $U = s E$ is what is written:

$$Y = \gamma\, Q W^\top
  + \big(\mathrm{tril}(Q K^\top) \odot \Gamma\big)\, s E \tag{c1}$$
$$W' = \gamma_C W + (s E)^\top (\Gamma_C K) \tag{c2}$$

The normaliser is one more column of $V$, in which all values are 1: its
row of $W$ is $z$, and its column of $Y$ the denominator of Eq. 19.

**Costs** per step and head, forward; $b$ bytes per number. Bytes:
$b\,(2K + 2V)$ for $q, k, v, y$, and $b\,K V / C$ for the states when a
backward pass follows. Operations: $2 C (K + V) + 4 K V$. With
$K = V = C = 64$ and bfloat16 that is 640 bytes and 32,768 operations:
51 for each byte, and a GPU that does 180 for each byte is bound by its
memory. The floor is bytes over bandwidth.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fwlab.ops import autograd, chunks, gpu
from fwlab.ops.tiles import (
    contiguous,
    fading,
    features,
    features_backward,
    inverse_of,
    last,
    last_row,
    numbers,
    one_precision,
    per_head,
    power,
    precision,
    product,
    put_numbers,
    put_rows,
    rows,
    seen,
    tile,
)


@triton.jit(do_not_specialize=["time", "heads"])
def forward(
    q, k, v, decay, strength, X, q_total, k_total, W, z, y, total, E,
    states, z_states, W_end, z_end, time, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, NU: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One head, some rows of W, all chunks one after the other.

    Registers: W. Per chunk it reads q, k, v (and X) and writes y, and
    for a backward pass the state and E. Operations per step and head:
    2 C (K + V) + 4 K V, and 2 K V + 2 C V more with X.
    """
    TYPE: tl.constexpr = v.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    start = program // heads * time * heads + program % heads
    first = tl.program_id(1) * BV
    column = tl.arange(0, BK)
    at, mask = tile(first, 0, V, K, BV, BK)
    own = program * V * K
    S = tl.load(W + own + at, mask=mask, other=0.0)
    t = tl.arange(0, C)
    sums = tl.zeros([BK], tl.float32)
    if z is not None:
        sums = tl.load(
            z + program * K + column, mask=column < K, other=0.0
        )
    for n in range(tl.cdiv(time, C)):
        here, rest = start + n * C * heads, time - n * C
        place = n * programs.to(tl.int64) + program
        if states is not None:
            tl.store(
                states + place * V * K + at,
                S.to(TYPE),
                mask=mask,
            )
        key = features(k, k_total, here, t, rest, heads, 0, K, BK, NU)
        e = rows(v, here, t, rest, heads, first, V, BV)
        gamma, G = tl.full([C], 1.0, tl.float32), seen(C)
        if decay is not None:
            d = numbers(decay, here, t, rest, heads, 1.0)
            gamma, G = tl.cumprod(d, 0), fading(d, C)
        s = numbers(strength, here, t, rest, heads, 0.0)
        if X is not None:  # (d4)
            x = tl.load(X + place * C * C + t[:, None] * C + t[None, :])
            held_S = product(key, tl.trans(S), TYPE, PRECISION)
            e = product(x, e - gamma[:, None] * held_S, TYPE, PRECISION)
        if E is not None:
            put_rows(E, e, here, t, rest, heads, first, V, BV)
        u = e * s[:, None]
        if y is not None:  # (c1), (d2)
            query = features(
                q, q_total, here, t, rest, heads, 0, K, BK, NU
            )
            P = product(query, tl.trans(key), TYPE, PRECISION) * G
            read = product(query, tl.trans(S), TYPE, PRECISION)
            read = read * gamma[:, None] + product(
                P, u, TYPE, PRECISION
            )
            if z is not None:
                below = tl.sum(query * sums[None, :], 1) * gamma
                below += tl.sum(P * s[None, :], 1)
                read *= inverse_of(below)[:, None]  # Eq. 19
                if first == 0:
                    put_numbers(total, below, here, t, rest, heads)
            put_rows(y, read, here, t, rest, heads, first, V, BV)
        left = key * last_row(G, C)[:, None]
        if z is not None:
            if z_states is not None and first == 0:
                tl.store(
                    z_states + place * K + column, sums, mask=column < K
                )
            sums = sums * last(gamma, C) + tl.sum(left * s[:, None], 0)
        S = S * last(gamma, C) + product(
            tl.trans(u), left, TYPE, PRECISION
        )  # (c2), (d3)
    tl.store(W_end + own + at, S, mask=mask)
    if z is not None and first == 0:
        tl.store(z_end + program * K + column, sums, mask=column < K)


@triton.jit(do_not_specialize=["time", "heads", "programs"])
def read(
    q, k, E, decay, strength, q_total, k_total, states, y, time,
    heads, programs,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, NU: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(c1) for one chunk and some columns of y.

    When few heads leave most of the GPU idle, `forward` only walks
    through the states, and all chunks are read here side by side. It
    reads the states and E once more: 2 b (V + K V / C) bytes per step.
    """
    TYPE: tl.constexpr = E.dtype.element_ty
    place = tl.program_id(0).to(tl.int64)
    program, n = place % programs, place // programs
    start = program // heads * time * heads + program % heads
    first = tl.program_id(1) * BV
    t = tl.arange(0, C)
    here, rest = start + n * C * heads, (time - n * C).to(tl.int32)
    at, mask = tile(first, 0, V, K, BV, BK)
    S = tl.load(states + place * V * K + at, mask=mask, other=0.0)
    query = features(q, q_total, here, t, rest, heads, 0, K, BK, NU)
    key = features(k, k_total, here, t, rest, heads, 0, K, BK, NU)
    e = rows(E, here, t, rest, heads, first, V, BV)
    s = numbers(strength, here, t, rest, heads, 0.0)
    gamma, G = tl.full([C], 1.0, tl.float32), seen(C)
    if decay is not None:
        d = numbers(decay, here, t, rest, heads, 1.0)
        gamma, G = tl.cumprod(d, 0), fading(d, C)
    P = product(query, tl.trans(key), TYPE, PRECISION) * G
    out = product(query, tl.trans(S), TYPE, PRECISION) * gamma[:, None]
    out += product(P, e * s[:, None], TYPE, PRECISION)
    put_rows(y, out, here, t, rest, heads, first, V, BV)


@triton.jit(do_not_specialize=["time", "heads"])
def backward_state(
    q, k, dy, decay, strength, X, q_total, k_total, y, total, dW_end,
    dz_end, dv, afters, z_afters, dtotal, dW, dz, time, heads,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, AV: tl.constexpr, C: tl.constexpr,
    NU: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state, from the last chunk to the first.

    Registers: dW. Per chunk it reads q, k, dy (and X) and writes dv and
    the gradient of the state after the chunk. (c5) and (c6); with X,
    (d5) and (d6). Operations per step and head: 2 C (K + V) + 4 K V,
    and 2 K V + 2 C V more with X.
    """
    TYPE: tl.constexpr = dy.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    start = program // heads * time * heads + program % heads
    first = tl.program_id(1) * BV
    column = tl.arange(0, BK)
    at, mask = tile(first, 0, V, K, BV, BK)
    own = program * V * K
    D = tl.load(dW_end + own + at, mask=mask, other=0.0)
    t = tl.arange(0, C)
    sums = tl.zeros([BK], tl.float32)
    if dz_end is not None:
        sums = tl.load(
            dz_end + program * K + column, mask=column < K, other=0.0
        )
    count = tl.cdiv(time, C)
    for back in range(count):
        n = count - 1 - back
        here, rest = start + n * C * heads, time - n * C
        place = n * programs.to(tl.int64) + program
        tl.store(
            afters + place * V * K + at,
            D.to(TYPE),
            mask=mask,
        )
        query = features(q, q_total, here, t, rest, heads, 0, K, BK, NU)
        key = features(k, k_total, here, t, rest, heads, 0, K, BK, NU)
        g = rows(dy, here, t, rest, heads, first, V, BV)
        gamma, G = tl.full([C], 1.0, tl.float32), seen(C)
        if decay is not None:
            d = numbers(decay, here, t, rest, heads, 1.0)
            gamma, G = tl.cumprod(d, 0), fading(d, C)
        s = numbers(strength, here, t, rest, heads, 0.0)
        faded = query * gamma[:, None]
        unit = 1.0
        if total is not None:
            below = inverse_of(
                numbers(total, here, t, rest, heads, 0.0)
            )
            # Small numbers would be lost in float16: in units of the
            # largest of the chunk.
            unit = tl.max(below, 0)
            g = g * (below * inverse_of(unit))[:, None]
            if first == 0:
                # The denominator's gradient is - dy y / denominator.
                tl.store(
                    z_afters + place * K + column,
                    sums,
                    mask=column < K,
                )
                whole = rows(dy, here, t, rest, heads, 0, V, AV)
                out = rows(y, here, t, rest, heads, 0, V, AV)
                dd = tl.sum(
                    whole.to(tl.float32) * out.to(tl.float32), 1
                )
                dd = -dd * below
                put_numbers(dtotal, dd, here, t, rest, heads)
                sums = sums * last(gamma, C)
                sums += tl.sum(faded * dd[:, None], 0)
        P = product(query, tl.trans(key), TYPE, PRECISION) * G
        du = product(tl.trans(P), g, TYPE, PRECISION) * unit  # (c5)
        left = key * last_row(G, C)[:, None]
        du += product(left, tl.trans(D), TYPE, PRECISION)
        g_v = du * s[:, None]
        D = D * last(gamma, C)  # (c6), (d6)
        D += product(tl.trans(g), faded, TYPE, PRECISION) * unit
        if X is not None:
            x = tl.load(X + place * C * C + t[:, None] * C + t[None, :])
            g_v = product(tl.trans(x), g_v, TYPE, PRECISION)  # (d5)
            asked = key * gamma[:, None]
            D -= product(tl.trans(g_v), asked, TYPE, PRECISION)
        put_rows(dv, g_v, here, t, rest, heads, first, V, BV)
    tl.store(dW + own + at, D, mask=mask)
    if dz_end is not None and first == 0:
        tl.store(dz + program * K + column, sums, mask=column < K)


@triton.jit(do_not_specialize=["time", "heads", "programs"])
def backward_inputs(
    q, k, E, dy, dv, decay, strength, q_total, k_total, total, dtotal,
    states, afters, z_states, z_afters, dq, dk, ddecay, dstrength,
    time, heads, programs,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, BD: tl.constexpr, PER: tl.constexpr,
    C: tl.constexpr, NU: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What is local to a chunk: (c3), (c4), (c7), or (d7) and (d8).

    A program takes one chunk and `PER` blocks of columns of q and k. It
    reads q, k, E, dy (and dv) and the two states, and writes dq and dk:
    b (4 K + 3 V + 2 K V / C) bytes per step. Operations: 6 C K + 2 C V
    + 4 K V, and 6 C K + 2 C V + 2 K V more with dv.
    """
    TYPE: tl.constexpr = dy.dtype.element_ty
    place = tl.program_id(0).to(tl.int64)
    program, n = place % programs, place // programs
    start = program // heads * time * heads + program % heads
    t = tl.arange(0, C)
    here, rest = start + n * C * heads, (time - n * C).to(tl.int32)
    gamma, G = tl.full([C], 1.0, tl.float32), seen(C)
    if decay is not None:
        d = numbers(decay, here, t, rest, heads, 1.0)
        gamma, G = tl.cumprod(d, 0), fading(d, C)
    s = numbers(strength, here, t, rest, heads, 0.0)
    below, unit = tl.full([C], 1.0, tl.float32), 1.0
    if total is not None:
        below = inverse_of(numbers(total, here, t, rest, heads, 0.0))
        unit = tl.max(below, 0)
        below *= inverse_of(unit)
        dd = numbers(dtotal, here, t, rest, heads, 0.0)

    # Who reads how much of what each step wrote.
    YE = tl.zeros([C, C], tl.float32)
    VE = tl.zeros([C, C], tl.float32)
    for first in range(0, V, BV):
        e = rows(E, here, t, rest, heads, first, V, BV)
        g = rows(dy, here, t, rest, heads, first, V, BV)
        if total is not None:
            g = g * below[:, None]
        YE += product(g, tl.trans(e), TYPE, PRECISION)
        if dv is not None:
            g = rows(dv, here, t, rest, heads, first, V, BV)
            VE += product(g, tl.trans(e), TYPE, PRECISION)
    YE *= unit
    if total is not None:
        YE += dd[:, None]
    strict = t[:, None] > t[None, :]
    L = tl.where(strict, G, 0.0)
    R, N = YE * G * s[None, :], VE * L * s[None, :]
    if total is not None:
        R *= inverse_of(unit)

    d_s = tl.zeros([C], tl.float32)  # (c7), (d7)
    read = tl.zeros([C], tl.float32)
    written = tl.zeros([C], tl.float32)
    between = tl.zeros([C, C], tl.float32)
    ends = 0.0
    if NU > 0:
        d_query = tl.zeros([C, BD], tl.float32)
        d_key = tl.zeros([C, BD], tl.float32)
        one_query = tl.zeros([C, BD], tl.float32)
        one_key = tl.zeros([C, BD], tl.float32)
        query_mean = tl.zeros([C], tl.float32)
        key_mean = tl.zeros([C], tl.float32)
    for block in range(PER):
        left_of = (tl.program_id(1) * PER + block) * BK
        column = left_of + tl.arange(0, BK)
        query = features(
            q, q_total, here, t, rest, heads, left_of, K, BK, NU
        )
        key = features(
            k, k_total, here, t, rest, heads, left_of, K, BK, NU
        )
        from_state = tl.zeros([C, BK], tl.float32)
        to_end = tl.zeros([C, BK], tl.float32)
        asked = tl.zeros([C, BK], tl.float32)
        for first in range(0, V, BV):
            at, mask = tile(first, left_of, V, K, BV, BK)
            own = place * V * K
            S = tl.load(states + own + at, mask=mask, other=0.0)
            D = tl.load(afters + own + at, mask=mask, other=0.0)
            e = rows(E, here, t, rest, heads, first, V, BV)
            g = rows(dy, here, t, rest, heads, first, V, BV)
            if total is not None:
                g = g * below[:, None]
            from_state += product(g, S, TYPE, PRECISION)
            to_end += product(e, D, TYPE, PRECISION)
            if dv is not None:
                g = rows(dv, here, t, rest, heads, first, V, BV)
                asked += product(g, S, TYPE, PRECISION)
            if decay is not None:
                ends += tl.sum(S.to(tl.float32) * D.to(tl.float32))
        from_state *= unit
        if total is not None:
            at_z = place * K + column
            z = tl.load(z_states + at_z, mask=column < K, other=0.0)
            after = tl.load(z_afters + at_z, mask=column < K, other=0.0)
            from_state += dd[:, None] * z[None, :]
            to_end += after[None, :]
            ends += tl.sum(z * after)
        g_q = from_state * gamma[:, None]
        g_q += product(R, key, TYPE, PRECISION) * unit  # (c3)
        g_k = to_end * (last_row(G, C) * s)[:, None]
        # (c4), (d8)
        g_k += unit * product(tl.trans(R), query, TYPE, PRECISION)
        QK = product(query, tl.trans(key), TYPE, PRECISION)
        kept = tl.sum(to_end * key, 1)
        d_s += tl.sum(QK * YE * G, 0) + last_row(G, C) * kept
        if decay is not None:
            between += tl.where(strict, QK * YE, 0.0) * s[None, :]
            read += tl.sum(from_state * query, 1)
            written += kept * s
        if dv is not None:
            g_k -= product(N, key, TYPE, PRECISION)
            g_k -= product(tl.trans(N), key, TYPE, PRECISION)
            g_k -= asked * gamma[:, None]
            KK = product(key, tl.trans(key), TYPE, PRECISION)
            d_s -= tl.sum(KK * VE * L, 0)
            if decay is not None:
                between -= tl.where(strict, KK * VE, 0.0) * s[None, :]
                read -= tl.sum(asked * key, 1)
        if NU == 0:
            put_rows(dq, g_q, here, t, rest, heads, left_of, K, BK)
            put_rows(dk, g_k, here, t, rest, heads, left_of, K, BK)
        else:
            query_mean += tl.sum(g_q * query, 1)
            key_mean += tl.sum(g_k * key, 1)
            every = tl.where((column < K)[None, :], 1.0, 0.0)
            every = every + tl.zeros([C, BK], tl.float32)
            d_query += features_backward(
                g_q,
                q,
                here,
                t,
                rest,
                heads,
                left_of,
                K,
                BK,
                NU,
                BD,
                PRECISION,
            )
            d_key += features_backward(
                g_k,
                k,
                here,
                t,
                rest,
                heads,
                left_of,
                K,
                BK,
                NU,
                BD,
                PRECISION,
            )
            one_query += features_backward(
                every,
                q,
                here,
                t,
                rest,
                heads,
                left_of,
                K,
                BK,
                NU,
                BD,
                PRECISION,
            )
            one_key += features_backward(
                every,
                k,
                here,
                t,
                rest,
                heads,
                left_of,
                K,
                BK,
                NU,
                BD,
                PRECISION,
            )
    if NU > 0:
        # Eq. 29 divides by the sum, whose gradient is the mean.
        by = inverse_of(numbers(q_total, here, t, rest, heads, 0.0))
        g_q = (d_query - one_query * query_mean[:, None]) * by[:, None]
        put_rows(dq, g_q, here, t, rest, heads, 0, K // (2 * NU), BD)
        by = inverse_of(numbers(k_total, here, t, rest, heads, 0.0))
        g_k = (d_key - one_key * key_mean[:, None]) * by[:, None]
        put_rows(dk, g_k, here, t, rest, heads, 0, K // (2 * NU), BD)
    part = tl.program_id(1).to(tl.int64) * (
        programs // heads * time * heads
    )
    if dstrength is not None:
        put_numbers(dstrength + part, d_s, here, t, rest, heads)
    if decay is not None:
        # As `Decay.gradient`: readers i from t on, writers j before t.
        before = tl.maximum(t - 1, 0)
        before = numbers(decay, here, before, rest, heads, 1.0)
        before = tl.where(t == 0, 1.0, before)
        front = tl.cumprod(before, 0)
        later = t[:, None] > t[None, :] + 1
        one = tl.full([C, C], 1.0, tl.float32)
        H = tl.cumprod(tl.where(later, one * before[:, None], 1.0), 0)
        H = tl.where(strict, H, 0.0)
        d_d = tl.sum(G * read[:, None], 0) * front
        between = tl.dot(
            tl.trans(G), between, input_precision=PRECISION
        )
        d_d += tl.sum(between * H, 1)
        d_d += last_row(G, C) * (
            ends * front + tl.sum(H * written[None, :], 1)
        )
        put_numbers(ddecay + part, d_d, here, t, rest, heads)


class Form(NamedTuple):
    """How a problem is cut.

    - `C`: steps per chunk.
    - `BV`, `warps`: rows of W per program, and its warps, in the
      kernels that walk through time.
    - `BK`, `AV`, `more`: columns of q and k and of v per block, and
      warps, in the others.
    - `split`: outputs in a kernel of their own.
    """

    C: int
    BV: int
    warps: int
    BK: int
    AV: int
    more: int
    split: bool = False


#: Chosen by compiling them, so that the registers suffice where they
#: can: for wide heads in float32 they do not, as the table of
#: docs/results/kernels.json shows. Nothing is tried out at run time.
NARROW = Form(C=64, BV=32, warps=4, BK=64, AV=64, more=8)
HALF = Form(C=32, BV=32, warps=8, BK=32, AV=32, more=4)
WIDE = Form(C=16, BV=16, warps=8, BK=32, AV=32, more=4)
FULL = Form(C=16, BV=32, warps=8, BK=32, AV=32, more=4)
FULL_WIDE = Form(C=16, BV=16, warps=8, BK=32, AV=32, more=4)


def form(v: Tensor, K: int, fades: bool) -> Form:
    """The form for values `v` and features of width K.

    Short chunks where registers are few: with decays, with wide heads,
    in float32, and before Hopper.
    """
    batch, _, heads, V = v.shape
    narrow = max(K, V) <= 64 and not fades
    if v.dtype == torch.float32:
        found = FULL if K <= 128 else FULL_WIDE
    elif narrow and gpu.capability(v.device) >= (9, 0):
        found = NARROW
    else:
        found = HALF if K <= 128 else WIDE
    found = found._replace(
        BV=min(found.BV, power(V)),
        BK=min(found.BK, power(K)),
        AV=min(found.AV, power(V)),
    )
    # Rows of W do not touch each other: few heads share more programs.
    cores = gpu.multiprocessors(v.device)
    programs = batch * heads * chunks.count(V, found.BV)
    if found.BV > 16 and programs < cores:
        found = found._replace(BV=16)
        programs = batch * heads * chunks.count(V, 16)
    return found._replace(split=programs < cores // 2)


class Chunked(torch.autograd.Function):
    """All kernels of one recurrence, with gradients.

    `solve(q, k, decay, strength, form, nu)` gives the triangular
    inverses of a delta rule, and the sums of DPFP features; None = what
    is written are the values.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        strength: Tensor | None,
        W: Tensor,
        z: Tensor | None,
        solve: Callable | None,
        nu: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        given = (q, k, v, decay, strength, W, z)
        q, k, v, decay, strength, W, z = contiguous(*given)
        batch, time, heads, V = v.shape
        K = q.shape[-1] * (2 * nu or 1)
        plan = form(v, K, decay is not None)
        split = plan.split and z is None
        n, programs = chunks.count(time, plan.C), batch * heads
        X = q_total = k_total = None
        if solve is not None:
            X, q_total, k_total = solve(q, k, decay, strength, plan, nu)
        y, W_end = torch.empty_like(v), torch.empty_like(W)
        states = z_states = total = z_end = None
        if keep or split:
            states = v.new_empty(n * programs, V, K)
        E = v if X is None else None
        if X is not None and (keep or split):
            E = torch.empty_like(v)
        if z is not None:
            z_end, total = torch.empty_like(z), z.new_empty(v.shape[:3])
            if keep:
                z_states = z.new_empty(n * programs, K)
        sizes: dict[str, Any] = {"K": K, "V": V, "C": plan.C}
        sizes |= {"NU": nu, "PRECISION": precision(v.dtype)}
        gpu.launch(
            forward,
            (programs, chunks.count(V, plan.BV)),
            *(q, k, v, decay, strength, X, q_total, k_total, W, z),
            *(None if split else y, total, None if X is None else E),
            *(states, z_states, W_end, z_end, time, heads),
            BK=power(K),
            BV=plan.BV,
            warps=plan.warps,
            stages=2,
            **sizes,
        )
        if split:
            gpu.launch(
                read,
                (n * programs, chunks.count(V, plan.AV)),
                *(q, k, E, decay, strength, q_total, k_total, states),
                *(y, time, heads, programs),
                BK=power(K),
                BV=plan.AV,
                warps=plan.more,
                **sizes,
            )
        if keep:
            # v stands for E where they are the same.
            ctx.save_for_backward(
                *(q, k, E, decay, strength, W, z, y, total),
                *(states, z_states, q_total, k_total),
            )
        ctx.solve, ctx.nu, ctx.plan = solve, nu, plan
        ctx.set_materialize_grads(False)
        return y, W_end, z_end

    @staticmethod
    @autograd.backward_pass
    def backward(
        ctx: Any,
        dy: Tensor | None,
        dW_end: Tensor | None,
        dz_end: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        q, k, E, decay, strength, W, z, y, total, *kept = (
            ctx.saved_tensors
        )
        states, z_states, q_total, k_total = kept
        plan, nu = ctx.plan, ctx.nu
        batch, time, heads, V = E.shape
        K = W.shape[-1]
        n, programs = chunks.count(time, plan.C), batch * heads
        dy = torch.zeros_like(E) if dy is None else dy.contiguous()
        dW_end = torch.zeros_like(W) if dW_end is None else dW_end
        dW_end, dW = dW_end.contiguous(), torch.empty_like(W)
        dz = dtotal = z_afters = None
        if z is not None:
            dz_end = torch.zeros_like(z) if dz_end is None else dz_end
            dz_end, dz = dz_end.contiguous(), torch.empty_like(z)
            dtotal = torch.empty_like(total)
            z_afters = torch.empty_like(z_states)
        X = None
        if ctx.solve is not None:  # cheaper to repeat than to keep
            X, _, _ = ctx.solve(q, k, decay, strength, plan, nu)
        dv, afters = torch.empty_like(E), torch.empty_like(states)
        sizes: dict[str, Any] = {"K": K, "V": V, "C": plan.C}
        sizes |= {"NU": nu, "PRECISION": precision(E.dtype)}
        gpu.launch(
            backward_state,
            (programs, chunks.count(V, plan.BV)),
            *(q, k, dy, decay, strength, X, q_total, k_total, y, total),
            *(dW_end, dz_end, dv, afters, z_afters, dtotal, dW, dz),
            *(time, heads),
            BK=power(K),
            BV=plan.BV,
            AV=power(V),
            warps=plan.warps,
            stages=2,
            **sizes,
        )
        blocks = chunks.count(K, plan.BK)
        parts = 1 if nu else blocks
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        dd, ds = (
            None if x is None else x.new_empty(parts, *x.shape)
            for x in (decay, strength)
        )
        gpu.launch(
            backward_inputs,
            (n * programs, parts),
            *(q, k, E, dy, None if X is None else dv, decay, strength),
            *(q_total, k_total, total, dtotal, states, afters),
            *(z_states, z_afters, dq, dk, dd, ds),
            *(time, heads, programs),
            BK=plan.BK,
            BV=plan.AV,
            BD=power(q.shape[-1]),
            PER=blocks // parts,
            warps=plan.more,
            **sizes,
        )
        dd, ds = (x if x is None else x.sum(0) for x in (dd, ds))
        return dq, dk, dv, dd, ds, dW, dz, None, None, None


def additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    strength: Tensor | None,
    W: Tensor,
    z: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Arguments and results of the chunked version."""
    decay, strength = per_head(decay), per_head(strength)
    given = (*one_precision(q, k, v), decay, strength, W, z)
    keep = autograd.will_go_back(*given)
    y, W, z = Chunked.apply(*given, None, 0, keep)
    return (y, W) if z is None else (y, W, z)
