"""The processor of our own (tests/processor) adds in another order, and no more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROCESSOR = Path(__file__).with_name("processor")


def results(exact=False):
    """Draw sums of 77 terms; of whole numbers every order gives the same."""
    generator = torch.Generator().manual_seed(0)
    if exact:
        a, b = torch.randint(-3, 4, (2, 2, 77, 77), generator=generator).bfloat16()
    else:
        a, b = torch.randn(2, 2, 77, 77, generator=generator).requires_grad_()
    values = {
        "mm": a[0] @ b[0],
        "bmm": a @ b,
        "addmm": torch.addmm(a[1], a[0], b[0], beta=2, alpha=3),
        "baddbmm": torch.empty_like(a).copy_(a).baddbmm_(a, b),
        "mv": a[0] @ b[0, 0],
        "linear": torch.nn.functional.linear(a, b[0], b[1, 0]),
        "einsum": torch.einsum("bij,bkj->ik", a, b),
        "sum": a.sum((0, 2), keepdim=True),
        "cumsum": a.cumsum(1),
    }
    if not exact:
        solve = torch.linalg.solve_triangular
        values |= {
            "gradient": torch.autograd.grad((a @ b).square().sum(), a)[0],
            "solve": solve(a[0] / 9, b[0], upper=False, unitriangular=True),
        }
    return {name: value.double().tolist() for name, value in values.items()}


@pytest.mark.skipif(
    not hasattr(torch.library, "get_kernel"), reason="PyTorch is too old for this mode"
)
def test_terms_are_added_in_another_order():
    # As conftest.py does it: the child takes it up, the grandchild inherits it.
    child = "import another_processor, subprocess, sys; subprocess.run(sys.argv[1:])"
    seed = 1 + int(os.environ.get("FWLAB_PROCESSOR") or 0)  # Not that of this test.
    done = subprocess.run(
        [sys.executable, "-c", child, sys.executable, __file__],
        cwd=PROCESSOR,
        env={**os.environ, "FWLAB_PROCESSOR": str(seed), "PYTHONPATH": ""},
        stdout=subprocess.PIPE,
        check=True,
    )
    theirs, still_exact = json.loads(done.stdout)
    ours = results()
    assert [name for name in ours if ours[name] == theirs[name]] == []
    for name in ours:
        torch.testing.assert_close(
            torch.tensor(ours[name]), torch.tensor(theirs[name]), rtol=1e-3, atol=1e-4
        )
    assert results(exact=True) == still_exact


if __name__ == "__main__":
    print(json.dumps([results(), results(exact=True)]))
