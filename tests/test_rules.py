"""The fast weight rules: identities and limits."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from fwlab import ops
from fwlab.feature_maps import l2_normalize, sum_normalize
from fwlab.ops.call.call import Variants
from fwlab.ops.call.rule import Rule
from fwlab.ops.parts import chunks
from problems import ROWS, error, outcome, parts, problem, rebuild, rules, weighted

both = pytest.mark.parametrize("implementation", ["naive", "chunked", "efficient"])


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


SCALED = ("sum", "gated", "delta", "gated-delta", "sum-normalized", "delta-normalized")


@both
@pytest.mark.parametrize("name", SCALED)
def test_scale_multiplies_q(name, implementation):
    row = ROWS[name]
    (q, *rest), _ = problem(row, 20)
    y = row(q, *rest, scale=0.3, implementation=implementation)
    assert error(y, row(0.3 * q, *rest, implementation="naive")) < 1e-12


@both
def test_scale_does_not_round_q(implementation):
    """A single rounding, that of the result."""
    (q, k, v), _ = problem(ROWS["sum"], 20, torch.bfloat16, with_state=False)
    rule = partial(ops.sum_rule, normalize=False)
    y = rule(q, k, v, scale=0.3, implementation=implementation).double()
    q, k, v = (x.detach().double() for x in (q, k, v))
    wanted = 0.3 * rule(q, k, v, implementation="naive")
    assert ((y - wanted).abs() <= 2**-8 * wanted.abs()).all()


GATES = {
    ops.sum_rule: (),
    ops.gated_rule: (0.5,),
    ops.delta_rule: (0.5,),
    ops.gated_delta_rule: (0.5, -0.1),
}


@both
@pytest.mark.parametrize("op", GATES)
def test_empty_denominators_give_zero(op, implementation):
    """0/0 is 0 with gradient 0, for zero keys and for disjoint ones."""
    q = torch.tensor([[0.0, 0, 0], [0, 1, 0], [1, 0, 0]], dtype=torch.float64)
    k = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.float64)
    q, k = (x.view(1, 3, 1, 3).requires_grad_() for x in (q, k))
    v = torch.arange(6, dtype=torch.float64).view(1, 3, 1, 2) + 1
    gates = [torch.full((1, 3, 1), g, dtype=torch.float64) for g in GATES[op]]
    y = op(q, k, v, *gates, normalize=True, implementation=implementation)
    assert not y[:, :2].any()
    # The one key that was met; the delta rules wrote half of its value.
    half = op in (ops.delta_rule, ops.gated_delta_rule)
    wanted = [1.5, 2.0] if half else [3.0, 4.0]
    assert y[0, 2, 0].tolist() == pytest.approx(wanted, rel=1e-15)
    gradients = torch.autograd.grad(weighted(y), [q, k])
    assert all(torch.isfinite(g).all() for g in gradients)
    assert not gradients[0][:, :2].any()


@both
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-6, 1e15])
@pytest.mark.parametrize("name", ["sum-normalized", "delta-normalized"])
def test_normalized_rules_do_not_see_the_scale(name, scale, implementation):
    """In float32, down to its smallest numbers."""
    inputs, _ = problem(ROWS[name], 50, dtype=torch.float32, with_state=False)
    q, k, *rest = inputs
    wanted = ROWS[name](*inputs, implementation="naive")
    found = ROWS[name](q * scale, k * scale, *rest, implementation=implementation)
    assert error(found, wanted) < 1e-5


@both
@pytest.mark.parametrize("time", [1, 40])
@pytest.mark.parametrize("name", rules.ROWS)
def test_grouped_heads(name, time, implementation):
    """Two queries read each memory: as two calls with one query each."""
    row = rules.ROWS[name]
    (first, *rest), state = problem(row, time)
    (second, *_), _ = problem(row, time, seed=1)
    keep = torch.arange(time).expand(2, time) % 7 != 3
    given = {
        "state": state,
        "return_state": True,
        "key_mask": keep,
        "implementation": implementation,
    }

    def outcome(y, after):
        loss = weighted(y, *parts(after))
        leaves = [first, second, *rest, *parts(state)]
        return [y, *parts(after), *torch.autograd.grad(loss, leaves)]

    def both_queries():
        return torch.stack([first, second], 3).flatten(2, 3)

    found = outcome(*row(both_queries(), *rest, **given))
    (one, after), (two, _) = (row(q, *rest, **given) for q in (first, second))
    wanted = outcome(torch.stack([one, two], 3).flatten(2, 3), after)
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b) < 1e-10
    # A single step without gradients has a form of its own.
    with torch.no_grad():
        y, after = row(both_queries(), *rest, **given)
    for a, b in zip([y, *parts(after)], found, strict=False):
        assert error(a, b) < 1e-12
        assert a.untyped_storage().nbytes() == a.nbytes


@both
@pytest.mark.parametrize("time", [1, 70])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", rules.ROWS)
def test_states_own_their_memory(name, size, time, implementation):
    """A view would keep all that it is a view of. Only the gradients of W
    and z may be parts of one tensor, which has nothing else.
    """
    row = rules.ROWS[name]
    (q, *rest), state = problem(row, time)
    q, *rest = (
        x[:size].narrow(x.shape.index(rules.HEADS, 2), 0, size).detach()
        for x in (q, *rest)
    )
    state = rebuild(state, lambda x: x[:size, :size].detach().requires_grad_())
    for queries in (q, q.repeat_interleave(2, 2)):
        for gradients in (False, True):
            with torch.set_grad_enabled(gradients):
                y, after = row(
                    queries,
                    *rest,
                    state=state,
                    return_state=True,
                    implementation=implementation,
                )
            for part in parts(after):
                assert part.untyped_storage().nbytes() == part.nbytes
        loss = weighted(y, *parts(after))
        found = torch.autograd.grad(loss, parts(state))
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in found}
        held = sum(storage.nbytes() for storage in storages.values())
        if torch.__version__ >= (2, 7):  # 2.6 keeps 48 bytes more in some rules
            assert held == sum(x.nbytes for x in found)


@both
def test_grouped_heads_without_steps(implementation):
    (q, *rest), W = problem(ROWS["delta"], 0)
    q = q.detach().repeat_interleave(2, 2).requires_grad_()
    y, after = ops.delta_rule(
        q, *rest, state=W, return_state=True, implementation=implementation
    )
    assert y.shape == (2, 0, 6, 5) and torch.equal(after, W)
    assert torch.autograd.grad(y.sum(), q)[0].shape == q.shape


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


def test_closed_form():
    """One chunk is the whole: U = (I + stril(b K K'))^-1 b V."""
    (q, k, v, beta), _ = problem(ROWS["delta"], 40, with_state=False)
    Q, K, V, b = (x.detach()[0, :, 0] for x in (q, k, v, beta))
    A = (b[:, None] * (K @ K.T)).tril(-1)
    U = torch.linalg.solve(torch.eye(40, dtype=torch.float64) + A, b[:, None] * V)
    Y = (Q @ K.T).tril() @ U
    for implementation in ("naive", "efficient"):
        y = ops.delta_rule(q, k, v, beta, implementation=implementation)
        assert error(y[0, :, 0], Y) < 1e-12


@both
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
    assert first[0] - 64 < first[1] <= first[0] + 1  # within a chunk
    assert bad[1][first[1] :].all()
    exact = ops.delta_rule(
        *(x.double() for x in (q, 3 * k, v, beta)), implementation="naive"
    )[0, :, 0]
    for step in range(first[1]):
        assert error(results[1][step], exact[step]) < 1e-2


@both
def test_appendix_b_of_the_gated_rule(implementation):
    """The gated rule fades an unrelated key by exactly 1 - beta."""
    keys = torch.eye(4, dtype=torch.float64)[:2]
    v = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.float64)
    W = v[:2].T @ keys
    _, W = ops.gated_rule(
        keys[1].view(1, 1, 1, 4),
        keys[1].view(1, 1, 1, 4),
        v[2].view(1, 1, 1, 3),
        torch.full((1, 1, 1), 0.25, dtype=torch.float64),
        state=W[None, None],
        return_state=True,
        implementation=implementation,
    )
    assert torch.equal(W[0, 0] @ keys[0], 0.75 * v[0])
    assert torch.equal(W[0, 0] @ keys[1], 0.75 * v[1] + 0.25 * v[2])


@both
def test_special_cases(implementation):
    """No decay: the delta rule. No strength: pure decay. Orthonormal keys
    and full strength: the sum rule.
    """
    (q, k, v, beta, log_decay), W = problem(ROWS["gated-delta"], 40)

    def gated(beta, log_decay):
        return ops.gated_delta_rule(
            q,
            k,
            v,
            beta,
            log_decay,
            state=W,
            return_state=True,
            implementation=implementation,
        )

    plain = ops.delta_rule(q, k, v, beta, state=W, implementation=implementation)
    assert error(gated(beta, 0 * log_decay)[0], plain) < 1e-14
    _, faded = gated(0 * beta, log_decay)
    assert error(faded, W * log_decay.sum(1).exp()[..., None, None]) < 1e-12

    keys = torch.linalg.qr(random(8, 8)).Q.view(1, 8, 1, 8)
    q, v, one = random(1, 8, 1, 8), random(1, 8, 1, 5, seed=1), keys.new_ones(1, 8, 1)
    delta = ops.delta_rule(q, keys, v, one, implementation=implementation)
    added = ops.sum_rule(q, keys, v, normalize=False, implementation=implementation)
    assert error(delta, added) < 1e-12


@both
def test_gate_of_random_feature_attention(implementation):
    """Peng et al. 2021: the first output is the first value for any gate;
    a constant gate weights by g^(t-i); g_t = (t-1)/t equals no gate.
    """
    time, g = 12, 0.7
    q, k = random(2, time, 3, 4).abs(), random(2, time, 3, 4, seed=1).abs()
    v = random(2, time, 3, 5, seed=2)

    def gated(gate):
        beta = (1 - torch.as_tensor(gate, dtype=torch.float64)).expand(2, time)
        beta = beta[..., None].expand(2, time, 3)
        return ops.gated_rule(
            q, k, v, beta, normalize=True, implementation=implementation
        )

    assert error(gated(g)[:, 0], v[:, 0]) < 1e-12
    place = torch.arange(time).double()
    fading = (g ** (place[:, None] - place)).tril()
    weights = torch.einsum("bthk,bshk,ts->bhts", q, k, fading)
    weights = weights / weights.sum(-1, keepdim=True)
    assert error(gated(g), torch.einsum("bhts,bshv->bthv", weights, v)) < 1e-12
    ungated = ops.sum_rule(q, k, v, implementation=implementation)
    assert error(gated(place / (place + 1)), ungated) < 1e-12


@both
@pytest.mark.parametrize("name", ["gated", "gated-normalized"])
def test_full_strength_forgets_everything(name, implementation):
    """beta = 1 is a decay of exactly 0: no trace of what was before."""
    inputs, state = problem(ROWS[name], 20)
    with torch.no_grad():
        inputs[3][:, 9] = 1
        y = ROWS[name](*inputs, state=state, implementation=implementation)
        rest = ROWS[name](*(x[:, 9:] for x in inputs), implementation=implementation)
    assert error(y[:, 9:], rest) < 1e-12


@both
@pytest.mark.parametrize("log_decay", [0.0, -1e-4, -20.0, -1e4, -torch.inf])
def test_extreme_decays(log_decay, implementation):
    """In float32, also next to ordinary keys, which must stay exact."""
    inputs, state = problem(ROWS["gated-delta"], 70, torch.float32)
    with torch.no_grad():
        inputs[4][:, 5::8] = log_decay
    y, after = ROWS["gated-delta"](
        *inputs, state=state, return_state=True, implementation=implementation
    )
    exact = [x.double() for x in inputs]
    wanted, _ = ROWS["gated-delta"](
        *exact, state=state.double(), return_state=True, implementation="naive"
    )
    assert error(y, wanted) < 1e-6
    gradients = torch.autograd.grad(weighted(y, after), inputs)
    assert all(torch.isfinite(g).all() for g in gradients)


def kimi(dtype, implementation, values):
    """Outputs, final state and gradients over several chunks and a ragged
    one, with all values in each of them.
    """
    time, heads, key = 5 * chunks.LENGTH + 7, 2, 6
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(values), (2, time, heads, key), generator=generator)
    log_decay = torch.tensor(values, dtype=torch.float64)[places]
    q, k = (l2_normalize(random(2, time, heads, key, seed=i)) for i in (0, 1))
    v, W = random(2, time, heads, 5, seed=2), random(2, heads, 5, key, seed=3)
    beta = torch.rand(2, time, heads, generator=generator).double()
    # The reference gets what float32 can hold.
    *given, W = (
        x.float().to(dtype).requires_grad_() for x in (q, k, v, beta, log_decay, W)
    )
    y, after = ops.kimi_delta_rule(
        *given, state=W, return_state=True, implementation=implementation
    )
    loss = weighted(y, after)
    return [y, after, *torch.autograd.grad(loss, [*given, W])]


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-9), (torch.float32, 2e-5)]
)
@pytest.mark.parametrize(
    "values", [(0.0, -2.0, -20.0, -200.0), (0.0,), (-20.0,)], ids=str
)
@pytest.mark.parametrize("implementation", ["chunked", "efficient"])
def test_decays_of_any_strength_per_channel(implementation, values, dtype, limit):
    """Weak and strong ones mixed within a chunk. The gradient of a decay
    of e^-20 is tiny, and has as many correct digits as any other.
    """
    exact = kimi(torch.float64, "naive", values)
    found = kimi(dtype, implementation, values)
    names = ("y", "W", "dq", "dk", "dv", "dbeta", "dlog_decay", "dW0")
    for name, a, b in zip(names, found, exact, strict=True):
        assert torch.isfinite(a).all() and error(a, b) < limit, name


