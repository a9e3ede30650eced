"""Run the cases of the fuzzer `fuzz.py`, and test that it finds mistakes."""

import functools

import fuzz
import operation_mutants
import pytest
import torch

from fwlab import ops


def test_fixed_cases():
    """No fixed case of the fuzzer fails; every machine runs identical cases."""
    assert not fuzz.search(fuzz.fixed())


@pytest.mark.slow
def test_the_cases_of_this_night():
    assert not fuzz.search(fuzz.drawn(fuzz.TODAY, 2000))


def test_a_mistake_is_found_and_made_simple(monkeypatch):
    """The fuzzer finds a relative error of 1e-4, and simplifies the case."""
    right = ops.fwp

    @functools.wraps(right)
    def wrong(a, *args, **options):
        y, *state = right(a, *args, **options | {"return_state": True})
        if y.shape[1] > 8:
            y = y * (1 + 1e-4)
        return (y, *state) if "return_state" in options else y

    monkeypatch.setattr(ops, "fwp", wrong)
    monkeypatch.setattr(fuzz, "OPERATIONS", ("fwp",))
    case = next(c for i in range(99) if fuzz.fails(c := fuzz.draw(f"0/{i}")))
    simple = fuzz.parsed(fuzz.line(fuzz.simpler(case)))
    assert simple == fuzz.SIMPLEST | {"op": "fwp", "time": 9, "seed": case["seed"]}
    assert "y is off by" in fuzz.check(simple)


@pytest.mark.slow
def test_small_mistakes_are_found():
    assert not operation_mutants.main([])


@pytest.mark.parametrize("op", ["sum_rule", "gated_rule", "gated_delta_rule"])
@pytest.mark.parametrize("implementation", ["chunked", "efficient"])
def test_forms_agree_on_what_has_faded(op, implementation):
    """All implementations agree on means of values that decayed to less than e^-80."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.rand(2, 70, 2, 3, generator=g) + 0.1 for _ in "qkv")
    beta, choice = torch.rand(2, 2, 70, 2, generator=g)
    decays = torch.tensor([0, -1, -3, -90, -100, -1000, -torch.inf])
    given = {"q": q, "k": k, "v": v, "beta": beta}
    given = {name: x for name, x in given.items() if name in fuzz.takes(op)}
    given["log_decay"] = decays[(choice * 7).long()]
    naive, found = (
        getattr(ops, op)(
            **given, normalize=True, return_state=True, implementation=name
        )
        for name in ("naive", implementation)
    )
    torch.testing.assert_close(found[0], naive[0], rtol=1e-4, atol=1e-4)
    for one, other in zip(found[1], naive[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
