"""The choice of the implementation that computes a call."""

import functools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fwlab.ops import gpu


class Shapes(str):
    """The name of an implementation that is not to run.

    A `Call` checks everything, and then returns tensors without data.
    """


class Refused(ValueError):
    """A kernel was asked for what is beyond its limits.

    - `limit`: which one, in words.
    """

    def __init__(self, text: str, limit: gpu.Limit):
        super().__init__(text)
        self.limit = limit


def usable(implementations: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the implementations that run on this machine."""
    return tuple(
        name
        for name, entry in implementations.items()
        if not isinstance(entry, gpu.Kernel)
        or gpu.why_not(entry) is None
    )


def choose(
    op: str,
    implementations: Mapping[str, Any],
    requested: str,
    *tensors: Tensor,
    plain: tuple[str, ...] = ("naive", "chunked"),
    **sizes: Any,
) -> tuple[str, Any]:
    """The implementation that computes `op`: its name, and itself.

    - `requested`: a name, or "auto": the kernel where it can run, else
      the efficient form. On a GPU this warns, once for each reason.
    - `tensors`: those whose device and dtypes decide.
    - `plain`: those that `torch.func` can transform; within `vmap`,
      `grad` or `jacrev`, "auto" takes the last of them.
    - `sizes`: those of the problem, by the names in `refuses`.
    - Raises `ValueError` for an unknown name, for "triton" if there
      is no kernel for these arguments, with the reason (`Refused` if
      it is a limit of the kernel), and for what `torch.func` cannot
      transform.
    """
    if requested not in ("auto", *implementations):
        names = ", ".join(map(repr, implementations))
        raise ValueError(
            f"{op}: expected implementation 'auto' or one of {names}, "
            f"got {requested!r}"
        )
    if not all(map(Tensor.numel, tensors)):
        return "naive", implementations["naive"]  # nothing to compute
    if torch._C._are_functorch_transforms_active():
        if requested not in ("auto", *plain):
            raise ValueError(
                f"{op}: implementation {requested!r} does not work with "
                "torch.func (vmap, grad, jacrev and others); "
                "implementation='naive' does"
            )
        if requested == "auto":
            requested = [n for n in implementations if n in plain][-1]
    name = [*implementations][-1] if requested == "auto" else requested
    entry = implementations[name]
    if not isinstance(entry, gpu.Kernel):
        return name, entry
    device = tensors[0].device
    reason = entry.refusal(device, {x.dtype for x in tensors}, **sizes)
    if reason is None and (requested != "auto" or not gpu.takes("cpu")):
        return name, entry.load()
    fallback = [
        name
        for name, entry in implementations.items()
        if not isinstance(entry, gpu.Kernel)
    ][-1]
    if requested != "auto":
        text = (
            f"{op}: implementation {requested!r} cannot run here: {reason}; "
            f"{fallback!r} can"
        )
        if isinstance(reason, gpu.Limit):
            raise Refused(text, reason)
        raise ValueError(text)
    if device.type == "cuda":
        _warn(f"{op}: {reason}; {fallback!r} is used instead")
    return fallback, implementations[fallback]


@functools.cache
def _warn(text: str) -> None:
    """Warn once per text, no matter how often it is called."""
    warnings.warn(text, stacklevel=2)
