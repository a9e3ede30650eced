"""What an experiment is: points to run, and what their numbers say."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.figure import Figure

#: The settings of a point and its results, as plain values.
Point = dict[str, Any]


class Claim(NamedTuple):
    """One claim, and what came out.

    - `text`: the claim.
    - `source`: what was published, or is expected.
    - `found`: our number, as text.
    - `holds`: whether it holds; None = not yet run.
    """

    text: str
    source: str
    found: str
    holds: bool | None


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
    """

    name: str
    title: str
    source: str
    cost: str
    points: Callable[[bool], list[Point]]
    run: Callable[[Point], Point]
    claims: Callable[[list[Point]], list[Claim]]
    draw: Callable[[list[Point]], Figure]


def verdict(claims: Iterable[Claim]) -> str:
    """Sum up all claims: reproduced, partly or not."""
    every = [claim.holds for claim in claims]
    held = [holds for holds in every if holds is not None]
    if not held:
        return "not yet run"
    word = "reproduced" if all(held) else "partly" if any(held) else "not"
    return word if len(held) == len(every) else f"{word} so far"


def select(points: Iterable[Point], **wanted: Any) -> list[Point]:
    """The points with these values."""
    return [p for p in points if all(p[k] == v for k, v in wanted.items())]


def numbers_claim(
    text: str,
    source: str,
    numbers: Sequence[float | None],
    holds: Callable[..., bool],
    spec: str = ".3f",
    between: str = " against ",
    unit: str = "",
) -> Claim:
    """A claim about one number, or about a few that are compared.

    - `text`, `source`: as in `Claim`.
    - `numbers`: what came out; None = not yet run.
    - `holds`: takes all numbers, and says whether the claim holds.
    - `spec`, `between`, `unit`: how numbers are written, what is written
      between two, and after the last one.
    """
    known = [x for x in numbers if x is not None]
    listed = between.join(f"{x:{spec}}" for x in known)
    complete = len(known) == len(numbers)
    return Claim(
        text,
        source,
        f"{listed}{unit}" if known else "–",
        holds(*known) if complete else None,
    )


def held(good: Sequence[bool], wanted: int) -> bool | None:
    """None if fewer than `wanted` are there, and all of them are good."""
    if not all(good):
        return False
    return True if len(good) == wanted else None


def listed(numbers: Mapping[Any, float], spec: str, x: str = "S") -> str:
    """Numbers by `x`, as text."""
    every = [f"{value:{spec}} ({x} = {at})" for at, value in numbers.items()]
    return ", ".join(every) or "–"
