"""Explain why FAVOR+ never left a loss of 0.5: its keys are too long.

The features of FAVOR+ carry the factor exp(-|k|^2 / 2), and in setting 1
keys get longer with the number of symbols. Once the denominator of the sum
rule is far below the epsilon that is added to it, everything retrieved is
0, the loss is 0.5, and there is no gradient. Without the epsilon, the layer
learns nothing either.
"""

from math import log10

import torch
from frame import Point, Points, every, main
from matplotlib.figure import Figure
from synthetic import by_size, near, protocol

from fwlab import plots
from fwlab.data.retrieval import FIGURE_2, retrieval
from fwlab.models.retriever import EPSILON, SETUP, Retriever, d_dot, train
from fwlab.plots import FAST, INK, OTHER, WRONG

TITLE = "Why FAVOR+ stays at a loss of 0.5"
SOURCE = "ours; Schlag et al. 2021, Fig. 2 (FAVOR+)"
COST = "quick: 3 min of one core; full: 14 min"

#: Feature map, epsilon and plot style of each variant.
PLAIN, BARE, STABLE = "as published", "without epsilon", "stabilised"
VARIANTS = {
    PLAIN: ("favor-64", EPSILON, (WRONG, "s", "-")),
    BARE: ("favor-64", 0.0, (OTHER, "^", ":")),
    STABLE: ("favor-64-stable", 0.0, (FAST, "o", "--")),
}
PUBLISHED = {S: FIGURE_2["favor-64"][S] for S in (20, 40, 60, 80, 100, 140)}
#: Number of keys from which on the published loss is 0.5, to four digits.
STUCK = 100
#: Optimiser steps of the quick and of the full version.
QUICK, FULL = 800, 3000


def grid(quick: bool) -> list[Point]:
    return [
        {
            "variant": variant,
            "rule": "sum",
            "map": phi,
            "S": S,
            "d_key": 64,
            "epsilon": epsilon,
            "seed": seed,
            "budget": QUICK if quick else FULL,
        }
        for S in ((40, STUCK) if quick else PUBLISHED)
        for seed in (1, 2, 3)
        for variant, (phi, epsilon, _) in VARIANTS.items()
    ]


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    settings = (point[name] for name in ("S", "d_key", "rule", "map", "epsilon"))
    model = Retriever(*settings)
    size = denominator(model)
    trained = train(model, point["S"], repeat=False, budget=point["budget"])
    features = d_dot(point["map"], point["d_key"])
    return {"d_dot": features, "log10_denominator": size, **trained}


@torch.no_grad()
def denominator(model: Retriever) -> float:
    """Return log10 of the median denominator z . phi(q) before training, in float64."""
    model = model.double()
    pairs = retrieval(20, model.symbols)
    q, k, _ = model._project(pairs.keys, pairs.values, pairs.keys)
    median = (q @ k.sum(1)[..., None]).median().item()
    model.float()
    return round(log10(median), 2)


def claims(points: Points):
    if len(points) < len(grid(points[0]["budget"] == QUICK)):
        return  # The claims need all sizes.
    early = Points(p for p in points if p["S"] < STUCK)
    late = Points(p for p in points if p["S"] >= STUCK).by("variant")
    yield every(
        f"as published, the loss stays at 0.5 from S = {STUCK} on",
        by_size(late[PLAIN]),
        lambda loss: abs(loss - 0.5) < 5e-4,
        "0.5000 (Fig. 2)",
        protocol=protocol(points),
    )
    text, some = f"as published, below S = {STUCK}", early(variant=PLAIN)
    yield near(text, some, PUBLISHED, "loss", 0.05, "Fig. 2", "+.3f")
    yield every(
        "there log10 of the denominator is far below that of epsilon, -6",
        by_size(late[PLAIN], "log10_denominator"),
        lambda size: size < -8,
        spec=".1f",
    )
    text, losses = "stabilised, training leaves 0.5", by_size(late[STABLE])
    yield every(text, losses, lambda loss: loss < 0.49, spec=".3f")
    text = "without epsilon, the loss is not below 0.5 either"
    yield every(text, by_size(late[BARE]), lambda loss: loss >= 0.5, spec=".3f")


def draw(points: Points) -> Figure:
    figure, (ax,) = plots.panels(3.4)
    for variant, (_, _, look) in VARIANTS.items():
        plots.series(ax, points(variant=variant), *look, variant)
    plots.published(ax, PUBLISHED, WRONG, "published")
    ax.axhline(0.5, color=INK, linewidth=1, linestyle=(0, (4, 2)))
    ax.set(xlabel="number of keys $S$", ylabel="loss", ylim=(0, None))
    plots.legend(figure, ax, columns=2)
    return figure


points, setup = grid, SETUP

if __name__ == "__main__":
    main(__file__)
