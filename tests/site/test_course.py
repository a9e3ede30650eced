"""The course: its page, the exercises, and what each notebook's page says."""

import contextlib
import importlib
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
from bs4 import BeautifulSoup
from built import REPOSITORY, ROOT, asks

from fwlab.exercises import DERIVATIONS, EXERCISES, QUESTIONS, assert_correct, score
from fwlab.exercises.course.pairs import MEMORIES

with open(ROOT / "docs" / "course.toml", "rb") as file:
    TABLE = tomllib.load(file)
COURSE = {entry["file"]: entry for entry in TABLE["notebook"]}
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
PAGE = (ROOT / "docs" / "exercises.md").read_text("utf-8")
#: Examples of the page of exercises: code, and what it says that it prints.
EXAMPLES = re.findall(
    r"```python[^\n]*\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, re.DOTALL
)


def article(site, name: str) -> str:
    """The HTML of a page, without menus."""
    html = (site / name).read_text("utf-8")
    return re.search("<article.*?</article>", html, re.DOTALL)[0]


def text(html: str) -> str:
    return " ".join(unescape(re.sub("<[^>]*>", "", html)).split())


def cells(name: str, kind: str) -> list[str]:
    notebook = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text("utf-8"))
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == kind]


def targets(html: str, page: str) -> list[str]:
    """What a page links to, as files of the site."""
    links = re.findall(r'href="([^"#:]+)(?:#[^"]*)?"', html)
    folder = posixpath.dirname(page)
    return [posixpath.normpath(posixpath.join(folder, link)) for link in links]


def listed(html: str, kind: str) -> str:
    (found,) = re.findall(f'<ul class="{kind}".*?</ul>', html, re.DOTALL)
    return found


def test_every_notebook_has_an_entry_and_every_entry_a_notebook():
    assert list(COURSE) == NOTEBOOKS  # in order, none twice
    assert len(TABLE["notebook"]) == len(COURSE)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_entry_is_what_the_notebook_says(name):
    entry = COURSE[name]
    words = "\n".join(cells(name, "markdown"))
    assert re.findall(r"^# (.+)$", words, re.MULTILINE) == [entry["title"]]
    code = "\n".join(cells(name, "code"))
    asked = {*re.findall(r'\b(?:check|golf)\((?:\w+, )?"?(\w+)', code)}
    assert len(asked) == entry["exercises"]
    assert asked <= EXERCISES.keys()
    before = NOTEBOOKS[: NOTEBOOKS.index(name)]
    assert set(entry["after"]) <= set(before)
    assert bool(entry["after"]) == (name != NOTEBOOKS[0])
    following = [*NOTEBOOKS[1:], "exercises.md"][NOTEBOOKS.index(name)]
    assert entry["next"] == following


def test_a_way_leaves_out_nothing_that_it_needs():
    for way in TABLE["way"]:
        for i, stem in enumerate(way["files"]):
            missing = set(COURSE[stem]["after"]) - set(way["files"][:i])
            assert not missing, f"{way['name']}: {stem} needs {missing}"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_time_is_by_a_readers_pace(name, monkeypatch):
    """As the notebook, the map and the course page tell it."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "hooks")
    took = importlib.import_module("course").minutes(name)
    assert COURSE[name]["read"] == took
    told = re.findall(r"Time: (\d+) minutes", "\n".join(cells(name, "markdown")))
    assert told in ([], [str(COURSE[name]["read"])])


def test_missing_entry_and_missing_notebook_are_warned_of(monkeypatch, caplog):
    """mkdocs build --strict fails at a warning."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "hooks")
    hook = importlib.import_module("course")
    hook.on_files([], None)
    assert caplog.messages == []
    entries = [entry for entry in TABLE["notebook"] if entry["file"] != NOTEBOOKS[1]]
    entries.append({**entries[0], "file": "99_none"})
    monkeypatch.setattr(hook, "_table", lambda: {"notebook": entries})
    hook.on_files([], None)
    assert caplog.messages == [
        f"notebooks/{NOTEBOOKS[1]}.ipynb has no entry in docs/course.toml",
        "docs/course.toml names notebooks/99_none.ipynb: no such file",
    ]


