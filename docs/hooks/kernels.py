"""Puts what compiled kernels need in place of `<!-- kernels: CASES -->`.

`CASES` is a regular expression; cases whose name starts with a match are
shown. tests/machine/test_compiled.py writes the numbers, and the tests beside it check
them. results.py draws what a GPU has timed, and its memories.
"""

import json
import re

from repository import ROOT
from templates import render

from fwlab.ops import TABLE
from fwlab.ops.linear.kernels import NARROW

MARK = re.compile(r"<!-- kernels: (.+?) -->")
#: Calls that a GPU has timed, next to others.
PEERS = "gpu-nvidia-h200.json"
#: What kernels are compiled for.
TARGETS = {"90": "Hopper", "80": "Ampere", "75": "Turing"}


def on_page_markdown(markdown, page, config, files):
    return MARK.sub(lambda mark: _table(mark[1]), markdown)


def measured() -> dict:
    """Return times of each operation at its longest, and those of others in ours.

    The longest size is measured first; multiples of our times are those of all sizes.
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


def places() -> dict:
    """Return what the compiler and the card say of the kernel that is drawn."""
    use = _read("kernels.json")["kernels"]["delta 64"]["forward, sm_90"]
    return {"use": use, "chunk": NARROW.C, "card": _read(PEERS)["card"]}


def _read(name: str) -> dict:
    return json.loads((ROOT / "docs" / "results" / name).read_text("utf-8"))


def _table(pattern: str) -> str:
    table = _read("kernels.json")
    known = table["kernels"].items()
    cases = {case: uses for case, uses in known if re.match(pattern, case)}
    compiled = {key.rpartition("_")[2] for uses in cases.values() for key in uses}
    targets = {t: name for t, name in TARGETS.items() if t in compiled}
    return render(
        "kernels.html", versions=table["versions"], targets=targets, cases=cases
    )
