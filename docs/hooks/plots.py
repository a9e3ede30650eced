"""Draw the plots of the results, and prepare drawings for pages.

The same numbers give the same bytes: nothing in a drawing depends on the
date or on chance. Every plot is a function of the data that docs/results/*.json
holds.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from html import escape, unescape
from statistics import mean, median

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

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

#: Font size in points. Letters have at least 11 pixels on a page 390 pixels wide.
LETTERS = 11.5
#: Colour, marker and members of each family of mixers.
FAMILIES = {
    "softmax": (OTHER, "s", ["softmax", "transformer-xl"]),
    "fast weights": (FAST, "o", [rule.replace("_", "-") for rule in RULES] + ["fwp"]),
    "AFT": (SERIES[0], "^", ["aft-simple", "aft-full", "aft-local", "aft-conv"]),
    "feedback": (SERIES[1], "D", ["feedback", "feedback-shared"]),
    "no memory": (TRAINED, "P", ["no memory"]),
}
#: Colour and marker of the entries of a legend.
LOOKS = ((FAST, "o"), (TRAINED, "s"), (OTHER, "D"))
#: A text in a matplotlib SVG: the words in a comment, then the outlines.
#: Outlines have a translation, an optional rotation, and a scale of font size / 100.
OUTLINES = re.compile(
    r"<!-- ?((?:(?!-->).)*?) ?-->\s*<g (?:style=\"([^\"]*)\" )?"
    r"transform=\"translate\(([\d.-]+) ([\d.-]+)\)( ?rotate\([^)]*\))? ?"
    r"scale\((0?\.\d+) [^)]*\)\">(?:(?!<g).)*?</g>",
    re.DOTALL,
)
#: CSS colours that replace the colours of a drawing on light and dark pages.
COLOURS = {INK: "currentColor", PAPER: "var(--fw-paper)", DIGITS: "var(--fw-digits)"}
#: Unicode characters for the TeX symbols in these drawings.
SIGNS = {"beta": "β", "delta": "δ", "nu": "ν", "phi": "φ", "sigma": "σ"}
#: The parts of a formula: indices and exponents, letters, other characters.
PIECES = re.compile(r"([_^])(?:\{([^}]*)\}|(.))|([^\W\d_])|([^_^])")
#: Factor on the font size, since the site's letters are narrower.
LARGER = 1.1
#: Font size in points. Letters have at least 9 pixels on a page 390 pixels wide.
MINIMUM = 11


def inline(svg: str, prefix: str, label: str) -> str:
    """Convert a matplotlib SVG to inline SVG for a page.

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
    begin = f'<svg id="{prefix}" role="img" aria-label="{label}"'
    return svg.replace("<svg", begin, 1)


def _letters(drawn: re.Match) -> str:
    """Replace the outlines of a text by SVG text of the same width."""
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
        # Small text is enlarged from its middle, or a tick label away from its axis.
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
    """Typeset a TeX formula (without $) as SVG text of font size `font`."""
    tex = re.sub(r"\\mathdefault\{(.*)\}", r"\1", tex)
    tex = re.sub(r"\\sqrt\{(.*)\}", r"√\1", tex)
    tex = re.sub(r"\\([a-z]+) ?", lambda name: SIGNS.get(name[1], ""), tex)
    tex = re.sub(r"(?<=\w) (?=\w)", "", tex.replace("-", "−"))
    made = ""
    for sign, group, one, letter, rest in PIECES.findall(tex):
        if sign:
            # Undo the vertical shift for the text that follows the index or exponent.
            away = font * {"^": -0.38, "_": 0.15}[sign]
            inner = (
                f'<tspan dy="{away:.2f}" font-size="{0.7 * font:.2f}">{group or one}'
            )
            made += f'{inner}</tspan><tspan dy="{-away:.2f}">\u200b</tspan>'
        else:
            made += f'<tspan font-style="italic">{letter}</tspan>' if letter else rest
    return made


@contextmanager
def styled():
    """Apply the plot style of fwlab within a `with` block."""
    with mpl.rc_context():
        style()
        mpl.rcParams["font.size"] = LETTERS
        yield


def chart(
    name: str,
    title: str,
    series: Mapping[str, Mapping[str, Sequence[float]]],
    unit: str,
    *,
    middle: Callable[[Sequence[float]], float] = median,
    spec: str = ".2f",
    line: tuple[float, str] | None = None,
    log: Sequence[float] = (),
    looks: Sequence[tuple[str, str]] = LOOKS,
) -> str:
    """Draw a row per name, with a mark per seed and the middle value at the end.

    - `name`, `title`: name of the drawing, and its description for screen readers.
    - `series`: numbers by name for each entry of the legend. The entry with the
      most names determines their order.
    - `line`: position and label of a dashed line.
    - `log`: the ticks of a logarithmic axis.
    """
    order = list(max(series.values(), key=len))
    order += [n for each in series.values() for n in each if n not in order]
    said = {
        n: [
            f"{middle(each[n]):{spec}}".replace("-", "−")
            for each in series.values()
            if each.get(n)
        ]
        for n in order
    }
    with styled():
        figure, (ax,) = panels(0.25 * len(order) + 1)
        for (entry, each), (color, marker) in zip(series.items(), looks, strict=False):
            rows(ax, {n: each.get(n, []) for n in order}, color, marker, entry)
        if len(series) > 1:
            legend(figure, ax, 3)
        for place, texts in enumerate(said.values()):
            at = {"transform": ax.get_yaxis_transform(), "va": "center"}
            ax.text(1.01, place, " / ".join(texts), **at)
        if log:
            ax.set_xscale("log")
            low, high = ax.get_xlim()
            shown = [tick for tick in log if low <= tick <= high]
            ax.set_xticks(shown, [f"{tick:,g}" for tick in shown])
            ax.minorticks_off()
        if line:
            ax.axvline(line[0], color=INK, linestyle=(0, (4, 2)), linewidth=1.4)
        ax.set_yticks(range(len(order)), order)
        ax.set_ylim(len(order) - 0.4, -0.6)
        ax.set_xlabel(unit + (f"; dashed: {line[1]}" if line else ""), loc="right")
        entries = f"; {' / '.join(series)}" * (len(series) > 1)
        every = "; ".join(f"{n} {' / '.join(texts)}" for n, texts in said.items())
        return drawn(figure, name, f"{title} ({unit}{entries}): {every}.")


def losses(final: Mapping[str, Sequence[float]], published: float) -> str:
    """Draw the validation loss of each mixer, best first, coloured by family."""
    families = {
        family: {m: losses if m in members else [] for m, losses in final.items()}
        for family, (*_, members) in FAMILIES.items()
    }
    return chart(
        "losses",
        "Validation loss of each mixer, best first",
        families,
        "nats per character",
        middle=mean,
        spec=".3f",
        line=(published, f"nanoGPT, {published}"),
        looks=[(colour, marker) for colour, marker, _ in FAMILIES.values()],
    )


def drawn(figure: Figure, name: str, label: str) -> str:
    """Convert a figure to HTML for a page, with `name` and `label` as in `inline`."""
    # Letters of an SVG are slightly wider than the layout engine assumes.
    figure.get_layout_engine().set(w_pad=0.07)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return kept(file.getvalue(), name, label)


def kept(svg: str, name: str, label: str) -> str:
    """Convert a matplotlib SVG to HTML for a page, with arguments as in `drawn`."""
    svg = inline(short_svg(svg), f"plot-{name}", escape(label))
    return f'<div class="nb-output nb-svg+xml">{svg}</div>'
