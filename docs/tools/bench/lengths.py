"""Time and memory by sequence length and by batch.

Next to each operation are its dense form, which computes a matrix of all
pairs of steps, and softmax attention. Both are quadratic in time: from
some length on, an operation that is linear in time is faster.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from fwlab import ops
from fwlab.bench import aft, rules
from fwlab.bench.case import Problem, Side, layout, once
from fwlab.bench.measure import in_turns, peak_mib

HEADS, WIDTH = rules.HEADS, aft.WIDTH // rules.HEADS
#: By length at this batch, and by batch at this length.
BATCH, TIME = 4, 512
LENGTHS = tuple(2**n for n in range(4, 14))
BATCHES = (1, 2, 4, 8, 16, 32)
ROUNDS = 3
TURN = 0.1  # seconds
#: A form that needs more memory is left out.
LIMIT = 2048  # MiB
FWLAB, DENSE, SOFTMAX = "fwlab", "dense", "softmax_attention"


class Form(NamedTuple):
    """A way to compute an operation.

    - `op`: its name in `fwlab.ops`.
    - `form`: `FWLAB` or `DENSE`.
    - `side`: a function of the inputs.
    - `bias`: the columns of the AFT bias at a length; None = no AFT.
    """

    op: str
    form: str
    side: Side
    bias: str | None = None

    def problem(self, batch: int, time: int) -> Problem:
        """Seeded inputs of that size in float32."""
        if self.bias is not None:
            widths = {"none": (), "all": (time, time), "window": (time, aft.WINDOW)}
            return aft.problem(
                torch.float32, time=time, bias=widths[self.bias], batch=batch
            )
        # Softmax attention has no gates.
        op = rules.RULES.get(self.op, ops.sum_rule)
        return rules.problem(torch.float32, op=op, time=time, width=WIDTH, batch=batch)


def _forms() -> Iterable[Form]:
    for name, op in rules.RULES.items():
        yield Form(name, FWLAB, rules.without_mean(op))
        if name in rules.DENSE:
            yield Form(name, DENSE, rules.DENSE[name])
    for name, dense, bias in (
        ("aft_simple", aft.simple_dense, "none"),
        ("aft_full", aft.full_dense, "all"),
        ("aft_local", aft.local_dense, "window"),
    ):
        yield Form(name, FWLAB, getattr(ops, name), bias)
        yield Form(name, DENSE, dense, bias)
    yield Form(SOFTMAX, FWLAB, getattr(ops, SOFTMAX))


FORMS = tuple(_forms())


def sweep(sizes: Iterable[tuple[int, int]]) -> list[dict[str, Any]]:
    """Forward and backward of every form, by (batch, time), smallest first.

    - Returns a plain dict per form and size. What would need more than
      `LIMIT` has no time, but a reason.
    """
    rows: list[dict[str, Any]] = []
    before: dict[str, tuple[float, int, int]] = {}  # peak, batch, time
    for batch, time in sizes:
        calls, found = {}, {}
        for form in FORMS:
            key = f"{form.op} {form.form}"
            row = {"op": form.op, "form": form.form, "batch": batch, "T": time}
            rows.append(row | {"milliseconds": None, "peak_mib": None, "reason": None})
            # Memory grows with the square of the length, at most.
            peak, last_batch, last_time = before.get(key, (0.0, batch, time))
            needs = peak * batch / last_batch * (time / last_time) ** 2
            if needs > LIMIT:
                rows[-1]["reason"] = f"would need up to {needs / 1024:.1f} GiB"
                continue
            calls[key] = partial(once, form.side, *form.problem(batch, time))
            found[key] = rows[-1]
            rows[-1]["peak_mib"] = peak_mib(calls[key])
            before[key] = rows[-1]["peak_mib"], batch, time
        for key, times in in_turns(calls, ROUNDS, TURN).items():
            found[key]["milliseconds"] = round(1e3 * statistics.median(times), 3)
    return rows


def times(rows: list[dict[str, Any]], axis: str) -> dict[str, dict[str, dict]]:
    """Milliseconds per operation and form, by "T" or "batch"."""
    found: dict[str, dict[str, dict]] = {}
    for row in rows:
        if row["milliseconds"] is not None:
            forms = found.setdefault(row["op"], {})
            forms.setdefault(row["form"], {})[row[axis]] = row["milliseconds"]
    return found


def crossing(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float | None:
    """The length from which on `ours` stays faster.

    - `ours`, `theirs`: milliseconds by length. Between two lengths that
      both have, the logarithm of their ratio is a straight line.
    - Returns the smallest length if `ours` is faster everywhere; None if
      it is slower at the greatest.
    """
    both = sorted(ours.keys() & theirs.keys())
    ratios = {length: math.log(ours[length] / theirs[length]) for length in both}
    slower = [length for length in both if ratios[length] > 0]
    if not slower:
        return float(both[0])
    if slower[-1] == both[-1]:
        return None
    a, b = slower[-1], both[both.index(slower[-1]) + 1]
    part = ratios[a] / (ratios[a] - ratios[b])
    return a * (b / a) ** part


def crossings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where each operation overtakes its dense form and softmax attention.

    - `rows`: by length.
    - Returns a dict per operation: "op", and for "dense" and "softmax" a
      dict with "at" (see `crossing`) and the "first" and "last" length
      that was compared; None without a dense form.
    """
    by_op = times(rows, "T")
    softmax = by_op[SOFTMAX][FWLAB]
    found = []
    for op, forms in by_op.items():
        if op == SOFTMAX:
            continue
        line: dict[str, Any] = {"op": op}
        for name, theirs in (("dense", forms.get(DENSE)), ("softmax", softmax)):
            ours = forms[FWLAB]
            line[name] = theirs and {
                "at": crossing(ours, theirs),
                "first": min(ours.keys() & theirs.keys()),
                "last": max(ours.keys() & theirs.keys()),
            }
        found.append(line)
    return found


