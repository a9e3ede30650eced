"""Test properties that every figure must have."""

import re

import keep_figures as figures
import pytest
from built import AXE, WIDTH, asks
from figure import Figure, near, page_of, parted

NAMES = figures.names()
DESK, PHONE = (1280, 800), (390, 844)
each_figure = pytest.mark.parametrize("name", NAMES)
#: First letters of controls that may leave a figure's sentence unchanged.
#: A figure's sentence does not describe the effects of its silent controls.
SILENT = {
    "capacity": ("New draw",),
    "forgets": ("Decay of gated delta", "Keys change"),  # Initially selected options.
    "live": ("Tell both", "Or type"),
    "memory": ("Key", "New key"),
    "puzzles": ("0 Keep", "a", "b", "copy", "Hint"),
    # The first control makes the text invalid, so later controls change nothing.
    "write": (
        *("Pairs", "Width", "Strength", "Length", "β", "Token", "Edit", "Undo"),
        *("Replace", "Forget", "Track", "what each", "W"),
    ),
}
#: Figures that run a model, and the weights that they fetch first.
MODELS = {
    "live": ["live/delta.safetensors", "live/sum.safetensors"],
    "shakespeare": ["shakespeare/delta.safetensors"],
}


@each_figure
def test_its_picture_without_scripts_is_how_it_begins(fresh, name):
    """A figure starts as its static picture; with reduced motion, nothing moves."""
    figure = fresh(name, motion="reduce")
    words, stills = figure.words(), figures.stills(figure.tab, name)
    assert {path.stem for path in figures.FIGURES.glob(f"{name}*.html")} == set(stills)
    for still, made in stills.items():
        kept = (figures.FIGURES / f"{still}.html").read_text("utf-8")
        kept = re.sub(r' style="--height: \d+px"', "", kept, count=1)
        (marks, numbers), wanted = parted(made), parted(kept)
        assert marks == wanted[0]
        pairs = zip(numbers, wanted[1], strict=True)
        assert [pair for pair in pairs if not near(*pair)] == []
        assert len(made) < 60_000
    figure = fresh(name, motion="reduce", timed=True)
    figure.tab.clock.run_for(20_000)
    assert figure.words() == words
    assert figure.ask("document.getAnimations().length") == 0
    assert figure.css("button", has_text="Play").filter(visible=True).count() == 0


def test_without_scripts(look):
    tab = look("notation.html", java_script_enabled=False)
    base = tab.url.removesuffix("notation.html")
    for name in NAMES:
        tab.goto(base + page_of(name))
        figure = tab.locator(f"#figure-{name}")
        pictures = figure.locator(".fw-picture:not(details *)").all()
        assert pictures and all(picture.is_visible() for picture in pictures), name
        assert len(figure.locator(".fw-words").inner_text()) > 80, name
        # Controls do nothing without scripts, so no control is visible.
        controls = "button, input, [role=slider], [role=button]"
        assert figure.locator(controls).count() == 0, name


@each_figure
@pytest.mark.parametrize("size", [DESK, PHONE])
def test_for_all_readers(fresh, name, size):
    """A figure is accessible and legible, and fits desktop and phone screens."""
    phone = size == PHONE
    scheme = "light" if phone else "dark"
    figure = fresh(name, size, scheme=scheme, has_touch=phone)
    if name in MODELS:
        figure.start()
    for control in figure.css("input[type=range]").all():
        control.press("ArrowRight")
    tab = figure.tab
    tab.evaluate(AXE.read_text("utf-8"))
    assert tab.evaluate(asks.RULES, {"of": f"#figure-{name}"}) == []
    assert tab.evaluate(WIDTH) <= size[0]
    assert figure.ask(asks.OVERLAPPING) == []
    if phone:
        fingers(figure)
    else:
        by_keyboard(figure)
    if name not in ("live", "shakespeare", "essay"):  # These figures exceed a screen.
        control = figure.css(".fw-controls, .fw-handle").first
        assert control.evaluate(asks.TOGETHER, "svg:not(details svg), .fw-main")
    # Make the window as high as the figure.
    tab.set_viewport_size({"width": 390, "height": 4000})
    assert tab.evaluate(asks.ILLEGIBLE, name) == []


