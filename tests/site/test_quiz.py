"""Test the quiz questions on the pages of notebooks."""

import ast
import contextlib
import io
import json
import re
from html import unescape

import pytest
import tex
from built import ROOT, asks

from fwlab.exercises import QUESTIONS, predict, reveal

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code(path) -> str:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")


def asked(path) -> list[str]:
    """List the names of the questions in a notebook, in order."""
    asks = r'^(?:predict|quiz)\("(\w+)", \.\.\.\)$'
    return re.findall(asks, code(path), re.MULTILINE)


def in_a_notebook(name, answer) -> str:
    """Return the text that `predict` and `reveal` print for an answer."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        predict(name, answer)
        reveal(name)
    return " ".join(out.getvalue().split())


def shown(text: str) -> str:
    """Convert terminal output to the text that a page shows."""
    return unescape(re.sub("<[^>]*>", "", tex.typeset(text)))


def answer(form, question, value: float | str) -> str:
    if question.choices:
        form.locator("input").nth(question.choices.index(value)).check()
    else:
        form.locator("input").fill(f"{value:g}")
    form.locator("button").press("Enter")  # Submit by keyboard.
    return form.locator("[role=status]").inner_text()


def test_pages_judge_as_the_notebooks_do(look, site):
    """Pages and notebooks give the same verdict on every answer to every question."""
    pages = (site / "notebooks" / f"{path.stem}.html" for path in NOTEBOOKS)
    html = "".join(page.read_text("utf-8") for page in pages)
    forms = "".join(re.findall('<form class="fw-quiz".*?</form>', html, re.DOTALL))
    tab = look("404.html")
    tab.locator("main").evaluate("(main, forms) => { main.innerHTML = forms; }", forms)
    tab.add_script_tag(url="/scripts/quiz.js")
    questions = [QUESTIONS[name] for path in NOTEBOOKS for name in asked(path)]
    answers = [(q, value) for q in questions for value in (q.truth, *q.tempting)]
    # Percentages may be typed with a percent sign.
    typed = [
        (q.name, v if q.choices else f"{v:g}{' %' * q.percent}") for q, v in answers
    ]
    assert any(str(answer).endswith("%") for _, answer in typed)
    judged = tab.evaluate(asks.JUDGED, typed)
    for (question, value), said in zip(answers, judged, strict=True):
        printed = in_a_notebook(question.name, value)
        if value == question.truth:
            assert said.startswith("✓ Right:") and shown(question.because) in said
            assert printed.endswith(": right.")
        else:
            why = question.tempting[value]
            assert said.startswith("✗") and shown(why) in said
            assert " ".join(why.split()) in printed


def test_numbers_as_people_write_them(look):
    begins = {
        "0,88": "✓",
        "": "",
        "87.5 %": "✓",
        "7/8": "✓",
        "7/": "Write a number",
        "much": "Write a number",
        "1,000": "Write a number",
        "7": "✗ Not yet. You are off by 6.13.",
    }
    tab = look("notebooks/00_start_here.html")
    form = tab.locator('.fw-quiz[data-question*="\\"crosstalk\\""]')
    for typed, words in begins.items():
        form.locator("input").fill(typed)
        form.locator("button").click()
        said = form.locator("[role=status]").inner_text()
        assert said.startswith(words) and bool(said) == bool(words), typed


def test_without_scripts_the_answer_unfolds(site):
    """Without scripts, a review question has its answer in a `details` element."""
    html = (site / "notebooks" / "01_fast_weights.html").read_text("utf-8")
    form = re.search('<form class="fw-quiz".*?</form>', html, re.DOTALL)[0]
    assert re.search("<button[^>]* hidden", form)
    (first, *_) = asked(ROOT / "notebooks" / "01_fast_weights.ipynb")
    details = form.partition("<details>")[2]
    assert tex.typeset(QUESTIONS[first].answer) in details


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_cell_names_the_answer_that_it_reveals(path):
    """No cell hard-codes the answer it reveals, as its source would give it away."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    named = [
        (cell["id"], ast.unparse(argument))
        for cell in cells
        if cell["cell_type"] == "code" and cell["id"] != "setup"
        for node in ast.walk(ast.parse("".join(cell["source"])))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "reveal"
        for argument in [*node.args[1:], *(word.value for word in node.keywords)]
        if not any(isinstance(part, ast.Name) for part in ast.walk(argument))
    ]
    assert named == []
