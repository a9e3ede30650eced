"""Train the delta rule with and without position codes and attention normalisation.

Table 3 of Schlag et al. 2021, at a size that a processor can train.
"""

from itertools import combinations
from math import isinf, log

import text
from frame import Numbers, Point, Points, holds, main
from text import middle, percent_above

from fwlab import plots
from fwlab.layers import FastWeightAttention
from fwlab.models import Mixer
from fwlab.plots import FAST, INK

TITLE = "Positions and attention normalisation for the delta rule"
SOURCE = "Schlag et al. 2021, Table 3"
COST = "quick: 2 min of one core; full: 50 min"

#: Variants by (position codes, attention normalisation): name, published perplexities.
#: The perplexities of medium models on WikiText-103 are for validation and test.
VARIANTS = {
    (1, 1): ("both", 30.4, 32.1),
    (0, 1): ("normalisation alone", 29.2, 31.2),
    (1, 0): ("positions alone", 29.7, 31.5),
    (0, 0): ("neither", 28.1, 31.1),
}
#: Feature maps by name. The paper's Delta Network uses ELU + 1.
MAPS = {"linear": "ELU + 1", "dpfp": "DPFP"}
#: Variants with neither positions nor normalisation, not even of keys and queries.
RAW = {f"{name}, keys not divided": map for map, name in MAPS.items()}
#: Baselines, whose names replace the feature map in settings and results.
ROTARY = "softmax, rotary positions"
BASELINES = text.CONTROLS | {ROTARY: text.ROTARY_SOFTMAX}


def points(quick: bool) -> list[Point]:
    variants = [(map, *each) for map in MAPS for each in VARIANTS]
    if quick:
        variants = variants[:4]  # The quick version has only one feature map.
    names = ("map", "positions", "normalize")
    settings = [dict(zip(names, x, strict=True)) for x in variants]
    others = [*BASELINES, *([*RAW][:1] if quick else RAW)]
    settings += [dict(zip(names, (x, 0, 0), strict=True)) for x in others]
    return text.points(quick, settings)


def mixer(point: Point) -> Mixer:
    if point["map"] in BASELINES:
        return BASELINES[point["map"]]
    if point["map"] in RAW:
        phi = text.MAPS[RAW[point["map"]]]
        return Mixer(
            lambda s: FastWeightAttention(
                s.d_model, s.heads, phi(s.d_model // s.heads), "delta", None, False
            )
        )
    options = bool(point["normalize"]), bool(point["positions"])
    return text.fast_weights("delta", point["map"], *options)


def by_map(points: Points) -> dict[str, dict[str, Numbers]]:
    """Return the losses of each feature map that has results, by variant name."""
    return {
        map: {
            name: points(map=map, positions=positions, normalize=normalize)["loss"]
            for (positions, normalize), (name, *_) in VARIANTS.items()
        }
        for map in MAPS
        if points(map=map)
    }


def claims(points: Points):
    size = "0.1" if points[0]["size"] == "small" else "0.8"
    best_first = sorted(VARIANTS.values(), key=lambda variant: variant[1])
    for map, ends in by_map(points).items():
        for (low, better, _), (high, worse, _) in combinations(best_first, 2):
            published = f"{better}, {worse} (Table 3)" if map == "linear" else ""
            protocol = f"{text.PROTOCOL}, {text.WINDOWS}, {size} M parameters"
            claim = f"{MAPS[map]}: {low} below {high}"
            sides = [ends[low], ends[high]]
            yield text.below(
                claim, sides, published, protocol=protocol if published else ""
            )
        (raw,) = (name for name, own in RAW.items() if own == map)
        yield holds(
            f"{raw}: training diverges",
            points(map=raw)["loss"],
            isinf,
            "diverged (at Table 3)",
            protocol=f"{text.PROTOCOL}, {size} M parameters",
        )
        for name in BASELINES:
            sides = [points(map=name)["loss"], ends["neither"]]
            claim = f"{name}: below {MAPS[map]} with neither"
            yield text.below(claim, sides)


def draw(points: Points):
    maps = by_map(points)
    figure, axes = plots.panels(2.2 * len(maps) + 0.6, len(maps), sharex=True)
    for ax, (map, ends) in zip(axes, maps.items(), strict=True):
        without = middle(ends["neither"])
        ends |= {name: points(map=name)["loss"] for name in BASELINES}
        ours = {name: percent_above(losses, without) for name, losses in ends.items()}
        plots.rows(ax, ours, FAST, "o", "ours")
        for i, marker, split in ((1, "x", "valid"), (2, "+", "test")):
            without = log(VARIANTS[0, 0][i])
            theirs = {
                name: percent_above([log(perplexities[i - 1])], without)
                for name, *perplexities in VARIANTS.values()
            }
            theirs |= {name: [] for name in BASELINES}  # The paper omits baselines.
            plots.rows(ax, theirs, INK, marker, f"published, {split}")
        ax.set_title(MAPS[map])
    axes[-1].set_xlabel("loss above that with neither, %")
    plots.legend(figure, axes[0], 3)
    return figure


run, setup = text.experiment(mixer)

if __name__ == "__main__":
    main(__file__)
