"""All operations in one table, with helpers for the tests."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from problems import aft, feedback, fwp, rules
from problems.row import Inputs, Row

#: name of the row -> operation and problems.
ROWS: dict[str, Row] = {**fwp.ROWS, **rules.ROWS, **aft.ROWS, **feedback.ROWS}


def problem(
    row: Row,
    time: int,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    with_state: bool = True,
) -> tuple[Inputs, Any]:
    """Inputs and a state of `dtype`, all leaves with gradients."""
    generator = torch.Generator().manual_seed(seed)
    inputs, state = row.make(time, generator, with_state)
    carried = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [leaf(x, dtype) for x in inputs]
    return leaves, rebuild(state, lambda x: leaf(x, carried))


def packed_problem(
    row: Row, lengths: list[int], dtype: torch.dtype = torch.float64
) -> tuple[Inputs, Any]:
    """Inputs of documents in one row, and a state for each of them."""
    inputs, state = problem(row, sum(lengths), dtype)
    factors = torch.linspace(1, 0.1, len(lengths)).tolist()

    def states(x: Tensor) -> Tensor:
        return leaf(torch.cat([x[:1] * factor for factor in factors]), x.dtype)

    return [leaf(x[:1], dtype) for x in inputs], rebuild(state, states)


def dropped(row: Row, inputs: Inputs, state: Any, keep: Tensor) -> list[Tensor]:
    """What a mask means: `y` and states of each sequence without its masked steps."""
    y, after = [], []
    for b, real in enumerate(keep):
        places = real.nonzero()[:, 0]
        timed = [x.shape[:2] == keep.shape for x in inputs]
        own = [
            x[b : b + 1, places] if t else x for x, t in zip(inputs, timed, strict=True)
        ]
        y_b, after_b = row(
            *row.pick(own, places),
            state=rebuild(state, lambda x, b=b: x[b : b + 1]),
            return_state=True,
            implementation="naive",
        )
        y.append(y_b.new_zeros(1, len(real), *y_b.shape[2:]).index_copy(1, places, y_b))
        after.append(parts(after_b))
    if len({x.shape for each in after for x in each[:1]}) > 1:
        return [torch.cat(y)]  # memories that grow
    return [torch.cat(y), *map(torch.cat, zip(*after, strict=True))]


def borders(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """Where these documents begin and end in one row."""
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.detach()
    return x.to(dtype).requires_grad_() if x.is_floating_point() else x


def rebuild(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, tuple):
        made = [rebuild(part, change) for part in state]
        return type(state)(*made) if hasattr(state, "_fields") else tuple(made)
    return state


def parts(state: Any) -> tuple[Tensor, ...]:
    """The floating-point tensors of a state."""
    if isinstance(state, Tensor):
        return (state,) if state.is_floating_point() else ()
    if isinstance(state, tuple):
        return tuple(x for part in state for x in parts(part))
    return ()


def error(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of the expected tensor.

    Infinities, such as the log of an empty sum, must be at the same
    positions, and do not count.
    """
    found, wanted = found.double(), wanted.double()
    assert found.shape == wanted.shape
    same = torch.isinf(wanted) & (found == wanted)
    found, wanted = (torch.where(same, 0, x) for x in (found, wanted))
    return ((found - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()


def weighted(*outputs: Tensor, seed: int = 1) -> Tensor:
    """A scalar that depends on every finite output with a random weight."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        weights = weights.to(output.device)
        finite = torch.where(torch.isinf(output), 0, output.double())
        total = total + (finite * weights).sum()
    return total


def outcome(row: Row, inputs: Inputs, state: Any, implementation: str) -> list[Tensor]:
    """Outputs, final state and every gradient, as one list."""
    y, after = row(
        *inputs, state=state, return_state=True, implementation=implementation
    )
    leaves = [x for x in [*inputs, *parts(state)] if x.requires_grad]
    gradients = torch.autograd.grad(weighted(y, *parts(after)), leaves)
    return [y, *parts(after), *gradients]


def saved_bytes(function: Callable[[], Any]) -> int:
    """What autograd saves for the backward pass, each storage once."""
    kept: list[Tensor] = []

    def pack(x: Tensor) -> int:
        # Not the tensor itself: a node that keeps its own output would
        # keep itself, for good.
        kept.append(x.detach())
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, kept.__getitem__):
        alive = function()
    del alive
    memories = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in kept}
    return sum(memory.nbytes() for memory in memories.values())
