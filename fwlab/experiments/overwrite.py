"""Which rules can replace a value: setting 2 of Schlag et al. 2021.

Keys return with new values, and the most recent one counts. A rule that
only adds retrieves a mixture of all values that a key ever had.
"""

from math import inf
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure

from fwlab import plots
from fwlab.experiments.experiment import (
    Claim,
    Experiment,
    Point,
    held,
    listed,
    numbers_claim,
    select,
)
from fwlab.experiments.retrieval import SETUP, SOLVED, Retriever, d_dot, evaluate, train
from fwlab.plots import FAST, INK, SERIES, WRONG

_SIZES = tuple(range(20, 201, 20))


class Series(NamedTuple):
    """A rule with a feature map, and how it is trained and drawn."""

    rule: str
    map: str
    label: str
    color: str
    marker: str
    line: str
    sizes: tuple[int, ...] = _SIZES
    quick: tuple[int, ...] = (8, 16)
    lr: float = 1e-3
    batch: int = 32


#: `fwm` keeps the fast weights of every step for its gradient: small S only.
SERIES_OF = (
    Series("sum", "dpfp-1", "sum, DPFP-1", WRONG, "D", "-."),
    Series("gated", "dpfp-1", "gated, DPFP-1", SERIES[1], "v", "--"),
    Series("fwm", "dpfp-1", "fwm, DPFP-1", SERIES[2], "P", "-", (20, 40), (8,)),
    Series("fwm", "tanh", "fwm, tanh", SERIES[2], "X", ":", (20,), (), 1e-4, 128),
    Series("delta", "linear", "delta, linear", FAST, "s", ":"),
    Series("delta", "dpfp-1", "delta, DPFP-1", FAST, "o", "-"),
    Series("delta", "dpfp-2", "delta, DPFP-2", FAST, "^", "--", quick=()),
)
#: Final losses in the authors' logs at S = 20, 40, ..., evaluated at L = S;
#: one seed each. (Figures 3 and 5.) One log ends at step 300: None.
PUBLISHED = {
    ("delta", "dpfp-1"): (
        *(0.0008, 0.0010, 0.0061, 0.0106, 0.0001),
        *(0.0183, 0.0493, 0.1142, 0.1384, 0.1855),
    ),
    ("delta", "dpfp-2"): (
        *(0.0010, 0.0005, 0.0005, 0.0008, None),
        *(0.0007, 0.0003, 0.0004, 0.0004, 0.0008),
    ),
    ("delta", "linear"): (
        *(0.0008, 0.0007, 0.0005, 0.1014, 0.1615),
        *(0.2229, 0.2640, 0.2909, 0.3220, 0.3425),
    ),
    ("sum", "dpfp-1"): (
        *(0.1048, 0.1136, 0.1229, 0.1190, 0.1165),
        *(0.1332, 0.1569, 0.1828, 0.2097, 0.2386),
    ),
    ("fwm", "dpfp-1"): (
        *(0.0505, 0.4986, 0.4997, 0.5412, 0.6869),
        *(0.6265, 1.055, 3.924, 4.032, 2.282),
    ),
    ("fwm", "tanh"): (1.69, 4.99, 9.72, 30.8, 43.5, 56.3, 60.4, 74.9, 85.7, 96.9),
}


def points(quick: bool) -> list[Point]:
    """Order points by S, so that a stopped run has all rules up to some S."""
    every = [
        {
            "rule": series.rule,
            "map": series.map,
            "S": S,
            "d_key": 32 if quick else 64,
            "lr": series.lr,
            "batch": series.batch,
            "seed": seed,
            "budget": 2000 if quick else 20_000,
        }
        for series in SERIES_OF
        for S in (series.quick if quick else series.sizes)
        for seed in (1, 2, 3)
    ]
    # Last, what takes longest.
    return sorted(every, key=lambda point: (point["S"], point["map"] == "tanh"))


def run(point: Point) -> Point:
    S, d_key = point["S"], point["d_key"]
    torch.manual_seed(point["seed"])
    model = Retriever(S, d_key, point["rule"], point["map"])
    trained = train(
        model, 2 * S, True, point["budget"], lr=point["lr"], batch=point["batch"]
    )
    twice = evaluate(model, 2 * S, repeat=True)
    return {
        "d_dot": d_dot(point["map"], d_key),
        **trained,
        "loss_2S": round(twice, 5),
    }


def claims(points: list[Point]) -> list[Claim]:
    full = points[0]["d_key"] == 64
    losses: dict[tuple[str, str], dict[Any, float]] = {
        (s.rule, s.map): plots.medians(
            select(points, rule=s.rule, map=s.map), "S", "loss"
        )
        for s in SERIES_OF
    }
    delta, add = losses["delta", "dpfp-1"], losses["sum", "dpfp-1"]
    both = [S for S in delta if S in add]
    gaps = {S: add[S] - delta[S] for S in both}
    smallest = min(gaps, key=lambda S: gaps[S], default=None)
    below = Claim(
        "DPFP-1: delta below sum at every S",
        f"minimum gap 0.0531 (S = 200{'' if full else ', full grid'})",
        "–"
        if smallest is None
        else f"minimum gap {gaps[smallest]:.4f} (S = {smallest}), up to S = {max(both)}",
        held([gap > 0 for gap in gaps.values()], len(_SIZES if full else (8, 16))),
    )
    return [*(_full if full else _quick)(points, losses), below]


