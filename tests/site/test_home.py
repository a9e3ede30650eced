"""Test the home page and its figure, which compares two models."""

import pytest
from figure import Figure


@pytest.fixture
def home(fresh):
    """Open the home page with reduced motion, and wait for its models' answers."""
    figure = fresh("live", motion="reduce")
    figure.until("state().answers !== null")
    return figure


def tell(figure, text: str):
    field = figure.tab.get_by_label("Or type:")
    field.fill(text)
    field.press("Enter")


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
def test_first_screen_has_promise_models_and_three_ways_on(look, size):
    tab = look("index.html", width=size[0], height=size[1], motion="reduce")
    home = Figure(tab, "live")
    home.until("state().answers !== null")
    ways = tab.locator("article a.fw-way")
    assert ways.all_inner_texts() == ["Start the course", "Play", "Read the code"]
    if size[0] == 390:
        assert min(way.bounding_box()["height"] for way in ways.all()) >= 44
    else:
        assert home.css("canvas").first.bounding_box()["width"] == 225
    shown = [
        *[tab.locator(f"article {part}") for part in ("h1", ".fw-lead")],
        *ways.all(),
        # The lines below are the moves, matrices, answers and the button for a move.
        *[home.css(part).first for part in (".fw-pair p", ".fw-memories", "table")],
        home.starter(),
    ]
    top = tab.locator("header.md-header").bounding_box()["height"]
    for each in shown:
        box = each.bounding_box()
        assert box["y"] >= top - 1 and box["y"] + box["height"] <= size[1], each
        assert box["x"] >= 0 and box["x"] + box["width"] <= size[0], each
    # Each equation is above its matrix, and the term that differs is marked.
    assert home.texts(".fw-memories mark") == ["− W k"]
    equations = home.css(".fw-memories i").all()
    for equation, canvas in zip(equations, home.css("canvas").all(), strict=True):
        box, below = equation.bounding_box(), canvas.bounding_box()
        assert box["y"] + box["height"] <= below["y"] + 1
        assert abs(box["x"] - below["x"]) < 1
    # The button and the cells that it changes are visible together.
    home.starter().click()
    home.until("state().facts.length === 9")
    assert tab.evaluate("window.scrollY") == 0


def test_one_press_shows_the_difference(home):
    """Each press adds a move that only the delta rule recalls correctly."""
    assert home.texts("thead strong") == ["2 of 5", "5 of 5"]
    for count in (9, 10, 11):
        home.starter().click()
        home.until(f"state().facts.length === {count}")
        answers = home.state()["answers"]
        (name, _) = home.state()["facts"][-1]
        added = next(a for a in answers["sum"] if a["name"] == name)
        assert not added["right"] and added["truth"] < 0.6
        assert all(a["right"] for a in answers["delta"])
    pairs = zip(answers["sum"], answers["delta"], strict=True)
    right = [a["right"] for pair in pairs for a in pair]
    assert home.texts("tbody b") == ["✓" if each else "✗" for each in right]
    assert len(home.fetched()) == 2  # Each file is fetched once.


def test_a_name_asks(home):
    """A press on a name shows the value that it retrieves; a second press hides it."""
    pictures = "all('canvas').map((e) => e.toDataURL()).join() + words()"
    before = home.ask(pictures)
    button = home.role("button", name="Ask where Dan is")
    for asked in ("Dan", None):
        button.press("Enter")
        assert home.state()["asked"] == asked
        assert button.get_attribute("aria-pressed") == str(bool(asked)).lower()
        assert button.evaluate("(e) => e === document.activeElement")
        assert (home.ask(pictures) == before) == (asked is None)


def test_moves_play_at_once(fresh):
    """The moves play at once, and can be replayed until the reader adds a move."""
    home = fresh("live", timed=True)
    home.until("state().facts.length > 8")
    home.tab.clock.run_for(20_000)
    home.until("state().facts.length === 10 && !state().playing")
    assert home.texts("thead strong") == ["0 of 5", "5 of 5"]
    # All five moves are replayed on request, until the reader adds another move.
    sign = home.css("small", has_text="Replaying the five moves")
    assert not sign.is_visible()
    home.press("Replay the moves")
    home.until("state().facts.length === 5")
    assert sign.is_visible()
    home.tab.clock.run_for(2000)
    home.until("state().facts.length === 6")
    home.starter().click()
    home.tab.clock.run_for(20_000)
    home.until("state().facts.length === 7")
    assert not sign.is_visible()


def test_changes_can_be_typed(home):
    tell(home, "but now eve  lives in BERN. Dan moved to Rome")
    home.until("state().facts.length === 10")
    assert home.state()["facts"][-2:] == [["Eve", "Bern"], ["Dan", "Rome"]]
    assert home.tab.get_by_label("Or type:").input_value() == ""
    assert {"Eve is in Kyoto.", "Dan is in Delhi."} <= {*home.texts("s")}
    assert "Eve is in Bern." in home.texts("p strong")


def test_other_words_lead_to_a_model_that_takes_any_text(home):
    way_on = home.role("link", name="has read Shakespeare")
    assert not way_on.is_visible()
    for text in ("John lives in Paris.", "Eve is in Berlin.", "Hello!"):
        tell(home, text)
        home.until_it_says("Places: ")
        assert way_on.get_attribute("href") == "figures/shakespeare.html"
        assert way_on.is_visible() and len(home.state()["facts"]) == 8
        assert home.tab.get_by_label("Or type:").input_value() == text
        home.press("Start again")
        home.until_it_says("Ada, Ben and Cleo have moved")
        assert not way_on.is_visible()


def test_can_be_emptied_and_filled(home):
    home.press("Empty both memories")
    home.until_it_says("memories are empty")
    assert home.ask("document.activeElement.type") == "text"
    for count in range(1, 25):
        home.starter().press("Enter")
        home.until(f"state().facts.length === {count}")
    # The keyboard focus is not left on a disabled button.
    assert home.starter().is_disabled() and home.focused() == "Empty both memories"
    home.press("Empty both memories")
    tell(home, "Ada is in Rome. Ben is in Oslo.")
    home.until_it_says("Nobody has moved yet")
    assert home.texts("thead strong") == ["2 of 2", "2 of 2"]


def test_weights_that_do_not_come_are_said_to(look):
    """If weights cannot be fetched, the page says so, and the next press retries."""
    tab = look("404.html")
    home = Figure(tab, "live")
    tab.route("**/sum.safetensors", lambda route: route.fulfill(status=204))
    tab.goto(tab.url.replace("404.html", "index.html"), wait_until="load")
    home.until_it_says("could not be fetched")
    assert len(home.state()["facts"]) == 8
    tab.unroute("**/sum.safetensors")
    home.starter().click()
    home.until("state().facts.length === 9")
