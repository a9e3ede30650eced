"""What tests cost: processor time, which is reported and makes no verdict.

`make test` runs groups of tests in processes of their own. Each leaves a
record in `.cache/tests`; then this file, as a program, prints the dearest
tests of all, and what each group and all of them together have cost. A group
that left no record is a failure.

The same tests take twice their time on another day: two threads share one
core, and all share the caches. So the time is printed as what a nominal
processor would take.
"""

import contextlib
import ctypes
import json
import os
import sys
import time
from pathlib import Path

RECORDS = Path(__file__).resolve().parents[1] / ".cache" / "tests"
GROUPS = ("site", "package", "notebooks", "kernels")
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
#: Processor time of `work` on the nominal processor, in seconds.
NOMINAL = 0.022


class Record:
    """A plugin of pytest that records what a group costs.

    The environment variable FWLAB_GROUP names the group. Without it nothing is
    written.
    """

    def __init__(self) -> None:
        self.group = os.environ.get("FWLAB_GROUP")
        self.tests: dict[str, float] = {}
        if not self.group:
            return
        if sys.platform == "linux":
            # Whom a child leaves behind when it ends is counted, too: most
            # of a browser's processes.
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.slowness = slowness()

    def pytest_runtest_logreport(self, report) -> None:
        # Set-up and tear-down belong to the test that waits for them. On the
        # clock: what a browser has spent is known only when it ends.
        before = self.tests.get(report.nodeid, 0.0)
        self.tests[report.nodeid] = before + report.duration

    def pytest_unconfigure(self) -> None:
        if self.group:
            wait_for_children()
            spent = sum(os.times()[:4])
            # A machine may have become slower meanwhile.
            slow = max(self.slowness, slowness())
            record = {"processor_seconds": spent / slow, "slowness": slow}
            RECORDS.mkdir(parents=True, exist_ok=True)
            path = RECORDS / f"{self.group}.json"
            path.write_text(json.dumps({**record, "tests": self.tests}), "utf-8")


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
    """Measure how much slower than nominal this processor is; at least 1."""
    return max(1.0, min(work() for _ in range(5)) / NOMINAL)


def dearest(records: dict[str, dict], most: int = 10) -> list[str]:
    """Write a line for each of the tests that took longest on the clock."""
    tests = [
        (s / r["slowness"], name)
        for r in records.values()
        for name, s in r["tests"].items()
    ]
    return [f"{s:7.1f} s  {name}" for s, name in sorted(tests, reverse=True)[:most]]


def main() -> int:
    """Print what everything cost; 1 if a group left no record."""
    paths = [RECORDS / f"{group}.json" for group in GROUPS]
    records = {p.stem: json.loads(p.read_text("utf-8")) for p in paths if p.exists()}
    print("The dearest tests, on the clock:", *dearest(records), sep="\n")
    print("Processor time, as on a nominal processor:")
    for group, record in records.items():
        tests = len(record["tests"])
        print(f"{record['processor_seconds']:7.0f} s  {group}: {tests} tests")
    print(f"{sum(r['processor_seconds'] for r in records.values()):7.0f} s  in all")
    missing = [group for group in GROUPS if group not in records]
    print(*(f"{group} left no record\n" for group in missing), sep="", end="")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
