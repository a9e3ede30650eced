"""What holds for every figure: it is there without scripts, and current."""

import re
from base64 import b64decode
from io import BytesIO

import keep_figures as figures
import numpy as np
import pytest
from matplotlib.image import imread
from test_pages import AXE, RULES

NAMES = figures.names()


def page_of(name: str) -> str:
    return figures.PAGES.get(name, f"figures/{name}.html")


def test_there_are_ten():
    assert {
        *("aft", "capacity", "chunks", "dpfp", "feedback"),
        *("forgets", "live", "memory", "shakespeare", "strength"),
    } <= set(NAMES)


def parted(still: str) -> tuple[str, list]:
    """Its text, and the pixels of its images, from 0 to 255."""
    data = r"data:image/png;base64,([\w+/=]+)"
    images = [
        255 * imread(BytesIO(b64decode(found))) for found in re.findall(data, still)
    ]
    return re.sub(data, "image", still).strip(), images


@pytest.mark.parametrize("name", NAMES)
def test_picture_without_scripts_is_how_the_figure_begins(look, address, name):
    """If not: make figures."""
    tab = look("notation.html", reduced_motion="reduce")
    picture, words = figures.begin(tab, address, name)
    kept = (figures.FIGURES / f"{name}.html").read_text("utf-8")
    (kept_text, kept_images), (text, images) = parted(kept), parted(picture)
    assert kept_text == text
    assert len(kept_images) == len(images)
    for before, now in zip(kept_images, images, strict=True):
        # Machines round colours differently.
        np.testing.assert_allclose(now, before, rtol=0, atol=2)
    assert (figures.FIGURES / f"{name}.txt").read_text("utf-8").strip() == words.strip()
    assert len(picture) < 60_000


@pytest.mark.parametrize("name", NAMES)
def test_without_scripts(look, name):
    tab = look(page_of(name), java_script_enabled=False)
    figure = tab.locator(f"#figure-{name}")
    pictures = figure.locator(".fw-picture").all()
    assert pictures and all(picture.is_visible() for picture in pictures)
    assert len(figure.locator(".fw-words").inner_text()) > 80
    # No control that does nothing.
    assert figure.locator("button, input").count() == 0


def started(look, name: str, *options, **more):
    tab = look(page_of(name), *options, **more)
    if name == "live":
        tab.locator("#figure-live button").first.click()
        tab.wait_for_function(
            "document.querySelector('#figure-live').figure.state().answers !== null"
        )
    if name in ("shakespeare", "strength"):
        tab.get_by_role("button", name="Start the model").click()
        tab.get_by_label("Text to read").wait_for()
    if name == "chunks":
        # The slider stops it, whether it runs already or not.
        tab.get_by_role("slider", name="Tick").press("ArrowRight")
    return tab


@pytest.mark.parametrize("name", NAMES)
def test_every_control_is_reached_by_keyboard_and_has_a_name(look, name):
    tab = started(look, name)
    count = tab.evaluate(
        """(name) => {
          const all = [...document.querySelectorAll(`#figure-${name} :is(button, input, textarea, [role=slider])`)];
          // Of radio buttons, and of a grid, one is a stop; arrows lead on.
          const stops = all.filter((e) => !e.disabled && e.tabIndex >= 0 && e.getBoundingClientRect().width > 0
            && (e.type !== "radio" || e.checked));
          all.forEach((e, i) => { e.dataset.number = i; });
          return stops.length;
        }""",
        name,
    )
    assert count > 0
    tab.evaluate("document.querySelector('article h1').tabIndex = -1")
    tab.evaluate("document.querySelector('article h1').focus()")
    seen = {}
    for _ in range(150):
        if len(seen) == count:
            break
        tab.keyboard.press("Tab")
        number, label = tab.evaluate(
            """() => {
              const e = document.activeElement;
              return [e.dataset.number ?? null,
                e.ariaLabel || e.labels?.[0]?.textContent || e.textContent];
            }"""
        )
        if number is not None:
            seen[number] = label
    assert len(seen) == count
    assert all(label.strip() for label in seen.values())


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1440)])
@pytest.mark.parametrize("name", NAMES)
def test_figure_in_use_is_accessible(look, name, scheme, width):
    tab = started(look, name, scheme, width)
    for control in tab.locator(f"#figure-{name} input[type=range]").all():
        control.press("ArrowRight")
    tab.evaluate(AXE.read_text("utf-8"))
    assert tab.evaluate(RULES) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


#: In a still, the drawings that do not fit, and the texts that are cut in two.
CUT = """(still) => {
  const outside = (a, b) => a.left < b.left - 1 || a.right > b.right + 1
    || a.top < b.top - 1 || a.bottom > b.bottom + 1;
  const box = (e) => e.getBoundingClientRect();
  const found = [];
  for (const svg of still.querySelectorAll(":scope > svg")) {
    if (outside(box(svg), box(still))) found.push(svg.ariaLabel ?? "a drawing");
    for (const text of svg.querySelectorAll("text")) {
      const seen = box(text).width && box(text).top < box(svg).bottom;
      if (seen && outside(box(text), box(svg))) found.push(text.textContent);
    }
  }
  return found;
}"""


