"""Speed and memory, naive against efficient, side by side.

Both sides are measured in one run, in turns, so that whatever else the
machine does hits both; the figure is the median. A turn runs its side
once without the clock, so that no side pays for the memory that the
other has just given back, and then for at least 0.3 seconds. Peak memory
is that of fresh processes.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab import ops
from fwlab.feature_maps import l2_normalize
from fwlab.files import check_writable, write_json
from fwlab.ops.delta.naive import delta_step
from fwlab.ops.linear.naive import read
from fwlab.provenance import provenance

BATCH, HEADS, WIDTH = 4, 4, 64
PROCESSES = 3  # for the median of peak memory


def delta_indexing(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The naive loop as it is often written, indexing at every step.

    The gradient of each index is a tensor of zeros as large as the whole
    input: its backward pass is quadratic in time.
    """
    W, y = q.new_zeros(*q.shape[:1], *q.shape[2:3], v.shape[-1], q.shape[-1]), []
    for t in range(q.shape[1]):
        W = delta_step(W, k[:, t], v[:, t], beta[:, t])
        y.append(read(W, q[:, t]))
    return torch.stack(y, dim=1)


def delta_products(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The fastest loop that we found: products in place of einsum.

    Harder to read than naive, and on a CPU nearly twice as fast.
    """
    W, y = q.new_zeros(*q.shape[:1], *q.shape[2:3], v.shape[-1], q.shape[-1]), []
    for q_t, k_t, v_t, beta_t in zip(
        *(x.unbind(1) for x in (q, k, v, beta)), strict=True
    ):
        v_bar = (W * k_t[..., None, :]).sum(-1)
        u_t = beta_t[..., None] * (v_t - v_bar)
        W = W + u_t[..., :, None] * k_t[..., None, :]
        y.append((W * q_t[..., None, :]).sum(-1))
    return torch.stack(y, dim=1)


def _delta(implementation: str) -> Callable[..., Any]:
    return lambda *inputs: ops.delta_rule(*inputs, implementation=implementation)


def _sum(implementation: str) -> Callable[..., Any]:
    return lambda q, k, v, _: ops.sum_rule(
        q, k, v, normalize=False, implementation=implementation
    )


SIDES: dict[str, dict[str, Callable[..., Any]]] = {
    "delta_rule": {
        "indexing loop": delta_indexing,
        "products loop": delta_products,
        "naive": _delta("naive"),
        "efficient": _delta("efficient"),
    },
    "sum_rule": {
        "naive": _sum("naive"),
        "efficient": _sum("efficient"),
    },
}


class Case(NamedTuple):
    """One line of the benchmark: an operation, a length, who takes part."""

    op: str
    time: int
    sides: tuple[str, ...]
    rounds: int


CASES = (
    Case(
        "delta_rule", 1024, ("indexing loop", "products loop", "naive", "efficient"), 7
    ),
    Case("delta_rule", 4096, ("products loop", "naive", "efficient"), 5),
    Case("sum_rule", 1024, ("naive", "efficient"), 7),
    Case("sum_rule", 4096, ("naive", "efficient"), 5),
)


def problem(
    time: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], Tensor]:
    """Seeded inputs `[q, k, v, beta]` with gradients, and a gradient of y.

    Keys and queries have length 1: the recurrence neither grows nor dies.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*width: int) -> Tensor:
        shape = (BATCH, time, HEADS, *width)
        return torch.randn(shape, generator=generator)

    q, k = l2_normalize(random(WIDTH)), l2_normalize(random(WIDTH))
    inputs = [q, k, random(WIDTH), torch.sigmoid(random())]
    return [x.to(dtype).requires_grad_() for x in inputs], random(WIDTH).to(dtype)


