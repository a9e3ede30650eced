"""Measure time, memory and operators of functions without arguments; print rows."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

TURN = 0.3  # The minimum duration of a turn in seconds.


def in_turns(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    turn: float | None = None,
    shown: bool = False,
) -> dict[str, list[float]]:
    """Measure the time of each function's calls in seconds, alternating the functions.

    Other load on the machine thus affects all functions alike. A turn begins with an
    untimed call, so that no function pays for memory that another one has just freed.

    - `rounds`: number of turns of each function.
    - `turn`: minimum seconds of a turn; None = `TURN`.
    - `shown`: show a progress bar, in a terminal.
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
    """Measure the peak memory, in MiB, of the tensors that a call allocates.

    Allocations during the call count, its result included, but no earlier ones. The
    result is the same number in every run.
    """
    # Keep the profiler from printing a line whenever it starts or stops.
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


def saved_bytes(call: Callable[..., object], *given: Any) -> int:
    """Count the bytes that autograd saves in `call(*given)`, each storage once."""
    saved: list[Tensor] = []

    def pack(x: Tensor) -> int:
        # Detach, since a node that saves its own output keeps itself alive.
        saved.append(x.detach())
        return len(saved) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, saved.__getitem__):
        alive = call(*given)
    del alive
    memories = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in saved}
    return sum(memory.nbytes() for memory in memories.values())


def operator_calls(call: Callable[[], object]) -> int:
    """Count the PyTorch operators that a call runs, forward and backward.

    Views count. Operators that another operator calls do not.
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


def print_rows(
    rows: Iterable[dict[str, Any]], widths: Sequence[int]
) -> list[dict[str, Any]]:
    """Print each row of a table as soon as it is measured, below a header.

    - `rows`: measures while it is iterated over; all rows have the same keys.
    - `widths`: widths of the columns. Words are left-aligned, numbers right-aligned.
    - Returns all rows.
    """
    printed: list[dict[str, Any]] = []
    for row in rows:
        names = [] if printed else [[*row]]
        for cells in [*names, [text(value) for value in row.values()]]:
            line = [
                f"{cell:{'<' if isinstance(value, str | dict) else '>'}{width}}"
                for cell, value, width in zip(cells, row.values(), widths, strict=True)
            ]
            with tqdm.external_write_mode():
                print("  ".join(line), flush=True)
        printed.append(row)
    return printed


def text(value: Any) -> str:
    """Format the value of a cell: numbers with four digits, a shape as "T 1024"."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {text(part)}" for name, part in value.items())
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
