"""How many pairs fast weights can hold: setting 1 of Schlag et al. 2021.

At most `d_dot` features can be mutually orthogonal. Beyond that number of
keys, what is retrieved is a mixture of values.
"""

from functools import cache
from math import inf
from typing import Any

import torch
from matplotlib.figure import Figure

from fwlab import plots
from fwlab.data.retrieval import law
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
    EPSILON,
    GAIN,
    ONE,
    PUBLISHED_BUDGET,
    SETUP,
    SOLVED,
    Retriever,
    agreement,
    ascending,
    asked,
    at,
    bound,
    by_size,
    d_dot,
    differences,
    evaluate,
    protocol,
    threshold,
    train,
)
from fwlab.plots import INK, OTHER, SERIES, TRAINED, WRONG

#: Final losses in the authors' logs, by S; one seed each. (Figure 2.)
_SIZES = (20, 40, 60, 80, 100, 120, 140, 160, 180, 200)
_LARGER = (240, 260, 280, 300, 340, 360, 380, 400, 500, 600)
PUBLISHED = {
    name: dict(zip(_SIZES + _LARGER, losses, strict=True))
    for name, losses in {
        "linear": (
            *(0.0009, 0.0008, 0.0246, 0.1101, 0.1715),
            *(0.2324, 0.2724, 0.3012, 0.3225, 0.3426),
            *(0.3658, 0.3797, 0.3911, 0.4001, 0.4110),
            *(0.4214, 0.4012, 0.4222, 0.4343, 0.4517),
        ),
        "dpfp-1": (
            *(0.0008, 0.0003, 0.0004, 0.0002, 0.0002),
            *(0.0086, 0.0532, 0.1023, 0.1431, 0.1751),
            *(0.2297, 0.2715, 0.2840, 0.2881, 0.3466),
            *(0.3389, 0.3378, 0.3464, 0.3886, 0.4177),
        ),
        "dpfp-2": (
            *(0.0003, 0.0006, 0.0010, 0.0006, 0.0005),
            *(0.0003, 0.0005, 0.0004, 0.0003, 0.0004),
            *(0.0005, 0.0097, 0.0456, 0.0681, 0.1303),
            *(0.1599, 0.1485, 0.1662, 0.2806, 0.3263),
        ),
        "dpfp-3": (
            *(0.0005, 0.0009, 0.0005, 0.0007, 0.0005),
            *(0.0005, 0.0009, 0.0002, 0.0004, 0.0009),
            *(0.0005, 0.0004, 0.0009, 0.0003, 0.0001),
            *(0.0045, 0.0088, 0.0361, 0.1718, 0.2012),
        ),
        "favor-64": (0.13, 0.2982, 0.4926, 0.5002, *[0.5] * 16),
        "favor-128": (0.0797, 0.2102, 0.4849, 0.4999, *[0.5] * 16),
        "favor-512": (0.0453, 0.0762, 0.409, 0.5, *[0.5] * 16),
    }.items()
} | {
    # Those up to .001, as all up to S = 340, are no numbers to draw.
    "softmax": dict(
        zip(
            (360, 460, 500, 520, 540, 560, 580, 600),
            (0.0268, 0.0089, 0.1741, 0.0089, 0.0446, 0.0357, 0.0313, 0.0536),
            strict=True,
        )
    )
}
#: The last S with a published loss of at most 0.001, and the first after it.
EDGES = {
    "linear": (40, 60),
    "dpfp-1": (100, 120),
    "dpfp-2": (240, 260),
    "dpfp-3": (340, 360),
    "softmax": (340, 360),
}
#: Maps whose capacity is their number of features.
MAPS = ("linear", "dpfp-1", "dpfp-2", "dpfp-3")
#: From here on every loss with FAVOR+ is exactly 0.5.
STUCK = 100
#: The full version. Of FAVOR+ with 1024 features there are five sizes.
SIZES = (*_SIZES, 240, 280, 340, 380, 400, 500, 600)
FEW = {"favor-512": (20, 60, 100, 200, 400)}
#: Where the authors' evaluation, of 200 keys, differs most from ours.
LEFT_OUT = ("dpfp-2", 320)
#: One key is asked, as published, here and where S is near the capacity.
ANCHORS = (20, 100, 200)
#: The same maps with keys of width 16: a quarter of the features.
QUICK = {
    "linear": (8, 12, 24, 48),
    "dpfp-1": (16, 24, 48, 96),
    "dpfp-2": (32, 48, 96),
    "dpfp-3": (48, 72, 96),
    "softmax": (32, 96),
}
QUICK_ONE = [(8, "linear"), (16, "dpfp-1"), (24, "linear"), (48, "dpfp-1")]
LOOKS = {
    "linear": ("linear (ELU + 1)", TRAINED),
    "dpfp-1": ("DPFP-1", SERIES[0]),
    "dpfp-2": ("DPFP-2", SERIES[1]),
    "dpfp-3": ("DPFP-3", SERIES[2]),
    "favor-64": ("FAVOR+, m = 64", WRONG),
    "favor-128": ("FAVOR+, m = 128", WRONG),
    "favor-512": ("FAVOR+, m = 512", WRONG),
    "softmax": ("softmax attention", OTHER),
}
#: Marker and line of the points of each protocol.
ASKED: dict[str, tuple[str, Any]] = {ALL: ("o", "-"), ONE: ("^", ":")}


