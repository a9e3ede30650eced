"""Which implementation computes a call: the room between all of them."""

import functools
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fwlab.ops import gpu


def usable(implementations: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of implementations that run on this machine."""
    return tuple(
        name
        for name, entry in implementations.items()
        if not isinstance(entry, gpu.Kernel)
        or gpu.why_not(entry) is None
    )


def choose(
    op: str,
    implementations: Mapping[str, Any],
    asked: str,
    *tensors: Tensor,
    **sizes: Any,
) -> tuple[str, Any]:
    """The implementation that computes `op`: its name, and itself.

    - `asked`: a name, or "auto": the kernel where it can run, else the
      efficient form. On a GPU that warns, once for each reason.
    - `tensors`: those whose device and precision decide.
    - `sizes`: of the problem, as the kernel's `refuses` wants them.
    - Raises `ValueError` for an unknown name, and for "triton" where
      there is no kernel for these arguments, with the reason.
    """
    if asked not in ("auto", *implementations):
        names = ", ".join(map(repr, implementations))
        raise ValueError(
            f"{op}: expected implementation 'auto' or one of {names}, "
            f"got {asked!r}"
        )
    if not all(map(Tensor.numel, tensors)):
        return "naive", implementations["naive"]  # nothing to compute
    fallback = [
        name
        for name, entry in implementations.items()
        if not isinstance(entry, gpu.Kernel)
    ][-1]
    name = [*implementations][-1] if asked == "auto" else asked
    entry = implementations[name]
    if not isinstance(entry, gpu.Kernel):
        return name, entry
    device = tensors[0].device
    reason = entry.refusal(device, {x.dtype for x in tensors}, **sizes)
    if reason is None and (asked != "auto" or not gpu.INTERPRETED):
        return name, entry.load()
    if asked != "auto":
        raise ValueError(
            f"{op}: implementation {asked!r} cannot run here: {reason}; "
            f"{fallback!r} can"
        )
    if device.type == "cuda":
        _say(f"{op}: {reason}; {fallback!r} is used")
    return fallback, implementations[fallback]


@functools.cache
def _say(text: str) -> None:
    """Warn once, however often and from wherever it is called."""
    warnings.warn(text, stacklevel=2)
