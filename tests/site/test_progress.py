"""Progress through the course: kept in the reader's browser, and nowhere else."""

import json
import re

import pytest
from playwright.sync_api import expect
from test_course import COURSE
from test_quiz import NOTEBOOKS, answer, asked

from fwlab.exercises import QUESTIONS

KEY = "fwlab.progress"
STORED = f"localStorage.getItem('{KEY}')"
PAGE = "notebooks/03_dpfp.html"
ALL = len(COURSE)
QUESTIONS_ASKED = sum(len(asked(path)) for path in NOTEBOOKS)


def kept(tab) -> dict | None:
    return json.loads(tab.evaluate(STORED) or "null")


def mark(tab):
    return tab.get_by_role("button", name="Mark as done")


def summary(tab):
    return tab.locator("#progress [role=status]")


def in_words(done: int, right: int = 0) -> str:
    return (
        f"{done} of {ALL} notebooks done, "
        f"{right} of {QUESTIONS_ASKED} questions answered right."
    )


def test_a_notebook_is_marked_seen_and_forgotten(look):
    """By keyboard; over a reload; in words, in the map and in the list."""
    tab = look(PAGE)
    base = tab.url.removesuffix(PAGE)
    before = tab.evaluate("Object.keys(localStorage)")
    mark(tab).focus()
    tab.keyboard.press("Enter")
    expect(tab.locator(".fw-progress [role=status]")).to_have_text("✓ Done.")
    assert kept(tab) == {"03_dpfp": ["done"]}
    tab.reload()
    expect(tab.locator(".fw-progress [role=status]")).to_have_text("✓ Done.")
    expect(tab.get_by_role("button", name="Mark as not done")).to_be_visible()
    # Nothing else is kept, here or elsewhere in the browser.
    assert tab.evaluate("Object.keys(localStorage)") == [*before, KEY]
    assert tab.evaluate("sessionStorage.length") == 0
    assert tab.context.cookies() == []

    # Home counts what is on its map, which has no questions.
    tab.goto(base + "index.html")
    expect(summary(tab)).to_have_text(f"1 of {ALL} notebooks done.")

    tab.goto(base + "course.html")
    expect(summary(tab)).to_have_text(in_words(1))
    box = tab.locator(".course-map a[data-notebook='03_dpfp']")
    expect(box).to_contain_text("✓ done")
    assert tab.locator(".course-map", has_text="✓").locator(".fw-done").count() == 1
    expect(tab.locator(".fw-known[data-notebook='03_dpfp']")).to_have_text("✓ Done.")
    assert tab.locator(".fw-known:not(:empty)").count() == 1

    tab.get_by_role("button", name="Forget my progress").press("Enter")
    expect(summary(tab)).to_have_text("Your progress is forgotten.")
    expect(summary(tab)).to_be_focused()
    expect(box).to_contain_text(f"about {COURSE['03_dpfp']['read']} min")
    assert tab.locator(".fw-known:not(:empty), .fw-done").count() == 0
    assert tab.get_by_role("button", name="Forget my progress").count() == 0
    assert tab.evaluate("Object.keys(localStorage)") == before
    tab.goto(base + PAGE)
    mark(tab).click()
    tab.get_by_role("button", name="Mark as not done").click()
    expect(mark(tab)).to_be_visible()
    assert kept(tab) is None


def test_right_answers_count(look):
    """Of wrong ones it is kept that they need another look."""
    (path,) = (path for path in NOTEBOOKS if path.stem == "03_dpfp")
    first, second, *_ = asked(path)
    tab = look(PAGE)
    base = tab.url.removesuffix(PAGE)
    forms = tab.locator(".fw-quiz")
    wrong = next(iter(QUESTIONS[second].tempting))
    answer(forms.nth(1), QUESTIONS[second], wrong)
    again = f"tried:{second}"
    assert kept(tab) == {"03_dpfp": [again]}
    answer(forms.nth(0), QUESTIONS[first], QUESTIONS[first].truth)
    assert kept(tab) == {"03_dpfp": [again, first]}
    # Home has nothing to count yet.
    tab.goto(base + "index.html")
    expect(tab.locator("#progress")).to_be_hidden()
    tab.goto(base + PAGE)
    mark(tab).click()
    assert kept(tab) == {"03_dpfp": [again, first, "done"]}
    tab.reload()
    said = tab.locator(".fw-quiz [role=status]")
    expect(said.nth(0)).to_have_text("✓ You answered this one before.")
    expect(said.nth(1)).to_have_text("")
    tab.goto(base + "course.html")
    expect(summary(tab)).to_have_text(in_words(1, 1))
    expect(tab.locator(".fw-known[data-notebook='03_dpfp']")).to_have_text(
        f"✓ Done. 1 of {len(asked(path))} questions answered right. 1 to look at again."
    )


def test_another_tab_is_followed(look):
    tab = look("course.html")
    other = tab.context.new_page()
    other.goto(tab.url.replace("course.html", PAGE))
    mark(other).click()
    expect(summary(tab)).to_have_text(in_words(1))


BLOCKED = """Object.defineProperty(window, 'localStorage', {
  get() { throw new DOMException('denied', 'SecurityError'); } });"""
FULL = """Storage.prototype.setItem = () => {
  throw new DOMException('full', 'QuotaExceededError'); };"""


@pytest.mark.parametrize("broken", [BLOCKED, FULL], ids=["blocked", "full"])
def test_a_browser_that_keeps_nothing(look, broken):
    """No error (`look` would see one), and the page says so."""
    tab = look("index.html", alone=True)
    base = tab.url.removesuffix("index.html")
    tab.add_init_script(broken)
    # What the theme does with a blocked store is its own.
    tab.add_init_script("addEventListener('error', (e) => e.preventDefault(), true)")
    tab.goto(base + PAGE)
    mark(tab).click()
    said = tab.locator(".fw-progress [role=status]")
    expect(said).to_contain_text("This browser keeps nothing")
    tab.get_by_role("button", name="Mark as not done").click()
    expect(said).to_have_text("")
    tab.goto(base + "course.html")
    expect(summary(tab)).to_be_hidden()  # nothing is counted before something is done


def test_what_others_have_written_there_does_no_harm(look):
    tab = look("course.html")
    for text in ("{", "5", "[1]", '"x"', '{"03_dpfp": {"done": 1}}'):
        tab.evaluate(f"localStorage.setItem('{KEY}', {json.dumps(text)})")
        tab.evaluate("dispatchEvent(new Event('storage'))")
        expect(summary(tab)).to_have_text("")


def test_from_disk(look, site):
    tab = look(PAGE, base=f"{site.as_uri()}/")
    mark(tab).click()
    expect(tab.locator(".fw-progress [role=status]")).to_contain_text("✓ Done.")


def test_without_scripts_there_is_nothing_to_press(look):
    for page in (PAGE, "course.html"):
        tab = look(page, java_script_enabled=False)
        assert tab.locator(".fw-progress").count() == 1
        assert tab.locator(".fw-progress:visible, .fw-known:visible").count() == 0


def test_questions_of_the_course_page_are_those_of_the_notebooks(site):
    html = (site / "course.html").read_text("utf-8")
    rows = re.findall(r'data-notebook="(\w+)" data-questions="([\w ]*)"', html)
    assert {stem: names.split() for stem, names in rows} == {
        path.stem: asked(path) for path in NOTEBOOKS
    }
