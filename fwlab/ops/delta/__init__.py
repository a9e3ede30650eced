"""Compute the delta recurrence: fast weights that replace what a key holds."""

from typing import Any

from fwlab.ops import _triton, efficient
from fwlab.ops._operation import Kernel
from fwlab.ops.delta import chunked
from fwlab.ops.linear import why_not


def load() -> Any:
    """Import the Triton kernels, and return the function that launches them."""
    _triton.imported("fwlab.ops.delta.kernels")
    from fwlab.ops.delta.kernels import delta

    return delta


#: The implementations of the delta recurrence, simplest first.
FORMS = {"chunked": chunked.delta, "efficient": efficient.delta}
#: The implementations for rules that erase with the write key and decay per head.
WITH_KERNELS = {**FORMS, "triton": Kernel(load, why_not)}
