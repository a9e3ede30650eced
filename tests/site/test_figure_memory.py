"""The memory playground writes and reads as fwlab's rules do.

The test keeps its own list of the pairs that it has written, and asks
fwlab for the memory and for what each key reads.
"""

import math
import re
from itertools import pairwise

import pytest
import torch

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
def tab(fresh):
    return fresh("memory").tab


def state(tab) -> dict:
    return tab.evaluate("document.querySelector('#figure-memory').figure.state()")


def words(tab) -> str:
    return tab.inner_text("#figure-memory .fw-words")


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


def compare(tab, rule: str, beta: float, pairs: list, new: tuple) -> dict:
    """State, numbers and drawing, against fwlab."""
    shown = state(tab)
    assert (shown["rule"], shown["beta"]) == (rule, beta)
    assert [pair["name"] for pair in shown["pairs"]] == list("ABCDE"[: len(pairs)])
    W, _ = memory(rule, beta, pairs)
    torch.testing.assert_close(torch.tensor(shown["W"]).double(), W, atol=1e-6, rtol=0)
    all_shown = [*shown["pairs"], shown["next"]]
    for found, (degrees, value) in zip(all_shown, [*pairs, new], strict=True):
        assert found["degrees"] == degrees
        assert found["key"] == pytest.approx(unit(degrees).tolist(), abs=1e-12)
        assert found["value"] == pytest.approx(value, abs=1e-12)
        _, readback = memory(rule, beta, pairs, degrees)
        assert found["readback"] == pytest.approx(readback.tolist(), abs=1e-6)
        error = (readback - torch.tensor(value).double()).norm().item()
        assert found["error"] == pytest.approx(error, abs=1e-6)
        _, before = memory(rule, beta, pairs[:-1], degrees)
        assert found["before"] == pytest.approx(before.tolist(), abs=1e-6)
    for j, pair in enumerate(shown["pairs"]):
        later = [i for i in range(j + 1, len(pairs)) if pairs[i][0] == pairs[j][0]]
        assert pair["replacedBy"] == ("ABCDE"[later[-1]] if later else None)
    drawn(tab, shown)
    return shown


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def place(tab, selector: str) -> tuple[float, float]:
    moved = tab.locator(f"#figure-memory svg {selector}").get_attribute("transform")
    x, y = re.fullmatch(r"translate\((\S+) (\S+)\)", moved).groups()
    return float(x), float(y)


def drawn(tab, shown: dict):
    """What the picture and its words say, against `state`."""
    picture = tab.locator("#figure-memory svg")
    said = words(tab)
    texts = picture.locator("[data-part=memory] .fw-cell-text").all_text_contents()
    flat = [x for row in shown["W"] for x in row]
    assert [number(text) for text in texts] == pytest.approx(flat, abs=0.0051)

    rows = []
    for row in picture.locator("[data-part=table] > g").all():
        if row.is_visible():
            rows.append(row.locator("text").all_text_contents())
    assert [row[0] for row in rows] == [p["name"] for p in shown["pairs"]] + ["+"]
    for row, one in zip(rows, [*shown["pairs"], shown["next"]], strict=True):
        assert row[1] == f"{one['degrees']}°"
        for cell, vector, half in (
            (row[2], one["value"], 1e-9),
            (row[3], one["readback"], 0.0051),
        ):
            found = [number(text) for text in cell.split(", ")]
            assert found == pytest.approx(vector, abs=half)
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

    for name in "ABCDE":
        read = picture.locator(f"[data-read={name}]")
        there = name in [pair["name"] for pair in shown["pairs"]]
        assert picture.locator(f"[data-key={name}]").is_visible() == there
        if not there:
            assert not read.is_visible()
            continue
        one = shown["pairs"]["ABCDE".index(name)]
        handle = picture.locator(f"[data-key={name}]")
        assert handle.get_attribute("aria-valuenow") == str(one["degrees"])
        x, y = place(tab, f"[data-key={name}]")
        angle = math.degrees(math.atan2(CENTRE[1] - y, x - CENTRE[0])) % 360
        turn = abs(angle - one["degrees"])
        assert min(turn, 360 - turn) < 0.1
        value, readback = at(one["value"]), at(one["readback"])
        assert place(tab, f"[data-value={name}]") == pytest.approx(value, abs=0.01)
        assert place(tab, f"[data-read={name}]") == pytest.approx(readback, abs=0.01)
        ends = picture.locator(f"[data-error={name}]").get_attribute("d")
        ends = [float(x) for x in re.findall(r"[-\d.]+", ends)]
        assert ends == pytest.approx([*value, *readback], abs=0.01)
        ghost = picture.locator(f"[data-before={name}]")
        wanted = pytest.approx(at(one["before"]), abs=0.01)
        assert place(tab, f"[data-before={name}]") == wanted
        for mark in (read, ghost):
            assert mark.is_visible() == (one["replacedBy"] is None)
    value = at(shown["next"]["value"])
    assert place(tab, "[data-value=new]") == pytest.approx(value, abs=0.01)

    # The curve: W times the circle, all of it inside the box.
    curve = picture.locator("[data-part=ellipse]").get_attribute("d")
    points = re.findall(r"([-\d.]+) ([-\d.]+)", curve)
    assert len(points) == 60
    W = torch.tensor(shown["W"]).double()
    for i, (x, y) in enumerate(points):
        wanted = at((W @ unit(6 * i)).tolist())
        assert (float(x), float(y)) == pytest.approx(wanted, abs=0.01)
        assert BOX[0] <= float(x) <= BOX[0] + SIZE
        assert BOX[1] <= float(y) <= BOX[1] + SIZE


