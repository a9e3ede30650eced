"""Whether PyTorch transforms a call instead of computing it.

Then a formula has to be plain: values cannot decide what is computed, and a
backward pass by hand says nothing about tangents.
"""

from collections.abc import Callable

import torch
from torch.autograd import forward_ad


def transformed() -> bool:
    """Within `torch.func`: `vmap`, `grad`, `jacrev` and others."""
    # What an autograd function itself asks first.
    return torch._C._are_functorch_transforms_active()


def forward_mode() -> bool:
    """Where tensors may carry tangents, as within `jacfwd`."""
    return forward_ad._current_level >= 0


def constant(function: Callable) -> Callable:
    """Decorator: `torch.compile` does not look into the function.

    It calls the function once, and uses the result as a constant. So does
    `torch.compiler.assume_constant_result`, but that loads the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def traced() -> bool:
    """Whether `torch.compile`, `torch.func` or forward mode transforms the call."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def recorded(x: torch.Tensor) -> bool:
    """Whether autograd records what is computed from `x`."""
    return torch.is_grad_enabled() and x.requires_grad
