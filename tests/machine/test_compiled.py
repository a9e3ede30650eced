"""The compiled kernels: what they take, how many there are, their indices."""

import json
import re

import aot
import pytest

TABLE = json.loads(aot.TABLE.read_text("utf-8"))

TARGETS = [
    pytest.param(name, capability, id=f"{name}, sm_{capability[0]}{capability[1]}")
    for name, (_, capabilities) in aot.CASES.items()
    for capability in capabilities
]


@pytest.mark.parametrize(("name", "capability"), TARGETS)
def test_what_kernels_take(name, capability):
    """Shared memory and spills of all that is shipped, as in the table.

    Another compiler may give other numbers; whatever it gives must fit.
    """
    found = aot.uses(name, capability)
    table = {key: TABLE["kernels"][name][key] for key in found}
    assert found
    for key, use in found.items():
        assert use.shared <= aot.ROOM[capability], key
        same = TABLE["versions"] == aot.VERSIONS
        assert use.stack <= table[key]["stack"] + (0 if same else 512), key
        assert use.shared <= table[key]["shared"] or not same, key


@pytest.mark.parametrize("name", aot.CASES)
def test_table_has_every_kernel(name):
    run, capabilities = aot.CASES[name]
    keys = {
        aot.key(launch, capability)
        for capability in capabilities
        for launch in aot.launches(run, capability)
    }
    assert keys == set(TABLE["kernels"][name]), "run python tests/machine/aot.py"


def test_table_has_nothing_else():
    assert set(TABLE["kernels"]) == set(aot.CASES)


@pytest.mark.parametrize(
    "name", ["delta 64", "delta 128", "gated delta 64", "gated 64, normalized"]
)
def test_launches_are_few(name):
    """One more would be zeros for a state that is missing."""
    for capability in (aot.HOPPER, aot.AMPERE):
        assert len(aot.launches(aot.CASES[name][0], capability)) == 4


@pytest.mark.parametrize(
    "name",
    [
        "delta 64",
        "gated delta 64",
        "gated 64, normalized",
        "delta 64, few heads",
        "feedback 64",
    ],
)
def test_offsets_beyond_32_bits(name):
    """No kernel multiplies two numbers of a call in 32 bits.

    Steps times heads may exceed 2^31. Indices within a chunk are tiles, and
    the product of a number and a constant is the width of all heads.
    """
    made = {x.kernel: x for x in aot.launches(aot.CASES[name][0], aot.HOPPER)}
    for launch in made.values():
        code = aot.build(launch, aot.HOPPER).asm["ttir"]
        products = re.findall(r"arith\.muli (%\w+), (%\w+) : i32", code)
        constants = set(re.findall(r"(%\w+) = arith.constant", code))
        for pair in products:
            assert constants.intersection(pair), (launch.kernel, pair)
