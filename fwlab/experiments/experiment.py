"""What an experiment is: points to run, and what their numbers say."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isinf
from operator import lt
from statistics import median
from typing import Any, NamedTuple

from matplotlib.figure import Figure

#: The settings of a point and its results, as plain values.
Point = dict[str, Any]


class Claim(NamedTuple):
    """One claim, and what came out.

    - `text`: the claim.
    - `published`: the published numbers with their table; "" = nobody has
      published any: a claim of ours.
    - `found`: our numbers, medians with the range over seeds, as text.
    - `holds`: whether it holds of the medians; None = not run.
    - `apart`: whether all seeds agree: all of one side are below all of the
      other's. None = nothing to compare, or fewer than three seeds.
    - `protocol`: how our protocol differs from the published one; "" = it
      does not.
    """

    text: str
    published: str
    found: str
    holds: bool | None
    apart: bool | None = None
    protocol: str = ""

    @property
    def verdict(self) -> str:
        """What came out, in a word or two; overlapping seeds are no yes."""
        if self.holds is None:
            return "not run"
        if self.apart is False:
            return "seeds overlap"
        yes, no = ("reproduced", "not") if self.published else ("holds", "does not")
        return yes if self.holds else no


@dataclass(frozen=True)
class Experiment:
    """One published figure or table.

    - `name`: of the command and of its files.
    - `title`: a few words for lists.
    - `source`: where it was published.
    - `cost`: time of the full and of the quick version.
    - `points`: the points of the full or (True) of the quick version,
      each with what identifies it.
    - `run`: what running a point adds to it.
    - `claims`: what the points say about the claims.
    - `draw`: the figure of the points.
    - `setup`: hyper-parameters of a point that are not among its settings.
    """

    name: str
    title: str
    source: str
    cost: str
    points: Callable[[bool], list[Point]]
    run: Callable[[Point], Point]
    claims: Callable[[list[Point]], list[Claim]]
    draw: Callable[[list[Point]], Figure]
    setup: Callable[[Point], Mapping[str, Any]] = lambda point: {}


def verdict(claims: Iterable[Claim]) -> str:
    """Sum up the published claims, or, where there are none, those of ours.

    - Returns "reproduced", "partly", "not" or "not run"; of claims of ours
      "ours: holds", "ours: partly" or "ours: does not".
    """
    every = list(claims)
    counted = [claim for claim in every if claim.published] or every
    words = {claim.verdict for claim in counted}
    run = words - {"not run"}
    if not run:
        return "not run"
    word = run.pop() if len(run) == 1 and "seeds overlap" not in run else "partly"
    so_far = " so far" if "not run" in words else ""
    return f"{'' if counted[0].published else 'ours: '}{word}{so_far}"


def select(points: Iterable[Point], **wanted: Any) -> list[Point]:
    """The points with these values."""
    return [p for p in points if all(p[k] == v for k, v in wanted.items())]


def losses(
    points: Iterable[Point], name: str = "loss", **wanted: Any
) -> list[float | None]:
    """The losses, or other numbers, of the points with these values; None = failed."""
    return [p[name] for p in select(points, **wanted)]


def compared(
    text: str,
    published: str,
    sides: Sequence[Sequence[float | None]],
    holds: Callable[..., bool] = lt,
    *,
    spec: str = ".3f",
    protocol: str = "",
) -> Claim:
    """A claim that compares sides, or one side with a threshold.

    - `text`, `published`, `protocol`: as in `Claim`.
    - `sides`: the numbers of all seeds of each side; None = failed, which
      counts as an infinite loss. An empty side has not been run.
    - `holds`: takes the median of each side, and says whether the claim holds;
      of more than two sides, or of two of them.
    - `spec`: how numbers are written.
    - `apart` of the claim: neighbouring sides do not overlap, all if it holds,
      and otherwise two that are in the wrong order; of one side, `holds` says
      the same of every seed.
    """
    every = [[inf if x is None else x for x in side] for side in sides]
    yes = holds(*map(median, every)) if all(every) else None
    apart = None
    if yes is not None and min(map(len, every)) >= 3:
        # Of a chain that does not hold, one pair that is reversed is enough.
        pairs = [
            (a, b) for a, b in pairwise(every) if yes or not holds(median(a), median(b))
        ]
        enough = all if yes else any
        apart = (
            enough(max(a) < min(b) or max(b) < min(a) for a, b in pairs)
            if len(every) > 1
            else len({holds(x) for x in every[0]}) == 1
        )
    return Claim(
        text,
        published,
        " against ".join(_range(side, spec) for side in every if side) or "–",
        yes,
        apart,
        protocol,
    )


def below_part(
    text: str, low: Mapping[int, float], high: Mapping[int, float], part: float
) -> Claim:
    """A claim of ours: one side is below a part of the other, seed by seed.

    - `low`, `high`: the numbers of each side, by seed; infinite = failed.
    - `part`: of the number of `high`; the pair counts, so sides may overlap.
    """
    sides = [[side[seed] for seed in low if seed in high] for side in (low, high)]
    off = [a if isinf(a) else a - part * b for a, b in zip(*sides, strict=True)]
    found = compared(text, "", sides).found
    return compared(text, "", [off], lambda x: x < 0)._replace(found=found)


def throughout(
    text: str,
    published: str,
    groups: Mapping[Any, Sequence[float | None]],
    holds: Callable[[float], bool],
    expected: int,
    *,
    spec: str = ".4f",
    x: str = "S",
    worst: Callable[[float], float] | None = None,
    protocol: str = "",
) -> Claim:
    """A claim about every group of points, such as every size.

    - `text`, `published`, `protocol`: as in `Claim`.
    - `groups`: the numbers of all seeds of each group, by its value of `x`;
      None = failed.
    - `holds`: takes the median of a group, and says whether the claim holds.
    - `expected`: number of groups at least; with fewer, a claim that has held so far
      is not run.
    - `spec`, `x`: how numbers are written, and after them their group.
    - `worst`: show only one group, the one whose median has the largest value of
      this: of those that fail, if there are any, and among them of those whose
      seeds agree; otherwise of those whose seeds do not; None = show all.
    - `apart` of the claim: whether all seeds agree, of all groups if it holds,
      and otherwise of one that fails; None where they do, but are fewer than
      three.
    """
    every = {
        at: [inf if n is None else n for n in numbers]
        for at, numbers in groups.items()
        if numbers
    }
    middle = {at: median(numbers) for at, numbers in every.items()}
    good = {at: holds(number) for at, number in middle.items()}
    agrees = {at: len({*map(holds, numbers)}) == 1 for at, numbers in every.items()}
    shown = list(every)
    if worst is not None and every:
        rank = {
            at: (not good[at], good[at] != agrees[at], worst(middle[at]))
            for at in every
        }
        shown = [max(every, key=rank.__getitem__)]
    found = ", ".join(
        f"{_range(every[at], spec)} ({f'{x} = {at}' if x else at})" for at in shown
    )
    if len(shown) < len(every):
        found += f", the worst of {len(every)}"
    yes = (True if len(good) >= expected else None) if all(good.values()) else False
    # One group that fails is enough, whatever the seeds of others say.
    decide = [at for at in every if yes is not False or not good[at]]
    agree = [agrees[at] for at in decide]
    enough = [len(every[at]) >= 3 for at in decide]
    sure = [a and e for a, e in zip(agree, enough, strict=True)]
    if yes is False:
        apart = True if any(sure) else None if any(agree) else False
    else:
        apart = False if not all(agree) else True if sure and all(sure) else None
    return Claim(text, published, found or "–", yes, apart, protocol)


def _range(numbers: Sequence[float], spec: str) -> str:
    """The median, with the range where there are several, as text."""
    low, middle, high = (
        "failed" if isinf(x) else f"{x:{spec}}"
        for x in (min(numbers), median(numbers), max(numbers))
    )
    return middle if len(numbers) == 1 else f"{middle} [{low}, {high}]"
