"""Which rules can replace a value: setting 2 of Schlag et al. 2021.

Keys return with new values, and the most recent one counts. A rule that
only adds retrieves a mixture of all values that a key ever had.
"""

from math import inf
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from fwlab import plots
from fwlab.experiments.experiment import (
    Claim,
    Experiment,
    Point,
    compared,
    losses,
    select,
    throughout,
)
from fwlab.experiments.retrieval import ALL, ONE
from fwlab.experiments.setting import (
    Series,
    Setting,
    by_size,
    differences,
    full,
    protocol,
)
from fwlab.plots import FAST, INK, SERIES, WRONG

#: Final losses in the authors' logs, evaluated at L = S; one seed each. (Figure
#: 5; Figure 3 shows S = 20.) One log ends at step 300: None.
_LOGS = range(20, 201, 20)
PUBLISHED = {
    name: {S: x for S, x in zip(_LOGS, losses, strict=True) if x is not None}
    for name, losses in {
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
    }.items()
}
#: Those of the full version; and of the quick one.
SIZES, QUICK = (20, 40, 60, 80, 100, 120, 140, 200), (8, 16)
#: `fwm` keeps the fast weights of every step for its gradient: small S only, and
#: one key, as its time goes into the sequence. The paper describes the gated rule
#: and does not run it. Of delta with DPFP-1, losses between the edges are of both
#: kinds.
ROWS: tuple[tuple[Any, ...], ...] = (
    ("sum", "dpfp-1", WRONG, SIZES, (0, 20), QUICK, (8,), (20,), "D", "-."),
    ("gated", "dpfp-1", SERIES[1], SIZES[:5], None, QUICK, (), (20,), "v", "--"),
    ("fwm", "dpfp-1", SERIES[2], (), (0, 20), (), (8,), (20, 40), "P", "-"),
    ("fwm", "tanh", SERIES[2], (), None, (), (), (20,), "X", ":", 1e-4, 128),
    ("delta", "linear", FAST, SIZES, (60, 80), QUICK, (), None, "s", ":"),
    ("delta", "dpfp-1", FAST, SIZES, (40, 120), QUICK, (8,), None, "o", "-"),
    ("delta", "dpfp-2", FAST, SIZES, (200, inf), (), (), None, "^", "--"),
)
SETTING = Setting(
    tuple(
        Series(
            PUBLISHED.get((rule, phi), {}),
            *(rule, phi, f"{rule}, {phi.replace('dpfp', 'DPFP')}", *rest),
        )
        for rule, phi, *rest in ROWS
    ),
    repeat=True,
    figure="Fig. 5",
    sizes=_LOGS,
    anchors=(20,),
    d_key=32,
    budget=2000,
)
SUM, GATED, FWM, FWM_TANH, LINEAR, DPFP_1, DPFP_2 = SETTING.series
#: By S: how they are asked, the figure, and from the lowest to the highest loss.
ORDERS: dict[int, tuple[str, str, list[Series]]] = {
    20: (ONE, "Fig. 3", [DPFP_1, FWM, SUM, FWM_TANH]),
    200: (ALL, "Fig. 5", [DPFP_2, DPFP_1, SUM, LINEAR]),
}


def claims(points: list[Point]) -> list[Claim]:
    return [
        *SETTING.edges(points),
        *(claim for ask in (ALL, ONE) for claim in _gaps(points, ask)),
        _order(points, 20, 20 if full(points) else 8),
        *(_full(points) if full(points) else ()),
        _twice(points),
        SETTING.agreement(points),
    ]


