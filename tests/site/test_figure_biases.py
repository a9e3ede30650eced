"""Biases of AFT: what the page computes is what `aft_full` computes."""

import pytest
import torch

from fwlab import ops

T, WINDOW = 8, 3


@pytest.fixture
def figure(fresh):
    return fresh("biases")


def tensor(rows):
    """NaN where a row does not see a key, which JSON has as null."""
    return torch.tensor(
        [[torch.nan if x in (None, "NaN") else x for x in row] for row in rows]
    ).double()


def compare(shown):
    """Weights and outputs are those of these biases."""
    w, keys, values = tensor(shown["bias"]), shown["keys"], shown["values"]
    unseen = torch.ones(T, T).triu(1) > 0
    assert torch.equal(w.isnan(), unseen)
    k, v = (torch.tensor(x).double()[None, :, None] for x in (keys, values))
    y = ops.aft_full(50 + 0 * k, k, v, w.nan_to_num())[0, :, 0]
    torch.testing.assert_close(torch.tensor(shown["outputs"]).double(), y)
    eye = torch.eye(T).double()[None]
    a = ops.aft_full(50 + 0 * eye, k.expand(-1, -1, T), eye, w.nan_to_num())[0]
    torch.testing.assert_close(tensor(shown["weights"]).nan_to_num(), a)
    return w


def test_forms_are_what_they_say(figure):
    back = torch.arange(T)[:, None] - torch.arange(T)
    for form in ("conv", "simple", "local", "full"):
        figure.choose(form)
        shown = figure.state()
        w = compare(shown)
        outside = w[back >= (0 if form == "simple" else WINDOW)]
        assert (outside == 0).all() == (form != "full")
        rows = [w.diagonal(-j) for j in range(WINDOW)]
        same = all((row == row[0]).all() for row in rows)
        assert same == (form in ("conv", "simple"))
        assert f"AFT-{form}: " in figure.words()


def test_a_bias_is_set_where_it_is_free(figure):
    for form in ("conv", "local", "full", "simple"):
        figure.choose(form)
        before = tensor(figure.state()["bias"])
        assert figure.slider("Bias").is_disabled() == (form == "simple")
        if form == "simple":
            continue
        figure.slide("Bias", 3.5)
        shown = figure.state()
        after = compare(shown)
        row, key = shown["row"] - 1, shown["key"] - 1
        changed = torch.zeros(T, T)
        changed[row, key] = 1
        if form == "conv":
            changed = torch.ones(T, T).tril(key - row).triu(key - row)
        assert (after[changed > 0] == 3.5).all()
        same = (changed == 0) & ~before.isnan()
        assert torch.equal(after[same], before[same])
        assert f"row {row + 1}, key {key + 1}: 3.5" in figure.words()
    # It stays for when its form is chosen again.
    figure.choose("local")
    assert figure.state()["bias"][5][4] == 3.5


def test_the_frame_moves_by_pointer_and_by_keys(figure):
    frame = figure.slider("Chosen bias")
    frame.press("ArrowLeft")
    frame.press("ArrowDown")
    assert [figure.state()[x] for x in ("row", "key")] == [7, 4]
    assert figure.slider("Bias").is_disabled()  # further back than the window
    assert figure.state()["weights"][6][3] > 0.01
    figure.drag(frame, 26 + 37 * 1.5, 44 + 25 * 2.5)
    assert [figure.state()[x] for x in ("row", "key")] == [3, 2]
    for _ in range(9):  # not beyond the diagonal, nor the first row
        frame.press("ArrowRight")
        frame.press("ArrowUp")
    assert [figure.state()[x] for x in ("row", "key")] == [1, 1]
