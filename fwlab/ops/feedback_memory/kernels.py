r"""# Feedback memory on a GPU

A step is a chain of some ten small operations per layer, and each of
them takes less time than its launch. So the step is written down once,
as a *CUDA graph*, and played once for every step of the sequence, with
one launch for all of it. A graph repeats itself to the letter: the same
operations on the same addresses. That is why

1. all layers of a step work in buffers that stay where they are; what
   has to be kept is copied from there to its place in time;
2. nothing in it knows the step but a *clock* in the memory of the GPU,
   which it moves on itself. The kernels ask the clock how many memories
   there are.

The mathematics are those of the efficient form, with kernels in place
of some products: for one query over all memories before it, forward and
backward, and for one memory over all queries after it. With one query
there is nothing for tensor cores; they multiply and add as they read.

**Forward.** A sum over memories in blocks, with the running maximum of
the scores beside it, never needs all scores at once. What it leaves
behind is

$$\mathrm{LSE}_t = \log \sum_{j \lt t} e^{a_{tj}} \tag{k1}$$

**Backward.** From it, any weight comes back without its neighbours:

$$p_{tj} = e^{a_{tj} - \mathrm{LSE}_t}, \qquad
  da_{tj} = p_{tj}\,(dz_t \cdot v_j - D_t), \qquad
  D_t = dz_t \cdot z_t \tag{k2}$$

so nothing is kept per pair of steps, and what a memory receives is
pulled together from *all* later steps in the moment it is needed:

$$dv_j = \sum_{t \gt j} p_{tj}\, dz_t, \qquad
  dk_j = \sum_{t \gt j} da_{tj}\, q_t \tag{k3}$$

With $r_\delta = P s(\delta)$ of Eq. f4 the gradient of a query is

$$dq_t = \sum_{j \lt t} da_{tj}\, k_j + P\,du_t, \qquad
  P\,du_t = \sum_{j \lt t} da_{tj}\, r_{t-j} \tag{k4}$$

Bytes and operations below are those of one program, for $n$ memories
(or queries) of $K$ channels with $F$ waves, all in float32. Floors are
estimates for an H200. There is one program per multiprocessor or less,
and each of those gets some 40 GB/s from the cache that they share: at
$n = 512$ and $K = 64$ that is 10 µs, and half of it on average over a
sequence. Where the work is less, the floor is the start of a kernel in
a graph, some 2 µs.
"""

import functools
import threading
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fwlab.ops import gpu
from fwlab.ops.feedback_memory import efficient
from fwlab.ops.feedback_memory.weights import FeedbackWeights

#: Fewer steps are not worth a graph of their own (an estimate).
PLAYED = 16
#: Numbers of a block of keys: 16 in the registers of each thread.
TILE = 4096

#: Below every score, and still a number.
LOW = tl.constexpr(-1e38)

#: PyTorch makes one graph at a time.
_capture = threading.Lock()


@triton.jit(do_not_specialize=["N", "time", "past"])
def attend(
    q,
    k,
    v,
    r,
    hidden,
    z,
    lse,
    clock,
    N,
    time,
    past,
    K: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
):
    """Eqs. f4, f5 and (k1): one query of one head, all its memories.

    Each of the BN places of a block has a maximum and a sum of its own:
    they meet once, at the end.

    Reads 4 n (3 K) bytes (k, v and r, the last from the cache), writes
    4 (K + 1). Operations: 6 n K. Floor: that of the bytes, 0.3 n K ns.
    """
    row = tl.program_id(0).to(tl.int64)
    t, n = tl.load(clock), tl.load(clock + 1).to(tl.int32)
    c, i = tl.arange(0, BK), tl.arange(0, BN)
    channel = c < K
    query = tl.load(q + row * K + c, mask=channel, other=0.0)
    k += row * N * K
    v += row * N * K
    r += (N - n) * K
    top = tl.full([BN], LOW, tl.float32)
    total = tl.zeros([BN], tl.float32)
    mean = tl.zeros([BN, BK], tl.float32)
    for start in range(0, n, BN):
        j = start + i
        seen = j < n
        inside = seen[:, None] & channel[None, :]
        if hidden is not None:
            seen &= ~tl.load(
                hidden + row * past + j, mask=j < past, other=0
            )
        at = j[:, None] * K + c[None, :]
        key = tl.load(k + at, mask=inside, other=0.0)
        key += tl.load(r + at, mask=inside, other=0.0)
        value = tl.load(v + at, mask=inside, other=0.0)
        a = tl.where(seen, tl.sum(key * query[None, :], 1), LOW)
        higher = tl.maximum(top, a)
        fade = tl.exp(top - higher)
        p = tl.where(seen, tl.exp(a - higher), 0.0)
        total = total * fade + p
        mean = mean * fade[:, None] + p[:, None] * value
        top = higher
    highest = tl.max(top, 0)
    fade = tl.exp(top - highest)
    total = tl.sum(total * fade, 0)
    total = tl.where(total == 0, 1.0, total)  # nothing to attend to
    mean = tl.sum(mean * fade[:, None], 0) / total
    tl.store(z + row * K + c, mean, mask=channel)
    tl.store(lse + row * time + t, highest + tl.log(total))