@both
def test_special_cases_of_kimi_delta_attention(implementation):
    """One decay for all channels: the gated delta rule. None: the delta rule."""
    (q, k, v, beta, log_decay), W = problem(ROWS["gated-delta"], 70)
    given = {"state": W, "return_state": True, "implementation": implementation}
    for fading in (log_decay, 0 * log_decay):
        wide = fading[..., None].expand_as(k)
        found = ops.kimi_delta_rule(q, k, v, beta, wide, **given)
        wanted = ops.gated_delta_rule(q, k, v, beta, fading, **given)
        assert all(error(a, b) < 1e-12 for a, b in zip(found, wanted, strict=True))
    plain = ops.delta_rule(q, k, v, beta, **given)
    assert all(error(a, b) < 1e-12 for a, b in zip(found, plain, strict=True))


@both
def test_a_channel_that_is_emptied(implementation):
    """A log decay of minus infinity empties one channel, and leaves the
    others as they are.
    """
    (q, k, v, beta, log_decay), W = problem(ROWS["kimi-delta"], 40)
    with torch.no_grad():
        log_decay.zero_()
        log_decay[:, 33, :, 2] = -torch.inf
        _, after = ops.kimi_delta_rule(
            q,
            k,
            v,
            0 * beta,
            log_decay,
            state=W,
            return_state=True,
            implementation=implementation,
        )
    assert not after[..., 2].any()
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(after[..., kept], W[..., kept])


