"""Terms of the glossary: explained where a page uses them first."""

import re
import sys

from built import ROOT
from playwright.sync_api import expect

sys.path.insert(0, str(ROOT / "docs" / "hooks"))
import glossary

LINK = re.compile(r'<a class="fw-term" href="([^"#]*)#([\w-]+)" title="([^"]*)">')


def test_terms_of_the_glossary_are_read():
    known = glossary.terms()
    for name in ("dpfp", "elu + 1", "favor+", "normaliser", "mixer", "nat", "decay"):
        assert name in known
    for anchor, said in known.values():
        assert re.search(r'\w\.$|[)"]\.$|\."$', said), anchor
        assert not re.search(r"[\\${}`]|\](?!\))", said), said


def test_a_term_is_explained_once_and_only_in_text():
    page = (
        "<h2>The delta rule</h2><p>A <code>delta rule</code>, <a>the delta rule</a>, "
        "\\(delta rule\\): delta rules, the delta rule, undecayed.</p>"
    )
    html = glossary.explained(page, "there.html")
    assert html.count("fw-term") == 1
    assert ">delta rule</a>s, the delta rule, undecayed" in html


def test_explanations_lead_to_the_glossary(site, pages):
    anchors = (site / "notation.html").read_text("utf-8")
    used = set()
    for name in pages:
        links = LINK.findall((site / name).read_text("utf-8"))
        assert len({anchor for _, anchor, _ in links}) == len(links), name
        for target, anchor, title in links:
            assert f'id="{anchor}"' in anchors and title
            assert ((site / name).parent / target).resolve() == site / "notation.html"
            used.add(anchor)
    assert {"term-dpfp", "term-elu1", "term-normaliser", "term-tile"} <= used


def test_an_explanation_is_seen_on_focus_and_a_press_leads_to_its_entry(look):
    tab = look("notebooks/03_dpfp.html", has_touch=True, is_mobile=True)
    term = tab.locator("a.fw-term").first
    said = term.get_attribute("title")
    term.focus()
    expect(tab.locator(".md-tooltip2", has_text=said)).to_be_visible()
    term.tap()
    tab.wait_for_url("**/notation.html#term-*")