def once(side: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    """Forward and backward: the output and every gradient there is."""
    y = side(*inputs)
    gradients = torch.autograd.grad(y, inputs, dy, allow_unused=True)
    return [y.detach(), *(g for g in gradients if g is not None)]


def seconds(case: Case) -> dict[str, list[float]]:
    """Times of forward and backward per side, taken in turns."""
    inputs, dy = problem(case.time)
    times: dict[str, list[float]] = {name: [] for name in case.sides}
    for _ in range(case.rounds):
        for name in case.sides:
            side = SIDES[case.op][name]
            once(side, inputs, dy)
            end = time.perf_counter() + 0.3
            while (start := time.perf_counter()) < end:
                once(side, inputs, dy)
                times[name].append(time.perf_counter() - start)
    return times


def errors(op: str, time: int, sides: tuple[str, ...]) -> dict[str, float]:
    """Largest relative error of outputs and gradients, against float64."""
    exact = once(SIDES[op]["naive"], *problem(time, torch.float64))
    found = {}
    for name in sides:
        pairs = zip(once(SIDES[op][name], *problem(time)), exact, strict=True)
        found[name] = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
    return found


def peak_memory(case: Case, side: str) -> float | None:
    """MiB of resident memory that forward and backward add, at most.

    The median of some fresh processes; None where the system does not
    tell.
    """
    peaks = [_peak_of_one(case, side) for _ in range(PROCESSES)]
    known = [peak for peak in peaks if peak is not None]
    return statistics.median(known) if known else None


def _peak_of_one(case: Case, side: str) -> float | None:
    call = f"from fwlab.bench import _peak; print(_peak({case.op!r}, {case.time}, {side!r}))"
    done = subprocess.run(
        [sys.executable, "-c", call], check=True, capture_output=True, text=True
    )
    peak = done.stdout.split()[-1]
    return None if peak == "None" else float(peak)


def _peak(op: str, time: int, side: str) -> float | None:
    status = Path("/proc/self/status")
    if not status.exists():
        return None

    def mebibytes(field: str) -> float:
        line = next(
            row for row in status.read_text().splitlines() if row.startswith(field)
        )
        return int(line.split()[1]) / 1024

    once(SIDES[op][side], *problem(64))  # loads the libraries
    inputs, dy = problem(time)
    before = mebibytes("VmRSS")
    once(SIDES[op][side], inputs, dy)
    return mebibytes("VmHWM") - before


def run(cases: tuple[Case, ...] = CASES) -> list[dict[str, Any]]:
    """Measure every case; one plain dict per case and side."""
    rows = []
    for case in cases:
        times = seconds(case)
        median = {name: statistics.median(t) for name, t in times.items()}
        wrong = errors(case.op, case.time, case.sides)
        for name in case.sides:
            memory = peak_memory(case, name)
            rows.append(
                {
                    "op": case.op,
                    "time": case.time,
                    "side": name,
                    "milliseconds": round(1e3 * median[name], 2),
                    "fastest": round(1e3 * min(times[name]), 2),
                    "times_slower": round(median[name] / median["efficient"], 1),
                    "peak_mib": memory and round(memory, 1),
                    "error": float(f"{wrong[name]:.1e}"),
                }
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    head = (
        "operation",
        "T",
        "version",
        "ms",
        "fastest",
        "x efficient",
        "MiB",
        "x efficient",
        "error",
    )
    memory = {
        (r["op"], r["time"]): r["peak_mib"] for r in rows if r["side"] == "efficient"
    }
    cells = [head]
    for r in rows:
        least, peak = memory[r["op"], r["time"]], r["peak_mib"]
        cells.append(
            (
                r["op"],
                str(r["time"]),
                r["side"],
                f"{r['milliseconds']:.1f}",
                f"{r['fastest']:.1f}",
                f"{r['times_slower']:.1f}",
                "-" if peak is None else f"{peak:.0f}",
                "-" if peak is None or not least else f"{peak / least:.1f}",
                f"{r['error']:.0e}",
            )
        )
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, 2) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    )


def main(out: Path | None, command: str) -> None:
    """Measure, print, and write JSON if asked."""
    if out is not None:
        check_writable(out.parent)
    source = provenance(command)
    shape = {"batch": BATCH, "heads": HEADS, "key": WIDTH, "value": WIDTH}
    print(
        f"forward + backward, float32, batch {BATCH}, heads {HEADS}, K = V = {WIDTH}; "
        f"torch {source['torch']}, {source['threads']} threads, {source['machine']}\n"
    )
    rows = run()
    print(table(rows))
    if out is not None:
        result = {"shape": shape, "dtype": "float32", "seed": 0, "rows": rows}
        write_json(out, {**result, **source})
        print(f"\n{out}")