@pytest.mark.parametrize(
    ("decay", "level"), [(-100.0, 5.0), (-40.0, 5.0), (0.0, 1e-42)]
)
def test_a_normalizer_near_the_end_of_its_range(decay, level):
    """z . k is tiny: the reading is a mean all the same, and stays one."""
    generator = torch.Generator().manual_seed(0)
    q, k = (sum_normalize(torch.rand(1, 12, 1, 4, generator=generator)) for _ in "qk")
    if level < 1:
        k = k.where(torch.rand(k.shape, generator=generator) < 0.5, level)
    v = torch.randn(1, 12, 1, 4, generator=generator)
    beta = torch.rand(1, 12, 1, generator=generator)
    log_decay = torch.zeros(1, 12, 1)
    log_decay[:, 8] = decay
    given = [x.requires_grad_() for x in (q, k, v, beta, log_decay)]
    naive, found = (
        ops.gated_delta_rule(*given, normalize=True, implementation=name)
        for name in ("naive", "efficient")
    )
    # In float32 the loop itself loses digits there.
    exact = ops.gated_delta_rule(
        *(x.double() for x in given), normalize=True, implementation="naive"
    )
    assert torch.isfinite(naive).all()
    assert error(found, exact) < 1e-5
    for gradient, wanted in zip(
        *(torch.autograd.grad(weighted(y), given) for y in (found, naive)), strict=True
    ):
        held = torch.isfinite(wanted)
        assert torch.isfinite(gradient[held]).all()


