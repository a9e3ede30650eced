"""Test the export of notebooks for students, and the grades of their answers."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from terminal import fwlab

from fwlab.exercises import EXERCISES, TOPICS, grading
from fwlab.exercises.grading import asked, exercises_of, grade, report
from fwlab.exercises.notation import printed

ROOT = Path(__file__).parent.parent


def write_notebook(path: Path, *sources: str, listed: list[str] | None = None) -> Path:
    """Write a notebook of code cells, with the exercises `listed` in its metadata."""
    code = [{"cell_type": "code", "source": source} for source in sources]
    metadata = {"fwlab": {"exercises": listed}} if listed else {}
    path.write_text(json.dumps({"metadata": metadata, "cells": code}), "utf-8")
    return path


@pytest.fixture(scope="module")
def handouts(tmp_path_factory):
    """Return the paths of the notebooks that `fwlab exercises export` writes."""
    folder = tmp_path_factory.mktemp("handouts")
    assert fwlab("exercises", "export", str(folder))[0] == 0
    return sorted(folder.glob("*.ipynb"))


def test_notebooks_for_students(handouts, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    exported = []
    for path in handouts:
        nbformat.validate(nbformat.read(path, as_version=4))
        names = exercises_of(path)
        exported += names
        content = json.loads(path.read_text("utf-8"))
        sources = ["".join(cell["source"]) for cell in content["cells"]]
        text = "\n".join(sources)
        for name in names:
            assert EXERCISES[name].task in text and f"def {name}(" in text
        assert asked([s for s in sources if "check(" in s]) == names
        del content["metadata"]["fwlab"]  # Handouts by teachers lack this entry.
        own = tmp_path / path.name
        own.write_text(json.dumps(content), "utf-8")
        assert exercises_of(own) == names
    assert sorted(exported) == sorted(EXERCISES)


def answered(path, answer):
    """Return an exported notebook's code with `answer` in place of each blank."""
    content = json.loads(path.read_text("utf-8"))
    code = "\n".join(c["source"] for c in content["cells"] if c["cell_type"] == "code")
    for name in exercises_of(path):
        blank = EXERCISES[name].signature
        code = code.replace(blank, answer(name, blank))
    return code


def test_blank_notebooks_score_nothing_and_solutions_everything(handouts, tmp_path):
    """Blank notebooks have no right answers; notebooks with solutions are right."""
    firsts = {next(iter(exercises)) for exercises in TOPICS.values()}

    def solved(name, blank):
        lines = printed(EXERCISES[name]).splitlines()
        return "\n".join(x for x in lines if not re.match("import|from", x))

    def first(name, blank):
        return solved(name, blank) if name in firsts else blank

    for answer, right in ((lambda name, blank: blank, set()), (first, firsts)):
        cells = [answered(path, answer) for path in handouts]
        graded = grade(write_notebook(tmp_path / "a", *cells, listed=[*EXERCISES]))
        assert {e["name"] for e in graded["exercises"] if e["right"]} == right
        assert len(graded["exercises"]) == len(EXERCISES)
        assert graded["ended"] == "finished" and not graded["errors"]
    # Solutions need only the imports that `export` writes.
    for path in handouts:
        (tmp_path / f"{path.stem}.py").write_text(answered(path, solved), "utf-8")
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821"]
    done = subprocess.run([*ruff, tmp_path], capture_output=True, encoding="utf-8")
    assert not done.returncode, done.stdout


OWN = '''
import torch
from fwlab.exercises import exercise

def draw(generator, size=2):
    return {"x": torch.zeros(size)}

@exercise(draw)
def twice(x):
    """
    **Twice.** Return $2 x$.

    ✓ is it
        agrees()
    """
    return 2 * x
'''


@pytest.fixture
def own(tmp_path):
    """Write a file that defines an exercise; remove the exercise after the test."""
    file = tmp_path / "my_exercises.py"
    file.write_text(OWN, "utf-8-sig")  # Some editors write a byte order mark.
    yield file
    EXERCISES.pop("twice", None)


