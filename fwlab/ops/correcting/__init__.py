"""The correcting recurrence: fast weights that replace what they hold."""

from typing import Any

from fwlab.ops.additive import too_wide
from fwlab.ops.call import fla, launcher
from fwlab.ops.correcting import chunked, efficient
from fwlab.ops.parts import one_step


# What the kernels of chunks and of steps cannot compute, in words.
def _refuses(normalize: bool = False, **widths: Any) -> str | None:
    if normalize:
        return "there is no kernel for normalize=True"
    return too_wide(**widths)


PLAIN: dict[str, Any] = {
    "chunked": chunked.correcting,
    "efficient": efficient.correcting,
}
FORMS: dict[str, Any] = {
    **PLAIN,
    "fla": fla.CORRECTING,
    # Both kinds of kernels are behind one function, which chooses by
    # length.
    "triton": launcher.Kernel(
        "fwlab.ops.correcting.kernels",
        "correcting",
        minimum=(7, 5),
        refuses=_refuses,
    ),
}
"""What computes it where the key that writes also asks, and the memory
of a head fades as a whole.
"""

one_step.FORMS.add(efficient.correcting)