@both
def test_relatives_of_the_delta_rule(implementation):
    """Where their gates agree, rules that correct are one rule."""
    (q, k, v, beta, log_decay), W = problem(ROWS["gated-delta"], 40)
    options = {"state": W, "return_state": True, "implementation": implementation}

    def same(one, other):
        assert all(error(a, b) < 1e-12 for a, b in zip(one, other, strict=True))

    gated = ops.gated_delta_rule(q, k, v, beta, log_decay, **options)
    same(
        ops.comba_rule(q, k, v, beta, log_decay, torch.ones_like(beta), **options),
        gated,
    )
    wide = log_decay[..., None].expand_as(k)
    erase, write = (beta[..., None].expand_as(x) for x in (k, v))
    same(ops.gated_delta_rule_2(q, k, v, erase, write, wide, **options), gated)
    one = (x.unsqueeze(2) for x in (k, v, beta))
    same(ops.delta_product(q, *one, log_decay, **options), gated)
    # Two steps with one decay, and half of the time.
    pairs = (x.unflatten(1, (-1, 2)) for x in (k, v, beta))
    plain = ops.delta_rule(q, k, v, beta, **options)
    two = ops.delta_product(q[:, 1::2], *pairs, **options)
    same(two, (plain[0][:, 1::2], plain[1]))
    # The product of RWKV-7 takes the place of the correction.
    b, bv = beta[..., None] * k, beta[..., None] * v
    moved = ops.rwkv7_rule(q, k, bv, -k, b, torch.zeros_like(k), **options)
    same(moved, plain)
    length = k.square().sum(-1)
    step = beta / (1 + beta * length)
    same(
        ops.implicit_delta_rule(q, k, v, beta, **options),
        ops.delta_rule(q, k, v, step, **options),
    )


