"""Test memory, errors and in-place changes of states of every operation."""

from functools import partial

import fuzz
import pytest
import torch
from alike import agree, call, error, parts, problem, rebuild, weighted
from loops import AFT, RULES
from torch import nn

import fwlab
from fwlab import ops
from fwlab.bench.measure import saved_bytes
from fwlab.layers import FastWeightProgrammer

every_form = pytest.mark.parametrize(
    "implementation", ["naive", "chunked", "efficient"]
)
both = pytest.mark.parametrize("implementation", ["naive", "efficient"])
STREAMS = (*RULES, "fwp", *AFT[:-1], "feedback")
WIDE = {
    "fwp": "heads=4 key=32 value=32 activation=tanh",
    "feedback": "heads=4 key=32 value=512",
    **dict.fromkeys(AFT, "value=128 window=32"),
    "aft_conv": "heads=4 value=32 window=32",
    **dict.fromkeys(RULES, "heads=4 key=32 value=32"),
}


@pytest.mark.parametrize("op", [*STREAMS, "softmax_attention"])
@every_form
def test_a_row_of_a_state_is_changed_in_place(op, implementation):
    """A row of a state can be set to 0 in place, `state[done] = 0`, under autograd."""
    if implementation not in ops.implementations(op):
        pytest.skip("this operation has no such form")
    p = problem(f"op={op} batch=2 time=9 heads=2 key=4 value=3 window=3")

    def piece(a, b, state):
        x = {name: p.piece(name, part, a, b) for name, part in p.x.items()}
        options = {"implementation": implementation, "return_state": True}
        return call(p, **x, state=state, **options)

    results = []
    for change in (lambda x: x.index_fill(0, torch.tensor([0]), 0), reset):
        y, middle = piece(0, 5, None)
        middle = rebuild(middle, change)
        assert not any(x[0].any() for x in parts(middle))
        more, _ = piece(5, 9, middle)
        results += torch.autograd.grad(weighted(y, more), [*p.x.values()])
    half = len(results) // 2
    assert all(map(torch.equal, results[:half], results[half:]))


def reset(x):
    x[torch.tensor([True, False])] = 0
    return x


@pytest.mark.parametrize("op", [*RULES, "fwp", "aft_simple"])
@both
@pytest.mark.parametrize("time", [1, 70])
def test_states_own_their_memory(op, implementation, time):
    """A state owns its storage, because a view would keep a larger tensor alive."""
    options = f"batch=2 time={time} heads=2 key=4 value=3 window=3 state=1"
    for grad in ("all", "none"):
        p = problem(f"op={op} {options}", implementation=implementation, grad=grad)
        _, *state = p.called(p.x, p.state)
        for part in state:
            assert part.untyped_storage().nbytes() == part.nbytes


@pytest.mark.parametrize("op", STREAMS)
def test_what_is_kept_for_backward(op):
    """Memory saved for the backward pass is linear in time; naive loops save more."""

    def kept(time, implementation):
        p = problem(
            f"op={op} dtype=float32 time={time} asked=y {WIDE[op]}",
            implementation=implementation,
            normalize=int(op == "sum_rule"),
        )
        # A bias over pairs of steps is an input and is always saved.
        pairs = sum(x.nbytes for x in p.x.values() if x.shape == (time, time))
        return saved_bytes(lambda: p.called(p.x, p.state)) - pairs

    efficient = [kept(time, "efficient") for time in (256, 512, 1024)]
    assert efficient[2] - efficient[1] <= 2.1 * (efficient[1] - efficient[0])
    assert efficient[2] < 2.1 * efficient[1]
    # With more inputs, naive and efficient implementations save more tensors.
    many = ("aft_simple", "gated_delta_rule_2", "comba_rule", "rwkv7_rule")
    ratio = 2 if op in many else 4
    # The naive loop saves at least four times as much for four times the steps.
    # Measuring the naive loop for 1024 steps would fill a small machine's memory.
    assert 4 * kept(256, "naive") > ratio * efficient[2]


def test_detach():
    state = ops.NormalizedState(*(torch.ones(2, requires_grad=True) for _ in "ab"))
    cut = fwlab.detach([state, None, {"x": (state.z,)}, 7])
    assert cut[3] == 7
    assert isinstance(cut[0], ops.NormalizedState)
    assert not cut[0].W.requires_grad
    assert cut[1] is None
    assert not cut[2]["x"][0].requires_grad
    with pytest.raises(TypeError, match="str"):
        fwlab.detach("W")


