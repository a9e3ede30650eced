r"""# Feedback memory on a GPU

A step is a chain of about ten small operations per layer, and each of them takes less
time than its launch. So the step is recorded once, as a *CUDA graph*, and replayed for
every step of the sequence, with one launch for the whole step. A replay repeats the
same operations on the same addresses. Therefore

1. all layers of a step work in buffers with fixed addresses, and what
   is needed later is copied to its index in time;
2. the current step is stored in a *clock* in HBM, which the graph itself
   advances. The kernels read the number of memories there.

The mathematics is the same as in the efficient version. Kernels replace some of its
products: of one query with all memories before it, forward and backward, and of one
memory with all queries after it. Tensor cores do not help with a single query; the
kernels multiply and add as they load.

**Forward.** The sum over memories is computed tile by tile, with a running maximum of
the scores, so that all scores are never needed at once. The kernel also stores

$$\mathrm{LSE}_t = \log \sum_{j \lt t} e^{a_{tj}} \tag{k1}$$

**Backward.** From this, each attention weight can be computed separately:

$$p_{tj} = e^{a_{tj} - \mathrm{LSE}_t}, \qquad
  da_{tj} = p_{tj}\,(dz_t \cdot v_j - D_t), \qquad
  D_t = dz_t \cdot z_t \tag{k2}$$

so nothing is kept per pair of steps. The gradient of a memory is summed over *all*
later steps when it is needed:

$$dv_j = \sum_{t \gt j} p_{tj}\, dz_t, \qquad
  dk_j = \sum_{t \gt j} da_{tj}\, q_t \tag{k3}$$

With $r_\delta = P s(\delta)$ of Eq. f4 the gradient of a query is

$$dq_t = \sum_{j \lt t} da_{tj}\, k_j + P\,du_t, \qquad
  P\,du_t = \sum_{j \lt t} da_{tj}\, r_{t-j} \tag{k4}$$

Bytes and operations below are those of one program, for $n$ memories (or queries) of
$K$ channels with $F$ waves, all in float32. The lower bounds are estimates for an H200.
There is at most one program per multiprocessor, and each gets about 40 GB/s from the
shared L2 cache: at $n = 512$ and $K = 64$ that takes 10 µs, and half of it on average
over a sequence. For less work, the lower bound is the start of a kernel in a graph,
about 2 µs.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fwlab.ops import _triton
from fwlab.ops._recurrence import Recurrence
from fwlab.ops.feedback import efficient
from fwlab.ops.feedback.efficient import Stack, Terms, finish, prepare, recompute, step

#: Minimum number of steps for which a CUDA graph saves time (an estimate).
PLAYED = 16
#: Number of scalars in a tile of keys; each thread has 16 of them in registers.
TILE = 4096

#: A finite number below every score, in place of -inf.
LOW = tl.constexpr(-1e38)

#: A lock, because PyTorch can record only one graph at a time.
_capture = threading.Lock()


@triton.jit(do_not_specialize=["N", "time", "past"])
def attend(
    q, k, v, r, hidden, z, lse, clock, N, time, past, K: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute one query's attention (Eqs. f4, f5) and log-sum-exp (Eq. k1) in one head.

    Each of the BN rows of a tile has its own maximum and sum, which are combined once,
    at the end.

    The kernel loads 4 n (3 K) bytes (k, v and r, of which r comes from the cache), and
    stores 4 (K + 1). Operations: 6 n K. Lower bound: the bytes, 0.3 n K ns.
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
        visible = j < n
        inside = visible[:, None] & channel[None, :]
        if hidden is not None:
            visible &= ~tl.load(hidden + row * past + j, mask=j < past, other=0)
        at = j[:, None] * K + c[None, :]
        key = tl.load(k + at, mask=inside, other=0.0)
        key += tl.load(r + at, mask=inside, other=0.0)
        value = tl.load(v + at, mask=inside, other=0.0)
        a = tl.where(visible, tl.sum(key * query[None, :], 1), LOW)
        new_top = tl.maximum(top, a)
        fade = tl.exp(top - new_top)
        p = tl.where(visible, tl.exp(a - new_top), 0.0)
        total = total * fade + p
        mean = mean * fade[:, None] + p[:, None] * value
        top = new_top
    maximum = tl.max(top, 0)
    fade = tl.exp(top - maximum)
    total = tl.sum(total * fade, 0)
    total = tl.where(total == 0, 1.0, total)  # A step may have no memories.
    mean = tl.sum(mean * fade[:, None], 0) / total
    tl.store(z + row * K + c, mean, mask=channel)
    tl.store(lse + row * time + t, maximum + tl.log(total))


@triton.jit(do_not_specialize=["N", "time", "past"])
def attend_backward(
    dz_now, z, q, lse, k, v, r, s, hidden, dz, D, d_qu, dq_now, clock,
    N, time, past, K: tl.constexpr, BK: tl.constexpr, F: tl.constexpr,
    BF: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one query in one head (Eqs. k2 and k4).

    It stores the two parts of dq separately, like the efficient version, and dz and D
    for `pull`.

    The kernel loads 4 n (3 K + F) bytes, and stores 4 (3 K + F + 1). Operations:
    n (9 K + 2 F). Lower bound: the bytes, 0.1 n (3 K + F) ns.
    """
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    t, n = tl.load(clock), tl.load(clock + 1).to(tl.int32)
    c, f, i = tl.arange(0, BK), tl.arange(0, BF), tl.arange(0, BN)
    channel, wave = c < K, f < F
    row_t = row * time + t
    query = tl.load(q + row_t * K + c, mask=channel, other=0.0)
    g = tl.load(dz_now + row * K + c, mask=channel, other=0.0)
    out = tl.load(z + (t * rows + row) * K + c, mask=channel, other=0.0)
    mean = tl.sum(g * out, 0)
    norm = tl.load(lse + row_t)
    tl.store(dz + row_t * K + c, g, mask=channel)
    tl.store(D + row_t, mean)
    k += row * N * K
    v += row * N * K
    r += (N - n) * K
    s += (N - n) * F
    by_key = tl.zeros([BN, BK], tl.float32)
    by_position = tl.zeros([BN, BK], tl.float32)
    du = tl.zeros([BN, BF], tl.float32)
    for start in range(0, n, BN):
        j = start + i
        visible = j < n
        inside = visible[:, None] & channel[None, :]
        waves = visible[:, None] & wave[None, :]
        if hidden is not None:
            visible &= ~tl.load(hidden + row * past + j, mask=j < past, other=0)
        at = j[:, None] * K + c[None, :]
        key = tl.load(k + at, mask=inside, other=0.0)
        position = tl.load(r + at, mask=inside, other=0.0)
        value = tl.load(v + at, mask=inside, other=0.0)
        a = tl.sum((key + position) * query[None, :], 1)
        p = tl.exp(tl.where(visible, a - norm, LOW))
        da = p * (tl.sum(value * g[None, :], 1) - mean)
        by_key += da[:, None] * key
        by_position += da[:, None] * position
        at = j[:, None] * F + f[None, :]
        sines = tl.load(s + at, mask=waves, other=0.0)
        du += da[:, None] * sines
    dq = tl.sum(by_key, 0)
    d_qu += (t * rows + row) * (K + F)
    tl.store(d_qu + c, dq, mask=channel)
    tl.store(d_qu + K + f, tl.sum(du, 0), mask=wave)
    dq += tl.sum(by_position, 0)
    tl.store(dq_now + row * K + c, dq, mask=channel)


