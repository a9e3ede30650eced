"""Fill in the pages of results: Findings, Speed and Tables.

The pages are templates: NUMBERS has values of docs/results/*.json. Plots of the same
files and of experiments replace `<!-- plot: PLOT OPERATION ... -->`. Tables of removed
commands are CSV files beside the numbers, their plots are drawings in docs/images.
"""

import csv
import re
import sys
from collections.abc import Callable
from html import unescape
from statistics import mean, median

import kernels
import plots
from repository import ROOT
from templates import TEMPLATES, render

from fwlab.files import read_json
from fwlab.models import MIXERS

sys.path.insert(0, str(ROOT / "docs" / "reproduce"))
from frame import Points, results

RESULTS = ROOT / "docs" / "results"
PAGES = ("results.md", "results/speed.md", "results/tables.md")
TRAINING, HYBRIDS = "nanogpt-cpu", "hybrid-cpu"
BENCH, PEERS, GPU = "bench-cpu", "peers-cpu", "gpu-nvidia-h200"
#: Results of the control without a memory, and its name in tables and plots.
CONTROLS, NO_MEMORY = "language-model", "convolution alone, no memory"
LOOKS = (
    "Five panels over the same two lines of text, with a row for each of 16 heads: "
    "write strength; decay; norm of the fast weights; the share kept of the write at "
    "the first Romeo, which is nearly gone at the second one; and half-lives."
)
PLOT = re.compile(r"<!-- plot: (\S+)((?: \w+)*) -->")
#: Losses published by other projects, by mixer.
PUBLISHED = {
    "softmax": {"loss": 1.88, "by": "[nanoGPT](https://github.com/karpathy/nanoGPT)"}
}


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri not in PAGES:
        return markdown
    return TEMPLATES.from_string(markdown).render(NUMBERS)


def on_page_content(html, page, config, files):
    """Insert plots into the HTML of a page, since Markdown would change them."""
    return PLOT.sub(lambda mark: PLOTS[mark[1]](*mark[2].split()), html)


# --- Tables ----------------------------------------------------------------


def _origin(file: str) -> str:
    """Return Markdown with the command, machine and date of a results file."""
    return render("origin.md.jinja", file=file, run=_read(file))


def _frozen(name: str, file: str) -> str:
    """Return a CSV table as Markdown, for results whose command no longer exists."""
    text = (RESULTS / f"{name}.csv").read_text("utf-8")
    titles, *rows = csv.reader(text.splitlines())
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + _origin(file)


def _mixers() -> list[dict]:
    """Return loss, seeds, speed and published loss of each mixer, lowest loss first."""
    measured = {row["mixer"]: row for row in _read(BENCH)["mixers"]}
    none = dict.fromkeys(measured["softmax"])
    return [
        {**row, "speed": measured.get(row["name"], none)}
        | {"published": PUBLISHED.get(row["name"])}
        for row in _best([*_runs(), *_controls()], _mixer)
    ]


def _stacks() -> list[dict]:
    """Return the losses of published layers and of hybrid stacks."""
    # The baseline of both groups is attention with relative positions.
    baseline = [run for run in _runs() if _mixer(run) == "transformer-xl"]
    return _best([*_read_all(HYBRIDS), *baseline], _options)


def _best(runs: list[dict], kind: Callable[[dict], str]) -> list[dict]:
    """Return the losses of all seeds for each kind of run, lowest mean first."""
    kinds: dict[str, list[dict]] = {}
    for run in runs:
        kinds.setdefault(kind(run), []).append(run)
    rows = []
    for name, same in kinds.items():
        seeds = [run["validation_loss"] for run in same]
        rows.append({"name": name, "loss": mean(seeds), "seeds": seeds, "run": same[0]})
    return sorted(rows, key=lambda row: row["loss"])


def _options(run: dict) -> str:
    """Return the model options of a run's command, without corpus, seed and sizes."""
    return re.sub(
        r"^fwlab train --mixer | --(corpus|seed|out|d-ff) \S+", "", run["command"]
    )


def _versions(file: str, side: str, *columns: str) -> list[dict]:
    """Return a benchmark's rows, with `columns` relative to implementation `side`."""
    rows = _read(file)["rows"]
    ours = {str(row["shape"]) + _case(row): row for row in rows if row["side"] == side}
    for row in rows:
        own = ours[str(row["shape"]) + _case(row)]
        row["times"] = {name: row[name] / own[name] for name in columns}
    return rows


def _case(row: dict) -> str:
    return row.get("case") or row["op"]


