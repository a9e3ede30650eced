"""A case of the benchmark, and how it is measured."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab.bench.measure import in_turns, peak_mib

#: Inputs with gradients, and a gradient of the output; None = only forward.
Problem = tuple[list[Tensor], Tensor | None]
#: What it returns is a tuple only where it is not differentiated.
Side = Callable[..., Tensor | tuple[Tensor, ...]]


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

    Without `dy` only forward, and all outputs.
    """
    y = side(*inputs)
    if isinstance(y, tuple):
        return list(y)
    if dy is None:
        return [y]
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def calls(case: Case) -> dict[str, Callable[[], list[Tensor]]]:
    """What each side has to do, on the same inputs in float32."""
    inputs, dy = case.problem(torch.float32)
    return {name: partial(once, side, inputs, dy) for name, side in case.sides.items()}


def seconds(case: Case) -> dict[str, list[float]]:
    """Times of forward and backward per side, measured in turns."""
    before = torch.get_num_threads()
    torch.set_num_threads(case.threads or before)
    try:
        return in_turns(calls(case), case.rounds)
    finally:
        torch.set_num_threads(before)


def errors(case: Case) -> dict[str, float]:
    """Maximum relative error of outputs and gradients, against float64."""
    inputs, dy = case.problem(torch.float32)
    doubled = [x.detach().double().requires_grad_() for x in inputs]
    exact = once(case.sides[case.exact], doubled, None if dy is None else dy.double())
    largest = {}
    for name, side in case.sides.items():
        pairs = zip(once(side, inputs, dy), exact, strict=True)
        largest[name] = max(
            ((a - b).norm() / b.norm().clamp(min=1e-30)).item() for a, b in pairs
        )
    return largest


def run(case: Case) -> list[dict[str, Any]]:
    """Measure one case: a plain dict per side."""
    times = seconds(case)
    median = {name: statistics.median(t) for name, t in times.items()}
    peaks = {name: peak_mib(call) for name, call in calls(case).items()}
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
            "peak_mib": peaks[name],
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
