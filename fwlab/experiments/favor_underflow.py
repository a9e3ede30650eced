"""Why FAVOR+ never left a loss of 0.5: its keys are too long.

The features of FAVOR+ carry the factor exp(-|k|^2 / 2), and in setting 1
keys get longer with the number of symbols. Once the denominator of the sum
rule is far below the epsilon that is added to it, everything retrieved is
0, the loss is 0.5, and there is no gradient. Without the epsilon, the layer
learns nothing either.
"""

from math import log10

import torch
from matplotlib.figure import Figure

from fwlab import plots
from fwlab.experiments.experiment import Claim, Experiment, Point, select, throughout
from fwlab.experiments.retrieval import (
    EPSILON,
    SETUP,
    Retriever,
    d_dot,
    retrieval,
    train,
)
from fwlab.plots import FAST, INK, OTHER, WRONG

#: Feature map and epsilon of each variant.
PLAIN = "as published"
VARIANTS = {
    PLAIN: ("", EPSILON),
    "without epsilon": ("", 0.0),
    "stabilised": ("-stable", 0.0),
}
#: Figure 2 of the paper, m = 64: final losses in the authors' logs.
PUBLISHED = {20: 0.13, 40: 0.2982, 60: 0.4926, 80: 0.5002, 100: 0.5, 140: 0.5}
#: Optimiser steps of the quick version.
QUICK = 800
#: From here on the published loss is 0.5, to four digits.
STUCK = 100


def _sizes(quick: bool) -> tuple[int, ...]:
    return (40, STUCK) if quick else tuple(PUBLISHED)


def points(quick: bool) -> list[Point]:
    return [
        {
            "variant": variant,
            "rule": "sum",
            "map": f"favor-64{suffix}",
            "S": S,
            "d_key": 64,
            "epsilon": epsilon,
            "seed": seed,
            "budget": QUICK if quick else 3000,
        }
        for S in _sizes(quick)
        for seed in (1, 2, 3)
        for variant, (suffix, epsilon) in VARIANTS.items()
    ]


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    model = Retriever(
        point["S"], point["d_key"], point["rule"], point["map"], point["epsilon"]
    )
    size = _denominator(model)
    trained = train(model, point["S"], repeat=False, budget=point["budget"])
    about = {"d_dot": d_dot(point["map"], point["d_key"]), "log10_denominator": size}
    return {**about, **trained}


@torch.no_grad()
def _denominator(model: Retriever) -> float:
    """Median of log10(z . phi(q)) before training, computed in float64."""
    model = model.double()
    pairs = retrieval(20, model.symbols)
    q, k, _ = model._project(pairs.keys, pairs.values, pairs.keys)
    median = (q @ k.sum(1)[..., None]).median().item()
    model.float()
    return round(log10(median), 2)


def claims(points: list[Point]) -> list[Claim]:
    late, early = (
        [S for S in _sizes(points[0]["budget"] == QUICK) if (S >= STUCK) is stuck]
        for stuck in (True, False)
    )

    def seeds(
        variant: str, value: str = "loss", sizes: list[int] = late
    ) -> dict[int, list[float | None]]:
        own = select(points, variant=variant)
        return {S: [p[value] for p in select(own, S=S)] for S in sizes}

    budget = f"{points[0]['budget']:,} optimiser steps at most"
    published = [PUBLISHED[S] for S in early]
    off = {
        S: [None if loss is None else loss - PUBLISHED[S] for loss in losses]
        for S, losses in seeds(PLAIN, sizes=early).items()
    }
    return [
        throughout(
            f"as published, the loss stays at 0.5 from S = {STUCK} on",
            "0.5000 (Fig. 2)",
            seeds(PLAIN),
            lambda loss: abs(loss - 0.5) < 5e-4,
            len(late),
            protocol=budget,
        ),
        throughout(
            f"as published, below S = {STUCK}: within 0.05 of the published losses",
            f"{min(published):.4f} to {max(published):.4f} (Fig. 2)",
            off,
            lambda difference: abs(difference) <= 0.05,
            len(early),
            spec="+.3f",
            worst=abs,
            protocol=budget,
        ),
        throughout(
            "there log10 of the denominator is far below that of epsilon, -6",
            "",
            seeds(PLAIN, "log10_denominator"),
            lambda size: size < -8,
            len(late),
            spec=".1f",
        ),
        throughout(
            "stabilised, training leaves 0.5",
            "",
            seeds("stabilised"),
            lambda loss: loss < 0.49,
            len(late),
            spec=".3f",
        ),
        throughout(
            "without epsilon, the loss is not below 0.5 either",
            "",
            seeds("without epsilon"),
            lambda loss: loss >= 0.5,
            len(late),
            spec=".3f",
        ),
    ]


def draw(points: list[Point]) -> Figure:
    figure, (ax,) = plots.panels(3.4)
    looks = {
        "as published": (WRONG, "s", "-"),
        "without epsilon": (OTHER, "^", ":"),
        "stabilised": (FAST, "o", "--"),
    }
    for variant, (color, marker, line) in looks.items():
        plots.series(ax, select(points, variant=variant), color, marker, line, variant)
    plots.published(ax, PUBLISHED, WRONG, "published")
    ax.axhline(0.5, color=INK, linewidth=1, linestyle=(0, (4, 2)))
    ax.set(xlabel="number of keys $S$", ylabel="loss", ylim=(0, None))
    plots.legend(figure, ax, columns=2)
    return figure


EXPERIMENT = Experiment(
    name="favor-underflow",
    title="Why FAVOR+ stays at a loss of 0.5",
    source="ours; Schlag et al. 2021, Fig. 2 (FAVOR+)",
    cost="quick: 3 min of one core; full: 14 min",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: SETUP,
)
