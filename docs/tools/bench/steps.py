"""A training step of every mixer by sequence length, against softmax.

All models have the layers and MLPs of the table of mixers, and all batches
equally many tokens. As for the peers, each mixer counts in the way that
threads wait which is best for it.
"""

import statistics
from functools import partial
from typing import Any

from bench.settings import SETTINGS, fresh
from fwlab.bench import mixers
from fwlab.bench.case import layout
from fwlab.bench.measure import in_turns
from fwlab.models import MIXERS

TIMES = (64, 256, 1024)
ROUNDS = 3
TURN = 0.3  # seconds


def milliseconds(time: int, names: tuple[str, ...] = tuple(MIXERS)) -> dict[str, float]:
    """The median time of a step of each mixer in this process, in turns."""
    steps = {name: mixers.Step(partial(mixers.of, name, time), time) for name in names}
    clock = in_turns(steps, ROUNDS, TURN)
    return {name: round(1e3 * statistics.median(clock[name]), 2) for name in names}


def run() -> list[dict[str, Any]]:
    """For each length and mixer the times by setting, and how many steps of
    softmax one of its steps takes; both sides at their best setting.
    """
    rows = []
    for time in TIMES:
        settings = {
            name: fresh("steps", f"milliseconds({time})", setting)
            for name, setting in SETTINGS.items()
        }
        best = {mixer: min(s[mixer] for s in settings.values()) for mixer in MIXERS}
        rows += [
            {
                "mixer": mixer,
                "T": time,
                "milliseconds": {name: s[mixer] for name, s in settings.items()},
                "softmax_steps": round(best[mixer] / best["softmax"], 2),
            }
            for mixer in MIXERS
        ]
    return rows


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The rows as text, with a header."""
    times = {
        mixer: {row["T"]: row for row in rows if row["mixer"] == mixer}
        for mixer in MIXERS
    }
    cells = [["mixer", *(f"T {time:,}" for time in TIMES)]]
    for mixer, by_time in times.items():
        cells.append([mixer, *(f"{by_time[T]['softmax_steps']:.2f}" for T in TIMES)])
    return cells


def measure() -> dict[str, Any]:
    """Print the table, and return its rows."""
    print("A training step of each mixer, in steps of softmax at this length\n")
    rows = run()
    print(layout(table(rows)))
    return {"steps": rows}
