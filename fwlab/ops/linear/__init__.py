"""Compute the linear recurrence: fast weights that only add pairs."""

from typing import Any

from fwlab.ops import _triton, efficient
from fwlab.ops._operation import Kernel
from fwlab.ops._rules import Inputs
from fwlab.ops.linear import chunked


def why_not(x: Inputs | None = None) -> str | None:
    """Return the reason why the kernels cannot compute these inputs, or None.

    - `x`: the inputs; without any, only this machine is checked.
    """
    if x is None:
        return _triton.why_not()
    dtypes = {part.dtype for part in (x.q, x.k, x.v)}
    if reason := _triton.why_not(x.q.device, dtypes):
        return reason
    if x.decay is not None and x.decay.shape[-1] > 1:
        return "there is no kernel for a decay per key channel"
    if x.erase_key is not None:
        return "there is no kernel for a key of its own that erases, or is normalised"
    full = len(dtypes) > 1 or x.q.element_size() == 4
    most, key, value = 256 if full else 512, x.k.shape[-1], x.v.shape[-1]
    if max(key, value) > most:
        kind = "float32" if full else "half precision"
        return f"the kernels take widths up to {most} in {kind}, got {key} and {value}"
    return None


def load() -> Any:
    """Import the Triton kernels, and return the function that launches them."""
    _triton.imported("fwlab.ops.linear.kernels")
    from fwlab.ops.linear.kernels import linear

    return linear


#: The implementations of the linear recurrence, simplest first.
FORMS = {
    "chunked": chunked.linear,
    "efficient": efficient.linear,
    "triton": Kernel(load, why_not),
}
