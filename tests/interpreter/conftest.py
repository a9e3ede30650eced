"""Run GPU kernels in Triton's interpreter, in a separate process.

Triton reads TRITON_INTERPRET when a kernel is defined, so a fixture would set it
too late. Without this variable, no test of this folder is collected:

    TRITON_INTERPRET=1 python -m pytest -m "" tests/interpreter
"""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def poison():
    """Fill allocated memory with NaN, which reveals elements that no kernel writes."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small(monkeypatch):
    """Use AFT segments and tiles of 4 steps, and feedback blocks of 4 memories."""
    from fwlab.ops.aft.simple import kernels as scan
    from fwlab.ops.aft.window import kernels as window
    from fwlab.ops.feedback import kernels as feedback

    sizes = ((scan, "SEGMENT", 4), (window, "TILE", 4), (window, "KEYS", 4))
    for module, name, size in (*sizes, (feedback, "TILE", 64)):
        monkeypatch.setattr(module, name, size)


if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
