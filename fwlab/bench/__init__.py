"""Speed and memory, naive against efficient, side by side.

All versions of a case are measured in turns in one process, and the
median is reported. Peak memory is measured in fresh processes.
"""

from pathlib import Path
from typing import Any

import torch

from fwlab.bench import aft, decoding, feedback, fwp, mixers, rules
from fwlab.bench.case import Case, layout, peak_of, run
from fwlab.files import check_writable, write_json
from fwlab.provenance import provenance

CASES: tuple[Case, ...] = (
    *rules.CASES,
    *fwp.CASES,
    *aft.CASES,
    *feedback.CASES,
)


def peak(key: str, side: str) -> float | None:
    """Peak memory of one side, in a process that runs nothing else."""
    return peak_of(next(case for case in CASES if case.key == key), side)


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
                "-" if peak is None else f"{peak:.0f}",
                "-" if peak is None or not base else f"{peak / base:.1f}",
                f"{r['error']:.0e}",
            ]
        )
    return cells


def _case(row: dict[str, Any]) -> str:
    return f"{row['case']} {row['shape']}"


def main(out: Path | None, command: str) -> None:
    """Measure, print, and write JSON to `out` unless that is None."""
    if out is not None:
        check_writable(out.parent)
    source = provenance(command)
    print(
        f"forward + backward, float32; torch {source['torch']}, "
        f"{source['threads']} threads, {source['machine']}\n"
    )
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
    if out is not None:
        result = {"rows": rows, "mixers": models, "decoding": steps}
        write_json(out, {"dtype": "float32", "seed": 0, **result, **source})
        print(f"\n{out}")
