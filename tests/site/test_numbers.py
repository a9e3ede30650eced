"""Test that the number of an equation names its paper and links to the equation."""

import re
from html import unescape

import pytest
from built import asks
from playwright.sync_api import expect

NUMBER = re.compile('<a class="fw-number" href="(.*?)" title="(.*?)">\\((.*?)\\)</a>')


@pytest.fixture(scope="module")
def numbers(pages) -> dict[str, dict[str, tuple[str, str]]]:
    """Return the title and the link target of each equation number, by page."""
    found = {}
    for name, page in pages.items():
        html = re.sub("<code.*?</code>", "", page.html, flags=re.S)
        # Neither a formula nor an equation number contains TeX.
        assert not re.search(r'"arithmatex">\s*\\|\\tag\{|katex-tag', html), name
        if known := {
            n: (unescape(said), href) for href, said, n in NUMBER.findall(html)
        }:
            found[name] = known
    assert len(found) > 30
    return found


def test_every_number_says_whose_it_is(numbers):
    """The title of each equation number names its paper, or says that it is fwlab's."""
    for name, known in numbers.items():
        for number, (said, _) in known.items():
            if number[0].isdigit():
                papers = r"(Schlag et al\. 2021|Zhai et al\. 2021)\. \w"
                assert re.match(rf"Eqs?\. {number} of {papers}", said), (name, said)
            else:
                assert said.startswith(f"({number}) is our own number. "), name
    # One number belongs to different equations in different papers.
    errata, kimi = numbers["errata.html"], numbers["annotated/kimi.html"]
    assert errata["4"][0].startswith("Eq. 4 of Zhai et al. 2021. AFT-local")
    assert errata["29"][0].startswith("Eq. 29 of Schlag et al. 2021. Sum normalis")
    assert kimi["n2"][0].startswith("(n2) is our own number. Every key")


@pytest.mark.parametrize(
    "page", ["notebooks/04_delta_rule.html", "annotated/delta.html"]
)
def test_a_number_is_explained(look, numbers, page):
    tab = look(page)
    number = tab.locator(".fw-number:visible", has_text="(24)").first
    # Screen readers can also read the equation number.
    assert number.evaluate("e => e.closest('[aria-hidden]')") is None
    shown = expect(tab.locator(".md-tooltip2", has_text=numbers[page]["24"][0]))
    for come, go in (
        (number.hover, lambda: tab.mouse.move(0, 0)),
        (number.focus, number.blur),
    ):
        come()
        shown.to_be_visible()
        go()
        shown.to_be_hidden()
    # A full stop is part of the formula before it, and never begins a line.
    assert tab.locator(".katex + :text-matches('^[.,;]')").count() == 0
    assert tab.locator("span.arithmatex .katex", has_text=re.compile(r"[.,]$")).count()


@pytest.mark.parametrize("width", [390, 1440])
def test_numbers_stand_at_the_right_of_their_formulas(look, width):
    """Each equation number is to the right of its formula, without overlap."""
    tab = look("notebooks/01_fast_weights.html", width=width)
    places = tab.evaluate(asks.BESIDE)
    assert len(places) > 5
    assert [place for place in places if min(place) < 0] == []
