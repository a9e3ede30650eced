"""Which rules can replace a value: setting 2 of Schlag et al. 2021.

Keys return with new values, and the most recent one counts. A rule that
only adds retrieves a mixture of all values that a key ever had.
"""

from functools import cache
from math import inf
from statistics import median
from typing import NamedTuple

import torch
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
from fwlab.experiments.retrieval import (
    ALL,
    BATCH,
    GAIN,
    ONE,
    PUBLISHED_BUDGET,
    SETUP,
    Retriever,
    agreement,
    ascending,
    asked,
    bound,
    by_size,
    d_dot,
    differences,
    evaluate,
    protocol,
    threshold,
    train,
)
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
    batch: int = BATCH[ONE]


#: `fwm` keeps the fast weights of every step for its gradient: small S only.
#: The paper describes the gated rule and does not run it.
SERIES_OF = (
    Series("sum", "dpfp-1", "sum, DPFP-1", WRONG, "D", "-."),
    Series("gated", "dpfp-1", "gated, DPFP-1", SERIES[1], "v", "--", _SIZES[:5]),
    Series("fwm", "dpfp-1", "fwm, DPFP-1", SERIES[2], "P", "-", (20, 40), (8,)),
    Series("fwm", "tanh", "fwm, tanh", SERIES[2], "X", ":", (20,), (), 1e-4, 128),
    Series("delta", "linear", "delta, linear", FAST, "s", ":"),
    Series("delta", "dpfp-1", "delta, DPFP-1", FAST, "o", "-"),
    Series("delta", "dpfp-2", "delta, DPFP-2", FAST, "^", "--", quick=()),
)
#: The last S up to which all published losses are at most 0.001, and the first
#: from which none is. Between them the delta rule with DPFP-1 has both. With
#: DPFP-2 all are.
EDGES: dict[tuple[str, str], tuple[float, float]] = {
    ("delta", "linear"): (60, 80),
    ("delta", "dpfp-1"): (40, 120),
    ("delta", "dpfp-2"): (200, 220),
    ("sum", "dpfp-1"): (0, 20),
    ("fwm", "dpfp-1"): (0, 20),
}
#: By S: how they are asked, the figure, and from the lowest to the highest loss.
ORDERS: dict[int, tuple[str, str, list[tuple[str, str]]]] = {
    20: (
        ONE,
        "Fig. 3",
        [("delta", "dpfp-1"), ("fwm", "dpfp-1"), ("sum", "dpfp-1"), ("fwm", "tanh")],
    ),
    200: (
        ALL,
        "Fig. 5",
        [
            *(("delta", "dpfp-2"), ("delta", "dpfp-1")),
            *(("sum", "dpfp-1"), ("delta", "linear")),
        ],
    ),
}
#: One key is asked, as published, at this size, and where S is near the capacity.
ANCHOR = 20
#: Final losses in the authors' logs at S = 20, 40, ..., evaluated at L = S;
#: one seed each. (Figure 5; Figure 3 shows S = 20.) One log ends at step 300: None.
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
    return [*_points(quick)]


@cache
def _points(quick: bool) -> list[Point]:
    every = [
        _point(series, S, ask, seed, *((32, 2000) if quick else (64, 20_000)))
        for series in SERIES_OF
        for S in (series.quick if quick else series.sizes)
        for ask in (ALL, ONE)
        if _asked(series, S, ask, quick)
        for seed in ((1, 2, 3) if quick or _unsure(series, S, ask) else (1,))
    ]
    # Last, what takes longest.
    return sorted(every, key=lambda point: (point["S"], point["map"] == "tanh"))


def published_points() -> list[Point]:
    """The paper's own grid, with its seed."""
    return [
        _point(series, S, ONE, 1, 64, PUBLISHED_BUDGET)
        for S in _SIZES
        for series in SERIES_OF
        if series.rule != "gated"
    ]


def _point(
    series: Series, S: int, ask: str, seed: int, d_key: int, budget: int
) -> Point:
    full = series.rule == "delta" and _load(series, S, d_key) > 1.1
    short = ask == ALL and (full or series.rule == "sum")
    return {
        "rule": series.rule,
        "map": series.map,
        "S": S,
        "d_key": d_key,
        "lr": series.lr,
        "batch": BATCH[ALL] if ask == ALL else series.batch,
        "ask": ask,
        "seed": seed,
        "budget": budget,
        "gain": GAIN if short else 0.0,
    }


