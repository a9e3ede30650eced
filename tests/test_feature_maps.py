"""Test feature maps and normalisations."""

import math
from functools import partial

import pytest
import torch
from alike import random, refuses
from torch.autograd import gradcheck, gradgradcheck

from fwlab.feature_maps import (
    DPFP,
    ELU1,
    FAVOR,
    FeatureMap,
    RandomFourier,
    ReLU,
    gaussian_directions,
    l2_normalize,
    sum_normalize,
)
from fwlab.layers import FastWeightAttention

MAPS = {
    "relu": ReLU(),
    "elu1": ELU1(),
    "dpfp": DPFP(),
    "dpfp 7": DPFP(7),
    "favor": FAVOR(3, 4, seed=0).double(),
    "random fourier": RandomFourier(3, 4, seed=0).double(),
    "sum": sum_normalize,
    "l2": l2_normalize,
}
every_map = pytest.mark.parametrize("phi", MAPS.values(), ids=MAPS)


@every_map
def test_derivatives(phi):
    """First and second derivatives of feature maps and normalisations are correct."""
    x = random(2, 3).requires_grad_()
    assert gradcheck(phi, x) and gradgradcheck(phi, x[0])


@every_map
def test_maps_compile_into_one_graph(phi):
    torch.compiler.reset()
    x = random(2, 3).requires_grad_()
    y = torch.compile(phi, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(y, phi(x))
    dy = random(*y.shape, seed=1)
    (found,), (wanted,) = (torch.autograd.grad(z, x, dy) for z in (y, phi(x)))
    torch.testing.assert_close(found, wanted)


def test_one_bad_row_leaves_the_others():
    """One row with an extreme sum does not change the results of other rows."""
    good = random(3, 4).float()
    for bad in (0.0, 1e-45, 1e-30, 1e30, 3e38, math.inf, math.nan):
        x = torch.cat([good, torch.full((1, 4), bad)])
        for normalize in (sum_normalize, l2_normalize):
            torch.testing.assert_close(normalize(x)[:3], normalize(good))


@pytest.mark.parametrize("normalize", [sum_normalize, l2_normalize])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normalize_is_exact_at_any_scale(normalize, dtype):
    x = random(5, 8).abs().to(dtype)
    order = 1 if normalize is sum_normalize else 2
    scales = [1e-37, 1e-30, 1e-6, 1.0, 1e30]
    if dtype == torch.float64:
        scales += [1e-300, 1e300]
    for scale in scales:
        y = normalize(x * scale)
        torch.testing.assert_close(
            torch.linalg.vector_norm(y, order, dim=-1), torch.ones(5, dtype=dtype)
        )
        torch.testing.assert_close(y, normalize(x), rtol=1e-5, atol=0)


class OnGPU(torch.Tensor):
    """Report the device "cuda" for a CPU tensor, and raise if its values are read."""

    device = torch.device("cuda")

    def __bool__(self):
        raise AssertionError("a GPU would have to finish before this is known")


@pytest.mark.parametrize("normalize", [sum_normalize, l2_normalize])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_normalize_on_a_gpu(normalize, scale):
    """On a GPU, normalisations rescale all vectors, without synchronisation."""
    x, dy = random(2, 3, 4).float().abs(), random(2, 3, 4, seed=1).float()
    wanted, gradient = torch.autograd.functional.vjp(normalize, x, dy)
    for place in (torch.Tensor, OnGPU):
        there = (x * scale).as_subclass(place).requires_grad_()
        y = normalize(there)
        same = {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(y.as_subclass(torch.Tensor), wanted, **same)
        (dx,) = torch.autograd.grad(y, there, dy)
        dx = dx.as_subclass(torch.Tensor) * scale
        torch.testing.assert_close(dx, gradient, **same)
        assert normalize(there[..., :0]).shape == (2, 3, 0)


def test_sum_normalize_recognises_zero_and_does_not_overflow():
    # An exact sum of 0 is recognised, because scaling is exact.
    x = torch.randint(-9, 10, (500, 6), generator=torch.Generator().manual_seed(0))
    x[:, -1] = -x[:, :-1].sum(-1)
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert not sum_normalize(x.to(dtype)).any()
    x = torch.full((1, 128), 60000.0, dtype=torch.float16)  # The sum would overflow.
    torch.testing.assert_close(sum_normalize(x), torch.full_like(x, 1 / 128))


@pytest.mark.parametrize("make", [FAVOR, RandomFourier])
def test_random_features(make):
    """Random features depend on a seed, change only in `redraw`, and are saved."""
    phi = make(6, 9, seed=3)
    x = random(2, 5, 6)
    y = phi(x)
    assert y.shape == (2, 5, phi.width(6)) == (2, 5, 18)
    assert torch.equal(y, make(6, 9, seed=3)(x))
    assert torch.equal(y, phi.eval()(x))
    assert not torch.equal(y, make(6, 9, seed=4)(x))
    phi.redraw(seed=4)
    assert torch.equal(phi(x), make(6, 9, seed=4)(x))
    assert "omega" in phi.state_dict()
    with pytest.raises(ValueError, match=r"width 6.*got 5"):
        phi.width(5)
    refuses(partial(phi.redraw, 1.0), f"^{make.__name__}: expected seed to", TypeError)
    assert make(1, 1).width(1) == 2
    assert phi(x.half()).dtype == torch.float16


@pytest.mark.parametrize("make", [FAVOR, RandomFourier])
def test_random_features_under_autocast(make):
    """Under autocast, exponents and angles are not rounded to half precision."""
    phi, x = make(6, 9, seed=3), random(2, 6).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [phi(x), phi.scaled(x)[0]]
    phi, x = phi.double(), x.double()
    for one, other in zip(found, [phi(x), phi.scaled(x)[0]], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("d", [2, 8])
def test_favor_estimates_the_softmax_kernel(orthogonal, d):
    """FAVOR+ is an unbiased estimate of the softmax kernel (Lemma 1).

    LAPACK's QR has a sign convention, and a Q that is not uniform would show in
    half of the hyperbolic features: mean 0.66 of the true value for d = 2.
    """
    x, y = torch.zeros(2, d, dtype=torch.float64)
    x[0], y[0] = 0.6, 0.4
    phi = FAVOR(d, 100_000, orthogonal, stabilize=False, seed=0)
    assert (phi(x) @ phi(y)).item() == pytest.approx(math.exp(0.24), rel=0.03)
    positive = phi(x)[:100_000] @ phi(y)[:100_000] * 2
    assert positive.item() == pytest.approx(math.exp(0.24), rel=0.03)
    scaled = FAVOR(d, 100_000, orthogonal, seed=0)
    assert (scaled(x) @ scaled(y)).item() == pytest.approx(
        math.exp(0.24 / d**0.5), rel=0.01
    )


def test_orthogonal_directions():
    """Directions in a block are orthogonal, with the lengths of Gaussian vectors."""
    omega = gaussian_directions(12, 5, True, torch.Generator().manual_seed(0))
    assert omega.shape == (12, 5)
    angles = omega[:5] @ omega[:5].T
    assert (angles - angles.diag().diag()).abs().max() < 1e-5
    many = gaussian_directions(50_000, 5, True, torch.Generator().manual_seed(0))
    assert many.norm(dim=-1).square().mean().item() == pytest.approx(5, rel=0.02)
    assert many.mean(0).abs().max() < 0.02


def test_random_fourier_estimates_the_gaussian_kernel():
    x, y = random(2, 4)
    phi = RandomFourier(4, 100_000, bandwidth=1.7, seed=0)
    between = (l2_normalize(x) - l2_normalize(y)).square().sum()
    wanted = torch.exp(-(1.7**2) * between / 2).item()
    assert (phi(x) @ phi(y)).item() == pytest.approx(wanted, abs=0.005)
    assert phi(x).norm().item() == pytest.approx(1, abs=1e-6)
    assert torch.isfinite(phi(torch.zeros(4))).all()


def test_favor_scale():
    """Scaled features times the scale equal the features, and so do the gradients."""
    x = (3 * random(10, 6)).requires_grad_()
    phi = FAVOR(6, 16, seed=0)
    features, scale = phi.scaled(x)
    assert not scale.requires_grad
    results = features * scale.exp()[:, None], phi(x)
    torch.testing.assert_close(*results)
    weights = random(10, 32)
    torch.testing.assert_close(
        *(torch.autograd.grad(y, x, weights / y.detach()) for y in results)
    )
    assert (features.amax(-1) == 1).all()
    assert phi.scales
    plain = FAVOR(6, 16, stabilize=False, seed=0)
    assert plain.scaled(x)[1] is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("normalize", [sum_normalize, l2_normalize])
def test_gradients_of_tiny_features_are_finite(normalize, dtype):
    """Gradients of normalised ELU + 1 features are finite even after an underflow."""
    shift = {torch.float16: 14, torch.float32: 84}[dtype]
    x = random(40, 4)
    given = [(x - shift).to(kind).requires_grad_() for kind in (dtype, torch.float64)]
    weight = random(40, 4, seed=1)
    found, right = (
        torch.autograd.grad((normalize(ELU1()(z)) * weight.to(z.dtype)).sum(), z)[0]
        for z in given
    )
    assert found.isfinite().all()
    if dtype == torch.float32:
        torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-5)
    beyond = (x - 90).float().requires_grad_()
    normalize(ELU1()(beyond)).sum().backward()
    assert beyond.grad.isfinite().all()


@pytest.mark.parametrize(
    ("phi", "size", "shift"),
    [
        (FAVOR(8, 16, seed=0), 5, 0),
        (FAVOR(8, 16, seed=0), 10, 0),
        (ELU1(), 1, 12),
        (DPFP(), 0.01, 0),
    ],
)
@pytest.mark.parametrize("rule", ["sum", "gated", "delta"])
def test_features_under_autocast(phi, size, shift, rule):
    """Under float16 autocast, features do not underflow for keys of ordinary length."""
    layer = FastWeightAttention(16, 2, phi, rule, key_norm=None, normalize=True)
    to_qk = [layer.to_q, layer.to_k]
    for linear in to_qk:  # The identity is exact in float16.
        linear.weight.data = torch.eye(16)
    x = (size * torch.randn(1, 12, 16) - shift).half().float().requires_grad_()
    right = layer(x)
    with torch.autocast("cpu", torch.float16):
        found = layer(x)
    assert found.dtype == torch.float16
    gradients = [torch.autograd.grad(y.float().sum(), x)[0] for y in (found, right)]
    for a, b in ((found.float(), right), gradients):
        assert (a - b).norm() < 0.02 * b.norm()


@pytest.mark.parametrize("rule", ["sum", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("size", [10, 30, 50])
def test_stabilised_features_far_beyond_float32(rule, size):
    """Outputs and gradients are correct if features differ by a factor of e^300."""
    layer = FastWeightAttention(16, 2, FAVOR(8, 16, seed=0), rule, None, True)
    x = (size * torch.randn(2, 20, 16)).requires_grad_()
    found = layer(x)
    gradient = torch.autograd.grad(found.sum(), x)[0]
    with torch.no_grad():
        y, state = layer.prefill(x[:, :9])
        steps = [y]
        for t in range(9, 20):
            y, state = layer.step(x[:, t], state)
            steps.append(y[:, None])
    exact = x.detach().double().requires_grad_()
    right = layer.double()(exact)
    wanted = torch.autograd.grad(right.sum(), exact)[0]
    assert found.dtype == torch.float32
    for a, b in ((found, right), (torch.cat(steps, 1), right), (gradient, wanted)):
        assert (a - b).norm() < 1e-3 * b.norm()


def test_favor_takes_keys_of_any_length():
    """FAVOR+ is finite for keys whose squared length overflows float32."""
    x = (1e19 * torch.randn(3, 8, generator=torch.Generator().manual_seed(0))).float()
    x.requires_grad_()
    phi, _ = FAVOR(8, 16, seed=0).scaled(x)
    assert phi.isfinite().all() and phi.amax() == 1
    (gradient,) = torch.autograd.grad(phi.sum(), x)
    assert gradient.isfinite().all()


def test_width_of_a_map_of_your_own():
    class Own(FeatureMap):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(8, 12)

        def forward(self, x):
            return self.project(x).relu()

    assert Own().width(8) == Own().double().width(8) == 12


def test_directions_that_are_trained_get_a_gradient():
    favor = FAVOR(4, directions=3)
    favor.omega.requires_grad_()
    favor(torch.randn(2, 4)).sum().backward()
    assert favor.omega.grad.abs().max() > 0
