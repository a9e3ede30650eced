"""Compiled kernels in the emulator."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poison():
    """New memory holds NaN: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
