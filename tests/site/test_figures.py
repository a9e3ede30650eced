"""What holds for every figure: it is there without scripts, and current."""

import re
from base64 import b64decode
from io import BytesIO

import keep_figures as figures
import numpy as np
import pytest
from built import asks
from figure import Figure, number, of_figure, page_of
from matplotlib.image import imread
from test_pages import AXE

NAMES = figures.names()
DESK, PHONE = (1280, 800), (390, 844)
#: One after the other for each figure, since the last few tabs stay open.
each_figure = pytest.mark.parametrize("name", NAMES, scope="module")


def test_there_are_ten():
    old = "aft capacity chunks dpfp feedback forgets live memory shakespeare strength"
    assert {*old.split()} <= set(NAMES)


@pytest.mark.parametrize(
    ("name", "first"), [("chunks", [("tick", 0)]), ("feedback", [("chosen", [2, 4])])]
)
def test_nothing_plays_where_that_is_asked_for(fresh, name, first):
    """What else moves by itself; the pictures are those of the stills."""
    figure = fresh(name, motion="reduce", timed=True)
    words = figure.words()
    figure.tab.clock.run_for(20_000)
    shown = figure.state()
    assert first == [(what, shown[what]) for what, _ in first]
    assert figure.words() == words
    assert figure.ask("document.getAnimations().length") == 0
    assert figure.css("button", has_text="Play").filter(visible=True).count() == 0


def parted(still: str) -> tuple[list[str], list[str], list]:
    """Its marks and texts, its numbers, and pixels of its images, from 0 to 255."""
    data = r"data:image/png;base64,([\w+/=]+)"
    images = [
        255 * imread(BytesIO(b64decode(coded))) for coded in re.findall(data, still)
    ]
    parts = re.split(r"([−-]?\d+(?:\.\d+)?)", re.sub(data, "image", still).strip())
    return parts[::2], parts[1::2], images


def near(one: str, other: str) -> bool:
    """The same number, or the next one of as many decimals: processors round `exp`
    differently, and what is shown may be on the edge between two."""
    decimals = max(len(x.partition(".")[2]) for x in (one, other))
    off = abs(number(one) - number(other))
    return off < 1.1 * 10**-decimals if decimals else one == other


@each_figure
def test_picture_without_scripts_is_how_the_figure_begins(fresh, name):
    """If not: make figures."""
    tab = fresh(name, motion="reduce").tab
    stills = {name: figures.first(tab, name), **figures.later_steps(tab, name)}
    texts = {path.stem for path in figures.FIGURES.glob(f"{name}*.txt")}
    assert texts == set(stills)
    for still, now in stills.items():
        for kind, made in zip(("html", "txt"), now, strict=True):
            kept = (figures.FIGURES / f"{still}.{kind}").read_text("utf-8")
            (marks, numbers, images), wanted = parted(made), parted(kept)
            assert marks == wanted[0]
            pairs = zip(numbers, wanted[1], strict=True)
            assert [pair for pair in pairs if not near(*pair)] == []
            assert len(images) == len(wanted[2])
            for one, other in zip(images, wanted[2], strict=True):
                # Machines round colours differently.
                np.testing.assert_allclose(one, other, rtol=0, atol=2)
        assert len(now[0]) < 60_000


def test_without_scripts(look):
    tab = look("notation.html", java_script_enabled=False)
    base = tab.url.removesuffix("notation.html")
    for name in NAMES:
        tab.goto(base + page_of(name))
        figure = tab.locator(f"#figure-{name}")
        pictures = figure.locator(".fw-picture:not(details *)").all()
        assert pictures and all(picture.is_visible() for picture in pictures), name
        assert len(figure.locator(".fw-words").inner_text()) > 80, name
        # No control that does nothing.
        controls = "button, input, [role=slider], [role=button]"
        assert figure.locator(controls).count() == 0, name


#: Figures that run a model, and the weights that they fetch at first.
MODELS = {
    "live": ["live/delta.safetensors", "live/sum.safetensors"],  # at once, too
    "shakespeare": ["shakespeare/delta.safetensors"],
    "strength": ["live/delta.safetensors"],  # at once: it is light
}


def test_weights_come_on_first_use(fresh):
    """Those of light models come at once."""
    figure = fresh("shakespeare", motion="reduce")
    assert figure.fetched() == []
    # Until then the picture that needs no script is there.
    assert figure.css(".fw-picture").first.is_visible()
    said = re.search(r"\((\d+) kB\)", figure.starter().inner_text())
    figure.start()
    assert sorted(figure.fetched()) == MODELS["shakespeare"]
    size = sum((figures.FIGURES / p).stat().st_size for p in MODELS["shakespeare"])
    assert int(said[1]) == pytest.approx(size / 1000, rel=0.02)


