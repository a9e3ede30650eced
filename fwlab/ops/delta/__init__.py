"""Compute the delta recurrence: fast weights that replace what a key holds."""

from typing import Any

from fwlab.ops import _triton, efficient
from fwlab.ops._operation import Kernel
from fwlab.ops.delta import chunked
from fwlab.ops.linear import why_not


def load() -> Any:
    """Return the function that launches the kernels; Triton is imported only now."""
    _triton.imported("fwlab.ops.delta.kernels")
    from fwlab.ops.delta.kernels import delta

    return delta


#: The forms of the recurrence, simplest first.
FORMS = {"chunked": chunked.delta, "efficient": efficient.delta}
#: Forms of rules whose write key also erases, with one decay per head.
WITH_KERNELS = {**FORMS, "triton": Kernel(load, why_not)}
