"""Compare outputs, states and gradients of every kernel with the loops of the fuzzer.

python -m pytest -m gpu tests/gpu/test_kernels.py
"""

import fuzz
import pytest
import torch

#: Sizes with full and partial chunks and tiles; each width has a separate kernel.
RULES = [
    "time=130 heads=3 key=64 value=64",
    "time=77 heads=2 key=24 value=40",
    "time=1 heads=2 key=64 value=64",
    "time=200 heads=2 key=128 value=128",
    "time=4 heads=2 key=32 value=64",
    "time=50 heads=2 key=32 value=64",
]
AFT = [
    "time=130 value=64 window=32",
    "time=77 value=40 window=16",
    "time=1 value=40 window=16",
    "time=700 value=64 window=64",
    "time=130 value=64 window=32 size=10.0",
]
FEEDBACK = [
    "time=40 layers=2 heads=2 key=32 value=80",
    "time=34 layers=3 heads=2 key=16 value=40",
]
LARGE = [
    *(
        f"op={op} {size}"
        for op in fuzz.RULES
        for size in RULES
        if "triton" in fuzz.forms(op)
    ),
    *(
        f"op={op} normalize=1 {size}"
        for op in ("sum_rule", "gated_rule")
        for size in RULES
    ),
    *(
        f"op={op} heads=2 {size}"
        for op in ("aft_simple", "aft_full", "aft_local", "aft_conv")
        for size in AFT
    ),
    *(f"op=feedback fewer={shared} {size}" for shared in (0, 1) for size in FEEDBACK),
]


@pytest.fixture(autouse=True)
def poison():
    """Fill allocated memory with NaN, which reveals elements that no kernel writes."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", LARGE)
def test_agrees_with_the_loops(case, dtype):
    c = fuzz.parsed(f"{case} state=1 implementation=triton device=cuda")
    assert fuzz.check(c | {"dtype": dtype, "batch": 1}) in (None, "beyond")


@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
def test_fixed_cases():
    assert not fuzz.search(fuzz.fixed(150, implementation="triton", device="cuda"))
