"""What tests cost: the slowest of them, and a budget for each group.

`make test` runs groups of tests in processes of their own. Each leaves a
record of its processor time in `.cache/tests`; then this file, as a program,
prints the slowest tests of all, and what each group has spent of its budget:

    python tests/budget.py

Only a group without a record is a failure. The same tests took twice their
usual time on another day: two threads share one core, and all share the
caches. So no verdict depends on a time.

A processor that is slower than the one on which the budgets were set gets
more time: as much as it takes longer for a fixed piece of work. A group that
outgrows its budget is to be made quicker; slow tests that are not needed for
every change can be marked as such.
"""

import contextlib
import ctypes
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / ".cache" / "tests"

#: Seconds of processor time per group, up to twice as much as they take:
#: the same work takes longer beside other work, and on another day.
BUDGETS = {"site": 750, "package": 650, "kernels": 700}
NO_RECORD = "no record"
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
#: Processor time of `work` where the budgets were set, in seconds.
NOMINAL = 0.022


class Record:
    """A plugin of pytest that records what a group costs.

    The environment variable FWLAB_GROUP names the group: its budget, and after a
    dash any part of it that runs in a process of its own. Without it
    nothing is written.
    """

    def __init__(self) -> None:
        self.group = os.environ.get("FWLAB_GROUP")
        if self.group and sys.platform == "linux":
            # Whom a child leaves behind when it ends is counted, too: most
            # of a browser's processes.
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.tests: dict[str, float] = {}
        self.slowness = slowness() if self.group else 1.0

    def pytest_runtest_logreport(self, report) -> None:
        # Set-up and tear-down belong to the test that waits for them.
        before = self.tests.get(report.nodeid, 0.0)
        self.tests[report.nodeid] = before + report.duration

    def pytest_unconfigure(self) -> None:
        if self.group:
            wait_for_children()
            spent = os.times()
            # A machine may have become slower meanwhile.
            self.slowness = max(self.slowness, slowness())
            RECORDS.mkdir(parents=True, exist_ok=True)
            record = {
                "processor_seconds": sum(spent[:4]),
                "slowness": self.slowness,
                "tests": self.tests,
            }
            path = RECORDS / f"{self.group}.json"
            path.write_text(json.dumps(record), "utf-8")


def wait_for_children(seconds: float = 5.0) -> None:
    """Let all processes below this one end: only then their time is known."""
    end = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):  # there is none left
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.05)


def work() -> float:
    """Processor time of a fixed piece of work, in seconds."""
    begin, total = time.process_time(), 0
    for i in range(300_000):
        total += i * i % 7
    return time.process_time() - begin


def slowness() -> float:
    """How much slower than nominal this processor is; at least 1."""
    return max(1.0, min(work() for _ in range(5)) / NOMINAL)


def slowest(records: dict[str, dict], most: int = 20) -> list[str]:
    """A line for each of the tests that took longest on the clock."""
    tests = [(s, name) for r in records.values() for name, s in r["tests"].items()]
    return [f"{s:7.1f} s  {name}" for s, name in sorted(tests, reverse=True)[:most]]


def costs(records: dict[str, dict], budgets: dict[str, int]) -> dict[str, str]:
    """What each group has spent of its budget.

    Returns a line per group, under its name.
    """
    lines = {}
    for group, budget in budgets.items():
        mine = [r for name, r in records.items() if name.split("-")[0] == group]
        # What the nominal processor would have taken.
        spent = sum(r["processor_seconds"] / r["slowness"] for r in mine)
        line = f"{group}: {spent:.0f} of {budget} s of processor time"
        if not mine:
            line = f"{group}: {NO_RECORD}"
        elif spent > budget:
            line += ": make it quicker"
        lines[group] = line
    return lines


def main() -> int:
    """Print the slowest tests and the budgets; 1 if a group left no record."""
    paths = sorted(RECORDS.glob("*.json"))
    records = {path.stem: json.loads(path.read_text("utf-8")) for path in paths}
    print("The slowest tests:", *slowest(records), sep="\n")
    lines = costs(records, BUDGETS).values()
    print("The budgets:", *lines, sep="\n")
    return int(any(line.endswith(NO_RECORD) for line in lines))


if __name__ == "__main__":
    sys.exit(main())