@pytest.mark.parametrize(
    ("name", "weights", "choice", "before"),
    [
        ("shakespeare", "shakespeare/sum.safetensors", "sum rule", "delta rule"),
        ("strength", "shakespeare/delta.safetensors", "Shakespeare", "people who move"),
    ],
)
def test_weights_of_another_choice(fresh, name, weights, choice, before):
    """They come when it is made. If they do not, that is said, and the choice is
    again what is shown; it can be made once more, and back with nothing fetched."""
    figure = started(fresh, name)
    first, shown = figure.fetched(), "[state().rule, state().name].join()"
    was = figure.ask(shown)
    figure.tab.context.route(f"**/{weights}", lambda r: r.fulfill(status=204))
    # Not check(): the choice may be back before it is looked at.
    figure.role("radio", name=choice).click()
    figure.until_it_says("did not come")
    assert figure.role("radio", name=before).is_checked()
    assert figure.ask(shown) == was
    figure.tab.context.unroute(f"**/{weights}")
    figure.role("radio", name=choice).check()
    figure.until(f"{shown} !== '{was}'")
    assert {*figure.fetched()} == {*first, weights}
    if name == "strength":
        figure.text.fill("To be")  # it stays, for when this is chosen again
    count = len(figure.fetched())
    figure.role("radio", name=before).check()
    figure.until(f"{shown} === '{was}'")
    figure.role("radio", name=choice).check()
    figure.until(f"{shown} !== '{was}'")
    assert len(figure.fetched()) == count
    if name == "strength":
        assert figure.text.input_value() == "To be"


@pytest.mark.parametrize("name", ["live", "shakespeare"])
def test_models_run_from_disk(look, site, name):
    tab = look(page_of(name), base=f"{site.as_uri()}/", motion="reduce")
    figure = Figure(tab, name)
    figure.start()
    assert len(figure.state()["answers" if name == "live" else "text"]) > 1


def started(fresh, name: str, *options, **more):
    figure = fresh(name, *options, **more)
    if name in MODELS:
        figure.start()
    if name == "chunks":
        # The slider stops it, whether it runs already or not.
        figure.slider("Tick").press("ArrowRight")
    return figure


#: By figure, the controls that readers use most.
MAIN = {
    "memory": {
        "slider": ["Key A", "Key B", "New key", "New value", "Write strength"],
        "button": ["Write", "Undo"],
        "radio": ["delta"],
    },
    "dpfp": {
        "slider": ["Key k, the circle", "Key k′, the square"],
        "radio": ["after DPFP", "ν = 3"],
    },
    "chunks": {"button": ["Next", "Play|Pause"], "slider": ["Tick"]},
    "aft": {"slider": ["Large key"]},
    "biases": {"slider": ["Chosen bias", "Bias"], "radio": ["conv"]},
    "feedback": {
        "button": [
            "Play|Pause",
            "Transformer, layer 3 at step 1",
            "Feedback transformer, layer 1 at step 6",
        ],
    },
    "capacity": {
        "slider": ["Pairs S", "Width of a key"],
        "radio": ["as orthogonal", "ν = 3"],
        "button": ["New draw"],
    },
    "forgets": {
        "button": ["Keys change", "Room for all", "New draw"],
        "textbox": ["Pairs"],
        "slider": ["Write strength", "Decay", "Width"],
    },
    "cache": {
        "slider": ["Context", "Attention layers", "Sequences"],
        "radio": ["Olmo Hybrid 7B", "Kimi Linear 48B"],
    },
    "ladder": {"slider": ["Token"], "radio": ["sum", "more steps"]},
    "strength": {"radio": ["people who move"], "textbox": ["Text to read"]},
    "puzzles": {"combobox": ["Puzzle"], "textbox": ["a=: key", "a\\?: query"]},
}
#: Drawings, and the pictures of words.
PICTURE = "svg:not(details svg), .fw-main"


def check_seen_together(figure):
    """Each control and what it changes: the whole drawing, in one window."""
    if figure.name == "dpfp":
        figure.choose("ν = 3")
    for role, labels in MAIN[figure.name].items():
        for label in labels:
            control = figure.role(role, name=re.compile(f"^{label}"))
            assert control.evaluate(asks.TOGETHER, PICTURE), label


