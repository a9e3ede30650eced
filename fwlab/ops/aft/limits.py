"""List the limits of the AFT kernels without importing Triton."""

from torch import Tensor

from fwlab.ops import _triton

#: The minimum compute capability: without tensor cores there are no products.
MINIMUM = (7, 5)
#: The maximum of the second and the third dimension of a grid.
MOST = 65535


def why_not(*x: Tensor) -> str | None:
    """Return why the kernels cannot compute a call; None = they can.

    - `x`: q, k and v, `[batch, time, channels]`, and other tensors; without any,
      only this machine is checked.
    """
    if not x:
        return _triton.why_not(minimum=MINIMUM)
    q = x[0]
    if reason := _triton.why_not(q.device, {part.dtype for part in x[:3]}, MINIMUM):
        return reason
    # Programs in the second and the third dimension of a grid.
    for name, size in (("batch", q.shape[0]), ("channels", q.shape[-1])):
        if size > MOST:
            return f"the kernels take {name} up to {MOST}, got {size}"
    return None


def not_causal(*x: Tensor) -> str:
    """Return the reason for a call with `causal=False`: there is no kernel."""
    return "there is no kernel for causal=False"
