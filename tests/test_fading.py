"""Normalised rules whose memory fades: their means are right at any decay."""

from dataclasses import replace

import pytest
import torch

from fwlab import ops
from fwlab.feature_maps import ELU1
from fwlab.ops.additive.rules.gated import GATED_RULE, decay_and_strength
from fwlab.ops.parts.state import NormalizedState

RULES = ("sum_rule", "gated_rule", "gated_delta_rule")
PLAIN = ("naive", "chunked", "efficient")
NAMES = ("q", "k", "v", "beta", "log_decay", "W", "z")


def called(rule, implementation, q, k, v, beta, log_decay, W, z):
    gates = {"beta": beta, "log_decay": log_decay}
    if rule == "sum_rule":
        del gates["beta"]
    return getattr(ops, rule)(
        *(q, k, v),
        **gates,
        normalize=True,
        state=NormalizedState(W, z),
        return_state=True,
        implementation=implementation,
    )


def written_out(rule, q, k, v, beta, log_decay, W, z):
    """The recurrences, step by step; float64 reaches to a decay of e^-700."""

    def read(x):
        total = (z * x).sum(-1, keepdim=True)
        found = torch.einsum("bhvk,bhk->bhv", W, x)
        return torch.where(total == 0, 0, found / torch.where(total == 0, 1, total))

    y = []
    for q_t, k_t, v_t, b_t, l_t in zip(
        *(x.unbind(1) for x in (q, k, v, beta[..., None], log_decay.exp()[..., None])),
        strict=True,
    ):
        W, z, u, s = W * l_t[..., None], z * l_t, v_t, 1
        if rule == "gated_rule":
            W, z, u, s = W * (1 - b_t)[..., None], z * (1 - b_t), b_t * v_t, b_t
        if rule == "gated_delta_rule":
            u = b_t * (v_t - read(k_t))
        W, z = W + u[..., None] * k_t[..., None, :], z + s * k_t
        y.append(read(q_t))
    return torch.stack(y, 1)


def relative(found, target):
    """An error, in relation to its target or to 1: some gradients cancel out."""
    return (found.double() - target).norm().item() / max(1.0, target.norm().item())


@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("rule", RULES)
def test_one_pair_is_remembered(rule, implementation):
    """Its sum was a subnormal number from e^-87 on, and 0 after e^-103."""
    for faded in (-60, -89, -95, -103, -150, -1e4):
        remembered(rule, implementation, faded)


def remembered(rule, implementation, faded):
    k, strength = torch.zeros(1, 5, 1, 1), torch.zeros(1, 5, 1)
    k[:, 0], strength[:, 0] = 1, 1
    v = torch.tensor([3.0, 5, 7, 11, 13]).view(1, 5, 1, 1)
    given = [torch.ones_like(k), k, v, strength, torch.full((1, 5, 1), faded / 4)]
    given += [torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1)]
    for x in given:
        x.requires_grad_()
    y, state = called(rule, implementation, *given)
    torch.testing.assert_close(y, torch.full_like(y, 3.0))
    # Nothing more is written, and it fades as far again.
    nothing = [given[0], 0 * k, v, 0 * strength, given[4], *state]
    later, _ = called(rule, implementation, *nothing)
    torch.testing.assert_close(later, y)
    # Nor step by step, where the state alone says whether it needs a unit.
    for t in range(5):
        step = (x[:, t : t + 1] for x in nothing[:5])
        later, state = called(rule, implementation, *step, *state)
        torch.testing.assert_close(later, y[:, t : t + 1])
    dq, dk, dv, db, dl, *_ = torch.autograd.grad(y.sum(), given, allow_unused=True)
    torch.testing.assert_close(dv.flatten(), torch.tensor([5.0, 0, 0, 0, 0]))
    for each in (dq, dk[:, 0], dl):
        torch.testing.assert_close(each, torch.zeros_like(each), atol=1e-4, rtol=0)
    assert dk.isfinite().all() and (db is None or db.isfinite().all())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", RULES)