@both
def test_an_implicit_step_is_never_too_long(implementation):
    """The delta rule diverges with these keys."""
    q, k, v = (random(1, 200, 2, 6, seed=i) for i in range(3))
    beta = torch.full((1, 200, 2), 5.0, dtype=torch.float64)
    y = ops.implicit_delta_rule(q, 30 * k, v, beta, implementation=implementation)
    assert y.abs().max() < 50


@both
@pytest.mark.parametrize("log_decay", [-torch.inf, -200.0, -90.0])
def test_what_is_asked_before_it_fades(log_decay, implementation):
    """RWKV-7 moves what a channel held, even if that is now emptied, and in
    float32 any quotient with its decay would overflow.
    """
    row = ROWS["rwkv7"]
    inputs, W = problem(row, 70, torch.float32)
    with torch.no_grad():
        inputs[5][:, ::3, :, 2] = log_decay
        inputs[5][:, 40] = log_decay
    found = outcome(row, inputs, W, implementation)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    state = W.detach().double().requires_grad_()
    for a, b in zip(found, outcome(row, exact, state, "naive"), strict=True):
        assert torch.isfinite(a).all() and error(a, b) < 1e-5


@both
def test_what_is_asked_before_it_fades_of_one_channel(implementation):
    """A decay per channel is no decay per head, even if there is one channel."""
    inputs, W = problem(ROWS["rwkv7"], 9)
    inputs = [x if x.shape[-1] == 5 else x[..., :1] for x in inputs]
    found, wanted = (
        ops.rwkv7_rule(*inputs, state=W[..., :1], implementation=name)
        for name in (implementation, "naive")
    )
    assert error(found, wanted) < 1e-12


