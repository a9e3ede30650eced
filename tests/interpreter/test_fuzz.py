"""The fuzzer's cases on kernels."""

import fuzz
import pytest

from fwlab.ops import _triton


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 1000])
def test_fixed_cases(cores, request, monkeypatch):
    """In small tiles; with many multiprocessors, outputs have a kernel of their own."""
    if cores == 1:
        request.getfixturevalue("small")
    monkeypatch.setattr(_triton, "multiprocessors", lambda device: cores)
    cases = fuzz.fixed(80, implementation="triton")
    # Two steps per token, with keys longer than 1: float16 rounds to 1.7 times the limit.
    rounds = ("delta_product", "float16")
    assert not fuzz.search(c for c in cases if (c["op"], c["dtype"]) != rounds)
