"""Kernels of the feedback memory against naive in float64."""

from contextlib import contextmanager, nullcontext
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fwlab import ops
from fwlab.ops.call import launcher
from fwlab.ops.feedback import kernels, naive
from problems import ROWS as ALL
from problems import error, outcome, parts, problem, rebuild, saved_bytes, weighted
from problems.feedback import HEADS, feedback, weights
from problems.row import Row

pytestmark = pytest.mark.slow
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3}
ROWS = {name: row for name, row in ALL.items() if name.startswith("feedback")}
dtypes = pytest.mark.parametrize("dtype", LIMITS)
rows = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


@pytest.fixture
def small(monkeypatch):
    """Blocks of 4 memories."""
    monkeypatch.setattr(kernels, "TILE", 64)


def exactly(x):
    return x.detach().double().requires_grad_()


def agrees(row: Row, time: int, dtype: torch.dtype, with_state: bool = True) -> None:
    """Outputs, final state and all gradients, that of the state too."""
    inputs, state = problem(row, time, dtype=dtype, with_state=with_state)
    found = outcome(row, inputs, state, "triton")
    wanted = outcome(row, [*map(exactly, inputs)], rebuild(state, exactly), "naive")
    assert found[0].dtype == dtype
    assert all(x.dtype == torch.float32 for x in found[1:3])
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b) < LIMITS[dtype]


@rows
@dtypes
def test_with_a_state(row, dtype, small):
    agrees(row, 6, dtype)


@rows
def test_from_nothing(row):
    agrees(row, 4, torch.float32, with_state=False)


def test_a_single_step():
    """With a memory in sight: without, some gradients do not exist."""
    agrees(ROWS["feedback"], 1, torch.float32)
    x = torch.ones(1, 1, 6)
    w = weights(
        torch.Generator().manual_seed(0),
        layers=1, d=6, d_ff=5, features=4, shared=True, normalize=True,
    )  # fmt: skip
    tensors = [p.float().requires_grad_() for p in w]
    y = feedback(x, *tensors, implementation="triton")
    wanted = feedback(x.double(), *w, implementation="naive")
    assert error(y, wanted) < 1e-6
    gradients = torch.autograd.grad(weighted(y), tensors)
    assert all(torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize(
    "heads, key, features, layers, shared",
    [(3, 5, 40, 1, False), (1, 17, 2, 3, True), (2, 32, 32, 1, True)],
)
def test_widths(heads, key, features, layers, shared, small):
    """More waves than channels, widths that fill no block, one head."""

    def make(time, generator, with_state):
        d = heads * key
        w = weights(
            generator,
            layers=layers,
            d=d,
            d_ff=d + 3,
            features=features,
            shared=shared,
            normalize=True,
            heads=heads,
        )
        x = torch.randn(2, time, d, generator=generator, dtype=torch.float64)
        return [x, *w], None

    agrees(Row(partial(feedback, heads=heads), make, None), 6, torch.float32)


@rows
def test_masks_and_two_pieces(row, small):
    """Ragged, cut in two, with a state of which some is hidden."""
    (x, *tensors), state = problem(row, 10, dtype=torch.float32)
    keep = torch.rand(2, 10, generator=torch.Generator().manual_seed(3)) < 0.6
    keep[1, :5] = False
    state = state._replace(mask=torch.tensor([[False, True, True], [False] * 3]))

    def run(implementation, x, tensors, state):
        dirty, pieces = torch.where(keep[..., None], x, torch.nan), []
        for cut in (slice(0, 5), slice(5, 10)):
            y, state = row(
                dirty[:, cut],
                *tensors,
                state=state,
                return_state=True,
                key_mask=keep[:, cut],
                implementation=implementation,
            )
            pieces.append(y)
        y = torch.cat(pieces, 1)
        real = state.mask[..., None, None, None]
        held = [torch.where(real, part, 0) for part in parts(state)]
        return [y, *held]

    leaves = [x, *tensors, *parts(state)]
    found = run("triton", x, tensors, state)
    found += torch.autograd.grad(weighted(*found), leaves)
    exact, exact_state = [*map(exactly, [x, *tensors])], rebuild(state, lambda s: s)
    exact_state = exact_state._replace(k=exactly(state.k), v=exactly(state.v))
    wanted = run("naive", exact[0], exact[1:], exact_state)
    wanted += torch.autograd.grad(weighted(*wanted), [*exact, *parts(exact_state)])
    assert not found[0][~keep].any()
    hidden = ~state.mask
    for gradient in found[-2:]:
        assert not gradient[hidden].any()
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b) < 1e-5


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
@rows
def test_a_step_can_be_played(row, keep, monkeypatch, small):
    """Nothing in a step depends on Python's knowledge of the time."""
    (x, *tensors), state = problem(row, 5, dtype=torch.float32)
    state = state._replace(mask=torch.tensor([[True] * 3, [False, True, True]]))

    def run():
        if not keep:
            with torch.no_grad():
                return row(x, *tensors, state=state, implementation="triton")
        return outcome(row, [x, *tensors], state, "triton")

    wanted, loops, real = run(), [], launcher.launch

    def play(step, times, like):
        tape = Tape()
        with monkeypatch.context() as patch, tape:
            patch.setattr(launcher, "launch", partial(tape.launch, real))
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

    (x, *tensors), _ = problem(ROWS["feedback"], 5, torch.float32, with_state=False)
    x, *tensors = (t.detach().to("meta").requires_grad_() for t in (x, *tensors))
    with launcher.recording((9, 0)) as launches, Watch():
        ROWS["feedback"](x, *tensors, implementation="triton").sum().backward()
    assert launches