@triton.jit(do_not_specialize=["N", "time", "past"])
def attend_backward(
    dz_now,
    z,
    q,
    lse,
    k,
    v,
    r,
    s,
    hidden,
    dz,
    D,
    d_qu,
    dq_now,
    clock,
    N,
    time,
    past,
    K: tl.constexpr,
    BK: tl.constexpr,
    F: tl.constexpr,
    BF: tl.constexpr,
    BN: tl.constexpr,
):
    """(k2) and (k4): the gradient of one query of one head.

    The two parts of dq are kept apart, as the efficient form does, and
    dz and D where the memories will look for them.

    Reads 4 n (3 K + F) bytes, writes 4 (3 K + F + 1). Operations:
    n (9 K + 2 F). Floor: that of the bytes, 0.1 n (3 K + F) ns.
    """
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    t, n = tl.load(clock), tl.load(clock + 1).to(tl.int32)
    c, f, i = tl.arange(0, BK), tl.arange(0, BF), tl.arange(0, BN)
    channel, wave = c < K, f < F
    here = row * time + t
    query = tl.load(q + here * K + c, mask=channel, other=0.0)
    g = tl.load(dz_now + row * K + c, mask=channel, other=0.0)
    out = tl.load(z + (t * rows + row) * K + c, mask=channel, other=0.0)
    mean = tl.sum(g * out, 0)
    norm = tl.load(lse + here)
    tl.store(dz + here * K + c, g, mask=channel)
    tl.store(D + here, mean)
    k += row * N * K
    v += row * N * K
    r += (N - n) * K
    s += (N - n) * F
    by_key = tl.zeros([BN, BK], tl.float32)
    by_place = tl.zeros([BN, BK], tl.float32)
    du = tl.zeros([BN, BF], tl.float32)
    for start in range(0, n, BN):
        j = start + i
        seen = j < n
        inside = seen[:, None] & channel[None, :]
        waves = seen[:, None] & wave[None, :]
        if hidden is not None:
            seen &= ~tl.load(
                hidden + row * past + j, mask=j < past, other=0
            )
        at = j[:, None] * K + c[None, :]
        key = tl.load(k + at, mask=inside, other=0.0)
        place = tl.load(r + at, mask=inside, other=0.0)
        value = tl.load(v + at, mask=inside, other=0.0)
        a = tl.sum((key + place) * query[None, :], 1)
        p = tl.exp(tl.where(seen, a - norm, LOW))
        da = p * (tl.sum(value * g[None, :], 1) - mean)
        by_key += da[:, None] * key
        by_place += da[:, None] * place
        at = j[:, None] * F + f[None, :]
        sines = tl.load(s + at, mask=waves, other=0.0)
        du += da[:, None] * sines
    dq = tl.sum(by_key, 0)
    d_qu += (t * rows + row) * (K + F)
    tl.store(d_qu + c, dq, mask=channel)
    tl.store(d_qu + K + f, tl.sum(du, 0), mask=wave)
    dq += tl.sum(by_place, 0)
    tl.store(dq_now + row * K + c, dq, mask=channel)