def said(compared: dict[str, Any] | None) -> str:
    """One crossing in words."""
    if compared is None:
        return "no dense form"
    at = compared["at"]
    if at is None:
        return f"not up to T = {compared['last']:,}"
    if at == compared["first"]:
        return f"at every length from T = {at:,.0f}"
    return f"from T = {rounded(at)}"


def rounded(length: float) -> str:
    """A length that was not measured, to two digits."""
    return f"{float(f'{length:.2g}'):,.0f}"


def table(rows: list[dict[str, Any]], axis: str) -> list[list[str]]:
    """Milliseconds of every form as text, with a header."""
    sizes = sorted({row[axis] for row in rows})
    cells = [["operation", "form", *(f"{axis} {size:,}" for size in sizes)]]
    for op, forms in times(rows, axis).items():
        for form, by_size in forms.items():
            shown = (by_size.get(size) for size in sizes)
            cells.append([op, form, *("-" if t is None else f"{t:.2f}" for t in shown)])
    return cells


def measure() -> dict[str, Any]:
    """Print the tables, and return their rows."""
    print(
        f"milliseconds of forward + backward, {HEADS} heads of width {WIDTH} "
        f"(AFT: width {aft.WIDTH}, window {aft.WINDOW}); batch {BATCH}\n"
    )
    lengths = sweep((BATCH, time) for time in LENGTHS)
    print(layout(table(lengths, "T"), left=2))
    print("\nfaster than the dense form, and than softmax attention\n")
    lines = [
        [line["op"], said(line["dense"]), said(line["softmax"])]
        for line in crossings(lengths)
    ]
    print(layout(lines, left=3))
    print(f"\nby batch, at T = {TIME}\n")
    batches = sweep((batch, TIME) for batch in BATCHES)
    print(layout(table(batches, "batch"), left=2))
    return {
        "heads": HEADS,
        "width": WIDTH,
        "window": aft.WINDOW,
        "lengths": lengths,
        "batches": batches,
    }
