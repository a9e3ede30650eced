"""The kernels of flash-linear-attention, compiled for Hopper without a GPU.

The library chooses among several configurations of a kernel by timing them. Here
the model chooses: each kernel gets the configuration with the shortest modelled
time, so the library is not modelled slower than it would be by a poor choice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
HOPPER = GPUTarget("cuda", 90, 32)
#: Bytes of shared memory per program that a Hopper GPU offers.
ROOM = 232448


class Driver:
    """As much of a GPU's driver as the library asks for."""

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": ROOM, "multiprocessor_count": 132}

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_benchmarker(self) -> Callable:
        raise RuntimeError("there is no GPU to measure on")


class Choice(NamedTuple):
    """A kernel, its arguments, and the configurations to choose from."""

    kernel: Any
    grid: Any
    values: dict[str, Any]
    configurations: list[triton.Config]


@contextmanager
def hopper():
    """Let the library believe that there is a Hopper GPU."""
    with (
        mock.patch.object(triton.runtime.driver, "_active", Driver()),
        mock.patch("torch.cuda.get_device_name", lambda *_: "NVIDIA H100"),
        mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0)),
        mock.patch("torch.cuda.is_available", lambda: True),
    ):
        yield


def recorded(run: Callable[[list[Choice]], Any]) -> list[Choice]:
    """What `run`, with tensors without data, would launch.

    - `run`: gets the list to which the launches are added.
    """
    found: list[Choice] = []
    offered: list[list[triton.Config]] = [[triton.Config({})]]

    def launch(kernel, *arguments, grid, warmup, **given):
        options = {n: given.pop(n) for n in ("num_warps", "num_stages") if n in given}
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | given
        configurations = offered[-1]
        if options:
            configurations = [triton.Config({}, **options)]
        found.append(Choice(kernel, grid, values, configurations))

    def choose(tuner, *arguments, **given):
        offered.append(tuner.configs)
        try:
            return tuner.fn.run(*arguments, **given)
        finally:
            offered.pop()

    with (
        mock.patch.object(JITFunction, "run", launch),
        mock.patch.object(Autotuner, "run", choose),
    ):
        run(found)
    return found


def source(kernel: Any, values: dict[str, Any]) -> ASTSource:
    """What Triton would compile for these arguments."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        name, value = parameter.name, values[parameter.name]
        plain = parameter.do_not_specialize
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or (value == 1 and not plain):
            signature[name] = "constexpr"
            constants[(place,)] = value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0 and not plain:
                attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(
        fn=kernel, signature=signature, constexprs=constants, attrs=attributes
    )
