"""Whether PyTorch transforms a call instead of computing it.

Then a formula has to be plain: values cannot decide what is computed, and a
backward pass by hand says nothing about tangents.
"""

import torch
from torch.autograd import forward_ad


def transformed() -> bool:
    """Within `torch.func`: `vmap`, `grad`, `jacrev` and others."""
    # What an autograd function itself asks first.
    return torch._C._are_functorch_transforms_active()


def forward_mode() -> bool:
    """Where tensors may carry tangents, as within `jacfwd`."""
    return forward_ad._current_level >= 0


def traced() -> bool:
    """In any of these, or in `torch.compile`."""
    return torch.compiler.is_compiling() or transformed() or forward_mode()
