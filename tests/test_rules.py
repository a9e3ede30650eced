"""The fast weight rules: what the fuzzer does not see."""

from functools import partial

import pytest
import torch
from alike import error, problem
from loops import RULES

from fwlab import ops

both = pytest.mark.parametrize("implementation", ["naive", "chunked", "efficient"])


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@both
def test_scale_does_not_round_q(implementation):
    """A single rounding, that of the result."""
    q, k, v = (random(2, 20, 2, 4, seed=i).bfloat16() for i in range(3))
    rule = partial(ops.sum_rule, normalize=False)
    y = rule(q, k, v, scale=0.3, implementation=implementation).double()
    wanted = 0.3 * rule(*(x.double() for x in (q, k, v)), implementation="naive")
    assert ((y - wanted).abs() <= 2**-8 * wanted.abs()).all()


@both
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-6, 1e15])
@pytest.mark.parametrize("op", ["sum_rule", "delta_rule"])
def test_normalized_rules_do_not_see_the_scale(op, scale, implementation):
    """In float32, down to its smallest numbers."""
    x = problem(f"op={op} dtype=float32 time=50 heads=2 key=4 value=3 normalize=1").x
    x = {n: part.detach() for n, part in x.items() if n != "log_decay"}
    rule = partial(getattr(ops, op), normalize=True)
    wanted = rule(**x, implementation="naive")
    x |= {n: scale * x[n] for n in "qk"}
    assert error(rule(**x, implementation=implementation), wanted) < 1e-5


@pytest.mark.parametrize("scale", [-1e9, -1e-9, 0.0, 1e-9, 1e9])
@both
def test_the_size_of_a_scale_cancels(scale, implementation):
    """Before it does, it must not leave the range of half precision."""
    q, k, v = (torch.rand(1, 5, 1, 4).half() for _ in "qkv")
    one = ops.sum_rule(q, k, v, implementation=implementation)
    y = ops.sum_rule(q, k, v, scale=scale, implementation=implementation)
    torch.testing.assert_close(y, one if scale else torch.zeros_like(one))


def test_heads_that_cannot_be_grouped():
    x, gate = torch.zeros(2, 7, 4, 4), torch.zeros(2, 7, 4)
    for heads in (3, 6, 2):
        q = torch.zeros(2, 7, heads, 4)
        message = f"heads of q to be a multiple of the 4 heads of k, got {heads}"
        for op, more in ((ops.delta_rule, [gate]), (ops.softmax_attention, [])):
            with pytest.raises(
                ValueError, match=f"{op.__name__}: expected the {message}"
            ):
                op(q, x, x, *more)
    with pytest.raises(ValueError, match=r"expected v of shape \[2, 7, 4, value\]"):
        ops.delta_rule(x.repeat(1, 1, 2, 1), x, x[:, :, :2], gate)


@pytest.mark.parametrize("seed", range(8))
def test_divergence_is_never_hidden(seed):
    """Keys that are too long: not finite no later than naive, and while
    both are finite the efficient result is right.
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
    # One step of grace: rounding may carry either past the last number.
    assert first[0] - 64 < first[1] <= first[0] + 1  # within a chunk
    assert bad[1][first[1] :].all()
    exact = ops.delta_rule(
        *(x.double() for x in (q, 3 * k, v, beta)), implementation="naive"
    )[0, :, 0]
    for step in range(first[1]):
        assert error(results[1][step], exact[step]) < 1e-2


#: Gates that have limits.
LIMITED = [
    *(op for op, rule in RULES.items() if "log_decay" in rule.gates),
    "implicit_delta_rule",
]


@pytest.mark.parametrize("implementation", ["auto", "naive", "chunked", "efficient"])
@pytest.mark.parametrize("name", LIMITED)
def test_a_gate_out_of_its_range(name, implementation):
    """A decay in place of its logarithm; but not in a masked step."""
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
