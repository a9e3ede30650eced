"""Test that notebook pages hide results until a reader has made a prediction."""

import contextlib
import io
import json
import re

import pytest
from bs4 import BeautifulSoup
from built import ROOT, until
from playwright.sync_api import expect
from test_quiz import NOTEBOOKS, answer, asked, code

from fwlab.exercises import DERIVATIONS, EXERCISES, QUESTIONS, solution

STEM = "00_start_here"
PAGE = f"notebooks/{STEM}.html"
#: JavaScript for the height of each folded part, which is 0 if it is closed.
HEIGHTS = "parts => parts.map((part) => part.offsetHeight)"
#: JavaScript that emulates browsers without `hidden="until-found"`.
OLD = """Object.defineProperty(HTMLElement.prototype, "hidden", {
  get() { return this.hasAttribute("hidden"); },
  set(value) { this.toggleAttribute("hidden", Boolean(value)); },
});"""


def predicted(path) -> list[str]:
    """List the names of the predictions that a notebook asks for, in order."""
    return re.findall(r'^predict\("(\w+)", \.\.\.\)$', code(path), re.MULTILINE)


FIRST, SECOND, *_ = predicted(ROOT / "notebooks" / f"{STEM}.ipynb")


def kept(tab) -> list[str]:
    """Return the reader's progress from the browser's local storage."""
    return json.loads(tab.evaluate("localStorage.getItem('fwlab.progress')") or "[]")


def parts(tab):
    return tab.locator("fw-fold")


def is_open(tab) -> list[bool]:
    return [height > 0 for height in parts(tab).evaluate_all(HEIGHTS)]


def buttons(tab):
    return tab.locator(".fw-anyway button")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_answer_is_folded_after_its_question(site, path):
    """Each answer and the rest of its section are folded below the question."""
    html = (site / "notebooks" / f"{path.stem}.html").read_text("utf-8")
    article = BeautifulSoup(html, "lxml").find("article")
    forms = {
        json.loads(form["data-question"])["name"]: form
        for form in article.select("form.fw-quiz")
    }
    folds = {n: f for f in article("fw-fold") for n in f["data-after"].split()}
    assert [*forms] == asked(path) and [*folds] == predicted(path)
    for name, fold in folds.items():
        question, form = QUESTIONS[name], forms[name]
        said = "".join(f"The answer: {question.answer}. {question.because}".split())
        texts = ["".join(part.get_text().split()) for part in (fold, article)]
        assert [text.count(said) for text in texts] == [1, 1]
        assert question.because not in form.get_text() and not form("details")
        assert fold.find_previous("form") is forms[fold["data-after"].split()[-1]]
        # The rest of the section is inside the fold.
        following = fold.find_next_sibling()
        assert not fold("h2") and (not following or following.name in ("h2", "hr"))
    # The answer to an exercise or derivation is closed, below its cell and hints.
    checked = r'_ = (?:check|golf)\((\w+)[,)]|_ = check_formula\("(\w+)"'
    names = dict.fromkeys(a or b for a, b in re.findall(checked, code(path)))
    boxes = article.select(".fw-answer")
    for name, box in zip(names, boxes, strict=True):
        assert article.find(id=name).find_next(class_="fw-answer") is box
        assert "data-search-exclude" in box.attrs and not box.select("details[open]")
        *hints, answer = box.find_all("details")
        exercise = EXERCISES.get(name) or DERIVATIONS[name]
        texts = [hint.find("summary").next_sibling.strip() for hint in hints]
        assert texts == [*exercise.hints]
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            solution(name)
        assert answer.find("code").get_text().strip() in out.getvalue()