def check_fills_its_card(figure):
    """With the controls beside the picture."""
    figure.tab.evaluate("scrollTo({ top: 0, behavior: 'instant' })")
    card = figure.root.bounding_box()
    picture = figure.css(f":is({PICTURE})").first.bounding_box()
    if figure.name == "feedback":  # two models, equally wide
        side = figure.css("svg").last.bounding_box()
        assert picture["width"] == side["width"]
    else:
        side = figure.css(".fw-side").bounding_box()
        assert picture["width"] > card["width"] / 2
    assert picture["width"] + side["width"] > 0.9 * card["width"]
    assert abs(side["y"] - picture["y"]) < 2
    # It begins before the fold, and so does its first control.
    control = figure.css(".fw-controls").first.bounding_box()
    assert control["y"] + control["height"] < 800


def check_accessible(figure):
    """In use, and in a window of this size."""
    for control in figure.css("input[type=range]").all():
        control.press("ArrowRight")
    figure.tab.evaluate(AXE.read_text("utf-8"))
    assert figure.tab.evaluate(of_figure(figure.name)) == []
    assert figure.wide() <= figure.tab.viewport_size["width"]
    if figure.name in ("aft", "memory"):
        assert figure.overlapping() == []


def check_by_keyboard(figure):
    """Every control is reached, and has a name."""
    tab = figure.tab
    count = figure.ask(asks.STOPS)
    assert count > 0
    tab.evaluate(asks.REACHED)
    for presses in range(150):
        tab.keyboard.press("Tab")
        if presses % 5 == 0 and len(seen := tab.evaluate("reached")) == count:
            break
    assert len(seen) == count
    assert all(label.strip() for label in seen.values())


def check_legible(figure):
    """In a window that is as narrow as a phone, and as high as the figure."""
    assert figure.tab.evaluate(asks.ILLEGIBLE, figure.name) == []


@each_figure
def test_on_a_desk(fresh, name):
    figure = started(fresh, name, scheme="dark")
    check_accessible(figure)
    check_by_keyboard(figure)
    figure.tab.set_viewport_size({"width": 1280, "height": 800})
    if name in MAIN:
        check_fills_its_card(figure)
        check_seen_together(figure)
    check_legible(fresh(name, (390, 4000), scheme="dark"))


@each_figure
def test_on_a_phone(fresh, name):
    """Letters are not smaller for what is seen together."""
    figure = started(fresh, name, PHONE, touch=True)
    if name in MAIN:
        check_seen_together(figure)
    check_accessible(figure)
    check_legible(fresh(name, (390, 4000), touch=True))


def test_gallery_shows_every_figure(look, site):
    """A picture, a line, and a link that the whole card is, with the name of its
    page. It is the first of the figures."""
    tab = look("index.html", width=1280)
    base = tab.url.removesuffix("index.html")
    tab.locator(".md-tabs__link", has_text="Play").click()
    tab.wait_for_url("**/figures/index.html")
    for size in (DESK, PHONE):
        tab.set_viewport_size({"width": size[0], "height": size[1]})
        pictures = {}
        stills = tab.get_by_role("listitem").filter(has=tab.locator(".fw-still"))
        for card in stills.all():
            words = card.locator("p").last.inner_text()
            assert 40 < len(words) < 200
            assert card.locator(".fw-picture").first.is_visible()
            still = card.locator(".fw-still")
            assert still.bounding_box()["height"] > 150
            assert still.evaluate(asks.CUT_IN_STILL) == []
            small = "(e) => 14 * e.querySelector('svg').getScreenCTM().a"
            assert still.evaluate(small) > 11, words
            to = card.get_by_role("link").evaluate("(e) => e.href").removeprefix(base)
            page = to.partition("#")[0]
            pictures[page] = still
            if page != "index.html":
                html = (site / page).read_text("utf-8")
                name = card.get_by_role("link").inner_text()
                assert re.search(rf"<h1[^>]*>{re.escape(name)}<", html), page
        assert {page_of(name) for name in NAMES} == set(pictures)
        assert next(iter(pictures)) == "index.html"
    # Nothing in it looks like a control, and its picture leads to the figure.
    controls = ".fw-gallery :is([tabindex], [role=slider], button)"
    assert tab.locator(controls).count() == 0
    picture = pictures["figures/memory.html"]
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    tab.mouse.click(box["x"] + 40, box["y"] + 40)
    tab.wait_for_url("**/figures/memory.html")
