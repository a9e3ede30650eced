"""Test that `Recurrence` has correct gradients and runs each pass only once.

test_compile.py checks the custom operators of operations.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fwlab.ops import _recurrence
from fwlab.ops._recurrence import Recurrence

#: Calls of `forward` and `backward` in a test, with the results that are required.
calls = []


def forward(x, keep, power):
    a, b = x
    calls.append(("forward", keep))
    product = a**power if b is None else a**power * b
    return (product, product.exp()), (a.cos(),) if keep else ()


def backward(x, kept, gradients, needed, power):
    (a, b), (cosine, product) = x, kept
    calls.append(("backward", *needed))
    assert torch.equal(cosine, a.cos()) and product.shape == a.shape
    d, d_exp = (torch.zeros_like(a) if g is None else g for g in gradients)
    d = d + d_exp * product.exp()
    da = power * a ** (power - 1) * (1 if b is None else b) * d
    return da if needed[0] else None, a**power * d if needed[1] else None


def shapes(x, keep, power):
    same = [torch.empty_like(x[0]) for _ in range(3)]
    return same[:2], same[2:] if keep else []


product = Recurrence(
    "product_of_a_test",
    "Tensor a, Tensor? b",
    "int power",
    forward,
    backward,
    shapes,
    reads=(0,),
)


@pytest.fixture(params=["function", "node"])
def traced(request, monkeypatch):
    """Run a test eagerly and as if traced; return True if traced."""
    calls.clear()
    if request.param == "node":
        monkeypatch.setattr(_recurrence, "is_traced", lambda x: True)
    return request.param == "node"


def inputs(a=True, b=True):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, 5, generator=generator, dtype=torch.float64) + 0.5
    return [part.requires_grad_(need) for part, need in zip(x, (a, b), strict=True)]


def agrees(x, results, chosen=(0, 1)):
    """Assert that gradients of the `chosen` results agree with autograd."""
    leaves = [part for part in x if part is not None and part.requires_grad]
    a, b = x
    plain = a**3 if b is None else a**3 * b
    wanted = plain, plain.exp()
    losses = (sum(y[i].square().sum() for i in chosen) for y in (results, wanted))
    for found, right in zip(
        *(torch.autograd.grad(loss, leaves) for loss in losses), strict=True
    ):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("chosen", [(0,), (1,), (0, 1)])
def test_each_pass_runs_once(traced, chosen):
    x = inputs()
    agrees(x, product(x, 3), chosen)
    assert calls == [("forward", True), ("backward", True, True)]


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_backward_is_told_what_is_not_needed(traced, needs):
    x = inputs(*needs)
    agrees(x, product(x, 3))
    assert calls == [("forward", True), ("backward", *needs)]


def test_nothing_is_kept_without_a_backward_pass(traced):
    x = inputs()
    with torch.no_grad():
        product(x, 3)
    product(inputs(False, False), 3)
    assert calls == [("forward", False)] * 2


def test_checkpointing_computes_again_once(traced):
    x = inputs()
    agrees(x, checkpoint(lambda *x: product(x, 3), *x, use_reentrant=False))
    assert calls == [("forward", True)] * 2 + [("backward", True, True)]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_computes_nothing_twice(dynamic):
    def both(a, b):
        return product((a, b), 3)

    torch.compiler.reset()
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    x = inputs()
    compiled(*x)
    calls.clear()
    agrees(x, compiled(*x))
    assert calls == [("forward", True), ("backward", True, True)]
