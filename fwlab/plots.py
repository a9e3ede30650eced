"""Define the style of every figure, and draw common plots.

Colours have one meaning everywhere, and are never the only sign. Each
has a contrast of at least 3.6 to 1 on white and on dark pages. Ink (axes
and letters) is a grey with 4.5 to 1 on white and 4 to 1 on dark pages, since
no colour has 4.5 on both; the site replaces it by the colour of its own text.
Backgrounds are transparent.
"""

import base64
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from io import StringIO
from math import inf, isfinite, nan
from statistics import median
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

TRAINED = "#c96a1b"
"""Slow weights: what gradient descent trains."""
FAST = "#2f86c9"
"""Fast weights: what the layer writes while it runs."""
FEATURES = "#2e9461"
"""Features of keys and queries."""
OTHER = "#9b6fd6"
"""Something to compare with: the paper's figure, another rule, a baseline."""
WRONG = "#d9534f"
"""What is wrong or lost: interference, error."""
SERIES = ("#1c8f93", "#b85a9a", "#8f7d17")
"""Several settings of the same thing, without a colour of their own."""
INK = "#707685"
"""Axes and letters."""
SIGNED = mpl.colors.LinearSegmentedColormap.from_list(
    "fwlab",
    [mpl.colors.to_rgba(*part) for part in ((SERIES[1], 1), (INK, 0), (FAST, 1))],
)
"""The colours of signed numbers: positive in `FAST`, transparent at zero, negative
in the second of `SERIES`."""
PAPER, DIGITS = "#eef0f4", "#08090c"
"""The background of cells that hold digits, and the colour of these digits. Their
contrast is at least 4.5 to 1 on every colour of `SIGNED`, on any page."""


def style() -> None:
    """Set the plot style of fwlab, and make SVG output in notebooks reproducible.

    Call it once, before the first figure of a notebook.
    """
    mpl.rcParams.update(
        {
            "axes.edgecolor": INK,
            "axes.grid": True,
            "axes.labelcolor": INK,
            "axes.prop_cycle": cycler(
                color=[FAST, TRAINED, FEATURES, OTHER, WRONG],
                linestyle=["-", "--", "-.", ":", (0, (5, 1, 1, 1))],
            ),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlecolor": INK,
            "axes.titlesize": "medium",
            "figure.constrained_layout.use": True,
            "figure.facecolor": "none",
            "axes.facecolor": "none",
            "savefig.facecolor": "none",
            "figure.figsize": (6.4, 3.2),
            "font.size": 10,
            "grid.alpha": 0.25,
            "grid.color": INK,
            "legend.frameon": False,
            "legend.labelcolor": INK,
            "lines.linewidth": 1.8,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            # The same data produce byte-identical SVG files.
            "svg.fonttype": "path",
            "svg.hashsalt": "fwlab",
        }
    )
    try:
        from matplotlib_inline.backend_inline import set_matplotlib_formats

        set_matplotlib_formats("svg", metadata={"Date": None})
    except (ImportError, AttributeError):
        pass  # There is no notebook.


def matrix(ax: Axes, values: Any, title: str, limit: float = 1.0) -> None:
    """Draw a small matrix as coloured cells with numbers.

    - `ax`: where to draw; its ticks and frame are replaced.
    - `values`: a tensor or an array with two dimensions.
    - `title`: the title of the axes.
    - `limit`: the value that gets the full colour, above 0.
    """
    values = np.asarray(values)
    ax.imshow(values, cmap=SIGNED, vmin=-limit, vmax=limit, aspect="equal")
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            # Adding 0 turns -0.0 into 0.0.
            text = f"{round(float(value), 2) + 0:g}"
            middle = dict.fromkeys(("ha", "va"), "center")
            ax.text(column, row, text, middle, color=DIGITS, fontsize=8)
    ax.set_facecolor(PAPER)
    ax.set(title=title, xticks=[], yticks=[])
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(True)


def cells(ax: Axes, values: Any, title: str, **options: Any) -> None:
    """Draw a matrix as coloured cells without numbers.

    - `ax`: where to draw; its grid is removed.
    - `values`: `[rows, columns]`, a tensor or an array: 1 is `FAST`, 0 is
      `PAPER`, and -1 is the second of `SERIES`.
    - `title`: the title of the axes.
    - `options`: for `ax.imshow`, such as `aspect` and `extent`.
    """
    ax.imshow(np.asarray(values), cmap=SIGNED, vmin=-1, vmax=1, **options)
    ax.set(title=title, facecolor=PAPER)
    ax.grid(False)


