"""The step of the feedback memory as a CUDA graph, on a GPU.

python -m pytest -m gpu tests/gpu/test_feedback_graph.py
"""

import threading
from functools import partial

import pytest
import torch
from alike import error, feedback_weights, rebuild

from fwlab import ops
from fwlab.ops.feedback import kernels


def feedback(x, *tensors, **options):
    return ops.feedback(x, ops.FeedbackWeights(*tensors), **options)


LONG = 10**9
HEADS, D, BATCH = 4, 64, 3
forms = pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])


def make(time, *, shared=False, layers=2, past=0, seed=0, dtype=torch.float32):
    """Leaves on the GPU: the inputs, and a state or None."""
    generator = torch.Generator().manual_seed(seed)
    w = feedback_weights(
        generator,
        layers=layers,
        d=D,
        d_ff=2 * D,
        features=D // HEADS,
        shared=shared,
        normalize=True,
        heads=HEADS,
    )
    x = torch.randn(BATCH, time, D, generator=generator, dtype=torch.float64)
    inputs = [p.to("cuda", dtype).requires_grad_() for p in (x, *w)]
    if not past:
        return inputs, None
    shape = (BATCH, past, 1 if shared else layers, HEADS, D // HEADS)
    k, v = (
        torch.randn(shape, generator=generator).cuda().requires_grad_()
        for _ in range(2)
    )
    mask = torch.ones(BATCH, past, dtype=torch.bool, device="cuda")
    mask[1, : past // 2] = False
    return inputs, ops.FeedbackState(k, v, mask)


def outcome(inputs, state, implementation="triton"):
    """Outputs, final state and every gradient."""
    y, after = feedback(
        *inputs,
        heads=HEADS,
        state=state,
        return_state=True,
        implementation=implementation,
    )
    generator = torch.Generator("cuda").manual_seed(1)
    results = [y, after.k, after.v]
    loss = sum(
        (x.double() * torch.randn(x.shape, generator=generator, device="cuda")).sum()
        for x in results
    )
    leaves = [*inputs, *([] if state is None else [state.k, state.v])]
    return [*results, *torch.autograd.grad(loss, leaves)]


def exactly(x):
    return x if x.dtype == torch.bool else x.detach().double().requires_grad_()


def same(got, wanted, limit=1e-6):
    """Bit for bit, unless cuBLAS chose other kernels."""
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b) or error(a, b) < limit


@pytest.fixture
def graphs(monkeypatch):
    """Count the graphs that are captured."""
    made = []

    class Graph(torch.cuda.CUDAGraph):
        def capture_end(self):
            super().capture_end()
            made.append(True)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return made


@pytest.fixture
def plain(monkeypatch):
    """Call a function without graphs."""

    def call(function):
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "PLAYED", LONG)
            return function()

    return call


@forms
@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("time", [16, 17, 63, 200])
def test_graph_is_the_loop(time, past, shared, graphs, plain):
    """Twice in a row, forward and backward."""
    inputs, state = make(time, shared=shared, past=past)
    wanted = plain(lambda: outcome(inputs, state))
    assert not graphs
    for _ in range(2):
        same(outcome(inputs, state), wanted)
    assert len(graphs) == 4


@forms
@pytest.mark.parametrize("time", [1, 7, 100])
def test_against_naive(time, shared):
    """With a state, so that all gradients exist for a single step."""
    inputs, state = make(time, shared=shared, past=5)
    exact = [*map(exactly, inputs)], rebuild(state, exactly)
    wanted = outcome(*exact, implementation="naive")
    for a, b in zip(outcome(inputs, state), wanted, strict=True):
        assert error(a, b) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    inputs, state = make(50, past=5, dtype=dtype)
    exact = [*map(exactly, inputs)], rebuild(state, exactly)
    half, wanted = outcome(inputs, state), outcome(*exact, implementation="naive")
    assert half[0].dtype == dtype
    limit = 4e-3 if dtype == torch.float16 else 3e-2
    for a, b in zip(half, wanted, strict=True):
        assert error(a, b) < limit