def test_long_pauses(rule, seed):
    """Sums that reach e^-200, in a stream of two calls, in float32."""
    g = torch.Generator().manual_seed(seed)
    time, heads, key = 120, 2, 4
    writes = torch.rand(1, time, heads, 1, generator=g) < (0.1, 0.5)[seed % 2]
    given = [
        torch.rand(1, time, heads, key, generator=g).double() + 0.1,
        writes * (torch.rand(1, time, heads, key, generator=g).double() + 0.1),
        torch.randn(1, time, heads, 3, generator=g).double(),
        writes[..., 0] * torch.rand(1, time, heads, generator=g).double(),
        -12 * torch.rand(1, time, heads, generator=g).double(),
        torch.randn(1, heads, 3, key, generator=g).double(),
        torch.rand(1, heads, key, generator=g).double(),
    ]
    weight = torch.randn(1, time, heads, 3, generator=g).double()
    exact = [x.requires_grad_() for x in given]
    target = written_out(rule, *exact)
    targets = torch.autograd.grad(
        (target * weight).sum(), exact, allow_unused=rule == "sum_rule"
    )
    for implementation in PLAIN:
        rounded = [x.detach().float().requires_grad_() for x in exact]
        parts, state = [], rounded[5:]
        for part in (slice(0, 40), slice(40, None)):
            inputs = (x[:, part] for x in rounded[:5])
            y, state = called(rule, implementation, *inputs, *state)
            parts.append(y)
        y = torch.cat(parts, 1)
        assert relative(y, target) < 1e-5
        grads = torch.autograd.grad(
            (y * weight.float()).sum(), rounded, allow_unused=rule == "sum_rule"
        )
        for name, found, right in zip(NAMES, grads, targets, strict=True):
            if right is None:
                continue
            if name in ("k", "beta"):  # of what is not written, it has no bound
                there = writes if name == "k" else writes[..., 0]
                found, right = found * there, torch.where(there, right, 0)
            assert relative(found, right) < 1e-3, (implementation, name)


