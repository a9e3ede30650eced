"""Naive against efficient, training steps, and decoding.

All versions of a case are measured in turns in one process, and the
median is reported.
"""

from typing import Any

import torch

from fwlab.bench import aft, decoding, feedback, fwp, mixers, rules
from fwlab.bench.case import Case, layout, run

CASES: tuple[Case, ...] = (
    *rules.CASES,
    *fwp.CASES,
    *aft.CASES,
    *feedback.CASES,
)


def table(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The rows of all cases as text, with a header."""
    head = ["operation", "shape", "version", "ms", "fastest", "x efficient"]
    cells = [[*head, "MiB", "x efficient", "error"]]
    efficient = {_case(r): r["peak_mib"] for r in rows if r["side"] == "efficient"}
    for r in rows:
        base, peak = efficient[_case(r)], r["peak_mib"]
        cells.append(
            [
                r["case"],
                ", ".join(f"{name} {size}" for name, size in r["shape"].items()),
                r["side"],
                f"{r['milliseconds']:.1f}",
                f"{r['fastest']:.1f}",
                f"{r['times_slower']:.1f}",
                f"{peak:.1f}",
                f"{peak / base:.1f}",
                f"{r['error']:.0e}",
            ]
        )
    return cells


def _case(row: dict[str, Any]) -> str:
    return f"{row['case']} {row['shape']}"


def measure() -> dict[str, Any]:
    """Print every table, and return their rows."""
    print("Forward and backward\n")
    rows = [row for case in CASES for row in run(case)]
    print(layout(table(rows), left=3))
    print(
        f"\nA training step of a language model: {mixers.LAYERS} layers, "
        f"{mixers.HEADS} heads, width {mixers.D_MODEL}, windows of {mixers.BLOCK}, "
        f"batch {mixers.BATCH}\n"
    )
    models = mixers.run()
    print(layout(mixers.table(models)))
    print(
        f"\nOne step of a layer at a position in a text; batch {decoding.BATCH}, "
        f"width {decoding.D_MODEL}, {decoding.HEADS} heads, 1 thread\n"
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    steps = decoding.run()
    torch.set_num_threads(threads)
    print(layout(decoding.table(steps)))
    return {"rows": rows, "mixers": models, "decoding": steps}