@both
def test_two_reflections_are_a_rotation(implementation):
    """DeltaProduct with strengths of 2 turns the memory by twice the angle of
    its keys; one step cannot.
    """
    angle = torch.tensor(0.3, dtype=torch.float64)
    first = torch.tensor([1.0, 0.0], dtype=torch.float64)
    second = torch.stack([angle.cos(), angle.sin()])
    k = torch.stack([first, second]).view(1, 1, 2, 1, 2)
    v, beta = torch.zeros_like(k), torch.full((1, 1, 2, 1), 2.0, dtype=torch.float64)
    W = torch.eye(2, dtype=torch.float64)[None, None]
    _, W = ops.delta_product(
        *(k[:, :, 0], k, v, beta),
        state=W,
        return_state=True,
        implementation=implementation,
    )
    turned = torch.stack([(2 * angle).cos(), (2 * angle).sin()])
    assert error(W[0, 0] @ first, turned * torch.tensor([1.0, -1.0])) < 1e-12


def test_a_state_comes_only_if_asked_for():
    for name, row in rules.ROWS.items():
        inputs, _ = problem(row, 3, with_state=False)
        assert isinstance(row(*inputs), torch.Tensor), name


#: One step by hand, from W = (1, 2) and read with (1, 1): the arguments after q,
#: W after the step, and what is read.
BY_HAND = {
    # (1, 2) is halved in channel 1, quartered in 2; 2 * (1, 2) is added.
    "sum_rule": (
        [(1, 2), [2], {"log_decay": (math.log(1 / 2), math.log(1 / 4))}],
        (2.5, 4.5),
        7,
    ),
    # |k|^2 = 4, so a fifth of 7 - 2 is written.
    "implicit_delta_rule": ([(2, 0), [7], 1], (3, 2), 5),
    # A third of 1/2 + 1 is retrieved; half of 5/2 - 1/2 is written.
    "comba_rule": ([(1, 1), [2.5], 1 / 2, math.log(1 / 2), 1 / 3], (1.5, 2), 3.5),
    # From (1/2, 2), (2, 1/2) retrieves 2; half of 6, less that, is written.
    "gated_delta_rule_2": (
        [(2, 1), [6], (1, 1 / 2), [1 / 2], (math.log(1 / 2), 0)],
        (2.5, 3),
        5.5,
    ),
    # (1/2, 1), then 1 under (1, 0), then half of 9/2 - 5/2 under (1, 1).
    "delta_product": (
        [[(1, 0), (1, 1)], [[1.5], [4.5]], [1, 1 / 2], math.log(1 / 2)],
        (2.5, 2),
        4.5,
    ),
    # (1/2, 0) keeps half of channel 1; 1 - 2 goes to (1, 2); then 3 (1, 1).
    "rwkv7_rule": (
        [(1, 1), [3], (1, -1), (1, 2), (math.log(1 / 2), -math.inf)],
        (2.5, 1),
        3.5,
    ),
}


@both
@pytest.mark.parametrize("rule", BY_HAND)
def test_one_step_by_hand(rule, implementation):
    arguments, after, read = BY_HAND[rule]
    *arguments, last = arguments
    options = last if isinstance(last, dict) else {}
    arguments += [] if options else [last]

    def of(x):
        """`[1, 1, steps?, 1, width?]`: gates per head have no width."""
        x = torch.tensor(x, dtype=torch.float64)
        if rule == "delta_product" and x.dim():
            return x[None, None, :, None]
        return x[None, None, None]

    options = {name: of(x) for name, x in options.items()}
    if rule == "sum_rule":
        options["normalize"] = False
    y, W = getattr(ops, rule)(
        torch.ones(1, 1, 1, 2, dtype=torch.float64),
        *map(of, arguments),
        **options,
        state=torch.tensor([[[[1.0, 2.0]]]], dtype=torch.float64),
        return_state=True,
        implementation=implementation,
    )
    torch.testing.assert_close(W.flatten(), torch.tensor(after).double())
    torch.testing.assert_close(y.item(), float(read))


