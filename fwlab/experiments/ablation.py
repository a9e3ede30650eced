"""What position codes and attention normalisation do to the delta rule.

Table 3 of Schlag et al. 2021, at a size that a processor can train.
"""

from itertools import combinations
from math import inf, log

from matplotlib.figure import Figure

from fwlab import plots
from fwlab.experiments import text
from fwlab.experiments.experiment import (
    Claim,
    Experiment,
    Point,
    compared,
    losses,
    select,
)
from fwlab.experiments.language_model import ROTARY_SOFTMAX
from fwlab.experiments.text import median_loss
from fwlab.models import Mixer
from fwlab.plots import FAST, INK
from fwlab.training import Config

#: Validation and test perplexity per word on WikiText-103 of the medium
#: model, with (position codes, attention normalisation).
PUBLISHED = {
    (1, 1): (30.4, 32.1),
    (0, 1): (29.2, 31.2),
    (1, 0): (29.7, 31.5),
    (0, 0): (28.1, 31.1),
}
NAMES = {
    (1, 1): "both",
    (0, 1): "normalisation alone",
    (1, 0): "positions alone",
    (0, 0): "neither",
}
#: Feature maps: the paper's Delta Network has ELU + 1.
MAPS = {"linear": "ELU + 1", "dpfp": "DPFP"}
#: The baseline, in place of a feature map: softmax attention.
ROTARY = "softmax, rotary positions"


def points(quick: bool) -> list[Point]:
    variants = [
        (map, *each) for map in (("linear",) if quick else MAPS) for each in NAMES
    ]
    names = ("map", "positions", "normalize")
    every = (*variants, (ROTARY, 0, 0))
    return text.points(quick, [dict(zip(names, each, strict=True)) for each in every])


def run(point: Point) -> Point:
    return text.train(text.Run(*model(point), text.load(point["corpus"])))


def model(point: Point) -> tuple[Config, Mixer]:
    """The configuration of a point, and how its model mixes."""
    map, normalize = point["map"], bool(point["normalize"])
    if map == ROTARY:
        mixer = ROTARY_SOFTMAX
    else:
        mixer = text.fast_weights("delta", map, normalize, bool(point["positions"]))
    return text.config(point, mixer), mixer


def claims(points: list[Point]) -> list[Claim]:
    size = "0.1" if points[0]["size"] == "small" else "0.8"
    every = []
    for map in _maps(points):
        ends = {each: losses(_variant(points, map, each)) for each in NAMES}
        for low, high in combinations(sorted(PUBLISHED, key=PUBLISHED.__getitem__), 2):
            sides = [ends[low], ends[high]]
            published = f"{PUBLISHED[low][0]}, {PUBLISHED[high][0]} (Table 3)"
            protocol = f"characters, {size} M parameters"
            if map != "linear":
                published = protocol = ""
            claim = f"{MAPS[map]}: {NAMES[low]} below {NAMES[high]}"
            every.append(compared(claim, published, sides, protocol=protocol))
        every.append(
            compared(
                f"{ROTARY}: below {MAPS[map]} with neither",
                "",
                [losses(points, map=ROTARY), ends[0, 0]],
            )
        )
    return every


def _maps(points: list[Point]) -> list[str]:
    return [map for map in MAPS if select(points, map=map)]


def _variant(points: list[Point], map: str, each: tuple[int, int]) -> list[Point]:
    return select(points, map=map, positions=each[0], normalize=each[1])


def above(ends: list[float | None], without: float) -> list[float | None]:
    """Losses in per cent above the one with neither."""
    return [None if x is None else 100 * (x / without - 1) for x in ends]


def draw(points: list[Point]) -> Figure:
    maps = _maps(points)
    figure, axes = plots.panels(2.2 * len(maps) + 0.6, len(maps), sharex=True)
    for ax, map in zip(axes, maps, strict=True):
        without = median_loss(_variant(points, map, (0, 0))) or inf
        ends = {
            name: losses(_variant(points, map, each)) for each, name in NAMES.items()
        }
        ends[ROTARY] = losses(points, map=ROTARY)
        ours = {name: above(seeds, without) for name, seeds in ends.items()}
        plots.rows(ax, ours, FAST, "o", "ours")
        for i, (marker, split) in enumerate((("x", "valid"), ("+", "test"))):
            theirs = {
                name: above([log(PUBLISHED[each][i])], log(PUBLISHED[0, 0][i]))
                for each, name in NAMES.items()
            }
            theirs[ROTARY] = []  # not in the paper
            plots.rows(ax, theirs, INK, marker, f"published, {split}")
        ax.set_title(MAPS[map])
    axes[-1].set_xlabel("loss above that with neither, %")
    plots.legend(figure, axes[0], 3)
    return figure


EXPERIMENT = Experiment(
    name="ablation",
    title="Positions and attention normalisation for the delta rule",
    source="Schlag et al. 2021, Table 3",
    cost="quick: 2 min of one core; full: 50 min",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: text.setup(model(point)[0]),
)
