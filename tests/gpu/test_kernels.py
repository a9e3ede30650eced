"""Every kernel against naive in float64: outputs, states and gradients.

python -m pytest -m gpu tests/gpu/test_kernels.py
"""

import pytest
import torch

from fwlab import ops
from fwlab.ops.call.choice import Refused
from fwlab.ops.call.rule import Rule
from problems.kernels import LIMITS, PROBLEMS

correcting = pytest.importorskip("fwlab.ops.correcting.kernels")
#: Some segments, and a part of one.
STEPPED = [
    one
    for one in PROBLEMS
    if one.time in (50, 200)
    and isinstance(record := ops.TABLE[one.op], Rule)
    and record.corrects
    and one.op != "dpfp_delta_rule"
]


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


@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("problem", STEPPED, ids=[one.key for one in STEPPED])
def test_agrees_step_by_step(problem, dtype, monkeypatch):
    """As on GPUs without tensor cores, which take any length."""
    monkeypatch.setattr(correcting, "SHORT", problem.time)
    errors = problem.errors(dtype, "cuda")
    assert max(errors) <= LIMITS[dtype], errors
