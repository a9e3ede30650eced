"""The memory playground writes and reads as fwlab's rules do.

The test keeps its own list of the pairs that it has written, and asks
fwlab for the memory and for what each key reads.
"""

import math
import re
from itertools import pairwise

import pytest
import torch
from built import asks
from figure import number

from fwlab import ops

A, B, NEW = (40, [0.9, 0.8]), (65, [-1, 0.5]), (140, [0.6, -1])
APART = [(20, A[1]), (110, B[1])]
PRESETS = {
    "Two orthogonal keys": (APART, (155, NEW[1])),
    "Two close keys": ([A, B], NEW),
    "Overwrite a key": (APART, (20, NEW[1])),
}
#: Units of the picture.
CENTRE, BOX, SIZE = (101, 124), (201, 28), 186


@pytest.fixture
def figure(fresh):
    return fresh("memory")


def unit(degrees: int) -> torch.Tensor:
    angle = torch.tensor(math.radians(degrees), dtype=torch.float64)
    return torch.stack([angle.cos(), angle.sin()])


def memory(rule: str, beta: float, pairs: list, degrees: int = 0) -> tuple:
    """fwlab's W after all pairs, and what it then answers to one key."""
    if not pairs:
        return torch.zeros(2, 2).double(), torch.zeros(2).double()
    k = torch.stack([unit(pair[0]) for pair in pairs])[None, :, None]
    v = torch.tensor([pair[1] for pair in pairs]).double()[None, :, None]
    q = unit(degrees).expand_as(k)
    if rule == "sum":
        y, W = ops.sum_rule(q, k, v, normalize=False, return_state=True)
    else:
        strength = torch.full(k.shape[:3], beta).double()
        operation = {"gated": ops.gated_rule, "delta": ops.delta_rule}[rule]
        y, W = operation(q, k, v, strength, return_state=True)
    return W[0, 0], y[0, -1, 0]


def compare(figure, rule: str, beta: float, pairs: list, new: tuple) -> dict:
    """State, numbers and drawing, against fwlab."""
    drawing = figure.ask(asks.MEMORY)
    shown = drawing["state"]
    assert (shown["rule"], shown["beta"]) == (rule, beta)
    assert [pair["name"] for pair in shown["pairs"]] == list("ABCDE"[: len(pairs)])
    W, _ = memory(rule, beta, pairs)
    torch.testing.assert_close(torch.tensor(shown["W"]).double(), W, atol=1e-6, rtol=0)
    all_shown = [*shown["pairs"], shown["next"]]
    for one, (degrees, value) in zip(all_shown, [*pairs, new], strict=True):
        assert one["degrees"] == degrees
        assert one["key"] == pytest.approx(unit(degrees).tolist(), abs=1e-12)
        assert one["value"] == pytest.approx(value, abs=1e-12)
        _, readback = memory(rule, beta, pairs, degrees)
        assert one["readback"] == pytest.approx(readback.tolist(), abs=1e-6)
        error = (readback - torch.tensor(value).double()).norm().item()
        assert one["error"] == pytest.approx(error, abs=1e-6)
        _, before = memory(rule, beta, pairs[:-1], degrees)
        assert one["before"] == pytest.approx(before.tolist(), abs=1e-6)
    for j, pair in enumerate(shown["pairs"]):
        later = [i for i in range(j + 1, len(pairs)) if pairs[i][0] == pairs[j][0]]
        assert pair["replacedBy"] == ("ABCDE"[later[-1]] if later else None)
    check_drawn(drawing)
    return shown


