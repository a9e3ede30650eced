"""Fills the pages of results: Findings, Speed and Tables.

Tables of docs/results/*.json go in place of `<!-- results: TABLE -->`, and plots of the
same files and of experiments in place of `<!-- plot: PLOT -->`, as does the picture that
`fwlab look` has left in docs/images. `{{ ... }}` are numbers. Each function here reads
the values of a table, and docs/templates/results/TABLE.html lays them out.
"""

import re
import sys
from collections.abc import Callable
from itertools import groupby
from statistics import mean, median

import crossings
import plots
from repository import ROOT
from templates import TEMPLATES, render

from fwlab.files import read_json
from fwlab.models import MIXERS
from fwlab.plots import FAST, OTHER, TRAINED

sys.path.insert(0, str(ROOT / "docs" / "reproduce"))
from frame import Points, results

RESULTS = ROOT / "docs" / "results"
PAGES = ("results.md", "results/speed.md", "results/tables.md")
TRAINING, HYBRIDS = "nanogpt-cpu", "hybrid-cpu"
BENCH, PEERS, GPU = "bench-cpu", "peers-cpu", "gpu-nvidia-h200"
#: The results that have the control without a memory, and its name in tables and plots.
CONTROLS, NO_MEMORY = "language-model", "convolution alone, no memory"
LENGTHS, BUSY, STEPS = "lengths-cpu", "busy-cpu", "steps-cpu"
PUBLISHED_MODELS, GENERATION = "published-cpu", "generation-cpu"
LOOK = ROOT / "docs" / "images" / "look.svg"
LOOKS = (
    "Five panels over the same two lines of text, with a row for each of 16 heads: "
    "write strength; decay; norm of the fast weights; the share kept of the write at "
    "the first Romeo, which is nearly gone at the second one; and half-lives."
)
PLOT = re.compile(r"<!-- plot: (\S+) -->")
TABLE = re.compile(r"<!-- results: (\S+) -->")
#: The loss that others published for a mixer.
PUBLISHED = {
    "softmax": {
        "loss": 1.88,
        "name": "nanoGPT",
        "url": "https://github.com/karpathy/nanoGPT",
    }
}


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri not in PAGES:
        return markdown
    markdown = TEMPLATES.from_string(markdown).render(NUMBERS)
    return TABLE.sub(lambda mark: _table(mark[1]), markdown)


def on_page_content(html, page, config, files):
    """Plots are added here: converting Markdown would change a drawing."""
    if page.file.src_uri not in (*PAGES, "published.md"):
        return html
    return PLOT.sub(lambda mark: PLOTS[mark[1]](), html)


def _table(name: str) -> str:
    file, values = TABLES[name]
    run = _read(file) if file else {}
    return render(f"results/{name}.html", file=file, run=run, **values(run))


# --- Tables ----------------------------------------------------------------

SPEED = ("tokens_per_second", "peak_mib", "operators", "state_size")


def _comparison(bench: dict) -> dict:
    """One row per mixer: the losses of all its seeds, and its speed."""
    speed = {row["mixer"]: row for row in bench["mixers"]}
    rows = []
    for mixer, group in groupby([*_runs(), *_controls()], _mixer):
        runs = list(group)
        rows.append(
            {
                "mixer": mixer,
                **_losses(runs),
                "published": PUBLISHED.get(mixer),
                "parameters": runs[0]["parameters"],
                "speed": {name: speed.get(mixer, {}).get(name) for name in SPEED},
            }
        )
    return {"rows": sorted(rows, key=lambda row: row["loss"])}


def _hybrids(run: dict) -> dict:
    """Layers as published and hybrid stacks, best first; a row has all its seeds."""
    # Their baseline: attention that compares by distance.
    runs = [*_read_all(HYBRIDS), *(r for r in _runs() if _mixer(r) == "transformer-xl")]
    rows = []
    for name, group in groupby(sorted(runs, key=_options), _options):
        same = list(group)
        rows.append({"name": name, **_losses(same), "run": same[0]})
    return {"rows": sorted(rows, key=lambda row: row["loss"])}


