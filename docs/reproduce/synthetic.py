"""Define the synthetic settings of Schlag et al. 2021: their grids, and claims by size.

A setting is a table of series: the rules to train, the numbers of keys, and
the published losses.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from operator import ge, le
from statistics import median
from typing import Any, NamedTuple

import torch
from frame import Claim, Numbers, Point, Points, every, order

from fwlab.models import retriever
from fwlab.models.retriever import ALL, BATCH, GAIN, ONE, SHORT_PATIENCE, SOLVED, d_dot


class Series(NamedTuple):
    """Hold a rule with a feature map, its grid, its training and its plot style.

    - `published`: final losses in the authors' logs, by S; one seed each.
    - `sizes`: numbers of keys at which all keys are queried. One key is queried, as
      published, at sizes that are anchors of the setting or near the capacity.
    - `edge`: the last S up to which all published losses are at most 0.001, and the
      first from which none is; (0, 0) = the rule never is; None = no claim.
    - `quick`, `quick_one`: sizes of the quick version, for all keys and for one key.
    - `one`: sizes at which one key is queried instead of these sizes.
    - `lr`, `batch`: learning rate and batch size of training with one key.
    """

    published: Mapping[int, float]
    rule: str
    map: str
    label: str
    color: str
    sizes: tuple[int, ...]
    edge: tuple[float, float] | None = None
    quick: tuple[int, ...] = ()
    quick_one: tuple[int, ...] = ()
    one: tuple[int, ...] | None = None
    marker: str = ""
    line: str = ""
    lr: float = 1e-3
    batch: int = BATCH[ONE]

    def of(self, points: Points, **wanted: Any) -> Points:
        """Select the runs of the series with the given column values."""
        return points(rule=self.rule, map=self.map, **wanted)


@dataclass(frozen=True)
class Setting:
    """Define a retrieval task by its series (rule, feature map) and their settings.

    - `series`: rules and feature maps.
    - `repeat`: True if keys return, in sequences of 2S pairs.
    - `figure`: where the losses were published.
    - `anchors`: sizes at which one key is queried as well.
    - `d_key`, `budget`: key width and optimiser steps of the quick version.
    """

    series: tuple[Series, ...]
    repeat: bool
    figure: str
    anchors: tuple[int, ...]
    d_key: int
    budget: int

    def points(self, quick: bool) -> list[Point]:
        """List settings by number of keys, so that partial results have all series."""
        d_key, budget = (self.d_key, self.budget) if quick else (64, 20_000)
        grid = []
        for s in self.series:
            sizes, one = (s.quick, s.quick_one) if quick else (s.sizes, s.one)
            load = {
                S: self.load(s.rule, s.map, S, d_key) for S in (*sizes, *(one or ()))
            }
            if one is None:
                one = [S for S in sizes if S in self.anchors or 0.85 <= load[S] <= 1.1]
            for S, ask in [*product(sizes, [ALL]), *product(one, [ONE])]:
                # Training with one key takes longest, so few sizes have three seeds.
                unsure = 0.6 <= load[S] <= 1.5 and (ask == ALL or s.map == "linear")
                # Unlike the paper, stop early at sizes that cannot be solved.
                short = load[S] > 1.1 or (self.repeat and s.rule == "sum")
                grid += [
                    {
                        "rule": s.rule,
                        "map": s.map,
                        "S": S,
                        "d_key": d_key,
                        "ask": ask,
                        "batch": BATCH[ALL] if ask == ALL else s.batch,
                        "seed": seed,
                        "budget": budget,
                        "gain": GAIN if ask == ALL and short else 0.0,
                    }
                    for seed in ((1, 2, 3) if quick or S == 20 or unsure else (1,))
                ]
        return sorted(grid, key=lambda point: point["S"])

    def load(self, rule: str, map: str, S: int, d_key: int, **_: Any) -> float:
        """Return the number of keys per feature; 0 = features are not the limit."""
        adds = self.repeat and rule == "sum"
        if adds or rule == "fwm" or map.startswith("favor"):
            return 0.0
        return S / (d_dot(map, d_key) or inf)

    def series_of(self, point: Point) -> Series:
        same = point["rule"], point["map"]
        return next(s for s in self.series if (s.rule, s.map) == same)

    def run(self, point: Point) -> Point:
        S, phi, repeat = point["S"], point["map"], self.repeat
        torch.manual_seed(point["seed"])
        # Only FAVOR+ needs the epsilon of the paper to reproduce its losses.
        epsilon = retriever.EPSILON if phi.startswith("favor") else 0.0
        model = retriever.Retriever(S, point["d_key"], point["rule"], phi, epsilon)
        how = {name: point[name] for name in ("budget", "batch", "ask", "gain")}
        length = 2 * S if repeat else S
        lr = self.series_of(point).lr
        trained = retriever.train(model, length, repeat, lr=lr, **how)
        loss = retriever.evaluate(model, length, repeat, as_published=not repeat)
        again = None if trained["loss"] is None else round(loss, 5)
        name = "loss_2S" if repeat else "loss_published"
        return {"d_dot": d_dot(phi, point["d_key"]), **trained, name: again}

    def setup(self, point: Point) -> Point:
        return {**retriever.SETUP, "lr": self.series_of(point).lr}

    # --- Claims -----------------------------------------------------------

    def edges(self, points: Points):
        """Yield the published claims on which sizes are solved and which are not."""
        for s, ask, solved in product(self.series, (ALL, ONE), (True, False)):
            if s.edge:
                # Narrower keys have fewer features. Attention has no features.
                scale = 1 if s.rule == "softmax" else points[0]["d_key"] / 64
                yield from self.edge(s.of(points, ask=ask), s, ask, solved, scale)

    def edge(self, points: Points, s: Series, ask: str, solved: bool, scale: float):
        """Yield a claim on the sizes on one side of a series' edge, if any exist."""
        inside, edge = (le, s.edge[0]) if solved else (ge, s.edge[1])
        own = Points(p for p in points if inside(p["S"], edge * scale))
        sizes = own.by("S")
        if not sizes:
            return
        theirs = {
            S: loss
            for S, loss in s.published.items()
            if inside(S, edge) and (S in sizes or narrow(own))
        }
        most, bound = (max, "at most") if solved else (min, "at least")
        # Of softmax attention's published losses, only this limit is known.
        limit = f"{most(theirs.values()):.4f}" if theirs else SOLVED
        yield every(
            f"{s.label}, {ask}: {'' if solved else 'not '}solved {at(sizes, solved)}",
            by_size(own),
            lambda loss: (loss <= SOLVED) is solved,
            f"{bound} {limit} {at(theirs or sizes, solved)} ({self.figure})",
            worst=lambda loss: loss if solved else -loss,
            protocol=protocol(own),
        )

    def agreement(self, points: Points) -> Claim:
        """Return a claim that queries of all keys and of one key give equal losses."""
        off, seeds = {}, []
        for some in points.by("rule", "map", "S").values():
            p, both = some[0], [asked["loss"] for asked in some.by("ask").values()]
            if len(both) == 2 and not 0.85 <= self.load(**p) <= 1.1:
                label = f"{self.series_of(p).label}, S = {p['S']}"
                off[label] = [median(both[0]) - median(both[1])]
                seeds += map(len, both)
        claim = every(
            f"{ALL} and {ONE} end within 0.02 of each other, except near the capacity",
            *(off, lambda x: abs(x) <= 0.02),
            spec="+.4f",
            x="",
            worst=abs,
        )
        return claim._replace(seeds=min(seeds, default=0))


