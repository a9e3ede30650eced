"""Which layers make use of texts that are longer than those of training?

Trained with windows of 64 characters, tested with windows of up to 1024.
"""

from math import inf
from statistics import median

import torch
from matplotlib.figure import Figure
from torch.nn import functional as F

from fwlab import plots
from fwlab.experiments import text
from fwlab.experiments.experiment import (
    Claim,
    Experiment,
    Point,
    compared,
    select,
)
from fwlab.experiments.language_model import ROTARY_SOFTMAX
from fwlab.layers import SoftmaxAttention
from fwlab.models import MIXERS, Mixer
from fwlab.plots import FAST, OTHER
from fwlab.training import Config

LENGTHS = (64, 128, 256, 512, 1024)
#: Characters that are read at once.
READ = 8192
#: The delta rule with the keys of the gated delta rule: only the decay is missing.
UNIT = "delta, unit keys"
#: Softmax attention that takes any length, and this delta rule.
OWN = {
    "softmax-rotary": ROTARY_SOFTMAX,
    "softmax, no positions": Mixer(lambda s: SoftmaxAttention(s.d_model, s.heads)),
    UNIT: text.fast_weights("delta", "identity"),
}
#: Those of the quick version, and all others that take any length. What softmax
#: attention and the other forms of AFT learn for each place ends with the window.
QUICK = ("softmax-rotary", "transformer-xl", "sum", "gated", "delta", "gated-delta")
OTHERS = (
    *("softmax, no positions", "kimi-delta", "fwp", "aft-conv", UNIT),
    *("gated-delta-2", "comba", "implicit-delta", "delta-product", "rwkv7"),
    *("feedback", "feedback-shared"),
)
NAMES = QUICK + OTHERS


def points(quick: bool) -> list[Point]:
    size = {} if quick else {"size": "small-800", "lr": text.LR["small"]}
    names = QUICK if quick else NAMES
    return text.points(quick, [{"mixer": name, **size} for name in names])


def run(point: Point) -> Point:
    run = text.Run(*model(point), text.load(point["corpus"]))
    return text.train(run) | by_length(run)


@torch.no_grad()
def by_length(run: text.Run) -> Point:
    """The loss of the same characters in windows of each length.

    Each window begins with an empty state.
    """
    count = (len(run.val_tokens) - 1) // max(LENGTHS) * max(LENGTHS)
    inputs, targets = (run.val_tokens[at : at + count].long() for at in (0, 1))
    found: Point = {}
    for length in LENGTHS:
        parts = inputs.view(-1, length).split(READ // length)
        logits = torch.cat([run.model(part).flatten(0, 1) for part in parts])
        loss = F.cross_entropy(logits, targets).item()
        found[f"loss_{length}"] = text.finite(loss)
    return found


def model(point: Point) -> tuple[Config, Mixer]:
    """The configuration of a point, and how its model mixes."""
    mixer = (MIXERS | OWN)[point["mixer"]]
    return text.config(point, mixer), mixer


# --- What came out ------------------------------------------------------


def claims(points: list[Point]) -> list[Claim]:
    """Seed by seed: the same model reads the same characters."""
    short, *_, long = LENGTHS

    def changes(name: str) -> list[float | None]:
        return [change(p, long) for p in select(points, mixer=name)]

    every = [
        compared(
            f"{name}: lower in windows of {long} than of {short}",
            "",
            [changes(name)],
            lambda x: x < 0,
            spec="+.3f",
        )
        for name in dict.fromkeys(p["mixer"] for p in points)
    ]
    if pure := changes(UNIT):
        said = f"change up to {long}: gated-delta below {UNIT}, which has no decay"
        every.append(compared(said, "", [changes("gated-delta"), pure], spec="+.3f"))
    return every


def change(point: Point, length: int) -> float | None:
    """By how much the loss differs from that in windows as in training."""
    base, loss = (point[f"loss_{n}"] for n in (min(LENGTHS), length))
    return None if None in (base, loss) else loss - base


def draw(points: list[Point]) -> Figure:
    ends: dict[str, list[float]] = {}
    for p in points:
        end = change(p, max(LENGTHS))
        ends.setdefault(p["mixer"], []).append(inf if end is None else end)
    names = sorted(ends, key=lambda name: median(ends[name]))
    labels = "characters in a window", "change of loss"
    figure, axes = plots.grid(len(names), *labels, height=1.7)
    for ax, name in zip(axes, names, strict=True):
        changes = [
            {"length": n, "loss": change(p, n)}
            for p in select(points, mixer=name)
            for n in LENGTHS
        ]
        others = ("softmax", "transformer", "aft", "feedback")
        color = OTHER if name.startswith(others) else FAST
        plots.series(ax, changes, color, "o", "-", x="length")
        ax.set_title(name)
        ax.set_xscale("log", base=2)
        ax.set_xticks(LENGTHS, [*map(str, LENGTHS)])
        # Small gains are seen beside large losses.
        ax.set_yscale("symlog", linthresh=0.02)
        ax.set_yticks((-0.02, 0, 0.02, 0.2), ("−0.02", "0", "0.02", "0.2"))
    return figure


EXPERIMENT = Experiment(
    name="length",
    title="Texts that are longer than those of training",
    source="ours, after Press et al. 2022",
    cost="quick: 3 min of one core; full: 26 min",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: text.setup(model(point)[0]),
)