@each_figure
def test_every_control_changes_the_sentence(fresh, name):
    """Every control that is not in `SILENT` changes the sentence below its figure."""
    figure = fresh(name, motion="reduce")
    if name in MODELS:
        figure.start()
    used = figure.ask(asks.USED)
    assert len(used) > 1
    silent = [control for control, said in used if not said]
    assert [c for c in silent if not c.startswith(SILENT.get(name, ()))] == []
    assert not re.search("NaN|undefined|Infinity", figure.words()) or name == "aft"


def fingers(figure):
    """Assert that touch targets measure at least 44 px, or 40 px in tables."""
    kinds = ".fw-handle, .fw-tap, .fw-button, .fw-choice label, [type=range]"
    small = f"all('{kinds}').filter((e) => seen(e) && !e.closest('[hidden]'))"
    small += ".map((e) => [e.textContent, e.getBoundingClientRect(), e.closest('th') ? 40 : 43.5])"
    small += ".filter(([, b, least]) => Math.min(b.width, b.height) < least)"
    assert figure.ask(small) == []


def by_keyboard(figure):
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


# --- Trained models ---


@pytest.mark.parametrize("name", MODELS)
def test_weights_come_on_first_use(fresh, look, site, name):
    """A figure fetches its weights on first use; the home page fetches them at once."""
    figure = fresh(name, motion="reduce")
    assert name == "live" or figure.fetched() == []
    # Before the model starts, the static picture is visible.
    assert figure.css(".fw-picture").first.is_visible()
    figure.start()
    assert sorted(figure.fetched()) == MODELS[name]
    # The model also starts from a file on disk.
    figure = Figure(look(page_of(name), base=f"{site.as_uri()}/"), name)
    figure.start()
    assert len(figure.state()["answers" if name == "live" else "text"]) > 1


def test_weights_of_another_rule(fresh):
    """If weights cannot be fetched, the page says so and does not change the rule."""
    figure = fresh("shakespeare")
    figure.start()
    sum_rule, delta_rule = (figure.role("radio", name=n) for n in ("sum", "delta"))
    weights = "**/shakespeare/sum.safetensors"
    figure.tab.context.route(weights, lambda r: r.fulfill(status=204))
    # Do not call check(): the page may undo the choice before playwright reads it.
    sum_rule.click()
    figure.until_it_says("did not come")
    assert delta_rule.is_checked() and figure.state()["rule"] == "delta"
    figure.tab.context.unroute(weights)
    sum_rule.check()
    figure.until("state().rule === 'sum'")


def test_gallery_shows_every_figure(look):
    """The gallery has a card with a picture, a line and a link for each figure."""
    tab = look("figures/index.html", width=1280)
    base = tab.url.removesuffix("figures/index.html")
    stills = tab.get_by_role("listitem").filter(has=tab.locator(".fw-still"))
    for size in (DESK, PHONE):
        tab.set_viewport_size({"width": size[0], "height": size[1]})
        pages = []
        for card in stills.all():
            assert 40 < len(card.locator("p").last.inner_text()) < 200
            assert card.locator(".fw-still").bounding_box()["height"] > 150
            to = card.get_by_role("link").evaluate("(e) => e.href").removeprefix(base)
            pages.append(to.partition("#")[0])
        assert {page_of(name) for name in NAMES} == set(pages)
    tab.keyboard.press("Tab")  # Pictures must not take the keyboard focus.
    assert tab.locator(".fw-still :focus").count() == 0
    memory = stills.nth(pages.index("figures/memory.html"))
    memory.scroll_into_view_if_needed()
    box = memory.locator(".fw-still").bounding_box()
    tab.mouse.click(box["x"] + 40, box["y"] + 40)
    tab.wait_for_url("**/figures/memory.html")
