"""The figure of AFT's stability shows what float32 does.

The three tricks are computed once more with torch, and the running
log-sum-exp is fwlab's own.
"""

import math
import re

import pytest
import torch
from built import asks

from fwlab import ops

T, TILE = 8, 4
FAILING = ("none", "global", "tile")
KEY = "Large key"
#: Without what is plotted for all sizes.
NOW = "(({ worst, ...now }) => now)(state())"


@pytest.fixture
def figure(fresh):
    return fresh("aft")


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


def simple(keys: list[float], values: list[float], dtype) -> list[float]:
    """fwlab's outputs, whose gate is open."""
    k, v = (torch.tensor(x, dtype=dtype)[None, :, None] for x in (keys, values))
    return ops.aft_simple(torch.full_like(k, 100), k, v)[0, :, 0].tolist()


def compare(shown: dict):
    """What the figure shows, with what torch and fwlab compute."""
    keys, values, methods = (shown[name] for name in ("keys", "values", "methods"))
    assert keys[shown["step"] - 1] == shown["large"]
    exact = simple(keys, values, torch.float64)
    assert shown["exact"] == pytest.approx(exact, rel=1e-12)

    running = methods["running"]
    y = simple(keys, values, torch.float32)
    assert running["outputs"] == pytest.approx(y, rel=1e-6)
    k = torch.tensor(keys)
    before = torch.cat([torch.tensor([-math.inf]), k.logcumsumexp(0)[:-1]])
    assert running["maxima"] == pytest.approx(before.maximum(k).tolist(), rel=1e-6)
    assert running["lost"] == running["wrong"] == []

    for name, c in subtracted(keys).items():
        method = methods[name]
        assert method["maxima"] == c
        outputs, wanted = method["outputs"], quotients(keys, values, c)
        lost = [t + 1 for t, y in enumerate(wanted) if not math.isfinite(y)]
        assert method["lost"] == lost, name
        assert [float(y) for y in outputs] == pytest.approx(
            wanted, rel=1e-6, nan_ok=True
        )
        errors = [abs(y / x - 1) for y, x in zip(wanted, exact, strict=True)]
        wrong = [t + 1 for t, e in enumerate(errors) if e > 1e-3]
        assert method["wrong"] == [t for t in wrong if t not in lost], name
        for t in set(range(1, T + 1)) - set(lost):
            assert method["errors"][t - 1] == pytest.approx(errors[t - 1], abs=1e-6)


def printed(y: float | str) -> str:
    special = {"NaN": "NaN", "Infinity": "∞"}
    return special[y] if isinstance(y, str) else f"{y:.3f}"


def worst(keys: list[float], values: list[float]) -> dict:
    """Of each method: the largest error of the rows that are not lost; and
    whether one is lost."""
    exact = simple(keys, values, torch.float64)
    outputs = {n: quotients(keys, values, c) for n, c in subtracted(keys).items()}
    outputs["running"] = simple(keys, values, torch.float32)
    errors = {}
    for name, ys in outputs.items():
        pairs = [pair for pair in zip(ys, exact, strict=True) if math.isfinite(pair[0])]
        error = max((abs(y / x - 1) for y, x in pairs), default=0)
        errors[name] = (error, len(pairs) < T)
    return errors


@pytest.mark.parametrize("step", [4, 6])
def test_plot_of_the_error_against_the_size_of_the_key(figure, step):
    """What is plotted for each size is what torch computes; so is its curve."""
    figure.choose(str(step))
    shown = figure.state()
    starts = {}
    for n in range(0, 221, 10):
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
            (d,) = figure.ask("values(given, 'd')", f"[data-{kind}={name}]")
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
def test_plot_lies_under_the_slider(fresh, width):
    """The line of the plot is below the thumb, wherever that is."""
    figure = fresh("aft", (width, 900))
    box = figure.slider(KEY).bounding_box()
    places = figure.sweep(
        KEY,
        (-20, 60, 103, 200),
        f"""[{NOW}, (({{ x, width }}) => x + width / 2)(all("[data-part=marker]")[0].getBoundingClientRect()),
          all("[data-part=marker]")[0].getBoundingClientRect().y - input.getBoundingClientRect().bottom,
          Object.fromEntries(all("[data-dot]").map((dot) => [dot.dataset.dot,
            ["cx", "cy"].map((a) => Number(dot.getAttribute(a)))]))]""",
    )
    for shown, middle, below, dots in places:
        share = (shown["large"] + 20) / 220
        thumb = box["x"] + 8 + share * (box["width"] - 16)
        assert middle == pytest.approx(thumb, abs=2)
        assert -2 <= below < 12
        for name, method in shown["methods"].items():
            assert dots[name][0] == pytest.approx(share * 340, abs=0.06)
            assert (dots[name][1] < 70) == bool(method["lost"])


def test_every_part_of_the_slider(figure):
    """The first NaN of each trick comes where torch has it: so do all others."""
    values = sorted({*range(-20, 201, 20), *range(86, 110), 200})
    first = {}
    for value, shown in zip(values, figure.sweep(KEY, values, NOW), strict=True):
        assert shown["large"] == value
        compare(shown)
        for name in FAILING:
            if shown["methods"][name]["lost"]:
                first.setdefault(name, (value, shown["methods"][name]["lost"][0]))
    # e^88.7 is the end of float32, and e^-103.97 rounds to 0.
    assert first == {"none": (88, 6), "global": (103, 1), "tile": (106, 5)}


def test_another_step_is_large(figure):
    figure.slide(KEY, 150)
    for step in range(3, 9):
        figure.choose(str(step))
        shown = figure.state()
        assert shown["step"] == step
        compare(shown)
        methods = shown["methods"]
        assert methods["none"]["lost"] == list(range(step, T + 1))
        assert methods["global"]["lost"] == list(range(1, step))
        tile = (step - 1) // TILE * TILE + 1
        assert methods["tile"]["lost"] == list(range(tile, step))
        assert f"K{step} = 150." in figure.words()
    figure.tab.keyboard.press("ArrowLeft")
    assert figure.state()["step"] == 7


def test_drawn_as_said(figure):
    begins = figure.state()
    # One picture with all that can happen: lost, wrong, and right.
    assert (begins["step"], begins["large"]) == (6, 103)
    assert begins["methods"]["global"]["lost"] and begins["methods"]["global"]["wrong"]
    assert figure.ask("all('.fw-picture')[0].outerHTML.length") < 25e3
    for drawn in figure.sweep(KEY, (3, 88, 103, 104, 150), asks.AFT):
        methods = drawn["now"]["methods"]
        for name, method in methods.items():
            block = drawn["blocks"][name]
            texts, label = block["texts"], block["label"]
            marks = {}
            for part, d in block["marks"].items():
                starts = re.findall(r"M([\d.]+) [\d.]+h", d)
                marks[part] = [int((float(x) - 28) // 43) + 1 for x in starts]
            place = texts.index("y") + 1
            outputs = [printed(y) for y in method["outputs"]]
            assert texts[place : place + T] == outputs
            assert ", ".join(outputs) in label
            bad = method["lost"] + method["wrong"]
            assert marks == {
                "lost": method["lost"],
                "wrong": method["wrong"],
                "shade": bad,
            }
            assert (texts[1] == "all 8 right") == (not bad)
            assert texts[1] in label
        nan = any("NaN" in m["outputs"] for m in methods.values())
        assert ("NaN" in drawn["words"]) == nan
        place = drawn["keys"].index("K") + 1
        keys = [f"{key:.1f}".replace("-", "−") for key in drawn["now"]["keys"]]
        assert drawn["keys"][place : place + T] == keys
