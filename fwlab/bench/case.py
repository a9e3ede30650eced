"""A case of the benchmark, and how its speed and memory are measured."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab.training import PeakMemory

#: Inputs with gradients, and a gradient of the output; None = only forward.
Problem = tuple[list[Tensor], Tensor | None]
Side = Callable[..., Tensor]

PROCESSES = 1  # number of fresh processes; peak memory is their median
TURN = 0.3  # minimum seconds of a side's turn


class Case(NamedTuple):
    """An operation at one size, and the ways to compute it.

    - `name`: unique, such as "delta_rule".
    - `shape`: as the table prints it, such as `{"T": 1024}`.
    - `problem`: seeded inputs of a dtype, and a gradient of the output.
    - `sides`: name -> function of the inputs; all are compared with the
      side "efficient".
    - `exact`: the side that computes the float64 reference.
    - `rounds`: turns per side.
    - `threads`: for this case only; None = PyTorch's default.
    """

    name: str
    shape: dict[str, int]
    problem: Callable[[torch.dtype], Problem]
    sides: dict[str, Side]
    exact: str = "naive"
    rounds: int = 5
    threads: int | None = None

    @property
    def key(self) -> str:
        """Name and shape in one word."""
        return "-".join([self.name, *(f"{k}{v}" for k, v in self.shape.items())])


def once(side: Side, inputs: list[Tensor], dy: Tensor | None) -> list[Tensor]:
    """Forward and backward pass: the output and every gradient.

    Without `dy` only forward, and only the output.
    """
    y = side(*inputs)
    if dy is None:
        return [y]
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def seconds(case: Case) -> dict[str, list[float]]:
    """Times of forward and backward per side, measured in turns.

    Other load on the machine thus affects all sides alike. A turn begins
    with an untimed call, so that no side pays for memory that the side
    before has just freed.
    """
    inputs, dy = case.problem(torch.float32)
    times: dict[str, list[float]] = {name: [] for name in case.sides}
    before = torch.get_num_threads()
    torch.set_num_threads(case.threads or before)
    try:
        for _ in range(case.rounds):
            for name, side in case.sides.items():
                once(side, inputs, dy)
                start = time.perf_counter()
                end = start + TURN
                while start < end or not times[name]:
                    once(side, inputs, dy)
                    times[name].append(time.perf_counter() - start)
                    start = time.perf_counter()
    finally:
        torch.set_num_threads(before)
    return times


def errors(case: Case) -> dict[str, float]:
    """Maximum relative error of outputs and gradients, against float64."""
    inputs, dy = case.problem(torch.float32)
    doubled = [x.detach().double().requires_grad_() for x in inputs]
    exact = once(case.sides[case.exact], doubled, None if dy is None else dy.double())
    found = {}
    for name, side in case.sides.items():
        pairs = zip(once(side, inputs, dy), exact, strict=True)
        found[name] = max(
            ((a - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in pairs
        )
    return found


def peak_memory(case: Case, side: str) -> float | None:
    """Peak MiB of resident memory that forward and backward add.

    The median over fresh processes; None if the system does not report
    it.
    """
    peaks = [_peak_of_one(case.key, side) for _ in range(PROCESSES)]
    known = [peak for peak in peaks if peak is not None]
    return statistics.median(known) if known else None


def _peak_of_one(key: str, side: str) -> float | None:
    call = f"from fwlab.bench import peak; print(peak({key!r}, {side!r}))"
    done = subprocess.run(
        [sys.executable, "-c", call], check=True, capture_output=True, text=True
    )
    last = done.stdout.split()[-1]
    return None if last == "None" else float(last)


def peak_of(case: Case, side: str) -> float | None:
    """The same in this process, which must have run nothing else."""
    function = case.sides[side]
    inputs, dy = case.problem(torch.float32)
    load_libraries()
    memory = PeakMemory()
    once(function, inputs, dy)
    return memory.mib()


def load_libraries() -> None:
    """Let PyTorch load what it loads at the first use of a function."""
    x = torch.rand(2, 8, 8, requires_grad=True)
    y = torch.einsum("bij,bjk->bik", x.softmax(-1), x.exp().cumsum(-1)) @ x.tril()
    torch.linalg.solve_triangular(y, x, upper=False).sum().backward()


def run(case: Case) -> list[dict[str, Any]]:
    """Measure one case: a plain dict per side."""
    times = seconds(case)
    median = {name: statistics.median(t) for name, t in times.items()}
    wrong = errors(case)
    return [
        {
            "case": case.name,
            "shape": case.shape,
            "threads": case.threads or torch.get_num_threads(),
            "side": name,
            "milliseconds": round(1e3 * median[name], 2),
            "fastest": round(1e3 * min(times[name]), 2),
            "times_slower": round(median[name] / median["efficient"], 1),
            "peak_mib": (peak := peak_memory(case, name)) and round(peak, 1),
            "error": float(f"{wrong[name]:.1e}"),
        }
        for name in case.sides
    ]


def layout(cells: list[list[str]], left: int = 1) -> str:
    """Lines of equal length: `left` columns flush left, the rest right."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