def points(quick: bool) -> list[Point]:
    """Order points by S, so that a stopped run has all maps up to some S."""
    return [*_points(quick)]


@cache
def _points(quick: bool) -> list[Point]:
    if quick:
        grid = [(S, name, ALL) for name, sizes in QUICK.items() for S in sizes]
        grid += [(S, name, ONE) for S, name in QUICK_ONE]
    else:
        grid = [(S, name, ALL) for name in LOOKS for S in FEW.get(name, SIZES)]
        grid += [(S, name, ONE) for S, name, _ in grid if _as_published(S, name)]
        grid.append((LEFT_OUT[1], LEFT_OUT[0], ALL))
    d_key, budget = (16, 1500) if quick else (64, 20_000)
    return [
        _point(S, name, ask, d_key, seed, budget)
        for S, name, ask in sorted(grid, key=lambda each: each[0])
        for seed in ((1, 2, 3) if quick or _unsure(S, name) else (1,))
    ]


def published_points() -> list[Point]:
    """The paper's own grid; its sizes are those of its figure, its seed is 1."""
    return [
        _point(S, name, ONE, 64, 1, PUBLISHED_BUDGET)
        for S in range(20, 601, 20)
        for name in LOOKS
    ]


def _point(S: int, name: str, ask: str, d_key: int, seed: int, budget: int) -> Point:
    load = _load(S, name, d_key)
    return {
        "rule": "softmax" if name == "softmax" else "sum",
        "map": name,
        "S": S,
        "d_key": d_key,
        "ask": ask,
        "batch": BATCH[ask],
        "seed": seed,
        "budget": budget,
        # Beyond capacity; the protocol of the paper has no such rule.
        "gain": GAIN if ask == ALL and load is not None and load > 1.1 else 0.0,
    }


def _load(S: int, name: str, d_key: int = 64) -> float | None:
    """Keys per feature; None where features set no limit.

    Those of FAVOR+ do not, either: it fails for another reason.
    """
    features = None if name.startswith("favor") else d_dot(name, d_key)
    return None if features is None else S / features


def _unsure(S: int, name: str) -> bool:
    """Whether seeds differ, so that one says little."""
    load = _load(S, name)
    return load is not None and 0.6 <= load <= 1.5


def _as_published(S: int, name: str) -> bool:
    load = _load(S, name)
    return S in ANCHORS if load is None else S in ANCHORS or 0.85 <= load <= 1.1


def run(point: Point) -> Point:
    S, d_key, name = point["S"], point["d_key"], point["map"]
    torch.manual_seed(point["seed"])
    # Only FAVOR+ as published needs the epsilon to be as published.
    epsilon = EPSILON if name.startswith("favor") else 0.0
    model = Retriever(S, d_key, point["rule"], name, epsilon)
    how = {name: point[name] for name in ("batch", "ask", "gain")}
    trained = train(model, S, repeat=False, budget=point["budget"], **how)
    theirs = evaluate(model, S, repeat=False, as_published=True)
    return {
        "d_dot": d_dot(name, d_key),
        **trained,
        "loss_published": round(theirs, 5) if trained["loss"] is not None else None,
    }


def claims(points: list[Point]) -> list[Claim]:
    points = asked(points)
    full = points[0]["d_key"] == 64
    return [
        *(
            claim
            for name in EDGES
            for ask in (ALL, ONE)
            for solved in (True, False)
            for claim in _edge(points, name, ask, solved)
        ),
        _order(points),
        *(_differences(points) if full else ()),
        *(_stuck(points) if full else ()),
        *_law(points),
        _agree(points),
    ]


