"""Puts what compiled kernels take in place of `<!-- kernels: CASES -->`.

`CASES` is a regular expression; the cases whose name it matches at the
beginning are shown. The table is written by tests/aot.py, and held by
tests/test_gpu.py.
"""

import json
import re

from repository import ROOT

MARK = re.compile(r"<!-- kernels: (.+?) -->")
TARGETS = {"90": "Hopper", "80": "Ampere", "75": "Turing"}


def on_page_markdown(markdown, page, config, files):
    return MARK.sub(lambda mark: _table(mark[1]), markdown)


def _table(cases: str) -> str:
    file = ROOT / "docs" / "results" / "kernels.json"
    table = json.loads(file.read_text("utf-8"))
    shown = {n: uses for n, uses in table["kernels"].items() if re.match(cases, n)}
    targets = [
        t for t in TARGETS if any(k.endswith(t) for u in shown.values() for k in u)
    ]
    rows = []
    for case, uses in shown.items():
        rows.append(f'<tr><th colspan="9" scope="rowgroup">{case}</th></tr>')
        for kernel in dict.fromkeys(key.split(",")[0] for key in uses):
            cells = "".join(
                f"<td>{_use(uses.get(f'{kernel}, sm_{target}'))}</td>"
                for target in targets
            )
            rows.append(f"<tr><td><code>{kernel}</code></td>{cells}</tr>")
    head = "".join(f"<th>{TARGETS[target]} (sm_{target})</th>" for target in targets)
    return (
        "<details><summary>Shared memory per program, registers per thread, and bytes "
        "per thread that did not find a register, compiled with Triton "
        f"{table['triton']}</summary><table><thead><tr><th>Kernel</th>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></details>"
    )


def _use(use: dict | None) -> str:
    if use is None:
        return "–"
    spilled = f", {use['stack']} B spilled" if use["stack"] else ""
    return f"{use['shared'] / 1024:.0f} KiB, {use['registers']}{spilled}"
