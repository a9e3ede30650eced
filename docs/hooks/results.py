"""Puts tables of docs/results/*.json in place of `<!-- results: TABLE -->`.

Plots of the same files go in place of `<!-- plot: PLOT -->`. A file that is not there gives no row, and a section without rows is left
out. Every row ends with what is needed to make its numbers again.
"""

import json
import re
from html import escape

import plots
from repository import ROOT

RESULTS = ROOT / "docs" / "results"
PLOT = re.compile(r"<!-- plot: (\S+) -->")
SECTION = re.compile(
    r"^## (?:(?!^## ).)*?<!-- results: (\S+) -->\n", re.DOTALL | re.MULTILINE
)
#: Mixers of the training runs in the order of the tables, and what others
#: published for them.
PUBLISHED = {"softmax": (1.88, "nanoGPT", "https://github.com/karpathy/nanoGPT")}
MIXERS = [
    "softmax",
    "transformer-xl",
    "sum",
    "gated",
    "delta",
    "gated-delta",
    "fwp",
    "aft-simple",
    "aft-full",
    "aft-local",
    "aft-conv",
    "feedback",
    "feedback-shared",
]


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri != "results.md":
        return markdown
    return SECTION.sub(_fill, markdown)


def on_page_content(html, page, config, files):
    """The plots come here: Markdown would change a drawing."""
    if page.file.src_uri != "results.md":
        return html
    return PLOT.sub(lambda mark: PLOTS[mark[1]](), html)


def _fill(section: re.Match) -> str:
    table = TABLES[section[1]]()
    mark = f"<!-- results: {section[1]} -->"
    return section[0].replace(mark, table) if table else ""


def _runs(name: str) -> list[tuple[str, str, dict]]:
    """Mixer, file and result of every training run."""
    return [
        (mixer, path.stem, json.loads(path.read_text("utf-8")))
        for mixer in MIXERS
        for path in sorted(
            RESULTS.glob(f"{name}-{mixer}*.json"), key=lambda p: (len(p.stem), p.stem)
        )
        if re.fullmatch(rf"{name}-{mixer}(-seed\d+)?", path.stem)
    ]


