"""Test AFT with extreme exponents, without a causal mask, and on images."""

from functools import partial

import pytest
import torch
from alike import error, random, refuses, weighted

from fwlab import ops
from fwlab.layers import AFTConv, AFTConv2d, AFTFull, AFTLocal, AFTSimple

both = pytest.mark.parametrize("implementation", ["naive", "efficient"])

# --- accuracy for any finite K + w -------------------------------------


OPS = {
    "simple": ops.aft_simple,
    "full": ops.aft_full,
    "local": ops.aft_local,
    "conv": ops.aft_conv,
}


@both
def test_values_near_the_end_of_the_range(implementation):
    big = torch.full((1, 40, 1), 3e38)
    band = torch.ones(40, 3)
    y = ops.aft_local(0 * big, 0 * big, big, band, implementation=implementation)
    assert torch.allclose(y, big / 2)


TOP = torch.finfo(torch.float32).max


def edge(op, key, bias):
    """Return AFT inputs with the keys (`key`, 0, `key`) and a constant bias."""
    k = torch.tensor([key, 0.0, key]).view(1, 3, 1)
    v = torch.tensor([1.0, 2.0, 4.0]).view(1, 3, 1)
    shape = {"simple": None, "full": (3, 3), "local": (3, 2), "conv": (1, 2)}[op]
    inputs = [0 * v, k, v]
    if op == "conv":
        inputs = [x[..., None] for x in inputs]
    inputs += [torch.full(shape, bias)] if shape else []
    return [x.requires_grad_() for x in inputs]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("key", "bias"),
    [(1.5e38, 1.5e38), (3e38, -3e38), (TOP, 0.0), (0.0, TOP), (-TOP, 0.0), (0.0, -TOP)],
)
@both
def test_exact_where_k_plus_w_is_finite(op, key, bias, implementation):
    """AFT has exact outputs and finite gradients as long as k + w is finite.

    In the logarithm of a sum that large, rounding leaves only the largest key, so
    gradients may treat equal keys as one.
    """
    inputs = edge(op, key, bias)
    y = OPS[op](*inputs, implementation=implementation)
    exact = [x.detach().double() for x in inputs]
    wanted = OPS[op](*exact, implementation="naive")
    assert torch.allclose(y.double(), wanted, rtol=1e-6, atol=0)
    gradients = torch.autograd.grad(weighted(y), inputs)
    assert all(g.isfinite().all() for g in gradients)


# --- layers, in addition to the tests of test_layers.py ----------------


def changed(layer):
    """Return a layer in float64, with random values in every parameter."""
    torch.manual_seed(0)
    for parameter in layer.double().parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", [AFTFull, AFTLocal])
def test_factors_are_the_bias(kind, causal):
    """A factorised bias has the same outputs as the product of its factors (Eq. 7)."""
    factorised, x = changed(kind(12, 40, factor=3, causal=causal)), random(2, 40, 12)
    plain = kind(12, 40, causal=causal).double()
    w = factorised.bias_u.detach() @ factorised.bias_v.detach().T
    state = {k: v for k, v in factorised.state_dict().items() if "bias_" not in k}
    if kind is AFTLocal:
        columns = [torch.cat([w[:j, 0] * 0, w.diagonal(-j)]) for j in range(32)]
        if not causal:
            columns += [torch.cat([w.diagonal(j), w[:j, 0] * 0]) for j in range(1, 32)]
        state["band"] = torch.stack(columns, 1)
    else:
        state["bias"] = w
    plain.load_state_dict(state)
    assert error(factorised(x), plain(x)) < 1e-12
    for layer in (plain, factorised):
        assert all(p.is_floating_point() for p in layer.state_dict().values())
        said = f"{kind.__name__}: .*max_len=40 tokens.*got 41"
        refuses(partial(layer, torch.cat([x, x[:, :1]], 1)), said)
        if causal:
            _, after = layer.prefill(x)
            refuses(partial(layer.step, x[:, 0], after), said)


@pytest.mark.parametrize("shared_key", [False, True])
def test_a7_conv_starts_as_simple(shared_key):
    """AFT-conv initially equals AFT-simple, and only gamma and beta have gradients."""
    torch.manual_seed(0)
    conv = AFTConv(12, 3, window=5, shared_key=shared_key).double()
    x = torch.randn(2, 20, 12, dtype=torch.float64)
    q, k, v = conv.to_q(x), conv.to_k(x), conv.to_v(x)
    k = k.repeat_interleave(4, -1) if shared_key else k
    y = conv(x)
    assert error(y, conv.to_out(ops.aft_simple(q, k, v))) < 1e-12
    weighted(y).backward()
    kernel = conv.kernel
    assert not kernel.raw.grad.any()
    assert kernel.gamma.grad.all()
    assert kernel.beta.grad.all()


def test_equation_8():
    """A kernel of AFT-conv has mean beta and standard deviation gamma (Eq. 8).

    A constant raw kernel gives beta, with finite gradients, for any constant.
    """
    conv = AFTConv(12, 3, window=7)
    with torch.no_grad():
        conv.kernel.gamma.copy_(torch.tensor([2.0, 1.0, 1.0]))
        conv.kernel.beta.copy_(torch.tensor([0.5, -1.0, 3.0]))
        conv.kernel.raw[0] = torch.arange(7.0)
        conv.kernel.raw[1:] = torch.tensor([[0.1], [-1.7]])
    made = conv.kernel()
    assert made[0].tolist() == pytest.approx([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5])
    assert made[1].tolist() == [-1.0] * 7
    assert made[2].tolist() == [3.0] * 7
    for constant in torch.randn(100):
        with torch.no_grad():
            conv.kernel.raw.fill_(constant)
        assert torch.equal(conv.kernel()[1:], conv.kernel.beta[1:, None].expand(2, 7))
    weighted(conv(torch.randn(2, 9, 12))).backward()
    assert all(torch.isfinite(p.grad).all() for p in conv.parameters())


@pytest.mark.parametrize("make", [
    lambda: AFTSimple(12, causal=False),
    lambda: AFTFull(12, 40, causal=False),
    lambda: AFTLocal(12, 40, window=5, causal=False),
    lambda: AFTLocal(12, 40, window=5, factor=3, causal=False),
    lambda: AFTConv(12, 3, window=5, causal=False),
])  # fmt: skip
def test_layers_that_see_everything(make):
    layer, x = changed(make()), random(2, 20, 12)
    y = layer(x)
    assert error(y, layer(x, implementation="naive")) < 1e-12
    later = torch.cat([x[:, :-1], x[:, -1:] + 1], 1)
    assert not torch.isclose(layer(later)[:, :-1], y[:, :-1]).all()
    assert layer(x[:, :0]).shape == (2, 0, 12)
    refuses(lambda: layer.prefill(x), "causal=True")
    refuses(lambda: layer.step(x[:, 0]), "causal=True")


def test_image_layer():
    for shared_key in (False, True):
        layer = changed(AFTConv2d(12, 3, size=3, shared_key=shared_key))
        x = random(2, 5, 4, 12)
        assert error(layer(x), layer(x, implementation="naive")) < 1e-12
        keep = torch.ones(2, 5, 4, dtype=torch.bool)
        keep[:, 3:] = False
        dirty = torch.where(keep[..., None], x, torch.nan)
        assert error(layer(dirty, key_mask=keep)[:, :3], layer(x[:, :3])) < 1e-12
