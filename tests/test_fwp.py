"""Tests that only the fast weight programmer of 1991 needs."""

import pytest
import torch
from alike import agree, call, error, problem, refuses, saved_bytes, weighted
from torch import nn
from torch.nn import functional as F

from fwlab import ops
from fwlab.layers import FastWeightProgrammer

WITH_STATE = "op=fwp batch=2 time=40 heads=3 key=6 value=5 state=1"
LARGE = "op=fwp dtype=float32 heads=4 key=32 value=32"
both = pytest.mark.parametrize("implementation", ["naive", "efficient"])


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
def test_any_activation(activation):
    p = problem(WITH_STATE)
    found = []
    for implementation in ("naive", "efficient"):
        how = {"implementation": implementation, "return_state": True}
        y, W = call(p, activation=activation, state=p.state[0], **how)
        leaves = [*p.x.values(), *p.state]
        found.append([y, W, *torch.autograd.grad(weighted(y, W), leaves)])
    agree(*found, 1e-10)


@pytest.mark.parametrize("alone", [False, True])
def test_an_activation_with_parameters_learns(alone):
    """With all the rest, or alone; and it is a part of the layer."""
    x = problem(WITH_STATE).x
    x = {name: part.detach() if alone else part for name, part in x.items()}
    found = []
    for implementation in ("naive", "efficient"):
        activation = Gain()
        y = ops.fwp(**x, activation=activation, implementation=implementation)
        weighted(y).backward()
        found.append(activation.gain.grad)
    assert found[0].abs() > 1e-3
    assert error(found[1], found[0]) < 1e-10
    layer = FastWeightProgrammer(12, 3, activation=Gain())
    assert "activation.gain" in dict(layer.named_parameters())


@both
def test_a_constant_activation_passes_nothing_on(implementation):
    p = problem(WITH_STATE)
    how = {"implementation": implementation, "return_state": True}
    y, after = call(p, activation=torch.ones_like, state=p.state[0], **how)
    assert (after == 1).all()
    leaves = [p.x["x"], p.x["a"], p.x["b"], *p.state]
    dx, *others = torch.autograd.grad(weighted(y), leaves, allow_unused=True)
    assert dx.any()
    assert all(g is None or not g.any() for g in others)


def test_few_states_are_kept():
    """One per segment: their number grows with the root of time."""
    state = 4 * 32 * 32 * 4  # bytes

    def states(time):
        p = problem(LARGE, time=time)
        own = sum(x.nbytes for x in p.x.values())
        return (saved_bytes(lambda: call(p)) - own) / state

    assert states(256) == pytest.approx(16, abs=1)
    assert states(1024) == pytest.approx(32, abs=1)
    assert states(4096) == pytest.approx(64, abs=1)


def test_memory_that_is_really_alive():
    """Measured not by what autograd reports as saved, but by all memory in
    use while the graph is alive.
    """

    def alive(time, implementation):
        p = problem(LARGE, time=time)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            y = call(p, implementation=implementation)
        used = sum(event.self_cpu_memory_usage for event in profile.events())
        return used - y.nbytes

    assert alive(512, "naive") > 7 * alive(512, "efficient")
    assert alive(512, "efficient") < 2.5 * alive(128, "efficient")


def test_the_layer_says_the_shape_of_its_state():
    layer = FastWeightProgrammer(12)  # one head
    _, state = layer.prefill(torch.randn(2, 5, 12))
    assert state.shape[1:] == layer.state_shape == (1, 12, 12)


def bad(**changes):
    x = torch.zeros(2, 7, 3, 4)
    arguments = {"a": torch.zeros(2, 7, 3, 5), "b": x, "x": x, **changes}
    return lambda: ops.fwp(**arguments)


@pytest.mark.parametrize(
    ("wrong", "error_type", "message"),
    [
        (bad(a=torch.zeros(2, 7, 5)), ValueError, r"expected a of shape \[batch, time, heads, value\].*got \[2, 7, 5\]"),
        (bad(x=torch.zeros(2, 7, 3, 5)), ValueError, r"expected x of shape \[2, 7, 3, 4\]"),
        (bad(b=torch.zeros(2, 7, 3, 4).long()), TypeError, "expected b in float16, .* or float64, got int64"),
        (bad(state=torch.zeros(2, 3, 4, 5)), ValueError, r"expected state of shape \[2, 3, 5, 4\]"),
        (bad(activation="tanh"), TypeError, "expected activation to be a function or None, got 'tanh'"),
        (bad(activation=lambda W: W.sum()), ValueError, r"expected activation to return .*got torch.float32 \[\]"),
        (bad(activation=lambda W: W.double()), ValueError, r"expected activation to return .*got torch.float64"),
        (bad(activation=lambda W: None), ValueError, "expected activation to return .*got NoneType"),
        (bad(key_mask=torch.ones(2, 6).bool()), ValueError, r"expected key_mask of shape .*got \[2, 6\]"),
        (bad(implementation="cuda"), ValueError, "got 'cuda'"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(wrong, error_type, message):
    refuses(wrong, message, error_type)


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
