"""What the synthetic settings of Schlag et al. 2021 have in common.

Their grids, and the claims about losses by the number of keys.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from statistics import median
from typing import Any, NamedTuple

import torch

from fwlab.experiments.experiment import (
    Claim,
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
    SHORT_PATIENCE,
    SOLVED,
    Retriever,
    d_dot,
    evaluate,
    train,
)


class Series(NamedTuple):
    """A rule with a feature map, and how it is trained and drawn.

    - `published`: final losses in the authors' logs, by S; one seed each.
    - `sizes`: numbers of keys at which all keys are asked. One is asked, as
      published, where these are anchors of the setting or near the capacity.
    - `edge`: the last S up to which all published losses are at most 0.001,
      and the first from which none is; None = no claim.
    - `quick`, `quick_one`: sizes of the quick version, by what is asked.
    - `one`: sizes at which one key is asked instead of these.
    - `lr`, `batch`: of training with one key.
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

    def of(self, points: Iterable[Point], **wanted: Any) -> list[Point]:
        """Its points with these values."""
        return select(points, rule=self.rule, map=self.map, **wanted)


@dataclass(frozen=True)
class Setting:
    """A task, and the grids of its series.

    - `series`: rules and feature maps.
    - `repeat`: whether keys return, in sequences of 2S pairs.
    - `figure`: where the losses were published, at `sizes`.
    - `anchors`: where one key is asked as well.
    - `d_key`, `budget`: of the quick version: width of keys, optimiser steps.
    """

    series: tuple[Series, ...]
    repeat: bool
    figure: str
    sizes: Collection[int]
    anchors: tuple[int, ...]
    d_key: int
    budget: int

    # --- Points -----------------------------------------------------------

    def points(self, quick: bool) -> list[Point]:
        """Order points by S, so that a stopped run has all series up to some S."""
        return [*self._points[quick]]

    @cached_property
    def _points(self) -> tuple[list[Point], list[Point]]:
        grids: tuple[list[Point], list[Point]] = [], []
        for s in self.series:
            near = [S for S in s.sizes if 0.85 <= self.load(s, S) <= 1.1]
            one = [S for S in s.sizes if S in self.anchors or S in near]
            for S, ask in _pairs(s.sizes, one if s.one is None else s.one):
                unsure = 0.6 <= self.load(s, S) <= 1.5
                # Asking one key takes longest.
                many = S == 20 or (unsure and (ask == ALL or s.map == "linear"))
                for seed in (1, 2, 3) if many else (1,):
                    grids[0].append(self._point(s, S, ask, seed, 64, 20_000))
            for S, ask in _pairs(s.quick, s.quick_one):
                for seed in (1, 2, 3):
                    sizes = self.d_key, self.budget
                    grids[1].append(self._point(s, S, ask, seed, *sizes))
        for grid in grids:
            grid.sort(key=lambda point: point["S"])
        return grids

    def _point(
        self, series: Series, S: int, ask: str, seed: int, d_key: int, budget: int
    ) -> Point:
        full = self.load(series, S, d_key) > 1.1
        adds = self.repeat and series.rule == "sum"
        return {
            "rule": series.rule,
            "map": series.map,
            "S": S,
            "d_key": d_key,
            "ask": ask,
            "batch": BATCH[ALL] if ask == ALL else series.batch,
            "seed": seed,
            "budget": budget,
            # What can't be solved; the protocol of the paper has no such rule.
            "gain": GAIN if ask == ALL and (full or adds) else 0.0,
        }

    def load(self, series: Series, S: int, d_key: int = 64) -> float:
        """Keys per feature; 0 where another thing than features sets the limit."""
        adds = self.repeat and series.rule == "sum"
        if adds or series.rule == "fwm" or series.map.startswith("favor"):
            return 0.0
        return S / (d_dot(series.map, d_key) or inf)

    def series_of(self, point: Point) -> Series:
        return next(s for s in self.series if s.of([point]))

    def run(self, point: Point) -> Point:
        S, d_key = point["S"], point["d_key"]
        torch.manual_seed(point["seed"])
        # Only FAVOR+ as published needs the epsilon to be as published.
        epsilon = EPSILON if point["map"].startswith("favor") else 0.0
        model = Retriever(S, d_key, point["rule"], point["map"], epsilon)
        how = {name: point[name] for name in ("budget", "batch", "ask", "gain")}
        lr, repeat = self.series_of(point).lr, self.repeat
        trained = train(model, 2 * S if repeat else S, repeat, lr=lr, **how)
        if repeat:
            name, loss = "loss_2S", evaluate(model, 2 * S, True)
        else:
            name, loss = "loss_published", evaluate(model, S, False, as_published=True)
        failed = trained["loss"] is None
        return {
            "d_dot": d_dot(point["map"], d_key),
            **trained,
            name: None if failed else round(loss, 5),
        }

    def setup(self, point: Point) -> Point:
        """The hyper-parameters that are not among the settings of a point."""
        return {**SETUP, "lr": self.series_of(point).lr}

    # --- What came out ----------------------------------------------------

    def grid(self, points: Sequence[Point], **wanted: Any) -> list[Point]:
        """All points, with these values, of the version that some are of."""
        return select(self._points[not full(points)], **wanted)

    def edges(self, points: Sequence[Point]) -> list[Claim]:
        """Where the published losses are at most 0.001, and where they are not."""
        return [
            claim
            for s in self.series
            if s.edge
            for ask in (ALL, ONE)
            for solved in (True, False)
            for claim in self._edge(points, s, ask, solved)
        ]

    def _edge(
        self, points: Sequence[Point], series: Series, ask: str, solved: bool
    ) -> list[Claim]:
        last, first = series.edge or (0, 0)
        # Features that are fewer hold less; attention has none, and a rule that
        # never solves the task does so at no width.
        scale = points[0]["d_key"] / 64 if last else 0
        scale = 1 if series.rule == "softmax" else scale

        def within(S: float, scale: float = 1) -> bool:
            return last * scale >= S if solved else first * scale <= S

        own, grid = (
            [p for p in series.of(each, ask=ask) if within(p["S"], scale)]
            for each in (points, self.grid(points))
        )
        sizes = {p["S"] for p in grid}
        theirs = {
            S: loss
            for S, loss in series.published.items()
            if within(S) and (S in sizes or not full(points))
        }
        if not sizes:
            return []
        # Of softmax attention we know no more of these losses.
        small = f"at most {SOLVED:g} {at(sizes, solved)}"
        solves = "solved" if solved else "not solved"
        return [
            throughout(
                f"{series.label}, {ask}: {solves} {at(sizes, solved)}",
                f"{bound(theirs, solved) if theirs else small} ({self.figure})",
                by_size(p for p in own if p["S"] in sizes),
                lambda loss: (loss <= SOLVED) is solved,
                len(sizes),
                worst=lambda loss: loss if solved else -loss,
                protocol=protocol(grid),
            )
        ]

    def order(
        self,
        points: Sequence[Point],
        every: Sequence[Series],
        S: int,
        ask: str,
        text: str,
        published: str,
    ) -> Claim:
        """Whether losses at a size are in this order, the lowest first.

        - `text`, `published`: what comes before the labels, and the numbers.
        """
        some, grid = (
            select(each, S=S, ask=ask) for each in (points, self.grid(points))
        )
        return compared(
            f"{text}: {' < '.join(s.label for s in every)}",
            published,
            [losses(s.of(some)) for s in every],
            ascending,
            spec=".4f",
            protocol=protocol([p for s in every for p in s.of(grid)]),
        )

    def agreement(self, points: Sequence[Point]) -> Claim:
        """Whether asking all keys ends where asking one key does."""

        def ends(points: Iterable[Point]) -> dict[str, dict[str, list[float]]]:
            ends: dict[str, dict[str, list[float]]] = {}
            for p in points:
                s = self.series_of(p)
                if not 0.85 <= self.load(s, p["S"], p["d_key"]) <= 1.1:
                    both = ends.setdefault(f"{s.label}, S = {p['S']}", {})
                    loss = p.get("loss")
                    both.setdefault(p["ask"], []).append(inf if loss is None else loss)
            return {label: both for label, both in ends.items() if len(both) == 2}

        return throughout(
            f"{ALL} and {ONE} end within 0.02 of each other, except near the capacity",
            "",
            {
                label: [median(both[ALL]) - median(both[ONE])]
                for label, both in ends(points).items()
            },
            lambda x: abs(x) <= 0.02,
            len(ends(self.grid(points))) or 1,
            spec="+.4f",
            x="",
            worst=abs,
        )