@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_what_a_key_retrieves_from_a_memory_that_has_faded(implementation, dtype):
    """A quotient, in which the decay cancels, unless nothing at all is left."""
    k, v = torch.tensor([1.0, 0.5]).view(1, 1, 1, 2), torch.full((1, 1, 1, 1), 3.0)
    W, z = torch.tensor([[[[2.0, 1.0]]]]), torch.ones(1, 1, 2)
    wide = torch.promote_types(dtype, torch.float32)
    half = torch.full((1, 1, 1), 0.5)
    for faded in (-1.0, -81.0, -90.0, -100.0, -500.0, -1e4, -torch.inf):
        decay = torch.full((1, 1, 1), faded)
        given = [x.to(dtype).requires_grad_() for x in (k, k, v, half, decay)]
        given += [x.to(wide).requires_grad_() for x in (W, z)]
        y, _ = called("gated_delta_rule", implementation, *given)
        # (2.5 / 1.5 fades to nothing beside half of 3 - 2.5 / 1.5)
        left = 0 if faded == -torch.inf else 2.5 / 1.5
        fading = torch.tensor(faded).double().exp().item()
        right = (2.5 * fading + 1.25 * (3 - left) / 2) / (1.5 * fading + 1.25)
        torch.testing.assert_close(
            y.item(), right, rtol=1e-3 if dtype == torch.float16 else 1e-6, atol=0
        )
        # Half of what is written is not.
        dv, dW = torch.autograd.grad(y, [given[2], given[5]])
        share = 1.25 / (1.5 * fading + 1.25)
        torch.testing.assert_close(dv.item(), share / 2, rtol=1e-3, atol=1e-3)
        wanted = fading / (1.5 * fading + 1.25) - (share / 2 / 1.5) * (left > 0)
        torch.testing.assert_close(dW[0, 0, 0, 0].item(), wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("implementation", PLAIN)
def test_a_key_retrieves_nothing_from_what_was_emptied(implementation, dtype):
    """Also in a call in which another decay is beyond all numbers."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.rand(3, 2, 3, 1, 2, generator=g).to(dtype)
    half = torch.full((2, 3, 1), 0.5, dtype=dtype)
    decay = (
        torch.tensor([0.0, -400.0, -torch.inf]).to(dtype).view(1, 3, 1).repeat(2, 1, 1)
    )
    empty = q.new_zeros(2, 1, 2, 2), q.new_zeros(2, 1, 2)
    y, _ = called("gated_delta_rule", implementation, q, k, v, half, decay, *empty)
    # The last step is the first of an empty memory.
    torch.testing.assert_close(y[:, 2], v[:, 2] / 2, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", PLAIN)
def test_what_has_faded_more_than_the_rest_is_forgotten(implementation):
    """A head has one unit: a direction below its range reads 0."""
    k = torch.zeros(1, 3, 1, 2)
    k[:, 0, :, 0] = k[:, 2, :, 1] = 1
    q = torch.tensor([1.0, 0]).expand_as(k)
    v = torch.tensor([3.0, 5, 7]).view(1, 3, 1, 1)
    for faded, last in ((-80.0, 3.0), (-90.0, 0.0), (-100.0, 0.0), (-200.0, 0.0)):
        decay = torch.tensor([0, 0.5, 0.5]).view(1, 3, 1) * faded
        given = [x.clone().requires_grad_() for x in (q, k, v, decay)]
        y = ops.sum_rule(*given[:3], log_decay=given[3], implementation=implementation)
        torch.testing.assert_close(y.flatten(), torch.tensor([3.0, 3.0, last]))
        for found in torch.autograd.grad(y.sum(), given):
            assert found.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_a_memory_in_range_is_computed_as_ever(rule, monkeypatch):
    """Not one bit changes where no unit is needed; and no gate is added."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(2, 70, 2, 3, generator=g) for _ in "qkv")
    beta, decay = torch.rand(2, 2, 70, 2, generator=g)
    W, z = torch.rand(2, 2, 3, 3, generator=g), torch.rand(2, 2, 3, generator=g)
    given = q, k, v, beta, -decay, W, z
    for implementation in PLAIN:
        y, state = called(rule, implementation, *given)
        with monkeypatch.context() as patch:
            patch.setattr(ops.call.units, "PLAIN", (-torch.inf, torch.inf))
            plain, end = called(rule, implementation, *given)
        assert torch.equal(y, plain)
        assert all(map(torch.equal, state, end))


@pytest.mark.parametrize("scale", [-1e9, -1e-9, 0.0, 1e-9, 1e9])
def test_the_size_of_a_scale_cancels(scale):
    """Before it does, it must not leave the range of half precision."""
    q, k, v = (torch.rand(1, 5, 1, 4).half() for _ in "qkv")
    for implementation in PLAIN:
        one = ops.sum_rule(q, k, v, implementation=implementation)
        y = ops.sum_rule(q, k, v, scale=scale, implementation=implementation)
        torch.testing.assert_close(y, one if scale else torch.zeros_like(one))


@pytest.mark.parametrize("rule", RULES)
def test_one_step_of_nothing(rule):
    """A step of no sequences, of no heads, or with keys of no width."""
    for batch, heads, key in ((0, 2, 4), (1, 0, 4), (1, 2, 0)):
        q, v = torch.rand(batch, 1, heads, key), torch.rand(batch, 1, heads, 3)
        W, z = torch.rand(batch, heads, 3, key), torch.rand(batch, heads, key)
        y, state = called(rule, "auto", q, q, v, v[..., 0], -v[..., 0], W, z)
        assert y.shape == v.shape
        assert (state.W.shape, state.z.shape) == (W.shape, z.shape)


@pytest.mark.parametrize("implementation", PLAIN)
def test_weak_writes_of_half_precision(implementation):
    """What the keys would need in their place is beyond float16."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(1, 40, 2, 4, generator=g).half() for _ in "qkv")
    beta, decay = torch.rand(2, 1, 40, 2, generator=g)
    given = q, 8 * k, v, beta * 1e-9, -4 * decay
    given += torch.rand(1, 2, 4, 4, generator=g), torch.rand(1, 2, 4, generator=g)
    y, _ = called("gated_rule", implementation, *given)
    target = written_out("gated_rule", *(x.double() for x in given))
    assert relative(y, target) < 2e-3


@pytest.mark.parametrize("faded", [-4.0, -torch.inf])
@pytest.mark.parametrize("rule", RULES)
def test_an_empty_memory_does_not_fade(rule, faded):
    """The gradient of a key that is 0 is that of what it could have written."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(1, 40, 1, 3, generator=g) for _ in "qkv")
    k[:, :30] = 0
    beta = torch.full((1, 40, 1), 0.5)
    given = (
        q,
        k,
        v,
        beta,
        torch.where(torch.arange(40) < 29, faded, -0.5)[None, :, None],
    )
    given += torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 3)
    exact = [x.double().requires_grad_() for x in given]
    right = torch.autograd.grad(written_out(rule, *exact).sum(), exact[1])[0]
    for implementation in PLAIN:
        rounded = [x.clone().requires_grad_() for x in given]
        y, _ = called(rule, implementation, *rounded)
        assert relative(torch.autograd.grad(y.sum(), rounded[1])[0], right) < 1e-5


