"""Writes docs/results/model-CARD.json: the calls that the model knows, timed on a GPU.

    PYTHONPATH=tests/machine python -m cycles.measured

Also the same calls of flash-linear-attention, if it is installed, and the time that
the host needs for small ones.
"""

import importlib
import json
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import aot
import torch
from torch import Tensor
from torch.nn import functional as F

from cycles import host, table
from fwlab import ops
from fwlab.bench import kernels
from fwlab.files import write_json
from fwlab.ops.call import fla
from fwlab.provenance import provenance

#: Calls in a row whose launches the host puts into a queue.
QUEUE = 50


def rule(shape: tuple[int, int, int], width: int, gates: int, dtype) -> list[Tensor]:
    """Queries, keys of length 1, values, beta in [0, 1], and a log decay."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, *shape, width, device="cuda")
    parts = [q, F.normalize(k, dim=-1), v]
    parts += [torch.rand(shape, device="cuda"), -torch.rand(shape, device="cuda")]
    return [x.to(dtype).contiguous().requires_grad_() for x in parts[: 3 + gates]]


def ours(case: str) -> Callable[[], Tensor]:
    """A case of `aot.CASES`, on the same tensors in every call."""
    made: list[Tensor] = []

    def make(*shape: int, dtype: torch.dtype) -> Tensor:
        if not made and len(shape) == 4:
            made.extend(rule(shape[:3], shape[3], 2, dtype))
        elif len(made) < 3 and len(shape) < 4:
            made.append(torch.randn(shape, dtype=dtype, device="cuda").requires_grad_())
        at = replayed[0]
        replayed[0] += 1
        return made[at]

    replayed = [0]

    def call() -> Tensor:
        replayed[0] = 0
        with mock.patch.object(aot, "meta", make):
            return aot.CASES[case][0]()

    return call


def theirs(problem: table.Problem) -> Callable[[], Tensor]:
    """The same call of flash-linear-attention, which takes the decay first."""
    module, _, function = problem.function.rpartition(".")
    op = getattr(importlib.import_module(f"fla.ops.{module}"), function)
    q, k, v, *gates = rule(problem.shape, problem.width, problem.gates, torch.bfloat16)
    return lambda: op(q, k, v, *reversed(gates))[0]


def times(call: Callable[[], Tensor]) -> dict[str, Any]:
    """Milliseconds of a forward pass, of both passes, and of each kernel in them."""
    dy = torch.randn_like(call())

    def both() -> None:
        aot.go_back(call(), dy)

    both()
    return {
        "forward": kernels.on_gpu(call)[0],
        "both": kernels.on_gpu(both)[0],
        "kernels": microseconds(both, QUEUE),
    }


def microseconds(call: Callable[[], Any], calls: int) -> dict[str, float]:
    """How long the GPU is busy with each kernel of a call: a mean, the longest first.

    The call has run before.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    rows: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        rows[event.key[:80]] += event.device_time_total / calls
    longest = sorted(rows.items(), key=lambda x: -x[1])
    return {name: round(us, 1) for name, us in longest if us > 0.5}


def modelled(case: str) -> dict[str, dict[str, float]]:
    """By the model, the time and the spills of each kernel in the form of now."""
    found: dict[str, float] = defaultdict(float)
    rows = json.loads(aot.TABLE.read_text("utf-8"))["modelled"][case]["rows"]
    for row in rows:
        found[row["kernel"]] += row["microseconds"]
    return {
        "modelled": {name: round(us, 1) for name, us in found.items()},
        "stack": {row["kernel"]: row["stack"] for row in rows},
    }


def queued(name: str, gates: int, implementation: str) -> dict[str, float]:
    """Microseconds of the host for one small call, while the GPU has work to do."""
    inputs = rule(host.SHAPE[:3], host.SHAPE[3], gates, torch.bfloat16)
    dy = torch.randn_like(inputs[2])
    op = getattr(ops, name)

    def forward() -> Tensor:
        return op(*inputs, normalize=False, implementation=implementation)

    def both() -> None:
        torch.autograd.grad(forward(), inputs, dy)

    def shortest(call: Callable[[], Any]) -> float:
        best = float("inf")
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(QUEUE):
                call()
            best = min(best, (time.perf_counter() - start) / QUEUE)
        return round(best * 1e6, 1)

    return {"forward": shortest(torch.no_grad()(forward)), "both": shortest(both)}


def main() -> None:
    """Measure, and write after each row."""
    card = kernels.card()
    path = aot.TABLE.with_name(f"model-{card['slug']}.json")
    result: dict[str, Any] = {
        "card": card,
        "versions": kernels.versions(),
        **provenance("PYTHONPATH=tests/machine python -m cycles.measured"),
    }
    sides = {"triton": partial(ours)}
    if not fla.missing():
        sides["fla"] = lambda case: theirs(table.THEIRS[case])
    for side, make in sides.items():
        rows = result[side] = {}
        for case in table.MODELLED if side == "triton" else table.THEIRS:
            rows[case] = times(make(case))
            if side == "triton":
                rows[case] |= modelled(case)
            print(side, case, rows[case]["forward"], rows[case]["both"], flush=True)
            write_json(path, result)
    result["host"] = {
        name: {side: queued(name, gates, side) for side in sides}
        for name, gates in host.OPERATIONS.items()
    }
    print(result["host"])
    write_json(path, result)


if __name__ == "__main__":
    main()