def _pairs(sizes: Iterable[int], one: Iterable[int]) -> list[tuple[int, str]]:
    return [*((S, ALL) for S in sizes), *((S, ONE) for S in one)]


def full(points: Sequence[Point]) -> bool:
    """Whether points have the paper's width of keys."""
    return points[0]["d_key"] == 64


def by_size(points: Iterable[Point]) -> dict[int, list[float | None]]:
    """The losses of all seeds, by the number of keys."""
    found: dict[int, list[float | None]] = {}
    for p in sorted(points, key=lambda point: point["S"]):
        found.setdefault(p["S"], []).append(p["loss"])
    return found


def protocol(grid: Sequence[Point]) -> str:
    """How the protocol of points, which are asked the same, differs from the
    published one.
    """
    point, gain = grid[0], max(p["gain"] for p in grid)
    narrow = "" if point["d_key"] == 64 else f"keys of width {point['d_key']}"
    ask = (
        f"asks {ALL} of {point['batch']} sequences a step"
        if point["ask"] == ALL
        else ""
    )
    short = f"{point['budget']:,} optimiser steps at most"
    budget = "" if point["budget"] == PUBLISHED_BUDGET else short
    rule = f"stops after {SHORT_PATIENCE} evaluations that gain at most {gain:g}"
    stop = rule if gain else ""
    return ", ".join(part for part in (narrow, ask, budget, stop) if part)