@pytest.mark.parametrize("rule", RULES)
def test_the_first_key_after_a_pause(rule):
    """Its gradient in the state is its strength, also if it is 0."""
    for implementation in PLAIN:
        k = torch.zeros(1, 1, 1, 3, requires_grad=True)
        gates = torch.full((1, 1, 1), 0.5), torch.full((1, 1, 1), -torch.inf)
        memory = torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 3)
        _, (_, z) = called(
            rule, implementation, k.detach(), k, k.detach(), *gates, *memory
        )
        found = torch.autograd.grad(z.sum(), k)[0]
        strength = 0.5 if rule == "gated_rule" else 1.0
        torch.testing.assert_close(found, torch.full_like(k, strength))


@pytest.mark.parametrize("implementation", PLAIN)
def test_inputs_get_all_that_the_rule_gets(implementation):
    """Also where only its decay and its strength are asked for: another rule may
    change its keys by a gate, or need a decay that is a tensor.
    """

    def inputs(q, k, v, beta, log_decay, **_):
        assert q.shape == k.shape and v.shape[:3] == beta.shape == log_decay.shape
        return decay_and_strength(beta, log_decay) | {"q": 2 * q, "k": k}

    odd = replace(GATED_RULE, inputs=inputs)
    gates = {"beta": torch.full((1, 2, 1), 0.5), "log_decay": torch.tensor([0, -150.0])}
    gates["log_decay"] = gates["log_decay"].view(1, 2, 1)
    q = k = torch.tensor([[1.0, 0], [0, 0]]).view(1, 2, 1, 2).flip(1)
    k = k.flip(1)
    v = torch.tensor([5.0, 7]).view(1, 2, 1, 1)
    for rule in (GATED_RULE, odd):
        y = rule(q, k, v, gates, normalize=True, implementation=implementation)
        assert y.flatten().tolist() == [0, 5]


#: How far queries, keys (inputs of ELU + 1) and strengths (of a sigmoid) are below 0.
TINY = ((86, 0, 0), (0, 86, 0), (80, 80, 0), (0, 0, 84), (0, 50, 50), (10, 20, 70))


