"""A training step while another program keeps a core busy.

PyTorch divides each of its many small operations among all threads, and
each time all wait for the last one. How they wait decides what happens if
one of them has no core for the moment.
"""

import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from fwlab.bench import mixers
from fwlab.bench.case import layout

MIXERS = ("softmax", "sum", "delta")
#: How to run it: environment variables.
SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    "spinning threads": {"OMP_WAIT_POLICY": "ACTIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
SECONDS = 3.0


def milliseconds(mixer: str, seconds: float) -> float:
    """The median time of a training step at nanoGPT's CPU size."""
    step = mixers.Step(partial(mixers.of, mixer))
    step()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return round(1e3 * statistics.median(times), 1)


def run() -> list[dict[str, Any]]:
    """Times on a quiet machine and beside one busy core, by setting.

    Each is measured in a process of its own: PyTorch reads the variables
    only when it is loaded.
    """
    rows: list[dict[str, Any]] = [
        {"mixer": mixer, "setting": setting} for mixer in MIXERS for setting in SETTINGS
    ]
    for row in rows:
        row["quiet"] = _fresh(row["mixer"], row["setting"])
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        for row in rows:
            row["busy"] = _fresh(row["mixer"], row["setting"])
    finally:
        busy.kill()
        busy.wait()
    return rows


def _fresh(mixer: str, setting: str) -> float:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
    call = f"busy.milliseconds({mixer!r}, {SECONDS})"
    code = f"from bench import busy; print({call})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | SETTINGS[setting],
        check=True,
        capture_output=True,
        text=True,
    )
    return float(done.stdout.split()[-1])


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The rows as text, with a header."""
    return [
        ["mixer", "setting", "quiet ms", "beside a busy core ms"],
        *(
            [r["mixer"], r["setting"], f"{r['quiet']:.1f}", f"{r['busy']:.1f}"]
            for r in rows
        ),
    ]


def measure() -> dict[str, Any]:
    """Print the table, and return its rows."""
    print("A training step on a quiet machine, and beside one busy core\n")
    rows = run()
    print(layout(table(rows), left=2))
    return {"busy": rows}
