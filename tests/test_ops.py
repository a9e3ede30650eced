"""Every rule: naive is the reference, efficient must be the same."""

import itertools

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fwlab import ops
from fwlab.ops import chunks
from fwlab.ops.delta import efficient as delta_efficient
from fwlab.ops.linear import efficient as linear_efficient
from problems import RULES, error, parts, problem, weighted

TIMES = [1, 2, 31, 32, 33, 64, 65, 300]
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def outcome(rule, inputs, state, implementation):
    """Outputs, final state and every gradient, as one list."""
    y, after = rule(
        *inputs, state=state, return_state=True, implementation=implementation
    )
    leaves = [*inputs, *parts(state)]
    gradients = torch.autograd.grad(weighted(y, *parts(after)), leaves)
    return [y, *parts(after), *gradients]


@rules
@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize(("key", "value"), [(6, 5), (4, 9)])
def test_efficient_is_naive(rule, time, key, value):
    inputs, state = problem(rule, time, key=key, value=value)
    naive = outcome(rule, inputs, state, "naive")
    for found, wanted in zip(
        outcome(rule, inputs, state, "efficient"), naive, strict=True
    ):
        assert error(found, wanted) < 1e-10


@rules
@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)],
)
@pytest.mark.parametrize("implementation", ["naive", "efficient"])
def test_lower_precision(rule, dtype, limit, implementation):
    inputs, state = problem(rule, 150, dtype=dtype)
    found = outcome(rule, inputs, state, implementation)
    # The reference sees the same rounded inputs.
    exact = [x.detach().double().requires_grad_() for x in inputs]
    start = [x.detach().double().requires_grad_() for x in parts(state)]
    start = ops.NormalizedState(*start) if rule.normalize else start[0]
    wanted = outcome(rule, exact, start, "naive")
    assert found[0].dtype == dtype
    assert all(x.dtype == torch.float32 for x in found[1 : 1 + len(parts(state))])
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b) < limit


@rules
@pytest.mark.parametrize("time", [1, 5, 9])
def test_gradcheck(rule, time, monkeypatch):
    # Small chunks, so that a few steps already cross several groups.
    monkeypatch.setattr(chunks, "ROWS", {"cpu": 8})
    module = delta_efficient if rule.gates else linear_efficient
    compute = module.delta_rule if rule.gates else module.sum_rule
    inputs, state = problem(rule, time, batch=1, heads=2, key=4, value=3)
    leaves = [*inputs, *parts(state)]
    count = len(inputs)

    def run(*leaves):
        W, z = leaves[count], leaves[count + 1] if rule.normalize else None
        y, W, z = compute(*leaves[:count], W, z, chunk=2)
        return (y, W) if z is None else (y, W, z)

    assert gradcheck(run, leaves)


@rules
def test_no_matter_how_chunks_are_cut(rule):
    inputs, state = problem(rule, 100)
    W, z = (*parts(state), None)[:2]
    module = delta_efficient if rule.gates else linear_efficient
    compute = module.delta_rule if rule.gates else module.sum_rule
    wanted = compute(*inputs, W, z, chunk=1)[0]
    for chunk in (2, 7, 16, 64, 128, 512):
        assert error(compute(*inputs, W, z, chunk=chunk)[0], wanted) < 1e-12


@rules
@pytest.mark.parametrize("implementation", ["naive", "efficient"])
@pytest.mark.parametrize("cuts", [[0, 50], [1], [33, 34, 35], [64]])
def test_streaming(rule, implementation, cuts):
    """A sequence cut anywhere gives the whole, gradients included."""
    inputs, state = problem(rule, 70)
    whole = outcome(rule, inputs, state, implementation)
    after, outputs = state, []
    edges = [0, *cuts, 70]
    for start, stop in itertools.pairwise(edges):
        y, after = rule(
            *(x[:, start:stop] for x in inputs),
            state=after,
            return_state=True,
            implementation=implementation,
        )
        outputs.append(y)
    y = torch.cat(outputs, dim=1)
    gradients = torch.autograd.grad(
        weighted(y, *parts(after)), [*inputs, *parts(state)]
    )
    for found, wanted in zip([y, *parts(after), *gradients], whole, strict=True):
        assert error(found, wanted) < 1e-10


