"""Provide helpers that draw inputs, compare tensors and check error messages."""

from collections.abc import Callable, Iterable
from typing import Any

import fuzz
import pytest
import torch
from torch import Tensor

from fwlab import ops


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Sample float64 values from a normal distribution with a seeded generator."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def drawn_mask(*shape: int, share: float = 0.6, seed: int = 0) -> Tensor:
    """Sample a Boolean mask in which each step is True with probability `share`."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def numbers(state: object) -> int:
    """Return the number of floating-point elements in a state."""
    return sum(part.numel() for part in parts(state))


def agree(
    found: Iterable[Tensor], wanted: Iterable[Tensor], limit: float = 1e-12
) -> None:
    """Assert that paired tensors have equal dtypes and a small relative error."""
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert error(one, other) < limit


def identical(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    """Assert that paired tensors are exactly equal."""
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def refuses(
    call: Callable[[], object],
    message: str,
    kind: type[Exception] | tuple[type[Exception], ...] = (TypeError, ValueError),
) -> None:
    """Assert that `call` raises an error with a one-line message matching `message`."""
    with pytest.raises(kind, match=message) as info:
        call()
    assert "\n" not in str(info.value)


def rebuild(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of a state with `change` applied to every tensor."""
    if isinstance(state, Tensor):
        return change(state)
    if isinstance(state, tuple | list):
        made = [rebuild(part, change) for part in state]
        return type(state)(*made) if hasattr(state, "_fields") else type(state)(made)
    return state


def parts(state: Any) -> tuple[Tensor, ...]:
    """Return the floating-point tensors of a state."""
    if isinstance(state, Tensor):
        return (state,) if state.is_floating_point() else ()
    if isinstance(state, tuple | list):
        return tuple(x for part in state for x in parts(part))
    return ()


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference divided by the norm of the expected tensor.

    Infinities, such as the log of an empty sum, must be at the same
    positions; the norms exclude them.
    """
    found, wanted = found.double(), wanted.double()
    assert found.shape == wanted.shape
    same = torch.isinf(wanted) & (found == wanted)
    found, wanted = (torch.where(same, 0, x) for x in (found, wanted))
    return ((found - wanted).norm() / wanted.norm().clamp(min=1e-30)).item()


def weighted(*outputs: Tensor, seed: int = 1) -> Tensor:
    """Return the sum of all finite output elements, each times a random weight."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        weights = weights.to(output.device)
        finite = torch.where(torch.isinf(output), 0, output.double())
        total = total + (finite * weights).sum()
    return total


def problem(text: str, **options: Any) -> fuzz.Problem:
    """Parse a case in text form with `fuzz.parsed`, and return its `Problem`.

    - `options`: more options of the case, by name.
    """
    return fuzz.Problem(fuzz.parsed(text) | options)


def call(p: fuzz.Problem, **changes: Any) -> Any:
    """Call the operation of a fuzzer problem, with some arguments replaced or added."""
    op, given = p.c["op"], {**p.x, **changes}
    if op == "feedback":
        names = [n for n in ops.FeedbackWeights._fields if n in given]
        weights = ops.FeedbackWeights(**{n: given.pop(n) for n in names})
        given |= {"weights": weights, "heads": p.c["heads"]}
    if "normalize" in fuzz.takes(op):
        given = {"normalize": bool(p.c["normalize"])} | given
    return getattr(ops, op)(**given)


def computed(p: fuzz.Problem) -> list[Tensor]:
    """Return the outputs, states and gradients of a fuzzer problem."""
    outputs = p.called(p.x, p.state)
    return [x for _, x in p.with_gradients(outputs, p.x, p.state)]