def of_tiny(rule, implementation, dtype, shifts, state=None):
    """A mean, the state, and the gradients of what makes tiny features."""
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(2, 40, 2, 4, generator=g).double() for _ in "qkv"]
    x += [torch.randn(2, 40, 2, generator=g).double()]
    given = [
        (part - shift).to(dtype).requires_grad_()
        for part, shift in zip(x, (*shifts[:2], 0, shifts[2]), strict=True)
    ]
    q, k, v, b = given
    more = {} if rule == "sum_rule" else {"beta": b.sigmoid()}
    if rule == "gated_delta_rule":
        more["log_decay"] = torch.linspace(-2, 0, 40, dtype=dtype)[:, None].expand_as(b)
    y, after = getattr(ops, rule)(
        ELU1()(q),
        ELU1()(k),
        v,
        **more,
        normalize=True,
        state=state,
        return_state=True,
        implementation=implementation,
    )
    found = torch.autograd.grad(y.sum(), given[: 3 + bool(more)])
    return [y, *found], after


@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("rule", [*RULES, "delta_rule"])
def test_means_of_tiny_features(rule, implementation):
    """The gradient of a feature is about 1 over it, and it meets its slope."""
    for shifts in TINY:
        found, _ = of_tiny(rule, implementation, torch.float32, shifts)
        exact, _ = of_tiny(rule, implementation, torch.float64, shifts)
        for a, b in zip(found, exact, strict=True):
            assert (a - b).norm() <= 1e-5 * max(b.norm(), 1e-3), shifts
    # What has lost digits itself: the gradient is at most the largest number.
    for shifts in ((90, 0, 0), (0, 90, 0), (95, 95, 0), (0, 0, 88)):
        (y, *found), _ = of_tiny(rule, implementation, torch.float32, shifts)
        (exact, *_), _ = of_tiny(rule, implementation, torch.float64, shifts)
        assert all(x.isfinite().all() for x in found)
        if not shifts[2]:  # in float32, a sigmoid of -89 is 0
            torch.testing.assert_close(y.double(), exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize("implementation", PLAIN)
@pytest.mark.parametrize("rule", ["sum_rule", "delta_rule"])
def test_a_memory_of_tiny_keys_that_does_not_fade(rule, implementation):
    """It needs a unit until a larger key comes, in every document."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(1, 12, 1, 3, generator=g) + 0.1 for _ in "qkv")
    size = torch.tensor([0, 1e-38, 1e-39, 1e-38, 1, 1, 1, 1, 1e-39, 1e-38, 1, 1])
    k = k * size[:, None, None]
    more = {} if rule == "sum_rule" else {"beta": torch.full((1, 12, 1), 0.5)}
    options = {"normalize": True, "implementation": implementation}
    call, ends = getattr(ops, rule), torch.tensor([0, 8, 12])
    exact = {n: x.double() for n, x in more.items()}
    right = call(
        *(x.double() for x in (q, k, v)), **exact, normalize=True, cu_seqlens=ends
    )
    y = call(q, k, v, **more, **options, cu_seqlens=ends)
    torch.testing.assert_close(y.double(), right, rtol=1e-5, atol=1e-5)
    # Across a state, which has no unit; and a masked step that contains anything.
    k = torch.where(k < 1e-30, k * 1e8, k)
    keep = torch.arange(8)[None] != 3
    right = call(
        *(x[:, :8].double() for x in (q, k, v)),
        **{n: x[:, :8] for n, x in exact.items()},
        normalize=True,
        key_mask=keep,
    )
    k[:, 3], state, pieces = torch.nan, None, []
    for part in (slice(0, 2), slice(2, 3), slice(3, 8)):
        y, state = call(
            *(x[:, part] for x in (q, k, v)),
            **{n: x[:, part] for n, x in more.items()},
            **options,
            key_mask=keep[:, part],
            state=state,
            return_state=True,
        )
        pieces.append(y)
    torch.testing.assert_close(
        torch.cat(pieces, 1).double(), right, rtol=1e-5, atol=1e-5
    )
