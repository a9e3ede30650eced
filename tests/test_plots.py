"""Figures can be read."""

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