def press(tab, name: str):
    tab.get_by_role("button", name=name, exact=True).click()


def choose(tab, rule: str):
    tab.get_by_role("radio", name=rule, exact=True).check()


def set_beta(tab, beta: float):
    """By its keys, from the right end."""
    slider = tab.get_by_role("slider", name="Write strength")
    slider.focus()
    slider.press("End")
    for _ in range(round((1 - beta) / 0.05)):
        slider.press("ArrowLeft")


def drag(tab, name: str, x: float, y: float):
    """Move a handle to a point, in units of the picture, by mouse."""
    tab.locator("#figure-memory svg").first.scroll_into_view_if_needed()
    handle = tab.get_by_role("slider", name=name, exact=True).bounding_box()
    to = tab.evaluate(
        """([x, y]) => {
          const matrix = document.querySelector("#figure-memory svg").getScreenCTM();
          const point = new DOMPoint(x, y).matrixTransform(matrix);
          return [point.x, point.y];
        }""",
        [x, y],
    )
    middle = handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2
    tab.mouse.move(*middle)
    tab.mouse.down()
    tab.mouse.move(*to, steps=5)
    tab.mouse.up()
    tab.mouse.move(5, 5)


def turn(tab, name: str, degrees: int):
    x, y = unit(degrees).tolist()
    drag(tab, name, CENTRE[0] + 80 * x, CENTRE[1] - 80 * y)


def test_as_it_begins(tab):
    shown = compare(tab, "delta", 1, [A, B], NEW)
    # Something to ask about: the last pair is right, the first is no longer.
    assert shown["pairs"][0]["error"] > 0.5
    assert shown["pairs"][0]["before"] == pytest.approx(A[1])
    assert shown["pairs"][1]["error"] < 1e-12
    assert "B reads (−1.00, 0.50), right" in words(tab)
    assert "Before B was written, A read (0.90, 0.80)." in words(tab)
    assert "25° apart" in words(tab)
    assert tab.evaluate("document.querySelector('.fw-picture').outerHTML.length") < 25e3


@pytest.mark.parametrize("beta", [0, 0.35, 1])
def test_rules_and_strength(tab, beta):
    press(tab, "Write")
    pairs = [A, B, NEW]
    set_beta(tab, beta)
    said = {words(tab)}
    compare(tab, "delta", beta, pairs, NEW)
    for rule in ("gated", "sum"):
        choose(tab, rule)
        compare(tab, rule, beta, pairs, NEW)
        assert words(tab).startswith(f"{rule.capitalize()} rule")
        said.add(words(tab))
    assert len(said) == 3
    # The sum rule has no strength.
    slider = tab.get_by_role("slider", name="Write strength")
    assert slider.is_disabled()
    tab.get_by_role("radio", name="sum").press("ArrowRight")
    compare(tab, "gated", beta, pairs, NEW)
    assert slider.is_enabled()


def test_mouse_turns_a_written_key(tab):
    before = words(tab)
    turn(tab, "Key B", 130)
    shown = compare(tab, "delta", 1, [A, (130, B[1])], NEW)
    assert shown["pairs"][0]["error"] == pytest.approx(0, abs=1e-12)
    assert "Before B was written" not in words(tab)  # it changed nothing else
    assert words(tab) != before
    assert "90° apart: k · k′ = 0.00" in words(tab)
    turn(tab, "Key A", 290)
    compare(tab, "delta", 1, [(290, A[1]), (130, B[1])], NEW)
    choose(tab, "sum")
    turn(tab, "Key B", 225)
    compare(tab, "sum", 1, [(290, A[1]), (225, B[1])], NEW)


