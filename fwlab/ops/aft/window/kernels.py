r"""# The windows of AFT-local and AFT-conv on a GPU

A program holds a tile of rows, and takes the keys of their window one
after the other, with a maximum for each row and channel. All older
steps are one more triple (k1), which the kernels of AFT-simple compute.
There is no matrix product: its rows would share a maximum, which could
be that of a future key.

AFT-full uses the same kernels, with all keys as its window. There is no
kernel for `causal=False` and images: the efficient version computes
them.
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
    combine,
    elements,
    load_triple,
    state_gradients,
    summary,
)

#: Rows per tile.
TILE = 16
#: Channels per program.
WIDE = 64


@triton.jit
def _bias(band, t, p, inside, W, reach):
    """What row t adds to key p: a bias, 0 for an older key, or -inf.

    `reach` is None for a window of W keys, of which p = t is the
    oldest; otherwise row t sees all keys up to t + reach, W of them in
    total.
    """
    if reach is None:
        column = t + W - 1 - p
        w = tl.load(
            band + column,
            mask=inside & (column >= 0) & (column < W),
            other=0.0,
        )
        w = tl.where(column < 0, float("-inf"), w)
    else:
        w = tl.load(band + p, mask=inside, other=0.0)
        w = tl.where(p > t + reach, float("-inf"), w)
    return tl.where(inside, w, float("-inf"))


@triton.jit(
    do_not_specialize=["time", "keys", "W", "reach", "D", "rows"]
)
def window_forward(
    q, k, v, band, top, s, a, y, L, m, time, keys, W, reach, D, rows,
    H: tl.constexpr, R: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Eq. 2 for a tile of rows and some channels of a group.

    Loads R + W keys and values, and q; stores y, L and m. The lower
    bound is the 2 (R + W) exponentials per row and channel: a
    multiprocessor computes about 16 per clock cycle.
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
    if reach is None:
        at = (batch * tl.num_programs(0) + n) * D + c
        m1, s1, a1 = load_triple(top, s, a, at, channel)
        M, S, A = combine(
            M, S, A, m1[None, :], s1[None, :], a1[None, :]
        )
        start, end = n * R, tl.minimum(n * R + R + W - 1, keys)
    else:
        start, end = 0, tl.minimum(keys, n * R + R + reach)
    for p in range(start, end):
        key = tl.load(k + p * D + c, mask=channel, other=float("-inf"))
        value = tl.load(v + p * D + c, mask=channel, other=0.0)
        x = _bias(band, t, p, t < time, W, reach)[:, None]
        x = x + key.to(tl.float32)[None, :]
        x, u, w = elements(
            x,
            tl.full(x.shape, 1.0, tl.float32),
            value.to(tl.float32)[None, :],
        )
        M, S, A = combine(M, S, A, x, u, w)
    empty = S == 0
    log_sum = tl.where(
        empty, float("-inf"), M + tl.log(tl.where(empty, 1.0, S))
    )
    mean = tl.where(empty, 0.0, A / tl.where(empty, 1.0, S))
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
        "reach",
        "D",
        "rows",
        "segments",
    ]
)
def window_backward_keys(
    k, v, band, L, dm, db, top, s, a, dk, dv,
    time, keys, W, reach, D, rows, segments,
    H: tl.constexpr, R: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """(e6) and (e7) for a tile of keys: sums over the rows that see it.

    Loads L, dm and db of R + W rows, k and v; stores dk and dv. R + W
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
    empty = key == float("-inf")
    value = tl.where(empty, 0.0, value)
    L += batch * (time + 1) * D
    dm += batch * (time + 1) * D
    db += batch * (time + 1) * D
    U = tl.zeros([R, BD], tl.float32)
    B = tl.zeros([R, BD], tl.float32)
    if reach is None:
        # Row `time` is the next state: it sees only older keys.
        start, end = (
            tl.maximum(n * R - W + 1, 0),
            tl.minimum(n * R + R, time + 1),
        )
    else:
        start, end = tl.maximum(n * R - reach, 0), time
    for t in range(start, end):
        norm = tl.load(L + t * D + c, mask=channel, other=float("-inf"))
        dm_t = tl.load(dm + t * D + c, mask=channel, other=0.0)
        db_t = tl.load(db + t * D + c, mask=channel, other=0.0)
        row = head * rows + tl.minimum(t, time - 1) % rows
        visible = p < tl.where(t < time, keys, time)
        x = _bias(band + row.to(tl.int64) * W, t, p, visible, W, reach)[
            :, None
        ]
        hidden = empty | (norm == float("-inf"))[None, :]
        x = tl.where(
            hidden,
            float("-inf"),
            x
            + key
            - tl.where(norm == float("-inf"), 0.0, norm)[None, :],
        )
        e = tl.exp(x)
        U += e * dm_t[None, :]
        B += e * db_t[None, :]
    if reach is None:
        at_n = (batch * segments + n) * D + c
        later = channel & (n < segments)
        m1, s1, a1 = load_triple(top, s, a, at_n, later)
        x = m1[None, :] + key
        e = tl.exp(
            tl.where(
                empty | (m1 == float("-inf"))[None, :], float("-inf"), x
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
        "reach",
        "D",
        "rows",
        "batch",
    ]
)
def window_backward_band(
    k, v, band, L, m, dm, dband, time, keys, W, reach, D, rows, batch,
    H: tl.constexpr, R: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """(e8): one column of the band for a tile of rows.

    Each program sums over the batch, in a fixed order. It loads k, v,
    L, m and dm once per column, mostly from the cache; W exponentials
    per row and channel.
    """
    n, column, head = (
        tl.program_id(0),
        tl.program_id(1),
        tl.program_id(2),
    )
    t = n * R + tl.arange(0, R)
    if reach is None:
        p = t + W - 1 - column
        visible = (t < time) & (p < keys)
    else:
        p = tl.full([R], 0, tl.int32) + column
        visible = (t < time) & (p <= t + reach)
    row = head * rows + tl.where(t < time, t, 0) % rows
    w = tl.load(
        band + row.to(tl.int64) * W + column, mask=visible, other=0.0
    )
    total = tl.zeros([R, BD], tl.float32)
    for b in range(batch):
        for block in range(tl.cdiv(D // H, BD)):
            inner = block * BD + tl.arange(0, BD)
            c, channel = head * (D // H) + inner, inner < D // H
            inside = visible[:, None] & channel[None, :]
            at = p[:, None] * D + c[None, :]
            origin = tl.cast(b, tl.int64) * keys * D
            key = tl.load(
                k + origin + at, mask=inside, other=float("-inf")
            )
            value = tl.load(v + origin + at, mask=inside, other=0.0)
            at = t[:, None] * D + c[None, :]
            origin = tl.cast(b, tl.int64) * (time + 1) * D
            norm = tl.load(
                L + origin + at, mask=inside, other=float("-inf")
            )
            mean = tl.load(m + origin + at, mask=inside, other=0.0)
            g = tl.load(dm + origin + at, mask=inside, other=0.0)
            key = key.to(tl.float32)
            empty = (key == float("-inf")) | (norm == float("-inf"))
            x = w[:, None] + key - tl.where(empty, 0.0, norm)
            e = tl.exp(tl.where(empty, float("-inf"), x))
            total += (
                e
                * g
                * (tl.where(empty, 0.0, value.to(tl.float32)) - mean)
            )
    out = (head * time + t).to(tl.int64) * W + column
    tl.store(dband + out, tl.sum(total, 1), mask=t < time)


class Window(torch.autograd.Function):
    """Eq. 2 over a window and all older steps (`reach` is None).

    Otherwise row t sees all keys up to t + `reach`.
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
        reach: int | None,
        keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Older steps come as triples, from `summary`."""
        q, k, v, band = (x.contiguous() for x in (q, k, v, band))
        (batch, time, D), keys = q.shape, k.shape[1]
        groups, rows, W = band.shape
        triples: list[Any] = [None] * 3
        end = log_sum, mean
        if reach is None:
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
            *(time, keys, W, reach, D, rows),
            H=groups,
            R=TILE,
            BD=BD,
            warps=4,
        )
        if keep:
            ctx.save_for_backward(q, k, v, band, log_sum, mean, L, m)
        ctx.reach = reach
        return y, end[0].clone(), end[1].clone()

    @staticmethod
    @autograd.backward_pass
    def backward(
        ctx: Any, dy: Tensor, dL: Tensor, dm_end: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of keys and values, then those of the band. Here
        the triples run backward, and sum up later rows.
        """
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
        if ctx.reach is None:
            after = summary(L, dm, db, time + 1, TILE, -1)
            zero = torch.zeros_like(mean)
            start = [torch.full_like(mean, -torch.inf), zero, zero]
            total = carried(after, start, True)
            dstate = state_gradients(total, log_sum, mean)
        else:
            dstate = dL, dm_end
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        BD = channels(D // groups, WIDE)
        blocks = groups * chunks.count(D // groups, BD)
        sizes = (time, keys, W, ctx.reach, D, rows)
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
    """Row $t$ sees past and present; called as the naive version."""
    given = (q, k, v, band, log_sum, mean)
    return Window.apply(*given, None, autograd.will_go_back(*given))