def test_implementations():
    assert ops.implementations("delta_rule") == ("naive", "chunked", "efficient")
    with pytest.raises(ValueError, match="delta_rul'"):
        ops.implementations("delta_rul")
    with pytest.raises(ValueError, match=r"got \['delta_rule'\]"):
        ops.implementations(["delta_rule"])


def test_softmax_attention_shares_no_mask_and_takes_the_wider_type():
    q, mask = torch.randn(1, 2, 1, 3), torch.ones(1, 2, dtype=torch.bool)
    options = {"key_mask": mask, "return_state": True}
    ops.softmax_attention(q, q, q, **options)[1].mask[0] = False
    assert mask.all()
    assert ops.softmax_attention(q.bfloat16(), q, q).dtype == torch.float32


# --- rules ------------------------------------------------------------


@every_form
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-6, 1e15])
@pytest.mark.parametrize("op", ["sum_rule", "delta_rule"])
def test_normalized_rules_do_not_see_the_scale(op, scale, implementation):
    """Normalised rules are invariant to the scale of q and k, from 1e-30 to 1e15."""
    x = problem(f"op={op} dtype=float32 time=50 heads=2 key=4 value=3 normalize=1").x
    x = {n: part.detach() for n, part in x.items() if n != "log_decay"}
    rule = partial(getattr(ops, op), normalize=True)
    wanted = rule(**x, implementation="naive")
    x |= {n: scale * x[n] for n in "qk"}
    assert error(rule(**x, implementation=implementation), wanted) < 1e-5


@pytest.mark.parametrize("seed", range(2))
def test_divergence_is_never_hidden(seed):
    """With long keys, "efficient" overflows no later than "naive".

    Before an overflow, the efficient form is correct.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 400, 1, 8, generator=generator) for _ in range(3))
    beta = torch.ones(1, 400, 1)
    results = [
        ops.delta_rule(q, 3 * k, v, beta, implementation=name)[0, :, 0]
        for name in ("naive", "efficient")
    ]
    bad = [~torch.isfinite(y).all(-1) for y in results]
    first = [int(b.nonzero()[0]) for b in bad]
    # Rounding may delay an overflow by a step.
    assert first[0] - 64 < first[1] <= first[0] + 1  # Both overflows are in one chunk.
    assert bad[1][first[1] :].all()
    exact = ops.delta_rule(
        *(x.double() for x in (q, 3 * k, v, beta)), implementation="naive"
    )[0, :, 0]
    for step in range(first[1]):
        assert error(results[1][step], exact[step]) < 1e-2


#: Operations with a gate whose range is limited.
LIMITED = [
    *(op for op in RULES if "log_decay" in fuzz.takes(op)),
    "implicit_delta_rule",
]


@pytest.mark.parametrize("implementation", ["auto", "naive", "chunked", "efficient"])
@pytest.mark.parametrize("name", LIMITED)
def test_a_gate_out_of_its_range(name, implementation):
    """A gate that is out of range raises an error, except at a masked step."""
    gate = "log_decay" if name != "implicit_delta_rule" else "beta"
    call = partial(getattr(ops, name), implementation=implementation)
    x = problem(f"op={name} batch=2 time=6 heads=2 key=3 value=3 grad=none").x
    wrong = x[gate].clone()
    wrong[1, 2] = 0.9 if gate == "log_decay" else -0.9
    hint = {"log_decay": "at most 0, got values up to 0.9; pass the logarithm"}
    message = (
        f"{name}: expected {gate} to be {hint.get(gate, 'at least 0, got values')}"
    )
    with pytest.raises(ValueError, match=message):
        call(**x | {gate: wrong})
    keep = torch.ones(2, 6, dtype=torch.bool)
    keep[1, 2] = False
    assert torch.equal(
        call(**x | {gate: wrong}, key_mask=keep), call(**x, key_mask=keep)
    )


# --- fast weight programmer of 1991 ------------------------------------


class Gain(nn.Module):
    """Compute tanh with a trained gain, as an activation."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.9, dtype=torch.float64))

    def forward(self, W):
        return torch.tanh(self.gain * W)


@pytest.mark.parametrize("alone", [False, True])
def test_an_activation_with_parameters_learns(alone):
    """An activation's parameters get gradients, and are parameters of the layer."""
    x = problem("op=fwp batch=2 time=40 heads=3 key=6 value=5").x
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
