"""What the fuzzer does not see of every operation: memory, errors, states in place."""

import pytest
import torch
from alike import (
    call,
    computed,
    parts,
    problem,
    rebuild,
    refuses,
    saved_bytes,
    weighted,
)
from loops import AFT, RULES
from torch.utils.checkpoint import checkpoint

import fwlab
from fwlab import ops

both = pytest.mark.parametrize("implementation", ["naive", "efficient"])
STREAMS = (*RULES, "fwp", *AFT[:-1], "feedback")
streams = pytest.mark.parametrize("op", STREAMS)
WIDE = {
    "fwp": "heads=4 key=32 value=32 activation=tanh",
    "feedback": "heads=4 key=32 value=512",
    **dict.fromkeys(AFT, "value=128 window=32"),
    "aft_conv": "heads=4 value=32 window=32",
    **dict.fromkeys(RULES, "heads=4 key=32 value=32"),
}


@streams
@pytest.mark.parametrize("implementation", ["naive", "chunked", "efficient"])
def test_a_row_of_a_state_is_changed_in_place(op, implementation):
    """As where sequences end: `state[done] = 0`, while all has a graph."""
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
    """A view would keep all that it is a view of."""
    options = f"batch=2 time={time} heads=2 key=4 value=3 window=3 state=1"
    for grad in ("all", "none"):
        p = problem(f"op={op} {options}", implementation=implementation, grad=grad)
        _, *state = p.called(p.x, p.state)
        for part in state:
            assert part.untyped_storage().nbytes() == part.nbytes


@streams
def test_what_is_kept_for_backward(op):
    """It grows with time only as inputs and outputs do, and naive keeps
    several times as much.
    """

    def kept(time, implementation):
        p = problem(
            f"op={op} dtype=float32 time={time} asked=y {WIDE[op]}",
            implementation=implementation,
            normalize=int(op == "sum_rule"),
        )
        # A bias over pairs of steps is an input that no one can avoid.
        pairs = sum(x.nbytes for x in p.x.values() if x.shape == (time, time))
        return saved_bytes(lambda: p.called(p.x, p.state)) - pairs

    efficient = [kept(time, "efficient") for time in (256, 512, 1024)]
    assert efficient[2] - efficient[1] <= 2.1 * (efficient[1] - efficient[0])
    assert efficient[2] < 2.1 * efficient[1]
    # With more inputs, both keep more of them.
    ratio = 2 if op == "aft_simple" or len(RULES.get(op, ((),))[0]) > 2 else 4
    # Naive keeps at least four times as much for four times the steps:
    # counted there, it would fill a small machine.
    assert 4 * kept(256, "naive") > ratio * efficient[2]


@streams
def test_activation_checkpointing(op):
    """It computes everything again in the backward pass, and only once."""
    p = problem(f"op={op} state=1 batch=2 time=20 heads=2 key=4 value=3 window=3")
    p.c["implementation"] = "efficient"
    wanted, called = computed(p), p.called
    p.called = lambda x, state: checkpoint(called, x, state, use_reentrant=False)
    assert all(map(torch.equal, computed(p), wanted))


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


def bad(**changes):
    x = torch.zeros(2, 7, 3, 4)
    arguments = {"q": x, "k": x, "v": x, "beta": x[..., 0], **changes}
    q, k, v, beta = (arguments.pop(name) for name in ("q", "k", "v", "beta"))
    return lambda: ops.delta_rule(q, k, v, beta, **arguments)


def attention(**options):
    x = torch.zeros(2, 7, 3, 4)
    return lambda: ops.softmax_attention(x, x, x, **options)


