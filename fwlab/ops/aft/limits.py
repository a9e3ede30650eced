"""List the limits of the AFT kernels without importing Triton."""

from torch import Tensor

from fwlab.ops import _triton

#: The minimum compute capability. Below 8.0, the kernels have no matrix products.
MINIMUM = (7, 5)
#: The maximum size of the second and third dimensions of a CUDA grid.
MOST = 65535


def why_not(*x: Tensor) -> str | None:
    """Return the reason why the AFT kernels cannot compute these inputs, or None.

    - `x`: q, k and v, `[batch, time, channels]`, and other tensors; without any,
      only this machine is checked.
    """
    if not x:
        return _triton.why_not(minimum=MINIMUM)
    q = x[0]
    if reason := _triton.why_not(q.device, {part.dtype for part in x[:3]}, MINIMUM):
        return reason
    # Batch and channels are the second and third dimensions of the grid.
    for name, size in (("batch", q.shape[0]), ("channels", q.shape[-1])):
        if size > MOST:
            return f"the kernels take {name} up to {MOST}, got {size}"
    return None


def not_causal(*x: Tensor) -> str:
    """Return the reason why the AFT kernels cannot compute `causal=False`."""
    return "there is no kernel for causal=False"
