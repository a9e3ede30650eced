"""Tests that only the fast weight programmer of 1991 needs."""

import pytest
import torch
from alike import agree, drawn_mask, refuses
from torch import nn
from torch.nn import functional as F

from fwlab import ops
from fwlab.layers import FastWeightProgrammer
from fwlab.ops.fwp import efficient
from problems import ROWS, error, outcome, problem, saved_bytes, weighted
from problems.row import Row

both = pytest.mark.parametrize("implementation", ["naive", "efficient"])


@both
@pytest.mark.parametrize("masked", [False, True])
def test_without_activation_it_is_the_sum_rule(implementation, masked):
    (a, b, x), W = problem(ROWS["fwp-linear"], 50)
    options = {
        "state": W,
        "return_state": True,
        "key_mask": drawn_mask(2, 50) if masked else None,
        "implementation": implementation,
    }
    found = ops.fwp(a, b, x, None, **options)
    wanted = ops.sum_rule(x, b, a, normalize=False, **options)
    agree(found, wanted)
    leaves = [a, b, x, W]
    gradients = (torch.autograd.grad(weighted(*y), leaves) for y in (found, wanted))
    agree(*gradients)


class Gain(nn.Module):
    """An activation with a trained parameter."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.9, dtype=torch.float64))

    def forward(self, W):
        return torch.tanh(self.gain * W)


@pytest.mark.parametrize(
    "activation", [F.relu, torch.sin, lambda W: W.clamp(-1, 1), lambda W: 0.9 * W]
)
def test_any_activation(activation, monkeypatch):
    table = ROWS["fwp-tanh"]
    row = Row(lambda *x, **o: ops.fwp(*x, activation, **o), table.make, table.large)
    inputs, state = problem(row, 40)
    naive, found = (outcome(row, inputs, state, n) for n in ("naive", "efficient"))
    agree(found, naive, 1e-10)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    agree(outcome(row, inputs, state, "efficient"), found, 1e-12)


def test_a_traced_call_keeps_what_one_gradient_needs(monkeypatch):
    inputs, _ = problem(ROWS["fwp-tanh"], 12, with_state=False)
    wanted = torch.autograd.grad(weighted(ops.fwp(*inputs)), inputs)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for place, x in enumerate(inputs):
        alone = [x if y is x else y.detach() for y in inputs]
        (found,) = torch.autograd.grad(weighted(ops.fwp(*alone)), x)
        assert error(found, wanted[place]) < 1e-12


@pytest.mark.parametrize("alone", [False, True])
def test_an_activation_with_parameters_learns(alone):
    """With all the rest, or alone; and it is a part of the layer."""
    inputs, _ = problem(ROWS["fwp-tanh"], 40)
    inputs = [x.detach() if alone else x for x in inputs]
    found = []
    for implementation in ("naive", "efficient"):
        activation = Gain()
        y = ops.fwp(*inputs, activation, implementation=implementation)
        weighted(y).backward()
        found.append(activation.gain.grad)
    assert found[0].abs() > 1e-3
    assert error(found[1], found[0]) < 1e-10
    layer = FastWeightProgrammer(12, 3, activation=Gain())
    assert "activation.gain" in dict(layer.named_parameters())


@both
def test_a_constant_activation_passes_nothing_on(implementation):
    inputs, W = problem(ROWS["fwp-tanh"], 20)
    y, after = ops.fwp(
        *inputs,
        torch.ones_like,
        state=W,
        return_state=True,
        implementation=implementation,
    )
    assert (after == 1).all()
    da, db, dx, dW = torch.autograd.grad(weighted(y), [*inputs, W], allow_unused=True)
    assert dx.any()
    assert all(g is None or not g.any() for g in (da, db, dW))


def test_few_states_are_kept():
    """One per segment: their number grows with the root of time."""
    row, state = ROWS["fwp-tanh"], 4 * 32 * 32 * 4  # bytes

    def states(time):
        inputs = [x.requires_grad_() for x in row.large(time)]
        own = sum(x.nbytes for x in inputs)
        return (saved_bytes(lambda: row(*inputs)) - own) / state

    assert states(256) == pytest.approx(16, abs=1)
    assert states(1024) == pytest.approx(32, abs=1)
    assert states(4096) == pytest.approx(64, abs=1)


def test_memory_that_is_really_alive(monkeypatch):
    """Measured not by what autograd reports as saved, but by all memory in
    use while the graph is alive.
    """
    row = ROWS["fwp-tanh"]

    def alive(time, implementation):
        inputs = [x.requires_grad_() for x in row.large(time)]
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            y = row(*inputs, implementation=implementation)
        used = sum(event.self_cpu_memory_usage for event in profile.events())
        return used - y.nbytes

    assert alive(512, "naive") > 7 * alive(512, "efficient")
    assert alive(512, "efficient") < 2.5 * alive(128, "efficient")


@pytest.mark.parametrize("segment", [1, 3, 7, 100])
def test_segments_change_nothing(segment, monkeypatch):
    row = ROWS["fwp-tanh"]
    inputs, state = problem(row, 30)
    wanted = outcome(row, inputs, state, "naive")
    monkeypatch.setattr(efficient, "SEGMENT", segment)
    agree(outcome(row, inputs, state, "efficient"), wanted, 1e-10)


def test_the_layer_says_the_shape_of_its_state():
    layer = FastWeightProgrammer(12)  # one head
    _, state = layer.prefill(torch.randn(2, 5, 12))
    assert state.shape[1:] == layer.state_shape == (1, 12, 12)


def bad(**changes):
    x = torch.zeros(2, 7, 3, 4)
    arguments = {"a": torch.zeros(2, 7, 3, 5), "b": x, "x": x, **changes}
    return lambda: ops.fwp(**arguments)


@pytest.mark.parametrize(
    ("call", "error_type", "message"),
    [
        (bad(a=torch.zeros(2, 7, 5)), ValueError, r"expected a of shape \[batch, time, heads, value\].*got \[2, 7, 5\]"),
        (bad(x=torch.zeros(2, 7, 3, 5)), ValueError, r"expected x of shape \[2, 7, 3, 4\]"),
        (bad(b=torch.zeros(2, 7, 3, 4).long()), TypeError, "expected b to be a floating-point tensor, got int64"),
        (bad(state=torch.zeros(2, 3, 4, 5)), ValueError, r"expected state of shape \[2, 3, 5, 4\]"),
        (bad(activation="tanh"), TypeError, "expected activation to be a function or None, got 'tanh'"),
        (bad(activation=lambda W: W.sum()), ValueError, r"expected activation to return .*got torch.float32 \[\]"),
        (bad(activation=lambda W: W.double()), ValueError, r"expected activation to return .*got torch.float64"),
        (bad(activation=lambda W: None), ValueError, "expected activation to return .*got NoneType"),
        (bad(key_mask=torch.ones(2, 6).bool()), ValueError, r"expected key_mask of shape .*got \[2, 6\]"),
        (bad(implementation="cuda"), ValueError, "got 'cuda'"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call, error_type, message):
    refuses(call, message, error_type)


def test_an_activation_in_place_changes_nothing_of_the_caller():
    generator = torch.Generator().manual_seed(0)
    a, b, x = (torch.randn(1, 9, 2, 3, generator=generator) for _ in range(3))
    state = torch.randn(1, 2, 3, 3, generator=generator)
    before = state.clone()
    given = [part.requires_grad_() for part in (a, b, x)]
    results = []
    for activation in (torch.tanh, torch.tanh_):
        y = ops.fwp(*given, activation=activation, state=state)
        results.append([y, *torch.autograd.grad(y.sum(), given)])
    assert torch.equal(state, before)
    agree(*results, 1e-14)
