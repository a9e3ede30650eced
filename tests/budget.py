"""What tests cost: processor time, which is reported, and counts, which are limited.

`make test` runs groups of tests in processes of their own. Each leaves a
record in `.cache/tests`; then this file, as a program, prints the dearest
tests of all, and what each group and all of them together have cost:

    python tests/budget.py [--all]

The same tests take twice their time on another day: two threads share one
core, and all share the caches. So no verdict depends on a time; it is
printed as what a nominal processor would take. But a group that left no
record is a failure, and so is one with more tests, pages or processes that it
starts itself than it may have: these are the same everywhere. With --all, slow tests are among
them, and the counts are not limited.
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

#: Seconds of processor time for all groups together.
TOTAL = 960
#: The most that a group may have: tests, pages that a browser opens, and
#: processes that the tests start. Raise a number with the change that needs it.
LIMITS = {
    "site": {"tests": 650, "pages": 240, "processes": 5},
    "package": {"tests": 5720, "pages": 0, "processes": 425},
    "notebooks": {"tests": 125, "pages": 0, "processes": 5},
    "order": {"tests": 450, "pages": 0, "processes": 20},
    "kernels": {"tests": 1, "pages": 0, "processes": 0},
}
STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn")
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
        self.processes = 0
        self.tests: dict[str, float] = {}
        if not self.group:
            return
        if sys.platform == "linux":
            # Whom a child leaves behind when it ends is counted, too: most
            # of a browser's processes.
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.slowness = slowness()
        sys.addaudithook(self.count)

    def count(self, event: str, arguments: tuple) -> None:
        self.processes += event in STARTS

    def pytest_runtest_logreport(self, report) -> None:
        # Set-up and tear-down belong to the test that waits for them. On the
        # clock: what a browser has spent is known only when it ends.
        before = self.tests.get(report.nodeid, 0.0)
        self.tests[report.nodeid] = before + report.duration

    def pytest_unconfigure(self) -> None:
        if self.group:
            wait_for_children()
            spent = sum(os.times()[:4])
            RECORDS.mkdir(parents=True, exist_ok=True)
            record = {
                "processor_seconds": spent,
                # A machine may have become slower meanwhile.
                "slowness": max(self.slowness, slowness()),
                "counts": {
                    "tests": len(self.tests),
                    "pages": len(getattr(sys.modules.get("built"), "OPENED", ())),
                    "processes": self.processes,
                },
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


def dearest(records: dict[str, dict], most: int = 10) -> list[str]:
    """A line for each of the tests that took longest on the clock."""
    tests = [
        (s / r["slowness"], name)
        for r in records.values()
        for name, s in r["tests"].items()
    ]
    return [f"{s:7.1f} s  {name}" for s, name in sorted(tests, reverse=True)[:most]]


def costs(records: dict[str, dict]) -> list[str]:
    """A line for each group, and one for all."""
    lines, total = [], 0.0
    for group, record in records.items():
        counts = ", ".join(f"{n} {what}" for what, n in record["counts"].items())
        spent = record["processor_seconds"] / record["slowness"]
        lines.append(f"{spent:7.0f} s  {group}: {counts}")
        total += spent
    return [*lines, f"{total:7.0f} s  of {TOTAL} s"]


def beyond(records: dict[str, dict], limited: bool = True) -> list[str]:
    """A sentence for each group without a record, and for each count too many."""
    lines = [f"{group} left no record" for group in LIMITS if group not in records]
    for group, limits in LIMITS.items() if limited else ():
        for what, n in records.get(group, {}).get("counts", {}).items():
            if n > limits[what]:
                lines.append(
                    f"{group} has {n} {what}, and may have {limits[what]}: "
                    "do with fewer, or raise the limit in tests/budget.py"
                )
    return lines


def main() -> int:
    """Print what everything cost; 1 if a group left no record or has too many."""
    paths = [RECORDS / f"{group}.json" for group in LIMITS]
    records = {p.stem: json.loads(p.read_text("utf-8")) for p in paths if p.exists()}
    print("The dearest tests, on the clock:", *dearest(records), sep="\n")
    print("Processor time, as on a nominal processor:", *costs(records), sep="\n")
    wrong = beyond(records, limited="--all" not in sys.argv)
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