def _losses(runs: list[dict]) -> dict:
    seeds = [run["validation_loss"] for run in runs]
    return {"loss": mean(seeds), "seeds": seeds}


def _options(run: dict) -> str:
    """What its command says of the model, without the sizes that all share."""
    return re.sub(
        r"^fwlab train --mixer | --(corpus|seed|out|d-ff) \S+", "", run["command"]
    )


def _training(run: dict) -> dict:
    """Every run with its command, and the curves."""
    runs = _runs()
    return {"runs": runs, "steps": [step for step, *_ in runs[0]["curve"]]}


def _operations(run: dict) -> dict:
    by_case = groupby(run["rows"], lambda row: (row["case"], row["shape"]))
    cases = [list(rows) for _, rows in by_case]
    for rows in cases:
        (ours,) = (row["peak_mib"] for row in rows if row["side"] == "efficient")
        for row in rows:
            row["times_memory"] = row["peak_mib"] / ours
    return {"cases": cases}


def _steps(run: dict) -> dict:
    """By mixer, how many steps of softmax one of its steps takes."""
    rows: dict[str, list[float]] = {}
    for row in run["steps"]:
        rows.setdefault(row["mixer"], []).append(row["softmax_steps"])
    lengths = dict.fromkeys(row["T"] for row in run["steps"])
    return {"rows": rows, "titles": [f"T {length:,}" for length in lengths]}


def _lengths(run: dict) -> dict:
    """Milliseconds at some lengths, and where they cross those of others."""
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
    }


def _decoding(run: dict) -> dict:
    rows = run["decoding"]
    for row in rows:
        times = row["microseconds"] = {
            int(at): time for at, time in row["microseconds"].items()
        }
        row["growth"] = times[max(times)] / times[min(times)]
    return {"rows": rows, "positions": list(rows[0]["microseconds"])}


def _generation(run: dict) -> dict:
    """Tokens per second at some contexts, and where they cross nanoGPT's."""
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
    return {"rows": rows, "titles": [f"at {at:,}" for at in shown]}


def _gpu(run: dict) -> dict:
    """By case, each version with its time in multiples of the kernel's."""
    cases = [list(rows) for _, rows in groupby(run["rows"], lambda row: row["case"])]
    for rows in cases:
        (ours,) = (row["ms"] for row in rows if row["side"] == "triton")
        for row in rows:
            row["times_triton"] = row["ms"] / ours
    return {"cases": cases}


#: The file of each table, if all of it is in one, and its values.
TABLES: dict[str, tuple[str, Callable[[dict], dict]]] = {
    "comparison": (BENCH, _comparison),
    "hybrids": ("", _hybrids),
    "training": ("", _training),
    "operations": (BENCH, _operations),
    "peers": (PEERS, lambda run: {"rows": run["peers"]}),
    "steps": (STEPS, _steps),
    "lengths": (LENGTHS, _lengths),
    "decoding": (BENCH, _decoding),
    "generation": (GENERATION, _generation),
    "busy": (BUSY, lambda run: {"rows": run["busy"]}),
    "published": (PUBLISHED_MODELS, lambda run: {"rows": run["rows"]}),
    "gpu": (GPU, _gpu),
}


# --- Plots -----------------------------------------------------------------

#: What the versions of a kernel are called in a plot.
SIDES = {"triton": "ours", "fla": "flash-linear-attention", "efficient": "PyTorch"}
LOSS = "nats per character"


def _convolved(name: str, title: str, *layers: str) -> str:
    """Losses of layers, without and with a convolution."""
    points = _points("replacing")
    series = {
        entry: {layer: points(layer=layer, conv_size=size)["loss"] for layer in layers}
        for entry, size in (("bare", 0), ("with a convolution", 4))
    }
    return plots.chart(name, title, series, LOSS)