def _gaps(points: list[Point], ask: str) -> list[Claim]:
    """The delta rule below the sum rule at every size; none if one is not asked."""

    def ends(some: list[Point], series: Series) -> dict[int, list[float]]:
        own = by_size(series.of(some, ask=ask))
        return {S: [inf if x is None else x for x in own[S]] for S in own}

    delta, add = (ends(points, series) for series in (DPFP_1, SUM))
    grid = SETTING.grid(points, ask=ask, map="dpfp-1")
    sizes = {p["S"] for p in DPFP_1.of(grid)} & {p["S"] for p in SUM.of(grid)}
    if not sizes:
        return []
    both = delta.keys() & add.keys()
    theirs = [
        loss - DPFP_1.published[S]
        for S, loss in SUM.published.items()
        if S in sizes or not full(points)
    ]
    claim = throughout(
        f"DPFP-1, {ask}: sum's loss minus delta's: above 0 at every S",
        f"at least {min(theirs):.4f} (Fig. 5)",
        {S: [median(add[S]) - median(delta[S])] for S in sorted(both)},
        lambda gap: gap > 0,
        len(sizes),
        worst=lambda gap: -gap,
        protocol=protocol(grid),
    )
    overlap = any(max(delta[S]) >= min(add[S]) for S in both)
    seeds = min((len(side[S]) for side in (delta, add) for S in both), default=0)
    return [claim._replace(apart=False if overlap else True if seeds >= 3 else None)]


def _full(points: list[Point]) -> list[Claim]:
    every = []
    for series, start in ((SUM, 20), (LINEAR, 80), (DPFP_1, 120)):
        own, grid = (
            [p for p in series.of(each, ask=ALL) if p["S"] >= start]
            for each in (points, SETTING.grid(points))
        )
        label = f"{series.label}, from S = {start}"
        every.append(differences(label, 0.04, series.published, own, grid))
    every.append(_order(points, 200, 200))
    delta, grid = (
        DPFP_1.of(each, S=20, ask=ONE) for each in (points, SETTING.grid(points))
    )
    quickly = compared(
        f"S = 20, {ONE}: delta, DPFP-1 is solved within 1,000 optimiser steps",
        "700 (Fig. 3)",
        [[p["steps"] if p["ended"] == "solved" else None for p in delta]],
        lambda steps: steps <= 1000,
        spec=".0f",
        protocol=protocol(grid),
    )
    return [*every, quickly]


def _order(points: list[Point], published: int, S: int) -> Claim:
    """From the lowest to the highest published loss at a size.

    - `published`, `S`: the size in the paper, and ours.
    """
    ask, where, rules = ORDERS[published]
    if not full(points):
        rules = [series for series in rules if series is not FWM_TANH]
    theirs = " < ".join(f"{series.published[published]:.4f}" for series in rules)
    at = "" if published == S else f" at S = {published}"
    text = f"S = {S}, {ask}"
    return SETTING.order(points, rules, S, ask, text, f"{theirs}{at} ({where})")


def _twice(points: list[Point]) -> Claim:
    """With more repetitions the sum rule gets worse."""
    S = 20 if full(points) else 8
    own = SUM.of(points, ask=ONE, S=S)
    return compared(
        f"S = {S}, sum, DPFP-1, {ONE}: better evaluated at L = S than at L = 2S",
        "",
        [losses(own), losses(own, "loss_2S")],
    )


#: Losses above this are off the chart.
TOP = 0.6


def draw(points: list[Point]) -> Figure:
    figure, (left, right) = plots.grid(2, "number of keys $S$", "loss", height=3.6)
    for series in SETTING.series:
        own = series.of(points)
        if not own or series is FWM_TANH:  # far above the chart
            continue
        look = (series.color, series.marker, series.line)
        main = select(own, ask=ALL) or own
        plots.series(left, main, *look, series.label)
        plots.series(right, main, *look, y="loss_2S")
        one = [p for p in own if p not in main]
        for ax, y in ((left, "loss"), (right, "loss_2S")):
            at, losses = [p["S"] for p in one], [p[y] for p in one]
            plots.marks(ax, at, losses, "+", color=series.color, markersize=6)
        if full(points) and series.published:
            plots.published(left, series.published, series.color)
    left.set(title="evaluated at $L = S$", ylim=(-0.02, TOP))
    right.set(title="evaluated at $L = 2S$")
    if full(points):
        plots.published(left, {}, INK, "published")
    plots.marks(left, [], [], "+", color=INK, label=f"{ONE} asked")
    plots.legend(figure, left, columns=2)
    return figure


EXPERIMENT = Experiment(
    name="overwrite",
    title="Which rules can replace a value",
    source="Schlag et al. 2021, setting 2, Figs. 3 (S = 20) and 5",
    cost="quick: 3 min of one core; full: 1.9 hours",
    points=SETTING.points,
    run=SETTING.run,
    claims=claims,
    draw=draw,
    setup=SETTING.setup,
)