def _grid(points: list[Point]) -> list[Point]:
    """All points of the version that some are of."""
    if points[0]["budget"] == PUBLISHED_BUDGET:
        return published_points()
    return _points(points[0]["d_key"] == 16)


def _edge(points: list[Point], name: str, ask: str, solved: bool) -> list[Claim]:
    """Where the published losses are at most 0.001, or where they are not."""
    last, first = EDGES[name]
    if name == "softmax" and not solved:
        return []  # some later losses are below 0.001 again
    full = points[0]["d_key"] == 64
    scale = 1 if name == "softmax" else points[0]["d_key"] / 64

    def within(S: float, scale: float = 1) -> bool:
        return last * scale >= S if solved else first * scale <= S

    own, grid = (
        [p for p in select(each, map=name, ask=ask) if within(p["S"], scale)]
        for each in (points, _grid(points))
    )
    if not grid:
        return []
    sizes = {p["S"] for p in grid}
    theirs = {
        S: loss
        for S, loss in PUBLISHED[name].items()
        if within(S) and (S in sizes or not full)
    }
    # Of softmax attention we know no more of these losses.
    small = f"at most {SOLVED:g} {at(sizes, solved)}"
    published = f"{bound(theirs, solved) if theirs else small} (Fig. 2)"
    return threshold(LOOKS[name][0], published, own, grid, solved)


def _order(points: list[Point]) -> Claim:
    """The more features, the lower the loss."""
    full = points[0]["d_key"] == 64
    S = 380 if full else 96
    names = ["dpfp-3", "dpfp-2", "dpfp-1", *(["linear"] if full else ())]
    some, grid = (
        select(each, S=S, ask=_ask(points)) for each in (points, _grid(points))
    )
    theirs = " < ".join(f"{PUBLISHED[name][380]:.4f}" for name in names)
    return compared(
        f"S = {S}: {' < '.join(LOOKS[name][0] for name in names)}",
        f"{theirs} at S = 380 (Fig. 2)",
        [losses(some, map=name) for name in names],
        ascending,
        spec=".4f",
        protocol=protocol([p for p in grid if p["map"] in names]),
    )


def _ask(points: list[Point]) -> str:
    """What most points are asked: as published in the paper's own grid."""
    return ONE if points[0]["budget"] == PUBLISHED_BUDGET else ALL


def _differences(points: list[Point]) -> list[Claim]:
    """Beyond capacity, the losses are the published ones."""
    every = []
    for name in MAPS:
        grid, own = (
            [p for p in select(each, map=name, ask=_ask(points)) if _beyond(p)]
            for each in (_grid(points), points)
        )
        sizes = {p["S"] for p in grid}
        theirs = {S: loss for S, loss in PUBLISHED[name].items() if S in sizes}
        label = f"{LOOKS[name][0]}, beyond capacity"
        near = 0.015 if name == "linear" else 0.04
        every.append(differences(label, near, theirs, own, grid))
    return every


def _stuck(points: list[Point]) -> list[Claim]:
    """FAVOR+ as published: 0.5 from S = 100 on, and before it the order."""
    names = ("favor-64", "favor-128", "favor-512")
    every = []
    for name in names:
        grid, own = (
            [p for p in select(each, map=name, ask=_ask(points)) if p["S"] >= STUCK]
            for each in (_grid(points), points)
        )
        every.append(
            throughout(
                f"{LOOKS[name][0]}: a loss of 0.5 from S = {STUCK} on",
                "0.5000 (Fig. 2)",
                by_size(own),
                lambda loss: abs(loss - 0.5) < 5e-4,
                len({p["S"] for p in grid}),
                worst=lambda loss: abs(loss - 0.5),
                protocol=protocol(grid),
            )
        )
    one, all_one = (select(each, ask=ONE, S=20) for each in (points, _grid(points)))
    order = compared(
        f"S = 20, FAVOR+, {ONE}: the more features, the lower the loss",
        " < ".join(f"{PUBLISHED[name][20]:.4f}" for name in names[::-1]) + " (Fig. 2)",
        [losses(one, map=name) for name in names[::-1]],
        ascending,
        spec=".4f",
        protocol=protocol(all_one),
    )
    return [*every, order]