def _today() -> str:
    """Layers of today and stacks with attention, beside bare ones and no memory."""
    rows = {_stack(row["name"]): row["seeds"] for row in _hybrids({})["rows"]}
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
    """How much the loss changes in windows sixteen times as long as in training."""
    change = {
        mixer: [p["loss_1024"] - p["loss_64"] for p in own]
        for mixer, own in _points("length").by("mixer").items()
    }
    rows = dict(sorted(change.items(), key=lambda row: median(row[1])))
    title = "Change of the loss from windows of 64 to windows of 1,024 characters"
    look = {"spec": "+.2f", "line": (0, "as in training")}
    return plots.chart("longer", title, {"": rows}, "change of loss", **look)


def _carried() -> str:
    """Losses with a state that goes through the whole text, and in windows."""
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


def _bars() -> str:
    """Milliseconds of the longest sequences, by version."""
    series: dict[str, dict[str, list[float]]] = {name: {} for name in SIDES.values()}
    for row in _read(GPU)["rows"]:
        if row["shape"]["T"] in (2048, 4096) and not row["op"].startswith("dpfp"):
            series[SIDES[row["side"]]][_operation(row)] = [row["ms"]]
    title = "Forward and backward pass on an H200"
    looks = [(FAST, ""), (OTHER, ""), (TRAINED, "")]
    return plots.chart("gpu", title, series, "ms", looks=looks, bars=True)


def _fla() -> str:
    """The time of flash-linear-attention in multiples of ours, by length."""
    series: dict[str, dict[str, list[float]]] = {}
    for row in (row for rows in _gpu(_read(GPU))["cases"] for row in rows):
        if row["side"] == "fla":
            length = series.setdefault(f"T {row['shape']['T']:,}", {})
            length[_operation(row)] = [row["times_triton"]]
    title = "The time of flash-linear-attention on an H200"
    unit, line = "times as long as ours", (1, "ours")
    return plots.chart("fla", title, series, unit, spec=".1f", line=line)


def _operation(row: dict) -> str:
    name = row["op"].replace("aft_", "AFT-")
    return name.removesuffix("_rule").replace("_", " ")


def _shares() -> str:
    """Steps of softmax attention in one of another mixer, by window."""
    table = _steps(_read(STEPS))
    names = ("sum", "gated", "delta", "gated-delta", "kimi-delta", "transformer-xl")
    series = {
        length: {name: [table["rows"][name][at]] for name in names}
        for at, length in enumerate(table["titles"])
    }
    title, unit = "A training step of each mixer", "steps of softmax attention"
    return plots.chart("steps", title, series, unit, spec=".1f", line=(1, "one"))


def _naive() -> str:
    """Time and memory of the naive form of each operation, at the longest sequences."""
    rows = {}
    for case in sorted(
        _operations(_read(BENCH))["cases"], key=lambda c: c[0]["shape"]["T"]
    ):
        others = [row for row in case if row["side"] != "efficient"]
        naive = [row for row in others if row["side"].startswith("naive")]
        rows[case[0]["case"]] = (naive or others)[-1]
    rows = sorted(rows.values(), key=lambda row: -row["times_slower"])
    series = {
        entry: {f"{r['case']}, T {r['shape']['T']:,}": [r[column]] for r in rows}
        for entry, column in (("time", "times_slower"), ("memory", "times_memory"))
    }
    title, unit = "What the naive form needs", "naive / efficient"
    look = {"spec": ".1f", "line": (1, "equal"), "log": (0.5, 1, 2, 5, 10, 20, 50)}
    return plots.chart("operations", title, series, unit, **look)


def _others() -> str:
    """The time of peers divided by that of fwlab."""
    rows = {}
    for row in _read(PEERS)["peers"]:
        if "ratio" in row:
            shape = row["shape"]
            size = f", T {shape['T']:,}" if "T" in shape else ""
            wide = " × 4" * (shape.get("batch") == 4 and shape.get("width") == 64)
            rows[f"{row['work']}{size}{wide}"] = [row["ratio"]]
    title, line = "The time of others, in multiples of fwlab's", (1, "fwlab")
    return plots.chart("peers", title, {"": rows}, "times as long as fwlab", line=line)