def test_whole_and_pieces(small):
    row = ROWS["feedback"]
    (x, *tensors), _ = problem(row, 8, dtype=torch.float32, with_state=False)
    wanted = row(exactly(x), *map(exactly, tensors), implementation="naive")
    first, state = row(x[:, :3], *tensors, return_state=True, implementation="triton")
    rest = row(x[:, 3:], *tensors, state=state, implementation="triton")
    assert error(torch.cat([first, rest], 1), wanted) < 1e-6


def test_other_calls_in_between():
    """Nothing is shared between calls, and nothing saved is changed."""
    row = ROWS["feedback-shared"]
    (x, *tensors), _ = problem(row, 4, dtype=torch.float32)
    (other, *_), _ = problem(row, 4, dtype=torch.float32, seed=7)
    run = partial(row, implementation="triton")
    alone = run(x, *tensors)
    wanted = torch.autograd.grad(weighted(alone), [x, *tensors])
    y = run(x, *tensors)
    weighted(run(other, *tensors)).backward()
    with torch.no_grad():
        assert torch.equal(run(x, *tensors), y)
    for _ in range(2):
        found = torch.autograd.grad(weighted(y), [x, *tensors], retain_graph=True)
        assert all(map(torch.equal, found, wanted))


def test_a_state_that_wants_no_gradient(small, monkeypatch):
    """Then the memories of earlier calls are left alone."""
    inputs, state = problem(ROWS["feedback"], 3, dtype=torch.float32)
    wanted = outcome(ROWS["feedback"], inputs, state, "triton")
    counts, pull = [], kernels.Backward.pull
    monkeypatch.setattr(
        kernels.Backward,
        "pull",
        lambda self, count, clock: [counts.append(count), pull(self, count, clock)][1],
    )
    state = rebuild(state, lambda s: s.detach())
    found = outcome(ROWS["feedback"], inputs, state, "triton")
    assert counts == [1, 1, 1]
    assert all(map(torch.equal, found, wanted[:-2]))


def test_what_is_kept_grows_with_the_sequence():
    row = ROWS["feedback"]

    def kept(time):
        inputs, _ = problem(row, time, dtype=torch.float32, with_state=False)
        return saved_bytes(lambda: row(*inputs, implementation="triton"))

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
    launcher.launch(
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
    (x, *tensors), state = problem(ROWS["feedback"], 2, torch.float32)
    x, *tensors = (t.to("meta") for t in (x, *tensors))
    k, v = (
        torch.empty(2, 2**30, *t.shape[2:], device="meta") for t in (state.k, state.v)
    )
    state = ops.FeedbackState(k, v, None)
    with (
        launcher.recording((9, 0)),
        pytest.raises(ValueError, match="no kernel for 1073741826 memories"),
    ):
        ROWS["feedback"](x, *tensors, state=state, implementation="triton")


def test_what_is_refused():
    row = ROWS["feedback"]
    inputs, _ = problem(row, 2, with_state=False)
    with pytest.raises(ValueError, match="no kernel for float64"):
        row(*inputs, implementation="triton")
    w = weights(
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
