"""What holds for every figure: it is there without scripts, and current."""

import keep_figures as figures
import pytest
from test_pages import AXE, RULES

NAMES = figures.names()


def page_of(name: str) -> str:
    return figures.PAGES.get(name, f"figures/{name}.html")


def test_there_are_six():
    assert {"aft", "chunks", "dpfp", "feedback", "live", "memory"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_picture_without_scripts_is_how_the_figure_begins(look, address, name):
    """If not: make figures."""
    tab = look("notation.html")
    picture, words = figures.begin(tab, address, name)
    assert (figures.FIGURES / f"{name}.html").read_text(
        "utf-8"
    ).strip() == picture.strip()
    assert (figures.FIGURES / f"{name}.txt").read_text("utf-8").strip() == words.strip()
    assert len(picture) < 60_000


@pytest.mark.parametrize("name", NAMES)
def test_without_scripts(look, name):
    tab = look(page_of(name), java_script_enabled=False)
    figure = tab.locator(f"#figure-{name}")
    assert figure.locator(".fw-picture").is_visible()
    assert len(figure.locator(".fw-words").inner_text()) > 80
    # No control that does nothing.
    assert figure.locator("button, input").count() == 0


def started(look, name: str, *options, **more):
    tab = look(page_of(name), *options, **more)
    if name == "live":
        tab.get_by_role("button", name="Start the model").click()
        tab.get_by_label("Text to read").wait_for()
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
