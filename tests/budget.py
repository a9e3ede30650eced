"""What tests cost: the slowest of them, and a budget for each group.

`make test` runs groups of tests in processes of their own. Each leaves a
record of its processor time, which says the same beside other work as
alone, in `.cache/tests`; then this file, as a program, prints the slowest
tests of all, and fails where a group has spent more than its budget:

    python tests/budget.py

A processor that is slower than the one on which the budgets were set gets
more time: as much as it takes longer for a fixed piece of work.
"""

import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / ".cache" / "tests"

#: Seconds of processor time per group. Two cores share the sum of them.
BUDGETS = {"site": 400, "package": 400, "kernels": 300}
#: Processor time of `work` where the budgets were set, in seconds.
NOMINAL = 0.020


class Record:
    """A plugin of pytest that writes down what a group has cost.

    The environment variable GROUP names the group: its budget, and after a
    dash any part of it that runs in a process of its own. Without it
    nothing is written.
    """

    def __init__(self) -> None:
        self.group = os.environ.get("GROUP")
        self.tests: dict[str, float] = {}
        self.slowness = slowness() if self.group else 1.0

    def pytest_runtest_logreport(self, report) -> None:
        # Set-up and tear-down belong to the test that waits for them.
        before = self.tests.get(report.nodeid, 0.0)
        self.tests[report.nodeid] = before + report.duration

    def pytest_unconfigure(self) -> None:
        if self.group:
            spent = os.times()
            RECORDS.mkdir(parents=True, exist_ok=True)
            record = {
                "processor_seconds": sum(spent[:4]),
                "slowness": self.slowness,
                "tests": self.tests,
            }
            (RECORDS / f"{self.group}.json").write_text(json.dumps(record))


def work() -> float:
    """Processor time of a fixed piece of work, in seconds."""
    begin, total = time.process_time(), 0
    for i in range(300_000):
        total += i * i % 7
    return time.process_time() - begin


def slowness() -> float:
    """How much longer than nominal this processor takes; at least 1."""
    return max(1.0, min(work() for _ in range(5)) / NOMINAL)


def slowest(records: list[dict], most: int = 20) -> list[str]:
    """A line for each of the tests that took longest on the clock."""
    tests = [(s, name) for record in records for name, s in record["tests"].items()]
    return [f"{s:7.1f} s  {name}" for s, name in sorted(tests, reverse=True)[:most]]


def verdicts(records: dict[str, dict], budgets: dict[str, float]) -> dict[str, str]:
    """For each group what it has spent, and whether that is too much."""
    found = {}
    for group, budget in budgets.items():
        mine = [r for name, r in records.items() if name.split("-")[0] == group]
        # As the nominal processor would have taken.
        spent = sum(r["processor_seconds"] / r["slowness"] for r in mine)
        says = "within" if spent <= budget else "OVER"
        found[group] = f"{group}: {spent:.0f} s of processor time, {says} {budget} s"
    return found


def main() -> int:
    """Print the slowest tests and the budgets; 1 where one is overspent."""
    records = {
        p.stem: json.loads(p.read_text("utf-8")) for p in sorted(RECORDS.glob("*.json"))
    }
    print("The slowest tests:")
    print("\n".join(slowest([*records.values()])))
    lines = verdicts(records, BUDGETS)
    print("\n".join(lines.values()))
    return int(any("OVER" in line for line in lines.values()))


if __name__ == "__main__":
    sys.exit(main())
