"""Every kernel against naive in float64: outputs, states and gradients.

python -m pytest -m gpu tests/gpu/test_kernels.py
"""

import pytest
import torch

from fwlab.ops.call.choice import Refused
from problems.kernels import LIMITS, PROBLEMS


@pytest.fixture(autouse=True)
def poison():
    """New memory holds NaN: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=[one.key for one in PROBLEMS])
def test_agrees_with_naive(problem, dtype):
    try:
        errors = problem.errors(dtype, "cuda")
    except Refused as error:  # by design: the record says so
        pytest.skip(str(error.limit))
    assert max(errors) <= LIMITS[dtype], errors
