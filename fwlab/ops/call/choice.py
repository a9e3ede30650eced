"""The choice of the implementation that computes a call."""

import functools
import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fwlab import arguments
from fwlab.ops.call import launcher
from fwlab.transforms import constant, forward_mode, transformed

#: The names of implementations for GPUs: theirs, and ours.
KERNELS = ("fla", "triton")


class Refused(ValueError):
    """A kernel was asked for what is beyond its limits.

    - `limit`: which one, in words.
    """

    def __init__(self, text: str, limit: launcher.Limit):
        super().__init__(text)
        self.limit = limit


def usable(implementations: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the implementations that run on this machine."""
    return tuple(
        name
        for name, entry in implementations.items()
        if not isinstance(entry, launcher.Kernel) or launcher.why_not(entry) is None
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

    - `requested`: a name, or "auto": the first of `preferred` that can
      run. If that is not a kernel, although there is one in Triton,
      this warns on a GPU, once for each reason.
    - `tensors`: those whose device and dtypes decide.
    - `plain`: those that `torch.func` can transform; within `vmap`, `grad` or `jacrev`,
      "auto" takes the last of them, and where tangents are computed (`jvp`,
      `torch.autograd.forward_ad`), the last that is not "efficient".
    - `sizes`: those of the problem, by the names in `refuses`.
    - Raises `ValueError` for an unknown name, for "triton" if there is no kernel for
      these arguments, with the reason (`Refused` if it is a limit of the kernel), and
      for what `torch.func` cannot transform.
    """
    arguments.choice(op, ("auto", *implementations), implementation=requested)
    if not all(x.numel() for x in tensors):
        return "naive", implementations["naive"]  # nothing to compute
    forward = forward_mode()
    if forward or transformed():
        if forward:  # which PyTorch's own attention does not have
            plain = tuple(n for n in plain if n != "efficient")
        if requested not in ("auto", *plain):
            raise ValueError(
                f"{op}: implementation {requested!r} does not work with "
                "torch.func (vmap, grad, jacrev and others) or in "
                "forward-mode differentiation; "
                "implementation='naive' does"
            )
        if requested == "auto":
            requested = [n for n in implementations if n in plain][-1]
    device = tensors[0].device

    def refusal(name: str) -> str | None:
        entry = implementations[name]
        if not isinstance(entry, launcher.Kernel):
            return None
        dtypes = {x.dtype for x in tensors}
        return entry.refusal(device, dtypes, **sizes)

    if requested != "auto":
        if reason := refusal(requested):
            _refuse(op, implementations, requested, reason)
        return requested, _loaded(implementations[requested])
    names = preferred(implementations)
    reasons: dict[str, str] = {}
    for name in names:
        if name in KERNELS and launcher.takes("cpu"):
            continue
        reason = refusal(name)
        if reason is None:
            break
        reasons[name] = reason
    ours = reasons.get("triton")
    if ours and name not in KERNELS and device.type == "cuda":
        _tell(f"{op}: {ours}; {name!r} is used instead")
    return name, _loaded(implementations[name])


def _loaded(entry: Any) -> Any:
    """The function, or the module, of an entry."""
    return entry.load() if isinstance(entry, launcher.Kernel) else entry


def _refuse(
    op: str, implementations: Mapping[str, Any], name: str, reason: str
) -> None:
    """Say that a kernel cannot run, and what can."""
    able = [other for other in implementations if other not in KERNELS]
    text = f"{op}: implementation {name!r} cannot run here: {reason}; {able[-1]!r} can"
    if isinstance(reason, launcher.Limit):
        raise Refused(text, reason)
    raise ValueError(text)


def preferred(implementations: Mapping[str, Any]) -> list[str]:
    """What "auto" tries, in this order: the last implementation comes first."""
    return [
        name
        for name, entry in [*implementations.items()][::-1]
        if name != "fla" or entry.auto
    ]


@functools.cache
def _warn(text: str) -> None:
    """Warn once per text, no matter how often it is called."""
    warnings.warn(text, stacklevel=3)


@constant
def _tell(text: str) -> None:
    """The same, for `torch.compile`."""
    _warn(text)
