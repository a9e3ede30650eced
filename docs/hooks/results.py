"""Puts tables of docs/results/*.json in place of `<!-- results: TABLE -->`.

Plots of the same files go in place of `<!-- plot: PLOT -->`, and so does the
picture that `fwlab look` has left in docs/images. Each function here reads the
values of a table, and docs/templates/results/TABLE.html lays them out. A section
whose files are missing is left out.
"""

import re
import sys
from itertools import groupby

import crossings
import plots
from repository import ROOT
from templates import TEMPLATES, render

from fwlab.files import read_json
from fwlab.models import MIXERS

sys.path.insert(0, str(ROOT / "docs" / "reproduce"))
from frame import results

RESULTS = ROOT / "docs" / "results"
TRAINING, HYBRIDS = "nanogpt-cpu", "hybrid-cpu"
BENCH, PEERS = "bench-cpu", "peers-cpu"
#: The results that have the control without a memory, and its name in the table.
CONTROLS, NO_MEMORY = "language-model", "convolution alone, no memory"
LENGTHS, BUSY, STEPS = "lengths-cpu", "busy-cpu", "steps-cpu"
PUBLISHED_MODELS = "published-cpu"
GENERATION = "generation-cpu"
LOOK = ROOT / "docs" / "images" / "look.svg"
LOOKS = (
    "Five panels over the same two lines of text, with a row for each of 16 heads: "
    "write strength; decay; norm of the fast weights; the share kept of the write at "
    "the first Romeo, which is nearly gone at the second one; and half-lives."
)
PLOT = re.compile(r"<!-- plot: (\S+) -->")
SECTION = re.compile(
    r"^## (?:(?!^## ).)*?<!-- results: (\S+) -->\n", re.DOTALL | re.MULTILINE
)
#: The loss that others published for a mixer.
PUBLISHED = {
    "softmax": {
        "loss": 1.88,
        "name": "nanoGPT",
        "url": "https://github.com/karpathy/nanoGPT",
    }
}


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri != "results.md":
        return markdown
    return SECTION.sub(_fill, markdown)


def on_page_content(html, page, config, files):
    """Plots are added here: converting Markdown would change a drawing."""
    if page.file.src_uri not in ("results.md", "published.md"):
        return html
    return PLOT.sub(lambda mark: PLOTS[mark[1]](), html)


def _fill(section: re.Match) -> str:
    name = section[1]
    values = TABLES[name]()
    if values is None:
        return ""
    table = render(f"results/{name}.html", **values)
    return section[0].replace(f"<!-- results: {name} -->", table)


def _comparison() -> dict | None:
    """One row per mixer: the losses of all its seeds, and its speed."""
    bench = _read(BENCH)
    speed = {row["mixer"]: row for row in (bench or {}).get("mixers", [])}
    rows = []
    for mixer, group in groupby([*_runs(), *_controls()], _mixer):
        runs = list(group)
        losses = [run["validation_loss"] for run in runs]
        rows.append(
            {
                "mixer": mixer,
                "loss": sum(losses) / len(losses),
                "seeds": losses if len(losses) > 1 else [],
                "published": PUBLISHED.get(mixer),
                "parameters": runs[0]["parameters"],
                "speed": {name: speed.get(mixer, {}).get(name) for name in SPEED},
            }
        )
    rows.sort(key=lambda row: row["loss"])
    run = bench if speed else None
    return {"rows": rows, "file": BENCH, "run": run} if rows else None


def _hybrids() -> dict | None:
    """Layers as published and hybrid stacks, best first; a row has all its seeds."""
    names = sorted(path.stem for path in RESULTS.glob(f"{HYBRIDS}-*.json"))
    runs = [{**_read(name), "file": name} for name in names]
    # Their baseline: attention that compares by distance.
    runs += [run for run in _runs() if _mixer(run) == "transformer-xl"]
    rows = []
    for name, group in groupby(sorted(runs, key=_options), _options):
        same = list(group)
        seeds = [run["validation_loss"] for run in same]
        mean = sum(seeds) / len(seeds)
        rows.append({"name": name, "loss": mean, "seeds": seeds, "run": same[0]})
    rows.sort(key=lambda row: row["loss"])
    return {"rows": rows} if rows else None


def _options(run: dict) -> str:
    """What its command says of the model, without the sizes that all share."""
    return re.sub(
        r"^fwlab train --mixer | --(corpus|seed|out|d-ff) \S+", "", run["command"]
    )


SPEED = ("tokens_per_second", "peak_mib", "operators", "state_size")


def _training() -> dict | None:
    """Every run with its command, and the curves."""
    runs = _runs()
    if not runs:
        return None
    return {"runs": runs, "steps": [step for step, *_ in runs[0]["curve"]]}


def _operations() -> dict | None:
    run = _read(BENCH)
    if not run:
        return None
    cases = [list(rows) for _, rows in groupby(run["rows"], _case)]
    for rows in cases:
        (ours,) = (row["peak_mib"] for row in rows if row["side"] == "efficient")
        for row in rows:
            row["times_memory"] = _ratio(row["peak_mib"], ours)
    return {"cases": cases, "file": BENCH, "run": run}


def _peers() -> dict | None:
    run = _read(PEERS)
    return {"rows": run["peers"], "file": PEERS, "run": run} if run else None


def _steps() -> dict | None:
    """By mixer, how many steps of softmax one of its steps takes."""
    run = _read(STEPS)
    if not run:
        return None
    rows: dict[str, list[float]] = {}
    for row in run["steps"]:
        rows.setdefault(row["mixer"], []).append(row["softmax_steps"])
    lengths = dict.fromkeys(row["T"] for row in run["steps"])
    titles = [f"T {length:,}" for length in lengths]
    return {"rows": rows, "titles": titles, "file": STEPS, "run": run}


