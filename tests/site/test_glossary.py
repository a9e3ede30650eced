"""Test that a page explains a term of the glossary at its first use."""

import re

import glossary
from playwright.sync_api import expect

LINK = re.compile(r'<a class="fw-term" href="([^"#]*)#([\w-]+)" title="([^"]*)">')


def test_a_term_is_explained_once_and_only_in_text():
    page = (
        "<h2>The delta rule</h2><p>A <code>delta rule</code>, <a>the delta rule</a>, "
        "\\(delta rule\\): delta rules, the delta rule, undecayed.</p>"
    )
    html = glossary.explained(page, "there.html")
    assert html.count("fw-term") == 1
    assert ">delta rule</a>s, the delta rule, undecayed" in html


def test_explanations_lead_to_the_glossary(pages):
    """A page links each term to the glossary once, and explains it without TeX."""
    used = set()
    for name, page in pages.items():
        links = LINK.findall(page.html)
        assert len({anchor for _, anchor, _ in links}) == len(links), name
        for target, anchor, said in links:
            assert target.endswith("notation.html")
            assert said.strip() and not re.search(r"[\\${}`]", said), said
            used.add(anchor)
    assert {"term-dpfp", "term-elu1", "term-normaliser", "term-tile"} <= used


def test_an_explanation_is_seen_on_focus_and_leads_to_its_entry(look):
    tab = look("notebooks/03_dpfp.html", has_touch=True, is_mobile=True)
    term = tab.locator("a.fw-term").first
    said = term.get_attribute("title")
    term.focus()
    expect(tab.locator(".md-tooltip2", has_text=said)).to_be_visible()
    other = tab.locator("a.fw-term").nth(1)
    said = other.get_attribute("title")
    other.tap()  # The first tap explains the term; the second tap follows the link.
    expect(tab.locator(".md-tooltip2", has_text=said)).to_be_visible()
    other.tap()
    tab.wait_for_url("**/notation.html#term-*")
