"""Puts what compiled kernels need in place of `<!-- kernels: CASES -->`.

`CASES` is a regular expression; cases whose name starts with a match are
shown. tests/machine/test_compiled.py writes the numbers, and the tests beside it check
them. What a GPU has timed goes in place of `<!-- timed: TABLE -->`, and pictures of it
and of the memories of a GPU in place of `<!-- drawn: PICTURE -->`.
"""

import json
import re

from repository import ROOT
from templates import render

from fwlab.ops import TABLE
from fwlab.ops.linear.kernels import NARROW

MARK = re.compile(r"<!-- kernels: (.+?) -->")
TIMED = re.compile(r"<!-- timed: (\w+) -->")
#: Calls that a GPU has timed, next to others.
PEERS = "gpu-nvidia-h200.json"
#: Calls whose kernels a GPU has timed.
MEASURED = "model-nvidia-h200.json"
#: Forms that a GPU has timed, and what of a form each kernel depends on.
FORMS = "forms-nvidia-h200.json"
WALK = ("C", "BV", "warps", "stages")
PARTS = {"forward": WALK, "backward_state": WALK}
PARTS["backward_inputs"] = ("C", "BK", "AV", "chunk_warps")
TARGETS = {"90": "Hopper", "80": "Ampere", "75": "Turing"}


def on_page_markdown(markdown, page, config, files):
    markdown = TIMED.sub(lambda mark: _timed(mark[1]), markdown)
    return MARK.sub(lambda mark: _table(mark[1]), markdown)


def on_page_content(html, page, config, files):
    """Not in the Markdown: converting it would change a drawing."""
    html = html.replace("<!-- drawn: places -->", render("places.html", **_places()))
    return html.replace("<!-- drawn: peers -->", render("peers.html", **_peers()))


def _peers() -> dict:
    """The times of each operation at its longest, which is measured first, and the
    times of others as multiples of ours at all sizes.
    """
    run, rows, ratios = _read(PEERS), {}, {"fla": [], "efficient": []}
    for row in run["rows"]:
        if row["op"] not in TABLE:
            continue  # one that has ended
        if row["side"] == "triton":
            case, ours = row["case"], row["ms"]
        else:
            ratios[row["side"]].append(row["ms"] / ours)
        first, times = rows.setdefault(row["op"], (row, {}))
        if case == first["case"]:
            times[row["side"]] = row["ms"]
    return {"run": run, "rows": rows, "ratios": ratios}


def _places() -> dict:
    """What the compiler and the card say of the kernel that is drawn."""
    use = _read("kernels.json")["kernels"]["delta 64"]["forward, sm_90"]
    return {"use": use, "chunk": NARROW.C, "card": _read(PEERS)["card"]}


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
    run, cases = _read(FORMS), {}
    for chosen in run["chosen"]:
        case, form = (chosen["case"], chosen["width"]), chosen["form"]
        same = [
            (row["form"], row["microseconds"])
            for row in run["forms"]
            if (row["case"], row["width"]) == case and "microseconds" in row
        ]
        (old, times), rows = same[0], {}
        for kernel, us in times.items():
            names = PARTS.get(kernel, ("C",))
            now = next(
                t[kernel] for x, t in same if all(x[n] == form[n] for n in names)
            )
            other = [name for name in names if old[name] != form[name]]
            was, new = (", ".join(f"{n} {x[n]}" for n in other) for x in (old, form))
            rows[kernel] = (was, new, us, now)
        if any(was for was, *_ in rows.values()):
            whole = [sum(row[at] for row in rows.values()) for at in (2, 3)]
            rows = {name: row for name, row in rows.items() if row[0]}
            cases[f"{case[0]} {case[1]}"] = {**rows, "all of them": ("", "", *whole)}
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
