r"""# The windows of AFT-local and AFT-conv on a GPU

A program holds a tile of rows, and takes one key of their window after
the other, with a maximum for each row and channel. All older steps are
one more triple (k1), made by the kernels of AFT-simple. There is no
matrix product: its rows would share a maximum, and a future key could
own it.

AFT-full uses the same kernels, with all keys as its window. What looks
ahead has no kernel, and is left to the efficient version: rows that see
the future, and images.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fwlab.ops import autograd, chunks, gpu
from fwlab.ops.aft.simple.kernels import (
    as_state,
    as_triple,
    carried,
    channels,
    elements,
    meet,
    state_gradients,
    summary,
    triple,
)

#: Rows per tile.
TILE = 16
#: Channels per program.
WIDE = 64


@triton.jit
def _bias(band, t, p, inside, W, last):
    """What row t adds to key p: a bias, 0 for an older key, or -inf.

    `last` is None for a window of W keys, of which p = t is the oldest;
    otherwise row t sees all keys up to t + last, W of them in total.
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
    exponentials per row and channel are the lower bound: about 16 per
    clock cycle and multiprocessor.
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
        m1, s1, a1 = triple(top, s, a, at, channel)
        M, S, A = meet(M, S, A, m1[None, :], s1[None, :], a1[None, :])
        begin, end = n * R, tl.minimum(n * R + R + W - 1, keys)
    else:
        begin, end = 0, tl.minimum(keys, n * R + R + last)
    for p in range(begin, end):
        key = tl.load(k + p * D + c, mask=channel, other=float("-inf"))
        value = tl.load(v + p * D + c, mask=channel, other=0.0)
        x = _bias(band, t, p, t < time, W, last)[:, None]
        x = x + key.to(tl.float32)[None, :]
        x, u, w = elements(
            x,
            tl.full(x.shape, 1.0, tl.float32),
            value.to(tl.float32)[None, :],
        )
        M, S, A = meet(M, S, A, x, u, w)
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
    """(e6) and (e7) for a tile of keys: sums over the rows that see it.

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
        # Row `time` is the next state: it sees older keys only.
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
        m1, s1, a1 = triple(top, s, a, at_n, later)
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

    Each program sums over the batch, in a fixed order. Reads k, v, L, m
    and dm once per column, mostly from the cache; W exponentials per
    row and channel.
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


class Window(torch.autograd.Function):
    """Eq. 2 over a window and all older steps (`last` is None), or over
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
            triples = summary(k, None, v, time, TILE, 1)
            end = as_state(*carried(triples, as_triple(*end), False))
        y, L, m = torch.empty_like(q, dtype=v.dtype), None, None
        if keep:
            L, m = (
                mean.new_empty(batch, time + 1, D) for _ in range(2)
            )
            L[:, time], m[:, time] = end
        BD = channels(D // groups, WIDE)
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
            after = summary(L, dm, db, time + 1, TILE, -1)
            none = torch.zeros_like(mean)
            empty = [torch.full_like(mean, -torch.inf), none, none]
            total = carried(after, empty, True)
            dstate = state_gradients(total, log_sum, mean)
        else:
            dstate = dL, dm_end
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        BD = channels(D // groups, WIDE)
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


def causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Tensor,
    log_sum: Tensor,
    mean: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Row $t$ sees past and present; called as the naive version is."""
    given = (q, k, v, band, log_sum, mean)
    return Window.apply(*given, None, autograd.will_go_back(*given))