@triton.jit(
    do_not_specialize=[
        "N", "time", "past", "batch", "heads", "layers", "groups"
    ]
)  # fmt: skip
def pull(
    q, dz, lse, D, kv, dkv, r, hidden, out, clock, N, time, past, batch, heads, layers,
    groups, K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one memory in one head and layer (Eqs. k2 and k3).

    This sums over all later queries, which are contiguous in time. With a clock, the
    memory is that of the clock's step; without a clock, each program has its own.

    The kernel loads 4 n (3 K + 2) bytes (q, dz and r, of which r comes from the cache),
    and stores 8 K. Operations: 9 n K. Lower bound: the bytes, 0.3 n K ns if there are
    at least as many multiprocessors as layers and heads. If q and dz of all do not fit
    into the cache, they come from HBM, 8 n K bytes per layer and head.
    """
    program = tl.program_id(0).to(tl.int64)
    rows = batch.to(tl.int64) * heads
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
    hidden_memory = False
    if hidden is not None:
        hidden_memory = tl.load(hidden + row * past + j, mask=j < past, other=0)
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
        position = tl.load(r + back, mask=inside, other=0.0)
        a = tl.sum(query * (key[None, :] + position), 1)
        norm = tl.load(lse + t, mask=later, other=0.0)
        if hidden is not None:
            later &= ~hidden_memory
        p = tl.exp(tl.where(later, a - norm, LOW))
        mean = tl.load(D + t, mask=later, other=0.0)
        da = p * (tl.sum(g * value[None, :], 1) - mean)
        dk += da[:, None] * query
        dv += p[:, None] * g
    owner = channel & (l < groups)  # The first layer of a group adds `dkv`.
    key = tl.load(dkv + pair, mask=owner, other=0.0) + tl.sum(dk, 0)
    value = tl.load(dkv + other + pair, mask=owner, other=0.0)
    value += tl.sum(dv, 0)
    out += ((m * batch + row // heads) * 2 * layers + l) * heads * K
    out += row % heads * K
    tl.store(out + c, key, mask=channel)
    values = layers.to(tl.int64) * heads * K
    tl.store(out + values + c, value, mask=channel)


@triton.jit(do_not_specialize=["width"])
def slope(dh, saved, clock, width, BW: tl.constexpr):
    """Multiply `dh` by the saved derivative of GELU; overwrite `dh` and `saved`.

    The kernel loads 8 bytes per scalar, and stores 8; one operation. Lower bound: the
    start of a kernel.
    """
    t = tl.load(clock)
    at = tl.program_id(0).to(tl.int64) * BW + tl.arange(0, BW)
    inside = at < width
    x = tl.load(dh + at, mask=inside, other=0.0)
    x *= tl.load(saved + t * width + at, mask=inside, other=0.0)
    tl.store(dh + at, x, mask=inside)
    tl.store(saved + t * width + at, x, mask=inside)


@triton.jit(do_not_specialize=["d", "l"])
def norm_backward(
    dy, y, rstd, base, alpha, dm, dx, saved, clock, d, l, BD: tl.constexpr,
):  # fmt: skip
    r"""Compute a sequence's gradient through a norm; add gradients that bypass it.

    $$dx = \mathrm{rstd}\,\big(dy - \overline{dy}
        - y\;\overline{y\,dy}\big) \tag{k5}$$

    with means over channels, and $y$ the output of the norm before its scale. `base` is
    the gradient that bypasses the norm; `alpha` and `dm` are the weights and the
    gradient of the memory, Eq. f1.

    The kernel loads at most 16 d bytes, and stores 8 d. Operations: 11 d. Lower bound:
    the start of a kernel.
    """
    row, t = tl.program_id(0).to(tl.int64), tl.load(clock)
    c = tl.arange(0, BD)
    inside = c < d
    at = row * d + c
    at_t = (t * tl.num_programs(0) + row) * d + c
    g = tl.load(dy + at, mask=inside, other=0.0)
    x = tl.load(y + at_t, mask=inside, other=0.0)
    mean, slant = tl.sum(g, 0) / d, tl.sum(g * x, 0) / d
    g = (g - mean - x * slant) * tl.load(rstd + t * tl.num_programs(0) + row)  # (k5)
    if base is not None:
        g += tl.load(base + at, mask=inside, other=0.0)
    if dm is not None:
        m = tl.load(dm + at, mask=inside, other=0.0)
        g += tl.load(alpha + l) * m
    tl.store(dx + at, g, mask=inside)
    tl.store(saved + at_t, g, mask=inside)


def _sizes(key: int, features: int = 1) -> dict[str, int]:
    """Return the tile sizes of the attention kernels, powers of two."""
    BK = max(triton.next_power_of_2(key), 16)
    BF = max(triton.next_power_of_2(features), 16)
    return {"K": key, "BK": BK, "BN": min(TILE // max(BK, BF), 128)}


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that records all CUDA graphs of a device.

    There is one stream per device, because cuBLAS never frees a stream's workspace.
    """
    return torch.cuda.Stream(device)


#: The last CUDA graph of each device; the next graph reuses its memory.
_last: dict[torch.device, torch.cuda.CUDAGraph] = {}


def play(step: Callable[[], None], times: int, like: Tensor) -> None:
    """Call a function `times` times, on a GPU by replaying a CUDA graph of it.

    Each call of the operation records a graph, which takes as long as a few of its
    many steps. A graph for several calls would need copies of the weights and of
    everything that the backward pass needs, and a second forward pass before the
    backward pass would overwrite them.

    If the caller is recording a graph, the steps become part of that graph.
    """
    with torch.cuda.device_of(like):
        if (
            like.device.type != "cuda"
            or times < PLAYED
            or torch.cuda.is_current_stream_capturing()
        ):
            for _ in range(times):
                step()
            return
        with _capture:
            current = torch.cuda.current_stream()
            side = _capture_stream(like.device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                # The first step compiles kernels and allocates workspaces, which is
                # not possible while a graph is recorded. Its results are used.
                step()
                graph = _recorded(step, like.device)
                # The graph is replayed on the stream that owns its memory.
                for _ in range(times - 1):
                    graph.replay()
            current.wait_stream(side)


def _recorded(step: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """Record a CUDA graph of `step` without computing the step.

    `torch.cuda.graph` would synchronise with the GPU and empty PyTorch's memory cache
    each time. All graphs of a device run one after another on one stream. So they share
    memory, which the last graph owns.
    """
    graph = torch.cuda.CUDAGraph()
    pool = _last[device].pool() if device in _last else None
    # In this mode, other threads may allocate memory during the capture.
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        step()
    finally:
        graph.capture_end()
    _last[device] = graph
    return graph


def _clock(t: int, n: int, like: Tensor) -> Tensor:
    """Allocate counters for the step and the memories on the device of `like`."""
    clock = like.new_full((2,), n, dtype=torch.int64)
    clock[:1].fill_(t)
    return clock


def forward(given: Any, keep: bool, normalize: bool) -> Any:
    """Compute all steps by replaying a CUDA graph of one step."""
    x = Stack(*given)
    (batch, time, d), (layers, heads, *_) = x.x.shape, x.to_q.shape
    turned, kv, r = prepare(x)
    *_, past, key = x.past.shape
    buffers = x.x.new_empty(2 * layers + 1, batch, d)
    attended, states = buffers[:layers], buffers[layers:]
    made = buffers if keep else buffers[-1:]
    saved = x.x.new_empty(len(made), time, batch, d)
    lse = x.x.new_empty(layers, batch * heads, time)
    steps = x.x.transpose(0, 1).contiguous()
    clock, N = _clock(0, past, x.x), past + time
    cache = kv.flatten(2, 3)

    def attend_now(l: int, q: Tensor, z: Tensor) -> None:
        """Launch the attention kernel for layer `l` of the current step."""
        K, V = cache[:, l % cache.shape[1]]
        _triton.launch(
            attend, (batch * heads,), q, K, V, r, x.hidden, z, lse[l], clock, N, time,
            past, warps=8, **_sizes(key),
        )  # fmt: skip

    def step_now() -> None:
        """Compute the current step, store its results, and advance the clock."""
        t, n = clock[:1], clock[1:]
        torch.index_select(steps, 0, t, out=states[:1])
        new = step(x, turned, states, attended, 0, normalize, attend_now)
        saved.index_copy_(1, t, made.unsqueeze(1))
        kv.index_copy_(4, n, new.unsqueeze(4))
        clock.add_(1)

    play(step_now, time, x.x)
    y = saved[-1].transpose(0, 1).contiguous()
    return (y, kv), ((saved[layers:], saved[:layers], lse) if keep else ())


class Loop(NamedTuple):
    """Hold the tensors that the steps of the backward pass share: see `backward`."""

    x: Stack
    b: Terms
    r: Tensor
    lse: Tensor
    D: Tensor
    clock: Tensor


def backward(
    given: Any, kept: Any, gradients: Any, needed: Any, normalize: bool
) -> Any:
    """Compute the gradients of all inputs by replaying a CUDA graph of one step."""
    x = Stack(*given)
    b = recompute(x, kept, gradients, normalize)
    layers, _, time, _ = b.vectors[0].shape
    lse, past = kept[2], x.past.shape[4]
    clock = _clock(time - 1, past + time - 1, lse)
    loop = Loop(x, b, b.waves @ x.positions.T, lse, torch.empty_like(lse), clock)

    def step_now() -> None:
        """Compute the gradients of a step's memory, then of its layers."""
        dm = memory(loop)
        up = b.dx[-1].index_select(0, clock[:1])[0] + x.alpha[-1] * dm
        for l in reversed(range(layers)):
            up = layer(loop, l, up, dm)
        clock.sub_(1)

    play(step_now, time, lse)
    b.dx[-1].addcmul_(x.alpha[-1], b.d_m)
    torch.addcmul(b.d_middle[0], x.alpha[0], b.d_m, out=b.dx[0])
    if past and needed[1]:
        pulled = pull_memories(loop, past, None)
        b.dkv[..., :past, :] = pulled.permute(2, 3, 1, 4, 0, 5)
    return finish(x, b)


def pull_memories(loop: Loop, count: int, clock: Tensor | None) -> Tensor:
    """Return the gradients of keys and values of the first `count` memories.

    With a clock, return the gradients of the memory of the clock's step instead.

    Returns `[count, batch, 2, groups, heads, key]`.
    """
    x, b, r, lse, D, _ = loop
    (layers, rows, time, key), (_, groups, batch, heads, N, _) = (
        b.vectors[0].shape,
        b.kv.shape,
    )
    out = lse.new_empty(count, batch, 2, layers, heads, key)
    _triton.launch(
        pull, (count * layers * rows,), *b.vectors, lse, D, b.kv, b.dkv, r, x.hidden,
        out, clock, N, time, N - time, batch, heads, layers, groups, warps=8,
        **_sizes(key),
    )  # fmt: skip
    return out if groups == layers else out.sum(3, keepdim=True)


def memory(loop: Loop) -> Tensor:
    """Compute and return the gradient of the memory $m_t$, through Eqs. f2 and f1."""
    x, b, clock = loop.x, loop.b, loop.clock
    new = pull_memories(loop, 1, clock)
    b.d_new.index_copy_(0, clock[:1], new)
    dm = torch.mm(new.view(new.shape[1], -1), x.to_kv)
    if b.of_m is None:
        b.d_m.index_copy_(0, clock[:1], dm.unsqueeze(0))
        return dm
    return norm_back(loop, dm, b.m, b.of_m[2], b.d_m)


def layer(loop: Loop, l: int, up: Tensor, dm: Tensor) -> Tensor:
    """Compute and return the gradient of the state $x_t^l$, through Eqs. f7 to f4."""
    x, b, r, lse, D, clock = loop
    dh = torch.mm(up, x.contract[l])
    _triton.launch(
        slope, (triton.cdiv(dh.numel(), 1024),), dh, b.dh[l], clock, dh.numel(),
        warps=4, BW=1024,
    )  # fmt: skip
    dn = torch.mm(dh, x.expand[l])
    below = norm_back(loop, dn, b.normed_mlp[l], b.of_middle[2][l], b.d_middle[l], up)
    dz = torch.mm(below, x.to_out[l])
    dq = torch.empty_like(dz)
    K, V = b.kv.flatten(2, 3)[:, l % b.kv.shape[1]]
    (rows, N, key), time, features = K.shape, lse.shape[2], x.positions.shape[1]
    _triton.launch(
        attend_backward, (rows,), dz, b.attended[l], b.vectors[0, l], lse[l], K, V, r,
        b.waves, x.hidden, b.vectors[1, l], D[l], b.d_qu[l], dq, clock, N, time,
        N - time, warps=8, F=features, BF=max(triton.next_power_of_2(features), 16),
        **_sizes(key, features),
    )  # fmt: skip
    if l == 0:  # No earlier step needs this gradient.
        return below
    dn = torch.mm(dq, x.to_q[l].flatten(0, 1))
    return norm_back(loop, dn, b.normed[l], b.of_x[2][l], b.dx[l], below, dm, l)


def norm_back(
    loop: Loop, dy: Tensor, y: Tensor, rstd: Tensor, saved: Tensor,
    base: Tensor | None = None, dm: Tensor | None = None, l: int = 0,
) -> Tensor:  # fmt: skip
    """Launch the kernel for the gradient through a norm (Eq. k5), for all sequences."""
    dx, (batch, d) = torch.empty_like(dy), dy.shape
    _triton.launch(
        norm_backward, (batch,), dy, y, rstd, base, None if dm is None else loop.x.alpha,
        dm, dx, saved, loop.clock, d, l, warps=8, BD=triton.next_power_of_2(d),
    )  # fmt: skip
    return dx


loops = Recurrence(
    "feedback_kernels",
    efficient.ARGUMENTS,
    "bool normalize",
    forward,
    backward,
    functools.partial(efficient.shapes, lse=True),
    reads=(1,),
)


def feedback(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the stack on a GPU, with the same interface as the naive version."""
    return efficient.feedback(*given, recurrence=loops)
