"""Kernels of the feedback memory against naive in float64."""

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import fuzz
import pytest
import torch
from alike import (
    call,
    error,
    feedback_weights,
    parts,
    problem,
    rebuild,
    saved_bytes,
    weighted,
)
from launches import recording
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fwlab import ops
from fwlab.ops import _triton
from fwlab.ops.feedback import kernels, naive

pytestmark = pytest.mark.slow
HEADS = 2
SIZES = "batch=2 heads=2 key=4 value=5 layers=2 window=3 dtype=float32"
#: Memories per layer, shared, and as they are.
KINDS = ("", "fewer=1", "edges=1")
kinds = pytest.mark.parametrize("kind", KINDS)


def drawn(kind="", time=5, **options):
    return problem(f"op=feedback time={time} state=1 {kind} {SIZES}", **options)


def outcome(p, state):
    """Outputs, states and gradients."""
    y, after = call(p, state=state, return_state=True, implementation="triton")
    leaves = [x for x in (*p.x.values(), *parts(state)) if x.requires_grad]
    gradients = torch.autograd.grad(weighted(y, *parts(after)), leaves)
    return [y, *parts(after), *gradients]


@pytest.fixture
def small(monkeypatch):
    """Blocks of 4 memories."""
    monkeypatch.setattr(kernels, "TILE", 64)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("time", [1, 6])
@pytest.mark.parametrize("more", ["state=0", "state=1", "mask=some cuts=1"])
@kinds
def test_agrees(kind, more, time, dtype, small):
    c = fuzz.parsed(f"op=feedback {kind} {SIZES} {more} implementation=triton")
    assert fuzz.check(c | {"time": time, "dtype": dtype}) is None


@pytest.mark.parametrize("sizes", ["heads=3 key=5", "heads=1 key=17", "heads=2 key=32"])
def test_widths(sizes, small):
    """Widths that fill no block, one head."""
    c = fuzz.parsed(f"op=feedback time=6 {SIZES} {sizes} implementation=triton")
    assert fuzz.check(c) is None


class Tape(TorchDispatchMode):
    """What a CUDA graph does: the same operations on the same memory.

    The first step is computed and written down; played, it is repeated
    to the letter, without a line of Python between the operations.
    """

    def __init__(self):
        super().__init__()
        self.played = []

    def __torch_dispatch__(self, function, types, args=(), options=None):
        # The one that brings a number to the host waits for the device.
        assert function is not torch.ops.aten._local_scalar_dense.default
        options = options or {}
        made = function(*args, **options)

        def again():
            results = tree_leaves(function(*args, **options))
            for old, new in zip(tree_leaves(made), results, strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.played.append(again)
        return made

    def launch(self, real, *arguments, **options):
        with _disable_current_modes():
            real(*arguments, **options)
        self.played.append(lambda: real(*arguments, **options))


@pytest.mark.parametrize("keep", [True, False])
@kinds
def test_a_step_can_be_played(kind, keep, monkeypatch, small):
    """Nothing in a step depends on Python's knowledge of the time."""
    p = drawn(kind)
    mask = torch.tensor([[True] * 3, [False, True, True]])
    state = ops.FeedbackState(*p.state, mask)

    def run():
        if not keep:
            with torch.no_grad():
                return call(p, state=state, implementation="triton")
        return outcome(p, state)

    wanted, loops, real = run(), [], _triton.launch

    def play(step, times, like):
        tape = Tape()
        with monkeypatch.context() as patch, tape:
            patch.setattr(_triton, "launch", partial(tape.launch, real))
            step()
        for _ in range(times - 1):
            for operation in tape.played:
                operation()
        loops.append(times)

    monkeypatch.setattr(kernels, "play", play)
    found = run()
    assert loops == ([5, 5] if keep else [5])
    assert all(map(torch.equal, found, wanted))


class Machine:
    """What `play` uses of `torch.cuda`, and what happens there.

    While a graph is recorded, what a step does is noted instead of done.
    """

    def __init__(self, monkeypatch, recording=False):
        self.done, self.noted, self.log = [], None, []
        machine = self

        class Graph:
            def capture_begin(self, pool, capture_error_mode):
                assert machine.noted is None
                machine.log.append(("begin", pool, machine.stream))
                machine.noted, self.memory = [], pool or object()

            def capture_end(self):
                self.noted, machine.noted = machine.noted, None
                machine.log.append("end")

            def replay(self):
                assert machine.stream == "side"
                machine.done += self.noted

            def pool(self):
                return self.memory

        class Stream:
            def wait_stream(self, other):
                machine.log.append("wait")

        @contextmanager
        def stream(other):
            machine.stream = "side"
            yield
            machine.stream = "current"

        self.stream = "current"
        for name, value in {
            "CUDAGraph": Graph,
            "current_stream": Stream,
            "device_of": lambda like: nullcontext(),
            "stream": stream,
            "is_current_stream_capturing": lambda: recording,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(kernels, "_capture_stream", lambda device: Stream())
        monkeypatch.setattr(kernels, "_last", {})

    def step(self):
        (self.done if self.noted is None else self.noted).append("step")


class Like(NamedTuple):
    device: torch.device


@pytest.mark.parametrize("times", [15, 16, 40])
def test_playing(times, monkeypatch):
    """As many steps as asked for; all graphs of a device share memory."""
    machine, like = Machine(monkeypatch), Like(torch.device("cuda"))
    for _ in range(3):
        kernels.play(machine.step, times, like)
    assert machine.done == 3 * times * ["step"]
    if times < kernels.PLAYED:
        assert machine.log == []
        return
    begun = [event for event in machine.log if event[0] == "begin"]
    assert machine.log == [x for b in begun for x in ("wait", b, "end", "wait")]
    assert begun[0] == ("begin", None, "side")
    assert begun[1] == begun[2] == ("begin", kernels._last[like.device].pool(), "side")


def test_playing_within_a_graph(monkeypatch):
    """Graphs cannot be nested: the steps become part of the outer one."""
    machine = Machine(monkeypatch, recording=True)
    kernels.play(machine.step, 40, Like(torch.device("cuda")))
    assert machine.done == 40 * ["step"] and machine.log == []


def test_playing_a_step_that_fails(monkeypatch):
    """The recording is ended, and the next call is as if it never was."""
    machine, like = Machine(monkeypatch), Like(torch.device("cuda"))

    def broken():
        machine.step()
        if machine.noted is not None:
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        kernels.play(broken, 40, like)
    assert machine.log[-1] == "end" and kernels._last == {}


def test_nothing_is_copied_from_or_to_the_host(monkeypatch):
    """A graph of the caller could not record it."""
    monkeypatch.setattr(torch, "tensor", None)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), options=None):
            made = function(*args, **(options or {}))
            for x in tree_leaves((args, options, made)):
                assert not isinstance(x, torch.Tensor) or x.is_meta, function
            return made

    p = drawn()
    p.x = {n: t.detach().to("meta").requires_grad_() for n, t in p.x.items()}
    with recording((9, 0)) as launches, Watch():
        call(p, implementation="triton").sum().backward()
    assert launches