def _full(
    points: list[Point], losses: dict[tuple[str, str], dict[Any, float]]
) -> list[Claim]:
    at_20 = select(points, S=20)
    delta, add = (select(at_20, rule=rule, map="dpfp-1") for rule in ("delta", "sum"))
    steps = plots.medians(delta, "S", "steps").get(20)
    twice = plots.medians(add, "S", "loss_2S").get(20)
    ours = {name: each.get(20) for name, each in losses.items()}
    sum_at_S = "about 0.10 to 0.125, evaluated at L = S"
    every = [
        _at(f"S = 20, {text}", published, loss, low, high)
        for text, published, loss, low, high in (
            ("delta, DPFP-1: loss of 0.001 or less", "0.0008",
             ours["delta", "dpfp-1"], 0.0, SOLVED),
            (f"sum, DPFP-1: {sum_at_S}", "0.1048", ours["sum", "dpfp-1"], 0.09, 0.135),
            ("sum, DPFP-1: about 0.20, evaluated at L = 2S", "not published",
             twice, 0.17, 0.23),
            ("fwm, DPFP-1: about 0.05", "0.0505", ours["fwm", "dpfp-1"], 0.02, 0.08),
            ("fwm, tanh: above 1", "1.69", ours["fwm", "tanh"], 1.0, inf),
        )
    ]  # fmt: skip
    quickly = numbers_claim(
        "S = 20, delta, DPFP-1: within about 700 steps (at most 1000)",
        "700",
        [steps],
        lambda steps: steps <= 1000,
        ".0f",
        unit=" steps",
    )
    every.insert(1, quickly)
    at_80, text = losses["delta", "linear"].get(80), "S = 80, delta, linear: about 0.10"
    every.append(_at(text, "0.1014", at_80, 0.085, 0.13))
    for name, limit in (("linear", 60), ("dpfp-2", 200)):
        inside = {S: x for S, x in losses["delta", name].items() if limit >= S}
        good = [loss <= SOLVED for loss in inside.values()]
        wanted = sum(limit >= S for S in _SIZES)
        label = {"linear": "linear", "dpfp-2": "DPFP-2"}[name]
        every.append(
            Claim(
                f"delta, {label}: loss of 0.001 or less up to S = {limit}",
                "0.001",
                listed(inside, ".4f"),
                held(good, wanted),
            )
        )
    return every


def _quick(
    points: list[Point], losses: dict[tuple[str, str], dict[Any, float]]
) -> list[Claim]:
    twice = plots.medians(select(points, rule="sum", map="dpfp-1"), "S", "loss_2S")
    wanted = (
        ("delta, DPFP-1: the new value replaces the old one", "delta", 0.0, 0.005),
        ("sum, DPFP-1: a mixture is left", "sum", 0.05, 1.0),
    )
    every = [
        _at(
            f"S = {S}, {text}",
            f"{low:g} to {high:g} (ours)",
            losses[rule, "dpfp-1"].get(S),
            low,
            high,
        )
        for S in (8, 16)
        for text, rule, low, high in wanted
    ]
    worse = _at(
        "S = 16, sum, DPFP-1: worse at L = 2S, with more repetitions",
        "at least 0.15 (ours)",
        twice.get(16),
        0.15,
        1.0,
    )
    return [*every, worse]


def _at(
    text: str, published: str, loss: float | None, low: float, high: float
) -> Claim:
    """A claim that a number is in a range."""
    return numbers_claim(text, published, [loss], lambda x: low <= x <= high, ".4f")


#: Losses above this are off the chart.
TOP = 0.6


def draw(points: list[Point]) -> Figure:
    figure, (left, right) = plots.grid(2, "number of keys $S$", "loss", height=3.6)
    full = points[0]["d_key"] == 64
    for series in SERIES_OF:
        own = select(points, rule=series.rule, map=series.map)
        if not own:
            continue
        look = (series.color, series.marker, series.line)
        plots.series(left, own, *look, series.label)
        plots.series(right, own, *look, y="loss_2S")
        theirs = PUBLISHED.get((series.rule, series.map))
        if full and theirs:
            drawn = dict(zip(_SIZES, theirs, strict=True))
            known = {S: x for S, x in drawn.items() if x is not None}
            plots.published(left, known, series.color)
    left.set(title="evaluated at $L = S$", ylim=(-0.02, TOP))
    right.set(title="evaluated at $L = 2S$")
    if full:
        plots.published(left, {}, INK, "published")
    plots.legend(figure, left, columns=2)
    return figure


EXPERIMENT = Experiment(
    name="overwrite",
    title="Which rules can replace a value",
    source="Schlag et al. 2021, setting 2, Figs. 3 and 5",
    cost="quick: 3 min of one core; full: about 7 hours (estimated)",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: SETUP,
)
