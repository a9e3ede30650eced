"""How many pairs fast weights can hold: setting 1 of Schlag et al. 2021.

At most `d_dot` features can be mutually orthogonal. Beyond that number of
keys, what is retrieved is a mixture of values.
"""

from collections.abc import Mapping
from math import inf
from typing import Any

from matplotlib.figure import Figure

from fwlab import plots
from fwlab.data.retrieval import law
from fwlab.experiments.experiment import (
    Claim,
    Experiment,
    Point,
    compared,
    select,
    throughout,
)
from fwlab.experiments.retrieval import ALL, ONE
from fwlab.experiments.setting import (
    Series,
    Setting,
    ascending,
    by_size,
    differences,
    full,
    protocol,
)
from fwlab.plots import INK, OTHER, SERIES, TRAINED, WRONG

#: Final losses in the authors' logs, by S; one seed each. (Figure 2.)
_LOGS = (*range(20, 201, 20), 240, 260, 280, 300, 340, 360, 380, 400, 500, 600)
PUBLISHED = {
    name: dict(zip(_LOGS, losses, strict=True))
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
        "favor-512": (0.0453, 0.0762, 0.409, 0.5, 0.5, 0.5002, *[0.5] * 14),
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
#: Those of the full version; at 320, the authors' evaluation, of 200 keys, differs
#: most from ours. FAVOR+ fails for another reason than its number of features.
SIZES = (*range(20, 201, 20), 240, 280, 340, 380, 500)
FEW = (20, 60, 100, 200)
ROWS: tuple[tuple[Any, ...], ...] = (
    ("linear", "linear (ELU + 1)", TRAINED, SIZES, (40, 60), (8, 12, 24, 48), (8, 24)),
    ("dpfp-1", "DPFP-1", SERIES[0], SIZES, (100, 120), (16, 24, 48, 96), (16, 48)),
    ("dpfp-2", "DPFP-2", SERIES[1], (*SIZES, 320), (240, 260), (32, 48, 96)),
    ("dpfp-3", "DPFP-3", SERIES[2], (*SIZES, 600), (340, 360), (48, 72, 96)),
    ("favor-64", "FAVOR+, m = 64", WRONG, FEW),
    ("favor-128", "FAVOR+, m = 128", WRONG, FEW),
    ("favor-512", "FAVOR+, m = 512", WRONG, FEW),
    # Some of its later losses are below 0.001 again.
    ("softmax", "softmax attention", OTHER, SIZES, (340, inf), (32, 96)),
)
SETTING = Setting(
    tuple(
        Series(PUBLISHED[row[0]], "softmax" if row[0] == "softmax" else "sum", *row)
        for row in ROWS
    ),
    repeat=False,
    figure="Fig. 2",
    sizes=range(20, 601, 20),
    anchors=(20, 100, 200),
    d_key=16,
    budget=1500,
)
#: Maps whose capacity is their number of features, and FAVOR+.
MAPS, PERFORMERS = SETTING.series[:4], SETTING.series[4:7]
#: From here on every published loss with FAVOR+ is 0.500, to three digits.
STUCK = 100
#: How many published losses are below the law, of all beyond capacity: those of the
#: 30 sizes of the authors' logs, of which `_LOGS` has 20.
BELOW = "24 of 75 (logs of Fig. 2)"
#: Marker and line of the points of each protocol.
ASKED: dict[str, tuple[str, Any]] = {ALL: ("o", "-"), ONE: ("^", ":")}


def claims(points: list[Point]) -> list[Claim]:
    every = [*SETTING.edges(points), _order(points)]
    if full(points):
        every += [*_differences(points), *_stuck(points)]
    return [*every, *_law(points), SETTING.agreement(points)]


def _order(points: list[Point]) -> Claim:
    """The more features, the lower the loss."""
    S, names = (380, MAPS[::-1]) if full(points) else (96, MAPS[:0:-1])
    theirs = " < ".join(f"{s.published[380]:.4f}" for s in names)
    published = f"{theirs} at S = 380 (Fig. 2)"
    return SETTING.order(points, names, S, ALL, f"S = {S}", published)


def _differences(points: list[Point]) -> list[Claim]:
    """Beyond capacity, the losses are the published ones, evaluated as these were.

    So evaluated, three layers of equal loss differ by 0.02 (DPFP-2, S = 320): a
    smaller tolerance than twice that would ask for luck.
    """
    every = []
    for s in MAPS:
        own, grid = (
            [p for p in s.of(each, ask=ALL) if _beyond(p)]
            for each in (points, SETTING.grid(points))
        )
        same = [{**p, "loss": p["loss_published"]} for p in _evaluated_twice(own)]
        label = f"{s.label}, beyond capacity"
        every.append(differences(label, 0.04, s.published, same, grid))
    return every


def _evaluated_twice(points: list[Point]) -> list[Point]:
    """Points of older versions were evaluated in one way only."""
    return [p for p in points if "loss_published" in p]


def _stuck(points: list[Point]) -> list[Claim]:
    """FAVOR+ as published: 0.5 from S = 100 on, and before it the order."""
    every = []
    for s in PERFORMERS:
        own, grid = (
            [p for p in s.of(each, ask=ALL) if p["S"] >= STUCK]
            for each in (points, SETTING.grid(points))
        )
        every.append(
            throughout(
                f"{s.label}: a loss of 0.5 from S = {STUCK} on",
                f"{_range(s.published)} (Fig. 2)",
                by_size(own),
                lambda loss: abs(loss - 0.5) < 5e-4,
                len({p["S"] for p in grid}),
                worst=lambda loss: abs(loss - 0.5),
                protocol=protocol(grid),
            )
        )
    names = PERFORMERS[::-1]
    published = " < ".join(f"{s.published[20]:.4f}" for s in names) + " (Fig. 2)"
    text = f"S = 20, FAVOR+, {ONE}: the more features, the lower the loss"
    order = SETTING.order(points, names, 20, ONE, "", published)
    return [*every, order._replace(text=text)]


def _range(published: Mapping[int, float]) -> str:
    """The published losses from S = 100 on."""
    losses = [loss for S, loss in published.items() if S >= STUCK]
    texts = dict.fromkeys(f"{f(losses):.4f}" for f in (min, max))
    return " to ".join(texts)


def _beyond(point: Point) -> bool:
    load = SETTING.load(SETTING.series_of(point), point["S"], point["d_key"])
    return load > 1.1


def _law(points: list[Point]) -> list[Claim]:
    """No memory with this number of features has a smaller loss over all keys."""
    off: dict[str, list[float]] = {}
    beyond, grid = (
        [p for p in each if _beyond(p)] for each in (points, SETTING.grid(points))
    )
    for p in beyond:
        smallest = law(p["S"], p["d_dot"])
        label = f"{SETTING.series_of(p).label}, {p['ask']}, S = {p['S']}"
        off.setdefault(label, []).append(_number(p["loss"]) - smallest)
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
    if not full(points):
        return every
    # As published: their sizes, of which each counts once.
    same, own = (
        [
            p
            for p in select(each, ask=ALL, seed=1)
            if p["S"] in SETTING.series_of(p).published
        ]
        for each in (grid, _evaluated_twice(beyond))
    )
    our_off = [_number(p["loss_published"]) - law(p["S"], p["d_dot"]) for p in own]
    below = Claim(
        "beyond capacity, evaluated as in the authors' code: losses below it",
        BELOW,
        f"{sum(x < 0 for x in our_off)} of {len(own)}" if own else "–",
        any(x < 0 for x in our_off) if len(own) == len(same) else None,
        protocol=protocol(same),
    )
    return [*every, below, _both_ways(beyond)]


def _both_ways(beyond: list[Point]) -> Claim:
    """Evaluated as in the authors' code, the same layers can be below the law."""
    own = [p for p in _evaluated_twice(beyond) if (p["map"], p["S"]) == ("dpfp-2", 320)]
    lowest = [
        [min(_number(p[name]) for p in own)] if own else []
        for name in ("loss_published", "loss")
    ]
    lowest.insert(1, [law(320, 256)])
    text = (
        "DPFP-2, S = 320, lowest loss of the seeds: below the law if evaluated as in "
    )
    text += "the authors' code, above it over all keys"
    return compared(text, "", lowest, ascending, spec=".4f")


def _number(loss: float | None) -> float:
    """A loss; that of a failed run is infinite."""
    return inf if loss is None else loss


def draw(points: list[Point]) -> Figure:
    every = [s for s in SETTING.series if s.of(points)]
    figure, axes = plots.grid(len(every), "number of keys $S$", "loss")
    largest = _LOGS[-1] if full(points) else max(p["S"] for p in points)
    for ax, s in zip(axes, every, strict=True):
        own, title = s.of(points), s.label
        features = own[0]["d_dot"]
        if s in MAPS:
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
            plots.series(ax, select(own, ask=ask), s.color, *look)
        if full(points):
            plots.published(ax, s.published, s.color)
        ax.set_title(title)
        ax.set(ylim=(-0.02, 0.54), yticks=[0, 0.25, 0.5])
    entries = [(*look, f"ours, {ask}") for ask, look in ASKED.items()]
    entries += [("x", "none", "published")] * full(points)
    entries.append(("", (0, (4, 2)), "law"))
    plots.key(figure, entries)
    return figure


EXPERIMENT = Experiment(
    name="capacity",
    title="How many pairs fast weights can hold",
    source="Schlag et al. 2021, setting 1, Fig. 2",
    cost="quick: 3 min of one core; full: 2.2 hours",
    points=SETTING.points,
    run=SETTING.run,
    claims=claims,
    draw=draw,
    setup=SETTING.setup,
)
