"""Kernels of the fast weight rules: what random cases do not find."""

import fuzz
import pytest
import torch
from alike import error, problem, weighted

from fwlab import ops
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
@pytest.mark.parametrize(("cores", "dtype"), [(1, "float16"), (1000, "float32")])
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
    "case",
    [
        "op=delta_rule dtype=float32 key=130 value=70",
        "op=gated_delta_rule dtype=float32 key=70 value=130",
        "op=delta_rule dtype=float32 key=256 value=24",
        "op=delta_rule dtype=float16 key=384 value=40",
        "op=sum_rule dtype=float32 key=130 value=130",
        "op=gated_rule dtype=float16 key=40 value=260",
    ],
)
def test_widths(case):
    """In the widest precision that the kernels have room for."""
    agrees(f"{case} time=17 state=1 heads=2")


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
