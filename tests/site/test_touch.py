"""Figures under a finger: real touch events, through the browser's protocol."""

from itertools import pairwise

import pytest
from built import until

#: One of each kind, with its figure and what of the state it moves.
HANDLES = {
    "Key A": ("memory", "pairs[0].degrees"),
    "New value": ("memory", "next.value"),
    "Key k, the circle": ("dpfp", "keys[0]"),
}
MOVES = 6
PHONE = {"width": 390, "has_touch": True, "is_mobile": True}


def state(tab, figure: str, path: str):
    return tab.evaluate(
        f"document.querySelector('#figure-{figure}').figure.state().{path}"
    )


def slide(tab, *points: tuple) -> None:
    """Put a finger down at the first point, move it through all others, and lift it."""
    # The browser knows where a finger scrolls only once it has drawn the page.
    tab.screenshot(clip={"x": 0, "y": 0, "width": 1, "height": 1})
    finger = tab.context.new_cdp_session(tab)

    def send(kind: str, *touches: tuple) -> None:
        at = [{"x": x, "y": y} for x, y in touches]
        finger.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": at})

    send("touchStart", points[0])
    for (x, y), (to_x, to_y) in pairwise(points):
        for n in range(1, MOVES + 1):
            send("touchMove", (x + n / MOVES * (to_x - x), y + n / MOVES * (to_y - y)))
    send("touchEnd")


def swipe(tab, element) -> None:
    """Up from an element: the page scrolls."""
    top = tab.evaluate("scrollY")
    x, y = middle(element.bounding_box())
    slide(tab, (x, y), (x, y - 200))
    until(tab, "(top) => scrollY > top", top)


def middle(box: dict) -> tuple[float, float]:
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def phone(look, figure: str, **more):
    tab = look(f"figures/{figure}.html", **PHONE, **more)
    tab.evaluate(
        """() => {
          globalThis.cancelled = 0;
          addEventListener("pointercancel", () => { cancelled += 1; }, true);
        }"""
    )
    return tab


def in_the_middle(tab, element) -> None:
    """There, the page could scroll both ways."""
    element.evaluate(
        """(e) => scrollBy({
          top: e.getBoundingClientRect().top - 250, behavior: "instant" })"""
    )
    assert tab.evaluate("scrollY > 50")


@pytest.mark.parametrize("name", HANDLES)
def test_handle_follows_a_finger(look, name):
    """Down and up, where the page would scroll, and across; beside it, it scrolls."""
    figure, moved = HANDLES[name]
    tab = phone(look, figure)
    handle = tab.get_by_role("slider", name=name, exact=True)
    in_the_middle(tab, handle)
    top = tab.evaluate("scrollY")
    before = state(tab, figure, moved)
    x, y = middle(handle.bounding_box())
    end = x - 30, y - 20
    # A finger rarely meets the middle. Next to A is B.
    side = 1 if name == "Key A" else -1
    slide(tab, (x + 12 * side, y + 15 * side), (x, y + 70), (x + 5, y - 60), end)
    assert tab.evaluate("[cancelled, scrollY]") == [0, top]
    assert state(tab, figure, moved) != before
    if "degrees" not in moved:  # those stay on their circle
        # It is where the finger has left it, within a tenth of the plane.
        assert middle(handle.bounding_box()) == pytest.approx(end, abs=4)
    words = tab.locator(f"#figure-{figure} .fw-words")
    in_the_middle(tab, words)
    swipe(tab, words)


def test_the_nearest_handle_is_taken(look):
    """Two keys closer together than a finger is wide."""
    tab = phone(look, "memory")
    keys = [tab.get_by_role("slider", name=f"Key {name}") for name in "AB"]
    in_the_middle(tab, keys[0])
    for key in keys:
        key.focus()
    places = [middle(key.bounding_box()) for key in keys]
    assert max(abs(a - b) for a, b in zip(*places, strict=True)) < 44
    for j, (x, y) in enumerate(places):
        before = state(tab, "memory", f"pairs[{1 - j}].degrees")
        mine = state(tab, "memory", f"pairs[{j}].degrees")
        slide(tab, (x, y), (x - 20 + 60 * j, y + 60 - 100 * j))
        assert state(tab, "memory", f"pairs[{1 - j}].degrees") == before
        assert state(tab, "memory", f"pairs[{j}].degrees") != mine


def test_a_tap_chooses_a_state_and_a_swipe_scrolls(look):
    tab = phone(look, "feedback")
    cell = tab.locator("#figure-feedback [data-state='1,2']").last
    in_the_middle(tab, cell)
    cell.tap()
    assert state(tab, "feedback", "chosen") == [1, 2]
    swipe(tab, cell)
    assert state(tab, "feedback", "chosen") == [1, 2]
