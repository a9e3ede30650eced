"""Tests that only the fast weight programmer of 1991 needs."""

import copy
import math

import pytest
import torch
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
    keep = torch.rand(2, 50, generator=torch.Generator().manual_seed(0)) < 0.6
    options = {
        "state": W,
        "return_state": True,
        "key_mask": keep if masked else None,
        "implementation": implementation,
    }
    found = ops.fwp(a, b, x, None, **options)
    wanted = ops.sum_rule(x, b, a, normalize=False, **options)
    for one, other in zip(found, wanted, strict=True):
        assert error(one, other) < 1e-12
    pairs = zip(
        torch.autograd.grad(weighted(*found), [a, b, x, W]),
        torch.autograd.grad(weighted(*wanted), [a, b, x, W]),
        strict=True,
    )
    for one, other in pairs:
        assert error(one, other) < 1e-12


@both
def test_two_steps_by_hand(implementation):
    a, b, x = torch.tensor(
        [[[1.0], [2.0]], [[0.5], [1.0]], [[2.0], [3.0]]], dtype=torch.float64
    )[:, None, :, None]
    y, W = ops.fwp(a, b, x, return_state=True, implementation=implementation)
    first = math.tanh(0.5)
    second = math.tanh(first + 2.0)
    torch.testing.assert_close(
        y.flatten(), torch.tensor([2 * first, 3 * second]).double()
    )
    assert W.item() == pytest.approx(second)


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
    table = ROWS["fwp-tanh"]
    row = Row(lambda *x, **o: ops.fwp(*x, activation, **o), table.make, table.large)
    inputs, state = problem(row, 40)
    naive, found = (outcome(row, inputs, state, n) for n in ("naive", "efficient"))
    for one, other in zip(found, naive, strict=True):
        assert error(one, other) < 1e-10


@pytest.mark.parametrize("alone", [False, True])
def test_an_activation_with_parameters_learns(alone):
    """With all the rest, or alone."""
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


@both
def test_masked_steps_leave_the_weights_untouched(implementation):
    """The activation is not applied, either: it would shrink them."""
    inputs, W = problem(ROWS["fwp-tanh"], 9)
    none = torch.zeros(2, 9, dtype=torch.bool)
    y, after = ops.fwp(
        *inputs,
        state=W,
        key_mask=none,
        return_state=True,
        implementation=implementation,
    )
    assert torch.equal(after, W)
    assert not y.any()


def test_gradients_pass_masked_steps_by():
    inputs, W = problem(ROWS["fwp-tanh"], 40)
    keep = torch.rand(2, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    naive, found = (
        torch.autograd.grad(
            weighted(
                *ops.fwp(
                    *inputs,
                    state=W,
                    key_mask=keep,
                    return_state=True,
                    implementation=implementation,
                )
            ),
            [*inputs, W],
        )
        for implementation in ("naive", "efficient")
    )
    for one, other in zip(found, naive, strict=True):
        assert error(one, other) < 1e-10


@both
def test_tanh_keeps_weights_in_range(implementation):
    inputs, _ = problem(ROWS["fwp-tanh"], 300)
    _, W = ops.fwp(
        *(100 * x for x in inputs), return_state=True, implementation=implementation
    )
    assert W.abs().max() <= 1


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
    for one, other in zip(
        outcome(row, inputs, state, "efficient"), wanted, strict=True
    ):
        assert error(one, other) < 1e-10


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
    with pytest.raises(error_type, match=message) as info:
        call()
    assert "\n" not in str(info.value)


LAYERS = {
    "tanh": lambda: FastWeightProgrammer(12, 3),
    "one head": lambda: FastWeightProgrammer(12),
    "linear": lambda: FastWeightProgrammer(12, 3, activation=None),
    "learned": lambda: FastWeightProgrammer(12, 3, activation=Gain()),
}
layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def setup(make):
    torch.manual_seed(0)
    return make().double(), torch.randn(2, 40, 12, dtype=torch.float64)


@layers
def test_prefill_and_step_are_forward(make):
    layer, x = setup(make)
    whole = layer(x)
    y, state = layer.prefill(x[:, :17])
    more, state = layer.prefill(x[:, 17:30], state)
    pieces = [y, more]
    for t in range(30, 40):
        y_t, state = layer.step(x[:, t], state)
        pieces.append(y_t[:, None])
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer.step(x[:, 0])[0], whole[:, 0])
    naive = layer(x, implementation="naive")
    torch.testing.assert_close(whole, naive, rtol=1e-10, atol=1e-12)
    assert state[0].numel() == layer.state_size()
    assert state.shape[1:] == layer.state_shape


@layers
def test_layer_is_causal_masked_trains_and_moves(make):
    layer, x = setup(make)
    y = layer(x)
    changed = x.clone()
    changed[:, 20:] += 1
    assert torch.equal(layer(changed)[:, :20], y[:, :20])
    keep = torch.ones(2, 40, dtype=torch.bool)
    keep[:, 30:] = False
    masked = layer(x, key_mask=keep)
    torch.testing.assert_close(masked[:, :30], y[:, :30], rtol=1e-10, atol=1e-12)
    assert not masked[:, 30:].any()
    (y * torch.randn(2, 40, 12)).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.any(), name
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close = copy.deepcopy(layer).float()(x.float())
    assert error(close, y) < 0.1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: FastWeightProgrammer(10, 3), "d_model=10 and heads=3"),
        (lambda: FastWeightProgrammer(12)(torch.zeros(2, 5, 9)), r"\[batch, time, 12\].*\[2, 5, 9\]"),
        (lambda: FastWeightProgrammer(12).step(torch.zeros(2, 5, 12)), r"\[batch, 12\]"),
    ],
)  # fmt: skip
def test_layer_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


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
    for found, wanted in zip(*results, strict=True):
        assert error(found, wanted) < 1e-14