def leaky(q, k, v, beta, W):
    """A rule of a contributor: fades by a constant, and writes under moved keys."""
    y = []
    for q_t, k_t, v_t, b_t in zip(*(x.unbind(1) for x in (q, k, v, beta)), strict=True):
        W = 0.9 * W + (b_t[..., None] * v_t)[..., None] * (k_t + 0.5)[..., None, :]
        y.append((W * q_t[..., None, :]).sum(-1))
    return torch.stack(y, 1), W


def leaky_mean(q, k, v, beta, W, z):
    y = []
    for q_t, k_t, v_t, b_t in zip(*(x.unbind(1) for x in (q, k, v, beta)), strict=True):
        W = 0.9 * W + (b_t[..., None] * v_t)[..., None] * (k_t + 0.5)[..., None, :]
        z = 0.9 * z + b_t[..., None] * (k_t + 0.5)
        y.append((W * q_t[..., None, :]).sum(-1) / (z * q_t).sum(-1, keepdim=True))
    return torch.stack(y, 1), W, z


def constants(k, beta, **_):
    beta = beta[..., None]
    return {"decay": torch.full_like(beta, 0.9), "strength": beta, "k": k + 0.5}


@both
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_masked_step_of_a_rule_with_constants(implementation, normalize, packed):
    """It is as if the token were not there, whatever a rule does with zeros; and so
    are the steps that fill up a document.
    """
    implementations = ops.TABLE["gated_rule"].implementations
    rule = replace(
        ops.TABLE["gated_rule"],
        implementations={**implementations, "naive": Variants(leaky, leaky_mean)},
        inputs=constants,
    )
    q, k, v = (random(1, 40, heads, 3, seed=heads).abs() for heads in (4, 2, 2))
    beta, W, z = random(1, 40, 2).abs(), random(2, 2, 3, 3), random(2, 2, 3).abs()
    keep, cuts = random(1, 40) < 0.4, [0, 11, 40] if packed else [0, 40]
    state = (
        [W, z][: 1 + normalize] if packed else [x[:1] for x in (W, z)[: 1 + normalize]]
    )
    y, after = rule(
        q,
        k,
        v,
        {"beta": beta},
        normalize=normalize,
        key_mask=keep,
        cu_seqlens=torch.tensor(cuts) if packed else None,
        state=ops.NormalizedState(*state) if normalize else state[0],
        return_state=True,
        implementation=implementation,
    )
    for i, (start, stop) in enumerate(pairwise(cuts)):
        real = torch.arange(start, stop)[keep[0, start:stop]]
        wide = [x[:, real].repeat_interleave(2, 2) for x in (k, v, beta)]
        copies = [x[i : i + 1].repeat_interleave(2, 1) for x in state]
        loop = leaky_mean if normalize else leaky
        wanted, *end = loop(q[:, real], *wide, *copies)
        assert error(y[:, real], wanted) < 1e-12
        for found, right in zip(parts(after), end, strict=True):
            assert error(found[i : i + 1], right[:, ::2]) < 1e-12
    assert not y[~keep].any()


#: Rules with a gate that has limits, and its name.
LIMITED = {
    record.name: gate
    for record in ops.TABLE.values()
    if isinstance(record, Rule)
    for gate, about in record.gates.items()
    if (about.least, about.most) != (None, None)
}


@pytest.mark.parametrize("implementation", ["auto", "naive", "chunked", "efficient"])
@pytest.mark.parametrize("name", LIMITED)
def test_a_gate_out_of_its_range(name, implementation):
    """A decay in place of its logarithm; but not in a masked step."""
    record, g = ops.TABLE[name], torch.Generator().manual_seed(0)
    gate, call = (
        LIMITED[name],
        partial(getattr(ops, name), implementation=implementation),
    )
    optional = {gate: "heads"} if record.gates[gate].optional else {}
    x = record.example(g, optional, batch=2, time=6, heads=2, key=3, value=3)
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
