"""Find where one measured line crosses another, and say it in words."""

import math
from collections.abc import Mapping
from typing import Any

FWLAB, DENSE, SOFTMAX, NANOGPT = "fwlab", "dense", "softmax_attention", "nanoGPT"


def crossing(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float | None:
    """Return the length from which on `ours` stays faster.

    - `ours`, `theirs`: milliseconds by length. Between two lengths that both have, the
      logarithm of their ratio is a straight line.
    - Returns the smallest length if `ours` is faster everywhere; None if it is slower at
      the greatest.
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


def times_by_form(
    rows: list[dict[str, Any]], axis: str
) -> dict[str, dict[str, dict[int, float]]]:
    """Return milliseconds by operation, form, and "T" or "batch"."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        if row["milliseconds"] is not None:
            forms = found.setdefault(row["op"], {})
            forms.setdefault(row["form"], {})[row[axis]] = row["milliseconds"]
    return found


def by_operation(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return where each operation overtakes its dense form and softmax attention.

    - `rows`: by length.
    - Returns a dict per operation: "op", and for "dense" and "softmax" a dict with "at"
      (see `crossing`) and the "first" and "last" length that was compared; None without
      a dense form.
    """
    by_op = times_by_form(rows, "T")
    softmax = by_op.pop(SOFTMAX)[FWLAB]
    found = []
    for op, forms in by_op.items():
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


def times_by_model(rows: list[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return microseconds per token, by model and context."""
    times: dict[str, dict[int, float]] = {}
    for row in rows:
        times.setdefault(row["model"], {})[row["context"]] = row["microseconds"]
    return times


def by_model(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the context from which on a model is faster than nanoGPT's."""
    times = times_by_model(rows)
    theirs = times.pop(NANOGPT)
    return {name: crossing(ours, theirs) for name, ours in times.items()}


def in_words(at: float | None, first: int, last: int, length: str = "length") -> str:
    """Write a crossing in words; `length` says what is crossed at."""
    name = "T = " if length == "length" else ""
    if at is None:
        return f"not up to {name}{last:,}"
    if at == first:
        return f"at every {length} from {name}{at:,.0f}"
    return f"from {name}{rounded(at)}"


def operation_in_words(compared: dict[str, Any] | None) -> str:
    """Write where an operation overtakes another form."""
    return "no dense form" if compared is None else in_words(**compared)


def rounded(length: float) -> str:
    """Write a length that was not measured, to two digits."""
    return f"{float(f'{length:.2g}'):,.0f}"
