"""What backward passes written by hand have in common."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def room(x: Tensor | None) -> Any:
    """Where the gradient of `x` goes; None for what was not given."""
    return None if x is None else x.new_empty(x.shape)


def full_precision(x: Tensor) -> AbstractContextManager:
    """Autocast would push sums on the device of `x` into half precision;
    inside, it is off.
    """
    device = x.device.type
    if not torch.amp.is_autocast_available(device):  # such as "meta"
        return nullcontext()
    return torch.autocast(device, enabled=False)


def backward_pass(function: Callable) -> Callable:
    """Decorator of a custom backward pass written by hand.

    It runs in full precision also under autocast, and says so when it
    is asked for a second derivative: autograd runs a backward pass with
    gradients enabled only if it is to be differentiated again.
    """

    @functools.wraps(function)
    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the efficient implementation has no second "
                "derivative; call the operation with "
                "implementation='naive' for create_graph=True"
            )
        with full_precision(ctx.saved_tensors[0]):
            return function(ctx, *gradients)

    return run


def will_go_back(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may follow, for which states are kept."""
    return torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in tensors
    )