def _asked(series: Series, S: int, ask: str, quick: bool) -> bool:
    if series.rule == "fwm":
        return ask == ONE  # its time goes into the sequence
    if quick:
        return ask == ALL or (
            S == 8 and series.label in ("sum, DPFP-1", "delta, DPFP-1")
        )
    near = series.rule == "delta" and 0.85 <= _load(series, S) <= 1.1
    return ask == ALL or S == ANCHOR or near


def _unsure(series: Series, S: int, ask: str) -> bool:
    """Whether seeds differ, so that one says little."""
    near = 0.6 <= _load(series, S) <= 1.5 and (ask == ALL or series.map == "linear")
    return near or (S == ANCHOR and series.map != "tanh")


def _load(series: Series, S: int, d_key: int = 64) -> float:
    """Keys per feature."""
    return S / (d_dot(series.map, d_key) or inf)


def run(point: Point) -> Point:
    S, d_key = point["S"], point["d_key"]
    torch.manual_seed(point["seed"])
    model = Retriever(S, d_key, point["rule"], point["map"])
    how = {name: point[name] for name in ("lr", "batch", "ask", "gain")}
    trained = train(model, 2 * S, True, point["budget"], **how)
    twice = evaluate(model, 2 * S, repeat=True)
    return {
        "d_dot": d_dot(point["map"], d_key),
        **trained,
        "loss_2S": round(twice, 5),
    }


def claims(points: list[Point]) -> list[Claim]:
    points = asked(points)
    full = points[0]["d_key"] == 64
    return [
        *(
            claim
            for rule, phi in EDGES
            for ask in (ALL, ONE)
            for solved in (True, False)
            for claim in _edge(points, rule, phi, ask, solved)
        ),
        *(claim for ask in (ALL, ONE) for claim in _gaps(points, ask)),
        _order(points, 20, 20 if full else 8),
        *(_full(points) if full else ()),
        _twice(points),
        agreement(points, _grid(points), _away_from_the_edge),
    ]


def _label(rule: str, phi: str) -> str:
    return next(s.label for s in SERIES_OF if (s.rule, s.map) == (rule, phi))


def _grid(points: list[Point]) -> list[Point]:
    """All points of the version that some are of."""
    if points[0]["budget"] == PUBLISHED_BUDGET:
        return published_points()
    return _points(points[0]["d_key"] == 32)


def _published(rule: str, phi: str) -> dict[int, float]:
    losses = zip(_SIZES, PUBLISHED[rule, phi], strict=True)
    return {S: loss for S, loss in losses if loss is not None}


def _edge(
    points: list[Point], rule: str, phi: str, ask: str, solved: bool
) -> list[Claim]:
    """Where the published losses are at most 0.001, or where they are not."""
    last, first = EDGES[rule, phi]
    # A rule that never solves the task does so at no width.
    scale = points[0]["d_key"] / 64 if last else 0

    def within(S: float, scale: float = 1) -> bool:
        return last * scale >= S if solved else first * scale <= S

    own, grid = (
        [p for p in select(each, rule=rule, map=phi, ask=ask) if within(p["S"], scale)]
        for each in (points, _grid(points))
    )
    sizes, full = {p["S"] for p in grid}, points[0]["d_key"] == 64
    theirs = {
        S: loss
        for S, loss in _published(rule, phi).items()
        if within(S) and (S in sizes or not full)
    }
    if not theirs:
        return []
    published = f"{bound(theirs, solved)} (Fig. 5)"
    return threshold(_label(rule, phi), published, own, grid, solved)


def _gaps(points: list[Point], ask: str) -> list[Claim]:
    """The delta rule below the sum rule at every size; none if one is not asked."""

    def ends(some: list[Point], rule: str) -> dict[int, list[float]]:
        own = by_size(select(some, rule=rule, map="dpfp-1", ask=ask))
        return {S: [inf if x is None else x for x in own[S]] for S in own}

    delta, add = (ends(points, rule) for rule in ("delta", "sum"))
    grid = [{**p, "loss": None} for p in _grid(points)]
    sizes = ends(grid, "delta").keys() & ends(grid, "sum").keys()
    if not sizes:
        return []
    both, full = delta.keys() & add.keys(), points[0]["d_key"] == 64
    theirs = [
        loss - _published("delta", "dpfp-1")[S]
        for S, loss in _published("sum", "dpfp-1").items()
        if S in sizes or not full
    ]
    claim = throughout(
        f"DPFP-1, {ask}: sum's loss minus delta's: above 0 at every S",
        f"at least {min(theirs):.4f} (Fig. 5)",
        {S: [median(add[S]) - median(delta[S])] for S in sorted(both)},
        lambda gap: gap > 0,
        len(sizes),
        worst=lambda gap: -gap,
        protocol=protocol(select(grid, ask=ask, map="dpfp-1")),
    )
    overlap = any(max(delta[S]) >= min(add[S]) for S in both)
    seeds = min((len(side[S]) for side in (delta, add) for S in both), default=0)
    return [claim._replace(apart=False if overlap else True if seeds >= 3 else None)]


