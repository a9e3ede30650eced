"""The fuzzer: `fuzz.py` says what it does."""

import functools

import fuzz
import pytest

from fwlab import ops


def test_random_cases():
    """The same ones everywhere; others every night."""
    assert not fuzz.run(seed=0, cases=60)


@pytest.mark.slow
def test_the_cases_of_this_night():
    assert not fuzz.run(seed=fuzz.TODAY, cases=2000)


def test_a_mistake_is_found_and_made_simple(monkeypatch):
    """One wrong digit in the ninth step, in one operation."""
    right = ops.fwp

    @functools.wraps(right)
    def wrong(a, *args, **options):
        y, state = right(a, *args, **options)
        if y.shape[1] > 8:
            y = y * (1 + 1e-4)
        return y, state

    monkeypatch.setattr(ops, "fwp", wrong)
    monkeypatch.setattr(fuzz, "OPERATIONS", ("fwp",))
    case = next(c for i in range(99) if fuzz.fails(c := fuzz.draw(f"0/{i}")))
    simple = fuzz.parsed(fuzz.line(fuzz.simpler(case)))
    assert simple == fuzz.SIMPLEST | {"op": "fwp", "time": 9, "seed": case["seed"]}
    assert "y is off by" in fuzz.check(simple)
