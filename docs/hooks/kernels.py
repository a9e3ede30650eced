"""Puts what compiled kernels need in place of `<!-- kernels: CASES -->`.

`CASES` is a regular expression; cases whose name starts with a match are
shown. Tables of the cycle model go in place of `<!-- model: TABLE -->`.
tests/cycles/table.py writes the numbers; tests/test_gpu.py and
tests/cycles/test_model.py check them.
"""

import json
import re

from repository import ROOT
from templates import render

MARK = re.compile(r"<!-- kernels: (.+?) -->")
MODEL = re.compile(r"<!-- model: (\w+) -->")
TARGETS = {"90": "Hopper", "80": "Ampere", "75": "Turing"}


def on_page_markdown(markdown, page, config, files):
    markdown = MODEL.sub(
        lambda mark: render("model.html", what=mark[1], **_read()), markdown
    )
    return MARK.sub(lambda mark: _table(mark[1]), markdown)


def _read() -> dict:
    file = ROOT / "docs" / "results" / "kernels.json"
    return json.loads(file.read_text("utf-8"))


def _table(pattern: str) -> str:
    table = _read()
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