def test_without_gradients(graphs):
    inputs, state = make(64, past=5)
    wanted = outcome(inputs, state)[0]
    graphs.clear()
    with torch.no_grad():
        for _ in range(2):
            y = feedback(*inputs, heads=HEADS, state=state, implementation="triton")
            same([y], [wanted])
    assert len(graphs) == 2


def test_two_forwards_before_one_backward():
    """Also of other sizes, and backward twice over one graph of autograd."""
    inputs, _ = make(64)
    others, _ = make(33, shared=True, seed=5)
    wanted = outcome(inputs, None)[3:]
    run = partial(feedback, heads=HEADS, implementation="triton", return_state=True)
    y, after = run(*inputs)
    run(*others)[0].sum().backward()
    with torch.no_grad():
        run(*inputs)
    generator = torch.Generator("cuda").manual_seed(1)
    results = [y, after.k, after.v]
    loss = sum(
        (x.double() * torch.randn(x.shape, generator=generator, device="cuda")).sum()
        for x in results
    )
    for _ in range(2):
        gradients = torch.autograd.grad(loss, inputs, retain_graph=True)
        same(gradients, wanted)


def test_on_another_stream():
    """It waits for inputs that are computed late, and for results."""
    inputs, _ = make(64)
    wanted = outcome(inputs, None)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = [torch.full_like(x, torch.nan) for x in inputs]
        torch.cuda._sleep(10**8)
        for x, value in zip(late, inputs, strict=True):
            x.copy_(value.detach())
            x.requires_grad_()
        copies = [x.clone() for x in outcome(late, None)]
    torch.cuda.current_stream().wait_stream(stream)
    same(copies, wanted)


def test_memory_may_be_reused_at_once():
    """The graph and its memory are freed while it may still be running."""
    inputs, _ = make(200)
    wanted = outcome(inputs, None)
    for _ in range(5):
        first = outcome(inputs, None)
        trash = [torch.full((2**20,), torch.nan, device="cuda") for _ in range(50)]
        torch.cuda.empty_cache()
        del trash
        same(first, wanted)


def test_memory_that_nobody_wrote_holds_nan():
    """In deterministic mode; also the operations of that mode are played."""
    inputs, state = make(40, past=5)
    wanted = outcome(inputs, state)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        results = outcome(inputs, state)
    finally:
        torch.use_deterministic_algorithms(False)
    same(results, wanted)


def test_memory_does_not_grow():
    inputs, _ = make(64)
    held = []
    for _ in range(6):
        outcome(inputs, None)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] == held[1]


def test_memory_of_graphs_is_shared():
    """Nothing is given back in between."""
    inputs, _ = make(64)
    held = []
    for _ in range(10):
        outcome(inputs, None)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_reserved())
    assert held[-1] == held[2]


def test_within_a_graph_of_the_caller(graphs):
    """Forward, of one step more than a graph needs."""
    inputs, _ = make(kernels.PLAYED + 1)
    run = partial(feedback, heads=HEADS, implementation="triton")
    with torch.no_grad():
        wanted = run(*inputs)
        graph = torch.cuda.CUDAGraph()
        before = len(graphs)
        with torch.cuda.graph(graph):
            y = run(*inputs)
        assert len(graphs) == before + 1
        y.zero_()
        graph.replay()
    torch.cuda.synchronize()
    same([y], [wanted])


def test_two_threads():
    inputs, _ = make(64)
    wanted, by_thread = outcome(inputs, None), {}

    def work(name):
        by_thread[name] = outcome([x.detach().requires_grad_() for x in inputs], None)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for results in by_thread.values():
        same(results, wanted)
    assert len(by_thread) == 2


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_on_a_second_gpu():
    """While the first one is the current one."""
    inputs, _ = make(64)
    wanted = outcome(inputs, None)
    there = [x.detach().to("cuda:1").requires_grad_() for x in inputs]
    y = feedback(*there, heads=HEADS, implementation="triton")
    assert y.device == there[0].device
    same([y.to("cuda:0")], wanted[:1])