@rules
@pytest.mark.parametrize("implementation", ["naive", "efficient"])
def test_nothing_to_do(rule, implementation):
    inputs, state = problem(rule, 0)
    y, after = rule(
        *inputs, state=state, return_state=True, implementation=implementation
    )
    assert y.shape == inputs[2].shape
    for found, wanted in zip(parts(after), parts(state), strict=True):
        assert torch.equal(found, wanted)
    y, after = rule(*inputs, return_state=True, implementation=implementation)
    assert all(not part.any() for part in parts(after))
    for x, gradient in zip(inputs, torch.autograd.grad(y.sum(), inputs), strict=True):
        assert gradient.shape == x.shape


@rules
def test_strange_strides(rule):
    """Transposed and expanded inputs, and a gradient of stride 0."""
    inputs, state = problem(rule, 40)
    y = rule(*inputs, state=state, implementation="naive")
    wanted = torch.autograd.grad(y.sum(), [*inputs, *parts(state)])
    odd = []
    for x in inputs:
        wide = x.detach().transpose(0, -1).contiguous().transpose(0, -1)
        assert not wide.is_contiguous()
        odd.append(wide.requires_grad_())
    y = rule(*odd, state=state, implementation="efficient")
    found = torch.autograd.grad(y.sum(), [*odd, *parts(state)])
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b) < 1e-10

    one = [x[:, :, :1].detach().requires_grad_() for x in inputs]

    def spread(implementation):
        y = rule(
            *(x.expand(-1, -1, 3, *x.shape[3:]) for x in one),
            implementation=implementation,
        )
        return torch.autograd.grad(y.sum(), one)

    for a, b in zip(spread("efficient"), spread("naive"), strict=True):
        assert error(a, b) < 1e-10


@rules
def test_backward_twice_and_forwards_in_between(rule):
    inputs, state = problem(rule, 50)
    leaves = [*inputs, *parts(state)]
    wanted = outcome(rule, inputs, state, "efficient")[-len(leaves) :]

    y, after = rule(*inputs, state=state, return_state=True)
    loss = weighted(y, *parts(after))
    rule(*(x * 2 for x in inputs), state=state)
    with torch.no_grad():
        rule(*(x * 3 for x in inputs), state=state)
    for _ in range(2):
        found = torch.autograd.grad(loss, leaves, retain_graph=True)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b)


@rules
def test_only_what_is_asked_for(rule):
    """The state alone, the output alone, and one input alone."""
    inputs, state = problem(rule, 40)
    for pick in (0, 1):
        results = []
        for implementation in ("naive", "efficient"):
            y, after = rule(
                *inputs, state=state, return_state=True, implementation=implementation
            )
            loss = weighted(y) if pick == 0 else weighted(*parts(after))
            results.append(torch.autograd.grad(loss, inputs[1:3]))
        for a, b in zip(*results, strict=True):
            assert error(b, a) < 1e-10
    frozen = [x.detach() for x in inputs]
    v = frozen[2].requires_grad_()
    (alone,) = torch.autograd.grad(rule(*frozen).sum(), v)
    (wanted,) = torch.autograd.grad(rule(*frozen, implementation="naive").sum(), v)
    assert error(alone, wanted) < 1e-10


@rules
def test_nothing_of_the_caller_changes(rule):
    inputs, state = problem(rule, 50)
    before = [x.detach().clone() for x in [*inputs, *parts(state)]]
    outcome(rule, inputs, state, "efficient")
    for x, copy in zip([*inputs, *parts(state)], before, strict=True):
        assert torch.equal(x, copy)


@rules
def test_second_derivative(rule):
    """Naive has one; efficient says that it has none."""
    inputs, _ = problem(rule, 3, batch=1, heads=1, key=4, value=2, with_state=False)
    assert gradgradcheck(lambda *x: rule(*x, implementation="naive"), inputs)
    y = rule(*inputs, implementation="efficient")
    with pytest.raises(RuntimeError, match="implementation='naive'"):
        torch.autograd.grad(y.sum(), inputs, create_graph=True)


