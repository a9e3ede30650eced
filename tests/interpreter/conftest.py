"""GPU kernels in Triton's interpreter, in a process of their own.

Triton reads TRITON_INTERPRET when a kernel is defined, so a fixture would
come too late: `make test` starts pytest once more with it set.
"""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def poison():
    """New memory holds NaN: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