def test_exercises_of_ones_own(own, tmp_path):
    folder = tmp_path / "out"
    given = ("--from", str(own))
    assert "twice" in fwlab("exercises", "list", *given)[1]
    assert fwlab("exercises", "export", str(folder), *given)[0] == 0
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["my_exercises.ipynb", "my_exercises.py"]
    notebook = folder / "my_exercises.ipynb"
    blank = notebook.read_text()
    answer = blank.replace("def twice(x): ...", "def twice(x): return x + x")
    notebook.write_text(answer)
    said = fwlab("exercises", "grade", str(notebook), *given)[1]
    assert "1 of 1 right" in said and "raised" not in said
    # An export that would replace a file writes no file at all.
    (folder / own.name).unlink()
    code, _, error = fwlab("exercises", "export", str(folder), *given)
    assert code == 2 and f"{notebook} is there" in error and "--force" in error
    assert notebook.read_text() == answer and len([*folder.iterdir()]) == 1
    assert fwlab("exercises", "export", str(folder), *given, "--force")[0] == 0
    assert notebook.read_text() == blank
    own.write_text("import torch")
    code, _, error = fwlab("exercises", "list", *given)
    assert code == 2 and "expected my_exercises.py to add exercises" in error


def test_export_of_a_notebook_without_its_results(tmp_path):
    course = ROOT / "notebooks" / "00_start_here.ipynb"
    fwlab("exercises", "export", str(tmp_path), str(course))
    found, wanted = (
        json.loads(path.read_text("utf-8"))["cells"]
        for path in (tmp_path / course.name, course)
    )
    assert [c["source"] for c in found] == [c["source"] for c in wanted]
    code = [cell for cell in found if cell["cell_type"] == "code"]
    assert not any(c["outputs"] or c["execution_count"] for c in code)


# --- Grades ------------------------------------------------------------------


@pytest.fixture(params=["bubblewrap", "none"])
def kept(request, monkeypatch):
    """Run a test with and without bubblewrap; return True with bubblewrap."""
    if request.param == "none":
        monkeypatch.setattr(grading, "_bubblewrap", lambda: ())
    elif not grading._bubblewrap():
        pytest.skip("bubblewrap does not work here")
    return request.param != "none"


#: Cells with answers to `write`, `sum_normalize` and `delta_step`.
WRITE = """
from fwlab.exercises import check

def write(W, k, v):
    return W + v[..., :, None] * k[..., None, :]

_ = check(write)
"""
WRONG = """
import fwlab.exercises as exercises

def mine(x):
    return x / x.sum()

exercises.check(answer=mine, name="sum_normalize")
check(exercises.yours_or(lambda x, nu: x, "dpfp"), "dpfp")  # fwlab's own
"""
HIDDEN = """%%capture
from fwlab.exercises import assert_correct
from fwlab.ops.delta.delta import delta_step as right

def delta_step(*given):
    return right(*given)

assert_correct(delta_step)
"""
#: A cell that checks a wrong answer after a right answer.
AGAIN = "check(lambda W, k, v: W, 'write')"
FORGED = "from IPython.display import display\nimport fwlab.exercises.grading as g\n"
FORGED += "display({g.VERDICT: 5, 'text/plain': ''}, raw=True)"
ERRORS = {
    "raise ValueError('\\x1b[2J')": "ValueError: \x1b[2J",
    "x = (": "SyntaxError: ",
    "import sys; sys.exit(3)": "SystemExit: 3",
    "import os; open(os.environ['SECRET'])": "KeyError: 'SECRET'",
}


def test_grades(tmp_path, monkeypatch):
    """A grade depends on the function at the time of the check, not on later cells."""
    monkeypatch.setenv("SECRET", "token")
    names = ["write", "sum_normalize", "dpfp", "delta_step", "deleted"]
    cells = WRITE, WRONG, *ERRORS, HIDDEN, AGAIN, FORGED
    path = write_notebook(tmp_path / "answers.ipynb", *cells, listed=names)
    graded = grade(path)
    assert graded["ended"] == "finished" and graded["listed"]
    assert [each["name"] for each in graded["exercises"]] == names
    write, wrong, own, delta, deleted = graded["exercises"]
    assert write == {"name": "write", "right": True, "why": ""} and delta["right"]
    assert "Each key has its own" in wrong["why"] and not wrong["right"]
    assert own["why"] == "this is fwlab's own function" and not own["right"]
    assert deleted == {"name": "deleted", "right": False, "why": "not checked"}
    for number, (each, error) in enumerate(
        zip(graded["errors"], ERRORS.values(), strict=True), 3
    ):
        assert each["cell"] == number and each["error"].startswith(error)
    text = report(graded | {"notebook": "\udcff"})
    assert text.startswith(" : 2 of 5 right\n✓ write\n✗ sum_normalize\n")
    assert "\x1b" not in text and text.encode()


