"""Test figures with touch events, sent through the DevTools protocol of Chromium."""

from itertools import pairwise

import pytest
from built import until

#: Handles: a figure, and the part of the figure's state that the handle changes.
HANDLES = {
    "Key A": ("memory", "pairs[0].degrees"),
    "New value": ("memory", "next.value"),
    "Key k, the circle": ("dpfp", "keys[0]"),
}
MOVES = 6


def slide(tab, *points: tuple) -> None:
    """Touch the first point, move the finger through all other points, and lift it."""
    # The browser decides where touches scroll only after it has drawn the page.
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
    """Swipe up from an element, and wait until the page scrolls."""
    in_the_middle(tab, element)
    top = tab.evaluate("scrollY")
    x, y = middle(element)
    slide(tab, (x, y), (x, y - 200))
    until(tab, "(top) => scrollY > top", top)


def middle(element) -> tuple[float, float]:
    box = element.bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def in_the_middle(tab, element) -> None:
    """Scroll an element to a position where the page can scroll both ways."""
    top = "e.getBoundingClientRect().top - 250"
    element.evaluate(f"(e) => scrollBy({{ top: {top}, behavior: 'instant' }})")
    assert tab.evaluate("scrollY > 50")


@pytest.fixture
def phone(fresh):
    return lambda name: fresh(name, (390, 900), has_touch=True, is_mobile=True)


@pytest.mark.parametrize("name", HANDLES)
def test_handle_follows_a_finger(phone, name):
    """A handle follows a finger in any direction; beside a handle, the page scrolls."""
    of, moved = HANDLES[name]
    figure = phone(of)
    tab, handle = figure.tab, figure.role("slider", name=name, exact=True)
    in_the_middle(tab, handle)
    top, before = tab.evaluate("scrollY"), figure.ask(f"state().{moved}")
    x, y = middle(handle)
    end = x - 30, y - 20
    # Touch beside the centre, on the side away from B if the handle is A.
    side = 1 if name == "Key A" else -1
    slide(tab, (x + 12 * side, y + 15 * side), (x, y + 70), (x + 5, y - 60), end)
    assert tab.evaluate("scrollY") == top
    assert figure.ask(f"state().{moved}") != before
    if "degrees" not in moved:  # Keys with an angle stay on a circle.
        # The handle is where the finger left it, within a tenth of the plane.
        assert middle(handle) == pytest.approx(end, abs=4)
    swipe(tab, figure.css(".fw-words"))


def test_the_nearest_handle_is_taken(phone):
    """If two keys are closer together than a finger is wide, the nearer key moves."""
    figure = phone("memory")
    degrees = "state().pairs.map((pair) => pair.degrees)"
    keys = [figure.role("slider", name=f"Key {name}") for name in "AB"]
    in_the_middle(figure.tab, keys[0])
    places = [middle(key) for key in keys]
    assert max(abs(a - b) for a, b in zip(*places, strict=True)) < 44
    for j, (x, y) in enumerate(places):
        before = figure.ask(degrees)
        slide(figure.tab, (x, y), (x - 20 + 60 * j, y + 60 - 100 * j))
        now = figure.ask(degrees)
        assert now[1 - j] == before[1 - j] and now[j] != before[j]


def test_a_tap_chooses_a_state_and_a_swipe_scrolls(phone):
    figure = phone("feedback")
    cell = figure.css("[data-state='1,2']").last
    in_the_middle(figure.tab, cell)
    cell.tap()
    assert figure.state()["chosen"] == [1, 2]
    swipe(figure.tab, cell)
    assert figure.state()["chosen"] == [1, 2]
