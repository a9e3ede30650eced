"""The figure of AFT's stability shows what float32 does.

The three tricks are computed once more with torch, and the running
log-sum-exp is fwlab's own.
"""

import math
import re

import pytest
import torch

from fwlab import ops

T, TILE = 8, 4
PAGE = "figures/aft.html"
FAILING = ("none", "global", "tile")


@pytest.fixture
def tab(look):
    return look(PAGE)


def state(tab) -> dict:
    return tab.evaluate("document.querySelector('#figure-aft').figure.state()")


def set_key(tab, value: int):
    """By its keys alone, from the nearer end."""
    slider = tab.get_by_role("slider", name="Large key")
    slider.focus()
    end, arrow, presses = "Home", "ArrowRight", value + 20
    if value > 90:
        end, arrow, presses = "End", "ArrowLeft", 200 - value
    slider.press(end)
    for _ in range(presses):
        slider.press(arrow)
    assert slider.input_value() == str(value)


def quotients(keys: list[float], values: list[float], c: list[float]) -> list[float]:
    """float32, with `c[t]` taken off all keys that row t sees."""
    k, v, c = (torch.tensor(x, dtype=torch.float32) for x in (keys, values, c))
    rows = []
    for t in range(T):
        weights = torch.exp(k[: t + 1] - c[t])
        above = below = torch.zeros(())
        for weight, value in zip(weights, v, strict=False):
            above, below = above + weight * value, below + weight
        rows.append((above / below).item())
    return rows


