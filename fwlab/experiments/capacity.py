"""How many pairs fast weights can hold: setting 1 of Schlag et al. 2021.

At most `d_dot` features can be mutually orthogonal. Beyond that number of
keys, what is retrieved is a mixture of values.
"""

from typing import Any

import torch
from matplotlib.figure import Figure

from fwlab import plots
from fwlab.data.retrieval import law
from fwlab.experiments.experiment import (
    Claim,
    Experiment,
    Point,
    held,
    listed,
    numbers_claim,
    select,
)
from fwlab.experiments.retrieval import EPSILON, SETUP, SOLVED, Retriever, d_dot, train
from fwlab.plots import INK, OTHER, SERIES, TRAINED, WRONG

#: Final losses in the authors' logs, by S; one seed each. (Figures 2 and 4.)
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
    # "below .001" up to S = 340 gives no number to draw.
    "softmax": dict(
        zip(
            (360, 460, 500, 520, 540, 560, 580, 600),
            (0.0268, 0.0089, 0.1741, 0.0089, 0.0446, 0.0357, 0.0313, 0.0536),
            strict=True,
        )
    )
}
#: The published loss is at most 0.001 up to this S.
SOLVED_UP_TO = {
    "linear": 40,
    "dpfp-1": 80,
    "dpfp-2": 240,
    "dpfp-3": 340,
    "softmax": 340,
}
#: The same maps with keys of width 16: a quarter of the features.
QUICK = {
    "linear": (8, 12, 24, 48),
    "dpfp-1": (16, 24, 48, 96),
    "dpfp-2": (32, 48, 96, 128),
    "dpfp-3": (48, 72, 128),
    "softmax": (32, 128),
}
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


def points(quick: bool) -> list[Point]:
    """Order points by S, so that a stopped run has all maps up to some S."""
    grid = (
        [(S, name) for name, sizes in QUICK.items() for S in sizes]
        if quick
        else [(S, name) for S in _SIZES + _LARGER for name in LOOKS]
    )
    return [
        {
            "rule": "softmax" if name == "softmax" else "sum",
            "map": name,
            "S": S,
            "d_key": 16 if quick else 64,
            "seed": seed,
            "budget": 1500 if quick else 20_000,
        }
        for S, name in sorted(grid, key=lambda each: each[0])
        for seed in (1, 2, 3)
    ]


def run(point: Point) -> Point:
    S, d_key, name = point["S"], point["d_key"], point["map"]
    torch.manual_seed(point["seed"])
    # Only FAVOR+ as published needs the epsilon to be as published.
    epsilon = EPSILON if name.startswith("favor") else 0.0
    model = Retriever(S, d_key, point["rule"], name, epsilon)
    trained = train(model, S, repeat=False, budget=point["budget"])
    return {"d_dot": d_dot(name, d_key), **trained}


def claims(points: list[Point]) -> list[Claim]:
    if points[0]["d_key"] == 64:
        return [*_within(points), *_anchors(points), _beyond(points)]
    return [*_quick(points), _beyond(points)]


def _within(points: list[Point]) -> list[Claim]:
    """The published capacities."""
    every = []
    for name, limit in SOLVED_UP_TO.items():
        losses = plots.medians(select(points, map=name), "S", "loss")
        inside = {S: loss for S, loss in losses.items() if limit >= S}
        wanted = [S for S in _SIZES + _LARGER if limit >= S]
        holds = held([loss <= SOLVED for loss in inside.values()], len(wanted))
        worst = max(inside, key=lambda S: inside[S], default=None)
        text = "–"
        if worst is not None:
            text = f"{inside[worst]:.4f} at most (S = {worst}), up to S = {max(inside)}"
        what = f"{LOOKS[name][0]}: loss of 0.001 or less up to S = {limit}"
        every.append(Claim(what, "0.001", text, holds))
    return every


def _anchors(points: list[Point]) -> list[Claim]:
    losses = plots.medians(select(points, map="linear"), "S", "loss")
    return [
        numbers_claim(
            f"linear at S = {S}: within 0.015 of the published loss",
            f"{(wanted := PUBLISHED['linear'][S]):.4f}",
            [losses.get(S)],
            lambda loss, wanted=wanted: abs(loss - wanted) <= 0.015,
            ".4f",
        )
        for S in (80, 100, 200)
    ]


def _quick(points: list[Point]) -> list[Claim]:
    """Claim that half of the capacity is retrieved almost without loss."""
    every = []
    for name in QUICK:
        own = select(points, map=name)
        features = own[0]["d_dot"] if own else None
        inside = [p for p in own if features is None or 2 * p["S"] <= features]
        losses = plots.medians(inside, "S", "loss")
        limit = SOLVED if features is None else 0.05
        end = "throughout" if features is None else f"up to half of {features} keys"
        every.append(
            Claim(
                f"{LOOKS[name][0]}: loss of {limit} or less {end}",
                f"{limit} (ours)" if features else f"{limit}",
                listed(losses, ".4f"),
                all(x <= limit for x in losses.values()) if losses else None,
            )
        )
    return every


def _beyond(points: list[Point]) -> Claim:
    """Beyond the capacity the loss follows the law."""
    off: dict[tuple[str, Any], float] = {}
    for name in ("linear", "dpfp-1", "dpfp-2", "dpfp-3"):
        beyond = [p for p in select(points, map=name) if p["S"] > 1.1 * p["d_dot"]]
        for S, loss in plots.medians(beyond, "S", "loss").items():
            off[name, S] = loss - law(S, beyond[0]["d_dot"])
    worst = max(off, key=lambda each: abs(off[each]), default=None)
    text = "–"
    if worst is not None:
        text = (
            f"{off[worst]:+.3f} at most ({LOOKS[worst[0]][0]}, S = {worst[1]}; "
            f"{len(off)} medians)"
        )
    return Claim(
        "beyond capacity: within 0.04 of (1 - d_dot / S) / 2",
        "-0.030 to +0.053",
        text,
        None if worst is None else abs(off[worst]) <= 0.04,
    )


def draw(points: list[Point]) -> Figure:
    names = [name for name in LOOKS if select(points, map=name)]
    figure, axes = plots.grid(len(names), "number of keys $S$", "loss")
    full = points[0]["d_key"] == 64
    largest = _LARGER[-1] if full else max(p["S"] for p in points)
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
        plots.series(ax, own, color, "o", "-")
        if full:
            plots.published(ax, PUBLISHED[name], color)
        ax.set_title(title)
        ax.set(ylim=(-0.02, 0.54), yticks=[0, 0.25, 0.5])
    entries = [("o", "-", "ours: median, seeds"), ("", (0, (4, 2)), "law")]
    if full:
        entries.insert(1, ("x", "none", "published"))
    plots.key(figure, entries)
    return figure


EXPERIMENT = Experiment(
    name="capacity",
    title="How many pairs fast weights can hold",
    source="Schlag et al. 2021, setting 1, Figs. 2 and 4",
    cost="quick: 3 min of one core; full: about 15 hours (estimated)",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: SETUP,
)