def _beyond(point: Point) -> bool:
    return point["S"] > 1.1 * (d_dot(point["map"], point["d_key"]) or inf)


def _law(points: list[Point]) -> list[Claim]:
    """No memory with this number of features has a smaller loss over all keys."""
    off: dict[str, list[float]] = {}
    off_published = []
    beyond, grid = (
        [p for p in each if p["map"] in MAPS and _beyond(p)]
        for each in (points, _grid(points))
    )
    for p in beyond:
        smallest = law(p["S"], p["d_dot"])
        label = f"{LOOKS[p['map']][0]}, {p['ask']}, S = {p['S']}"
        off.setdefault(label, []).append(_number(p["loss"]) - smallest)
        # Points of older versions were evaluated in one way only.
        if p["ask"] == _ask(points) and "loss_published" in p:
            off_published.append(_number(p["loss_published"]) - smallest)
    lowest = {label: [min(numbers)] for label, numbers in off.items()}
    every = [
        throughout(
            f"beyond capacity: {text}",
            "",
            numbers,
            holds,
            len({(p["map"], p["ask"], p["S"]) for p in grid}),
            spec="+.4f",
            x="",
            worst=worst,
        )
        for text, numbers, holds, worst in (
            ("within 0.04 of (1 - d_dot / S) / 2", off, lambda x: abs(x) <= 0.04, abs),
            ("no loss below it, of no seed", lowest, lambda x: x >= 0, lambda x: -x),
        )
    ]
    if points[0]["d_key"] != 64:
        return every
    published_off = [
        loss - law(S, d_dot(name, 64) or 0)
        for name in MAPS
        for S, loss in PUBLISHED[name].items()
        if _beyond({"S": S, "map": name, "d_key": 64})
    ]
    ours, published = (
        f"{sum(x < 0 for x in numbers)} of {len(numbers)}"
        for numbers in (off_published, published_off)
    )
    same = select(grid, ask=_ask(points))
    found = any(x < 0 for x in off_published)
    below = Claim(
        "beyond capacity, evaluated as in the authors' code: losses below it",
        f"{published} (Fig. 2)",
        ours if off_published else "–",
        True if found else None if len(off_published) < len(same) else False,
        protocol=protocol(same),
    )
    return [*every, below]


def _number(loss: float | None) -> float:
    """A loss; that of a failed run is infinite."""
    return inf if loss is None else loss


def _agree(points: list[Point]) -> Claim:
    """Asking all keys ends where asking one key does, except near the edge."""

    def label(p: Point) -> str | None:
        near = 0.85 <= p["S"] / (d_dot(p["map"], p["d_key"]) or inf) <= 1.1
        return None if near else f"{LOOKS[p['map']][0]}, S = {p['S']}"

    return agreement(points, _grid(points), label)


def draw(points: list[Point]) -> Figure:
    points = asked(points)
    names = [name for name in LOOKS if select(points, map=name)]
    figure, axes = plots.grid(len(names), "number of keys $S$", "loss")
    full = points[0]["d_key"] == 64
    largest = SIZES[-1] if full else max(p["S"] for p in points)
    for ax, name in zip(axes, names, strict=True):
        title, color = LOOKS[name]
        own = select(points, map=name)
        features = own[0]["d_dot"]
        if features is not None and not name.startswith("favor"):
            title += f", $d_\\mathrm{{dot}}$ = {features}"
            at = range(1, largest + 1, max(1, largest // 150))
            ax.plot(
                at,
                [law(S, features) for S in at],
                color=INK,
                linewidth=1.2,
                linestyle=(0, (4, 2)),
            )
        for ask, look in ASKED.items():
            plots.series(ax, select(own, ask=ask), color, *look)
        if full:
            plots.published(ax, PUBLISHED[name], color)
        ax.set_title(title)
        ax.set(ylim=(-0.02, 0.54), yticks=[0, 0.25, 0.5])
    entries = [(*look, f"ours, {ask}") for ask, look in ASKED.items()]
    entries += [("x", "none", "published")] * full
    entries.append(("", (0, (4, 2)), "law"))
    plots.key(figure, entries)
    return figure


EXPERIMENT = Experiment(
    name="capacity",
    title="How many pairs fast weights can hold",
    source="Schlag et al. 2021, setting 1, Fig. 2",
    cost="quick: 3 min of one core; full: about 4 hours (estimated)",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: SETUP,
    published_points=published_points,
)