def test_arrows_turn_a_written_key(tab):
    key = tab.get_by_role("slider", name="Key A", exact=True)
    key.focus()
    before = words(tab)
    key.press("ArrowUp")
    compare(tab, "delta", 1, [(45, A[1]), B], NEW)
    assert words(tab) != before
    key.press("PageDown")
    compare(tab, "delta", 1, [(20, A[1]), B], NEW)
    for _ in range(5):
        key.press("ArrowRight")
    compare(tab, "delta", 1, [(0, A[1]), B], NEW)
    key.press("ArrowDown")
    compare(tab, "delta", 1, [(355, A[1]), B], NEW)


@pytest.mark.parametrize("name", ["Key A", "New key"])
@pytest.mark.parametrize("arrow", ["Left", "Right", "Up", "Down"])
def test_arrows_move_as_the_eye_expects(tab, name, arrow):
    """All round, a key goes where the arrow points, and then stays."""
    axis, sign = {"Left": (0, -1), "Right": (0, 1), "Up": (1, -1), "Down": (1, 1)}[
        arrow
    ]
    which = {"Key A": "A", "New key": "new"}[name]
    key = tab.get_by_role("slider", name=name, exact=True)
    other = {"Left": "Right", "Right": "Left", "Up": "Down", "Down": "Up"}[arrow]
    for _ in range(40):  # to the other side, wherever that is reached from
        key.press(f"Arrow{other}")
    places = [place(tab, f"[data-key={which}]")[axis]]
    for _ in range(40):
        key.press(f"Arrow{arrow}")
        places.append(place(tab, f"[data-key={which}]")[axis])
    moves = [sign * (b - a) for a, b in pairwise(places)]
    assert min(moves) >= 0
    assert sum(move > 0 for move in moves) >= 30
    assert moves[-1] == 0
    end = {"Left": 180, "Right": 0, "Up": 90, "Down": 270}[arrow]
    assert key.get_attribute("aria-valuenow") == str(end)


def test_ghost_of_the_value_before_a_write(tab):
    """It stays when keys are turned, and goes on to the next write."""
    press(tab, "Write")
    shown = compare(tab, "delta", 1, [A, B, NEW], NEW)
    assert "Before C was written, A read" in words(tab)
    turn(tab, "Key A", 330)
    shown = compare(tab, "delta", 1, [(330, A[1]), B, NEW], NEW)
    held = shown["pairs"][0]["readback"]
    press(tab, "Write")
    shown = compare(tab, "delta", 1, [(330, A[1]), B, NEW, NEW], NEW)
    assert shown["pairs"][0]["before"] == pytest.approx(held)
    press(tab, "Undo")
    compare(tab, "delta", 1, [(330, A[1]), B, NEW], NEW)


def test_another_pair(tab):
    turn(tab, "New key", 200)
    drag(tab, "New value", BOX[0] + SIZE / 2 - 57, BOX[1] + SIZE / 2 - 38)
    new = (200, [-1.2, 0.8])
    compare(tab, "delta", 1, [A, B], new)
    press(tab, "Write")
    shown = compare(tab, "delta", 1, [A, B, new], new)
    assert shown["next"]["error"] < 1e-12
    # The written value stays when the new one moves on.
    value = tab.get_by_role("slider", name="New value", exact=True)
    value.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowUp", "ArrowLeft", "ArrowDown"):
        value.press(key)
    value.press("ArrowDown")
    moved = (200, [-1.1, 0.7])
    compare(tab, "delta", 1, [A, B, new], moved)
    assert value.get_attribute("aria-valuetext") == "−1.1 right, 0.7 up"
    for _ in range(6):
        value.press("ArrowLeft")
    compare(tab, "delta", 1, [A, B, new], (200, [-1.5, 0.7]))
    turn(tab, "Key C", 45)
    compare(tab, "delta", 1, [A, B, (45, new[1])], (200, [-1.5, 0.7]))


@pytest.mark.parametrize("rule", ["sum", "gated", "delta"])
@pytest.mark.parametrize("beta", [0.5, 1])
def test_overwriting(tab, rule, beta):
    press(tab, "Overwrite a key")
    pairs, new = PRESETS["Overwrite a key"]
    set_beta(tab, beta)
    choose(tab, rule)
    before = compare(tab, rule, beta, pairs, new)["pairs"]
    press(tab, "Write")
    after = compare(tab, rule, beta, [*pairs, new], new)["pairs"]
    assert after[0]["replacedBy"] == "C"
    b = torch.tensor([before[1]["readback"], after[1]["readback"]]).double()
    if rule == "gated":
        torch.testing.assert_close(b[1], (1 - beta) * b[0])
    else:
        torch.testing.assert_close(b[1], b[0])
    if rule == "sum":
        added = [x + y for x, y in zip(A[1], new[1], strict=True)]
        assert after[2]["readback"] == pytest.approx(added)
    elif beta == 1:
        assert after[2]["error"] < 1e-12


