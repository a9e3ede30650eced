"""A case of the benchmark, and how it is measured."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from fwlab.bench.measure import in_turns, peak_mib

T = TypeVar("T")
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


def shape_text(shape: dict[str, int]) -> str:
    """A shape in one line, such as "T 1024, width 64"."""
    return ", ".join(f"{name} {size}" for name, size in shape.items())


def printed(
    groups: Iterable[list[dict[str, Any]]],
    table: Callable[[list[dict[str, Any]]], list[list[str]]],
    widths: Sequence[int],
    left: int = 1,
) -> list[dict[str, Any]]:
    """Print the rows of each group as soon as they are measured, and return all.

    - `groups`: measures while it is iterated over.
    - `table`: rows as text, with a header, which is printed first.
    - `widths`, `left`: as for `layout`.
    """
    rows: list[dict[str, Any]] = []
    for group in chain([[]], groups):
        header, *lines = layout(table(group), left, widths).splitlines()
        with tqdm.external_write_mode():
            print(*(lines or [header]), sep="\n", flush=True)
        rows += group
    return rows


def bar(cases: Sequence[T]) -> Iterable[T]:
    """Show how many of these are measured; in a terminal only."""
    return tqdm(cases, unit="case", disable=None, leave=False, dynamic_ncols=True)


def layout(cells: list[list[str]], left: int = 1, widths: Sequence[int] = ()) -> str:
    """Lines of equal length.

    - `left`: this many columns flush left, the rest right.
    - `widths`: of the first columns, at least.
    """
    columns = zip(*cells, strict=True)
    least = chain(widths, repeat(0))
    widths = [max(w, *map(len, c)) for w, c in zip(least, columns, strict=False)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )
