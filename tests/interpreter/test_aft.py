"""Kernels of the Attention Free Transformer against naive in float64."""

import pytest
import torch

from fwlab import ops
from fwlab.ops.aft.simple import kernels as scan
from fwlab.ops.aft.window import kernels as window
from fwlab.ops.call import launcher
from problems import (
    aft,
    borders,
    error,
    outcome,
    packed_problem,
    problem,
    rebuild,
    weighted,
)
from problems.row import Row

pytestmark = pytest.mark.slow
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3}
ROWS = aft.ROWS
each_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
#: To the kernels one key for a whole head is several.
FORMS = {name: row for name, row in ROWS.items() if name != "aft-conv-one-key"}
each_form = pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)


@pytest.fixture
def small(monkeypatch):
    """Four steps per segment and tile: nine cross two borders."""
    monkeypatch.setattr(scan, "SEGMENT", 4)
    for name in ("TILE", "KEYS"):
        monkeypatch.setattr(window, name, 4)


def exact(x: torch.Tensor) -> torch.Tensor:
    return x.detach().double().requires_grad_()


def agrees(row: Row, inputs, state, limit: float) -> None:
    found = outcome(row, inputs, state, "triton")
    wanted = outcome(row, [exact(x) for x in inputs], rebuild(state, exact), "naive")
    assert found[0].dtype == inputs[2].dtype
    for a, b in zip(found, wanted, strict=True):
        # The bias of an only key has a gradient of 0, up to rounding.
        assert (error(a, b) if b.any() else a.norm()) < limit


def one_more(row: Row) -> int:
    """The fewest steps that cross a border of the kernels as they are."""
    return 1 + (scan.SEGMENT if row is ROWS["aft-simple"] else window.TILE)


@each_row
def test_agrees(row):
    inputs, state = problem(row, one_more(row), torch.float32)
    agrees(row, inputs, state, 1e-5)


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("dtype", LIMITS)
@each_row
def test_agrees_for_longer(row, dtype, with_state):
    """Several tiles; and a sequence of one step in a tile of its own."""
    for time in (65, 1):
        inputs, state = problem(row, time, dtype, with_state=with_state)
        agrees(row, inputs, state, LIMITS[dtype])


# Two tiles and a masked one; two whole ones; part of one.
@pytest.mark.parametrize(
    ("time", "with_state", "dtype"),
    [
        (9, True, torch.float16),
        (8, False, torch.float32),
        (1, False, torch.float16),
        (1, True, torch.float32),
    ],
)
@each_row
def test_agrees_in_small_tiles(row, time, dtype, with_state, small):
    inputs, state = problem(row, time, dtype, with_state=with_state)
    agrees(row, inputs, state, LIMITS[dtype])


@each_form
def test_masked(row, small):
    inputs, state = problem(row, 9, torch.float32)
    mask = torch.rand(2, 9, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[0, :5] = False

    def op(*given, **options):
        return row(*given, key_mask=mask, **options)

    masked = Row(op, row.make, row.large)
    agrees(masked, inputs, state, 1e-5)
    inputs, _ = problem(row, 9, torch.float32, with_state=False)
    agrees(masked, inputs, None, 1e-5)


def test_packed(small):
    row, lengths = ROWS["aft-simple"], [3, 0, 5]
    inputs, state = packed_problem(row, lengths, torch.float32)

    def op(*given, **options):
        return row(*given, cu_seqlens=borders(lengths), **options)

    agrees(Row(op, row.make, row.large), inputs, state, 1e-5)


@each_form
def test_in_two_pieces(row, small):
    inputs, state = problem(row, 9, torch.float32)
    whole, end = row(*inputs, state=state, return_state=True, implementation="triton")
    pieces = []
    for start, stop in ((0, 3), (3, 9)):
        cut = row.cut(inputs, start, stop)
        y, state = row(*cut, state=state, return_state=True, implementation="triton")
        pieces.append(y)
    assert error(torch.cat(pieces, 1), whole) < 1e-5
    for a, b in zip(state, end, strict=True):
        assert error(a, b) < 1e-5


@pytest.mark.parametrize("keys", ["std 60", "rising", "falling"])
@each_form
def test_extreme_keys(row, keys, small):
    inputs, _ = problem(row, 9, torch.float32, with_state=False)
    with torch.no_grad():
        if keys == "std 60":
            inputs[1].mul_(30)
        else:
            # First by less than the keys differ anyhow, then by more.
            line = torch.linspace(0, 200**0.5, 9) ** 2
            line = line if keys == "rising" else -line
            shape = (1, 9) + (1,) * (inputs[1].dim() - 2)
            inputs[1].add_(line.view(shape))
    # An exponent of 200 has an error of 1e-5 in float32.
    agrees(row, inputs, None, 1e-4)


@each_form
def test_later_keys_change_no_bit(row, small):
    inputs, state = problem(row, 7, torch.float32)
    before = row(*inputs, state=state, implementation="triton")
    for t, key, value in ((2, 1e30, -1e20), (5, 1e30, -1e20), (5, 12, 3e38)):
        changed = [x.detach().clone() for x in inputs]
        changed[1][:, t:] = key
        changed[2][:, t:] = value
        after = row(*changed, state=state, implementation="triton")
        assert torch.equal(after[:, :t], before[:, :t])


def test_full_sees_everything(small):
    inputs, _ = problem(ROWS["aft-full"], 9, torch.float32, with_state=False)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 2:6] = False

    def op(*given, **options):
        return ops.aft_full(*given, causal=False, key_mask=mask, **options)

    leaves, exactly = [[*map(f, inputs)] for f in (torch.clone, exact)]
    found = op(*leaves, implementation="triton")
    wanted = op(*exactly, implementation="naive")
    assert error(found, wanted) < 1e-5
    found, wanted = (
        torch.autograd.grad(weighted(y), x)
        for y, x in ((found, leaves), (wanted, exactly))
    )
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b) < 1e-5


