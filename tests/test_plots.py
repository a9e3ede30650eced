"""Test the contrast of matrices, and the HTML of sliders."""

import re

import matplotlib as mpl
import numpy as np
import pytest
import torch

from fwlab import plots


def luminance(color):
    """Compute the relative luminance of a colour, as WCAG defines it."""
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
    """Matrix digits have enough contrast on every colour, on light and dark pages."""
    figure, ax = mpl.figure.Figure(facecolor=page), None
    ax = figure.subplots()
    plots.matrix(ax, torch.linspace(-2, 2, 81)[None], "from -2 to 2", limit=1.0)
    digits = {text.get_color() for text in ax.texts}
    assert len(ax.texts) == 81
    assert len(digits) == 1
    paper = np.asarray(ax.get_facecolor())
    assert paper[3] == 1  # The background is opaque.
    for *color, alpha in ax.images[0].to_rgba(np.linspace(-2, 2, 81)[None])[0]:
        cell = alpha * np.asarray(color) + (1 - alpha) * paper[:3]
        assert contrast(cell, *digits) >= 4.5


def test_a_slider_shows_its_first_picture_without_scripts():
    """Without scripts, a slider shows its first picture; its HTML is reproducible."""

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
    # The control has the name, because a label would also name the output.
    assert "<div hidden>&lt;β&gt; = <output>0.5</output> <input" in html
    assert 'aria-label="&lt;β&gt;" aria-valuetext="0.5"' in html
    assert 'min="0" max="1" value="0"' in html and html.count("<script>") == 1
    assert not re.search(r"<[^>]* on\w+=", html)
    first, second = made[0].frames
    assert "at 0.5" in first and "at 1" in second and "dc:date" not in first
    assert not plots.plt.get_fignums()