def _batches() -> str:
    """Milliseconds per sequence, alone and in the largest batch."""
    times = crossings.times_by_form(_read(LENGTHS)["batches"], "batch")
    series = {
        entry: {op: [forms[crossings.FWLAB][n] / n] for op, forms in times.items()}
        for entry, n in (("batch 1", 1), ("batch 32", 32))
    }
    title, unit, log = "Time of a sequence", "ms per sequence, T 512", (1, 2, 5, 10, 20)
    return plots.chart("batches", title, series, unit, spec=".1f", log=log)


def _steady() -> str:
    """Microseconds of a step of each layer, by the tokens before it."""
    table = _decoding(_read(BENCH))
    series = {
        f"after {at:,}": {
            row["layer"].removeprefix("fast weights, "): [row["microseconds"][at]]
            for row in table["rows"]
            if at in row["microseconds"]
        }
        for at in table["positions"]
    }
    title, log = "Time of a step after some tokens", (200, 500, 1000, 5000)
    return plots.chart("decoding", title, series, "µs", spec=",.0f", log=log)


#: The plots of the pages.
PLOTS = {
    "losses": lambda: plots.losses(
        [*_runs(), *_controls("no memory")],
        {mixer: by["loss"] for mixer, by in PUBLISHED.items()},
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
    "gpu": _bars,
    "fla": _fla,
    "steps": _shares,
    "peers": _others,
    "curves": lambda: plots.curves(_runs()),
    "operations": _naive,
    "lengths": lambda: plots.lengths(_read(LENGTHS)),
    "batches": _batches,
    "decoding": _steady,
    "generation": lambda: plots.generation(_read(GENERATION)),
    "look": lambda: plots.kept(LOOK.read_text("utf-8"), "look", LOOKS),
}


# --- Numbers of the text ----------------------------------------------------


def _of(name: str, spec: str = ".2f", column: str = "loss", **wanted) -> str:
    """The median of an experiment's points."""
    return f"{median(_points(name)(**wanted)[column]):{spec}}"


def _step(mixer: str, length: int) -> str:
    """Steps of softmax attention in one of this mixer."""
    rows = _read(STEPS)["steps"]
    (n,) = (r["softmax_steps"] for r in rows if (r["mixer"], r["T"]) == (mixer, length))
    return f"{n:.1f}"


def _threads(load: str, slow: str, fast: str) -> str:
    """How many times as long a step takes with one setting of threads as with another."""
    cases = groupby(_read(BUSY)["busy"], lambda row: (row["mixer"], row["tokens"]))
    times = [{row["setting"]: row[load] for row in rows} for _, rows in cases]
    ratios = [each[slow] / each[fast] for each in times]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


NUMBERS = {"of": _of, "step": _step, "threads": _threads}


# --- Files -------------------------------------------------------------------


def _points(name: str) -> Points:
    return results(name, quick=False)["points"]


def _read_all(kind: str) -> list[dict]:
    """Runs by seed, each with the name of its file."""
    names = (path.stem for path in RESULTS.glob(f"{kind}-*.json"))
    # Seed 10 comes after seed 9.
    names = sorted(names, key=lambda name: (len(name), name))
    return [{**_read(name), "file": name} for name in names]


def _runs() -> list[dict]:
    """The training runs, by mixer and seed."""
    return sorted(_read_all(TRAINING), key=lambda run: [*MIXERS].index(_mixer(run)))


def _controls(name: str = NO_MEMORY) -> list[dict]:
    """The runs without a memory, as training runs."""
    points = _points(CONTROLS)(size="nanogpt", mixer="convolution")
    return [
        {**p, "config": {"mixer": name}, "validation_loss": p["loss"]} for p in points
    ]


def _mixer(run: dict) -> str:
    return run["config"]["mixer"]


def _read(name: str) -> dict:
    return read_json(RESULTS / f"{name}.json")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


TEMPLATES.filters["duration"] = _duration
