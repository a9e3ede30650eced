"""Test the pages of the course and the exercises, and the header of each notebook."""

import contextlib
import io
import json
import linecache
import os
import posixpath
import re
import subprocess
import sys
import tomllib
from html import unescape

import pytest
from built import ROOT, WIDTH

from fwlab.exercises import EXERCISES, QUESTIONS, assert_correct

with open(ROOT / "docs" / "course.toml", "rb") as file:
    TABLE = tomllib.load(file)
COURSE = {entry["file"]: entry for entry in TABLE["notebook"]}
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
PAGE = (ROOT / "docs" / "exercises.md").read_text("utf-8")
#: Examples on the exercises page: (code, output that the page shows).
EXAMPLES = re.findall(
    r"```python[^\n]*\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, re.DOTALL
)


def article(site, name: str) -> str:
    """Return the HTML of the article on a page, without menus."""
    html = (site / name).read_text("utf-8")
    return re.search("<article.*?</article>", html, re.DOTALL)[0]


def text(html: str) -> str:
    return " ".join(unescape(re.sub("<[^>]*>", "", html)).split())


def cells(name: str, kind: str) -> list[str]:
    notebook = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text("utf-8"))
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == kind]


def targets(html: str, page: str) -> list[str]:
    """Return the paths of the files that a page's HTML links to."""
    links = re.findall(r'href="([^"#:]+)(?:#[^"]*)?"', html)
    folder = posixpath.dirname(page)
    return [posixpath.normpath(posixpath.join(folder, link)) for link in links]


def listed(html: str, kind: str) -> str:
    (found,) = re.findall(f'<ul class="{kind}".*?</ul>', html, re.DOTALL)
    return found


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_entry_is_what_the_notebook_says(name):
    assert list(COURSE) == NOTEBOOKS  # The course lists each notebook once, in order.
    entry = COURSE[name]
    words = "\n".join(cells(name, "markdown"))
    assert re.findall(r"^# (.+)$", words, re.MULTILINE) == [entry["title"]]
    code = "\n".join(cells(name, "code"))
    asked = {*re.findall(r'\b(?:check|golf)\((?:\w+, )?"?(\w+)', code)}
    assert len(asked) == entry["exercises"]
    assert asked == {e.name for e in EXERCISES.values() if e.notebook == name}
    before = NOTEBOOKS[: NOTEBOOKS.index(name)]
    assert set(entry["after"]) <= set(before)
    assert bool(entry["after"]) == (name != NOTEBOOKS[0])
    following = [*NOTEBOOKS[1:], "exercises.md"][NOTEBOOKS.index(name)]
    assert entry["next"] == following
    told = re.findall(r"Time: (\d+) minutes", words)
    assert told in ([], [str(entry["read"])])


def test_a_way_leaves_out_nothing_that_it_needs():
    for way in TABLE["way"]:
        for i, stem in enumerate(way["files"]):
            missing = set(COURSE[stem]["after"]) - set(way["files"][:i])
            assert not missing, f"{way['name']}: {stem} needs {missing}"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_head_and_foot_of_a_notebook(site, name):
    """A notebook page begins with prerequisites and ends with a link to the next."""
    entry, page = COURSE[name], f"notebooks/{name}.html"
    html = article(site, page)
    head, foot = listed(html, "nb-facts"), listed(html, "nb-next")
    top = html[: html.index(head)]
    assert "</h1>" in top and "<h2" not in top
    for said in (entry["run"], f"{entry['read']} minutes", *entry["ideas"]):
        assert said in text(head)
    linked = [t for t in targets(head, page) if re.match(r"notebooks/\d.*html", t)]
    assert linked == [f"notebooks/{stem}.html" for stem in entry["after"]]
    # Each exercise is linked by its name.
    assert len(re.findall(r'href="#(\w+)"', head)) == entry["exercises"]
    # The rest of the page repeats neither the time nor the prerequisites.
    words = text(html)
    assert (words.count("Time:"), words.count("Needs:")) == (0, 1)
    assert '<div class="nb-' not in html[html.index(foot) :]
    assert text(foot).startswith("Next:")
    following = entry["next"].removesuffix(".md")
    wanted = following if entry["next"].endswith(".md") else f"notebooks/{following}"
    linked = targets(foot, page)
    assert linked[0] == f"{wanted}.html"
    for kind in ("figures", "annotated", "kernels"):
        assert {f"{kind}/{page}.html" for page in entry[kind]} <= set(linked)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_only_draws_is_folded(site, name):
    """Code that only draws is folded, but the picture stays visible."""
    first = [source.splitlines()[0] for source in cells(name, "code")]
    wanted = [line[2:].rstrip(".") for line in first if line.startswith("# Draws ")]
    html = article(site, f"notebooks/{name}.html")
    folded = re.findall(
        r'<div class="nb-code">\s*<details[^>]*>(.*?)</details>', html, re.DOTALL
    )
    titles = [text(re.search("<summary>(.*?)</summary>", x)[0]) for x in folded]
    assert titles == ["Setup", *wanted]
    for fold, line in zip(folded[1:], wanted, strict=True):
        assert line in text(fold.partition("</summary>")[2]) and "<svg" not in fold


