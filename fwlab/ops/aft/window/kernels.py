r"""# The windows of AFT-local and AFT-conv on a GPU

A program holds a tile of rows. The steps that are older than their window are one more
triple (k1), which the kernels of AFT-simple compute. The window itself is two matrix
products, of $e^w$ with $e^{K - c}$ and with $e^{K - c} V$ (e5). The maximum $c$ is one
of keys that all rows of the tile see, so that a key that a row does not see changes no
bit of its result.

A product is exact only as long as no factor is too large. Rows and channels for which
this fails process their keys one after another, with their own maximum; the rest of the
tile keeps the result of the products. In the backward pass, either a whole tile uses
products or none of it does. GPUs without tensor cores use no products.

AFT-full uses the same kernels, with all keys as its window. There is no kernel for
windows with `causal=False` and for images: the efficient version computes them.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fwlab.ops import _triton
from fwlab.ops._recurrence import Recurrence, Results, Tensors
from fwlab.ops.aft.simple.kernels import (
    as_state,
    as_triple,
    carried,
    channels,
    combine,
    elements,
    exp,
    load_triple,
    state_gradients,
    summary,
)
from fwlab.ops.triton_tiles import contiguous, count, precision

#: The number of rows per tile, and of keys per matrix product.
TILE, KEYS = 32, 32
#: The maximum number of channels per program.
WIDE = 64

#: The key of a step that no row sees.
LOW = tl.constexpr(float("-inf"))
#: Bounds for matrix products, far from the limits of float32: the maximum exponent of a
#: factor, and the maximum of a factor times a value. `MIN_SUM`, `MAX_SUM` bound sums.
MAX_EXPONENT, MAX_VALUE = tl.constexpr(27.0), tl.constexpr(1e20)
#: The number that replaces a sum that is out of bounds.
WRONG = tl.constexpr(-1.0)
MIN_SUM, MAX_SUM = tl.constexpr(1e-10), tl.constexpr(1e35)


@triton.jit
def _bias(band, t, p, inside, W, reach):
    """Return the bias of row t for key p: from `band`, 0 for an older key, or -inf.

    `reach` is None for a window of W keys, of which p = t is the oldest; otherwise row
    t sees all keys up to t + reach, W of them in total.
    """
    if reach is None:
        column = t + W - 1 - p
        w = tl.load(
            band + column, mask=inside & (column >= 0) & (column < W), other=0.0
        )
        w = tl.where(column < 0, LOW, w)
    else:
        w = tl.load(band + p, mask=inside, other=0.0)
        w = tl.where(p > t + reach, LOW, w)
    return tl.where(inside, w, LOW)


@triton.jit
def _biases(band, t, p, time, end, W, reach):
    """Return the biases of a tile of rows `t` and keys `p`, with one band per row."""
    inside = (t < time)[:, None] & (p < end)[None, :]
    return _bias(band[:, None], t[:, None], p[None, :], inside, W, reach)


@triton.jit
def _reach(W, reach):
    """Return the number of keys after key t that row t sees."""
    last = reach
    if reach is None:
        last = W - 1
    return last


@triton.jit
def _tile(x, first, end, c, channel, other, N: tl.constexpr, D: tl.constexpr):
    """Load a tile `[N, BD]` of `[steps, D]` from step `first` on, in float32.

    Only the offset of the first step needs 64 bits.
    """
    i = tl.arange(0, N)
    inside = (first + i < end)[:, None] & channel[None, :]
    x += tl.cast(first, tl.int64) * D
    at = i[:, None] * D + c[None, :]
    return tl.load(x + at, mask=inside, other=other).to(tl.float32)


@triton.jit
def _put_tile(x, value, first, end, c, channel, N: tl.constexpr, D: tl.constexpr):
    """Store a tile at the addresses that `_tile` loads."""
    i = tl.arange(0, N)
    inside = (first + i < end)[:, None] & channel[None, :]
    x += tl.cast(first, tl.int64) * D
    at = i[:, None] * D + c[None, :]
    tl.store(x + at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _at(x, t, c, channel, other, D: tl.constexpr):
    """Load step t of `[steps, D]`, in float32."""
    x += tl.cast(t, tl.int64) * D
    return tl.load(x + c, mask=channel, other=other).to(tl.float32)


@triton.jit
def _any(x):
    """Return True in all threads if any entry of a tile is true."""
    return tl.max(tl.max(x.to(tl.int32), 1), 0) > 0


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    """Multiply matrices, accumulating in float32."""
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _one_by_one(
    k, v, band, M, S, A, t, c, channel, start, end, time, W, reach, D: tl.constexpr,
):  # fmt: skip
    """Add keys one at a time to the running maxima and sums (Eq. k1) of a tile's rows.

    Each row and channel has its own maximum, so the result is always exact.
    """
    for p in range(start, end):
        key = _at(k, p, c, channel, LOW, D)
        value = _at(v, p, c, channel, 0.0, D)
        x = _bias(band, t, p, t < time, W, reach)[:, None]
        x, u, w = elements(
            x + key[None, :], tl.full(M.shape, 1.0, tl.float32), value[None, :]
        )
        M, S, A = combine(M, S, A, x, u, w)
    return M, S, A


@triton.jit
def _factor(x):
    """Return e^x for a matrix product, or infinity if x is above `MAX_EXPONENT`.

    A sum with an infinite factor becomes infinite or NaN, which marks it as wrong.
    """
    return exp(tl.where(x > MAX_EXPONENT, float("inf"), x))


@triton.jit
def _by_products(
    k, v, band, m0, S, A, first, t, c, channel, start, end, time,
    W, reach, D: tl.constexpr, P: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add all keys by products of $e^w$ and $e^{K - c}$ (Eq. e5); mark inexact rows.

    Here c is the maximum of the first P keys and the older steps.

    All rows see c and the keys of the first loop. The second loop omits keys whose
    factor or value is too large, and marks the rows that see them as wrong. For all
    other rows, these keys are exactly 0, so they change no bit of the result.
    """
    seen = tl.minimum(end, first + 1 + _reach(W, reach))
    key = _tile(k, start, seen, c, channel, LOW, P, D)
    top = tl.maximum(m0, tl.max(key, 0))
    base = tl.where(top > LOW, top, 0.0)
    fade = exp(m0 - base)[None, :]
    S, A = S * fade, A * fade
    border = start + (seen - start) // P * P
    for p0 in range(start, border, P):
        p = p0 + tl.arange(0, P)
        x = _tile(k, p0, end, c, channel, 0.0, P, D) - base[None, :]
        value = _tile(v, p0, end, c, channel, 0.0, P, D)
        X = _factor(x)
        XV = X * tl.where(x > LOW, value, 0.0)
        E = _factor(_biases(band, t, p, time, end, W, reach))
        S += _dot(E, X, PRECISION)
        A += _dot(E, XV, PRECISION)
    wrong = tl.zeros(S.shape, tl.float32)
    for p0 in range(border, end, P):
        p = p0 + tl.arange(0, P)
        x = _tile(k, p0, end, c, channel, LOW, P, D)
        x -= base[None, :]
        value = _tile(v, p0, end, c, channel, 0.0, P, D)
        X = _factor(x)
        XV = X * tl.where(x > LOW, value, 0.0)
        fits = (x <= MAX_EXPONENT) & (tl.abs(XV) <= MAX_VALUE)
        X, XV = tl.where(fits, X, 0.0), tl.where(fits, XV, 0.0)
        w = _biases(band, t, p, time, end, W, reach)
        E = _factor(w)
        S += _dot(E, X, PRECISION)
        A += _dot(E, XV, PRECISION)
        sees = tl.where(w > LOW, 1.0, 0.0).to(tl.float16)
        wrong += tl.dot(sees, tl.where(fits, 0.0, 1.0).to(tl.float16))
    # Comparisons with NaN are False.
    fine = (S >= MIN_SUM) & (S <= MAX_SUM) & (tl.abs(A) <= MAX_SUM)
    S = tl.where(fine & (wrong == 0), S, WRONG)
    inside = (t < time)[:, None] & channel[None, :]
    return base[None, :], tl.where(inside, S, 0.0), A