def test_half_a_write_leaves_half(tab):
    set_beta(tab, 0.5)
    pairs = [A, B]
    left = compare(tab, "delta", 0.5, pairs, NEW)["next"]["error"]
    for _ in range(3):
        press(tab, "Write")
        pairs.append(NEW)
        now = compare(tab, "delta", 0.5, pairs, NEW)["next"]["error"]
        assert now == pytest.approx(left / 2)
        left = now


def test_new_key_catches_on_a_written_one(tab):
    turn(tab, "New key", 68)
    compare(tab, "delta", 1, [A, B], (65, NEW[1]))
    turn(tab, "New key", 70)
    compare(tab, "delta", 1, [A, B], (70, NEW[1]))


def test_undo_and_start_again_by_keyboard(tab):
    write = tab.get_by_role("button", name="Write", exact=True)
    undo = tab.get_by_role("button", name="Undo", exact=True)
    pairs = [A, B]
    write.focus()
    while len(pairs) < 5:
        tab.keyboard.press("Enter")
        pairs.append(NEW)
        compare(tab, "delta", 1, pairs, NEW)
    # Full: it is said why, and the keyboard is not left on a button that is off.
    assert write.is_disabled()
    full = "undo one to write another"
    assert full in words(tab)
    focused = "document.activeElement.textContent"
    assert tab.evaluate(focused) == "Undo"
    while pairs:
        new = pairs.pop()
        tab.keyboard.press("Space")
        assert full not in words(tab)
        compare(tab, "delta", 1, pairs, new)
    assert undo.is_disabled()
    assert tab.evaluate(focused) == "Write"
    assert "The memory is empty" in words(tab)
    tab.keyboard.press("Enter")
    compare(tab, "delta", 1, [A], A)
    press(tab, "Start again")
    compare(tab, "delta", 1, [], A)
    assert undo.is_disabled() and write.is_enabled()


@pytest.mark.parametrize("name", PRESETS)
def test_presets(tab, name):
    choose(tab, "sum")
    press(tab, "Write")
    press(tab, name)
    compare(tab, "sum", 1, *PRESETS[name])
    # A preset is not changed by what is done to it.
    turn(tab, "Key A", 330)
    press(tab, name)
    compare(tab, "sum", 1, *PRESETS[name])


def test_large_readings_stay_in_the_picture(tab):
    choose(tab, "sum")
    pairs = [A, B]
    for _ in range(3):
        press(tab, "Write")
        pairs.append(NEW)
    shown = compare(tab, "sum", 1, pairs, NEW)
    assert shown["range"] > 2
    # Values are dragged to where they are, whatever the scale.
    unit_length = SIZE / 2 / shown["range"]
    to = BOX[0] + SIZE / 2 + unit_length, BOX[1] + SIZE / 2 - 0.5 * unit_length
    drag(tab, "New value", *to)
    compare(tab, "sum", 1, pairs, (140, [1, 0.5]))


@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_overlaps(look, width):
    """No text is cut off or on another; handles can be touched."""
    tab = look(PAGE, width=width)
    for name in [None, *PRESETS]:
        if name:
            press(tab, name)
            press(tab, "Write")
        boxes = tab.evaluate(
            """[...document.querySelectorAll("#figure-memory svg text")]
            .filter((text) => text.textContent && text.getBoundingClientRect().width)
            .map((text) => {
              const box = text.getBoundingClientRect();
              const all = text.ownerSVGElement.getBoundingClientRect();
              if (box.left < all.left - 1 || box.right > all.right + 1)
                throw new Error(`cut off: ${text.textContent}`);
              return [text.textContent, box.x, box.y, box.width, box.height];
            })"""
        )
        for i, (a, x, y, w, h) in enumerate(boxes):
            for b, x2, y2, w2, h2 in boxes[:i]:
                apart = x + w <= x2 or x2 + w2 <= x
                # Lines of text lie close: a third of a line is its margin.
                assert apart or abs(y + h / 2 - y2 - h2 / 2) > 0.66 * min(h, h2), (
                    name,
                    a,
                    b,
                )
        for handle in tab.locator("#figure-memory svg [role=slider]").all():
            if handle.is_visible():
                box = handle.bounding_box()
                assert min(box["width"], box["height"]) >= 24
    root = "document.documentElement"
    assert tab.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")
