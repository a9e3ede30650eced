"""Test the CUDA graph that runs a time step of the feedback memory.

python -m pytest -m gpu tests/gpu/test_feedback_graph.py

test_kernels.py compares the results with the reference loop.
"""

import threading

import pytest
import torch
from alike import call, error, parts, problem, weighted

from fwlab import ops
from fwlab.ops import _triton
from fwlab.ops.feedback import kernels

SIZES = "op=feedback batch=3 heads=4 key=16 value=128 layers=2 dtype=float32"
forms = pytest.mark.parametrize("shared", [0, 1], ids=["separate", "shared"])


def make(time, *, shared=0, past=0, seed=0, device="cuda"):
    """Return a fuzzer problem on the GPU, and a masked state or None."""
    sizes = f"{SIZES} time={time} window={past} fewer={shared} seed={seed}"
    p = problem(sizes, state=int(past > 0), device=device)
    if not past:
        return p, None
    mask = torch.ones(3, past, dtype=torch.bool, device=device)
    mask[1, : past // 2] = False
    return p, ops.FeedbackState(*p.state, mask)


def run(p, state=None, **options):
    return call(p, state=state, implementation="triton", **options)


def outcome(p, state=None):
    """Return the output, the final state and the gradients of all inputs."""
    y, after = run(p, state, return_state=True)
    results = [y, *parts(after)]
    leaves = [x for x in (*p.x.values(), *parts(state)) if x.requires_grad]
    return [*results, *torch.autograd.grad(weighted(*results), leaves)]


def same(got, wanted, limit=1e-6):
    """Assert that tensors agree up to rounding, as cuBLAS may choose other kernels."""
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b) or error(a, b) < limit


@pytest.fixture
def graphs(monkeypatch):
    """Return a list that gets one entry for each captured CUDA graph."""
    made = []

    class Graph(torch.cuda.CUDAGraph):
        def capture_end(self):
            super().capture_end()
            made.append(True)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return made


@forms
@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("time", [16, 17, 63, 200])
def test_graph_is_the_loop(time, past, shared, graphs, monkeypatch):
    """Outputs and gradients of two calls with CUDA graphs match separate launches."""
    p, state = make(time, shared=shared, past=past)
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "PLAYED", 10**9)
        wanted = outcome(p, state)
    assert not graphs
    for _ in range(2):
        same(outcome(p, state), wanted)
    assert len(graphs) == 4


def test_without_gradients(graphs):
    p, state = make(64, past=5)
    wanted = outcome(p, state)[0]
    graphs.clear()
    with torch.no_grad():
        for _ in range(2):
            same([run(p, state)], [wanted])
    assert len(graphs) == 2


def test_two_forwards_before_one_backward():
    """Another forward pass or a second backward pass does not change gradients."""
    p, _ = make(64)
    other, _ = make(33, shared=1, seed=5)
    wanted = outcome(p)[3:]
    y, after = run(p, return_state=True)
    run(other).sum().backward()
    with torch.no_grad():
        run(p)
    loss, leaves = weighted(y, *parts(after)), [*p.x.values()]
    for _ in range(2):
        same(torch.autograd.grad(loss, leaves, retain_graph=True), wanted)


def test_on_another_stream():
    """On another stream, graphs wait for inputs, and the caller waits for results."""
    p, _ = make(64)
    wanted = outcome(p)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        late = {name: torch.full_like(x, torch.nan) for name, x in p.x.items()}
        torch.cuda._sleep(10**8)
        for name, x in late.items():
            x.copy_(p.x[name].detach()).requires_grad_()
        p.x = late
        copies = [x.clone() for x in outcome(p)]
    torch.cuda.current_stream().wait_stream(stream)
    same(copies, wanted)


def test_memory_may_be_reused_at_once():
    """Results are correct if memory is freed and reused while a graph may run."""
    p, _ = make(200)
    wanted = outcome(p)
    for _ in range(5):
        first = outcome(p)
        trash = [torch.full((2**20,), torch.nan, device="cuda") for _ in range(50)]
        torch.cuda.empty_cache()
        del trash
        same(first, wanted)


@pytest.mark.parametrize("held", ["memory_allocated", "memory_reserved"])
def test_memory_does_not_grow(held):
    """Memory stays constant over ten calls, because graphs share a memory pool."""
    p, sizes = make(64)[0], []
    for _ in range(10):
        outcome(p)
        torch.cuda.synchronize()
        if held == "memory_allocated":
            torch.cuda.empty_cache()
        sizes.append(getattr(torch.cuda, held)())
    assert sizes[-1] == sizes[2]


def test_within_a_graph_of_the_caller(graphs):
    """A CUDA graph of the caller can capture the forward pass."""
    p, _ = make(kernels.PLAYED + 1)
    with torch.no_grad():
        wanted = run(p)
        graph = torch.cuda.CUDAGraph()
        before = len(graphs)
        with torch.cuda.graph(graph):
            y = run(p)
        assert len(graphs) == before + 1
        y.zero_()
        graph.replay()
    torch.cuda.synchronize()
    same([y], [wanted])


def test_a_step_that_fails(monkeypatch):
    """An error during capture ends the capture, and the next call is correct."""
    p, _ = make(64)
    wanted, launch = run(p), _triton.launch

    def broken(*arguments, **options):
        if torch.cuda.is_current_stream_capturing():
            raise MemoryError
        launch(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(_triton, "launch", broken)
        with pytest.raises(MemoryError):
            run(p)
    assert not torch.cuda.is_current_stream_capturing()
    same([run(p)], [wanted])


def test_two_threads():
    wanted, by_thread = outcome(make(64)[0]), {}

    def work(name):
        by_thread[name] = outcome(make(64)[0])

    threads = [threading.Thread(target=work, args=(name,)) for name in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for results in by_thread.values():
        same(results, wanted)
    assert len(by_thread) == 2