def at(sizes: Collection[int], solved: bool) -> str:
    """Sizes in words: of what is solved the last one, and otherwise the first."""
    if len(sizes) == 1:
        return f"at S = {min(sizes)}"
    return f"up to S = {max(sizes)}" if solved else f"from S = {min(sizes)}"


def bound(losses: Mapping[int, float], solved: bool) -> str:
    """Published losses in words."""
    most = f"at most {max(losses.values()):.4f}"
    least = f"at least {min(losses.values()):.4f}"
    return f"{most if solved else least} {at(losses.keys(), solved)}"


def differences(
    label: str,
    near: float,
    published: Mapping[int, float],
    own: Iterable[Point],
    grid: Sequence[Point],
) -> Claim:
    """Whether losses are near the published ones.

    - `label`: of the rule, the map, and the sizes.
    - `near`: the largest difference of a median that is called near.
    - `published`: the losses to compare with, by size; only those of the
      grid count.
    - `own`, `grid`: the finished points, and all of them.
    """
    theirs = {p["S"]: published[p["S"]] for p in grid if p["S"] in published}
    return throughout(
        f"{label}: within {near} of the published losses",
        f"{min(theirs.values()):.4f} to {max(theirs.values()):.4f} (logs)",
        {
            S: [None if x is None else x - theirs[S] for x in every]
            for S, every in by_size(own).items()
            if S in theirs
        },
        lambda off: abs(off) <= near,
        len(theirs),
        spec="+.4f",
        worst=abs,
        protocol=protocol(grid),
    )


def ascending(*losses: float) -> bool:
    """Whether each number is larger than the one before."""
    return all(a < b for a, b in pairwise(losses))