def narrow(points: Points) -> bool:
    """Return True if keys are narrower than in the paper."""
    return points[0]["d_key"] < 64


def by_size(points: Points, column: str = "loss") -> dict[int, Numbers]:
    """Return the values of a column for all seeds, by number of keys."""
    return {S: some[column] for S, some in points.by("S").items()}


def protocol(points: Points) -> str:
    """Describe how the protocol of the runs differs from the published protocol."""
    p, gain = points[0], max(p.get("gain", 0) for p in points)
    parts = [f"keys of width {p['d_key']}"] if narrow(points) else []
    if p.get("ask") == ALL:
        parts.append(f"asks {ALL} of {p['batch']} sequences a step")
    parts.append(f"{p['budget']:,} optimiser steps at most")  # Paper: 100,000 steps.
    if gain:
        rule = f"{SHORT_PATIENCE} evaluations that gain at most {gain:g}"
        parts.append(f"stops after {rule}")
    return ", ".join(parts)


def at(sizes: Collection[int], solved: bool) -> str:
    """Return "up to" the largest solved size, or "from" the smallest unsolved size."""
    if len(sizes) == 1:
        return f"at S = {min(sizes)}"
    return f"up to S = {max(sizes)}" if solved else f"from S = {min(sizes)}"


def ordered(text: str, points: Points, series: Sequence[Series], S: int, where: str):
    """Return a claim that the losses of `series` are in the given order, lowest first.

    - `points`: points of one size and one kind of query.
    - `S`, `where`: the published size, and its figure.
    """
    losses = {s.label: s.of(points)["loss"] for s in series}
    theirs = " < ".join(f"{s.published[S]:.4f}" for s in series)
    published = f"{theirs} {where}"
    return order(text, losses, published, spec=".4f", protocol=protocol(points))


def near(
    label: str,
    points: Points,
    theirs: Mapping[int, float],
    column: str = "loss",
    most: float = 0.04,
    where: str = "logs",
    spec: str = "+.4f",
) -> Claim:
    """Return a claim that losses are near the published losses of the same sizes.

    - `column`: column of the losses, by kind of evaluation.
    """
    own = {S: x for S, x in by_size(points, column).items() if S in theirs}
    losses = [theirs[S] for S in own]
    return every(
        f"{label}: within {most} of the published losses",
        {S: [x - theirs[S] for x in seeds] for S, seeds in own.items()},
        lambda off: abs(off) <= most,
        f"{min(losses):.4f} to {max(losses):.4f} ({where})",
        spec=spec,
        worst=abs,
        protocol=protocol(points),
    )
