"""Compile recorded launches for a GPU that is not there."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fwlab.ops.gpu import Launch

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


class Use(NamedTuple):
    """What a compiled kernel takes of a multiprocessor.

    - `shared`: bytes of shared memory per program.
    - `registers`: per thread.
    - `stack`: bytes per thread in slow local memory; above 0 registers
      have been spilled.
    """

    shared: int
    registers: int
    stack: int


def source(launch: Launch) -> ASTSource:
    """What Triton would compile for these arguments."""
    kernel = launch.kernel
    signature, constants, attributes = {}, {}, {}
    values = dict(zip(kernel.arg_names, launch.arguments, strict=False))
    values |= launch.constants
    assert set(values) == set(kernel.arg_names), kernel.__name__
    for place, name in enumerate(kernel.arg_names):
        value = values[name]
        if value is None or kernel.params[place].is_constexpr:
            signature[name] = "constexpr"
            constants[(place,)] = value
        elif isinstance(value, torch.Tensor):
            assert value.is_contiguous(), (kernel.__name__, name)
            signature[name] = TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            assert kernel.params[place].do_not_specialize, (kernel.__name__, name)
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    return ASTSource(
        fn=kernel, signature=signature, constexprs=constants, attrs=attributes
    )


def compiled(launch: Launch, capability: tuple[int, int]) -> Use:
    """Compile for that capability, and read what it takes."""
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    result = triton.compile(source(launch), target=target, options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(result.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    registers, stack = (
        int(re.search(rf"{word}:(\d+)", text)[1]) for word in ("REG", "STACK")
    )
    return Use(result.metadata.shared, registers, stack)