def traces(ax: Axes, values: Any, marks: Any, title: str, limit: float = 1.0) -> None:
    """Draw a curve of positive and negative values per row, the first row at the top.

    - `ax`: where to draw; its ticks on the left are replaced.
    - `values`: `[rows, steps]`, a tensor or an array; NaN = nothing yet.
      Positive numbers rise above the line of their row, in `FAST`; negative
      ones fall below it.
    - `marks`: `[rows, steps]`, true where a dot goes on that line.
    - `title`: the title of the axes.
    - `limit`: the size that fills half of a row, above 0; larger numbers
      are cut off.
    """
    values, marks = np.asarray(values), np.asarray(marks)
    steps = np.arange(1, values.shape[1] + 1)
    heights = 0.48 * np.clip(values / limit, -1, 1)
    for row, (height, mark) in enumerate(zip(heights, marks, strict=True)):
        base = len(values) - row
        ax.axhline(base, color=INK, linewidth=0.5, alpha=0.6)
        for part, color in ((height > 0, FAST), (height < 0, SERIES[1])):
            top = base + np.where(part, height, np.nan)
            edges = np.arange(len(steps) + 1) + 0.5
            ax.stairs(top, edges, baseline=base, fill=True, color=color, linewidth=0)
        ax.plot(steps[mark], np.full(mark.sum(), base), ".", color=INK, markersize=5)
    ax.set(title=title, xlim=(0.5, len(steps) + 0.5), ylim=(0.4, len(values) + 0.6))
    rows = [*range(1, len(values) + 1)]
    ax.set_yticks(rows, [str(row) for row in reversed(rows)])
    ax.grid(False)


def new(columns: int = 1, rows: int = 1, **options: Any) -> Any:
    """Create a figure and axes of the usual width with `plt.subplots`.

    - `columns`, `rows`: number of axes side by side and on top of each
      other.
    - `options`: for `plt.subplots`; the default `figsize` is 6.4 inches
      by 3 per row.
    - Returns `(figure, axes)`.
    """
    options.setdefault("figsize", (6.4, 3.0 * rows))
    return plt.subplots(rows, columns, **options)


WIDTH = 5.0
"""The width of the figures of experiments and of the results page, in inches:
about that of a phone, so that letters keep their size there."""


