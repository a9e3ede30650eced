"""Time, memory and operator calls of a function without arguments."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

Call = Callable[[], object]

TURN = 0.3  # minimum seconds of a turn


def in_turns(
    calls: Mapping[str, Call],
    rounds: int,
    turn: float | None = None,
    shown: bool = False,
) -> dict[str, list[float]]:
    """Seconds of every call, measured in turns.

    Other load on the machine thus affects all of them alike. A turn
    begins with an untimed call, so that none pays for memory that the one
    before has just freed.

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


def peak_mib(call: Call) -> float:
    """Peak MiB of the tensors that are alive at once during a call.

    It counts what the call allocates, its result included, but not what
    was there before: the same number in every run. The resident memory of
    the process would also count the code of the operators at their first
    use (2 to 6 MiB) and what the allocator holds back.
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


def operator_calls(call: Call) -> int:
    """How many operators of PyTorch a call runs, in both passes.

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
