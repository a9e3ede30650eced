"""Puts what compiled kernels need in place of `<!-- kernels: CASES -->`.

`CASES` is a regular expression; cases whose name starts with a match are
shown. Tables of the cycle model go in place of `<!-- model: TABLE -->`.
tests/machine/cycles/table.py writes the numbers, and the tests beside it check
them.

In place of `<!-- emulator -->` comes what the emulator has shown, which
tests/machine/emulate.py writes and tests/machine/emulator checks.
"""

import json
import re

from repository import ROOT
from templates import render

MARK = re.compile(r"<!-- kernels: (.+?) -->")
MODEL = re.compile(r"<!-- model: (\w+) -->")
EMULATOR = re.compile(r"<!-- emulator -->")
#: What a GPU has timed of the modelled calls: tests/machine/cycles/measured.py.
MEASURED = "model-nvidia-h200.json"
#: Forms that a GPU has timed (tests/machine/cycles/forms.py), and what of a form
#: each kernel depends on.
FORMS = "forms-nvidia-h200.json"
WALKING = ("forward", "backward_state")
WALK, CHUNK = ("C", "BV", "warps", "stages"), ("C", "BK", "AV", "chunk_warps")
#: Bytes of HBM in a microsecond, as the model has it.
BANDWIDTH = 3.0e6
TARGETS = {"90": "Hopper", "80": "Ampere", "75": "Turing"}


def on_page_markdown(markdown, page, config, files):
    markdown = MODEL.sub(lambda mark: _model(mark[1], _read("kernels.json")), markdown)
    markdown = MARK.sub(lambda mark: _table(mark[1]), markdown)
    return EMULATOR.sub(lambda mark: _emulated(), markdown)


def _read(name: str) -> dict:
    return json.loads((ROOT / "docs" / "results" / name).read_text("utf-8"))


def _model(what: str, table: dict) -> str:
    return render(
        "model.html",
        what=what,
        **table,
        ranges=_ranges(table),
        compared=_fastest(table),
        measured=_measured(),
        forms=_forms(),
        short=_short(),
    )


def _measured() -> dict:
    """The calls that a GPU has timed; by case, each kernel as modelled and measured."""
    run = _read(MEASURED)
    rows = {}
    for case, times in run["triton"].items():
        kernels = {
            name: (times["stack"][name], us, times["kernels"][name])
            for name, us in times["modelled"].items()
        }
        _, *whole = map(sum, zip(*kernels.values(), strict=True))
        rows[case] = {**times, "kernels": {**kernels, "all of them": (None, *whole)}}
    return {**run, "rows": rows, "file": MEASURED}


def _forms() -> dict:
    """By case, the kernels whose form a GPU has changed: both forms and times.

    The last row of a case is the sum of all its kernels.
    """
    run = _read(FORMS)
    cases = {}
    for chosen in run["chosen"]:
        case, form = (chosen["case"], chosen["width"]), chosen["form"]
        same = [
            row
            for row in run["forms"]
            if (row["case"], row["width"]) == case and "microseconds" in row
        ]
        before, rows = same[0], {}
        for kernel, us in before["microseconds"].items():
            names = CHUNK if kernel == "backward_inputs" else WALK
            if kernel not in (*WALKING, "backward_inputs"):
                names = ("C",)
            now = next(
                row["microseconds"][kernel]
                for row in same
                if all(row["form"][name] == form[name] for name in names)
            )
            was, new = (
                ", ".join(f"{name} {x[name]}" for name in names if x[name] != y[name])
                for x, y in ((before["form"], form), (form, before["form"]))
            )
            rows[kernel] = (was, new, us, now)
        if any(was for was, *_ in rows.values()):
            whole = [sum(row[at] for row in rows.values()) for at in (2, 3)]
            changed = {name: row for name, row in rows.items() if row[0]}
            cases[f"{case[0]} {case[1]}"] = {
                **changed,
                "all of them": ("", "", *whole),
            }
    return {**run, "cases": cases, "file": FORMS}


def _short() -> dict:
    """Step by step and in chunks, at the lengths that the table shows."""
    run = _read(FORMS)
    rows = [row for row in run["short"] if row["T"] in (16, 64)]
    return {**run, "rows": rows, "file": FORMS}


def _ranges(table: dict) -> dict[str, tuple[float, float]]:
    """By case, fla's time over ours by whatever may decide it: the least, the most.

    That is the instructions alone, the bytes alone, the longer of the two for
    each launch (the model), or one after the other.
    """
    ranges = {}
    for case, theirs in table["fla"]["cases"].items():
        ours = table["modelled"][case]
        ratios = [
            theirs[how] / ours[how] for how in ("computing", "bytes", "microseconds")
        ]
        apart = [run["computing"] + run["bytes"] / BANDWIDTH for run in (theirs, ours)]
        ratios.append(apart[0] / apart[1])
        ranges[case] = min(ratios), max(ratios)
    return ranges


def _fastest(table: dict) -> dict[str, list[float | None]]:
    """Forward, backward and both in multiples of fla's time: measured ones of the
    time measured there, also ours; ours by the model of the time modelled here.
    """
    case, measured = (table["fastest"][name] for name in ("case", "milliseconds"))
    first = next(iter(measured.values()))
    compared = {name: _shares(times, first) for name, times in measured.items()}
    rows, theirs = table["modelled"][case]["rows"], table["fla"]["cases"][case]
    ours = [0.0, 0.0]
    for row in rows:
        ours[row["kernel"].startswith("backward")] += row["microseconds"]
    at = theirs["forward"]
    modelled = [
        sum(row["microseconds"] for row in part)
        for part in (theirs["rows"][:at], theirs["rows"][at:])
    ]
    timed = _read(MEASURED)["triton"][case]
    times = [timed["forward"], timed["both"] - timed["forward"]]
    return compared | {
        "fwlab, modelled": _shares(ours, modelled),
        "fwlab, measured here": _shares(times, first),
    }


def _shares(times: list, whole: list[float]) -> list[float | None]:
    """Each time, and their sum, in multiples of those of the whole; None = unknown."""
    shares = [time and time / part for time, part in zip(times, whole, strict=True)]
    return [*shares, None if None in times else sum(times) / sum(whole)]


def _emulated() -> str:
    """Worst errors by operation, and deleted barriers by form."""
    table = _read("emulator.json")
    errors: dict[str, dict[str, float]] = {}
    for row in table["cases"]:
        worst = errors.setdefault(row["op"], dict.fromkeys(table["limits"], 0.0))
        worst[row["dtype"]] = max(worst[row["dtype"]], row["error"])
    barriers: dict[str, dict[str, list[int]]] = {}
    for case, kernels in table["barriers"].items():
        form, target = case.split(", sm_")
        counts = [c for row in kernels.values() for c in row["deleted"].values()]
        barriers.setdefault(form, {})[target] = [
            sum(c) for c in zip(*counts, strict=True)
        ]
    return render("emulator.html", **table, errors=errors, forms=barriers)


def _table(pattern: str) -> str:
    table = _read("kernels.json")
    cases: dict[str, dict[str, dict[str, dict]]] = {}
    for case, uses in table["kernels"].items():
        if re.match(pattern, case):
            kernels = cases[case] = {}
            for key, use in uses.items():
                kernel, target = key.split(", sm_")
                kernels.setdefault(kernel, {})[target] = use
    compiled = {
        t for kernels in cases.values() for use in kernels.values() for t in use
    }
    targets = {t: name for t, name in TARGETS.items() if t in compiled}
    return render(
        "kernels.html", versions=table["versions"], targets=targets, cases=cases
    )
