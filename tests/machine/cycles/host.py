"""What a call costs before its kernels run: checks, choices and memory, in Python.

A stand-in takes the launches and does nothing, so a CPU can measure this.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from fwlab import ops
from fwlab.ops.call import launcher

#: Batch, steps, heads, width: a size at which a GPU waits for its host.
SHAPE = (4, 512, 4, 32)
CALLS = 10_000
OPERATIONS = {"delta_rule": 1, "gated_delta_rule": 2, "sum_rule": 0}


def microseconds(name: str, gates: int) -> dict[str, Any]:
    """The shortest call of an operation, forward and with its backward pass."""
    q, k, v = (torch.randn(SHAPE, dtype=torch.bfloat16) for _ in range(3))
    more = [torch.rand(SHAPE[:3], dtype=torch.bfloat16) for _ in range(gates)]
    inputs = [x.requires_grad_() for x in (q, k, v, *more)]
    launches: list[launcher.Launch] = []

    def forward() -> torch.Tensor:
        return getattr(ops, name)(*inputs, normalize=False, implementation="triton")

    def both() -> None:
        y = forward()
        torch.autograd.grad(y, inputs, v)

    def alone() -> None:
        with torch.no_grad():
            forward()

    stand_in = launcher.StandIn((9, 0), "cpu", launches.append)
    with launcher.standing_in(stand_in):
        return {"forward": shortest(alone, launches), "both": shortest(both, launches)}


def shortest(call: Callable[[], Any], launches: list[launcher.Launch]) -> float:
    """The minimum of many calls, in microseconds."""
    best = float("inf")
    for _ in range(CALLS):
        launches.clear()
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return round(best * 1e6, 1)


def rows() -> dict[str, dict[str, Any]]:
    """Every operation, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {name: microseconds(name, n) for name, n in OPERATIONS.items()}
    finally:
        torch.set_num_threads(threads)
