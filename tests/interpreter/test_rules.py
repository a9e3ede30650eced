"""Kernels of the fast weight rules: what random cases do not find."""

import fuzz
import pytest
import torch
from alike import error, problem, weighted

from fwlab import ops
from fwlab.feature_maps import l2_normalize
from fwlab.ops import _triton
from fwlab.ops.linear import kernels as linear

pytestmark = pytest.mark.slow


def agrees(text, **options):
    assert fuzz.check(fuzz.parsed(f"{text} implementation=triton") | options) is None


KERNELS = [
    *("sum_rule fewer=1", "sum_rule", "sum_rule fewer=1 normalize=1"),
    *("gated_rule fewer=1", "gated_rule normalize=1", "delta_rule", "gated_delta_rule"),
]
SIZES = "batch=2 heads=2 key=6 value=5 state=1"


# With many multiprocessors, outputs have a kernel of their own.
@pytest.mark.parametrize("cores", [1, 1000])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("op", KERNELS)
def test_chunks(op, dtype, cores, monkeypatch):
    """Two whole chunks and a step; half precision has longer ones."""
    monkeypatch.setattr(_triton, "multiprocessors", lambda device: cores)
    agrees(f"op={op} time=33 {SIZES}", dtype=dtype)


@pytest.mark.parametrize("C", [16, 32, 64])
def test_lengths_of_chunks(C, monkeypatch):
    made = linear.form
    monkeypatch.setattr(linear, "form", lambda *a: made(*a)._replace(C=C))
    agrees(f"op=gated_delta_rule time=65 dtype=float32 {SIZES}")
    agrees(f"op=gated_rule normalize=1 time=65 dtype=float32 {SIZES}")


@pytest.mark.parametrize(
    ("op", "key", "value"),
    [
        ("delta_rule", 130, 70),
        ("gated_delta_rule", 70, 130),
        ("delta_rule", 256, 24),
        ("delta_rule", 384, 40),
        ("sum_rule", 130, 130),
        ("gated_rule", 40, 260),
    ],
)
def test_widths(op, key, value):
    """In the widest precision that the kernels have room for."""
    dtype = "float32" if max(key, value) <= 256 else "float16"
    agrees(f"op={op} time=17 state=1 heads=2 key={key} value={value}", dtype=dtype)


@pytest.mark.parametrize("time", [20, 70])
def test_divergence_is_not_hidden(time):
    """Keys that are much too long: never a wrong finite answer."""
    x = problem(f"op=delta_rule time={time} dtype=float32 {SIZES}").x
    q, k, v = (x[name].detach() for name in "qkv")
    k, beta = 300 * k + 1, torch.ones(q.shape[:3])
    naive = ops.delta_rule(q, k, v, beta, implementation="naive")
    y = ops.delta_rule(q, k, v, beta, implementation="triton")
    # From the first number on that naive cannot hold, neither can we.
    lost = ~torch.isfinite(naive).all(-1).all(-1)
    assert lost.any()
    assert not torch.isfinite(y[lost]).all()
    held = ~lost & torch.isfinite(y).all(-1).all(-1)
    for b in range(len(y)):
        steps = held[b].nonzero()[:5, 0]
        assert error(y[b, steps], naive[b, steps]) < 1e-3


def test_a_large_denominator_loses_nothing_in_float16():
    """1 / (z . q) is far below what float16 can hold."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (1 + torch.rand(1, 70, 1, 32, generator=generator) for _ in range(3))
    given = [x.half().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in given]
    dy = 1e-3 * torch.randn(v.shape, generator=generator)
    found = torch.autograd.grad(
        ops.sum_rule(*given, implementation="triton"), given, dy.half()
    )
    wanted = torch.autograd.grad(
        ops.sum_rule(*exact, implementation="naive"), exact, dy.half().double()
    )
    # dq and dk are differences of nearly equal numbers: few digits are left.
    for a, b, limit in zip(found, wanted, (0.2, 0.05, 2e-3), strict=True):
        assert error(a, b) < limit


def test_negative_denominators():
    """Signed features, and a chunk that is not full."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.rand(1, 5, 1, 8, generator=generator) + 0.1 for _ in range(2))
    given = [x.requires_grad_() for x in (-q, k, k - 0.5)]
    exact = [x.detach().double().requires_grad_() for x in given]
    found = weighted(ops.sum_rule(*given, implementation="triton"))
    wanted = weighted(ops.sum_rule(*exact, implementation="naive"))
    gradients = torch.autograd.grad(found, given), torch.autograd.grad(wanted, exact)
    for a, b in zip(*gradients, strict=True):
        assert error(a, b) < 1e-5


def test_equal_keys_do_not_blur():
    """All keys the same: every power of the matrix is large, its inverse
    is not.
    """
    k = l2_normalize(torch.ones(1, 70, 1, 8))
    v, beta = torch.randn(1, 70, 1, 8), torch.ones(1, 70, 1)
    y = ops.delta_rule(k, k, v, beta, implementation="triton")
    assert error(y, v) < 1e-6


def test_refusals_name_their_reason():
    x = torch.zeros(1, 3, 1, 4)
    beta = torch.zeros(1, 3, 1)
    with pytest.raises(ValueError, match=r"'triton' cannot run here.*float64"):
        ops.sum_rule(x.double(), x.double(), x.double(), implementation="triton")
    with pytest.raises(ValueError, match="interpreter does not compute in bfloat16"):
        ops.sum_rule(x.bfloat16(), x.bfloat16(), x.bfloat16(), implementation="triton")
    with pytest.raises(ValueError, match="or is normalised; 'efficient' can"):
        ops.delta_rule(x, x, x, beta, normalize=True, implementation="triton")
    long = torch.zeros(1, 3, 1, 600)
    with pytest.raises(ValueError, match="up to 256 in float32, got 600 and 4"):
        ops.sum_rule(long, long, x, normalize=False, implementation="triton")
    assert ops.implementations("delta_rule") == (
        "naive",
        "chunked",
        "efficient",
        "triton",
    )