def test_a_part_opens_when_it_may(look):
    """An answer, a button or the switch opens a folded part, which stays open."""
    tab = look(PAGE)
    assert not any(is_open(tab)) and len(is_open(tab)) > 2
    expect(buttons(tab).nth(0)).to_have_attribute("aria-expanded", "false")
    expect(tab.get_by_text("The answer:").first).not_to_be_visible()

    form, question = tab.locator(".fw-quiz").first, QUESTIONS[FIRST]
    wrong = next(iter(question.tempting))
    said = answer(form, question, wrong)
    assert question.tempting[wrong] in said and said.endswith("or read on.")
    assert is_open(tab)[:2] == [True, False]
    expect(buttons(tab).nth(0)).not_to_be_visible()
    expect(tab.get_by_text("The answer:").first).to_be_visible()

    buttons(tab).nth(1).press("Enter")
    assert is_open(tab)[:3] == [True, True, False]
    expect(buttons(tab).nth(1)).to_be_focused()
    expect(buttons(tab).nth(1)).to_have_attribute("aria-expanded", "true")
    assert kept(tab) == [FIRST, f"shown:{SECOND}"]
    tab.reload()
    assert is_open(tab)[:3] == [True, True, False]
    buttons(tab).nth(1).click()
    assert is_open(tab)[:3] == [True, False, False]

    switch = tab.get_by_role("switch")
    switch.press("Space")
    assert all(is_open(tab))
    assert tab.locator(".fw-anyway:visible").count() == 0
    tab.reload()
    assert all(is_open(tab))
    expect(switch).to_be_checked()
    switch.press("Space")
    assert is_open(tab)[:3] == [True, False, False]
    assert kept(tab) == [FIRST]

    # In print, all parts are open, without solutions and without setup cells.
    tab.emulate_media(media="print")
    assert all(is_open(tab))
    assert tab.locator(".fw-anyway:visible, .fw-everything:visible").count() == 0
    assert tab.locator("article details").count() >= 3
    assert tab.locator("article details:visible").count() == 0
    assert len(re.findall(rb"/Type\s*/Page\b", tab.pdf())) < 10


def test_a_part_opens_for_who_is_sent_there(look):
    """A URL fragment or a search result opens its folded part, also in old browsers."""
    tab = look(PAGE, script=OLD)
    page = tab.url
    # Add a target for links to each part.
    places = "parts => parts.map((part, i) => (part.lastElementChild.id = `deep${i}`))"
    parts(tab).evaluate_all(places)
    for i in (1, 0):
        tab.evaluate(f"location.hash = 'deep{i}'")
        until(tab, f"document.querySelector('#deep{i}').offsetHeight > 0")
        expect(tab.locator(f"#deep{i}")).to_be_in_viewport()
    # A part that was opened by a link is not stored as answered.
    assert kept(tab) == []
    # Browsers send this event when a search finds words in a hidden part.
    parts(tab).nth(2).dispatch_event("beforematch")
    assert is_open(tab)[:3] == [True, True, True]
    # Only the section that was found opens, not every section with the word.
    section = parts(tab).nth(2).get_attribute("data-section")
    for place, opened in ((f"#{section}", [False, False, True]), ("", [True] * 3)):
        tab.goto(f"{page}?h=answer{place}", wait_until="load")
        tab.locator("fw-fold mark:visible").first.wait_for()
        assert is_open(tab)[:3] == opened


def test_a_finger_has_room(look):
    tab = look(PAGE, width=390, height=844, has_touch=True, is_mobile=True)
    touched = ".fw-anyway button, .fw-everything label, .fw-quiz label, .fw-quiz button"
    boxes = [each.bounding_box() for each in tab.locator(touched).all()]
    assert min(box["height"] for box in boxes) >= 44


def test_without_scripts_nothing_is_folded(look):
    tab = look(PAGE, java_script_enabled=False)
    assert tab.get_by_text("The answer:").first.is_visible()
    assert tab.locator("fw-fold").count() == tab.locator("fw-fold:visible").count()
    assert tab.locator(".fw-anyway:visible, .fw-everything:visible").count() == 0


@pytest.mark.parametrize(
    "broken",
    [
        "Object.defineProperty(window, 'localStorage', {get() { throw Error(); }});",
        "localStorage.setItem('fwlab.progress', '{');",
    ],
)
def test_a_browser_that_keeps_nothing(look, broken):
    """Without local storage, folded parts still open, and no error is raised."""
    # Ignore errors of the theme, which requires local storage.
    ignored = "addEventListener('error', (e) => e.preventDefault(), true);"
    tab = look(PAGE, script=broken + ignored)
    buttons(tab).nth(0).click()
    assert is_open(tab)[:2] == [True, False]
    buttons(tab).nth(1).click()
    assert is_open(tab)[:3] == [True, True, False]