def panels(
    height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Create a figure of width `WIDTH`, and return its axes row by row.

    - `height`: height of the figure, in inches.
    - `rows`, `columns`: numbers of axes.
    - `options`: for `Figure.subplots`.
    - Returns `(figure, axes)`.
    """
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.flat)


def grid(
    count: int, xlabel: str, ylabel: str, height: float = 1.9
) -> tuple[Figure, list[Axes]]:
    """Create a figure of small axes, two per row, with shared scales.

    - `count`: number of axes.
    - `xlabel`, `ylabel`: labels of the outer axes.
    - `height`: height of one row, in inches.
    - Returns `(figure, axes)`.
    """
    rows = -(-count // 2)
    figure, axes = panels(height * rows + 0.5, rows, 2, sharex=True, sharey=True)
    for ax in axes[count:]:
        ax.set_visible(False)
    for ax in axes[max(0, count - 2) : count]:
        ax.xaxis.set_tick_params(labelbottom=True)
        ax.set_xlabel(xlabel)
    for ax in axes[:count:2]:
        ax.set_ylabel(ylabel)
    return figure, axes[:count]


def marks(
    ax: Axes, x: Iterable[float], y: Iterable[float], marker: str, **options: Any
) -> None:
    """Draw marks without a line between them.

    - `ax`, `x`, `y`: where to draw, and the place of each mark.
    - `marker`: matplotlib's letter of the mark.
    - `options`: for `ax.plot`, such as `color` and `label`. Crosses are drawn
      with thicker strokes, and other marks without an edge.
    """
    options.setdefault("markeredgewidth", 1.4 if marker in "x+" else 0)
    ax.plot([*x], [*y], linestyle="none", marker=marker, **options)


def curves(
    ax: Axes,
    x: Sequence[float],
    named: Mapping[str, Any],
    looks: Iterable[tuple[str, str]],
) -> None:
    """Draw one labelled curve for each name.

    - `ax`, `x`: where to draw, and the places on its horizontal axis.
    - `named`: the heights of each curve, by its name in the legend.
    - `looks`: matplotlib's names of their colours and lines, such as `(FAST, "o-")`.
    """
    for (name, y), (color, line) in zip(named.items(), looks, strict=False):
        ax.plot(x, y, line, color=color, label=name, markersize=4)


def validation_losses(
    ax: Axes, run: Iterable[Any], line: str, label: str, color: str | None = None
) -> None:
    """Draw the validation losses of a training run against its steps.

    - `ax`, `run`: where to draw, and what `Trainer.run()` yielded.
    - `line`, `label`, `color`: matplotlib's names of the looks; None = its next colour.
    """
    losses = [(at.step, at.val_loss) for at in run if at.val_loss is not None]
    ax.plot(*zip(*losses, strict=True), line, color=color, label=label)


def medians(
    points: Iterable[Mapping[str, Any]], x: str, y: str, finite: bool = True
) -> dict[Any, float]:
    """Return the median of `y` over seeds, for each `x` in order.

    A seed that diverged has no `y`, and counts as infinite.

    - `points`: with values by name.
    - `x`, `y`: names of values.
    - `finite`: leave out infinite medians.
    - Returns the medians by `x`.
    """
    groups: dict[Any, list[float]] = {}
    for point in points:
        value = inf if point[y] is None else point[y]
        groups.setdefault(point[x], []).append(value)
    middle = {at: median(groups[at]) for at in sorted(groups)}
    return {at: value for at, value in middle.items() if isfinite(value) or not finite}


def series(
    ax: Axes,
    points: Sequence[Mapping[str, Any]],
    color: str,
    marker: str,
    line: str,
    label: str | None = None,
    y: str = "loss",
    x: str = "S",
) -> None:
    """Draw each seed as a mark, and a line through the medians.

    - `ax`, `points`: where to draw, and what.
    - `color`, `marker`, `line`, `label`: matplotlib's names of the looks.
    - `y`, `x`: names of values of the points.
    """
    if not points:
        return
    seeds = [nan if p[y] is None else p[y] for p in points]
    at = [p[x] for p in points]
    marks(ax, at, seeds, marker, markersize=4, color=color, alpha=0.6)
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
    """Draw published losses as crosses.

    - `ax`: where to draw.
    - `losses`: the losses, by their place on the other axis.
    - `color`, `label`: matplotlib's names of their looks.
    """
    marks(ax, losses, losses.values(), "x", markersize=6, color=color, label=label)


def rows(
    ax: Axes,
    named: Mapping[str, Sequence[float | None]],
    color: str,
    marker: str,
    label: str | None = None,
) -> None:
    """Draw numbers as marks in one row per name; None has no mark.

    - `ax`: where to draw.
    - `named`: the numbers of each row, by name, the first at the top.
    - `color`, `marker`, `label`: matplotlib's names of their looks.
    """
    places = [
        (nan if x is None else x, row)
        for row, numbers in enumerate(named.values())
        for x in numbers
    ]
    x, y = [x for x, _ in places], [row for _, row in places]
    alpha = 1 if marker in "x+" else 0.7
    marks(ax, x, y, marker, markersize=6, alpha=alpha, color=color, label=label)
    ax.set_yticks(range(len(named)), list(named))
    ax.set_ylim(len(named) - 0.5, -0.5)


def legend(figure: Figure, ax: Axes, columns: int) -> None:
    """Draw one legend above all axes of a figure.

    - `figure`, `ax`: the figure, and the axes with the labels.
    - `columns`: number of columns.
    """
    figure.legend(
        *ax.get_legend_handles_labels(), loc="outside upper left", ncols=columns
    )


def key(figure: Figure, entries: Sequence[tuple[str, Any, str]]) -> None:
    """Draw a legend of given entries above all axes of a figure.

    - `figure`: the figure.
    - `entries`: mark, line and label of each.
    """
    handles = [
        Line2D([], [], color=INK, marker=marker, linestyle=line, label=label)
        for marker, line, label in entries
    ]
    rows = 1 if len(entries) <= 3 else 2  # Four entries would not fit in a row.
    figure.legend(
        handles=handles, loc="outside upper left", ncols=-(-len(entries) // rows)
    )


def learning_curves(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """Draw the training and validation losses of several runs.

    - `runs`: for each name, the rows of `metrics.jsonl`: `step`, `seconds`, `loss`,
      and `validation_loss` where it was measured.
    - Returns the figure: losses by steps, and by minutes of training.
    """
    style()
    figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.4), sharey=True)
    for name, rows in runs.items():
        validated = [row for row in rows if "validation_loss" in row]
        for ax, by, unit in zip(axes, ("step", "seconds"), (1, 60), strict=True):
            (line,) = ax.plot(
                [row[by] / unit for row in validated],
                [row["validation_loss"] for row in validated],
                marker="o",
                markersize=4,
                label=name,
            )
            ax.plot(
                [row[by] / unit for row in rows],
                [row["loss"] for row in rows],
                color=line.get_color(),
                linestyle="-",
                linewidth=0.8,
                alpha=0.6,
                zorder=1,
            )
    axes[0].set(xlabel="steps", ylabel="loss in nats per token")
    axes[1].set(xlabel="minutes of training")
    axes[0].legend(title="validation (thin: training)", title_fontsize="small")
    return figure


#: JavaScript that switches between the pictures of every slider on a page.
_SLIDE = """
for (const box of document.querySelectorAll(".fw-frames")) {
  const frames = box.querySelectorAll("[data-value]"), input = box.querySelector("input");
  input.closest("div").hidden = false;
  input.oninput = () => {
    frames.forEach((frame, i) => { frame.hidden = i !== Number(input.value); });
    const value = frames[input.value].dataset.value;
    box.querySelector("output").value = value;
    input.setAttribute("aria-valuetext", value);
  };
}
"""


def slider(
    draw: Callable[[Any, Any], object],
    values: Sequence[Any],
    label: str,
    **options: Any,
) -> "Slider":
    """Show pictures with a slider or, where no scripts run, only the first picture.

    - `draw`: called as `draw(value, axes)`, with the axes that `new` returns.
      Set the same limits for every value.
    - `values`: one for each picture. Each is about 20 kB: eight are a lot.
    - `label`: what a value is, such as "β".
    - `options`: for `new`.
    - Returns what a notebook displays as the last line of a cell.
    """
    frames = []
    for value in values:
        figure, axes = new(**options)
        draw(value, axes)
        file = StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
        frames.append(short_svg(file.getvalue()))
    return Slider(label, [f"{value}" for value in values], frames)


def short_svg(svg: str) -> str:
    """Round the numbers of an SVG drawing to visible digits, to shorten the file.

    A hundredth of a point is finer than any screen; but letters are drawn large,
    and scaled, and what they say is in comments.

    - `svg`: a drawing of matplotlib's.
    - Returns the same drawing, with fewer digits and spaces.
    """
    svg = re.sub(
        r"scale\([^)]*\)|<!--.*?-->|\d+\.\d{3,}",
        lambda m: f"{float(m[0]):.2f}" if m[0][0].isdigit() else m[0],
        svg,
        flags=re.DOTALL,
    )
    return re.sub(r"\s+", " ", re.sub(r">\s+<", "><", svg))


class Slider(NamedTuple):
    """Hold the pictures of `slider`, one for each value.

    - `label`: the name of what changes.
    - `values`: its values, as text.
    - `frames`: a drawing for each value, as SVG.
    """

    label: str
    values: list[str]
    frames: list[str]

    def __repr__(self) -> str:
        return f"{self.label}: {', '.join(self.values)}"

    def _repr_html_(self) -> str:
        """Return the HTML of the pictures, the slider and its script.

        The site allows this script by its hash, and puts the drawings into the page.
        """
        last = len(self.frames) - 1
        label, first = escape(self.label), escape(self.values[0])
        # A label element around the output and the input would name the output.
        html = (
            f'<div class="fw-frames"><div hidden>{label} = <output>{first}</output> '
            f'<input type="range" aria-label="{label}" aria-valuetext="{first}" '
            f'min="0" max="{last}" value="0" autocomplete="off" '
            'style="width: 60%; vertical-align: middle"></div>'
        )
        for number, (value, svg) in enumerate(
            zip(self.values, self.frames, strict=True)
        ):
            source = base64.b64encode(svg.encode()).decode()
            html += (
                f'<div data-value="{escape(value)}"{" hidden" if number else ""}>'
                f'<img alt="{escape(f"{self.label} = {value}")}" '
                f'src="data:image/svg+xml;base64,{source}"></div>'
            )
        return f"{html}<script>{_SLIDE}</script></div>"
