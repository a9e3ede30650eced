"""What many tests of the package do: draw, compare, and expect an error."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor

from problems import error


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers in float64, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def drawn_mask(*shape: int, share: float = 0.6, seed: int = 0) -> Tensor:
    """A random mask that keeps about this share of the steps."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def numbers(state: object) -> int:
    """The number of scalars in a state, of whatever parts; masks are none."""
    if isinstance(state, Tensor):
        return state.numel() if state.is_floating_point() else 0
    return sum(map(numbers, state)) if isinstance(state, list | tuple) else 0


def agree(
    found: Iterable[Tensor], wanted: Iterable[Tensor], limit: float = 1e-12
) -> None:
    """All pairs of tensors are equal up to a relative error."""
    for one, other in zip(found, wanted, strict=True):
        assert error(one, other) < limit


def identical(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    """All pairs of tensors are equal to the last bit."""
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def refuses(
    call: Callable[[], object],
    message: str,
    kind: type[Exception] | tuple[type[Exception], ...] = (TypeError, ValueError),
) -> None:
    """A call raises an error, whose message is one line that says this."""
    with pytest.raises(kind, match=message) as info:
        call()
    assert "\n" not in str(info.value)