def test_exercises_are_all_asked_for_and_graded():
    code = {n: "\n".join(cells(n, "code")) for n in NOTEBOOKS}
    for name, exercise in EXERCISES.items():
        asks = re.search(rf"\b(check|golf)\({name}\b", code.get(exercise.notebook, ""))
        assert asks, f"{exercise.notebook!r} does not check {name}"
    for each in (*QUESTIONS.values(), *DERIVATIONS.values()):
        assert each.notebook in NOTEBOOKS, each.name
    assert sum(entry["exercises"] for entry in COURSE.values()) == len(EXERCISES)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_head_and_foot_of_a_notebook(site, name):
    entry, page = COURSE[name], f"notebooks/{name}.html"
    html = article(site, page)
    head = listed(html, "nb-facts")
    top = html[: html.index(head)]
    assert "</h1>" in top and "<h2" not in top
    github = REPOSITORY.startswith("https://github.com/")
    assert ("Open in Colab</a>" in top) == github
    assert entry["run"] in text(head)
    assert f"{entry['read']} minutes" in text(head)
    for idea in entry["ideas"]:
        assert idea in text(head)
    linked = targets(head, page)
    assert [f"notebooks/{stem}.html" for stem in entry["after"]] == [
        t for t in linked if t.startswith("notebooks/") and t.endswith(".html")
    ]
    # Each exercise by its name, and where it is on the page.
    anchors = re.findall(r'href="#(\w+)"', head)
    assert len(anchors) == entry["exercises"]
    assert all(f' id="{anchor}"' in html for anchor in anchors)
    assert all((site / target).is_file() for target in linked)

    # What is told there is told nowhere else.
    words = text(html)
    assert (words.count("Time:"), words.count("Needs:")) == (0, 1)
    source = (ROOT / "notebooks" / f"{name}.ipynb").read_text("utf-8")
    for told in ("Equation numbers are", "The annotated", "numbers with a letter"):
        assert words.count(told) >= (told in source)
    foot = listed(html, "nb-next")
    assert '<div class="nb-' not in html[html.index(foot) :]
    assert text(foot).startswith("Next:")
    following = entry["next"].removesuffix(".md")
    wanted = following if entry["next"].endswith(".md") else f"notebooks/{following}"
    linked = targets(foot, page)
    assert linked[0] == f"{wanted}.html"
    for kind in ("figures", "annotated", "kernels"):
        assert {f"{kind}/{page}.html" for page in entry[kind]} <= set(linked)
    assert all((site / target).is_file() for target in linked)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_only_draws_is_folded(site, name):
    """Under what it draws; what it has drawn stays to be seen."""
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


def test_map_of_the_course(site):
    """A box and a link for each notebook, an arrow for each need, in words
    as well.
    """
    html = article(site, "course.html")
    drawing = re.search('<svg class="course-map".*?</svg>', html, re.DOTALL)[0]
    assert targets(drawing, "course.html") == [f"notebooks/{n}.html" for n in NOTEBOOKS]
    assert all((site / target).is_file() for target in targets(drawing, "course.html"))
    needs = [(name, stem) for name in NOTEBOOKS for stem in COURSE[name]["after"]]
    assert drawing.count("<path") == len(needs)
    words = text(html[html.index(drawing) + len(drawing) :])
    # A notebook has one number: here, in its list and in the navigation.
    whole = (site / "course.html").read_text("utf-8")
    for name in NOTEBOOKS:
        links = re.findall(rf'<a href="notebooks/{name}.html".*?</a>', whole, re.S)
        numbers = {
            m[1] for link in links if (m := re.match(r"\s*0*(\d+\.) ", text(link)))
        }
        assert numbers == {f"{int(name[:2])}."}
    for name in NOTEBOOKS[1:]:
        before = " and ".join(str(int(stem[:2])) for stem in COURSE[name]["after"])
        assert f"{int(name[:2])} builds on {before}" in words


