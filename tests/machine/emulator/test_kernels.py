"""Compiled kernels against naive in float64."""

import json
from collections import Counter

import emulate
import pytest
import torch
import triton

import emulator
from fwlab import ops
from fwlab.ops.call import launcher
from problems.kernels import LIMITS

CASES = {case.key: case for case in emulate.cases()}
TABLE = json.loads(emulate.TABLE.read_text("utf-8"))


@pytest.mark.parametrize("key", CASES)
def test_problems(key):
    assert emulate.check(CASES[key]) <= LIMITS[CASES[key].dtype]


def test_table_has_every_case():
    assert [row["case"] for row in TABLE["cases"]] == list(CASES)
    assert all(row["error"] <= LIMITS[row["dtype"]] for row in TABLE["cases"])
    assert set(TABLE["barriers"]) == {
        f"{name}, {emulate.target(capability)}"
        for name in emulate.DELETED
        for capability in (emulate.HOPPER, emulate.AMPERE)
    }


def test_barriers_in_the_table_are_those_of_the_kernels():
    """Else the table is of other kernels: run python tests/machine/emulate.py."""
    if triton.__version__ != TABLE["triton"]:
        pytest.skip("another compiler makes other code")
    name = "sum 64, normalized"
    case = emulate.Case(emulate.DELETED[name], "bfloat16", emulate.HOPPER)
    for one in emulate.kept(case):
        kinds = Counter(kind for _, kind in emulate.orders(one.program))
        row = TABLE["barriers"][f"{name}, {emulate.target(emulate.HOPPER)}"]
        counts = row[one.program.name]["deleted"]
        assert kinds == {kind: found[0] for kind, found in counts.items()}


def test_a_barrier_is_missed():
    """The first of one kernel, which is otherwise right."""
    problem = emulate.DELETED["sum 64, normalized"]
    case = emulate.Case(problem, "bfloat16", emulate.HOPPER)
    one = emulate.kept(case)[0]
    places = [
        place for place, kind in emulate.orders(one.program) if kind == "bar.sync"
    ]
    assert emulate.noticed(one, places[0])
    # Without an instruction that does nothing, nothing changes.
    assert not emulate.noticed(one, len(one.program.instructions) - 1)


@pytest.mark.parametrize("capability", [emulate.HOPPER, emulate.AMPERE])
@pytest.mark.parametrize("name", ["delta 64", "sum 64, normalized"])
def test_all_barriers_are_missed(name, capability):
    """But for those in the table, which do nothing."""
    case = emulate.Case(emulate.DELETED[name], "bfloat16", capability)
    found = emulate.deletions(case)
    table = TABLE["barriers"][f"{name}, {emulate.target(capability)}"]
    if triton.__version__ == TABLE["triton"]:
        assert json.loads(json.dumps(found)) == table
    counts = [count for row in found.values() for count in row["deleted"].values()]
    every, seen = map(sum, zip(*counts, strict=True))
    assert seen >= 0.8 * every


def test_as_a_stand_in():
    """A kernel runs in place, and "auto" does not choose it on a CPU."""
    x = torch.randn(1, 3, 1, 16)
    beta = torch.rand(1, 3, 1)
    with launcher.standing_in(emulator.stand_in((8, 0))):
        found = ops.delta_rule(x, x, x, beta, implementation="triton")
        assert torch.equal(
            ops.delta_rule(x, x, x, beta),
            ops.delta_rule(x, x, x, beta, implementation="efficient"),
        )
        with pytest.raises(ValueError, match="no kernel for float64"):
            ops.delta_rule(*[x.double()] * 3, beta.double(), implementation="triton")
    wanted = ops.delta_rule(x, x, x, beta, implementation="naive")
    assert torch.allclose(found, wanted, atol=1e-5)
    assert emulator.stand_in((8, 0)) is emulator.stand_in((8, 0))