@pytest.mark.parametrize(
    ("wrong", "error_type", "message"),
    [
        (bad(k=torch.zeros(2, 5, 3, 4)), ValueError, r"expected k of shape \[2, 7, heads, 4\].*got \[2, 5, 3, 4\]"),
        (bad(v=torch.zeros(2, 7, 4)), ValueError, r"expected v of shape \[2, 7, 3, value\].*got \[2, 7, 4\]"),
        (bad(beta=torch.zeros(2, 7, 3, 1)), ValueError, r"expected beta of shape \[2, 7, 3\]"),
        (bad(q=torch.zeros(2, 7, 3, 4).long()), TypeError, "expected q in float16, bfloat16, float32 or float64, got int64"),
        (bad(v=torch.zeros(2, 7, 3, 4).double()), TypeError, "expected v in the precision of q, .*got float64"),
        (bad(beta=0.5), TypeError, "expected beta to be a tensor, got float"),
        (bad(k=torch.zeros(2, 7, 3, 4, device="meta")), ValueError, "expected k on cpu, .*got meta"),
        (bad(state=torch.zeros(2, 3, 4, 5)), ValueError, r"expected state of shape \[2, 3, 4, 4\]"),
        (bad(state=torch.zeros(2, 3, 4, 4).double()), TypeError, r"expected state in \w+ for these inputs, got float64"),
        (bad(state=torch.zeros(2, 3, 4, 4), normalize=True), TypeError, "NormalizedState"),
        (bad(key_mask=torch.ones(2, 7)), TypeError, "expected key_mask to be a bool"),
        (bad(key_mask=torch.ones(2, 6).bool()), ValueError, r"expected key_mask of shape .*got \[2, 6\]"),
        (bad(scale="a"), TypeError, "expected scale to be a finite number, got 'a'"),
        (bad(scale=True), TypeError, "expected scale to be a finite number, got True"),
        (bad(scale=float("nan")), ValueError, "expected scale to be a finite number, got nan"),
        (bad(scale=torch.ones(2)), ValueError, r"finite number or a tensor of one, got a float32 tensor of shape \[2\]"),
        (bad(scale=torch.tensor(True)), ValueError, r"got a bool tensor of shape \[\]"),
        (bad(normalize="yes"), TypeError, "expected normalize to be True or False, got 'yes'"),
        (lambda: ops.aft_simple(*[torch.zeros(2, 7, 4)] * 3, causal="no"), TypeError, "aft_simple: expected causal to be True or False, got 'no'"),
        (bad(k=torch.zeros(2, 7, 3, 4).to(torch.float8_e4m3fn)), TypeError, "expected k in float16, bfloat16, float32 or float64, got float8_e4m3fn"),
        (bad(beta=None), TypeError, "delta_rule: expected beta to be a tensor, got NoneType"),
        (bad(implementation="cuda"), ValueError, "'naive', 'chunked', 'efficient'.*got 'cuda'"),
        (attention(state=3), TypeError, "expected state to be a KeyValueCache"),
        (attention(state=(None, None, None)), TypeError, "expected state.k to be a tensor"),
        (attention(state=(torch.zeros(2, 3, 3, 4),) * 2 + (torch.ones(2, 3),)), TypeError, "bool"),
        (attention(key_mask=torch.ones(2, 9)), TypeError, "expected key_mask to be a bool"),
        (attention(implementation="flash"), ValueError, "got 'flash'"),
        (attention(scale="a"), TypeError, "expected scale to be a finite number, got 'a'"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(wrong, error_type, message):
    refuses(wrong, message, error_type)


@both
def test_a_row_of_a_cache_is_changed_in_place(implementation):
    """It shares no memory with the arguments, or with what backward needs."""
    q, k, v = torch.randn(3, 2, 5, 3, 4, requires_grad=True).unbind()
    mask, run = torch.ones(2, 5).bool(), {"implementation": implementation}
    y, cache = ops.softmax_attention(q, k, v, key_mask=mask, return_state=True, **run)
    for part in cache:
        part[0] = 0
    assert mask.all() and k[0].any() and v[0].any()
    wanted = ops.softmax_attention(q, k, v, **run)
    assert ops.softmax_attention(q.bfloat16(), k, v, **run).dtype == torch.float32
    for a, b in zip(
        *(torch.autograd.grad(weighted(x), [q, k, v]) for x in (y, wanted)), strict=True
    ):
        torch.testing.assert_close(a, b)
