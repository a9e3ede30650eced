"""What the figures of experiments share."""

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fwlab.experiments.experiment import Point, medians
from fwlab.plots import INK

__all__ = [
    "INK",
    "WIDTH",
    "grid",
    "key",
    "legend",
    "listed",
    "new",
    "published",
    "rows",
    "series",
]

WIDTH = 5.0
"""Of every figure, in inches: about that of a phone, so that letters keep
their size there."""


def new(height: float) -> tuple[Figure, Axes]:
    """A figure with one set of axes, in the width of the site."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def grid(
    count: int, columns: int = 2, height: float = 1.9
) -> tuple[Figure, list[Axes]]:
    """A figure with this many small axes that share their scales."""
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH, height * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    flat = list(axes.flat)
    for ax in flat[count:]:
        ax.set_visible(False)
    for ax in flat[max(0, count - columns) : count]:
        ax.xaxis.set_tick_params(labelbottom=True)
    return figure, flat[:count]


def series(
    ax: Axes,
    points: list[Point],
    color: str,
    marker: str,
    line: str,
    label: str | None = None,
    y: str = "loss",
    x: str = "S",
) -> None:
    """Each seed as a mark, and a line through the medians."""
    if not points:
        return
    ax.plot(
        [p[x] for p in points],
        [nan if p[y] is None else p[y] for p in points],
        linestyle="none",
        marker=marker,
        markersize=4,
        color=color,
        alpha=0.6,
        markeredgewidth=0,
    )
    middle = medians(points, x, y)
    ax.plot(
        list(middle),
        list(middle.values()),
        color=color,
        linestyle=line,
        marker=marker,
        markersize=5.5,
        markeredgewidth=0,
        label=label,
    )


def published(
    ax: Axes, losses: Mapping[Any, float], color: str, label: str | None = None
) -> None:
    """Published losses as crosses."""
    ax.plot(
        list(losses),
        list(losses.values()),
        linestyle="none",
        marker="x",
        markersize=6,
        markeredgewidth=1.4,
        color=color,
        label=label,
    )


def rows(
    ax: Axes,
    named: Mapping[str, Sequence[float | None]],
    color: str,
    marker: str,
    label: str | None = None,
) -> None:
    """Each number as a mark in the row of its name; None has no mark."""
    marks = [
        (nan if x is None else x, row)
        for row, numbers in enumerate(named.values())
        for x in numbers
    ]
    ax.plot(
        [x for x, _ in marks],
        [row for _, row in marks],
        linestyle="none",
        marker=marker,
        markersize=6,
        markeredgewidth=1.4 if marker in "x+" else 0,
        alpha=1 if marker in "x+" else 0.7,
        color=color,
        label=label,
    )
    ax.set_yticks(range(len(named)), list(named))
    ax.set_ylim(len(named) - 0.5, -0.5)


def legend(figure: Figure, ax: Axes, columns: int) -> None:
    """One legend above all axes."""
    figure.legend(
        *ax.get_legend_handles_labels(), loc="outside upper left", ncols=columns
    )


def key(figure: Figure, entries: list[tuple[str, Any, str]]) -> None:
    """A legend of marks and lines that mean the same in all axes."""
    handles = [
        Line2D([], [], color=INK, marker=marker, linestyle=line, label=label)
        for marker, line, label in entries
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(entries))


def listed(found: Mapping[Any, float], spec: str, x: str = "S") -> str:
    """Numbers by `x`, as text."""
    if not found:
        return "–"
    return ", ".join(f"{value:{spec}} ({x} = {at})" for at, value in found.items())
