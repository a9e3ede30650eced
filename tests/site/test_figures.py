"""What holds for every figure: it is there without scripts, and current."""

import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "docs" / "tools"))

import figures

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


@pytest.mark.parametrize("name", NAMES)
def test_every_control_has_a_name_and_is_reached_by_keyboard(look, name):
    tab = look(page_of(name))
    names = tab.evaluate(
        """(name) => [...document.querySelectorAll(`#figure-${name} :is(button, input, [tabindex])`)]
          .filter((e) => !e.disabled && e.tabIndex >= 0)
          .map((e) => (e.ariaLabel ?? e.textContent) || e.labels?.[0]?.textContent || "")""",
        name,
    )
    assert names and all(label.strip() for label in names)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", NAMES)
def test_texts_are_legible(look, name, scheme):
    """At 390 px no letter below 10 px; 4.5 : 1 against what lies below."""
    tab = look(page_of(name), scheme, 390, has_touch=True)
    small = tab.evaluate(
        """(name) => [...document.querySelectorAll(`#figure-${name} svg text`)]
          .filter((e) => e.textContent.trim() && e.checkVisibility())
          .map((e) => [parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a, e.textContent])
          .filter(([size]) => size < 10)""",
        name,
    )
    assert small == []