@rules
@pytest.mark.parametrize("implementation", ["naive", "efficient"])
def test_key_mask(rule, implementation):
    """Masked steps are as if they were not there, whatever they hold."""
    inputs, state = problem(rule, 60, batch=1)
    keep = torch.rand(1, 60, generator=torch.Generator().manual_seed(0)) < 0.6
    dirty = []
    for x in inputs:
        bad = torch.full_like(x, torch.nan)
        dirty.append(torch.where(keep.view(1, 60, *[1] * (x.dim() - 2)), x, bad))
    y, after = rule(
        *dirty,
        state=state,
        return_state=True,
        key_mask=keep,
        implementation=implementation,
    )
    short = [x[:, keep[0]] for x in inputs]
    wanted, wanted_after = rule(
        *short, state=state, return_state=True, implementation="naive"
    )
    assert not y[:, ~keep[0]].any()
    assert error(y[:, keep[0]], wanted) < 1e-10
    for a, b in zip(parts(after), parts(wanted_after), strict=True):
        assert error(a, b) < 1e-10
    gradients = torch.autograd.grad(weighted(y), inputs)
    assert all(torch.isfinite(g).all() for g in gradients)
    assert all(not g[:, ~keep[0]].any() for g in gradients)


@rules
@pytest.mark.parametrize("implementation", ["naive", "efficient"])
def test_scale_multiplies_q(rule, implementation):
    inputs, _ = problem(rule, 20)
    q, *rest = inputs
    y = rule(q, *rest, scale=0.3, implementation=implementation)
    assert error(y, rule(0.3 * q, *rest, implementation="naive")) < 1e-12


@pytest.mark.parametrize("implementation", ["naive", "efficient"])
@pytest.mark.parametrize("op", [ops.sum_rule, ops.delta_rule])
def test_empty_denominators_give_zero(op, implementation):
    """0/0 is 0 with gradient 0, for zero keys and for disjoint ones."""
    q = torch.tensor([[0.0, 0, 0], [0, 1, 0], [1, 0, 0]], dtype=torch.float64)
    k = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.float64)
    q, k = (x.view(1, 3, 1, 3).requires_grad_() for x in (q, k))
    v = torch.arange(6, dtype=torch.float64).view(1, 3, 1, 2) + 1
    gates = (torch.full((1, 3, 1), 0.5, dtype=torch.float64),)
    gates = gates if op is ops.delta_rule else ()
    y = op(q, k, v, *gates, normalize=True, implementation=implementation)
    assert not y[:, :2].any()
    assert y[0, 2, 0].tolist() == ([1.5, 2.0] if gates else [3.0, 4.0])
    gradients = torch.autograd.grad(weighted(y), [q, k])
    assert all(torch.isfinite(g).all() for g in gradients)
    assert not gradients[0][:, :2].any()


@pytest.mark.parametrize("implementation", ["naive", "efficient"])
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-6, 1e15])
@pytest.mark.parametrize("name", ["sum-normalized", "delta-normalized"])
def test_normalized_rules_do_not_see_the_scale(name, scale, implementation):
    """In float32, down to where the numbers themselves end."""
    inputs, _ = problem(RULES[name], 50, dtype=torch.float32, with_state=False)
    q, k, *rest = inputs
    wanted = RULES[name](*inputs, implementation="naive")
    found = RULES[name](q * scale, k * scale, *rest, implementation=implementation)
    assert error(found, wanted) < 1e-5


@rules
def test_the_same_without_gradients(rule):
    """Then no states are kept, and nothing else changes."""
    inputs, state = problem(rule, 300)
    whole = rule(*inputs, state=state, return_state=True)
    with torch.no_grad():
        alone = rule(*inputs, state=state, return_state=True)
    assert torch.equal(whole[0], alone[0])
    for a, b in zip(parts(whole[1]), parts(alone[1]), strict=True):
        assert torch.equal(a, b)