def test_an_endless_loop_ends_its_cell_or_the_notebook(tmp_path, kept):
    loop = "while True: pass"
    graded = grade(write_notebook(tmp_path / "a", loop, WRITE), cell_seconds=2)
    assert graded["ended"] == "finished" and graded["exercises"][0]["right"]
    assert graded["errors"][0]["error"] == "TimeLimit: it took more than 2 seconds"
    stubborn = "while True:\n    try: time.sleep(1)\n    except BaseException: pass"
    cells = WRITE, f"import time\n{stubborn}", "check(sum_normalize)"
    graded = grade(write_notebook(tmp_path / "a", *cells), seconds=4)
    assert graded["ended"] == "the time limit, 4 seconds" and not graded["listed"]
    write, other = graded["exercises"]
    assert write["right"] and other["why"] == "not checked: the time limit, 4 seconds"
    assert "it lists no exercises" in report(graded)


def test_a_notebook_without_memory(tmp_path):
    everything = "x = []\nwhile True: x.append(bytearray(2**26))"
    graded = grade(write_notebook(tmp_path / "a", everything, "del x", WRITE), gib=1)
    assert graded["errors"][0]["error"].startswith("MemoryError")
    assert graded["exercises"][0]["right"]
    # A notebook that ends Python has a grade, too.
    graded = grade(write_notebook(tmp_path / "a", WRITE, "import os; os._exit(3)"))
    assert graded["exercises"][0]["right"] and "Python ended (3)" in graded["ended"]


def test_a_notebook_deletes_the_others(own, tmp_path, kept):
    """Deleted files do not change grades; without bubblewrap, a warning is printed."""
    other, out = tmp_path / "b.ipynb", tmp_path / "out"
    delete = f"import os\nfor path in {[str(own), str(other)]}: os.remove(path)"
    first = write_notebook(tmp_path / "a.ipynb", delete)
    check = "from fwlab.exercises import check"
    write_notebook(other, f"{check}\ndef twice(x): return 2 * x\ncheck(twice)")
    files = [str(first), str(tmp_path), str(other), "--out", str(out)]
    code, text, error = fwlab("exercises", "grade", *files, "--from", str(own))
    assert code == 0 and f"{other}: 1 of 1 right" in text
    assert f"expected {tmp_path} to be a notebook, got no file" in text
    assert own.exists() == other.exists() == kept
    assert error.startswith("fwlab: without bubblewrap") != kept
    assert len(json.loads(out.read_text("utf-8"))) == 3


def test_children_of_a_notebook_end_with_it(tmp_path, kept):
    """Child processes end with a notebook; in a new session, only with bubblewrap."""
    mark = f"{time.time_ns() / 1e14:.12f}"  # The time identifies a process.
    options = {"start_new_session": True} if kept else {}
    start = f"import subprocess\nsubprocess.Popen(['sleep', '{mark}'], **{options})"
    for cell in (start, f"{start}\nimport os; os._exit(0)"):
        grade(write_notebook(tmp_path / "a", cell))
        processes = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
        assert not [each for each in processes if mark.encode() in each]


UNREADABLE = {
    "no file": lambda path: path.mkdir(),
    "a file of more than 64 MiB": lambda path: path.write_bytes(bytes(2**26 + 1)),
    "a file that is no JSON": lambda path: path.write_text("[" * 10**6),
    "a file without cells": lambda path: path.write_text('{"cells": [1]}'),
}


def test_what_cannot_be_graded(tmp_path, monkeypatch):
    """A file that is not a notebook gets a grade; a missing package is an error."""
    for got, make in UNREADABLE.items():
        make(path := tmp_path / got.replace(" ", "-"))
        graded = grade(path, expected=["write"])
        assert graded["ended"] == f"expected {path} to be a notebook, got {got}"
        assert not graded["exercises"][0]["right"] and not graded["errors"]
    right = write_notebook(tmp_path / "right.ipynb", WRITE)
    wrong = ["grade", str(right), "--handout", str(path)]
    for arguments in (["grade"], ["export"], wrong):
        code, _, error = fwlab("exercises", *arguments)
        assert code == 2 and "expected" in error and error.count("\n") == 1
    monkeypatch.setitem(sys.modules, "nbclient", None)
    code, text, error = fwlab("exercises", "grade", str(right))
    assert code == 2 and not text
    assert error.splitlines()[-1] == (
        'fwlab: grading needs the package nbclient: pip install "fwlab[notebooks]"'
    )


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        ("check(mine, 'write')", "write"),
        ("check(name='write', answer=delta_step)", "write"),
        ("check(lambda W, k, v: W, 'write')", "write"),
        ("%matplotlib inline\n_ = exercises.check(write)", "write"),
        ("check(mine)\ncheck()\n# check(write)", None),
    ],
)
def test_exercises_that_a_handout_checks(cell, name):
    assert asked([cell]) == ([name] if name else [])
