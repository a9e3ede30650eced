"""The number of an equation says whose it is, and leads to where it stands."""

import re
import sys
from html import unescape
from urllib.parse import urljoin

import pytest
from built import ROOT, asks
from playwright.sync_api import expect

sys.path.insert(0, str(ROOT / "docs" / "hooks"))
import equations

NUMBER = re.compile('<a class="fw-number" href="(.*?)" title="(.*?)">\\((.*?)\\)</a>')


@pytest.fixture(scope="module")
def numbers(site, pages) -> dict[str, dict[str, tuple[str, str]]]:
    """By page and number: what is said of it, and where it leads."""
    found = {}
    for name in pages:
        html = re.sub(
            "<code.*?</code>", "", (site / name).read_text("utf-8"), flags=re.S
        )
        # No TeX is left, in a formula or of a number.
        assert not re.search(r'"arithmatex">\s*\\|\\tag\{|katex-tag', html), name
        known = {n: (unescape(said), href) for href, said, n in NUMBER.findall(html)}
        if known:
            found[name] = known
    assert len(found) > 30
    return found


def test_numbers_lead_to_where_they_are_listed(numbers, pages):
    for name, known in numbers.items():
        for number, (_, href) in known.items():
            target, _, anchor = urljoin(name, href).partition("#")
            assert anchor in pages[target].ids, (name, number)


def test_every_number_says_whose_it_is(numbers):
    papers = equations.papers()
    whose = {
        f"{papers[name]['authors'].split(',')[0]} et al. {papers[name]['year']}": name
        for name in ("schlag2021", "zhai2021")
    }
    own: dict[str, set[str]] = {}
    for family in equations.listed()["fwlab"].values():
        for number, words in family.items():
            own.setdefault(number, set()).add(words)
    for name, known in numbers.items():
        for number, (said, _) in known.items():
            first, _, words = said.removesuffix(".").partition(". ")
            if number[0].isdigit():
                match = re.match(r"Eqs?\. (\S+) of (.* \d{4})\. \w", said)
                assert match[1] == number, name
                paper = papers[whose[match[2]]]
                assert number.split("–")[0] in paper["equations"]
            else:
                assert first == f"({number}) is our own number", name
                assert words[0].lower() + words[1:] in {
                    w[0].lower() + w[1:] for w in own[number]
                }, name


@pytest.mark.parametrize(
    ("page", "number", "begins"),
    [
        (
            "notebooks/04_delta_rule",
            "24",
            "Eq. 24 of Schlag et al. 2021. The delta rule",
        ),
        ("notebooks/14_aft_stability", "2", "Eq. 2 of Zhai et al. 2021. AFT-full"),
        ("errata", "4", "Eq. 4 of Zhai et al. 2021. AFT-local"),
        ("errata", "29", "Eq. 29 of Schlag et al. 2021. Sum normalisation"),
        ("annotated/aft-simple", "5", "Eq. 5 of Zhai et al. 2021."),
        ("annotated/kimi", "n2", "(n2) is our own number. Every key"),
        ("annotated/gated_delta", "n1", "(n1) is our own number. The gated delta rule"),
        ("notebooks/16_feedback", "f1", "(f1) is our own number. One memory per step"),
    ],
)
def test_whose_number(numbers, page, number, begins):
    assert numbers[f"{page}.html"][number][0].startswith(begins)


@pytest.mark.parametrize(
    "page", ["notebooks/04_delta_rule.html", "annotated/delta.html"]
)
def test_a_number_is_explained(look, numbers, page):
    tab = look(page)
    displayed = tab.locator(".katex-display:has(.fw-number)")
    assert displayed.count() >= len(numbers[page])
    number = tab.locator(".fw-number:visible", has_text="(24)").first
    # A reader who cannot see gets the number, too.
    assert number.evaluate("e => e.closest('[aria-hidden]')") is None
    said = number.get_attribute("title")
    assert said == numbers[page]["24"][0]
    shown = expect(tab.locator(".md-tooltip2", has_text=said))
    for come, go in (
        (number.hover, lambda: tab.mouse.move(0, 0)),
        (number.focus, number.blur),
    ):
        come()
        shown.to_be_visible()
        go()
        shown.to_be_hidden()
    # A full stop is a part of its formula, and so begins no line.
    assert tab.locator(".katex + :text-matches('^[.,;]')").count() == 0
    assert tab.locator("span.arithmatex .katex", has_text=re.compile(r"[.,]$")).count()


@pytest.mark.parametrize("width", [390, 1440])
def test_numbers_stand_at_the_right_of_their_formulas(look, width):
    """On the line of the formula, not on top of it."""
    tab = look("notebooks/01_fast_weights.html", width=width)
    places = tab.evaluate(asks.BESIDE)
    assert len(places) > 5
    assert [place for place in places if min(place) < 0] == []
