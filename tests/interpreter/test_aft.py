"""Kernels of the Attention Free Transformer: what random cases do not find."""

import fuzz
import pytest
import torch
from alike import call, error, problem

from fwlab.ops import _triton
from fwlab.ops.aft.window import kernels as window

pytestmark = pytest.mark.slow
FORMS = ("aft_simple", "aft_full", "aft_local", "aft_conv")
SIZES = "batch=2 heads=3 value=2 window=4 dtype=float32 implementation=triton"
#: Two tiles and a masked one; two whole ones; part of one.
LENGTHS = ("time=9", "time=8", "time=1")
MORE = ("state=1", "mask=some", "size=60.0")
CASES = [f"op={op} {time} {more}" for op in FORMS for time in LENGTHS for more in MORE]
CASES += [f"op=aft_full {time} causal=0" for time in LENGTHS]
#: More channels than a program takes, and windows that end within a tile.
CASES += [f"op={op} time=3 batch=1 value=70" for op in FORMS[:3]]
CASES += [f"op=aft_local time=9 window={width}" for width in (1, 5, 11)]


def agrees(text):
    assert fuzz.check(fuzz.parsed(f"{SIZES} {text}")) is None


@pytest.mark.parametrize("case", CASES)
def test_agrees_in_small_tiles(case, small):
    agrees(case)


@pytest.mark.parametrize("op", FORMS)
def test_agrees_in_whole_tiles(op):
    agrees(f"op={op} time=65 state=1")


@pytest.mark.parametrize("op", FORMS)
def test_later_keys_change_no_bit(op, small):
    p = problem(f"op={op} time=7 {SIZES}", grad="none")
    how = {"implementation": "triton"}
    before = call(p, **how)
    for t, key, value in ((2, 1e30, -1e20), (5, 1e30, -1e20), (5, 12, 3e38)):
        changed = {name: p.x[name].clone() for name in "kv"}
        changed["k"][:, t:] = key
        changed["v"][:, t:] = value
        assert torch.equal(call(p, **changed, **how)[:, :t], before[:, :t])


@pytest.mark.parametrize("op", ["aft_full", "aft_local"])
def test_windows_without_tensor_cores(op, small, monkeypatch):
    """And with them, no key is taken on its own if nothing is large."""
    taken, one = [], window._at
    monkeypatch.setattr(window, "_at", lambda *x: [taken.append(0), one(*x)][1])
    agrees(f"op={op} time=7 state=1")
    assert not taken
    monkeypatch.setattr(_triton, "TENSOR_CORES", (10, 0))
    monkeypatch.setattr(window, "_dot", None)
    agrees(f"op={op} time=7 state=1")
    assert taken


@pytest.mark.parametrize(("op", "name"), [("aft_full", "bias"), ("aft_local", "band")])
def test_a_row_alone_is_taken_key_by_key(op, name, small):
    """Only where its own keys or biases need it: other rows keep their bits."""
    p = problem(f"op={op} time=7 {SIZES}", grad="none")
    how = {"implementation": "triton"}
    before, table = call(p, **how), p.x[name].clone()
    table[5] *= 60
    after = call(p, **{name: table}, **how)
    rest = [t for t in range(7) if t != 5]
    assert torch.equal(after[:, rest], before[:, rest])
    exact = {n: x.double() for n, x in p.x.items()} | {name: table.double()}
    assert error(after, call(p, **exact, implementation="naive")) < 1e-4
