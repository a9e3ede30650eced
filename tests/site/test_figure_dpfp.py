"""The plane of DPFP shows fwlab's features, in fwlab's order.

The test keeps its own two keys, moves them as a reader would, and asks
fwlab for every number.
"""

import re

import pytest
import torch
from built import asks
from figure import number

from fwlab.feature_maps import DPFP, l2_normalize, sum_normalize

START = [[0.6, 1.2], [-0.4, 1.4]]
NAMES = ["k", "k′"]
ENTRIES = ["x", "y", "−x", "−y"]
#: Units of the picture.
CENTRE, SCALE = (104, 120), 45


@pytest.fixture
def figure(fresh):
    return fresh("dpfp")


def handle(figure, j: int):
    return figure.css(f"g[data-key='{NAMES[j]}']")


def drag(figure, j: int, key: list) -> None:
    """With the mouse, from the middle of the handle to a place of the plane."""
    x, y = CENTRE[0] + SCALE * key[0], CENTRE[1] - SCALE * key[1]
    figure.drag(handle(figure, j), x, y)


def names(nu: int) -> list[str]:
    """What DPFP multiplies: two entries are raised at a time, and it is seen
    which product answers. Which of the two comes first is the paper's i."""
    products = []
    for n in range(4 * nu):
        i, j = n % 4, (n % 4 + n // 4 + 1) % 4
        if (j - i) % 4 != 2:  # those of shift 2 never answer
            key = torch.zeros(2).double()
            for entry in (i, j):
                key[entry % 2] = 2.0 - 0.5 * entry if entry < 2 else -1.0
            assert DPFP(nu)(key)[n] > 0
        products.append(f"{ENTRIES[i]} · {ENTRIES[j]}")
    return products


def close(got, wanted: torch.Tensor) -> None:
    got = torch.tensor(got, dtype=torch.float64)
    torch.testing.assert_close(got, wanted, atol=1e-9, rtol=0)


def compare(figure, nu: int, keys: list) -> dict:
    """All numbers of the state, then what is drawn, against fwlab; and the words."""
    drawing = figure.ask(asks.DPFP_DRAWN)
    shown = drawing["state"]
    k = torch.tensor(keys, dtype=torch.float64)
    phi = DPFP(nu)(k)
    share, unit = sum_normalize(phi), l2_normalize(phi)
    straight = l2_normalize(k)
    assert shown["nu"] == nu
    close(shown["keys"], k)
    close(shown["r"], torch.cat([k, -k], -1).relu())
    close(shown["features"], phi)
    close(shown["normalised"], share)
    close(shown["dot"], phi[0] @ phi[1])
    close(shown["cosine"], unit[0] @ unit[1])
    close(shown["normalisedDot"], share[0] @ share[1])
    close(shown["plainDot"], k[0] @ k[1])
    close(shown["plainCosine"], straight[0] @ straight[1])
    fires = [(row > 0).nonzero().flatten().tolist() for row in phi]
    assert shown["fires"] == fires
    check_drawn(drawing, nu, k, phi, share, fires)
    rows = [
        (k[0] @ k[1], straight[0] @ straight[1]),
        (phi[0] @ phi[1], unit[0] @ unit[1]),
        (share[0] @ share[1], unit[0] @ unit[1]),
    ]
    numbers = drawing["overlaps"][3:]
    for n, row in enumerate(rows):
        for text, wanted in zip(numbers[3 * n + 1 : 3 * n + 3], row, strict=True):
            assert number(text) == pytest.approx(wanted.item(), abs=0.0051)
    return shown | {"words": drawing["words"]}


def check_drawn(drawing, nu, k, phi, share, fires) -> None:
    at = [re.fullmatch(r"translate\((\S+) (\S+)\)", x) for x in drawing["places"]]
    for j, place in enumerate(at):
        x, y = map(float, place.groups())
        assert x == pytest.approx(CENTRE[0] + SCALE * k[j, 0].item(), abs=0.51)
        assert y == pytest.approx(CENTRE[1] - SCALE * k[j, 1].item(), abs=0.51)
    r = torch.cat([k, -k], -1).relu()
    assert drawing["bars"] == pytest.approx((17 * r.T).flatten().tolist(), abs=1e-3)
    numbers = [number(text) for text in drawing["r"] if "." in text]
    assert numbers == pytest.approx(r.T.flatten().tolist())

    assert drawing["names"] == names(nu)
    assert len(drawing["cells"]) == 2 * 4 * nu
    for cell in drawing["cells"]:
        j, n = NAMES.index(cell["of"]), cell["n"]
        firing = n in fires[j]
        assert cell["fires"] == str(firing).lower()
        assert (cell["width"] == "2px") == firing
        if firing:
            assert cell["fill"] != "none"
            value, part = map(number, cell["text"].split(" → "))
            assert value == pytest.approx(phi[j, n].item(), abs=0.0051)
            assert part == pytest.approx(share[j, n].item(), abs=0.0051)
        elif n // 4 == 1:
            assert cell["text"] == "always 0"
        else:
            assert (cell["fill"], cell["text"]) == ("none", "0")

    assert len(drawing["quadrants"]) == 4
    for active, name, weight, x, y in drawing["quadrants"]:
        # Where a product is named, it is the one that fires.
        middle = torch.tensor([x - CENTRE[0], CENTRE[1] - y]).double()
        (n,) = (DPFP(1)(middle) > 0).nonzero().flatten().tolist()
        assert name == names(1)[n]
        assert active.split() == [NAMES[j] for j in range(2) if n in fires[j]]
        assert (weight == "700") == bool(active)


#: A colour as the browser computes it, as the sign and share of an overlap.
PAINT = """(fill) => {
  const context = new OffscreenCanvas(1, 1).getContext("2d");
  context.fillStyle = fill;
  context.fillRect(0, 0, 1, 1);
  const [red, , blue, alpha] = context.getImageData(0, 0, 1, 1).data;
  return (blue > red + 20 ? 1 : -1) * alpha / 255 / 0.45;
}"""


#: Of each slice of the plane, its corners and its colour.
SLICES = f"""[state(), all("[data-part=plane] path").map((e) => [
  e.getAttribute("d").match(/-?[\\d.]+/g).map(Number), ({PAINT})(getComputedStyle(e).fill)
])]"""


@pytest.mark.parametrize("nu", [1, 3])
@pytest.mark.parametrize("coloured", ["before", "after"])
def test_plane_is_coloured_by_overlap_with_the_key(figure, coloured, nu):
    figure.choose(f"ν = {nu}")
    figure.choose(f"{coloured} DPFP")
    for key in (START[0], [1.5, -0.4], [-1.1, -1.9], [0, 1.2]):
        if key != START[0]:
            drag(figure, 0, key)
        shown, slices = figure.ask(SLICES)
        assert shown["keys"][0] == key
        assert len(slices) == 72
        seen = 0
        for corners, painted in slices:
            xs, ys = corners[0::2], corners[1::2]
            there = torch.tensor(
                [sum(xs) / 3 - CENTRE[0], CENTRE[1] - sum(ys) / 3]
            ).double()
            both = torch.stack([torch.tensor(key).double(), there])
            if coloured == "after":
                both = DPFP(nu)(both)
            unit = l2_normalize(both)
            overlap = (unit[0] @ unit[1]).item()
            assert painted == pytest.approx(overlap, abs=0.03)
            seen += abs(overlap) > 0.1
        # All round before; one quadrant after; none for a key without features.
        assert seen > 60 if coloured == "before" else seen == 18 * all(key)
    assert ("After DPFP, k overlaps with no key" in figure.words()) == (
        coloured == "after"
    )


def test_each_nu_and_back(figure):
    for nu in (3, 1, 2, 3, 2, 1):
        figure.choose(f"ν = {nu}")
        shown = compare(figure, nu, START)
        assert len(shown["features"][0]) == 4 * nu
        assert f"{4 * nu} features" in shown["words"]
        # Shift 2 is always 0, and says why.
        second, third = figure.ask(
            "[2, 3].map((n) => texts(`[data-shift='${n}'] text`).join())"
        )
        assert ("never: r(x) or r(−x) is 0" in second) == (nu > 1)
        assert ("shift 1 again" in third) == (nu > 2)
        assert ("fires, twice" in shown["words"]) == (nu > 2)


@pytest.mark.parametrize("nu", [1, 3])
def test_dragged_through_all_quadrants(figure, nu):
    figure.choose(f"ν = {nu}")
    keys = [list(key) for key in START]
    said = {figure.words()}
    for j, place in (
        *((0, [-1.3, 0.7]), (0, [-0.8, -1.1]), (0, [1.7, -0.3]), (0, [1.1, 1.9])),
        *((1, [0.9, 1.3]), (1, [0.2, -1.8])),
    ):
        keys[j] = place
        drag(figure, j, place)
        said.add(compare(figure, nu, keys)["words"])
    assert len(said) == 7


def test_other_quadrants_are_orthogonal(figure):
    shown = compare(figure, 1, START)
    assert shown["plainCosine"] > 0.7 and shown["cosine"] == 0
    assert "told apart" in shown["words"]
    drag(figure, 1, [1.5, 0.2])
    shown = compare(figure, 1, [START[0], [1.5, 0.2]])
    assert shown["cosine"] == pytest.approx(1, abs=1e-9) and shown["plainCosine"] < 0.7
    assert "the same product" in shown["words"]
    drag(figure, 0, [0, 0])
    shown = compare(figure, 1, [[0, 0], [1.5, 0.2]])
    assert shown["plainCosine"] == shown["cosine"] == 0
    assert "k = (0.0, 0.0) is 0" in shown["words"]


def test_arrow_keys_on_to_an_axis_and_beyond(figure):
    """All features 0 on the axis: cosine 0, by 0/0 = 0."""
    keys = [list(key) for key in START]
    handle(figure, 0).focus()
    for step in range(7):
        figure.tab.keyboard.press("ArrowLeft")
        keys[0] = [round(0.5 - 0.1 * step, 1), 1.2]
        shown = compare(figure, 1, keys)
        on_axis = keys[0][0] == 0
        assert (shown["fires"][0] == []) == on_axis
        for said in (
            "k = (0.0, 1.2) lies on an axis: no feature fires",
            "0/0 counts as 0",
        ):
            assert (said in shown["words"]) == on_axis
        if on_axis:
            assert shown["cosine"] == 0 and shown["normalised"][0] == [0] * 4
    assert shown["cosine"] == pytest.approx(1, abs=1e-9)
    handle(figure, 1).focus()
    for press, to in (
        ("ArrowDown", [-0.4, 1.3]),
        ("ArrowUp", [-0.4, 1.4]),
        ("ArrowRight", [-0.3, 1.4]),
    ):
        figure.tab.keyboard.press(press)
        keys[1] = to
        compare(figure, 1, keys)
    assert handle(figure, 1).get_attribute("aria-valuetext") == "x −0.3, y 1.4"


def test_keys_stay_in_the_plane_and_can_be_parted(figure):
    drag(figure, 0, [3.1, -2.6])
    compare(figure, 1, [[2, -2], START[1]])
    figure.tab.keyboard.press("ArrowRight")  # the handle has kept the focus
    compare(figure, 1, [[2, -2], START[1]])
    figure.tab.keyboard.press("ArrowUp")
    compare(figure, 1, [[2, -1.9], START[1]])
    # Two at one place.
    drag(figure, 0, START[1])
    compare(figure, 1, [START[1], START[1]])
    drag(figure, 1, [0.7, -0.5])
    compare(figure, 1, [START[1], [0.7, -0.5]])
    drag(figure, 1, START[1])
    # Beside the square, the circle is taken.
    box = handle(figure, 0).bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    edge, mouse = box["width"] / 2 - 3, figure.tab.mouse
    mouse.move(x - edge, y)
    mouse.down()
    mouse.move(x - edge - 100, y, steps=3)
    mouse.up()
    shown = figure.state()["keys"]
    assert shown[1] == START[1] and shown[0][0] < -1
