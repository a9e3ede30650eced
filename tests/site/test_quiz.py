"""Questions of the notebooks, asked on their pages."""

import contextlib
import io
import json
import re

import pytest
from built import ROOT

from fwlab.exercises import QUESTIONS, predict, reveal

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def asked(path) -> list[str]:
    """The questions of a notebook, in order."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    return re.findall(r'^(?:predict|quiz)\("(\w+)", \.\.\.\)$', code, re.MULTILINE)


def in_a_notebook(name, answer) -> str:
    """What `predict` and `reveal` print for an answer."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        predict(name, answer)
        reveal(name)
    return " ".join(out.getvalue().split())


def test_every_question_of_a_notebook_is_asked_on_its_page(site):
    for path in NOTEBOOKS:
        html = (site / "notebooks" / f"{path.stem}.html").read_text("utf-8")
        data = re.findall("data-question='(.*?)'", html)
        assert [json.loads(each)["name"] for each in data] == asked(path), path.stem
        assert not re.search(r"in place of the dots after", html)


def answer(form, question, value: float | str) -> str:
    if question.choices:
        form.locator("input").nth(question.choices.index(value)).check()
    else:
        form.locator("input").fill(f"{value:g}")
    form.locator("button").press("Enter")  # by keyboard
    return form.locator("[role=status]").inner_text()


@pytest.mark.parametrize("stem", [p.stem for p in NOTEBOOKS if asked(p)])
def test_a_page_judges_as_the_notebook_does(stem, look):
    page = look(f"notebooks/{stem}.html")
    for form in page.locator(".fw-quiz").all():
        question = QUESTIONS[json.loads(form.get_attribute("data-question"))["name"]]
        said = answer(form, question, question.truth)
        assert said.startswith("✓ Right:") and question.because in said
        assert in_a_notebook(question.name, question.truth).endswith(": right.")
        for wrong, why in question.tempting.items():
            said = answer(form, question, wrong)
            assert said.startswith("✗") and why in said
            assert " ".join(why.split()) in in_a_notebook(question.name, wrong)


@pytest.mark.parametrize(
    ("typed", "begins"),
    [
        ("0,88", "✓"),
        ("87.5 %", "✓"),
        ("", ""),
        ("much", "Write a number"),
        ("1,000", "Write a number"),
        ("7", "✗ Not yet. You are off by 6.13."),
    ],
)
def test_numbers_as_people_write_them(look, typed, begins):
    page = look("notebooks/00_start_here.html")
    form = page.locator('.fw-quiz[data-question*="\\"crosstalk\\""]')
    form.locator("input").fill(typed)
    form.locator("button").click()
    said = form.locator("[role=status]").inner_text()
    assert said.startswith(begins) and bool(said) == bool(begins)


def test_without_scripts_the_answer_unfolds(site):
    html = (site / "notebooks" / "00_start_here.html").read_text("utf-8")
    form = re.search('<form class="fw-quiz".*?</form>', html, re.DOTALL)[0]
    assert re.search("<button[^>]* hidden", form)
    assert (
        "v1. W k1 = v1 (k1 · k1)"
        in re.search("<details>.*</details>", form, re.DOTALL)[0]
    )
