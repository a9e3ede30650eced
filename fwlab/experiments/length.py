"""Which layers make use of texts that are longer than those of training?

Trained with windows of 64 characters, tested with windows of up to 1024.
"""

import torch
from matplotlib.figure import Figure
from torch.nn import functional as F

from fwlab import plots
from fwlab.experiments import text
from fwlab.experiments.experiment import Claim, Experiment, Point, compared, select
from fwlab.experiments.text import LR
from fwlab.layers import SoftmaxAttention
from fwlab.models import MIXERS, Mixer
from fwlab.plots import FAST, OTHER, TRAINED
from fwlab.training import Config

LENGTHS = (64, 128, 256, 512, 1024)
#: Softmax attention that takes any length.
SOFTMAX = {
    "softmax, rotary": Mixer(lambda s: SoftmaxAttention(s.d_model, s.heads, rope=1)),
    "softmax, no positions": Mixer(lambda s: SoftmaxAttention(s.d_model, s.heads)),
}
#: All others that do, except feedback, which takes too long.
NAMES = (
    *(*SOFTMAX, "transformer-xl", "sum", "gated", "delta", "gated-delta"),
    *("kimi-delta", "fwp", "aft-conv"),
)


def points(quick: bool) -> list[Point]:
    size = "small" if quick else "nanogpt"
    return [
        {
            "mixer": name,
            "size": size,
            "corpus": "any" if quick else "shakespeare",
            "lr": LR[size],
            "seed": seed,
        }
        for name in NAMES
        for seed in (1, 2, 3)
    ]


def run(point: Point) -> Point:
    run = text.Run(*model(point), text.load(point["corpus"]))
    return text.train(run) | {"by_length": by_length(run)}


@torch.no_grad()
def by_length(run: text.Run) -> dict[str, float | None]:
    """The loss of the same characters in windows of each length.

    Each window begins with an empty state.
    """
    longest, losses = max(LENGTHS), {}
    count = (len(run.val_tokens) - 1) // longest * longest
    inputs, targets = run.val_tokens[:count].long(), run.val_tokens[1 : count + 1]
    for length in LENGTHS:
        batches = inputs.view(-1, length).split(8192 // length)
        logits = torch.cat([run.model(batch).flatten(0, 1) for batch in batches])
        losses[str(length)] = text.finite(
            F.cross_entropy(logits, targets.long()).item()
        )
    return losses


def model(point: Point) -> tuple[Config, Mixer]:
    """The configuration of a point, and how its model mixes."""
    mixer = {**MIXERS, **SOFTMAX}[point["mixer"]]
    return text.config(point, mixer), mixer


# --- What came out ------------------------------------------------------


def claims(points: list[Point]) -> list[Claim]:
    short, *_, long = LENGTHS
    return [
        compared(
            f"{name}: lower in windows of {long} than of {short}",
            "",
            [losses(points, name, length) for length in (long, short)],
        )
        for name in NAMES
    ]


def losses(points: list[Point], name: str, length: int) -> list[float | None]:
    """Losses of a mixer in windows of this length, of all seeds."""
    return [p["by_length"][str(length)] for p in select(points, mixer=name)]


def draw(points: list[Point]) -> Figure:
    """By how much the loss differs from that in windows as in training."""
    figure, axes = plots.grid(
        len(NAMES), "characters in a window", "change of the loss"
    )
    for ax, name in zip(axes, NAMES, strict=True):
        changes = [
            {"length": int(size), "loss": None if None in (loss, base) else loss - base}
            for p in select(points, mixer=name)
            for base in [p["by_length"][str(min(LENGTHS))]]
            for size, loss in p["by_length"].items()
        ]
        color = OTHER if name in SOFTMAX else FAST if "delta" in name else TRAINED
        plots.series(ax, changes, color, "o", "-", x="length")
        ax.set_title(name)
        ax.set_xscale("log", base=2)
        ax.set_xticks(LENGTHS, map(str, LENGTHS))
    return figure


EXPERIMENT = Experiment(
    name="length",
    title="Texts that are longer than those of training",
    source="ours",
    cost="quick: 5 min of one core; full: about 2 hours",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
)