def check_drawn(drawing: dict):
    """What the picture and its words say, against its state."""
    shown, said, marks = (drawing[name] for name in ("state", "words", "marks"))
    flat = [x for row in shown["W"] for x in row]
    assert [number(text) for text in drawing["W"]] == pytest.approx(flat, abs=0.0051)

    rows, names = drawing["rows"], [one["name"] for one in shown["pairs"]]
    assert [row[0] for row in rows] == [*names, "+"]
    for row, one in zip(rows, [*shown["pairs"], shown["next"]], strict=True):
        assert row[1] == f"{one['degrees']}°"
        for cell, vector, half in (
            (row[2], one["value"], 1e-9),
            (row[3], one["readback"], 0.0051),
        ):
            drawn_at = [number(text) for text in cell.split(", ")]
            assert drawn_at == pytest.approx(vector, abs=half)
        if name := one.get("replacedBy"):
            assert row[4] == f"now {name}"
            assert f"{one['name']}: same key as {name}" in said
        else:
            assert number(row[4]) == pytest.approx(one["error"], abs=0.0051)
            assert f"({row[3]})" in said

    scale = SIZE / 2 / shown["range"]

    def at(vector: list[float]) -> tuple[float, float]:
        x, y = vector
        return BOX[0] + SIZE / 2 + scale * x, BOX[1] + SIZE / 2 - scale * y

    assert set(marks["key"]) - {"new"} == set(names)
    current = [one["name"] for one in shown["pairs"] if one["replacedBy"] is None]
    assert set(marks["read"]) == set(marks["before"]) == set(current)
    for one in shown["pairs"]:
        name = one["name"]
        x, y, now = marks["key"][name]
        assert now == str(one["degrees"])
        angle = math.degrees(math.atan2(CENTRE[1] - y, x - CENTRE[0])) % 360
        turn = abs(angle - one["degrees"])
        assert min(turn, 360 - turn) < 0.1
        for kind, vector in (
            ("value", "value"),
            ("read", "readback"),
            ("before", "before"),
        ):
            if name in marks[kind]:
                drawn_at = marks[kind][name][:2]
                assert drawn_at == pytest.approx(at(one[vector]), abs=0.01)
        ends = [float(x) for x in re.findall(r"[-\d.]+", drawing["errors"][name])]
        wanted = [*at(one["value"]), *at(one["readback"])]
        assert ends == pytest.approx(wanted, abs=0.01)
    assert {*names, "new"} == set(marks["value"])
    value = at(shown["next"]["value"])
    assert marks["value"]["new"][:2] == pytest.approx(value, abs=0.01)

    # The curve: W times the circle, all of it inside the box.
    points = re.findall(r"([-\d.]+) ([-\d.]+)", drawing["curve"])
    assert len(points) == 60
    W = torch.tensor(shown["W"]).double()
    for i, (x, y) in enumerate(points):
        wanted = at((W @ unit(6 * i)).tolist())
        assert (float(x), float(y)) == pytest.approx(wanted, abs=0.01)
        assert BOX[0] <= float(x) <= BOX[0] + SIZE
        assert BOX[1] <= float(y) <= BOX[1] + SIZE


def turn(figure, name: str, degrees: int):
    x, y = unit(degrees).tolist()
    drag(figure, name, CENTRE[0] + 80 * x, CENTRE[1] - 80 * y)


def drag(figure, name: str, x: float, y: float):
    figure.drag(figure.slider(name), x, y)
    figure.tab.mouse.move(5, 5)


def test_as_it_begins(figure):
    shown = compare(figure, "delta", 1, [A, B], NEW)
    # Something to ask about: the last pair is right, the first is no longer.
    assert shown["pairs"][0]["error"] > 0.5
    assert shown["pairs"][0]["before"] == pytest.approx(A[1])
    assert shown["pairs"][1]["error"] < 1e-12
    assert "B reads (−1.00, 0.50), right" in figure.words()
    assert "Before B was written, A read (0.90, 0.80)." in figure.words()
    assert "25° apart" in figure.words()
    turn(figure, "Key B", 130)
    compare(figure, "delta", 1, [A, (130, B[1])], NEW)
    assert "Before B was written" not in figure.words()  # it changed nothing else
    assert "90° apart: k · k′ = 0.00" in figure.words()
    assert figure.ask("all('.fw-picture')[0].outerHTML.length") < 25e3


def test_arrows_turn_a_written_key(figure):
    key = figure.role("slider", name="Key A", exact=True)
    for arrow, times, degrees in (
        *(("ArrowUp", 1, 45), ("PageDown", 1, 20)),
        *(("ArrowRight", 5, 0), ("ArrowDown", 1, 355)),
    ):
        for _ in range(times):
            key.press(arrow)
        compare(figure, "delta", 1, [(degrees, A[1]), B], NEW)


@pytest.mark.parametrize("name", ["Key A", "New key"])
def test_arrows_move_as_the_eye_expects(figure, name):
    """All round, a key goes where the arrow points, and then stays."""
    turned = figure.slider(name).evaluate(asks.ARROWS)
    for (places, end), wanted in zip(turned, ("180", "0", "90", "270"), strict=True):
        moves = [b - a for a, b in pairwise(places)]
        assert min(moves) >= 0
        assert sum(move > 0 for move in moves) >= 30
        assert moves[-1] == 0
        assert end == wanted


def test_ghost_of_the_value_before_a_write(figure):
    """It stays when keys are turned, and goes on to the next write."""
    figure.press("Write")
    shown = compare(figure, "delta", 1, [A, B, NEW], NEW)
    assert "Before C was written, A read" in figure.words()
    turn(figure, "Key A", 330)
    shown = compare(figure, "delta", 1, [(330, A[1]), B, NEW], NEW)
    held = shown["pairs"][0]["readback"]
    figure.press("Write")
    shown = compare(figure, "delta", 1, [(330, A[1]), B, NEW, NEW], NEW)
    assert shown["pairs"][0]["before"] == pytest.approx(held)
    figure.press("Undo")
    compare(figure, "delta", 1, [(330, A[1]), B, NEW], NEW)


