"""Puts what compiled kernels need in place of `<!-- kernels: CASES -->`.

`CASES` is a regular expression; cases whose name starts with a match are
shown. tests/machine/test_compiled.py writes the numbers, and the tests beside it check
them. What a GPU has timed goes in place of `<!-- timed: TABLE -->`.
"""

import json
import re

from repository import ROOT
from templates import render

MARK = re.compile(r"<!-- kernels: (.+?) -->")
TIMED = re.compile(r"<!-- timed: (\w+) -->")
#: Calls whose kernels a GPU has timed.
MEASURED = "model-nvidia-h200.json"
#: Forms that a GPU has timed, and what of a form each kernel depends on.
FORMS = "forms-nvidia-h200.json"
WALKING = ("forward", "backward_state")
WALK, CHUNK = ("C", "BV", "warps", "stages"), ("C", "BK", "AV", "chunk_warps")
TARGETS = {"90": "Hopper", "80": "Ampere", "75": "Turing"}


def on_page_markdown(markdown, page, config, files):
    markdown = TIMED.sub(lambda mark: _timed(mark[1]), markdown)
    return MARK.sub(lambda mark: _table(mark[1]), markdown)


def _read(name: str) -> dict:
    return json.loads((ROOT / "docs" / "results" / name).read_text("utf-8"))


def _timed(what: str) -> str:
    tables = {"measured": _measured, "forms": _forms}
    return render("timed.html", what=what, **tables[what]())


def _measured() -> dict:
    """The calls that a GPU has timed: by case, what each kernel spills, and its time."""
    run = _read(MEASURED)
    rows = {}
    for case, times in run["triton"].items():
        stack, us = times["stack"], times["kernels"]
        kernels = {name: (stack[name], us[name]) for name in stack}
        whole = (None, sum(us for _, us in kernels.values()))
        rows[case] = {**times, "kernels": {**kernels, "all of them": whole}}
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
