"""Test that pictures of notebooks are compared by contents, not by bytes."""

import functools
import io
from types import SimpleNamespace

import pytest
from matplotlib import pyplot as plt
from nbformat import NotebookNode, from_dict
from nbval import plugin
from pictures import SVG, compare_outputs, difference

from fwlab import plots


@functools.cache
def picture(label="steps", name="loss", values=(1, 3, 2), shade=0.5, salt="a", **look):
    plots.style()
    with plt.rc_context({"svg.hashsalt": salt}), io.StringIO() as file:
        figure, axes = plots.new(2)
        axes[0].plot(values, "o-", label=name, color=look.get("color", plots.FAST))
        axes[0].bar(1, 1, color="none", hatch="//", edgecolor=look.get("edge", "red"))
        axes[0].set(xlabel=label, title=look.get("title", "a run"), ylim=(0, 4))
        axes[0].legend(loc="upper left")
        axes[1].imshow([[0, shade], [-1, 1]], cmap=plots.SIGNED, vmin=-1, vmax=1)
        axes[1].set_xticks(look.get("ticks", (0, 1)))
        figure.savefig(file, format="svg")
        plt.close(figure)
        return file.getvalue()


STORED = picture()


@pytest.mark.parametrize(
    "change",
    [
        {"salt": "b"},  # Names of markers, clips and hatches are hashes.
        {"values": (1, 3.00001, 2)},
        {"shade": 0.503},  # This shade is the adjacent colour.
    ],
)
def test_what_nobody_sees_makes_no_difference(change):
    drawn = picture(**change)
    assert drawn != STORED
    assert difference(drawn, STORED) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"label": "step"}, "<!-- step --> instead of <!-- steps -->"),
        ({"name": "error"}, "<!-- error --> instead of <!-- loss -->"),
        ({"ticks": (0,)}, 'instead of <g id="xtick_'),
        ({"values": (1, 3.02, 2)}, "off, 0.1 is near"),
        ({"color": plots.WRONG}, plots.WRONG),
        ({"shade": 0.55}, "a picture of pixels"),
    ],
)
def test_what_can_be_seen_is_said(change, said):
    assert said in difference(picture(**change), STORED)


def test_of_a_training_only_labels_count():
    other = picture(values=(3, 1, 1), color=plots.WRONG)
    assert difference(other, STORED, labels_only=True) is None
    assert "step" in difference(picture("step"), STORED, labels_only=True)


class Cell:
    """Provide the cell attributes that nbval's comparison reads."""

    parent = SimpleNamespace(skip_compare=("metadata",))
    colors = plugin.nocolors
    cell = NotebookNode(metadata={})
    format_output_compare = plugin.IPyNbCell.format_output_compare
    ihook = SimpleNamespace(pytest_assertrepr_compare=lambda **_: [])
    config = None

    def sanitize(self, text):
        return text


def test_a_cell_is_compared_by_texts_and_pictures():
    def outputs(text, *pictures):
        data = [
            {"text/plain": ""} | ({SVG: picture} if picture else {})
            for picture in pictures
        ]
        shown = [{"output_type": "display_data", "data": each} for each in data]
        printed = {"output_type": "stream", "name": "stdout", "text": text}
        return [from_dict(output) for output in (printed, *shown)]

    stored = outputs("1", STORED)
    same, other = picture(salt="b"), picture("step")
    assert compare_outputs(Cell(), outputs("1", same), stored)
    for new in (("2", same), ("1", other), ("1", None), ("1",)):
        cell = Cell()
        assert not compare_outputs(cell, outputs(*new), stored), new
        assert cell.comparison_traceback
