"""Compiled kernels in the emulator."""

import pytest
import torch

from fwlab.ops.call import gpu

if gpu.INTERPRETED or not gpu.installed():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def poison():
    """New memory holds NaN: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