@pytest.mark.parametrize("name", ["aft-full", "aft-local"])
def test_windows_without_tensor_cores(name, small, monkeypatch):
    """And with them, no key is taken on its own if nothing is large."""
    row = ROWS[name]
    inputs, state = problem(row, 7, torch.float32)
    taken, one = [], window._at
    monkeypatch.setattr(window, "_at", lambda *x: [taken.append(0), one(*x)][1])
    agrees(row, inputs, state, 1e-5)
    assert not taken
    monkeypatch.setattr(launcher, "TENSOR_CORES", (10, 0))
    monkeypatch.setattr(window, "_dot", None)
    agrees(row, inputs, state, 1e-5)
    assert taken


@pytest.mark.parametrize("name", ["aft-full", "aft-local"])
def test_a_row_alone_is_taken_key_by_key(name, small):
    """Only where its own keys or biases need it: other rows keep their bits."""
    row = ROWS[name]
    inputs, state = problem(row, 7, torch.float32)
    before = row(*inputs, state=state, implementation="triton")
    with torch.no_grad():
        inputs[3][5] *= 60
    after = row(*inputs, state=state, implementation="triton")
    rest = [t for t in range(7) if t != 5]
    assert torch.equal(after[:, rest], before[:, rest])
    agrees(row, inputs, state, 1e-4)


@each_form
def test_strided(row, small):
    inputs, state = problem(row, 5, torch.float32)
    strided = [
        x.detach().movedim(1, 0).contiguous().movedim(0, 1).requires_grad_()
        for x in inputs
    ]
    agrees(row, strided, state, 1e-5)


@pytest.mark.parametrize("name", ["aft-simple", "aft-full", "aft-local"])
def test_many_channels(name, small):
    """More than a program takes, in both kinds of kernels."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 3, 70, generator=generator) for _ in range(3)]
    if name != "aft-simple":
        inputs.append(torch.randn(3, 3, generator=generator))
    agrees(ROWS[name], [x.requires_grad_() for x in inputs], None, 1e-5)


def test_looking_ahead_is_refused():
    inputs, _ = problem(aft.ROWS["aft-simple"], 3, torch.float32)
    with pytest.raises(ValueError, match="causal=False"):
        ops.aft_simple(*inputs, causal=False, implementation="triton")


@pytest.mark.parametrize("steps", [(0.0, 200.0), (-200.0, 0.0)])
def test_maxima_apart(steps, small):
    """Biases and keys whose own maxima stand at different places."""
    k = torch.tensor(steps).view(1, 2, 1).expand(1, 2, 3).contiguous()
    q, v = torch.zeros(1, 2, 3), torch.tensor([1.0, 2.0]).view(1, 2, 1).expand(1, 2, 3)
    bias = torch.tensor([[0.0, -200.0], [0.0, -200.0]])
    given = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    agrees(aft.ROWS["aft-full"], given, None, 1e-5)
    band = bias.flip(1).clone().requires_grad_()
    agrees(aft.ROWS["aft-local"], [*given[:3], band], None, 1e-5)


@pytest.mark.parametrize("window", [1, 4, 5, 11])
def test_windows_and_tiles(window, small):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 9, 6, generator=generator) for _ in range(3)]
    inputs.append(torch.randn(9, window, generator=generator))
    agrees(aft.ROWS["aft-local"], [x.requires_grad_() for x in inputs], None, 1e-5)


def test_half_precision_is_read_as_it_is(small):
    """No copy in float32 of what a kernel reads is kept."""
    inputs, _ = problem(aft.ROWS["aft-simple"], 9, torch.float16, with_state=False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.detach()), lambda nothing: None
    ):
        ops.aft_simple(*inputs, implementation="triton")
    long = [x for x in kept if x.dim() == 3 and x.shape[1] == 9]
    assert long and all(x.dtype == torch.float16 for x in long)


def test_no_second_derivative(small):
    for name in ("aft-simple", "aft-local"):
        inputs, _ = problem(aft.ROWS[name], 5, torch.float32, with_state=False)
        y = aft.ROWS[name](*inputs, implementation="triton")
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(y.sum(), inputs, create_graph=True)


def test_auto_leaves_the_full_form_to_the_library():
    """The form without matrix products is there, and not chosen."""
    assert list(ops.TABLE["aft_full"].implementations)[-1] == "efficient"
    assert list(ops.TABLE["aft_local"].implementations)[-1] == "triton"