def _sizes(row: dict) -> str:
    threads = ", 1 thread" * (row.get("threads") == 1)
    return (
        ", ".join(f"{axis} {size:,}" for axis, size in row["shape"].items()) + threads
    )


def _seeds(losses: list[float]) -> str:
    each = ", ".join(f"{loss:.3f}" for loss in losses)
    return each if losses[1:] else "one seed"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


TEMPLATES.filters |= {"duration": _duration, "losses": _seeds, "sizes": _sizes}


# --- Plots -----------------------------------------------------------------

LOSS = "nats per character"


def _convolved(name: str, title: str, *layers: str) -> str:
    """Draw the losses of layers without and with a short convolution."""
    points = _points("replacing")
    series = {
        entry: {layer: points(layer=layer, conv_size=size)["loss"] for layer in layers}
        for entry, size in (("bare", 0), ("with a convolution", 4))
    }
    return plots.chart(name, title, series, LOSS)


def _today() -> str:
    """Draw losses of modern layers, hybrids, bare layers and a model without memory."""
    rows = {_stack(row["name"]): row["seeds"] for row in _stacks()}
    for run in _runs():
        if _mixer(run) in ("gated-delta", "softmax"):
            rows.setdefault(f"bare {_mixer(run)}", []).append(run["validation_loss"])
    rows["no memory"] = [run["validation_loss"] for run in _controls()]
    rows = dict(sorted(rows.items(), key=lambda row: mean(row[1])))
    title = "Layers of today, attention that compares by distance, and no memory"
    return plots.chart("hybrids", title, {"": rows}, LOSS, middle=mean)


def _stack(options: str) -> str:
    return options.partition(" --")[0].strip("'").replace("*3,", " × 3, ")


def _longer() -> str:
    """Draw the change in loss when windows are 16 times as long as in training."""
    change = {
        mixer: [p["loss_1024"] - p["loss_64"] for p in own]
        for mixer, own in _points("length").by("mixer").items()
    }
    rows = dict(sorted(change.items(), key=lambda row: median(row[1])))
    title = "Change of the loss from windows of 64 to windows of 1,024 characters"
    look = {"spec": "+.2f", "line": (0, "as in training")}
    return plots.chart("longer", title, {"": rows}, "change of loss", **look)


def _carried() -> str:
    """Draw model losses with a carried state and in separate windows."""
    rows = {
        "delta, ELU + 1": {"model": "delta", "map": "linear", "size": "nanogpt"},
        "delta, DPFP": {"model": "delta", "map": "dpfp"},
        "sum": {"model": "sum", "normalize": 1},
        "gated-delta": {"model": "gated-delta"},
        "transformer-xl": {"model": "transformer-xl", "memory": 8},
    }
    series = {
        entry: {
            name: _points("state-size")(**own)[column] for name, own in rows.items()
        }
        for entry, column in (("carried state", "loss"), ("windows", "windows_loss"))
    }
    title = "Loss with carried state, and in windows that begin with an empty one"
    return plots.chart("carried", title, series, LOSS)


def _fla() -> str:
    """Draw the time of flash-linear-attention relative to ours, by sequence length."""
    series: dict[str, dict[str, list[float]]] = {}
    for row in _versions(GPU, "triton", "ms"):
        if row["side"] == "fla":
            length = series.setdefault(f"T {row['shape']['T']:,}", {})
            length[_operation(row)] = [row["times"]["ms"]]
    title = "The time of flash-linear-attention on an H200"
    unit, line = "times as long as ours", (1, "ours")
    return plots.chart("fla", title, series, unit, spec=".1f", line=line)


def _operation(row: dict) -> str:
    name = row["op"].replace("aft_", "AFT-")
    return name.removesuffix("_rule").replace("_", " ")


def _naive() -> str:
    """Draw time and memory of naive versions relative to efficient ones (largest T)."""
    rows: dict[str, dict] = {}
    measured = _versions(BENCH, "efficient", "milliseconds", "peak_mib")
    measured.sort(key=lambda r: (r["shape"]["T"], r["side"].startswith("naive")))
    for row in measured:
        if row["side"] != "efficient":
            rows[row["case"]] = row
    rows = sorted(rows.values(), key=lambda row: -row["times"]["milliseconds"])
    series = {
        entry: {
            f"{r['case']}, T {r['shape']['T']:,}": [r["times"][column]] for r in rows
        }
        for entry, column in (("time", "milliseconds"), ("memory", "peak_mib"))
    }
    title, unit = "What the naive form needs", "naive / efficient"
    look = {"spec": ".1f", "line": (1, "equal"), "log": (0.5, 1, 2, 5, 10, 20, 50)}
    return plots.chart("operations", title, series, unit, **look)


