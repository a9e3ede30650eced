"""Time to import fwlab, and to answer `fwlab --help`.

Each import is a fresh process. The time is the processor time of the
process, the minimum of several rounds in turns: other load on the
machine makes a process wait, but hardly changes this number.
"""

import os
import subprocess
import sys
import time
from typing import Any

from fwlab.bench.case import layout

#: name -> arguments of the interpreter.
SIDES: dict[str, tuple[str, ...]] = {
    "torch": ("-c", "import torch"),
    "torch, numpy, matplotlib": ("-c", "import torch, numpy, matplotlib"),
    "fwlab": ("-c", "import fwlab"),
    "fwlab.models": ("-c", "import fwlab.models"),
    "fwlab --help": ("-m", "fwlab", "--help"),
}
ROUNDS = 5


def seconds(*arguments: str) -> tuple[float, float]:
    """Processor time and elapsed time of one process."""
    start, before = time.perf_counter(), os.times()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = os.times()
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    return used, time.perf_counter() - start


def run(rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """The minimum of several rounds, and its ratio to `import torch`."""
    best = {name: (float("inf"), float("inf")) for name in SIDES}
    for _ in range(rounds):
        for name, arguments in SIDES.items():
            found = seconds(*arguments)
            best[name] = (min(best[name][0], found[0]), min(best[name][1], found[1]))
    base = best["torch"][0]
    return [
        {
            "import": name,
            "processor_seconds": round(used, 2),
            "elapsed_seconds": round(elapsed, 2),
            "times_torch": round(used / base, 2),
        }
        for name, (used, elapsed) in best.items()
    ]


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The rows as text, with a header."""
    return [
        ["import", "processor s", "elapsed s", "x torch"],
        *(
            [
                r["import"],
                f"{r['processor_seconds']:.2f}",
                f"{r['elapsed_seconds']:.2f}",
                f"{r['times_torch']:.2f}",
            ]
            for r in rows
        ),
    ]


def measure() -> dict[str, Any]:
    """Print the table, and return its rows."""
    print(f"Imports, each in a fresh process; minimum of {ROUNDS}\n")
    rows = run()
    print(layout(table(rows)))
    return {"imports": rows}
