"""Why FAVOR+ never left a loss of 0.5: the epsilon of a denominator.

The features of FAVOR+ carry the factor exp(-|k|^2 / 2), and in setting 1
keys get longer with the number of symbols. Once the denominator of the sum
rule is far below the epsilon that is added to it, everything retrieved is
0, the loss is 0.5, and there is no gradient.
"""

from math import log10
from typing import Any

import torch
from matplotlib.figure import Figure

from fwlab import plots
from fwlab.experiments.experiment import Claim, Experiment, Point, listed, select
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
VARIANTS = {
    "as published": ("", EPSILON),
    "without epsilon": ("", 0.0),
    "stabilised": ("-stable", 0.0),
}
#: Figure 2 of the paper, m = 64: final losses in the authors' logs.
PUBLISHED = {20: 0.13, 40: 0.2982, 60: 0.4926, 80: 0.5002, 100: 0.5, 140: 0.5}
#: From here on the published loss is exactly 0.5.
STUCK = 100


def points(quick: bool) -> list[Point]:
    sizes = (40, STUCK) if quick else tuple(PUBLISHED)
    return [
        {
            "variant": variant,
            "rule": "sum",
            "map": f"favor-64{suffix}",
            "S": S,
            "d_key": 64,
            "epsilon": epsilon,
            "seed": seed,
            "budget": 800 if quick else 3000,
        }
        for S in sizes
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
    late = [p for p in points if p["S"] >= STUCK]
    by: dict[str, dict[Any, float]] = {
        v: plots.medians(select(late, variant=v), "S", "loss") for v in VARIANTS
    }
    sizes = plots.medians(
        select(late, variant="as published"), "S", "log10_denominator"
    )

    def every(variant: str, holds: Any) -> bool | None:
        return all(map(holds, by[variant].values())) if by[variant] else None

    return [
        Claim(
            f"as published, the loss stays at 0.5 from S = {STUCK} on",
            "0.5",
            listed(by["as published"], ".4f"),
            every("as published", lambda loss: abs(loss - 0.5) < 5e-4),
        ),
        Claim(
            "there the denominator is far below the epsilon of 1e-6",
            "below 1e-6 (ours)",
            listed({S: 10**size for S, size in sizes.items()}, ".0e"),
            all(size < -8 for size in sizes.values()) if sizes else None,
        ),
        Claim(
            "stabilised, training leaves 0.5",
            "below 0.5 (ours)",
            listed(by["stabilised"], ".3f"),
            every("stabilised", lambda loss: loss < 0.49),
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
    cost="quick: 3 min of one core; full: about half an hour",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: SETUP,
)
