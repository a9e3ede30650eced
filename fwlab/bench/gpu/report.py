"""The results as text tables."""

from typing import Any

from fwlab.bench.gpu.cases import FWLAB
from fwlab.ops.call.compiler import WRONG

Row = dict[str, Any]


def line(
    seconds: float, kind: str, name: str, rows: list[Row], reason: str | None
) -> str:
    """The result of a finished task, in one line."""
    said = "done"
    if kind in ("correctness", "again"):
        said = f"{_right(rows)} correct, maximum error {_worst(rows)}"
    elif kind == "case":
        times = (f"{r['side']} {_ms(r['ms'])} ms" for r in rows if r["ms"] is not None)
        said = ", ".join(times) or "no times"
    elif kind == "rates":
        said = ", ".join(f"{n} {v}" for row in rows for n, v in row.items())
    failed = sum(bool(r.get("reason")) for r in rows)
    if failed:
        said += f"; {failed} failed"
    if reason:
        said += f"; {reason}"
    return f"{seconds:4.0f} s  {name}: {said}"


def correctness(result: Row) -> list[list[str]]:
    """One line per operation and precision."""
    cells = [["operation", "dtype", "correct", "maximum error", "limit", "efficient"]]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in result["correctness"]:
        groups.setdefault((row["op"], row["dtype"]), []).append(row)
    for (op, dtype), rows in groups.items():
        others = [r["efficient"] for r in rows if r["efficient"] is not None]
        cells.append(
            [
                op,
                dtype,
                _right(rows),
                _worst(rows),
                f"{rows[0]['limit']:.0e}",
                f"{max(others):.1e}" if others else "-",
            ]
        )
    return cells


def failures(result: Row) -> list[str]:
    """A sentence for each wrong, refused, failed or missing result."""
    found = [
        f"wrong: {_named(r['op'], r['note'], r['dtype'])}, {_shape(r)}: {_why(r)}"
        for r in result["correctness"]
        if not r["ok"] and not r["refused"]
    ]
    found += [
        f"refused: {_named(r['op'], r['note'], r['dtype'])}, {_shape(r)}: {r['refused']}"
        for r in result["correctness"]
        if r["refused"]
    ]
    found += [
        f"failed: {r['case']}, {r['side']}: {r['reason']}"
        for r in result["rows"]
        if r["reason"]
    ]
    found += [
        f"{r['case']}, {r['side']}: {r['note']}" for r in result["rows"] if r["note"]
    ]
    return found + [
        f"not run: {gap['task']}: {gap['reason']}" for gap in result["not_run"]
    ]


def _named(*words: str) -> str:
    return " ".join(filter(None, words))


def _right(rows: list[Row]) -> str:
    """How many rows are correct; those that were refused do not count."""
    refused = sum(bool(r["refused"]) for r in rows)
    said = f"{sum(r['ok'] for r in rows)} of {len(rows) - refused}"
    return said + (f" ({refused} refused)" if refused else "")


def _why(row: Row) -> str:
    beyond = {n: e for n, e in row["errors"].items() if e is None or e > row["limit"]}
    said = row["reason"] or ", ".join(f"{n} {e:.1e}" for n, e in beyond.items())
    if again := row["again"]:
        verdict = "right" if again["ok"] else "wrong too"
        known = f" ({WRONG})" if again["known_wrong"] else ""
        said += f"; with ptxas {again['ptxas']}{known} it is {verdict}"
    return said


def _worst(rows: list[Row]) -> str:
    errors = [e for row in rows for e in row["errors"].values() if e is not None]
    return f"{max(errors):.1e}" if errors else "-"


def rows(result: Row) -> list[list[str]]:
    """One line per side: times, ratios to fwlab, memory, error."""
    head = ["operation", "shape", "side", "ms", "fastest", "back to back", "forward"]
    cells = [[*head, "x fwlab", "x floor", "MiB", "error"]]
    ours = {r["case"]: r for r in result["rows"] if r["side"] == FWLAB}
    for r in result["rows"]:
        first = [r["op"], _shape(r), r["side"]]
        if r["T"] != r["shape"]["T"]:
            first[2] += f" (T = {r['T']})"
        if r["reason"]:
            cells.append([*first, "failed", *["-"] * 7])
            continue
        own, floor = ours.get(r["case"]), result["floors"].get(r["case"])
        ratio = own["ms"] if own and own["ms"] and own["T"] == r["T"] else None
        cells.append(
            [
                *first,
                _ms(r["ms"]),
                _ms(r["fastest"]),
                _ms(r["wall_ms"]),
                _ms(r["forward_ms"]),
                f"{r['ms'] / ratio:.2f}" if ratio else "-",
                f"{r['ms'] / floor:.1f}"
                if floor and r["T"] == r["shape"]["T"]
                else "-",
                "-" if r["peak_mib"] is None else f"{r['peak_mib']:.0f}",
                "-" if r["error"] is None else f"{r['error']:.0e}",
            ]
        )
    return cells


def targets(result: Row) -> list[list[str]]:
    """One line per target."""
    cells = [["target", "must", "aim", "measured", "verdict"]]
    for t in result["targets"]:
        sign = "<= " if t["at_most"] else ">= "
        cells.append(
            [
                t["name"],
                "-" if t["must"] is None else f"{sign}{t['must']:g}",
                "-" if t["aim"] is None else f"{sign}{t['aim']:g}",
                "-" if t["measured"] is None else f"{t['measured']:g}",
                t["verdict"],
            ]
        )
    return cells


def _shape(row: Row) -> str:
    return ", ".join(f"{name} {size}" for name, size in row["shape"].items())


def _ms(ms: float) -> str:
    return f"{ms:.3f}" if ms < 10 else f"{ms:.1f}"
