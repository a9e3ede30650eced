"""Compilers: which are known to be wrong, and what runs instead.

Triton compiles a kernel to PTX, and ptxas, a program of CUDA, compiles
PTX to machine code. On Hopper, some versions of both give wrong numbers
without an error:

- Triton 3.4 to 3.7.0: products of a transposed product
  (fla-org/flash-linear-attention#640; 3.7.1 is right, says
  fla-org/flash-linear-attention#983);
- ptxas 12.8.93 and 13.0.88: two kernels out of two, and one; 13.1.80
  is right (fla-org/flash-linear-attention#1262); 12.9 reuses registers
  that a product still reads (triton-lang/triton#11781).

Triton 3.7.1 brings two programs: ptxas 12.8.93 for all GPUs up to
Hopper, and ptxas 13.1.80 for those after it, which can compile for
Hopper too.
"""

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch

Version = tuple[int, ...]

HOPPER = 9
"""The first number of its compute capability."""

TRITON, PTXAS = (3, 7, 1), (13, 1)
"""The oldest releases that are not known to be wrong on Hopper."""

#: Names a ptxas for Triton, which then uses no other before Blackwell.
CHOICE = "TRITON_PTXAS_PATH"


class Assembler(NamedTuple):
    """A program ptxas.

    - `why`: where it comes from, in words.
    """

    path: str
    version: Version
    why: str

    def __str__(self) -> str:
        return f"{said(self.version)} ({self.why})"


@functools.cache  # to look it up takes longer than a step of a rule
def triton() -> Version | None:
    """The version of Triton; None = it is not installed."""
    try:
        found = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(map(int, re.findall(r"\d+", found)[:3]))


def said(version: Version) -> str:
    """A version as people write it: "3.7.1"."""
    return ".".join(map(str, version))


@functools.cache
def _version(path: str) -> Version | None:
    """What a program ptxas says of itself; None = it says nothing."""
    try:
        text = subprocess.run(
            [path, "--version"],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"V(\d+)\.(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else None


def _known(path: str | Path, why: str) -> list[Assembler]:
    version = _version(str(path))
    return [Assembler(str(path), version, why)] if version else []


def _folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [
        Path(x)
        for x in (spec and spec.submodule_search_locations) or ()
    ]


def bundled(name: str) -> list[Assembler]:
    """Triton's own "ptxas" or "ptxas-blackwell"."""
    return [
        one
        for folder in _folders("triton")
        for one in _known(
            folder / "backends" / "nvidia" / "bin" / name,
            f"Triton's {name}",
        )
    ]


def assemblers() -> list[Assembler]:
    """Every version of ptxas on this machine, Triton's own first."""
    found = [*bundled("ptxas"), *bundled("ptxas-blackwell")]
    for folder in _folders("nvidia"):
        for path in sorted(folder.glob("*/bin/ptxas")):
            found += _known(path, "of the package nvidia-cuda-nvcc")
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            path = Path(home, "bin", "ptxas")
            found += _known(path, f"of {variable}")
    if on_path := shutil.which("ptxas"):
        found += _known(on_path, "on the PATH")
    first: dict[Version, Assembler] = {}
    for one in found:
        first.setdefault(one.version, one)
    return list(first.values())


def driver() -> Version | None:
    """The CUDA of the driver, as (12, 8); None = there is none."""
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    number = ask() if ask else 0
    return (number // 1000, number % 1000 // 10) if number else None


@functools.cache
def assembler(
    capability: tuple[int, int],
) -> tuple[Assembler | None, str | None]:
    """The ptxas for a GPU, and why there is none that is right.

    One that `TRITON_PTXAS_PATH` names is taken as it is. The answer
    stays the same until the process ends.
    """
    if capability[0] > HOPPER:
        return next(iter(bundled("ptxas-blackwell")), None), None
    if path := os.environ.get(CHOICE):
        if one := _known(path, f"chosen by {CHOICE}"):
            return one[0], None
        return None, f"{CHOICE} is {path}, which is not a ptxas"
    default = next(iter(bundled("ptxas")), None)
    if capability[0] != HOPPER or default is None:
        return default, None
    if default.version >= PTXAS:
        return default, None
    bad = (
        f"ptxas {said(default.version)} is known to be wrong on Hopper"
    )
    newer = [one for one in assemblers() if one.version >= PTXAS]
    if not newer:
        return default, (
            f"{bad}, and there is no ptxas {said(PTXAS)} or newer; "
            "the package nvidia-cuda-nvcc has one"
        )
    # The machine code of CUDA 13 has another format than that of 12.
    have = driver()
    fits = [x for x in newer if have is None or x.version[0] <= have[0]]
    if not fits:
        return default, (
            f"{bad}, and the driver, of CUDA {said(have or ())}, is "
            f"too old for ptxas {said(newer[0].version)}"
        )
    why = f"{fits[0].why}, because {bad}"
    return fits[0]._replace(why=why), None


@functools.cache
def refusal(capability: tuple[int, int]) -> str | None:
    """Why nothing compiled for this GPU can be trusted; None = it can.

    Before the first kernel for Hopper is compiled, this makes Triton
    use a ptxas that is right, in the whole process and in those that it
    starts.
    """
    if capability[0] != HOPPER:
        return None
    have = triton() or ()
    if have < TRITON:
        return (
            f"Triton {said(have)} computes wrong gradients on Hopper, "
            f"Triton {said(TRITON)} does not"
        )
    one, reason = assembler(capability)
    if one is not None and reason is None:
        use(one)
    return reason


def use(one: Assembler) -> None:
    """Let Triton compile with this ptxas from now on."""
    from triton import knobs
    from triton.backends.nvidia import compiler

    if knobs.nvidia.ptxas.path != one.path:
        knobs.nvidia.ptxas = one.path
        # It is in the names of what Triton keeps on disk.
        compiler.get_ptxas_version.cache_clear()
