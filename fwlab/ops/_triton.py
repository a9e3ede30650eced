"""Launch Triton kernels, or return the reason why they cannot run.

Triton is imported when a kernel is first used; everything else works without it. With
TRITON_INTERPRET=1, kernels run in Triton's interpreter, on tensors of the CPU.
"""

import functools
import importlib
import importlib.metadata
import os
import re
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from fwlab.ops._recurrence import constant

#: True if kernels run in Triton's interpreter, which is chosen when they are defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: The type of the device on which kernels run.
DEVICE = "cpu" if INTERPRETED else "cuda"

#: The oldest release of Triton that compiles the kernels.
OLDEST = (3, 6)
#: The minimum compute capability at which Triton uses tensor cores.
TENSOR_CORES = (8, 0)
#: The oldest compilers that are correct on Hopper GPUs (9.0): see `untrusted`.
HOPPER, TRITON, PTXAS = 9, (3, 7, 1), (13, 1)

Version = tuple[int, ...]


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    warps: int,
    stages: int = 1,
    **constants: Any,
) -> None:
    """Launch `kernel` on `grid`; do nothing for fake tensors, which have no memory.

    - `arguments`: contiguous tensors, numbers, and None for a missing tensor, in the
      order of the kernel's parameters.
    - `constants`: its `constexpr` parameters.
    """
    lead = next(x for x in arguments if isinstance(x, Tensor))
    if lead.is_meta or hasattr(lead, "fake_mode"):
        return
    # Triton launches on the current device, not on the device of the tensors.
    with torch.cuda.device_of(lead):
        kernel[grid](*arguments, **constants, **options(warps, stages))


def options(warps: int, stages: int) -> dict[str, Any]:
    """Return the compiler options of a kernel launch.

    A multiplication and an addition are fused into one instruction, which rounds once:
    Triton's default until 3.10.
    """
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


def why_not(
    device: torch.device | None = None,
    dtypes: Collection[torch.dtype] = (),
    minimum: tuple[int, int] = TENSOR_CORES,
) -> str | None:
    """Return the reason why kernels cannot run on these tensors, or None.

    - `device`, `dtypes`: of the tensors; without a device, the GPU of this machine.
    - `minimum`: the minimum compute capability of the kernels.
    """
    if not installed():
        return f"Triton {dotted(OLDEST)} or newer is not installed"
    if device is None:
        if not INTERPRETED and not torch.cuda.is_available():
            return "there is no GPU"
        device = torch.device(DEVICE)
    if device.type != DEVICE:
        return f"Triton needs a GPU, but the tensors are on {device}"
    if torch.version.hip is not None:
        return "the kernels are written for Nvidia GPUs"
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"there is no kernel for {name}"
        if INTERPRETED and dtype == torch.bfloat16:
            return f"Triton's interpreter does not compute in {name}"
    have = capability(device)
    if have < minimum:
        return f"compute capability {dotted(have)} is below {dotted(minimum)}"
    return None if INTERPRETED else _untrusted(have)


@constant
def imported(module: str) -> None:
    """Import a module, also in a call that `torch.compile` traces."""
    importlib.import_module(module)


@functools.cache
def untrusted(capability: tuple[int, int]) -> str | None:
    """Return the reason why Triton or ptxas gives wrong results on a GPU, or None.

    On Hopper, Triton before 3.7.1 and ptxas, which makes its machine code, before 13.1
    give wrong numbers without an error (fla-org/flash-linear-attention#983 and #1262).
    The result is cached until the process ends.
    """
    if capability[0] != HOPPER:
        return None
    have = version("triton")
    if have < TRITON:
        return (
            f"Triton {dotted(have)} computes wrong gradients on Hopper; "
            f"install Triton {dotted(TRITON)} or newer"
        )
    from triton.knobs import nvidia

    if numbers(nvidia.ptxas.version) >= PTXAS:
        return None
    return (
        f"ptxas {nvidia.ptxas.version} computes wrong numbers on Hopper; set "
        f"TRITON_PTXAS_PATH to one of version {dotted(PTXAS)} or newer: Triton's own "
        f"{nvidia.ptxas_blackwell.path} is {nvidia.ptxas_blackwell.version}"
    )


@constant
def _untrusted(have: tuple[int, int]) -> str | None:
    """Return why the compilers give wrong results, or None, also in a traced call."""
    return untrusted(have)


@constant
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, such as (9, 0); (0, 0) for a CPU."""
    if device.type != "cuda":
        return (9, 0) if INTERPRETED else (0, 0)
    about = _properties(device)
    return about.major, about.minor


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; for a CPU, 132 as on an H200."""
    return _properties(device).multi_processor_count if device.type == "cuda" else 132


@functools.cache  # Each kernel launch reads the properties.
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


@constant
def installed() -> bool:
    """Return True if Triton is installed and new enough for the kernels."""
    return version("triton") >= OLDEST


@functools.cache  # Reading the metadata takes longer than a step of a rule.
def version(package: str) -> Version:
    """Return the version of a package, or () if it is not installed."""
    try:
        return numbers(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return ()


def numbers(text: str) -> Version:
    """Parse the first three numbers of a version: "3.7.1" becomes (3, 7, 1)."""
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def dotted(version: Version) -> str:
    """Format a version with dots: (3, 7, 1) becomes "3.7.1"."""
    return ".".join(map(str, version))
