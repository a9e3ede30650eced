"""Puts what compiled kernels need in place of `<!-- kernels: CASES -->`.

`CASES` is a regular expression; cases whose name starts with a match are
shown. tests/aot.py writes the numbers, and tests/test_gpu.py checks them.
"""

import json
import re

from repository import ROOT
from templates import render

MARK = re.compile(r"<!-- kernels: (.+?) -->")
TARGETS = {"90": "Hopper", "80": "Ampere", "75": "Turing"}


def on_page_markdown(markdown, page, config, files):
    return MARK.sub(lambda mark: _table(mark[1]), markdown)


def _table(pattern: str) -> str:
    file = ROOT / "docs" / "results" / "kernels.json"
    table = json.loads(file.read_text("utf-8"))
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
    return render("kernels.html", triton=table["triton"], targets=targets, cases=cases)