@triton.jit(do_not_specialize=["time", "keys", "W", "reach", "rows"])
def window_forward(
    q, k, v, band, top, s, a, y, L, m, time, keys, W, reach, rows, D: tl.constexpr,
    H: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, P: tl.constexpr,
    PRODUCTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs (Eq. 2) of a tile of rows, for some channels of a group.

    The kernel loads R + W keys and values, and q; it stores y, L and m. Products need
    (R + W) (1 + R / BD) exponentials per channel, and single keys need R (R + W), at
    about 16 per clock cycle and multiprocessor, which is the lower bound of their time.
    """
    n, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(D // H, BD)
    head, block = tl.program_id(2) // blocks, tl.program_id(2) % blocks
    inner = block * BD + tl.arange(0, BD)
    c, channel = head * (D // H) + inner, inner < D // H
    first = n * R
    t = first + tl.arange(0, R)
    q += batch * time * D
    k += batch * keys * D
    v += batch * keys * D
    row = tl.where(t < time, t, 0) % rows
    band += (head * rows + row).to(tl.int64) * W
    m0 = tl.full([BD], LOW, tl.float32)
    s0, a0 = tl.zeros([BD], tl.float32), tl.zeros([BD], tl.float32)
    if reach is None:
        at = (batch * tl.num_programs(0) + n) * D + c
        m0, s0, a0 = load_triple(top, s, a, at, channel)
        start, end = first, tl.minimum(first + R + W - 1, keys)
    else:
        start, end = 0, tl.minimum(keys, first + R + reach)
    zero = tl.zeros([R, BD], tl.float32)
    M, S, A = zero + m0[None, :], zero + s0[None, :], zero + a0[None, :]
    base, total, sums = tl.zeros([1, BD], tl.float32), zero + WRONG, zero
    if PRODUCTS:
        base, total, sums = _by_products(
            k, v, band, m0, S, A, first, t, c, channel, start, end,
            time, W, reach, D, P, PRECISION,
        )  # fmt: skip
    wrong = total == WRONG
    if _any(wrong):
        M, S, A = _one_by_one(
            k, v, band, M, S, A, t, c, channel, start, end, time,
            W, reach, D,
        )  # fmt: skip
    M, S = tl.where(wrong, M, base), tl.where(wrong, S, total)
    A = tl.where(wrong, A, sums)
    empty = S == 0
    whole = tl.where(empty, 1.0, S)
    mean = tl.where(empty, 0.0, A / whole)
    gate = tl.sigmoid(_tile(q, first, time, c, channel, 0.0, R, D))
    y += batch * time * D
    _put_tile(y, gate * mean, first, time, c, channel, R, D)
    if L is not None:
        log_sum = tl.where(empty, LOW, M + tl.log(whole))
        origin = batch * (time + 1) * D
        _put_tile(L + origin, log_sum, first, time, c, channel, R, D)
        _put_tile(m + origin, mean, first, time, c, channel, R, D)


@triton.jit(do_not_specialize=["size", "extra"])
def rows_backward(q, dy, m, dm, db, dq, size, extra, B: tl.constexpr):
    """Compute the gradients of the means, of the log sums, and of q.

    A sequence has `size` scalars; m, dm and db have `extra` more for the next state.
    The kernel loads q, dy and m, and stores dm, db and dq: 12 + 3 b bytes per scalar.
    Lower bound: the bytes over the bandwidth.
    """
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    inside, here = at < size, batch * size + at
    there = batch * (size + extra) + at
    query = tl.load(q + here, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + here, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(m + there, mask=inside, other=0.0)
    gate = tl.sigmoid(query)
    g *= gate
    tl.store(dm + there, g, mask=inside)
    tl.store(db + there, -g * mean, mask=inside)
    d = g * mean * (1 - gate)
    tl.store(dq + here, d.to(dq.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["time", "keys", "W", "reach", "rows", "segments"])
def window_backward_keys(
    k, v, band, L, dm, db, top, s, a, dk, dv, time, keys, W, reach, rows, segments,
    D: tl.constexpr, H: tl.constexpr, R: tl.constexpr, BD: tl.constexpr,
    P: tl.constexpr, PRODUCTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a tile of keys and of their values (Eqs. e6 and e7).

    The kernel sums over the rows that see a key. It loads L, dm and db of R + W rows, k
    and v, and stores dk and dv. Products need (R + W) (1 + R / BD) exponentials per
    channel, and single rows need R (R + W), each at most 1.
    """
    n, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.cdiv(D // H, BD)
    head, block = tl.program_id(2) // blocks, tl.program_id(2) % blocks
    inner = block * BD + tl.arange(0, BD)
    c, channel = head * (D // H) + inner, inner < D // H
    first = n * R
    p = first + tl.arange(0, R)
    k += batch * keys * D
    v += batch * keys * D
    key = _tile(k, first, keys, c, channel, LOW, R, D)
    value = _tile(v, first, keys, c, channel, 0.0, R, D)
    empty = key == LOW
    value = tl.where(empty, 0.0, value)
    L += batch * (time + 1) * D
    dm += batch * (time + 1) * D
    db += batch * (time + 1) * D
    band += (head * rows).to(tl.int64) * W
    U = tl.zeros([R, BD], tl.float32)
    B = tl.zeros([R, BD], tl.float32)
    if reach is None:
        # Row `time` is the next state: it sees only older keys.
        start, end = tl.maximum(n * R - W + 1, 0), tl.minimum(n * R + R, time + 1)
    else:
        start, end = tl.maximum(n * R - reach, 0), time
    alone = True
    if PRODUCTS:
        # Exponents are relative to the maximum of the keys.
        high = tl.max(key, 0)
        base = tl.where(high > LOW, high, 0.0)[None, :]
        for t0 in range(start, end, P):
            t = t0 + tl.arange(0, P)
            norm = _tile(L, t0, end, c, channel, LOW, P, D)
            G = _factor(tl.where(norm > LOW, base - norm, LOW))
            row = tl.minimum(t, time - 1) % rows
            visible = (t < end)[None, :] & (
                p[:, None] < tl.where(t < time, keys, time)[None, :]
            )
            w = _bias(
                band + row.to(tl.int64)[None, :] * W, t[None, :],
                p[:, None], visible, W, reach,
            )  # fmt: skip
            dm_t = _tile(dm, t0, end, c, channel, 0.0, P, D)
            db_t = _tile(db, t0, end, c, channel, 0.0, P, D)
            E = _factor(w)
            U += _dot(E, G * dm_t, PRECISION)
            B += _dot(E, G * db_t, PRECISION)
        U, B = U * exp(key - base), B * exp(key - base)
        fine = (tl.abs(U) <= MAX_SUM) & (tl.abs(B) <= MAX_SUM)
        alone = _any(~fine)
    if alone:
        U = tl.zeros([R, BD], tl.float32)
        B = tl.zeros([R, BD], tl.float32)
        for t in range(start, end):
            norm = _at(L, t, c, channel, LOW, D)
            dm_t = _at(dm, t, c, channel, 0.0, D)
            db_t = _at(db, t, c, channel, 0.0, D)
            row = tl.minimum(t, time - 1) % rows
            visible = p < tl.where(t < time, keys, time)
            biases = band + tl.cast(row, tl.int64) * W
            x = _bias(biases, t, p, visible, W, reach)[:, None]
            hidden = empty | (norm == LOW)[None, :]
            norm = tl.where(norm == LOW, 0.0, norm)
            x = tl.where(hidden, LOW, x + key - norm[None, :])
            e = exp(x)
            U += e * dm_t[None, :]
            B += e * db_t[None, :]
    if reach is None:
        at = (batch * segments + n) * D + c
        later = channel & (n < segments)
        m1, s1, a1 = load_triple(top, s, a, at, later)
        x = m1[None, :] + key
        e = exp(tl.where(empty | (m1 == LOW)[None, :], LOW, x))
        U += e * s1[None, :]
        B += e * a1[None, :]
    origin = batch * keys * D
    _put_tile(dv + origin, U, first, keys, c, channel, R, D)
    _put_tile(dk + origin, value * U + B, first, keys, c, channel, R, D)


@triton.jit
def _rows(
    L, m, dm, first, time, head, block, R: tl.constexpr,
    BD: tl.constexpr, D: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Return a block's channels and their mask, and L, m and dm of the tile's rows."""
    inner = block * BD + tl.arange(0, BD)
    c, channel = head * (D // H) + inner, inner < D // H
    norm = _tile(L, first, time, c, channel, LOW, R, D)
    mean = _tile(m, first, time, c, channel, 0.0, R, D)
    g = _tile(dm, first, time, c, channel, 0.0, R, D)
    return c, channel, norm, mean, g


@triton.jit(do_not_specialize=["time", "keys", "W", "reach", "rows", "batch", "across"])
def window_backward_band(
    k, v, band, L, m, dm, dband, time, keys, W, reach, rows, batch, across,
    D: tl.constexpr, H: tl.constexpr, R: tl.constexpr, BD: tl.constexpr,
    P: tl.constexpr, PRODUCTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the bias gradients (Eq. e8) for a tile of rows and P keys.

    Each program sums over the batch and the channels, in a fixed order. It loads k, v,
    L, m and dm of its rows and keys once. `across` programs share a tile of rows.
    """
    n, head = tl.program_id(0) // across, tl.program_id(1)
    first = n * R
    t = first + tl.arange(0, R)
    p0 = tl.program_id(0) % across * P
    if reach is None:
        p0 += n * R
    p = p0 + tl.arange(0, P)
    row = (head * rows + tl.where(t < time, t, 0) % rows).to(tl.int64)
    band += row * W
    w = _biases(band, t, p, time, keys, W, reach)
    total = tl.zeros([R, P], tl.float32)
    sequences = tl.where(_any(w > LOW), batch, 0)
    alone = True
    if PRODUCTS:
        for b in range(sequences):
            there = tl.cast(b, tl.int64) * (time + 1) * D
            here = tl.cast(b, tl.int64) * keys * D
            for block in range(tl.cdiv(D // H, BD)):
                c, channel, norm, mean, G = _rows(
                    L + there, m + there, dm + there, first, time,
                    head, block, R, BD, D, H,
                )  # fmt: skip
                key = _tile(k + here, p0, keys, c, channel, LOW, P, D)
                value = _tile(v + here, p0, keys, c, channel, 0.0, P, D)
                value = tl.where(key > LOW, value, 0.0)
                top = tl.max(key, 0)
                base = tl.where(top > LOW, top, 0.0)[None, :]
                X = exp(key - base)
                norm = tl.where(norm > LOW, base - norm, LOW)
                G *= _factor(norm)
                total += _dot(G, tl.trans(X * value), PRECISION)
                total -= _dot(G * mean, tl.trans(X), PRECISION)
        total *= _factor(w)
        alone = _any(~(tl.abs(total) <= MAX_SUM))
    if alone:
        total = tl.zeros([R, P], tl.float32)
        for b in range(sequences):
            there = tl.cast(b, tl.int64) * (time + 1) * D
            here = tl.cast(b, tl.int64) * keys * D
            for block in range(tl.cdiv(D // H, BD)):
                c, channel, norm, mean, g = _rows(
                    L + there, m + there, dm + there, first, time,
                    head, block, R, BD, D, H,
                )  # fmt: skip
                for j in range(P):
                    inside = channel & (p0 + j < keys)
                    key = _at(k + here, p0 + j, c, inside, LOW, D)
                    value = _at(v + here, p0 + j, c, inside, 0.0, D)
                    key, value = key[None, :], value[None, :]
                    empty = (key == LOW) | (norm == LOW)
                    seen = (t < time) & (p0 + j < keys)
                    x = _bias(band, t, p0 + j, seen, W, reach)[:, None]
                    x += key - tl.where(empty, 0.0, norm)
                    e = exp(tl.where(empty, LOW, x))
                    e *= g * (tl.where(empty, 0.0, value) - mean)
                    total += tl.where(
                        (tl.arange(0, P) == j)[None, :], tl.sum(e, 1)[:, None], 0.0
                    )
    column = tl.zeros([R, P], tl.int32) + p[None, :]
    if reach is None:
        column = t[:, None] + W - 1 - p[None, :]
    out = (head.to(tl.int64) * time + t)[:, None] * W + column
    inside = (t < time)[:, None] & (column >= 0) & (column < W)
    tl.store(dband + out, total, mask=inside)


def _how(q: Tensor, k: Tensor, v: Tensor, band: Tensor) -> tuple[int, dict[str, Any]]:
    """Return the number of channel blocks, and the constants of the three kernels."""
    groups, D = len(band), q.shape[-1]
    BD = max(channels(D // groups, WIDE), 16)  # A matrix product needs 16 columns.
    either = torch.promote_types(k.dtype, v.dtype)
    products = _triton.capability(q.device) >= _triton.TENSOR_CORES
    return groups * count(D // groups, BD), {
        "D": D,
        "H": groups,
        "R": TILE,
        "BD": BD,
        "P": KEYS,
        "PRODUCTS": products,
        "PRECISION": precision(either),
        "warps": 4,
    }


def window_mean(x: Tensors, keep: bool, reach: int | None) -> Results:
    """Launch the forward kernels; return the outputs (Eq. 2) and the final state.

    `summary` combines all steps that are older than the window into triples.

    - `x`: q, k, v, band, log_sum and mean.
    - `reach`: row t sees all keys up to t + `reach`; None = a window.
    """
    q, k, v, band, log_sum, mean = contiguous(*x)
    (batch, time, D), keys = q.shape, k.shape[1]
    rows, W = band.shape[1:]
    triples: list[Any] = [None] * 3
    end = log_sum.clone(), mean.clone()
    if reach is None:
        triples = summary(k, None, v, time, TILE, 1)
        end = as_state(*carried(triples, as_triple(log_sum, mean), False))
    y, kept = torch.empty_like(q, dtype=v.dtype), []
    if keep:
        kept = [mean.new_empty(batch, time + 1, D) for _ in end]
        for rows_and_end, last in zip(kept, end, strict=True):
            rows_and_end[:, time] = last
    blocks, how = _how(q, k, v, band)
    _triton.launch(
        window_forward,
        (count(time, TILE), batch, blocks),
        *(q, k, v, band, *triples, y, *(kept or [None] * 2)),
        *(time, keys, W, reach, rows),
        **how,
    )
    return [y, *end], kept


def window_mean_backward(
    x: Tensors,
    kept: Tensors,
    gradients: Tensors,
    needed: Sequence[bool],
    reach: int | None,
) -> Tensors:
    """Launch the backward kernels; return the gradients of the inputs `x`.

    Here `summary` runs backward: its triples combine all later rows.
    """
    q, k, v, band, log_sum, mean = contiguous(*x)
    L, m = contiguous(*kept)
    (batch, time, D), keys = q.shape, k.shape[1]
    dy, dL, dm_end = (
        torch.zeros_like(part) if dx is None else dx
        for part, dx in zip(
            (v[:, :time], log_sum, mean), contiguous(*gradients), strict=True
        )
    )
    groups, rows, W = band.shape
    dm, db = torch.empty_like(m), torch.empty_like(m)
    dq = torch.empty_like(q)
    _triton.launch(
        rows_backward,
        (count(time * D, 1024), batch),
        *(q, dy, m, dm, db, dq, time * D, D),
        B=1024,
        warps=4,
    )
    dm[:, time] = dm_end
    db[:, time] = dL - m[:, time] * dm_end
    after: list[Any] = [None] * 3
    dstate = dL, dm_end
    if reach is None:
        after = summary(L, dm, db, time + 1, TILE, -1)
        zero = torch.zeros_like(mean)
        start = [torch.full_like(mean, -torch.inf), zero, zero]
        dstate = state_gradients(carried(after, start, True), log_sum, mean)
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    blocks, how = _how(q, k, v, band)
    sizes = (time, keys, W, reach, rows)
    _triton.launch(
        window_backward_keys,
        (count(keys, TILE), batch, blocks),
        *(k, v, band, L, dm, db, *after, dk, dv, *sizes),
        count(time + 1, TILE),
        **how,
    )
    dband = band.new_empty(groups, time, W)
    span = keys if reach is not None else TILE + W - 1
    across = count(span, KEYS)
    _triton.launch(
        window_backward_band,
        (count(time, TILE) * across, groups),
        *(k, v, band, L, m, dm, dband, *sizes, batch, across),
        **how,
    )
    if rows == 1:
        dband = dband.sum(1, keepdim=True)
    return dq, dk, dv, dband, *dstate


window = Recurrence(
    "aft_window_kernels",
    "Tensor q, Tensor k, Tensor v, Tensor band, Tensor log_sum, Tensor mean",
    "SymInt? reach",
    window_mean,
    window_mean_backward,
    window_mean,
)


def causal(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, log_sum: Tensor, mean: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute causal AFT-local or AFT-conv; return outputs and the final state."""
    return tuple(window((q, k, v, band, log_sum, mean), None))
