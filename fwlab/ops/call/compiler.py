"""Compilers: which are known to be wrong, and what runs instead.

Triton compiles a kernel to PTX, and ptxas, a program of CUDA, compiles
PTX to machine code. On Hopper, some versions of both give wrong numbers
without an error:

- Triton 3.4 to 3.7.0: products of a transposed product
  (fla-org/flash-linear-attention#640; 3.7.1 is right, says
  fla-org/flash-linear-attention#983);
- ptxas 12.8.93 and 13.0.88: two kernels out of two, and one; 13.1.80
  is right there (fla-org/flash-linear-attention#1262);
- ptxas before 13.3: registers are reused while a product still reads
  them (triton-lang/triton#11781, triton-lang/triton#9433).

The last fault is about products that stay pending while other
instructions run. In the kernels of fwlab, every wait for products waits
for all of them, which the tests check. So 13.1 is accepted, but 13.3 or
newer is preferred.

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
"""The oldest releases that fwlab's kernels are compiled with there."""

FIXED = (13, 3)
"""The oldest ptxas in which every fault above is fixed."""

#: Names a ptxas for Triton, which then uses no other before Blackwell.
CHOICE = "TRITON_PTXAS_PATH"
#: Names the ptxas for Blackwell and later GPUs.
BLACKWELL = "TRITON_PTXAS_BLACKWELL_PATH"

WRONG = "known to be wrong on Hopper"


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


def is_wrong(version: Version, capability: tuple[int, int]) -> bool:
    """Whether this ptxas is known to be wrong on this GPU."""
    return capability[0] == HOPPER and version < PTXAS


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

    One that `TRITON_PTXAS_PATH` names is taken as it is (on Blackwell,
    `TRITON_PTXAS_BLACKWELL_PATH`). The answer stays the same until the
    process ends.
    """
    choice, name = CHOICE, "ptxas"
    if capability[0] > HOPPER:
        choice, name = BLACKWELL, "ptxas-blackwell"
    if path := os.environ.get(choice):
        for one in _known(path, f"chosen by {choice}"):
            if is_wrong(one.version, capability):
                one = one._replace(why=f"{one.why}; {WRONG}")
            return one, None
        return None, f"{choice} is {path}, which is not a ptxas"
    default = next(iter(bundled(name)), None)
    if capability[0] != HOPPER or default is None:
        return default, None
    usable = not is_wrong(default.version, capability)
    oldest = FIXED if usable else PTXAS
    if default.version >= oldest:
        return default, None
    bad = f"ptxas {said(default.version)} is " + (
        f"older than {said(FIXED)}" if usable else WRONG
    )
    newer = sorted(
        (one for one in assemblers() if one.version >= oldest),
        key=lambda one: one.version,
        reverse=True,
    )
    # The machine code of CUDA 13 has another format than that of 12.
    have = driver()
    fits = [x for x in newer if have is None or x.version[0] <= have[0]]
    if fits:
        why = f"{fits[0].why}, because {bad}"
        return fits[0]._replace(why=why), None
    if usable:
        return default, None
    if not newer:
        return default, (
            f"{bad}, and there is no ptxas {said(PTXAS)} or newer; "
            "the package nvidia-cuda-nvcc has one"
        )
    return default, (
        f"{bad}, and the driver, of CUDA {said(have or ())}, is too "
        f"old for ptxas {said(newer[-1].version)}"
    )


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
