"""What position codes and attention normalisation do to the delta rule.

Table 3 of Schlag et al. 2021, at a size that a processor can train.
"""

from collections.abc import Iterator
from itertools import combinations
from math import log

import text
from frame import Claim, Experiment, Numbers, Point, Points, main, order
from matplotlib.figure import Figure

from fwlab import plots
from fwlab.models import Mixer
from fwlab.plots import FAST, INK

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
    maps = ["linear"] if quick else MAPS
    variants = [(map, *each) for map in maps for each in NAMES]
    settings = [
        {"map": map, "positions": positions, "normalize": normalize}
        for map, positions, normalize in (*variants, (ROTARY, 0, 0))
    ]
    return text.points(quick, settings)


def mixer(point: Point) -> Mixer:
    if point["map"] == ROTARY:
        return text.ROTARY_SOFTMAX
    options = bool(point["normalize"]), bool(point["positions"])
    return text.fast_weights("delta", point["map"], *options)


def by_map(points: Points) -> dict[str, dict[tuple[int, int], Numbers]]:
    """Return the losses of each variant of each feature map that has run."""
    return {
        map: {
            (positions, normalize): points(
                map=map, positions=positions, normalize=normalize
            )["loss"]
            for positions, normalize in NAMES
        }
        for map in MAPS
        if points(map=map)
    }


def claims(points: Points) -> Iterator[Claim]:
    size = "0.1" if points[0]["size"] == "small" else "0.8"
    for map, ends in by_map(points).items():
        for low, high in combinations(sorted(PUBLISHED, key=PUBLISHED.__getitem__), 2):
            published = f"{PUBLISHED[low][0]}, {PUBLISHED[high][0]} (Table 3)"
            protocol = f"characters, {size} M parameters"
            if map != "linear":
                published = protocol = ""
            claim = f"{MAPS[map]}: {NAMES[low]} below {NAMES[high]}"
            yield order(claim, [ends[low], ends[high]], published, protocol=protocol)
        claim = f"{ROTARY}: below {MAPS[map]} with neither"
        yield order(claim, [points(map=ROTARY)["loss"], ends[0, 0]])


def above(losses: Numbers, without: float) -> Numbers:
    """Return losses in per cent above the one with neither."""
    return [None if x is None else 100 * (x / without - 1) for x in losses]


def draw(points: Points) -> Figure:
    maps = by_map(points)
    figure, axes = plots.panels(2.2 * len(maps) + 0.6, len(maps), sharex=True)
    for ax, (map, ends) in zip(axes, maps.items(), strict=True):
        without = text.middle(ends[0, 0])
        ours = {name: above(ends[each], without) for each, name in NAMES.items()}
        ours[ROTARY] = above(points(map=ROTARY)["loss"], without)
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
    run=lambda point: text.train(text.new_run(point, mixer(point))),
    claims=claims,
    draw=draw,
    setup=lambda point: text.setup(point, mixer(point)),
)

if __name__ == "__main__":
    main(EXPERIMENT)