def test_map_can_be_read(look):
    """On a phone above its list, elsewhere beside it, whole and as long as it is read."""
    tab = look("course.html", width=390)
    assert tab.evaluate(asks.MAP) == []
    for width in (1024, 1280):
        tab.set_viewport_size({"width": width, "height": 800})
        assert tab.evaluate(asks.MAP) == []
        heading = tab.locator("article h3").nth(9)
        heading.scroll_into_view_if_needed()
        drawn, listed = (
            each.bounding_box() for each in (tab.locator(".course-map"), heading)
        )
        assert listed["x"] + listed["width"] < drawn["x"]
        assert drawn["y"] >= 48 and drawn["y"] + drawn["height"] <= 800
    # In words, it is for those who do not see it.
    assert tab.locator(".fw-heard").bounding_box()["height"] == 1


def test_course_page_has_all_that_is_known(site):
    html = article(site, "course.html")
    words, linked = text(html), targets(html, "course.html")
    for name, entry in COURSE.items():
        for key in ("title", "about", "run"):
            assert entry[key] in words
        assert entry["can"][1:] in words
        for kind in ("figures", "annotated", "kernels"):
            assert {f"{kind}/{page}.html" for page in entry[kind]} <= set(linked)
        assert f'id="{name}"' in html
    assert all(f'href="exercises.html#{name}"' in html for name in EXERCISES)
    assert "<!-- course:" not in html


@pytest.mark.parametrize("name", EXERCISES)
def test_exercise_is_listed_as_it_is_checked(site, name):
    html = article(site, "exercises.html")
    part = f'<h3[^>]* id="{name}".*?(?=<h[23] |</article>)'
    part = re.search(part, html, re.DOTALL)[0]
    lines = [text(item) for item in re.findall("<ol>(.*?)</ol>", part, re.DOTALL)]
    properties = [each.says for each in EXERCISES[name].properties]
    assert lines == [" ".join(properties)]
    assert f"def {name}(" in text(part)
    assert f"notebooks/{EXERCISES[name].notebook}.html" in targets(
        part, "exercises.html"
    )
    assert f"Difficulty: {EXERCISES[name].difficulty} of 5" in text(part)


def test_exercises_page_folds_its_answers(site):
    """Each is there, closed, and nowhere else on the page."""
    page = BeautifulSoup(article(site, "exercises.html"), "html.parser")
    answers = [box.extract() for box in page.select(".fw-answer")]
    shown = text(str(page))
    for exercise in EXERCISES.values():
        if exercise.start:  # a bug hunt shows its faulty code
            shown = shown.replace(" ".join(exercise.start.split()), "")
    for box, (name, exercise) in zip(answers, EXERCISES.items(), strict=True):
        assert box.select("details") and not box.select("details[open]")
        code = box.find("code").get_text()
        assert f"def {name}(" in code and exercise.hints[-1] in box.get_text()
        assert " ".join(code.split()[-6:]) not in shown, name


def test_examples_print_what_the_page_says(request):
    # What the page adds is gone afterwards.
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
    assert compared == 6
    # The example of a new exercise is one: it tells right from wrong.
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


def test_the_cheat_sheet_scores_what_the_notebooks_score(site):
    html = article(site, "cheatsheet.html")
    for known in MEMORIES.values():
        for name, memory in known.items():
            first, second = score(memory)
            cells = (re.escape(name), f"{first:.3f}", f"{second:.3f}")
            row = r"\s*".join(f"<td>{cell}</td>" for cell in cells)
            assert re.search(row, html), name


def test_the_code_of_the_cheat_sheet_runs():
    page = (ROOT / "docs" / "cheatsheet.md").read_text("utf-8")
    names = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, names)
    assert names["y"].shape == (2, 128, 64)