def _full(points: list[Point]) -> list[Claim]:
    every = []
    for rule, phi, start, near in (
        ("sum", "dpfp-1", 20, 0.04),
        ("delta", "linear", 80, 0.04),
        ("delta", "dpfp-1", 120, 0.04),
    ):
        ask = ALL if points[0]["budget"] != PUBLISHED_BUDGET else ONE
        theirs = {S: x for S, x in _published(rule, phi).items() if start <= S}
        own, grid = (
            select(each, rule=rule, map=phi, ask=ask)
            for each in (points, _grid(points))
        )
        grid = [p for p in grid if p["S"] in theirs]
        label = f"{_label(rule, phi)}, from S = {start}"
        every.append(differences(label, near, theirs, own, grid))
    every.append(_order(points, 200, 200))
    delta, grid = (
        select(each, S=20, ask=ONE, rule="delta", map="dpfp-1")
        for each in (points, _grid(points))
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
    if points[0]["d_key"] != 64:
        rules = [each for each in rules if each[1] != "tanh"]
    if points[0]["budget"] == PUBLISHED_BUDGET:
        ask = ONE
    some, grid = (select(each, S=S, ask=ask) for each in (points, _grid(points)))
    theirs = [f"{_published(*each)[published]:.4f}" for each in rules]
    at = "" if published == S else f" at S = {published}"
    return compared(
        f"S = {S}, {ask}: {' < '.join(_label(*each) for each in rules)}",
        f"{' < '.join(theirs)}{at} ({where})",
        [losses(some, rule=rule, map=phi) for rule, phi in rules],
        ascending,
        spec=".4f",
        protocol=protocol([p for p in grid if (p["rule"], p["map"]) in rules]),
    )


def _twice(points: list[Point]) -> Claim:
    """With more repetitions the sum rule gets worse."""
    S = 20 if points[0]["d_key"] == 64 else 8
    own = select(points, rule="sum", map="dpfp-1", ask=ONE, S=S)
    return compared(
        f"S = {S}, sum, DPFP-1, {ONE}: better evaluated at L = S than at L = 2S",
        "",
        [losses(own), losses(own, "loss_2S")],
    )


def _away_from_the_edge(point: Point) -> str | None:
    load = point["S"] / (d_dot(point["map"], point["d_key"]) or inf)
    if 0.85 <= load <= 1.1:
        return None
    return f"{_label(point['rule'], point['map'])}, S = {point['S']}"


#: Losses above this are off the chart.
TOP = 0.6


def draw(points: list[Point]) -> Figure:
    points = asked(points)
    figure, (left, right) = plots.grid(2, "number of keys $S$", "loss", height=3.6)
    full = points[0]["d_key"] == 64
    for series in SERIES_OF:
        own = select(points, rule=series.rule, map=series.map)
        if not own:
            continue
        look = (series.color, series.marker, series.line)
        main = select(own, ask=ALL) or own
        plots.series(left, main, *look, series.label)
        plots.series(right, main, *look, y="loss_2S")
        one = [p for p in own if p not in main]
        for ax, y in ((left, "loss"), (right, "loss_2S")):
            at, losses = [p["S"] for p in one], [p[y] for p in one]
            plots.marks(ax, at, losses, "+", color=series.color, markersize=6)
        theirs = PUBLISHED.get((series.rule, series.map))
        if full and theirs:
            drawn = dict(zip(_SIZES, theirs, strict=True))
            known = {S: x for S, x in drawn.items() if x is not None}
            plots.published(left, known, series.color)
    left.set(title="evaluated at $L = S$", ylim=(-0.02, TOP))
    right.set(title="evaluated at $L = 2S$")
    if full:
        plots.published(left, {}, INK, "published")
    plots.marks(left, [], [], "+", color=INK, label=f"{ONE} asked")
    plots.legend(figure, left, columns=2)
    return figure


EXPERIMENT = Experiment(
    name="overwrite",
    title="Which rules can replace a value",
    source="Schlag et al. 2021, setting 2, Figs. 3 (S = 20) and 5",
    cost="quick: 3 min of one core; full: about 2 hours (estimated)",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: SETUP,
    published_points=published_points,
)
