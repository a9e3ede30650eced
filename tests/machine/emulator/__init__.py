"""Runs compiled kernels on the CPU: the PTX that Triton makes of them.

`stand_in` takes the place of a GPU:

    with launcher.standing_in(emulator.stand_in((9, 0))):
        ops.delta_rule(q, k, v, beta, implementation="triton")

What is modelled: registers, HBM and shared memory with bounds and alignment;
the formats bfloat16, float16 and TF32; the tensor cores of compute capability
8.0 (`mma`) and 9.0 (`wgmma`, which runs beside the threads); copies that run
beside the threads (`cp.async`); barriers and fences: an access to shared
memory that no barrier separates from one of another warp is an error.

What is not: `ptxas`, which translates PTX for the GPU; time; the order in which tensor
cores add; races between blocks or between threads of one warp, and between warps that
access the same tensor in HBM; the instructions of Blackwell (`tcgen05`). An instruction
that the emulator does not know is an error.
"""

import ctypes
from functools import cache

import aot
import numpy as np
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from emulator import matrix, scalar, transfer  # noqa: F401 (the instructions)
from emulator.block import run as run_program
from emulator.memory import Fault, Tensors
from emulator.text import Program, Unknown, parse
from fwlab.ops.call import launcher

__all__ = ["Fault", "Unknown", "Emulator", "Program", "execute", "stand_in"]


class Emulator:
    """A GPU of this compute capability, with what it has compiled."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability
        self.programs: dict[tuple, Program] = {}

    def program(self, launch: launcher.Launch) -> Program:
        """The compiled kernel of a launch."""
        key = (
            launch.kernel,
            tuple(map(_kind, launch.arguments)),
            tuple(sorted((name, str(x)) for name, x in launch.constants.items())),
            launch.warps,
            launch.stages,
        )
        if key not in self.programs:
            self.programs[key] = self._compile(launch)
        return self.programs[key]

    def _compile(self, launch: launcher.Launch) -> Program:
        major, minor = self.capability
        compiled = triton.compile(
            aot.source(launch),
            target=GPUTarget("cuda", 10 * major + minor, 32),
            options=launch.options(),
        )
        return parse(compiled.asm["ptx"], compiled.metadata.shared)

    def run(self, launch: launcher.Launch) -> None:
        """Compile it, and run it on tensors of the CPU."""
        execute(self.program(launch), launch)


def execute(program: Program, launch: launcher.Launch) -> None:
    """Run a program with the arguments of a launch."""
    tensors, given = Tensors(), []
    names = [n for n in launch.kernel.arg_names if n not in launch.constants]
    for name, x in zip(names, launch.arguments, strict=True):
        if isinstance(x, Tensor):
            given.append(np.uint64(tensors.add(_bytes(x), name)))
        elif isinstance(x, float):
            given.append(np.float32(x))
        elif x is not None:
            given.append(np.int32(x))
    # Triton adds two more, which these kernels do not use.
    given += [np.uint64(0)] * (len(program.parameters) - len(given))
    parameters = dict(zip(program.parameters, given, strict=True))
    run_program(program, launch.grid, parameters, tensors)


def _bytes(x: Tensor) -> np.ndarray:
    """The memory of a tensor."""
    if not x.is_contiguous() or x.device.type != "cpu":
        raise ValueError(f"expected a contiguous tensor on the CPU, got {x.stride()}")
    size = x.numel() * x.element_size()
    if not size:
        return np.empty(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(x.data_ptr()))


def _kind(x: object) -> object:
    return x.dtype if isinstance(x, Tensor) else type(x)


@cache
def stand_in(capability: tuple[int, int]) -> launcher.StandIn:
    """A stand-in that runs launches as a GPU of this capability would.

    - `capability`: (9, 0) or (8, 0).

    Raises `Fault` for what a GPU would do wrong or leaves undefined, and
    `Unknown` for an instruction that is not modelled.
    """
    return launcher.StandIn(capability, "cpu", Emulator(capability).run)