def _others() -> str:
    """Draw the time of other libraries relative to fwlab."""
    rows = {}
    for row in _read(PEERS)["peers"]:
        if "ratio" in row:
            shape = row["shape"]
            size = f", T {shape['T']:,}" if "T" in shape else ""
            wide = " × 4" * (shape.get("batch") == 4 and shape.get("width") == 64)
            rows[f"{row['work']}{size}{wide}"] = [row["ratio"]]
    title, line = "The time of others, in multiples of fwlab's", (1, "fwlab")
    return plots.chart("peers", title, {"": rows}, "times as long as fwlab", line=line)


def _steady() -> str:
    """Draw the time of one decoding step of each layer, by number of past tokens."""
    series: dict[str, dict[str, list[float]]] = {}
    for row in _read(BENCH)["decoding"]:
        layer = row["layer"].removeprefix("fast weights, ")
        for at, time in row["microseconds"].items():
            series.setdefault(f"after {int(at):,}", {})[layer] = [time]
    title, log = "Time of a step after some tokens", (200, 500, 1000, 5000)
    return plots.chart("decoding", title, series, "µs", spec=",.0f", log=log)


#: Functions that draw the plots of the pages, by name.
PLOTS = {
    "losses": lambda: plots.losses(
        {row["name"].split(", ")[-1]: row["seeds"] for row in _mixers()},
        PUBLISHED["softmax"]["loss"],
    ),
    "erasing": lambda: _convolved(
        "erasing",
        "Layers that do not erase, and layers that do",
        *("sum", "delta without removal", "delta", "delta, DPFP"),
    ),
    "decay": lambda: _convolved(
        "decay",
        "Pairs of layers without and with a decay",
        *("delta", "gated", "delta, unit keys", "gated delta, unit keys"),
    ),
    "hybrids": _today,
    "longer": _longer,
    "carried": _carried,
    "gpu": lambda *ops: render("bars.html", **kernels.measured(*ops)),
    "kernels": lambda: render("peers.html", **kernels.measured()),
    "places": lambda: render("places.html", **kernels.places()),
    "fla": _fla,
    "steps": lambda: _kept("steps"),
    "peers": _others,
    "operations": _naive,
    "lengths": lambda: _kept("lengths"),
    "batches": lambda: _kept("batches"),
    "decoding": _steady,
    "generation": lambda: _kept("generation"),
    "look": lambda: _kept("look"),
    "cache": lambda: _kept("cache"),
}


def _kept(name: str) -> str:
    """Return a drawing from docs/images, which is not redrawn at each build."""
    svg = (ROOT / "docs" / "images" / f"{name}.svg").read_text("utf-8")
    title = re.search("<title>(.*?)</title>", svg)
    return plots.kept(svg, name, unescape(title[1]) if title else LOOKS)


# --- Numbers in the text ----------------------------------------------------


def _of(name: str, spec: str = ".2f", column: str = "loss", **wanted) -> str:
    """Format the median of a column over the selected points of an experiment."""
    return f"{median(_points(name)(**wanted)[column]):{spec}}"


# --- Files -------------------------------------------------------------------


def _points(name: str) -> Points:
    return results(name, quick=False)["points"]


def _read_all(kind: str) -> list[dict]:
    """Read all result files of a kind in the order of seeds, and add their names."""
    names = (path.stem for path in RESULTS.glob(f"{kind}-*.json"))
    # Sort by length first, so that seed 10 follows seed 9.
    names = sorted(names, key=lambda name: (len(name), name))
    return [{**_read(name), "file": name} for name in names]


def _runs() -> list[dict]:
    """Return the training runs, sorted by mixer and seed."""
    return sorted(_read_all(TRAINING), key=lambda run: [*MIXERS].index(_mixer(run)))


def _controls() -> list[dict]:
    """Return the runs of the model without a memory in the format of training runs."""
    points = _points(CONTROLS)(size="nanogpt", mixer="convolution")
    config = {"mixer": NO_MEMORY}
    return [{**p, "config": config, "validation_loss": p["loss"]} for p in points]


def _mixer(run: dict) -> str:
    return run["config"]["mixer"]


def _read(name: str) -> dict:
    return read_json(RESULTS / f"{name}.json")


#: Functions and values that the templates of the pages may use.
NUMBERS = {"of": _of, "results": _read}
NUMBERS |= {"mixers": _mixers, "stacks": _stacks, "versions": _versions}
NUMBERS |= {"runs": _runs, "frozen": _frozen, "origin": _origin}