def test_closed_form():
    """One chunk is the whole: U = (I + stril(b K K'))^-1 b V."""
    (q, k, v, beta), _ = problem(RULES["delta"], 40, batch=1, heads=1, with_state=False)
    Q, K, V, b = (x.detach()[0, :, 0] for x in (q, k, v, beta))
    A = (b[:, None] * (K @ K.T)).tril(-1)
    U = torch.linalg.solve(torch.eye(40, dtype=torch.float64) + A, b[:, None] * V)
    Y = (Q @ K.T).tril() @ U
    for implementation in ("naive", "efficient"):
        y = ops.delta_rule(q, k, v, beta, implementation=implementation)
        assert error(y[0, :, 0], Y) < 1e-12


@pytest.mark.parametrize("implementation", ["naive", "efficient"])
def test_appendix_b(implementation):
    """The delta rule leaves an unrelated key exactly alone."""
    keys = torch.eye(4, dtype=torch.float64)[:2]
    v = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.float64)
    k = keys[[0, 1, 1]]
    beta = torch.tensor([1.0, 1.0, 0.25], dtype=torch.float64)
    _, W = ops.delta_rule(
        k[None, :, None],
        k[None, :, None],
        v[None, :, None],
        beta[None, :, None],
        return_state=True,
        implementation=implementation,
    )
    assert torch.equal(W[0, 0] @ keys[0], v[0])
    assert torch.equal(W[0, 0] @ keys[1], 0.75 * v[1] + 0.25 * v[2])


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
    assert first[1] <= first[0] + 1
    assert bad[1][first[1] :].all()
    exact = ops.delta_rule(
        *(x.double() for x in (q, 3 * k, v, beta)), implementation="naive"
    )[0, :, 0]
    for step in range(first[1]):
        assert error(results[1][step], exact[step]) < 1e-2


@rules
def test_what_is_kept_for_backward(rule):
    """Inputs, outputs and one state per chunk; never one per step."""
    kept = {}
    for name in ("naive", "efficient"):
        for time in (512, 1024):
            inputs, _ = problem(
                rule, time, batch=1, heads=1, key=32, value=32, with_state=False
            )
            seen = {}

            def pack(x, seen=seen):
                seen[x.data_ptr(), x.untyped_storage().data_ptr()] = x.numel()
                return x

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                rule(*inputs, implementation=name)
            kept[name, time] = sum(seen.values())
    assert kept["efficient", 1024] < 2.1 * kept["efficient", 512]
    assert kept["efficient", 1024] * 4 < kept["naive", 1024]


@rules
def test_autocast(rule):
    """Under autocast the sums stay in float32."""
    inputs, _ = problem(rule, 100, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = rule(*inputs)
        q = inputs[0] @ torch.eye(6)  # a bfloat16 product, as in a layer
        mixed = rule(q, *inputs[1:])
        gradients = torch.autograd.grad(weighted(found), inputs)
    assert torch.equal(found, rule(*inputs))
    assert mixed.dtype == torch.float32
    assert error(mixed, found) < 2e-2
    # The backward pass, too, wherever it is called.
    for a, b in zip(
        gradients, torch.autograd.grad(weighted(rule(*inputs)), inputs), strict=True
    ):
        assert torch.equal(a, b)


def test_torch_compile():
    (q, k, v, beta), _ = problem(RULES["delta"], 40)
    compiled = torch.compile(
        lambda *x: ops.delta_rule(*x).sin().sum(), backend="aot_eager"
    )
    found = torch.autograd.grad(compiled(q, k, v, beta), [q, k, v, beta])
    wanted = torch.autograd.grad(
        ops.delta_rule(q, k, v, beta).sin().sum(), [q, k, v, beta]
    )
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b) < 1e-12


def test_detach():
    import fwlab

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
    assert ops.implementations("delta_rule") == ("naive", "efficient")
    with pytest.raises(ValueError, match="delta_rul'"):
        ops.implementations("delta_rul")


def bad(**changes):
    x = torch.zeros(2, 7, 3, 4)
    arguments = {"q": x, "k": x, "v": x, "beta": x[..., 0], **changes}
    q, k, v, beta = (arguments.pop(name) for name in ("q", "k", "v", "beta"))
    return lambda: ops.delta_rule(q, k, v, beta, **arguments)


