"""What GPU kernels have in common: where they run, and their launch.

Triton is imported when a kernel is first used; everything else works without it.
"""

import functools
import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab.transforms import constant

#: Whether kernels run in Triton's interpreter, on the CPU, for tests.
#: Triton itself looks this up once, when a kernel is defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: Dtypes that a kernel takes.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

OLDEST = (3, 6)
"""The oldest release of Triton that compiles the kernels."""

TENSOR_CORES = (8, 0)
"""The minimum compute capability at which Triton uses tensor cores."""

HOPPER, TRITON, PTXAS = 9, (3, 7, 1), (13, 1)
"""Where older compilers give wrong numbers: see `untrusted`."""

Version = tuple[int, ...]


@functools.cache  # to look it up takes longer than a step of a rule
def version(package: str) -> Version | None:
    """The version of a package; None = it is not installed."""
    try:
        text = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
    return numbers(text)


def numbers(text: str) -> Version:
    """The first three numbers of a version: "3.7.1" as (3, 7, 1)."""
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def dotted(version: Version) -> str:
    """A version as people write it: "3.7.1"."""
    return ".".join(map(str, version))


@constant
def installed() -> bool:
    """Whether there is a Triton that is new enough for the kernels."""
    return (version("triton") or ()) >= OLDEST


class Limit(str):
    """What a kernel does not compute by design, in words.

    Its record says so: sizes, or GPUs that are too old.
    """


class Launch(NamedTuple):
    """One launch of a kernel, as a `StandIn` gets it."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: int

    def options(self) -> dict[str, Any]:
        """What the compiler gets besides the arguments.

        A product and a sum become one instruction, which rounds once. This
        was Triton's default until 3.10.
        """
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,
        }


class StandIn(NamedTuple):
    """What takes the place of a GPU on a machine without one.

    - `capability`: the compute capability that it has.
    - `device`: the type of device that its tensors are on. On "cpu",
      "auto" does not choose kernels.
    - `run`: does what a launch does.
    - `dtypes`: those in which it computes.
    """

    capability: tuple[int, int]
    device: str
    run: Callable[[Launch], None]
    dtypes: tuple[torch.dtype, ...] = DTYPES


# Without bfloat16, because Triton's interpreter lacks it.
_stand_in = (
    StandIn((9, 0), "cpu", lambda x: _run(x), (torch.float32, torch.float16))
    if INTERPRETED
    else None
)


@contextmanager
def standing_in(other: StandIn | None) -> Iterator[None]:
    """Let `other` run the kernels; None = the GPU of this machine."""
    global _stand_in
    before, _stand_in = _stand_in, other
    try:
        yield
    finally:
        _stand_in = before


@contextmanager
def recording(capability: tuple[int, int]) -> Iterator[list[Launch]]:
    """Collect launches instead of running them.

    Use tensors on the device "meta": a machine without a GPU can then
    compile what a GPU of this capability would run.
    """
    launches: list[Launch] = []
    with standing_in(StandIn(capability, "meta", launches.append)):
        yield launches


def stands_in() -> bool:
    """Whether something runs kernels in place of the GPU."""
    return _stand_in is not None


def takes(device: str) -> bool:
    """Whether a stand-in runs kernels on tensors of this device."""
    return _stand_in is not None and _stand_in.device == device


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    warps: int,
    stages: int = 1,
    **constants: Any,
) -> None:
    """Run `kernel` on `grid`.

    - `arguments`: contiguous tensors, numbers, and None for a missing
      tensor, in the order of the kernel's parameters.
    - `constants`: its `constexpr` parameters.
    """
    one = Launch(kernel, grid, arguments, constants, warps, stages)
    lead = next(x for x in arguments if isinstance(x, Tensor))
    bare = lead.is_meta and not takes("meta")
    if bare or hasattr(lead, "fake_mode"):  # there is only the shape
        return
    if _stand_in is not None:
        _stand_in.run(one)
        return
    # Triton launches on the current device, not on that of the tensors.
    with torch.cuda.device_of(lead):
        _run(one)


def _run(one: Launch) -> None:
    """Let Triton launch it."""
    one.kernel[one.grid](*one.arguments, **one.constants, **one.options())


@constant
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability, such as (9, 0); without a GPU (0, 0)."""
    if _stand_in is not None:
        return _stand_in.capability
    if device.type != "cuda":
        return (0, 0)
    about = _properties(device)
    return about.major, about.minor