def test_another_pair(figure):
    for degrees, caught in ((68, 65), (70, 70)):  # on a written key, if it is near
        turn(figure, "New key", degrees)
        compare(figure, "delta", 1, [A, B], (caught, NEW[1]))
    turn(figure, "New key", 200)
    drag(figure, "New value", BOX[0] + SIZE / 2 - 57, BOX[1] + SIZE / 2 - 38)
    new = (200, [-1.2, 0.8])
    compare(figure, "delta", 1, [A, B], new)
    figure.press("Write")
    shown = compare(figure, "delta", 1, [A, B, new], new)
    assert shown["next"]["error"] < 1e-12
    # The written value stays when the new one moves on.
    value = figure.role("slider", name="New value", exact=True)
    value.focus()
    for arrow in ("Right", "Right", "Up", "Left", "Down", "Down"):
        value.press(f"Arrow{arrow}")
    moved = (200, [-1.1, 0.7])
    compare(figure, "delta", 1, [A, B, new], moved)
    assert value.get_attribute("aria-valuetext") == "−1.1 right, 0.7 up"
    for _ in range(6):
        value.press("ArrowLeft")
    compare(figure, "delta", 1, [A, B, new], (200, [-1.5, 0.7]))
    turn(figure, "Key C", 45)
    compare(figure, "delta", 1, [A, B, (45, new[1])], (200, [-1.5, 0.7]))


@pytest.mark.parametrize("beta", [0, 0.35, 1])
def test_rules_and_strength(figure, beta):
    """When a key is overwritten."""
    pairs, new = PRESETS["Overwrite a key"]
    figure.slide("Write strength", beta)
    strength = figure.slider("Write strength")
    said = set()
    for rule in ("delta", "gated", "sum"):
        figure.press("Overwrite a key")
        figure.choose(rule)
        before = compare(figure, rule, beta, pairs, new)["pairs"]
        figure.press("Write")
        after = compare(figure, rule, beta, [*pairs, new], new)["pairs"]
        assert figure.words().startswith(f"{rule.capitalize()} rule")
        said.add(figure.words())
        # The sum rule has no strength.
        assert strength.is_disabled() == (rule == "sum")
        assert after[0]["replacedBy"] == "C"
        b = torch.tensor([before[1]["readback"], after[1]["readback"]]).double()
        kept = 1 - beta if rule == "gated" else 1
        torch.testing.assert_close(b[1], kept * b[0])
        if rule == "sum":
            added = [x + y for x, y in zip(A[1], new[1], strict=True)]
            assert after[2]["readback"] == pytest.approx(added)
        elif beta == 1:
            assert after[2]["error"] < 1e-12
    assert len(said) == 3
    figure.role("radio", name="sum").press("ArrowRight")
    compare(figure, "gated", beta, [*pairs, new], new)


def test_undo_and_start_again_by_keyboard(figure):
    write = figure.role("button", name="Write", exact=True)
    undo = figure.role("button", name="Undo", exact=True)
    pairs = [A, B]
    write.focus()
    while len(pairs) < 5:
        figure.tab.keyboard.press("Enter")
        pairs.append(NEW)
        compare(figure, "delta", 1, pairs, NEW)
    # Full: it is said why, and the keyboard is not left on a button that is off.
    assert write.is_disabled()
    full = "undo one to write another"
    assert full in figure.words()
    assert figure.focused() == "Undo"
    while pairs:
        new = pairs.pop()
        figure.tab.keyboard.press("Space")
        assert full not in figure.words()
        compare(figure, "delta", 1, pairs, new)
    assert undo.is_disabled()
    assert figure.focused() == "Write"
    assert "The memory is empty" in figure.words()
    figure.tab.keyboard.press("Enter")
    compare(figure, "delta", 1, [A], A)
    figure.press("Start again")
    compare(figure, "delta", 1, [], A)
    assert undo.is_disabled() and write.is_enabled()


def test_presets(figure):
    figure.choose("sum")
    for name, preset in PRESETS.items():
        figure.press("Write")
        figure.press(name)
        compare(figure, "sum", 1, *preset)
        # A preset is not changed by what is done to it.
        turn(figure, "Key A", 330)
        figure.press(name)
        compare(figure, "sum", 1, *preset)


def test_large_readings_stay_in_the_picture(figure):
    figure.choose("sum")
    pairs = [A, B]
    for _ in range(3):
        figure.press("Write")
        pairs.append(NEW)
    shown = compare(figure, "sum", 1, pairs, NEW)
    assert shown["range"] > 2
    # Values are dragged to where they are, whatever the scale.
    unit_length = SIZE / 2 / shown["range"]
    to = BOX[0] + SIZE / 2 + unit_length, BOX[1] + SIZE / 2 - 0.5 * unit_length
    drag(figure, "New value", *to)
    compare(figure, "sum", 1, pairs, (140, [1, 0.5]))


@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_overlaps(fresh, width):
    """No text is cut off or on another; handles can be touched."""
    figure = fresh("memory", (width, 900))
    for name in [None, *PRESETS]:
        if name:
            figure.press(name)
            figure.press("Write")
        assert figure.overlapping() == [], name
        sides = figure.ask(
            """all("svg [role=slider]").map((e) => e.getBoundingClientRect())
            .filter(({ width }) => width).flatMap(({ width, height }) => [width, height])"""
        )
        assert len(sides) > 4 and min(sides) >= 24
    assert figure.wide() <= width
