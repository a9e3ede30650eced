"""Measure time, memory and operators of functions without arguments; print tables."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

TURN = 0.3  # minimum seconds of a turn


def in_turns(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    turn: float | None = None,
    shown: bool = False,
) -> dict[str, list[float]]:
    """Measure the seconds of every call, in turns.

    Other load on the machine thus affects all of them alike. A turn begins with an
    untimed call, so that none pays for memory that the one before has just freed.

    - `rounds`: turns of each.
    - `turn`: minimum seconds of a turn; None = `TURN`.
    - `shown`: with a bar, in a terminal.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    hidden = None if shown else True
    for _ in tqdm(range(rounds), unit="round", disable=hidden, leave=False):
        for name, call in calls.items():
            call()
            start = time.perf_counter()
            end = start + (TURN if turn is None else turn)
            while start < end or not times[name]:
                call()
                times[name].append(time.perf_counter() - start)
                start = time.perf_counter()
    return times


def peak_mib(call: Callable[[], object]) -> float:
    """Measure the peak MiB of the tensors that are alive at once during a call.

    It counts what the call allocates, its result included, but not what was there before:
    the same number in every run.
    """
    # Otherwise the profiler prints a line whenever it starts or stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events: Any = profiler.profiler
    changes = [e for e in events.kineto_results.events() if e.name() == "[memory]"]
    used = highest = 0
    for change in sorted(changes, key=lambda change: change.start_ns()):
        used += change.nbytes()
        highest = max(highest, used)
    return round(highest / 2**20, 2)


def operator_calls(call: Callable[[], object]) -> int:
    """Count the operators of PyTorch that a call runs, in both passes.

    Views count, and what an operator calls inside does not.
    """
    counter = _Counter()
    with counter:
        call()
    return counter.calls


class _Counter(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.calls += 1
        return operator(*args, **(kwargs or {}))


def layout(cells: list[list[str]], left: int = 1, widths: Sequence[int] = ()) -> str:
    """Lay out cells as lines of equal length.

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


def print_rows(
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


def shape_text(shape: Mapping[str, int]) -> str:
    """Write a shape in one line, such as "T 1024, width 64"."""
    return ", ".join(f"{name} {size}" for name, size in shape.items())
