"""Kernels of the Attention Free Transformer: what random cases do not find."""

import fuzz
import pytest
import torch
from alike import call, error, problem

from fwlab import ops
from fwlab.ops import _triton
from fwlab.ops.aft.simple import kernels as scan
from fwlab.ops.aft.window import kernels as window

pytestmark = pytest.mark.slow
FORMS = ("aft_simple", "aft_full", "aft_local", "aft_conv")
each_form = pytest.mark.parametrize("op", FORMS)
SIZES = "batch=2 heads=3 value=2 window=4 dtype=float32 implementation=triton"


def agrees(text, **options):
    assert fuzz.check(fuzz.parsed(f"{text} {SIZES}") | options) is None


@pytest.fixture
def small(monkeypatch):
    """Four steps per segment and tile: nine cross two borders."""
    monkeypatch.setattr(scan, "SEGMENT", 4)
    for name in ("TILE", "KEYS"):
        monkeypatch.setattr(window, name, 4)


@pytest.mark.parametrize("state", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@each_form
def test_agrees(op, dtype, state):
    """Several tiles; and a sequence of one step in a tile of its own."""
    for time in (65, 1):
        agrees(f"op={op} time={time} state={state}", dtype=dtype)


# Two tiles and a masked one; two whole ones; part of one.
@pytest.mark.parametrize("time", [9, 8, 1])
@pytest.mark.parametrize("options", ["state=1", "mask=some", "causal=0", "size=60.0"])
@each_form
def test_agrees_in_small_tiles(op, time, options, small):
    if options == "causal=0" and op != "aft_full":
        pytest.skip("no such kernel")
    agrees(f"op={op} time={time} {options}")


@each_form
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


@pytest.mark.parametrize("op", ["aft_simple", "aft_full", "aft_local"])
def test_many_channels(op, small):
    """More than a program takes, in both kinds of kernels."""
    agrees(f"op={op} time=3", value=70, batch=1)


@pytest.mark.parametrize("width", [1, 4, 5, 11])
def test_windows_and_tiles(width, small):
    agrees("op=aft_local time=9", window=width)


def test_looking_ahead_is_refused():
    p = problem(f"op=aft_simple time=3 {SIZES}")
    with pytest.raises(ValueError, match="causal=False"):
        call(p, causal=False, implementation="triton")


def test_half_precision_is_read_as_it_is(small):
    """No copy in float32 of what a kernel reads is kept."""
    p, kept = problem(f"op=aft_simple time=9 {SIZES}", dtype="float16"), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.detach()), lambda nothing: None
    ):
        call(p, implementation="triton")
    long = [x for x in kept if x.dim() == 3 and x.shape[1] == 9]
    assert long and all(x.dtype == torch.float16 for x in long)


@pytest.mark.parametrize("steps", [(0.0, 200.0), (-200.0, 0.0)])
def test_maxima_apart(steps, small):
    """Biases and keys whose own maxima are at different places."""
    k = torch.tensor(steps).view(1, 2, 1).expand(1, 2, 3).contiguous()
    q, v = torch.zeros(1, 2, 3), torch.tensor([1.0, 2.0]).view(1, 2, 1).expand(1, 2, 3)
    bias = torch.tensor([[0.0, -200.0], [0.0, -200.0]])
    for op, table in ((ops.aft_full, bias), (ops.aft_local, bias.flip(1))):
        found = op(q, k, v, table, implementation="triton")
        exact = op(*(x.double() for x in (q, k, v, table)), implementation="naive")
        assert error(found, exact) < 1e-5
