"""Naive against efficient, training steps, and decoding.

All versions of a case are measured in turns in one process, and the
median is reported.
"""

from typing import Any

import torch

from fwlab.bench import aft, decoding, feedback, fwp, mixers, rules
from fwlab.bench.case import Case, bar, printed, run, shape_text
from fwlab.models import MIXERS

#: The quick ones first, so that rows come soon.
CASES: tuple[Case, ...] = (
    *aft.CASES,
    *fwp.CASES,
    *rules.CASES,
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
                shape_text(r["shape"]),
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
    """Print every row when it is measured, and return all of them."""
    print("Forward and backward\n", flush=True)
    widths = [
        max(len(case.name) for case in CASES),
        max(len(shape_text(case.shape)) for case in CASES),
        max(len(side) for case in CASES for side in case.sides),
        *[7] * 4,
    ]
    rows = printed(map(run, bar(CASES)), table, widths, left=3)
    print(
        f"\nA training step of a language model: {mixers.LAYERS} layers, "
        f"{mixers.HEADS} heads, width {mixers.D_MODEL}, windows of {mixers.BLOCK}, "
        f"batch {mixers.BATCH}. All are measured in turns, so the first row takes "
        "about a minute.\n",
        flush=True,
    )
    widths = [max(map(len, MIXERS)), *[9] * 6]
    models = printed(([row] for row in mixers.run()), mixers.table, widths)
    print(
        f"\nOne step of a layer at a position in a text; batch {decoding.BATCH}, "
        f"width {decoding.D_MODEL}, {decoding.HEADS} heads, 1 thread\n",
        flush=True,
    )
    widths = [max(map(len, decoding.makers(1))), *[9] * 3]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    steps = printed(([row] for row in decoding.run()), decoding.table, widths)
    torch.set_num_threads(threads)
    return {"rows": rows, "mixers": models, "decoding": steps}