def _comparison(name: str) -> str:
    """One row per mixer; the losses of all seeds, and speed from the benchmark."""
    runs, bench = _runs(name), _read("bench-cpu") or {}
    measured = {row["mixer"]: row for row in bench.get("mixers", [])}
    rows = []
    for mixer in MIXERS:
        mine = [run for other, _, run in runs if other == mixer]
        if not mine:
            continue
        losses = [run["validation_loss"] for run in mine]
        mean = sum(losses) / len(losses)
        seeds = ", ".join(f"{loss:.3f}" for loss in losses) if len(losses) > 1 else "–"
        row = measured.get(mixer)
        speed = ["–", "–", "–"]
        if row:
            peak = row["peak_mib"]
            speed = [
                f"{row['tokens_per_second']:,}",
                f"{peak:,.0f}" if peak else "–",
                f"{row['state_size']:,}",
            ]
        cells = [
            f"<code>{mixer}</code>",
            f"<strong>{mean:.3f}</strong>",
            seeds,
            _published(mixer),
            f"{mine[0]['parameters']:,}",
            *speed,
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    if not rows:
        return ""
    head = [
        "Mixer",
        "Validation loss",
        "of each seed",
        "Published",
        "Parameters",
        "Tokens/s",
        "MiB",
        "State",
    ]
    bodies = [f"<tbody>{''.join(rows)}</tbody>"]
    if measured:
        origin = _origin_row(_origin("bench-cpu", bench), len(head))
        bodies.append(f"<tbody>{origin}</tbody>")
    return _table(head, bodies)


def _published(mixer: str) -> str:
    if mixer not in PUBLISHED:
        return "–"
    loss, name, url = PUBLISHED[mixer]
    return f'{loss} (<a href="{url}">{name}</a>)'


def _training(name: str) -> str:
    """Every run with its command, and the curves."""
    runs = _runs(name)
    if not runs:
        return ""
    rows = [
        _row(
            [
                f"<code>{mixer}</code>",
                str(run["config"]["seed"]),
                f"{run['validation_loss']:.4f}",
                _duration(run["seconds"]),
            ],
            _origin(file, run),
        )
        for mixer, file, run in runs
    ]
    steps = [step for step, *_ in runs[0][2]["curve"]]
    curves = [
        f"<tr><td>{mixer}, {run['config']['seed']}</td>"
        + "".join(f"<td>{loss:.2f}</td>" for *_, loss in run["curve"])
        + "</tr>"
        for mixer, _, run in runs
    ]
    return (
        "What to expect on the way, validation loss after so many steps:\n\n"
        + _table(
            ["Mixer, seed", *map(str, steps)], [f"<tbody>{''.join(curves)}</tbody>"]
        )
        + "\n\n<details><summary>Every run with its command</summary>"
        + _table(["Mixer", "Seed", "Validation loss", "Training time"], rows)
        + "</details>"
    )


def _bench(name: str) -> str:
    run = _read(name)
    if not run:
        return ""
    least = {_case(r): r["peak_mib"] for r in run["rows"] if r["side"] == "efficient"}
    bodies, last = [], None
    for r in run["rows"]:
        peak, efficient = r["peak_mib"], least[_case(r)]
        shape = ", ".join(f"{name} {size:,}" for name, size in r["shape"].items())
        if r["threads"] == 1:
            shape += ", 1 thread"
        if _case(r) != last:
            bodies.append(
                f'<tr><th colspan="7" scope="rowgroup"><code>{r["case"]}</code> {shape}</th></tr>'
            )
            last = _case(r)
        cells = [
            r["side"],
            f"{r['milliseconds']:,.1f}",
            f"{r['fastest']:,.1f}",
            f"{r['times_slower']:.1f}",
            f"{peak:,.0f}" if peak else "–",
            f"{peak / efficient:.1f}" if peak and efficient else "–",
            f"{r['error']:.0e}",
        ]
        bodies.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = ["Version", "ms", "Fastest", "× efficient", "MiB", "× efficient", "Error"]
    origin = _origin_row(_origin(name, run), len(head))
    return _table(head, [f"<tbody>{''.join(bodies)}</tbody><tbody>{origin}</tbody>"])


def _decoding(name: str) -> str:
    run = _read(name)
    if not run or "decoding" not in run:
        return ""
    rows = []
    positions = list(run["decoding"][0]["microseconds"])
    for r in run["decoding"]:
        times = list(r["microseconds"].values())
        cells = [
            r["layer"],
            *(f"{t:,.0f}" for t in times),
            *["–"] * (len(positions) - len(times)),
            f"{times[-1] / times[0]:.2f}",
        ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = ["Layer", *(f"at {int(p):,}" for p in positions), "last / first"]
    origin = _origin_row(_origin(name, run), len(head))
    return _table(head, [f"<tbody>{''.join(rows)}</tbody><tbody>{origin}</tbody>"])


def _gpu() -> str:
    """Each card that was measured; the command where none was."""
    cards = [
        _card(path.stem, json.loads(path.read_text("utf-8")))
        for path in sorted(RESULTS.glob("gpu-*.json"))
    ]
    return "\n\n".join(cards) or (
        "Not yet measured on a GPU. This measures it: <code>fwlab bench --gpu</code>"
    )


def _card(name: str, run: dict) -> str:
    card = run["card"]
    facts = [
        f"compute capability {'.'.join(map(str, card['capability']))}",
        f"driver {card['driver']}",
        *(f"{n} {v}" for n, v in run["versions"].items() if v),
        f"copies {_number(run['rates'].get('copy_gb_per_s'))} GB/s",
        f"multiplies {_number(run['rates'].get('matrix_tflop_per_s'))} TFLOP/s",
    ]
    gaps = [
        *(
            f"{r['case']}, {r['side']}: {r['reason']}"
            for r in run["rows"]
            if r["reason"]
        ),
        *(f"{gap['task']}: {gap['reason']}" for gap in run["not_run"]),
    ]
    if not run["complete"]:
        gaps.append("the run was stopped before its end")
    parts = [
        f"### {escape(card['name'])}",
        escape(" · ".join(facts)),
        _gpu_targets(run),
        _gpu_correctness(run),
        _gpu_times(name, run),
    ]
    if gaps:
        items = "".join(f"<li>{escape(gap)}</li>" for gap in gaps)
        parts.append(
            f"<details><summary>What has no figure</summary><ul>{items}</ul></details>"
        )
    return "\n\n".join(parts)


def _gpu_targets(run: dict) -> str:
    rows = []
    for t in run["targets"]:
        sign = "≤ " if t["at_most"] else "≥ "
        cells = [
            escape(t["name"]),
            *("–" if t[n] is None else f"{sign}{t[n]:g}" for n in ("must", "aim")),
            _number(t["measured"]),
            t["verdict"],
        ]
        rows.append(_cells(cells))
    head = ["Target", "Must", "Aim", "Measured", "Verdict"]
    return _table(head, [f"<tbody>{''.join(rows)}</tbody>"])


def _gpu_correctness(run: dict) -> str:
    """Per operation, how many problems are right, and the largest error."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in run["correctness"]:
        groups.setdefault((row["op"], row["dtype"]), []).append(row)
    body = []
    for (op, dtype), rows in groups.items():
        errors = [e for row in rows for e in row["errors"].values() if e is not None]
        cells = [
            f"<code>{op}</code>",
            dtype,
            f"{sum(row['ok'] for row in rows)} of {len(rows)}",
            f"{max(errors):.1e}" if errors else "–",
            f"{rows[0]['limit']:.0e}",
        ]
        body.append(_cells(cells))
    head = ["Operation", "Precision", "Right", "Largest error", "Limit"]
    return _table(head, [f"<tbody>{''.join(body)}</tbody>"])


def _gpu_times(name: str, run: dict) -> str:
    ours = {r["case"]: r for r in run["rows"] if r["side"] == "fwlab"}
    body, last = [], None
    for r in run["rows"]:
        if r["ms"] is None:
            continue
        if r["case"] != last:
            shape = ", ".join(f"{n} {size:,}" for n, size in r["shape"].items())
            body.append(
                f'<tr><th colspan="7" scope="rowgroup"><code>{r["op"]}</code> {shape}</th></tr>'
            )
            last = r["case"]
        side, whole = r["side"], r["T"] == r["shape"]["T"]
        if r["version"]:
            side += f" {r['version']}"
        if not whole:
            side += f", T {r['T']:,}"
        own, floor = ours.get(r["case"], {}).get("ms"), run["floors"].get(r["case"])
        cells = [
            escape(side),
            f"{r['ms']:,.3f}",
            f"{r['wall_ms']:,.3f}",
            f"{r['ms'] / own:.2f}" if own and whole else "–",
            f"{r['ms'] / floor:.1f}" if floor and whole else "–",
            f"{r['peak_mib']:,.0f}" if r["peak_mib"] is not None else "–",
            f"{r['error']:.0e}" if r["error"] is not None else "–",
        ]
        body.append(_cells(cells))
    head = ["Version", "ms", "Back to back", "× fwlab", "× floor", "MiB", "Error"]
    origin = _origin_row(_origin(name, run), len(head))
    return _table(head, [f"<tbody>{''.join(body)}</tbody><tbody>{origin}</tbody>"])


def _cells(cells: list[str]) -> str:
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _number(number: float | None) -> str:
    return "–" if number is None else f"{number:,.4g}"


def _case(row: dict) -> str:
    return f"{row['case']} {row['shape']}"


#: What a mark names: the table, and the results it is made of.
TABLES = {
    "comparison": lambda: _comparison("nanogpt-cpu"),
    "training": lambda: _training("nanogpt-cpu"),
    "operations": lambda: _bench("bench-cpu"),
    "decoding": lambda: _decoding("bench-cpu"),
    "gpu": _gpu,
}
#: The plots, each of the results that the table below it is made of.
PLOTS = {
    "losses": lambda: plots.losses(
        _runs("nanogpt-cpu"), {mixer: loss for mixer, (loss, *_) in PUBLISHED.items()}
    ),
    "curves": lambda: plots.curves(_runs("nanogpt-cpu")),
    "operations": lambda: plots.operations(_read("bench-cpu")),
    "decoding": lambda: plots.decoding(_read("bench-cpu")),
}


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
