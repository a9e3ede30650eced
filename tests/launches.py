"""Record kernel launches instead of running them, on a machine without a GPU.

with recording((9, 0)) as launches:
    ops.delta_rule(q, k, v, beta, implementation="triton")  # on the device "meta"
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

from fwlab.ops import _recurrence, _triton


class Launch(NamedTuple):
    """Hold the arguments of a `_triton.launch` call."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: int


@contextmanager
def recording(capability: tuple[int, int]) -> Iterator[list[Launch]]:
    """Record the launches for a GPU of the given compute capability in a list."""
    launches: list[Launch] = []

    def launch(kernel, grid, *arguments, warps, stages=1, **constants):
        launches.append(Launch(kernel, grid, arguments, constants, warps, stages))

    with ExitStack() as patches:
        for module, name, value in (
            (_triton, "launch", launch),
            (_triton, "capability", lambda device: capability),
            (_triton, "why_not", lambda *asked, **options: None),
            # Launch kernels on tensors without data instead of tracing them.
            (_recurrence, "is_traced", lambda x: False),
        ):
            patches.enter_context(mock.patch.object(module, name, value))
        yield launches
