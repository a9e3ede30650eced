"""Kernels of the Attention Free Transformer against naive in float64."""

import pytest
import torch

from fwlab import ops
from problems import aft, error, outcome, problem, rebuild
from problems.row import Row

LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3}
ROWS = aft.ROWS
each_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def exact(x: torch.Tensor) -> torch.Tensor:
    return x.detach().double().requires_grad_()


def agrees(row: Row, inputs, state, limit: float) -> None:
    found = outcome(row, inputs, state, "triton")
    wanted = outcome(row, [exact(x) for x in inputs], rebuild(state, exact), "naive")
    assert found[0].dtype == inputs[2].dtype
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b) < limit


# Either dtype with a state and without, and crosswise at night.
@pytest.mark.parametrize(
    ("time", "with_state", "dtype"),
    [
        (65, True, torch.float32),
        (65, False, torch.float16),
        (1, False, torch.float32),
        (1, True, torch.float16),
        pytest.param(65, False, torch.float32, marks=pytest.mark.slow),
        pytest.param(65, True, torch.float16, marks=pytest.mark.slow),
        pytest.param(1, True, torch.float32, marks=pytest.mark.slow),
        pytest.param(1, False, torch.float16, marks=pytest.mark.slow),
    ],
)
@each_row
def test_agrees(row, time, with_state, dtype):
    inputs, state = problem(row, time, dtype, with_state=with_state)
    agrees(row, inputs, state, LIMITS[dtype])


@each_row
def test_masked(row):
    inputs, state = problem(row, 65, torch.float32)
    mask = torch.rand(2, 65, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[0, :40] = False

    def op(*given, **options):
        return row(*given, key_mask=mask, **options)

    masked = Row(op, row.make, row.large)
    agrees(masked, inputs, state, 1e-5)
    inputs, _ = problem(row, 65, torch.float32, with_state=False)
    agrees(masked, inputs, None, 1e-5)


@each_row
def test_in_two_pieces(row):
    inputs, state = problem(row, 65, torch.float32)
    whole, end = row(*inputs, state=state, return_state=True, implementation="triton")
    pieces = []
    for start, stop in ((0, 31), (31, 65)):
        cut = row.cut(inputs, start, stop)
        y, state = row(*cut, state=state, return_state=True, implementation="triton")
        pieces.append(y)
    assert error(torch.cat(pieces, 1), whole) < 1e-5
    for a, b in zip(state, end, strict=True):
        assert error(a, b) < 1e-5


@pytest.mark.parametrize("keys", ["std 60", "rising", "falling"])
@each_row
def test_extreme_keys(row, keys):
    inputs, _ = problem(row, 65, torch.float32, with_state=False)
    with torch.no_grad():
        if keys == "std 60":
            inputs[1].mul_(30)
        else:
            line = torch.linspace(0, 200, 65)
            line = line if keys == "rising" else -line
            shape = (1, 65) + (1,) * (inputs[1].dim() - 2)
            inputs[1].add_(line.view(shape))
    # An exponent of 200 has an error of 1e-5 in float32.
    agrees(row, inputs, None, 1e-4)


@each_row
def test_later_keys_change_no_bit(row):
    inputs, state = problem(row, 40, torch.float32)
    before = row(*inputs, state=state, implementation="triton")
    for t in (1, 17, 39):
        changed = [x.detach().clone() for x in inputs]
        changed[1][:, t:] = 1e30
        changed[2][:, t:] = -1e20
        after = row(*changed, state=state, implementation="triton")
        assert torch.equal(after[:, :t], before[:, :t])


@each_row
def test_strided(row):
    inputs, state = problem(row, 40, torch.float32)
    strided = [
        x.detach().movedim(1, 0).contiguous().movedim(0, 1).requires_grad_()
        for x in inputs
    ]
    agrees(row, strided, state, 1e-5)


def test_many_channels():
    inputs = [
        torch.randn(1, 35, 150, generator=torch.Generator().manual_seed(i))
        for i in range(3)
    ]
    inputs = [x.requires_grad_() for x in inputs]
    agrees(aft.ROWS["aft-simple"], inputs, None, 1e-5)


def test_looking_ahead_is_refused():
    inputs, _ = problem(aft.ROWS["aft-simple"], 3, torch.float32)
    with pytest.raises(ValueError, match="causal=False"):
        ops.aft_simple(*inputs, causal=False, implementation="triton")


@pytest.mark.parametrize("steps", [(0.0, 200.0), (-200.0, 0.0)])
def test_maxima_apart(steps):
    """Biases and keys whose own maxima stand at different places."""
    k = torch.tensor(steps).view(1, 2, 1).expand(1, 2, 3).contiguous()
    q, v = torch.zeros(1, 2, 3), torch.tensor([1.0, 2.0]).view(1, 2, 1).expand(1, 2, 3)
    bias = torch.tensor([[0.0, -200.0], [0.0, -200.0]])
    given = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    agrees(aft.ROWS["aft-full"], given, None, 1e-5)
    band = bias.flip(1).clone().requires_grad_()
    agrees(aft.ROWS["aft-local"], [*given[:3], band], None, 1e-5)


@pytest.mark.parametrize("window", [1, 16, 17, 40])
def test_windows_and_tiles(window):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 35, 6, generator=generator) for _ in range(3)]
    inputs.append(torch.randn(35, window, generator=generator))
    agrees(aft.ROWS["aft-local"], [x.requires_grad_() for x in inputs], None, 1e-5)


def test_half_precision_is_read_as_it_is():
    """No copy in float32 of what a kernel reads is kept."""
    inputs, _ = problem(aft.ROWS["aft-simple"], 65, torch.float16, with_state=False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.detach()), lambda nothing: None
    ):
        ops.aft_simple(*inputs, implementation="triton")
    long = [x for x in kept if x.dim() == 3 and x.shape[1] == 65]
    assert long and all(x.dtype == torch.float16 for x in long)


def test_no_second_derivative():
    for name in ("aft-simple", "aft-local"):
        inputs, _ = problem(aft.ROWS[name], 5, torch.float32, with_state=False)
        y = aft.ROWS[name](*inputs, implementation="triton")
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(y.sum(), inputs, create_graph=True)


def test_auto_leaves_the_full_form_to_the_library():
    """The form without matrix products is there, and not chosen."""
    assert list(ops.TABLE["aft_full"])[-1] == "efficient"
    assert list(ops.TABLE["aft_local"])[-1] == "triton"
