"""The processor of our own (tests/processor) adds in another order, and no more."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

PROCESSOR = Path(__file__).with_name("processor")


def sums(a, b):
    """Sums of 77 terms; `a` and `b` have shape [2, 77, 77]."""
    values = {
        "mm": a[0] @ b[0],
        "bmm": a @ b,
        "addmm": torch.addmm(a[1], a[0], b[0], beta=2, alpha=3),
        "baddbmm": torch.empty_like(a).copy_(a).baddbmm_(a, b),
        "mv": a[0] @ b[0, 0],
        "dot": torch.stack([row @ b[0, 0] for row in a[0]]),
        "linear": torch.nn.functional.linear(a, b[0], b[1, 0]),
        "einsum": torch.einsum("bij,bkj->ik", a, b),
        "out": torch.mm(a[0], b[0], out=torch.empty_like(a[0])),
        "sum": a.sum((0, 2), keepdim=True),
        "all": torch.stack([row.sum() for row in a[0]]),
        "cumsum": a.cumsum(1),
    }
    return {name: value.double().tolist() for name, value in values.items()}


def rounded(a, b):
    """What is not exact for whole numbers either."""
    a.requires_grad_()
    (a[0] @ b[0] @ b[1]).square().sum().backward()
    values = {
        "gradient": a.grad,
        "solve": torch.linalg.solve_triangular(
            a[0] / 9, b[0], upper=False, unitriangular=True
        ),
        "mean": a.mean(1),
        "softmax": a.softmax(2),
        "logsumexp": a.logsumexp(2),
        "norm": torch.linalg.vector_norm(a, dim=2),
        "layer_norm": torch.nn.functional.layer_norm(a, a.shape[2:]),
    }
    return {name: value.double().tolist() for name, value in values.items()}


def results():
    generator = torch.Generator().manual_seed(0)
    shape = [2, 77, 77]
    a, b = torch.randn(2, *shape, generator=generator)
    one, two = torch.randint(-3, 4, (2, *shape), generator=generator).bfloat16()
    threads = {}
    thread = threading.Thread(target=lambda: threads.update(sums(a, b)))
    thread.start()
    thread.join()
    again = sums(a, b)
    assert again == threads
    if __name__ == "__main__":  # Compiled code calls the same product.
        assert torch.equal(torch.compile(torch.mm)(a[0], b[0]), a[0] @ b[0])
    # The later terms are others, the earlier sums the same.
    assert torch.equal(a.cumsum(1)[:, :40], a[:, :40].cumsum(1))
    # Rounded once: 1 + 1/256 + 1/256 is a bfloat16, 1 + 1/256 is none.
    few = torch.tensor([1, 1 / 256, 1 / 256]).bfloat16()
    assert few.sum() == few @ few.sign() == few.cumsum(0)[-1] == 1 + 1 / 128
    exact = [sums(one, two), sums(one.float(), two.float())]
    return again | rounded(a, b), exact


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
    ours, exact = results()
    assert [name for name in ours if ours[name] == theirs[name]] == []
    for name in ours:
        torch.testing.assert_close(
            torch.tensor(ours[name]), torch.tensor(theirs[name]), rtol=1e-3, atol=1e-4
        )
    assert exact == still_exact


if __name__ == "__main__":
    print(json.dumps(results()))
