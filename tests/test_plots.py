"""Figures can be read."""

import re

import matplotlib as mpl
import numpy as np
import pytest
import torch

from fwlab import plots


def luminance(color):
    """Relative luminance, as the WCAG define it."""
    c = np.asarray(mpl.colors.to_rgb(color))
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) @ (
        0.2126,
        0.7152,
        0.0722,
    )


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("page", ["#ffffff", "#121318"])
def test_digits_of_a_matrix_stand_out(page):
    """On cells of every colour, on light and dark pages alike."""
    figure, ax = mpl.figure.Figure(facecolor=page), None
    ax = figure.subplots()
    plots.matrix(ax, torch.linspace(-2, 2, 81)[None], "from -2 to 2", limit=1.0)
    digits = {text.get_color() for text in ax.texts}
    assert len(ax.texts) == 81
    assert len(digits) == 1
    paper = np.asarray(ax.get_facecolor())
    assert paper[3] == 1  # the page does not shine through
    for *color, alpha in ax.images[0].to_rgba(np.linspace(-2, 2, 81)[None])[0]:
        cell = alpha * np.asarray(color) + (1 - alpha) * paper[:3]
        assert contrast(cell, *digits) >= 4.5


@pytest.mark.parametrize(("page", "least"), [("#ffffff", 4.5), ("#121318", 4.0)])
def test_letters_stand_out(page, least):
    """No colour reaches 4.5 on both, so pages that print are first."""
    assert contrast(plots.INK, page) >= least


def test_cells_have_one_meaning_on_any_page():
    ax = mpl.figure.Figure().subplots()
    plots.cells(ax, torch.tensor([[-1.0, 0.0, 1.0]]), "from -1 to 1", aspect="auto")
    negative, zero, positive = ax.images[0].to_rgba(ax.images[0].get_array())[0]
    assert mpl.colors.to_hex(negative) == plots.SERIES[1]
    assert mpl.colors.to_hex(positive) == plots.FAST
    assert zero[3] < 0.01 and mpl.colors.to_hex(ax.get_facecolor()) == plots.PAPER
    assert ax.get_title() == "from -1 to 1" and ax.get_aspect() == "auto"


def test_traces_are_signed_and_start_where_something_is():
    ax = mpl.figure.Figure().subplots()
    values = torch.tensor([[torch.nan, 1.0, 9.0], [-2.0, 0.0, -1.0]])
    marks = torch.tensor([[0, 1, 0], [1, 0, 1]]).bool()
    plots.traces(ax, values, marks, "two rows", limit=2.0)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["2", "1"]
    dots = [line for line in ax.lines if line.get_marker() == "."]
    assert [list(line.get_xdata()) for line in dots] == [[2], [1, 3]]
    assert [set(line.get_ydata()) for line in dots] == [{2}, {1}]  # row 1 on top
    drawn = {}
    for area in ax.patches:
        x, y = area.get_path().vertices.reshape(-1, 2).T
        color = mpl.colors.to_hex(area.get_facecolor())
        for a, b in zip(x[y % 1 != 0], y[y % 1 != 0], strict=True):
            drawn.setdefault((color, round(b, 2)), []).append(a)
    assert {key: (min(x), max(x)) for key, x in drawn.items()} == {
        (plots.FAST, 2.24): (1.5, 2.5),
        (plots.FAST, 2.48): (2.5, 3.5),  # 9 is cut off at 2
        (plots.SERIES[1], 0.52): (0.5, 1.5),
        (plots.SERIES[1], 0.76): (2.5, 3.5),
    }


def test_a_slider_shows_its_first_picture_without_scripts():
    """And it is the same every time, without a figure left open."""

    def draw(value, axes):
        axes[1].plot([0, 1], [0, value])
        axes[1].set_title(f"at {value}")

    with mpl.rc_context():
        plots.style()
        made = [plots.slider(draw, [0.5, 1], "<β>", columns=2) for _ in range(2)]
    html = made[0]._repr_html_()
    assert html == made[1]._repr_html_() and repr(made[0]) == "<β>: 0.5, 1"
    frames = re.findall('<div data-value="([^"]+)"( hidden)?><img alt="([^"]+)"', html)
    assert frames == [("0.5", "", "&lt;β&gt; = 0.5"), ("1", " hidden", "&lt;β&gt; = 1")]
    # The name is at the control: a label around both would name the output.
    assert "<div hidden>&lt;β&gt; = <output>0.5</output> <input" in html
    assert 'aria-label="&lt;β&gt;" aria-valuetext="0.5"' in html
    assert 'min="0" max="1" value="0"' in html and html.count("<script>") == 1
    assert not re.search(r"<[^>]* on\w+=", html)  # the site's policy forbids it
    first, second = made[0].frames
    assert "at 0.5" in first and "at 1" in second and "dc:date" not in first
    assert not plots.plt.get_fignums()
