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
TARGETS = {"90": "Hopper", "80": "Ampere", "75": "Turing"}


def on_page_markdown(markdown, page, config, files):
    markdown = MODEL.sub(
        lambda mark: render("model.html", what=mark[1], **_read("kernels.json")),
        markdown,
    )
    markdown = MARK.sub(lambda mark: _table(mark[1]), markdown)
    return EMULATOR.sub(lambda mark: _emulated(), markdown)


def _read(name: str) -> dict:
    return json.loads((ROOT / "docs" / "results" / name).read_text("utf-8"))


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
