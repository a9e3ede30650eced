"""Draws the plots of the results, and prepares drawings for pages.

The same numbers give the same bytes: nothing in a drawing depends on the
date or on chance. Every plot is a function of what docs/results/*.json
holds.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from html import escape, unescape
from statistics import mean, median

import crossings
import matplotlib as mpl
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator
from templates import render

from fwlab.layers.fast_weight_attention import RULES
from fwlab.plots import (
    DIGITS,
    FAST,
    INK,
    OTHER,
    PAPER,
    SERIES,
    TRAINED,
    legend,
    panels,
    rows,
    short_svg,
    style,
)

#: Points: letters of at least 11 pixels where the page is 390 wide.
LETTERS = 11.5
#: Colour, marker and line of each family of mixers, and its members.
FAMILIES = {
    "softmax": (OTHER, "s", "--", ["softmax", "transformer-xl"]),
    "fast weights": (
        FAST,
        "o",
        "-",
        [rule.replace("_", "-") for rule in RULES] + ["fwp"],
    ),
    "AFT": (
        SERIES[0],
        "^",
        "-.",
        ["aft-simple", "aft-full", "aft-local", "aft-conv"],
    ),
    "feedback": (SERIES[1], "D", ":", ["feedback", "feedback-shared"]),
    "no memory": (TRAINED, "P", "", ["no memory"]),
}
#: Colour and marker of the entries of a legend.
LOOKS = ((FAST, "o"), (TRAINED, "s"), (OTHER, "D"))
#: Colour, marker, line and name of what an operation is compared with.
COMPARED = {
    "dense": (SERIES[2], "v", "-.", "dense form"),
    "softmax": (OTHER, "s", "--", "softmax attention"),
}


#: A text of a drawing: what it says in a comment, then its outlines, which are
#: moved, perhaps turned, and scaled from a hundredth of their size.
OUTLINES = re.compile(
    r"<!-- ?((?:(?!-->).)*?) ?-->\s*<g (?:style=\"([^\"]*)\" )?"
    r"transform=\"translate\(([\d.-]+) ([\d.-]+)\)( ?rotate\([^)]*\))? ?"
    r"scale\((0?\.\d+) [^)]*\)\">(?:(?!<g).)*?</g>",
    re.DOTALL,
)
#: The colours of pages in light and dark that take the place of a drawing's.
COLOURS = {INK: "currentColor", PAPER: "var(--fw-paper)", DIGITS: "var(--fw-digits)"}
#: What matplotlib's formulas have in these drawings.
SIGNS = {"beta": "β", "delta": "δ", "nu": "ν", "phi": "φ", "sigma": "σ"}
#: Of a formula: what is below or above its line, letters, and the rest.
PIECES = re.compile(r"([_^])(?:\{([^}]*)\}|(.))|([^\W\d_])|([^_^])")
#: The site's letters are narrower: so much larger, a text is as wide as before.
LARGER = 1.1
#: Points: letters of at least 9 pixels where the page is 390 wide.
MINIMUM = 11


def inline(svg: str, prefix: str, label: str) -> str:
    """A matplotlib drawing as part of a page, and an enlarged copy.

    Its ink takes the colour of the text around it, and its texts are set in
    the site's letters. All of its names start with `prefix`, because several
    drawings share a page. `label` describes it, escaped for HTML. matplotlib
    has no option for any of these.
    """
    svg = svg[svg.index("<svg") :]
    svg = OUTLINES.sub(_letters, svg)
    svg = re.sub("<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for colour, name in COLOURS.items():
        svg = re.sub(colour, name, svg, flags=re.IGNORECASE)
    svg = re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    view = re.search('viewBox="([^"]*)"', svg)[1]
    begin = f'<svg id="{prefix}" role="img" aria-label="{label}"'
    svg = svg.replace("<svg", begin, 1)
    return svg + render("enlarged.html", name=prefix, view=view, label=Markup(label))


def _letters(drawn: re.Match) -> str:
    """A text in place of its outlines. It is as wide as these, unless it is small."""
    words, style, x, y, turned, scale = drawn.groups()
    words, size, math = unescape(words), 100 * float(scale), "$" in words
    if not words:
        return ""
    family = "monospace" if "SansMono" in drawn[0] else "sans-serif"
    width, *_ = text_to_path.get_text_width_height_descent(
        words, FontProperties(family, size=size), ismath=math
    )
    font = LARGER * size
    place = f'textLength="{width:.2f}" lengthAdjust="spacingAndGlyphs"'
    if font < MINIMUM:
        # From its middle it grows, or away from its axis.
        before = drawn.string[: drawn.start()].rpartition('id="text_')[0]
        tick = before.rfind('id="ytick_') > before.rfind('id="text_')
        at, anchor = (width, "end") if tick else (width / 2, "middle")
        font = MINIMUM
        place = f'x="{at:.2f}" y="{0.35 * (font - size):.2f}" text-anchor="{anchor}"'
    parts = words.split("$") if math else [words]
    parts[::2] = map(escape, parts[::2])
    parts[1::2] = (_formula(part, font) for part in parts[1::2])
    return (
        f'<text class="fw-{family}" style="{style or ""}" font-size="{font:.2f}" {place} '
        f'transform="translate({x} {y}){turned or ""}">{"".join(parts)}</text>'
    )


def _formula(tex: str, font: float) -> str:
    """What stands between two $ in a text of this size."""
    tex = re.sub(r"\\mathdefault\{(.*)\}", r"\1", tex)
    tex = re.sub(r"\\sqrt\{(.*)\}", r"√\1", tex)
    tex = re.sub(r"\\([a-z]+) ?", lambda name: SIGNS.get(name[1], ""), tex)
    tex = re.sub(r"(?<=\w) (?=\w)", "", tex.replace("-", "−"))
    made = ""
    for sign, group, one, letter, rest in PIECES.findall(tex):
        if sign:
            # What follows is on the line again, also outside of the formula.
            away = font * {"^": -0.38, "_": 0.15}[sign]
            inner = (
                f'<tspan dy="{away:.2f}" font-size="{0.7 * font:.2f}">{group or one}'
            )
            made += f'{inner}</tspan><tspan dy="{-away:.2f}">\u200b</tspan>'
        else:
            made += f'<tspan font-style="italic">{letter}</tspan>' if letter else rest
    return made


def chart(
    name: str,
    title: str,
    series: Mapping[str, Mapping[str, Sequence[float]]],
    unit: str,
    *,
    middle: Callable[[Sequence[float]], float] = median,
    spec: str = ".2f",
    line: tuple[float, str] | None = None,
    bars: bool = False,
    log: Sequence[float] = (),
    looks: Sequence[tuple[str, str]] = LOOKS,
) -> str:
    """Draw a row for each name: all seeds as marks with their middle at its end, or bars.

    - `name`, `title`: of the drawing, and what it says to those who do not see it.
    - `series`: for each entry of the legend, numbers by name; the entry with the
      most names gives their order.
    - `line`: where a dashed line stands, and what it is.
    - `log`: the ticks of a logarithmic axis.
    """
    order = list(max(series.values(), key=len))
    order += [n for each in series.values() for n in each if n not in order]
    said: dict[str, list[str]] = {n: [] for n in order}
    with styled():
        figure, (ax,) = panels((0.6 if bars else 0.25) * len(order) + 1)
        for (entry, each), (color, marker) in zip(series.items(), looks, strict=False):
            if not bars:
                rows(ax, {n: each.get(n, []) for n in order}, color, marker, entry)
            for place, n in enumerate(order):
                if not each.get(n):
                    continue
                said[n].append(f"{middle(each[n]):{spec}}".replace("-", "−"))
                if bars:
                    at = place + 0.3 * (
                        len(said[n]) - sum(n in x for x in series.values()) / 2 - 0.5
                    )
                    bar = ax.barh(at, middle(each[n]), 0.24, color=color)
                    ax.bar_label(bar, [f"{said[n][-1]} {entry}"], padding=3)
        if bars:
            ax.margins(x=0.22)
            ax.set_xlim(left=0)
            ax.grid(axis="y", visible=False)
        elif len(series) > 1:
            legend(figure, ax, 3)
        for place, texts in enumerate(said.values()):
            if not bars:
                at = {"transform": ax.get_yaxis_transform(), "va": "center"}
                ax.text(1.01, place, " / ".join(texts), **at)
        if log:
            ax.set_xscale("log")
            _ticks(ax.xaxis, log)
        if line:
            ax.axvline(line[0], color=INK, linestyle=(0, (4, 2)), linewidth=1.4)
        ax.set_yticks(range(len(order)), order)
        ax.set_ylim(len(order) - 0.4, -0.6)
        ax.set_xlabel(unit + (f"; dashed: {line[1]}" if line else ""), loc="right")
        entries = f"; {' / '.join(series)}" * (len(series) > 1)
        every = "; ".join(f"{n} {' / '.join(texts)}" for n, texts in said.items())
        return drawn(figure, name, f"{title} ({unit}{entries}): {every}.")


def losses(runs: list[dict], published: dict[str, float]) -> str:
    """Final loss of each mixer, best first, in the colours of their families."""
    final: dict[str, list[float]] = {}
    for run in runs:
        final.setdefault(run["config"]["mixer"], []).append(run["validation_loss"])
    order = sorted(final, key=lambda mixer: (mean(final[mixer]), mixer))
    families = {
        family: {m: final[m] if m in members else [] for m in order}
        for family, (*_, members) in FAMILIES.items()
    }
    (loss,) = published.values()
    return chart(
        "losses",
        "Validation loss of each mixer, best first",
        families,
        "nats per character",
        middle=mean,
        spec=".3f",
        line=(loss, f"nanoGPT, {loss}"),
        looks=[look[:2] for look in FAMILIES.values()],
    )


def curves(runs: list[dict]) -> str:
    """Validation loss during training, one run of each mixer."""
    first: dict[str, dict] = {}
    for run in runs:
        first.setdefault(run["config"]["mixer"], run)
    with styled():
        figure, (ax,) = panels(4.4)
        ends = []
        for mixer, run in first.items():
            look = _look(mixer)
            line = {step: loss for step, *_, loss in run["curve"]}
            _line(ax, line, look, 3.5)
            ends.append((*[*line.items()][-1], mixer, look[0]))
        ax.set(xlabel="steps", ylabel="validation loss")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
        _label_ends(ax, ends)
        parts = []
        for place, name in ((0, "the first measurement"), (-1, "the last")):
            at = {mixer: run["curve"][place] for mixer, run in first.items()}
            low, high = (f(at, key=lambda m: at[m][-1]) for f in (min, max))
            parts.append(
                f"at {name}, step {at[low][0]:,}, from {at[low][-1]:.3f} ({low}) "
                f"to {at[high][-1]:.3f} ({high})"
            )
        seeds = {run["config"]["seed"] for run in first.values()}
        seed = f" with seed {seeds.pop()}" if len(seeds) == 1 else ""
        return drawn(
            figure,
            "curves",
            f"Validation loss of {len(first)} mixers{seed}: {'; '.join(parts)}.",
        )


def generation(run: dict) -> str:
    """Tokens per second by context, and where a constant cost is less."""
    times = crossings.times_by_model(run["generation"])
    faster = crossings.by_model(run["generation"])
    contexts = [*times[crossings.NANOGPT]]
    with styled():
        figure, (ax,) = panels(3.6)
        ends, every = [], []
        for name, line in times.items():
            look = COMPARED["dense"] if name == crossings.NANOGPT else _look(name)
            speeds = [1e6 / us for us in line.values()]
            _line(ax, dict(zip(line, speeds, strict=True)), look, 5)
            ends.append((contexts[-1], speeds[-1], name, look[0]))
            words = f"{name} from {speeds[0]:,.0f} to {speeds[-1]:,.0f}"
            if name in faster:
                at = crossings.in_words(
                    faster[name], contexts[0], contexts[-1], "context"
                )
                words += f", faster than {crossings.NANOGPT} {at}"
            every.append(words)
        ax.set(xscale="log", yscale="log", xlabel="context", ylabel="tokens per second")
        _ticks(ax.xaxis, contexts[::2])
        _ticks(ax.yaxis, [100, 200, 500, 1000, 2000, 5000])
        _label_ends(ax, ends)
        at = faster["delta"]
        if at is not None and at > contexts[0]:
            ax.axvline(at, color=FAST, linewidth=1.4, linestyle=":")
            ax.annotate(
                crossings.rounded(at),
                (at, 0.04),
                xycoords=ax.get_xaxis_transform(),
                xytext=(3, 0),
                textcoords="offset points",
                color=FAST,
            )
        return drawn(
            figure,
            "generation",
            f"Tokens per second, from {contexts[0]:,} tokens of context to "
            f"{contexts[-1]:,}: {'; '.join(every)}.",
        )


def lengths(run: dict) -> str:
    """Time by sequence length, and where it crosses that of other forms."""
    found_at = {line["op"]: line for line in crossings.by_operation(run["lengths"])}
    times = crossings.times_by_form(run["lengths"], "T")
    batch = run["lengths"][0]["batch"]
    with styled():
        figure, axes = _panels(times)
        for op, ax in axes.items():
            for name, at, place, side in (
                ("dense", "top", 0.97, "right"),
                ("softmax", "bottom", 0.04, "left"),
            ):
                found = found_at[op][name]
                if not found or found["at"] in (None, found["first"]):
                    continue
                color = COMPARED[name][0]
                ax.axvline(found["at"], color=color, linewidth=1.4, linestyle=":")
                ax.annotate(
                    crossings.rounded(found["at"]),
                    (found["at"], place),
                    xycoords=ax.get_xaxis_transform(),
                    xytext=(-3 if side == "right" else 3, 0),
                    textcoords="offset points",
                    ha=side,
                    va=at,
                    color=color,
                )
        first = next(iter(axes.values()))
        first.set(xscale="log", yscale="log")
        _ticks(first.xaxis, [16, 256, 4096])
        _ticks(first.yaxis, [10.0**power for power in range(-3, 6)])
        figure.supxlabel("T", fontsize=LETTERS)
        figure.supylabel("ms", fontsize=LETTERS)
        every = "; ".join(
            f"{op}, {_range(forms)}, faster than its dense form "
            f"{crossings.operation_in_words(found_at[op]['dense'])}, than softmax attention "
            f"{crossings.operation_in_words(found_at[op]['softmax'])}"
            if found_at[op]["dense"]
            else f"{op}, {_range(forms)}, without a dense form, faster than "
            f"softmax attention {crossings.operation_in_words(found_at[op]['softmax'])}"
            for op, forms in times.items()
            if op in axes
        )
        softmax = _range(times[crossings.SOFTMAX])
        return drawn(
            figure,
            "lengths",
            f"Milliseconds by sequence length, batch {batch}: {every}; "
            f"softmax attention, {softmax}.",
        )


def _panels(times: dict[str, dict]) -> tuple[Figure, dict]:
    """The lines of each operation, its dense form and softmax attention."""
    ops = [op for op in times if op != crossings.SOFTMAX]
    rows = -(-len(ops) // 2)
    figure, grid = panels(1.9 * rows + 0.7, rows, 2, sharex=True, sharey=True)
    for ax in grid[len(ops) :]:
        ax.set_visible(False)
    axes = dict(zip(ops, grid, strict=False))
    softmax = times[crossings.SOFTMAX][crossings.FWLAB]
    for op, ax in axes.items():
        ax.set_title(op, fontsize=LETTERS)
        ax.tick_params(left=False, bottom=False)  # the grid shows them
        ours = (SERIES[0] if op.startswith("aft") else FAST, "o", "-", "fwlab")
        lines = (
            (COMPARED["softmax"], softmax),
            (COMPARED["dense"], times[op].get(crossings.DENSE, {})),
            (ours, times[op][crossings.FWLAB]),
        )
        for look, line in lines:
            _line(ax, line, look, 4, look[3])
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(
        handles[::-1], labels[::-1], loc="outside upper center", ncols=len(handles)
    )
    return figure, axes


def _range(forms: dict) -> str:
    """The time at the minimum and at the maximum length."""
    line = forms[crossings.FWLAB]
    first, last = min(line), max(line)
    return f"{line[first]:,.2f} at T {first:,} and {line[last]:,.0f} at {last:,}"


@contextmanager
def styled():
    """The house style, for as long as a plot is drawn."""
    with mpl.rc_context():
        style()
        mpl.rcParams["font.size"] = LETTERS
        yield


def _line(ax, line: dict, look, size: float, label: str = "") -> None:
    color, marker, dashes, _ = look
    kind = {"color": color, "marker": marker, "linestyle": dashes}
    ax.plot([*line], [*line.values()], markersize=size, label=label, **kind)


def _look(mixer: str):
    return next(look for look in FAMILIES.values() if mixer in look[3])


def _ticks(axis, places: list[float]) -> None:
    """Round numbers on a logarithmic axis, those within its limits."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(
        mpl.ticker.FixedLocator([p for p in places if low <= p <= high])
    )
    axis.set_major_formatter(FuncFormatter(lambda place, _: f"{place:,g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _label_ends(ax, ends: list[tuple[float, float, str, str]]) -> None:
    """Names lines at their right ends, no name over another."""
    ax.figure.draw_without_rendering()
    low, high = ax.get_ylim()
    ax.set_xlim(right=max(end[0] for end in ends))
    ends = sorted(ends, key=lambda end: end[1])
    height = ax.get_window_extent().height * 72 / ax.figure.dpi
    gap = 1.35 * LETTERS / height
    to_axes = ax.transData + ax.transAxes.inverted()
    wanted = [to_axes.transform((at, value))[1] for at, value, *_ in ends]
    for (at, value, name, color), place in zip(ends, spread(wanted, gap), strict=True):
        ax.annotate(
            name,
            (at, value),
            xytext=(1.06, place),
            textcoords="axes fraction",
            color=color,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.8,
                "shrinkA": 1,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )
    ax.set_ylim(low, high)


def spread(wanted: list[float], gap: float) -> list[float]:
    """Places from 0 to 1, `gap` apart or more, near the wanted ones.

    `wanted` rises. Without the gaps it is a rising sequence of least
    squares: neighbours out of order share their mean.
    """
    blocks: list[list[float]] = []  # mean, members
    for number, place in enumerate(wanted):
        blocks.append([place - number * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, members = blocks.pop()
            other = blocks[-1]
            other[0] = (other[0] * other[1] + mean * members) / (other[1] + members)
            other[1] += members
    means = [mean for mean, members in blocks for _ in range(int(members))]
    room = max(0.0, 1 - (len(wanted) - 1) * gap)
    return [min(max(m, 0.0), room) + number * gap for number, m in enumerate(means)]


def drawn(figure: Figure, name: str, label: str) -> str:
    """A figure as part of a page; `name` and `label` as for `inline`."""
    # Letters of SVG are a little wider than those that the layout measures.
    figure.get_layout_engine().set(w_pad=0.07)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return kept(file.getvalue(), name, label)


def kept(svg: str, name: str, label: str) -> str:
    """A drawing of matplotlib's as part of a page, as for `drawn`."""
    svg = inline(short_svg(svg), f"plot-{name}", escape(label))
    return f'<div class="nb-output nb-svg+xml">{svg}</div>'
