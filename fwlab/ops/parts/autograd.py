"""What hand-written backward passes have in common."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fwlab import transforms


def room(x: Tensor | None) -> Any:
    """An empty tensor for the gradient of `x`; None if there is no `x`."""
    return None if x is None else x.new_empty(x.shape)


def full_precision(x: Tensor) -> AbstractContextManager:
    """Turn autocast off on the device of `x`.

    It would compute sums in half precision.
    """
    device = x.device.type
    if not torch.amp.is_autocast_available(device):  # "meta"
        return nullcontext()
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def backward_pass(function: Callable) -> Callable:
    """Decorator for a hand-written backward pass.

    The pass runs in full precision, even under autocast, and raises an
    error if you ask for a second derivative: autograd enables gradients
    in a backward pass only if it will differentiate it again.
    """

    # A gradient that has not come is 0: if none has, there is nothing to do.
    @functools.wraps(function)
    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the efficient implementation has no second "
                "derivative; call the operation with "
                "implementation='naive' for create_graph=True"
            )
        # Not from `ctx.saved_tensors`: under activation checkpointing
        # they can be read only once.
        first = next((g for g in gradients if g is not None), None)
        if first is None:  # no gradient has come
            return (None,) * len(ctx.needs_input_grad)
        with full_precision(first):
            return function(ctx, *gradients)

    return run


def will_go_back(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may follow, which needs saved states."""
    return torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in tensors
    )


def only_numbers(*tensors: Any) -> bool:
    """Whether nothing but the numbers of a call is wanted.

    That is, ordinary tensors without gradients, and nothing that traces or transforms.
    """
    if torch.is_grad_enabled() or transforms.traced():
        return False
    return all(type(x) is Tensor and not x.is_meta for x in tensors)


def pull_back(
    function: Callable[..., Sequence[Tensor | None]],
    tensors: Sequence[Tensor | None],
    needed: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """The gradients of `tensors`, by autograd through another call.

    - `needed`: which of them to compute.
    - `gradients`: those of the results.
    """
    with torch.enable_grad():
        leaves = [
            x if x is None else x.detach().requires_grad_(need)
            for x, need in zip(tensors, needed, strict=True)
        ]
        pairs = [
            (y, dy)
            for y, dy in zip(function(*leaves), gradients, strict=True)
            if y is not None and dy is not None and y.requires_grad
        ]
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        if not (pairs and wanted):
            return (None,) * len(leaves)
        outputs, incoming = zip(*pairs, strict=True)
        each = iter(torch.autograd.grad(outputs, wanted, incoming, allow_unused=True))
    return tuple(
        next(each) if x is not None and x.requires_grad else None for x in leaves
    )