@triton.jit(
    do_not_specialize=[
        "N", "time", "past", "batch", "heads", "layers", "groups"
    ]
)  # fmt: skip
def pull(
    q,
    dz,
    lse,
    D,
    kv,
    dkv,
    r,
    hidden,
    out,
    clock,
    N,
    time,
    past,
    batch,
    heads,
    layers,
    groups,
    K: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
):
    """(k2) and (k3): what one memory receives in one head and layer.

    From all queries after it, which lie side by side in time. The
    memory is that of the clock, or without one that of the program.

    Reads 4 n (3 K + 2) bytes (q, dz and r, the last from the cache),
    writes 8 K. Operations: 9 n K. Floor: that of the bytes, 0.3 n K ns
    for as many layers and heads as there are multiprocessors. The q and
    dz of all together may not fit into the cache; then they come from
    the memory, 8 n K bytes of each layer and head.
    """
    program, rows = tl.program_id(0).to(tl.int64), batch * heads
    row, l = program % rows, program // rows % layers
    m = program // (rows * layers)
    j = m
    if clock is not None:
        j = tl.load(clock + 1)
    c, i = tl.arange(0, BK), tl.arange(0, BN)
    channel = c < K
    pair = ((l % groups * rows + row) * N + j) * K + c
    other = groups * rows * N * K
    key = tl.load(kv + pair, mask=channel, other=0.0)
    value = tl.load(kv + other + pair, mask=channel, other=0.0)
    unseen = False
    if hidden is not None:
        unseen = tl.load(
            hidden + row * past + j, mask=j < past, other=0
        )
    q += (l * rows + row) * time * K
    dz += (l * rows + row) * time * K
    lse += (l * rows + row) * time
    D += (l * rows + row) * time
    dk = tl.zeros([BN, BK], tl.float32)
    dv = tl.zeros([BN, BK], tl.float32)
    first = tl.maximum(j + 1 - past, 0).to(tl.int32)
    r += (time + j) * K
    for start in range(first, time, BN):
        t = start + i
        later = t < time
        inside = later[:, None] & channel[None, :]
        at = t[:, None] * K + c[None, :]
        query = tl.load(q + at, mask=inside, other=0.0)
        g = tl.load(dz + at, mask=inside, other=0.0)
        back = -t[:, None] * K + c[None, :]
        place = tl.load(r + back, mask=inside, other=0.0)
        a = tl.sum(query * (key[None, :] + place), 1)
        norm = tl.load(lse + t, mask=later, other=0.0)
        if hidden is not None:
            later &= ~unseen
        p = tl.exp(tl.where(later, a - norm, LOW))
        mean = tl.load(D + t, mask=later, other=0.0)
        da = p * (tl.sum(g * value[None, :], 1) - mean)
        dk += da[:, None] * query
        dv += p[:, None] * g
    own = channel & (l < groups)  # the first of its group
    key = tl.load(dkv + pair, mask=own, other=0.0) + tl.sum(dk, 0)
    value = tl.load(dkv + other + pair, mask=own, other=0.0)
    value += tl.sum(dv, 0)
    out += ((m * batch + row // heads) * 2 * layers + l) * heads * K
    out += row % heads * K
    tl.store(out + c, key, mask=channel)
    tl.store(out + layers * heads * K + c, value, mask=channel)


@triton.jit(do_not_specialize=["width"])
def slope(dh, kept, clock, width, BW: tl.constexpr):
    """Through the GELU: dh times its slope, which the product replaces.

    Reads 8 bytes per number, writes 8; one operation. Floor: the start
    of a kernel.
    """
    t = tl.load(clock)
    at = tl.program_id(0).to(tl.int64) * BW + tl.arange(0, BW)
    inside = at < width
    x = tl.load(dh + at, mask=inside, other=0.0)
    x *= tl.load(kept + t * width + at, mask=inside, other=0.0)
    tl.store(dh + at, x, mask=inside)
    tl.store(kept + t * width + at, x, mask=inside)


@triton.jit(do_not_specialize=["d", "l"])
def norm_backward(
    dy,
    y,
    rstd,
    base,
    alpha,
    dm,
    dx,
    kept,
    clock,
    d,
    l,
    BD: tl.constexpr,
):
    r"""Through a norm, for one sequence; what else arrives is added.

    $$dx = \mathrm{rstd}\,\big(dy - \overline{dy}
        - y\;\overline{y\,dy}\big) \tag{k5}$$

    with means over channels and $y$ as the norm gave it, without a
    scale. `base` goes past the norm; `alpha` and `dm` are those of the
    memory, Eq. f1.

    Reads at most 16 d bytes, writes 8 d. Operations: 11 d. Floor: the
    start of a kernel.
    """
    row, t = tl.program_id(0).to(tl.int64), tl.load(clock)
    c = tl.arange(0, BD)
    inside = c < d
    here = row * d + c
    then = (t * tl.num_programs(0) + row) * d + c
    g = tl.load(dy + here, mask=inside, other=0.0)
    x = tl.load(y + then, mask=inside, other=0.0)
    mean, slant = tl.sum(g, 0) / d, tl.sum(g * x, 0) / d
    g = (g - mean - x * slant) * tl.load(
        rstd + t * tl.num_programs(0) + row
    )  # (k5)
    if base is not None:
        g += tl.load(base + here, mask=inside, other=0.0)
    if dm is not None:
        m = tl.load(dm + here, mask=inside, other=0.0)
        g += tl.load(alpha + l) * m
    tl.store(dx + here, g, mask=inside)
    tl.store(kept + then, g, mask=inside)


def _sizes(key: int, features: int = 1) -> dict[str, int]:
    """Widths of blocks, of powers of two."""
    BK = max(triton.next_power_of_2(key), 16)
    BF = max(triton.next_power_of_2(features), 16)
    return {"K": key, "BK": BK, "BN": min(TILE // max(BK, BF), 128)}


@functools.cache
def _side(device: torch.device) -> torch.cuda.Stream:
    """The stream on which graphs of a device are made.

    One for all of them: cuBLAS keeps a workspace per stream forever.
    """
    return torch.cuda.Stream(device)


def play(step: Callable[[], None], times: int, like: Tensor) -> None:
    """Call `step` so many times, on a GPU by playing a graph of it.

    The graph is made anew in each call of the operation. Making it
    costs a few steps, out of many, and one wait for the GPU. Kept for
    later calls it would have to own copies of the weights and of all
    that the backward pass needs, and two forward passes before one
    backward would fight for them.
    """
    if like.device.type != "cuda" or times < PLAYED:
        with torch.cuda.device_of(like):
            for _ in range(times):
                step()
        return
    with torch.cuda.device_of(like), _capture:
        here, side = torch.cuda.current_stream(), _side(like.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            # The first step compiles kernels and makes workspaces,
            # which a graph must not. What it computes counts.
            step()
            graph = torch.cuda.CUDAGraph()
            # Other threads may go on to allocate memory meanwhile.
            with torch.cuda.graph(
                graph, stream=side, capture_error_mode="thread_local"
            ):
                step()
            # On the stream to which the memory of the graph belongs.
            for _ in range(times - 1):
                graph.replay()
        here.wait_stream(side)


class Forward(efficient.Forward):
    """The step of the efficient form, on buffers that stay."""

    def run(self) -> Tensor:
        (batch, time, d), layers = self.x.shape, self.layers
        now = self.x.new_empty(2 * layers + 1, 1, batch, d)
        self.attended, self.states = now[:layers], now[layers:]
        made = now if self.keep else now[-1:]
        kept = self.x.new_empty(len(made), time, batch, d)
        self.lse = self.x.new_empty(layers, self.kv.shape[2], time)
        steps = self.x.transpose(0, 1).contiguous()
        self.clock = torch.tensor(
            [0, self.past], device=self.x.device
        )  # step and number of memories

        def step() -> None:
            t, n = self.clock[:1], self.clock[1:]
            torch.index_select(steps, 0, t, out=self.states[0])
            new = self.step(0)
            kept.index_copy_(1, t, made)
            self.kv_split.index_copy_(4, n, new.unsqueeze(4))
            self.clock.add_(1)

        play(step, time, self.x)
        self.attended, self.states = kept[:layers], kept[layers:]
        return kept[-1].transpose(0, 1).contiguous()

    def attend(self, l: int, q: Tensor, z: Tensor) -> None:
        K, V = self.kv[:, self.group_of[l]]
        rows, N, key = K.shape
        assert self.lse is not None
        gpu.launch(
            attend,
            (rows,),
            q,
            K,
            V,
            self.r,
            self.hidden,
            z,
            self.lse[l],
            self.clock,
            N,
            self.x.shape[1],
            self.past,
            warps=8,
            **_sizes(key),
        )


class Backward(efficient.Backward):
    """The same for the way back, with (k3) in place of blocks."""

    def loop(self) -> None:
        layers, time = self.attended.shape[:2]
        rows, N = self.kv.shape[2:4]
        self.r = self.back @ self.positions.T  # Eq. f4
        self.D = self.kv.new_empty(layers, rows, time)
        self.clock = torch.tensor(
            [time - 1, N - 1], device=self.kv.device
        )
        dy = self.dx[-1]

        def step() -> None:
            t = self.clock[:1]
            dm = self.memory_now()
            up = dy.index_select(0, t)[0] + self.alpha[-1] * dm
            for l in reversed(range(layers)):
                up = self.layer_now(l, up, dm)
            self.clock.sub_(1)

        play(step, time, self.kv)
        self.dx[-1].addcmul_(self.alpha[-1], self.d_m)
        torch.addcmul(
            self.d_middle[0], self.alpha[0], self.d_m, out=self.dx[0]
        )
        if self.past and self.to_past:
            pulled = self.pull(self.past, None)
            self.dkv_split[..., : self.past, :] = pulled.permute(
                2, 3, 1, 4, 0, 5
            )

    def pull(self, count: int, clock: Tensor | None) -> Tensor:
        """Gradients of keys and values of so many memories.

        Returns `[count, batch, 2, groups, heads, key]`.
        """
        layers, rows, time, key = self.q.shape
        groups, _, N, _ = self.kv.shape[1:]
        batch, heads = self.split
        out = self.q.new_empty(count, batch, 2, layers, heads, key)
        gpu.launch(
            pull,
            (count * layers * rows,),
            self.q,
            self.dz,
            self.lse,
            self.D,
            self.kv,
            self.dkv,
            self.r,
            self.hidden,
            out,
            clock,
            N,
            time,
            self.past,
            batch,
            heads,
            layers,
            groups,
            warps=8,
            **_sizes(key),
        )
        return out if groups == layers else out.sum(3, keepdim=True)

    def memory_now(self) -> Tensor:
        """Through Eqs. f2 and f1; returns the gradient of $m_t$."""
        t, new = self.clock[:1], self.pull(1, self.clock)
        self.d_new.index_copy_(0, t, new)
        dm = torch.mm(new.view(self.split[0], -1), self.to_kv)
        if self.m_norm is None:
            self.d_m.index_copy_(0, t, dm.unsqueeze(0))
            return dm
        return self.norm(dm, self.m, self.m_norm[2], self.d_m)

    def layer_now(self, l: int, up: Tensor, dm: Tensor) -> Tensor:
        """Through Eqs. f7 to f4; returns the gradient of $x_t^l$."""
        dh = torch.mm(up, self.contract[l])
        gpu.launch(
            slope,
            (triton.cdiv(dh.numel(), 1024),),
            dh,
            self.dh[l],
            self.clock,
            dh.numel(),
            warps=4,
            BW=1024,
        )
        below = self.norm(
            torch.mm(dh, self.expand[l]),
            self.normed_mlp[l],
            self.middle_norm[2][l],
            self.d_middle[l],
            up,
        )
        dz = torch.mm(below, self.to_out[l])
        dq = torch.empty_like(dz)
        K, V = self.kv[:, self.group_of[l]]
        rows, N, key = K.shape
        features = self.back.shape[1]
        sizes = _sizes(key, features)
        gpu.launch(
            attend_backward,
            (rows,),
            dz,
            self.attended[l],
            self.q[l],
            self.lse[l],
            K,
            V,
            self.r,
            self.back,
            self.hidden,
            self.dz[l],
            self.D[l],
            self.d_qu[l],
            dq,
            self.clock,
            N,
            self.q.shape[2],
            self.past,
            warps=8,
            F=features,
            BF=max(triton.next_power_of_2(features), 16),
            **sizes,
        )
        if l == 0:  # nothing waits for it
            return below
        dn = torch.mm(dq, self.to_q[l].flatten(0, 1))
        return self.norm(
            dn,
            self.normed[l],
            self.x_norm[2][l],
            self.dx[l],
            below,
            dm,
            l,
        )

    def norm(
        self,
        dy: Tensor,
        y: Tensor,
        rstd: Tensor,
        kept: Tensor,
        base: Tensor | None = None,
        dm: Tensor | None = None,
        l: int = 0,
    ) -> Tensor:
        """(k5) for all sequences."""
        dx = torch.empty_like(dy)
        batch, d = dy.shape
        gpu.launch(
            norm_backward,
            (batch,),
            dy,
            y,
            rstd,
            base,
            None if dm is None else self.alpha,
            dm,
            dx,
            kept,
            self.clock,
            d,
            l,
            warps=8,
            BD=triton.next_power_of_2(d),
        )
        return dx


def feedback(
    x: Tensor,
    weights: FeedbackWeights,
    heads: int,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments and results of the naive version."""
    return efficient.feedback(
        x, weights, heads, k, v, mask, (Forward, Backward)
    )