@pytest.mark.parametrize("width", [390, 1280])
def test_gallery_shows_every_figure(look, width):
    """A picture, a line, and a link that the whole card is."""
    tab = look("figures/index.html", width=width)
    cards = tab.get_by_role("listitem").filter(has=tab.locator(".fw-still"))
    base = tab.url.removesuffix("figures/index.html")
    found = {}
    for card in cards.all():
        link = card.get_by_role("link")
        words = card.locator("p").last.inner_text()
        assert 40 < len(words) < 200
        assert card.locator(".fw-picture").first.is_visible()
        picture = card.locator(".fw-still").bounding_box()
        assert picture["height"] > 150
        assert card.locator(".fw-still").evaluate(CUT) == []
        to = link.evaluate("(e) => e.href").removeprefix(base)
        found[to.partition("#")[0]] = card
    assert list(found) == ["index.html", *[p for p in found if p != "index.html"]]
    assert {page_of(name) for name in NAMES} == set(found)
    # Nothing in it looks like a control, and its picture leads to the figure.
    assert (
        tab.locator(".fw-gallery :is([tabindex], [role=slider], button)").count() == 0
    )
    picture = found["figures/memory.html"].locator(".fw-still")
    picture.scroll_into_view_if_needed()
    box = picture.bounding_box()
    tab.mouse.click(box["x"] + 40, box["y"] + 40)
    tab.wait_for_url("**/figures/memory.html")


def test_gallery_is_the_first_of_the_figures(look):
    tab = look("index.html")
    tab.locator(".md-tabs__link", has_text="Figures").click()
    tab.wait_for_url("**/figures/index.html")


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
    "strength": {"radio": ["people who move"], "textbox": ["Text to read"]},
}
#: Drawings, and the pictures of words.
PICTURE = "svg, .fw-main"
#: The part of the window below the header, and of the document, of elements.
SPAN = """(all) => {
  const boxes = all.map((e) => e.getBoundingClientRect());
  const header = document.querySelector("header.md-header").getBoundingClientRect();
  return {
    window: [header.bottom, innerHeight],
    needed: [Math.min(...boxes.map((b) => b.top)), Math.max(...boxes.map((b) => b.bottom))],
  };
}"""


@pytest.mark.parametrize("size", [(1280, 800), (390, 844)])
@pytest.mark.parametrize("name", MAIN)
def test_a_control_and_what_it_changes_are_seen_together(look, name, size):
    """On a desk and on a phone: the whole drawing, in one window, and letters
    that are not smaller for it."""
    tab = started(look, name, width=size[0], has_touch=size[0] < 500)
    tab.set_viewport_size({"width": size[0], "height": size[1]})
    figure = tab.locator(f"#figure-{name}")
    if name == "dpfp":
        figure.get_by_role("radio", name="ν = 3").check()
    labels = [(role, label) for role, all in MAIN[name].items() for label in all]
    for role, label in labels:
        control = figure.get_by_role(role, name=re.compile(f"^{label}"))
        drawings = [one.element_handle() for one in figure.locator(PICTURE).all()]
        together = [control.element_handle(), *drawings]
        top = tab.evaluate(SPAN, together)
        # As someone who looks at the figure scrolls.
        by = top["needed"][0] - top["window"][0] - 2
        if top["needed"][1] > size[1] or by < 0:
            tab.evaluate("(top) => scrollBy({ top, behavior: 'instant' })", by)
        seen = tab.evaluate(SPAN, together)
        assert seen["needed"][0] >= seen["window"][0], label
        assert seen["needed"][1] <= seen["window"][1], label


@pytest.mark.parametrize("name", MAIN)
def test_the_picture_fills_its_card(look, name):
    """With the controls beside it."""
    tab = started(look, name, width=1280)
    tab.set_viewport_size({"width": 1280, "height": 800})
    card = tab.locator(f"#figure-{name}").bounding_box()
    picture = tab.locator(f"#figure-{name} :is({PICTURE})").first.bounding_box()
    if name == "feedback":  # two models, equally wide
        side = tab.locator(f"#figure-{name} svg").last.bounding_box()
        assert picture["width"] == side["width"]
    else:
        side = tab.locator(f"#figure-{name} .fw-side").bounding_box()
        assert picture["width"] > card["width"] / 2
    assert picture["width"] + side["width"] > 0.9 * card["width"]
    assert abs(side["y"] - picture["y"]) < 2
    # It begins before the fold, and so does its first control.
    control = tab.locator(f"#figure-{name} .fw-controls").first.bounding_box()
    assert control["y"] + control["height"] < 800


#: Letters below 10 px, or with less than 4.5 : 1 against what lies below.
ILLEGIBLE = """(name) => {
  const canvas = new OffscreenCanvas(1, 1);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const parse = (colour, opacity = 1) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour === "none" ? "transparent" : colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    return [r, g, b, (a / 255) * opacity];
  };
  const over = ([r, g, b, a], below) =>
    [r, g, b].map((c, i) => c * a + below[i] * (1 - a));
  const light = (rgb) => rgb
    .map((c) => ((c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const paint = (e) => {
    const style = getComputedStyle(e);
    if (!(e instanceof SVGGeometryElement)) return parse(style.backgroundColor);
    return parse(style.fill, style.fillOpacity * style.opacity);
  };
  const found = [];
  for (const e of document.querySelectorAll(`#figure-${name} svg text`)) {
    if (!e.textContent.trim() || !e.checkVisibility()) continue;
    const size = parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a;
    if (size < 10) found.push([e.textContent, `${size} px`]);
    const box = e.getBoundingClientRect();
    const stack = document
      .elementsFromPoint(box.x + box.width / 2, box.y + box.height / 2)
      .filter((below) => !(below instanceof SVGTextContentElement));
    const below = stack.reduceRight((colour, b) => over(paint(b), colour), [255, 255, 255]);
    const style = getComputedStyle(e);
    const text = over(parse(style.fill, style.opacity * style.fillOpacity), below);
    const [low, high] = [light(text), light(below)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) found.push([e.textContent, ratio.toFixed(2)]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", NAMES)
def test_texts_are_legible_on_a_phone(look, name, scheme):
    tab = look(page_of(name), scheme, 390, has_touch=True)
    tab.set_viewport_size({"width": 390, "height": 4000})
    assert tab.evaluate(ILLEGIBLE, name) == []
