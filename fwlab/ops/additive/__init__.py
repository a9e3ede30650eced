"""The additive recurrence: fast weights that add what they are given."""

from typing import Any

from fwlab.ops.additive import chunked, efficient
from fwlab.ops.call import fla, launcher
from fwlab.ops.parts import one_step


def too_wide(
    key: int = 0,
    value: int = 0,
    full: bool = False,
    by_channel: bool = False,
    **_: Any,
) -> str | None:
    """Why the kernels cannot compute a call; None = they can."""
    if by_channel:
        return "there is no kernel for a decay per key channel"
    maximum = 256 if full else 512
    if key > maximum or value > maximum:
        kind = "float32" if full else "half precision"
        return (
            f"the kernels take widths up to {maximum} in {kind}, "
            f"got {key} and {value}"
        )
    return None


FORMS: dict[str, Any] = {
    "chunked": chunked.additive,
    "efficient": efficient.additive,
    "fla": fla.ADDITIVE,
    "triton": launcher.Kernel(
        "fwlab.ops.additive.kernels", "additive", refuses=too_wide
    ),
}
"""What computes it, besides the loop of each rule."""

one_step.FORMS.add(efficient.additive)
