"""Puts tables of docs/results/*.json in place of `<!-- results: NAME -->`.

A file that is not there gives no row, and a section without rows is left
out. Every row ends with what is needed to make its numbers again.
"""

import json
import re
from html import escape

from repository import ROOT

RESULTS = ROOT / "docs" / "results"
SECTION = re.compile(
    r"^## (?:(?!^## ).)*?<!-- results: (\S+) -->\n", re.DOTALL | re.MULTILINE
)
#: Mixers of the training runs, and what others published for them.
MIXERS = {
    "softmax": '1.88 (<a href="https://github.com/karpathy/nanoGPT">nanoGPT</a>)',
    "delta": "–",
    "sum": "–",
}


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri != "results.md":
        return markdown
    return SECTION.sub(_fill, markdown)


def _fill(section: re.Match) -> str:
    table = TABLES[section[1]](section[1])
    mark = f"<!-- results: {section[1]} -->"
    return section[0].replace(mark, table) if table else ""


def _training(name: str) -> str:
    runs = [
        (mixer, path.stem, json.loads(path.read_text("utf-8")))
        for mixer in MIXERS
        for path in sorted(RESULTS.glob(f"{name}-{mixer}*.json"))
    ]
    if not runs:
        return ""
    rows = [
        _row(
            [
                mixer,
                str(run["config"]["seed"]),
                f"{run['parameters']:,}",
                f"<strong>{run['validation_loss']:.3f}</strong>",
                MIXERS[mixer],
                _duration(run["seconds"]),
            ],
            _origin(file, run),
        )
        for mixer, file, run in runs
    ]
    head = [
        "Mixer",
        "Seed",
        "Parameters",
        "Validation loss",
        "Published",
        "Training time",
    ]
    steps = [step for step, *_ in runs[0][2]["curve"]]
    curves = [
        f"<tr><td>{mixer}, {run['config']['seed']}</td>"
        + "".join(f"<td>{loss:.2f}</td>" for *_, loss in run["curve"])
        + "</tr>"
        for mixer, _, run in runs
    ]
    return (
        _table(head, rows)
        + "\n\nWhat to expect on the way, validation loss after so many steps:\n\n"
        + _table(
            ["Mixer, seed", *map(str, steps)], [f"<tbody>{''.join(curves)}</tbody>"]
        )
    )


def _bench(name: str) -> str:
    run = _read(name)
    if not run:
        return ""
    least = {
        (r["op"], r["time"]): r["peak_mib"]
        for r in run["rows"]
        if r["side"] == "efficient"
    }
    rows = []
    for r in run["rows"]:
        peak, efficient = r["peak_mib"], least[r["op"], r["time"]]
        cells = [
            f"<code>{r['op']}</code>",
            f"{r['time']:,}",
            r["side"],
            f"{r['milliseconds']:,.0f}",
            f"{r['fastest']:,.0f}",
            f"{r['times_slower']:.1f}",
            f"{peak:,.0f}" if peak else "–",
            f"{peak / efficient:.1f}" if peak and efficient else "–",
            f"{r['error']:.0e}",
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = [
        "Operation",
        "Steps",
        "Version",
        "ms",
        "Fastest",
        "× efficient",
        "MiB",
        "× efficient",
    ]
    body = f"<tbody>{''.join(rows)}</tbody>"
    origin = f"<tbody>{_origin_row(_origin(name, run), 9)}</tbody>"
    return _table([*head, "Error"], [body, origin])


TABLES = {"nanogpt-cpu": _training, "bench-cpu": _bench}


def _read(name: str) -> dict | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def _table(head: list[str], bodies: list[str]) -> str:
    cells = "".join(f"<th>{cell}</th>" for cell in head)
    return f"<table><thead><tr>{cells}</tr></thead>{''.join(bodies)}</table>"


def _row(cells: list[str], origin: str) -> str:
    row = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tbody><tr>{row}</tr>{_origin_row(origin, len(cells))}</tbody>"


def _origin_row(origin: str, columns: int) -> str:
    return f'<tr class="origin"><td colspan="{columns}"><div>{origin}</div></td></tr>'


def _origin(name: str, run: dict) -> str:
    facts = [
        f"fwlab {run['fwlab']} ({run['commit']})",
        f"Python {run['python']}",
        f"PyTorch {run['torch']}",
        f"{run['machine']}, {run['threads']} threads",
        run["date"],
    ]
    return (
        f"<code>{escape(run['command'])}</code><br>{escape(' · '.join(facts))} · "
        f'<a href="results/{name}.json">all numbers</a>'
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