def multiprocessors(device: torch.device) -> int:
    """The minimum number of programs that run side by side."""
    if device.type != "cuda":
        return 132
    return _properties(device).multi_processor_count


@functools.cache  # each call of a kernel asks for them
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)


@dataclass(frozen=True)
class Kernel:
    """The entry of an implementation in Triton in its table.

    - `module`: the module with the kernels.
    - `function`: a function of the module; None = the module itself.
    - `minimum`: the minimum compute capability.
    - `refuses`: `refuses(**sizes)` returns in words why the kernel
      cannot compute this; None = it can.
    """

    module: str
    function: str | None = None
    minimum: tuple[int, int] = TENSOR_CORES
    refuses: Callable[..., str | None] | None = None

    # Imported at the first call: fwlab works without Triton.
    def load(self) -> Any:
        _import(self.module)
        module = sys.modules[self.module]
        return getattr(module, self.function) if self.function else module

    def refusal(
        self, device: torch.device, dtypes: set[torch.dtype], **sizes: Any
    ) -> str | None:
        """Why the kernel cannot compute this; None = it can.

        A `Limit` where nothing is missing on this machine.
        """
        if not installed():
            oldest = dotted(OLDEST)
            return f"Triton {oldest} or newer is not installed"
        if device.type != device_type():
            return f"Triton needs a GPU, but the tensors are on {device}"
        if torch.version.hip is not None:
            return "the kernels are written for Nvidia GPUs"
        for dtype in dtypes:
            if dtype not in DTYPES:
                return f"there is no kernel for {_name(dtype)}"
            if _stand_in is not None and dtype not in _stand_in.dtypes:
                return f"Triton's interpreter does not compute in {_name(dtype)}"
        have = capability(device)
        if have < self.minimum:
            return Limit(
                f"compute capability {dotted(have)} is below {dotted(self.minimum)}"
            )
        # No ptxas has compiled what a stand-in runs.
        if _stand_in is None and (why := _faulty(have)):
            return why
        if self.refuses is None:
            return None
        full = len(dtypes) > 1 or torch.float32 in dtypes
        why = self.refuses(full=full, **sizes)
        return why and Limit(why)


@constant
def _import(module: str) -> None:
    """Import a module once; even to look it up takes a while."""
    if module not in sys.modules:
        importlib.import_module(module)


@functools.cache
def untrusted(capability: tuple[int, int]) -> str | None:
    """Why nothing compiled for this GPU can be trusted; None = it can.

    On Hopper, Triton before 3.7.1 and ptxas, which makes its machine code, before 13.1
    give wrong numbers without an error (fla-org/flash-linear-attention#983 and #1262).
    The answer stays the same until the process ends.
    """
    if capability[0] != HOPPER:
        return None
    have = version("triton") or ()
    if have < TRITON:
        return (
            f"Triton {dotted(have)} computes wrong gradients on Hopper; "
            f"install Triton {dotted(TRITON)} or newer"
        )
    from triton.knobs import nvidia

    if numbers(nvidia.ptxas.version) >= PTXAS:
        return None
    return (
        f"ptxas {nvidia.ptxas.version} computes wrong numbers on "
        "Hopper; set TRITON_PTXAS_PATH to one of version "
        f"{dotted(PTXAS)} or newer: Triton's own "
        f"{nvidia.ptxas_blackwell.path} is "
        f"{nvidia.ptxas_blackwell.version}"
    )


@constant
def _faulty(have: tuple[int, int]) -> str | None:
    """The same, for `torch.compile`."""
    return untrusted(have)


def device_type() -> str:
    """The type of device that kernels run on now."""
    return "cuda" if _stand_in is None else _stand_in.device


def why_not(kernel: Kernel) -> str | None:
    """Why a kernel cannot run on this machine at all."""
    kind = device_type()
    if installed() and kind == "cuda" and not torch.cuda.is_available():
        return "there is no GPU"
    return kernel.refusal(torch.device(kind), {torch.float16})


# As in an error: without the name of the library.
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