def test_a_state_that_wants_no_gradient(small, monkeypatch):
    """Then the memories of earlier calls are left alone."""
    p = drawn(time=3)
    state = ops.FeedbackState(*p.state, None)
    wanted = outcome(p, state)
    counts, pull = [], kernels.pull_memories
    monkeypatch.setattr(
        kernels,
        "pull_memories",
        lambda loop, count, clock: [counts.append(count), pull(loop, count, clock)][1],
    )
    state = rebuild(state, lambda s: s.detach())
    found = outcome(p, state)
    assert counts == [1, 1, 1]
    assert all(map(torch.equal, found, wanted[:-2]))


def test_what_is_kept_grows_with_the_sequence():

    def kept(time):
        p = drawn(time=time)
        return saved_bytes(lambda: call(p, implementation="triton"))

    four, eight = kept(4), kept(8)
    assert kept(12) - eight == eight - four


@pytest.mark.parametrize("n", [0, 1, 4, 9, 11])
def test_one_query(n, small):
    """(k1), and Eq. f5. How many there are is read from the clock; the
    memories that are still to come hold NaN.
    """
    batch, N, key, past = 2, 11, 5, 6
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    q, positions = random(batch, HEADS, key), random(key, 4)
    k, v = (random(batch, HEADS, N, key) for _ in range(2))
    k[:, :, n:], v[:, :, n:] = torch.nan, torch.nan
    mask = torch.ones(batch, past, dtype=torch.bool)
    mask[0, ::2], mask[1] = False, False
    back = naive.sinusoids(torch.arange(N, 0, -1).double(), 4).float()
    z, lse = torch.full_like(q, torch.nan), torch.full((4, 7), torch.nan)
    _triton.launch(
        kernels.attend,
        (batch * HEADS,),
        q / key**0.5,
        k,
        v,
        back @ positions.T,
        (~mask).repeat_interleave(HEADS, 0),
        z,
        lse,
        torch.tensor([3, n]),
        N,
        7,
        past,
        warps=8,
        **kernels._sizes(key),
    )
    seen = mask[:, :n]
    wide = (q, k[:, :, :n].transpose(1, 2), v[:, :, :n].transpose(1, 2), positions)
    wanted = naive.feedback_attention(*(x.double() for x in wide), seen)
    assert torch.isfinite(z).all()
    assert error(z, wanted) < 1e-6
    assert lse[:, [0, 1, 2, 4, 5, 6]].isnan().all()
    a = torch.einsum("bhd,bhjd->bhj", q, k[:, :, :n] + (back[N - n :] @ positions.T))
    hidden = torch.nn.functional.pad(~seen, (0, n - seen.shape[1]))
    a = (a / key**0.5).masked_fill(hidden[:, None], -torch.inf).flatten(0, 1)
    some = torch.isfinite(a).any(1)
    assert torch.allclose(lse[some, 3], torch.logsumexp(a[some], 1), atol=1e-5)


def test_too_many_memories():
    p = drawn(time=2)
    p.x = {n: t.detach().to("meta") for n, t in p.x.items()}
    k, v = (torch.empty(2, 2**30, *t.shape[2:], device="meta") for t in p.state)
    state = ops.FeedbackState(k, v, None)
    with (
        recording((9, 0)),
        pytest.raises(ValueError, match="no kernel for 1073741826 memories"),
    ):
        call(p, state=state, implementation="triton")


def test_what_is_refused():
    with pytest.raises(ValueError, match="no kernel for float64"):
        call(drawn(dtype="float64"), implementation="triton")
    w = feedback_weights(
        torch.Generator().manual_seed(0),
        layers=1, d=257, d_ff=1, features=2, shared=True, normalize=True, heads=1,
    )  # fmt: skip
    tensors = [p.float() for p in w]
    with pytest.raises(ValueError, match="key up to 256, got 257"):
        ops.feedback(
            torch.zeros(1, 1, 257),
            ops.FeedbackWeights(*tensors),
            heads=1,
            implementation="triton",
        )