def _lengths() -> dict | None:
    """Milliseconds at some lengths, and where they cross those of others."""
    run = _read(LENGTHS)
    if not run:
        return None
    times = crossings.times_by_form(run["lengths"], "T")
    sizes = sorted({row["T"] for row in run["lengths"]})
    shown = [size for size in sizes if size in (64, 512, 4096)]
    rows = [
        {
            "op": line["op"],
            "dense": crossings.operation_in_words(line["dense"]),
            "softmax": crossings.operation_in_words(line["softmax"]),
            "times": [times[line["op"]][crossings.FWLAB].get(size) for size in shown],
        }
        for line in crossings.by_operation(run["lengths"])
    ]
    softmax = times[crossings.SOFTMAX][crossings.FWLAB]
    return {
        "rows": rows,
        "softmax": [softmax.get(size) for size in shown],
        "sizes": shown,
        "file": LENGTHS,
        "run": run,
    }


def _decoding() -> dict | None:
    run = _read(BENCH)
    if not run or "decoding" not in run:
        return None
    rows = run["decoding"]
    for row in rows:
        times = row["microseconds"] = {
            int(at): time for at, time in row["microseconds"].items()
        }
        row["growth"] = times[max(times)] / times[min(times)]
    positions = list(rows[0]["microseconds"])
    return {"rows": rows, "positions": positions, "file": BENCH, "run": run}


def _generation() -> dict | None:
    """Tokens per second at some contexts, and where they cross nanoGPT's."""
    run = _read(GENERATION)
    if not run:
        return None
    times = crossings.times_by_model(run["generation"])
    faster = crossings.by_model(run["generation"])
    contexts = [*times[crossings.NANOGPT]]
    shown = [at for at in contexts if at in (64, 512, 2048, 8192)]
    rows = {
        name: {
            "speeds": [1e6 / line[at] for at in shown],
            "faster": crossings.in_words(
                faster[name], contexts[0], contexts[-1], "context"
            )
            if name in faster
            else "–",
        }
        for name, line in times.items()
    }
    titles = [f"at {at:,}" for at in shown]
    return {"rows": rows, "titles": titles, "file": GENERATION, "run": run}


def _busy() -> dict | None:
    run = _read(BUSY)
    return {"rows": run["busy"], "file": BUSY, "run": run} if run else None


def _published() -> dict | None:
    run = _read(PUBLISHED_MODELS)
    return {"rows": run["rows"], "file": PUBLISHED_MODELS, "run": run} if run else None


def _gpu() -> dict:
    """Each card that was measured."""
    runs = []
    for path in sorted(RESULTS.glob("gpu-*.json")):
        run = _read(path.stem)
        ours = {
            row["case"]: row["ms"] for row in run["rows"] if row["side"] == "triton"
        }
        for row in run["rows"]:
            row["times_triton"] = _ratio(row["ms"], ours.get(row["case"]))
        groups = groupby(run["rows"], lambda row: row["case"])
        gaps = [
            f"{row['case']}, {row['side']}: {row['reason'] or row['refused']}"
            for row in run["rows"]
            if row["reason"] or row["refused"]
        ]
        cases = [list(rows) for _, rows in groups]
        runs.append({**run, "file": path.stem, "cases": cases, "gaps": gaps})
    return {"runs": runs}


#: The values of each table.
TABLES = {
    "comparison": _comparison,
    "hybrids": _hybrids,
    "training": _training,
    "operations": _operations,
    "peers": _peers,
    "steps": _steps,
    "lengths": _lengths,
    "decoding": _decoding,
    "generation": _generation,
    "busy": _busy,
    "published": _published,
    "gpu": _gpu,
}
#: The plots, each of the results in the table below it.
PLOTS = {
    "losses": lambda: plots.losses(
        _runs(), {mixer: by["loss"] for mixer, by in PUBLISHED.items()}
    ),
    "curves": lambda: plots.curves(_runs()),
    "operations": lambda: plots.operations(_read(BENCH)),
    "lengths": lambda: plots.lengths(_read(LENGTHS)),
    "batches": lambda: plots.batches(_read(LENGTHS)),
    "decoding": lambda: plots.decoding(_read(BENCH)),
    "generation": lambda: plots.generation(_read(GENERATION)),
    "look": lambda: plots.kept(LOOK.read_text("utf-8"), "look", LOOKS),
}


def _runs() -> list[dict]:
    """The training runs, by mixer and seed, each with the name of its file."""
    names = [path.stem for path in RESULTS.glob(f"{TRAINING}-*.json")]
    runs = [{**_read(name), "file": name} for name in sorted(names, key=_by_seed)]
    return sorted(runs, key=lambda run: [*MIXERS].index(_mixer(run)))


def _controls() -> list[dict]:
    """The runs without a memory, as training runs."""
    found = results(CONTROLS, quick=False)
    points = found["points"](size="nanogpt", mixer="convolution") if found else []
    return [
        {**p, "config": {"mixer": NO_MEMORY}, "validation_loss": p["loss"]}
        for p in points
    ]


def _by_seed(name: str) -> tuple[int, str]:
    return len(name), name  # seed 10 comes after seed 9


def _mixer(run: dict) -> str:
    return run["config"]["mixer"]


def _read(name: str) -> dict | None:
    path = RESULTS / f"{name}.json"
    return read_json(path) if path.exists() else None


def _case(row: dict) -> tuple[str, dict]:
    return row["case"], row["shape"]


def _ratio(value: float | None, unit: float | None) -> float | None:
    return value / unit if value and unit else None


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


TEMPLATES.filters["duration"] = _duration
