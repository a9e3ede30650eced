"""Say what the kernels of the feedback memory cannot compute, without Triton."""

from typing import Any

from torch import Tensor

from fwlab.ops import _triton

#: The minimum compute capability: the kernels do without tensor cores.
MINIMUM = (7, 5)
#: Maximum channels per head, and per token: a program holds whole rows.
MAX_KEY, MAX_WIDTH = 256, 8192


def why_not(
    x: Tensor | None = None,
    weights: Any = None,
    heads: int = 1,
    k: Tensor | None = None,
    v: Tensor | None = None,
    mask: Tensor | None = None,
    factors: Tensor | None = None,
) -> str | None:
    """Say why the kernels cannot compute a call; None = they can.

    - The arguments of the forms; without any, it is a question about this machine.
    """
    if x is None or k is None:
        return _triton.why_not(minimum=MINIMUM)
    if reason := _triton.why_not(x.device, {x.dtype}, MINIMUM):
        return reason
    if factors is not None:
        return "the kernels have no dropout"
    d, features, key = x.shape[-1], weights.positions.shape[-1], k.shape[-1]
    for name, size, maximum in (
        ("d", d, MAX_WIDTH),
        ("key", key, MAX_KEY),
        ("features", features, MAX_KEY),
    ):
        if size > maximum:
            return f"the kernels take {name} up to {maximum}, got {size}"
    # An offset among the memories of a head has 32 bits.
    memories = k.shape[1] + x.shape[1]
    if memories * max(key, features) >= 2**31:
        return f"there is no kernel for {memories} memories"
    return None