def test_the_map_is_the_page(site):
    """The course map links to every notebook, names prerequisites, and is short."""
    html = article(site, "course.html")
    drawing = html[html.index('class="course-map"') : html.index("In words:")]
    assert targets(drawing, "course.html") == [f"notebooks/{n}.html" for n in NOTEBOOKS]
    words = text(html)
    assert len(words.split()) <= 600
    for name, entry in COURSE.items():
        assert f"{int(name[:2])}. {entry['short']}" in words
        if entry["after"]:
            before = " and ".join(str(int(stem[:2])) for stem in entry["after"])
            assert f"{int(name[:2])} builds on {before}" in words


def test_map_can_be_read_on_a_phone(look):
    tab = look("course.html", width=390)
    small = """() => [...document.querySelectorAll(".course-map a *")].filter((e) =>
      parseFloat(getComputedStyle(e).fontSize) < 11.5 || e.scrollWidth > e.clientWidth + 1)
      .map((e) => e.textContent)"""
    assert tab.evaluate(small) == []
    assert tab.evaluate(WIDTH) == 390


def test_every_exercise_has_a_row(site):
    """The exercises page has a row with link, difficulty and time for each exercise."""
    rows = re.findall("<tr>(.*?)</tr>", article(site, "exercises.html"), re.DOTALL)[1:]
    for row, exercise in zip(rows, EXERCISES.values(), strict=True):
        assert f'href="notebooks/{exercise.notebook}.html#{exercise.name}"' in row
        cells = [text(cell) for cell in re.findall("<td.*?>(.*?)</td>", row, re.DOTALL)]
        assert cells[0] == exercise.name and cells[1] in text(exercise.task)
        assert cells[3:] == [str(exercise.difficulty), str(exercise.minutes)]


def test_examples_print_what_the_page_says(request):
    # After the test, remove the exercises that the page defines.
    request.addfinalizer(lambda: EXERCISES.pop("read", None))
    request.addfinalizer(lambda: QUESTIONS.pop("twice", None))
    session: dict = {}
    compared = 0
    for code, said in EXAMPLES:
        if "pytest" in code:
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            linecache.cache["page"] = (0, None, code.splitlines(True), "page")  # a cell
            exec(compile(code, "page", "exec"), session)
        assert out.getvalue()
        if said:
            assert out.getvalue().rstrip() == said.rstrip()
            compared += 1
    assert compared == 7
    # The exercise that the page defines accepts right and rejects wrong answers.
    assert_correct(session["read"], "read")
    with pytest.raises(AssertionError, match="column 0 of W"):
        assert_correct(lambda W, q: W[:, 1], "read")


def test_the_test_for_a_class(tmp_path):
    (code,) = (code for code, _ in EXAMPLES if "pytest" in code)
    (tmp_path / "test_answers.py").write_text(code)
    (tmp_path / "answers.py").write_text(
        "from fwlab.ops.delta.delta import delta_step\n"
        "def write(W, k, v):\n    return W\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null"],
        cwd=tmp_path,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
        | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        encoding="utf-8",
    )
    assert "2 failed, 1 passed" in done.stdout, done.stdout
    assert "write is wrong: stores a value in an empty memory" in done.stdout
    assert "test_answer[sum_normalize]" in done.stdout


def test_each_half_of_the_cheat_sheet_prints_on_one_page(look):
    printed = look("cheatsheet.html").pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 2


def test_the_code_of_the_cheat_sheet_runs():
    page = (ROOT / "docs" / "cheatsheet.md").read_text("utf-8")
    names = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, names)
    assert names["y"].shape == (2, 128, 64)