@pytest.mark.parametrize(
    ("call", "error_type", "message"),
    [
        (bad(k=torch.zeros(2, 5, 3, 4)), ValueError, r"k has shape \[2, 5, 3, 4\].*\[2, 7, 3, 4\]"),
        (bad(v=torch.zeros(2, 7, 4)), ValueError, r"v has shape \[2, 7, 4\].*\[2, 7, 3, value\]"),
        (bad(beta=torch.zeros(2, 7, 3, 1)), ValueError, r"beta has shape .*\[2, 7, 3\]"),
        (bad(q=torch.zeros(2, 7, 3, 4).long()), TypeError, "q has dtype int64"),
        (bad(v=torch.zeros(2, 7, 3, 4).double()), TypeError, "v has dtype float64, but q"),
        (bad(beta=0.5), TypeError, "beta must be a tensor, not float"),
        (bad(k=torch.zeros(2, 7, 3, 4, device="meta")), ValueError, "k is on meta"),
        (bad(state=torch.zeros(2, 3, 4, 5)), ValueError, r"state has shape .*\[2, 3, 4, 4\]"),
        (bad(state=torch.zeros(2, 3, 4, 4).double()), TypeError, "state has dtype float64"),
        (bad(state=torch.zeros(2, 3, 4, 4), normalize=True), TypeError, "NormalizedState"),
        (bad(key_mask=torch.ones(2, 7)), TypeError, "key_mask must be a bool"),
        (bad(key_mask=torch.ones(2, 6).bool()), ValueError, r"key_mask has shape \[2, 6\]"),
        (bad(scale="a"), TypeError, "scale must be a number, not 'a'"),
        (bad(implementation="cuda"), ValueError, "'cuda' is not available.*'naive', 'efficient'"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call, error_type, message):
    with pytest.raises(error_type, match=message) as info:
        call()
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state": 3}, "state must be a KeyValueCache"),
        ({"state": (None, None, None)}, "state.k must be a tensor"),
        ({"state": (torch.zeros(2, 3, 3, 4),) * 2 + (torch.ones(2, 3),)}, "bool"),
        ({"key_mask": torch.ones(2, 9)}, "key_mask must be a bool"),
        ({"implementation": "flash"}, "'flash' is not available"),
    ],
)
def test_softmax_errors(options, message):
    x = torch.zeros(2, 7, 3, 4)
    with pytest.raises((TypeError, ValueError), match=message):
        ops.softmax_attention(x, x, x, **options)
    mixed = ops.softmax_attention(x.bfloat16(), x, x)
    assert mixed.dtype == torch.float32


@pytest.mark.parametrize("implementation", ["naive", "efficient"])
def test_softmax_attention(implementation):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 9, 3, 4, generator=generator).double() for _ in range(3))
    y = ops.softmax_attention(q, k, v, implementation=implementation)
    for t in range(9):
        weights = torch.softmax(
            torch.einsum("bhk,bshk->bhs", q[:, t], k[:, : t + 1]) / 2, -1
        )
        wanted = torch.einsum("bhs,bshv->bhv", weights, v[:, : t + 1])
        assert error(y[:, t], wanted) < 1e-12
    state, pieces = None, []
    for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
        piece, state = ops.softmax_attention(
            q[:, part],
            k[:, part],
            v[:, part],
            state=state,
            return_state=True,
            implementation=implementation,
        )
        pieces.append(piece)
    assert error(torch.cat(pieces, 1), y) < 1e-12

    keep = torch.tensor([[False, True, False, True, True, True, False, True, True]] * 2)
    dirty = [torch.where(keep[..., None, None], x, torch.nan) for x in (q, k, v)]
    masked = ops.softmax_attention(*dirty, key_mask=keep, implementation=implementation)
    wanted = ops.softmax_attention(*(x[:, keep[0]] for x in (q, k, v)))
    assert not masked[:, ~keep[0]].any()
    assert error(masked[:, keep[0]], wanted) < 1e-12
    _, state = ops.softmax_attention(
        *(x[:, :5] for x in dirty), key_mask=keep[:, :5], return_state=True
    )
    rest = ops.softmax_attention(
        *(x[:, 5:] for x in dirty), key_mask=keep[:, 5:], state=state
    )
    assert error(rest, masked[:, 5:]) < 1e-12