def subtracted(keys: list[float]) -> dict[str, list[float]]:
    ends = [(t // TILE + 1) * TILE for t in range(T)]
    return {
        "none": [0] * T,
        "global": [max(keys)] * T,
        "tile": [max(keys[:end]) for end in ends],
    }


def simple(keys: list[float], values: list[float], dtype) -> tuple:
    """fwlab's outputs, whose gate is open, and its running log-sum-exp."""
    k, v = (torch.tensor(x, dtype=dtype)[None, :, None] for x in (keys, values))
    gate = torch.full_like(k, 100)
    y = ops.aft_simple(gate, k, v)[0, :, 0]
    log_sums = [
        ops.aft_simple(gate[:, :t], k[:, :t], v[:, :t], return_state=True)[1][0]
        for t in range(1, T)
    ]
    return y.tolist(), [-math.inf, *(x.item() for x in log_sums)]


def compare(shown: dict):
    """What the figure shows, with what torch and fwlab compute."""
    keys, values, methods = (shown[name] for name in ("keys", "values", "methods"))
    assert keys[shown["step"] - 1] == shown["large"]
    exact, _ = simple(keys, values, torch.float64)
    assert shown["exact"] == pytest.approx(exact, rel=1e-12)

    y, log_sums = simple(keys, values, torch.float32)
    assert methods["running"]["outputs"] == pytest.approx(y, rel=1e-6)
    tops = [max(pair) for pair in zip(log_sums, keys, strict=True)]
    assert methods["running"]["maxima"] == pytest.approx(tops, rel=1e-6)
    assert methods["running"]["lost"] == methods["running"]["wrong"] == []

    for name, c in subtracted(keys).items():
        method = methods[name]
        assert method["maxima"] == c
        found, wanted = method["outputs"], quotients(keys, values, c)
        lost = [t + 1 for t, y in enumerate(wanted) if not math.isfinite(y)]
        assert method["lost"] == lost, name
        assert [float(y) for y in found] == pytest.approx(wanted, rel=1e-6, nan_ok=True)
        errors = [abs(y / x - 1) for y, x in zip(wanted, exact, strict=True)]
        wrong = [t + 1 for t, e in enumerate(errors) if e > 1e-3]
        assert method["wrong"] == [t for t in wrong if t not in lost], name
        for t in set(range(1, T + 1)) - set(lost):
            assert method["errors"][t - 1] == pytest.approx(errors[t - 1], abs=1e-6)


def drawn(tab, name: str) -> dict:
    """The numbers and marks in the picture, without its page's help."""
    block = tab.locator(f"#figure-aft [data-method={name}]")
    label = block.get_attribute("aria-label")
    texts = block.locator("text").all_text_contents()
    place = texts.index("y")
    marks = {}
    for part in ("lost", "wrong", "shade"):
        d = block.locator(f"[data-part={part}]").get_attribute("d") or ""
        starts = re.findall(r"M([\d.]+) [\d.]+h", d)
        marks[part] = [int((float(x) - 28) // 43) + 1 for x in starts]
    return {
        "label": label,
        "verdict": texts[1],
        "outputs": texts[place + 1 : place + 1 + T],
        "errors": texts[place + T + 2 :],
        **marks,
    }


def number(y: float | str) -> str:
    special = {"NaN": "NaN", "Infinity": "∞"}
    return special[y] if isinstance(y, str) else f"{y:.3f}"


def test_as_it_begins(tab):
    shown = state(tab)
    compare(shown)
    # One picture with all that can happen: lost, wrong, and right.
    assert (shown["step"], shown["large"]) == (6, 103)
    assert shown["methods"]["global"]["lost"]
    assert shown["methods"]["global"]["wrong"]
    assert tab.evaluate("document.querySelector('.fw-picture').outerHTML.length") < 25e3


def worst(keys: list[float], values: list[float]) -> dict:
    """Of each method: the largest error of the rows that are not lost; and
    whether one is lost."""
    exact, _ = simple(keys, values, torch.float64)
    outputs = {n: quotients(keys, values, c) for n, c in subtracted(keys).items()}
    outputs["running"], _ = simple(keys, values, torch.float32)
    found = {}
    for name, ys in outputs.items():
        pairs = [pair for pair in zip(ys, exact, strict=True) if math.isfinite(pair[0])]
        error = max((abs(y / x - 1) for y, x in pairs), default=0)
        found[name] = (error, len(pairs) < T)
    return found


@pytest.mark.parametrize("step", [4, 6])
def test_plot_of_the_error_against_the_size_of_the_key(tab, step):
    """What is plotted for each size is what torch computes; so is its curve."""
    tab.get_by_role("radio", name=str(step), exact=True).click()
    shown = state(tab)
    starts = {}
    for n in range(0, 221, 5):
        keys = list(shown["keys"])
        keys[step - 1] = n - 20
        for name, (error, lost) in worst(keys, shown["values"]).items():
            plotted = shown["worst"][name][n]
            assert plotted["lost"] == lost, (name, n)
            if not lost:
                # Of rounding, only its size is the same everywhere.
                assert plotted["error"] == pytest.approx(error, rel=0.02, abs=5e-7)
    for name in ("none", "global", "tile", "running"):
        lines = {}
        for kind in ("curve", "lost"):
            d = tab.locator(f"#figure-aft [data-{kind}={name}]").get_attribute("d")
            pairs = re.findall(r"[ML]([-\d.]+) ([-\d.]+)", d or "")
            lines[kind] = [(float(x), float(y)) for x, y in pairs]
        plotted = shown["worst"][name]
        lost = [n for n, one in enumerate(plotted) if one["lost"]]
        wanted = [n * 340 / 220 for n in lost]
        assert [x for x, _ in lines["lost"]] == pytest.approx(wanted, abs=0.06)
        kept = [n for n in range(221) if n not in lost]
        assert len(lines["curve"]) == len(kept)
        for n, (x, y) in zip(kept, lines["curve"], strict=True):
            assert x == pytest.approx(n * 340 / 220, abs=0.06)
            height = math.log10(min(1, max(1e-8, plotted[n]["error"])))
            assert y == pytest.approx(78 - height * 92 / 8, abs=0.06)
        starts[name] = lost[:1]
    # The sum overflows from 88 or 89 on; it also has a factor V.
    assert starts["none"] == [{4: 109, 6: 108}[step]] and starts["running"] == []


@pytest.mark.parametrize("width", [390, 1280])
def test_plot_lies_under_the_slider(look, width):
    """The line of the plot is below the thumb, wherever that is."""
    tab = look(PAGE, width=width)
    slider = tab.get_by_role("slider", name="Large key")
    for value in (-20, 60, 103, 200):
        slider.fill(str(value))
        box = slider.bounding_box()
        thumb = box["x"] + 8 + (value + 20) / 220 * (box["width"] - 16)
        line = tab.locator("#figure-aft [data-part=marker]").bounding_box()
        assert line["x"] + line["width"] / 2 == pytest.approx(thumb, abs=2)
        assert -2 <= line["y"] - box["y"] - box["height"] < 12
        for name, method in state(tab)["methods"].items():
            dot = tab.locator(f"#figure-aft [data-dot={name}]")
            place = [float(dot.get_attribute(a)) for a in ("cx", "cy")]
            assert place[0] == pytest.approx((value + 20) / 220 * 340, abs=0.06)
            assert (place[1] < 70) == bool(method["lost"])


def test_keyboard_moves_the_key(tab):
    for value in (-20, 88, 104, 200):
        before = tab.inner_text(".fw-words")
        set_key(tab, value)
        shown = state(tab)
        assert shown["large"] == value
        compare(shown)
        words = tab.inner_text(".fw-words")
        assert words != before
        assert f"K6 = {value}.".replace("-", "−") in words


def test_every_key_of_the_slider(tab):
    """The first NaN of each trick comes where torch has it: so do all others."""
    slider = tab.get_by_role("slider", name="Large key")
    slider.focus()
    slider.press("Home")
    first = {}
    for value in range(-20, 201):
        shown = state(tab)
        assert shown["large"] == value
        compare(shown)
        for name in FAILING:
            if shown["methods"][name]["lost"]:
                first.setdefault(name, (value, shown["methods"][name]["lost"][0]))
        slider.press("ArrowRight")
    # e^88.7 is the end of float32, and e^-103.97 rounds to 0.
    assert first == {"none": (88, 6), "global": (103, 1), "tile": (106, 5)}


def test_mouse_moves_the_key(tab):
    slider = tab.get_by_role("slider", name="Large key")
    slider.scroll_into_view_if_needed()
    box = slider.bounding_box()
    y = box["y"] + box["height"] / 2
    tab.mouse.move(box["x"] + box["width"] * 0.56, y)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] * 0.8, y, steps=4)
    tab.mouse.up()
    shown = state(tab)
    assert 140 < shown["large"] < 170
    compare(shown)
    assert shown["methods"]["global"]["lost"] == [1, 2, 3, 4, 5]
    assert shown["methods"]["tile"]["lost"] == [5]
    assert tab.locator(".fw-slider .fw-value").inner_text() == str(shown["large"])


def test_another_step_is_large(tab):
    set_key(tab, 150)
    for step in range(3, 9):
        tab.get_by_role("radio", name=str(step), exact=True).click()
        shown = state(tab)
        assert shown["step"] == step
        compare(shown)
        methods = shown["methods"]
        assert methods["none"]["lost"] == list(range(step, T + 1))
        assert methods["global"]["lost"] == list(range(1, step))
        tile = (step - 1) // TILE * TILE + 1
        assert methods["tile"]["lost"] == list(range(tile, step))
        assert f"K{step} = 150." in tab.inner_text(".fw-words")


def test_step_by_keyboard(tab):
    tab.get_by_role("radio", name="6", exact=True).focus()
    tab.keyboard.press("ArrowRight")
    assert state(tab)["step"] == 7
    compare(state(tab))


@pytest.mark.parametrize("value", [3, 88, 103, 104, 150])
def test_drawn_as_said(tab, value):
    set_key(tab, value)
    shown = state(tab)
    words = tab.inner_text(".fw-words")
    for name, method in shown["methods"].items():
        picture = drawn(tab, name)
        outputs = [number(y) for y in method["outputs"]]
        assert picture["outputs"] == outputs
        assert ", ".join(outputs) in picture["label"]
        assert picture["lost"] == method["lost"]
        assert picture["wrong"] == method["wrong"]
        assert picture["shade"] == method["lost"] + method["wrong"]
        bad = len(picture["shade"])
        assert (picture["verdict"] == "all 8 right") == (bad == 0)
        assert picture["verdict"] in picture["label"]
        for y, text in zip(method["errors"], picture["errors"], strict=True):
            if isinstance(y, str):
                assert text == "–"
            else:
                assert float(text.replace("−", "-")) == pytest.approx(y, rel=0.51)
    assert ("NaN" in words) == any(
        "NaN" in m["outputs"] for m in shown["methods"].values()
    )
    keys = tab.locator("#figure-aft svg g").first.locator("text").all_text_contents()
    place = keys.index("K")
    shown_keys = [f"{key:.1f}".replace("-", "−") for key in shown["keys"]]
    assert keys[place + 1 : place + 1 + T] == shown_keys


@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_overlaps(look, width):
    """No text of the picture touches another, and none is cut off."""
    tab = look(PAGE, width=width)
    boxes = tab.evaluate(
        """[...document.querySelectorAll("#figure-aft svg text")]
        .filter((text) => text.textContent)
        .map((text) => {
          const box = text.getBBox();
          const svg = text.ownerSVGElement;
          const { x, width } = svg.viewBox.baseVal;
          if (box.x < x - 0.5 || box.x + box.width > x + width + 0.5)
            throw new Error(`cut off: ${text.textContent}`);
          const number = [...document.querySelectorAll("svg")].indexOf(svg);
          return [number, text.textContent, box.x, box.y, box.width, box.height];
        })"""
    )
    for i, (of, a, x, y, w, h) in enumerate(boxes):
        for of2, b, x2, y2, w2, h2 in boxes[:i]:
            apart = of != of2 or x + w <= x2 or x2 + w2 <= x
            # Lines of text lie close: a third of a line is its margin.
            assert apart or abs(y + h / 2 - y2 - h2 / 2) > 0.66 * min(h, h2), (a, b)
    scroll = (
        "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    )
    assert tab.evaluate(scroll)
