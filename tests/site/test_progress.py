"""Answers to questions: kept in the reader's browser, and nowhere else."""

import json

import pytest
from playwright.sync_api import expect
from test_quiz import NOTEBOOKS, answer, asked

from fwlab.exercises import QUESTIONS

KEY = "fwlab.progress"
STEM = "03_dpfp"
PAGE = f"notebooks/{STEM}.html"
FIRST, SECOND, *_ = asked(next(path for path in NOTEBOOKS if path.stem == STEM))


def kept(tab) -> dict | None:
    return json.loads(tab.evaluate(f"localStorage.getItem('{KEY}')") or "null")


def said(tab):
    return tab.locator(".fw-quiz [role=status]")


def answer_both(tab) -> None:
    """The second question wrong, the first one right."""
    forms = tab.locator(".fw-quiz")
    answer(forms.nth(1), QUESTIONS[SECOND], next(iter(QUESTIONS[SECOND].tempting)))
    answer(forms.nth(0), QUESTIONS[FIRST], QUESTIONS[FIRST].truth)


@pytest.mark.parametrize("disk", [False, True], ids=["served", "from disk"])
def test_answers_are_remembered(look, site, disk):
    """The right ones; of wrong ones, that they need another look. Nothing else."""
    tab = look(PAGE, **({"base": f"{site.as_uri()}/"} if disk else {}))
    before = tab.evaluate("Object.keys(localStorage)")
    answer_both(tab)
    assert kept(tab) == {STEM: [f"tried:{SECOND}", FIRST]}
    assert {*tab.evaluate("Object.keys(localStorage)")} == {*before, KEY}
    assert tab.evaluate("sessionStorage.length") == 0
    assert tab.context.cookies() == []
    tab.reload()
    expect(said(tab).nth(0)).to_have_text("✓ You answered this one before.")
    expect(said(tab).nth(1)).to_have_text("")


def test_another_tab_is_followed(look):
    tab = look(PAGE)
    other = tab.context.new_page()
    other.goto(tab.url)
    answer_both(other)
    expect(said(tab).nth(0)).to_have_text("✓ You answered this one before.")


BLOCKED = """Object.defineProperty(window, 'localStorage', {
  get() { throw new DOMException('denied', 'SecurityError'); } });"""
FULL = """Storage.prototype.setItem = () => {
  throw new DOMException('full', 'QuotaExceededError'); };"""


@pytest.mark.parametrize("broken", [BLOCKED, FULL], ids=["blocked", "full"])
def test_a_browser_that_keeps_nothing(look, broken):
    """No error (`look` would see one), and a part opens until the page is left."""
    tab = look("index.html", alone=True)
    tab.add_init_script(broken)
    # What the theme does with a blocked store is its own.
    tab.add_init_script("addEventListener('error', (e) => e.preventDefault(), true)")
    tab.goto(tab.url.replace("index.html", PAGE))
    tab.get_by_role("switch").press("Space")
    assert tab.locator("fw-fold[hidden]").count() == 0


def test_what_others_have_written_there_does_no_harm(look):
    tab = look(PAGE)
    for text in ("{", "5", "[1]", '"x"', f'{{"{STEM}": {{"done": 1}}}}'):
        tab.evaluate(f"localStorage.setItem('{KEY}', {json.dumps(text)})")
        tab.evaluate("dispatchEvent(new Event('storage'))")
        expect(said(tab).nth(0)).to_have_text("")
