"""Notebooks for students, and grades for what comes back."""

import json
import os
import re
import subprocess
import sys
import tempfile
from ctypes.util import find_library
from pathlib import Path
from uuid import uuid4

import hostile
import pytest
from hostile import CELLS, FIRST, LAST, LISTED
from terminal import fwlab

from fwlab.exercises import EXERCISES, TOPICS, grading
from fwlab.exercises.graded import asked
from fwlab.exercises.grading import exercises_of, grade, report
from fwlab.exercises.helping import source

ROOT = Path(__file__).parent.parent
#: Every way to check an answer, and answers of the same name.
WAYS = """
import fwlab.exercises as exercises
from fwlab.exercises import assert_correct
from fwlab.ops.delta.delta import delta_step as right

def mine(W, k, v):
    return W + v[..., :, None] * k[..., None, :]

for answer, name in [(mine, "write")]:
    check(answer=answer, name=name)

def mine(x):
    return x / x.sum()

exercises.check(mine, "sum_normalize")

def mine(W, q):
    return (W @ q[..., None])[..., 0]

assert_correct(mine, "read_memory")

def delta_step(*given):
    return right(*given)
"""
#: A function of the package under your name.
OURS = (
    "def dpfp(x, nu): ...",
    "check(dpfp)",
    "dpfp = exercises.yours_or(dpfp)\ncheck(dpfp, 'dpfp')",
)
#: What the notebook finds of the teacher's: nothing.
SEES = """
import os, sys
assert len(sys.argv) == 1, sys.argv
assert "SECRET" not in os.environ, "the environment"
assert os.environ["HOME"] != {home!r} and not os.listdir(), "home"
if not os.path.exists({secret!r}):  # in bwrap, also as root
    assert "CapEff:\\t" + "0" * 16 in open("/proc/self/status").read()
    disk = os.statvfs("/dev/shm")
    assert disk.f_blocks * disk.f_frsize <= 2**20
open({secret!r})
"""


@pytest.fixture(scope="module")
def handouts(tmp_path_factory):
    """What `fwlab exercises export` writes."""
    folder = tmp_path_factory.mktemp("handouts")
    assert fwlab("exercises", "export", str(folder))[0] == 0
    return sorted(folder.glob("*.ipynb"))


@pytest.fixture
def left(monkeypatch):
    """Yield a function that counts the processes of a notebook that are alive."""
    mark = f"fwlab-{uuid4()}"
    monkeypatch.setenv("TZ", mark)  # a notebook sees it, and so do its children

    def count() -> int:
        alive = 0
        for place in Path("/proc").glob("[0-9]*/environ"):
            try:
                alive += mark.encode() in place.read_bytes()
            except OSError:  # of somebody else, or gone
                continue
        return alive

    return count


def outcome(graded: dict) -> tuple[set[str], list[str]]:
    right = {each["name"] for each in graded["exercises"] if each["right"]}
    return right, [each["error"] for each in graded["errors"]]


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
        del content["metadata"]["fwlab"]  # as of a handout that a teacher wrote
        own = tmp_path / path.name
        own.write_text(json.dumps(content), "utf-8")
        assert exercises_of(own) == names
    assert sorted(exported) == sorted(EXERCISES)


def answered(path, answer):
    """The code of an exported notebook, each function to write replaced by `answer`."""
    content = json.loads(path.read_text("utf-8"))
    code = "\n".join(c["source"] for c in content["cells"] if c["cell_type"] == "code")
    for name in exercises_of(path):
        blank = EXERCISES[name].signature
        code = code.replace(blank, answer(name, blank))
    return code


def test_blank_notebooks_score_nothing_and_solutions_everything(handouts, tmp_path):
    """Of each topic, one is graded: all are checked in test_exercises.py."""
    firsts = {next(iter(exercises)) for exercises in TOPICS.values()}

    def solved(name, blank):
        lines = source(EXERCISES[name]).splitlines()
        return "\n".join(x for x in lines if not re.match("import|from", x))

    def first(name, blank):
        return solved(name, blank) if name in firsts else blank

    for answer, right in ((lambda name, blank: blank, set()), (first, firsts)):
        cells = [answered(path, answer) for path in handouts]
        graded = grade(hostile.notebook(tmp_path / "a", *cells, listed=[*EXERCISES]))
        assert {e["name"] for e in graded["exercises"] if e["right"]} == right
        assert len(graded["exercises"]) == len(EXERCISES)
        assert graded["ended"] == "finished" and not graded["errors"]
    # Solutions need no imports but those that `export` writes.
    for path in handouts:
        (tmp_path / f"{path.stem}.py").write_text(answered(path, solved), "utf-8")
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821"]
    done = subprocess.run([*ruff, tmp_path], capture_output=True, encoding="utf-8")
    assert not done.returncode, done.stdout


OWN = """
import torch
from fwlab.exercises import EXERCISES, Exercise, shape

def draw(generator, size):
    return {"x": torch.zeros(size)}

EXERCISES["twice"] = Exercise(
    "twice", "**Twice.** Return $2 x$.", lambda x: 2 * x, (shape("is it", draw, [2]),), ()
)
"""


def test_exercises_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr("fwlab.exercises.EXERCISES", dict(EXERCISES))
    own, folder = tmp_path / "my_exercises.py", tmp_path / "out"
    own.write_text(OWN, "utf-8-sig")  # as some editors do
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
    # An export writes over nothing, and writes nothing else then.
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


def test_grades(tmp_path, monkeypatch, left):
    """What a check was given counts, when it was given it."""
    secret = tmp_path / "secret"
    secret.write_text("answers")
    monkeypatch.setenv("SECRET", "token")
    sees = SEES.format(secret=str(secret), home=str(Path.home()))
    cells = [CELLS[name] for name in hostile.QUICK]
    path = hostile.notebook(
        tmp_path / "answers.ipynb",
        *(FIRST, WAYS, *OURS, sees),
        *(cell.source for cell in cells),
        LAST,
        # Wrong now, but right before.
        "%%time\nfrom fwlab.exercises import check\ncheck(read_memory, 'write')",
        listed=["write", "sum_normalize", *LISTED[1:], "dpfp", "deleted"],
    )
    graded = grade(path, cell_seconds=12)
    assert graded["ended"] == "finished" and graded["listed"] and not left()
    right, errors = outcome(graded)
    assert right == {"write", "read_memory"}
    why = {each["name"]: each["why"] for each in graded["exercises"]}
    assert "Each key has its own" in why["sum_normalize"]
    assert "message cannot be read" in why["delta_step"]
    assert why["dpfp"] == "this is fwlab's own function"
    assert why["deleted"] == "not checked"
    # assert_correct raises nothing here, and another notebook's file is not there
    expected = [cell.error for cell in cells if cell.error]
    if "bwrap" in graded["kept"]:
        expected = ["FileNotFoundError", *expected]
    assert len(errors) == len(expected)
    for error, part in zip(errors, expected, strict=True):
        assert part.replace("3 seconds", "12 seconds") in error
        assert len(error) < 400 and error.isprintable()
    assert report(graded).startswith(
        f"{path}: 2 of 6 right\n✓ write\n✗ sum_normalize\n"
    )
    assert report(graded | {"notebook": "\udcff\x1b"}).encode()  # can be printed


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        ("check(mine, 'write')", "write"),
        ("check(mine, name='write')", "write"),
        ("check(name='write', answer=delta_step)", "write"),
        ("check(answer=write)", "write"),
        ("check(mine)\ncheck()", None),
        ("%matplotlib inline\n_ = check(write)", "write"),
        ("import fwlab.exercises\nfwlab.exercises.check(write)", "write"),
        ("def write(W, k, v):\n    return (\n\n_ = check(write)", "write"),
        ("check(write) + " + "(" * 1000, None),
    ],
)
def test_exercises_that_a_handout_checks(cell, name):
    assert asked([cell]) == ([name] if name else [])


def test_a_notebook_that_leaves(tmp_path, left):
    """With an answer that is right; and exercises counted by another notebook."""
    leaves = [CELLS[name].source for name in ("fork from C", "os._exit")]
    path = hostile.notebook(tmp_path / "a", FIRST, *leaves, "check(sum_normalize)")
    graded = grade(path)
    assert "ended Python" in graded["ended"] and not graded["listed"]
    assert not (graded["kept"] and left())
    write, other = graded["exercises"]
    assert write == {"name": "write", "right": True, "why": ""}
    assert other["name"] == "sum_normalize" and "ended Python" in other["why"]
    text = report(graded)
    assert "not finished: the notebook ended" in text and "lists no exercises" in text


def test_a_notebook_that_cannot_be_stopped(tmp_path, left, monkeypatch):
    stubborn = [CELLS[n].source for n in ("system from C", "catches everything")]
    path = hostile.notebook(tmp_path / "a", *stubborn, LAST, listed=LISTED)
    # A machine that is too slow is no fault of the notebook.
    with monkeypatch.context() as slow:
        slow.setattr(grading, "START", 0)
        with pytest.raises(ChildProcessError, match="first cell: the time limit"):
            grade(path, seconds=0.001)
    graded = grade(path, seconds=2)  # from the first cell on
    assert graded["ended"] == "the time limit, 2 seconds"
    assert not (graded["kept"] and left())
    assert not any(each["right"] for each in graded["exercises"])
    assert "not checked: the time limit" in report(graded)


def zeros(path: Path) -> None:
    with path.open("w") as file:
        file.truncate(2**31)


UNREADABLE = {
    "no file": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a device": lambda path: os.mkfifo(path),
    "a file of 2048 MiB": zeros,
    "no JSON": lambda path: path.write_bytes(os.urandom(999)),
    "is no JSON": lambda path: path.write_text('{"cells": [' + "[" * 10**6),
    "that is no JSON": lambda path: path.write_bytes(b""),
    "without cells": lambda path: path.write_text("{}"),
    "file without cells": lambda path: path.write_text("[1]"),
    "a file without cells": lambda path: path.write_text(
        '{"cells": [{"cell_type": "code", "source": [1]}]}'
    ),
}


def test_the_command(tmp_path, monkeypatch):
    """A file that cannot be read is a grade of its own, and the grades so far
    are in the file.
    """
    path, out = tmp_path / "handout.ipynb", tmp_path / "out"
    hostile.notebook(path, listed=["write", "sum_normalize"])
    bad = [tmp_path / str(number) for number in range(len(UNREADABLE))]
    for each, make in zip(bad, UNREADABLE.values(), strict=True):
        make(each)
    right = hostile.notebook(tmp_path / "right.ipynb", FIRST)
    arguments = [*map(str, [*bad, right]), "--out", str(out), "--handout", str(path)]
    code, text, _ = fwlab("exercises", "grade", *arguments)
    assert code == 0 and f"{right}: 1 of 2 right" in text
    *unreadable, graded = json.loads(out.read_text("utf-8"))
    for each, file, reason in zip(unreadable, bad, UNREADABLE, strict=True):
        assert each["notebook"] == str(file) and outcome(each) == (set(), [])
        assert len(each["exercises"]) == 2
        assert f"expected {file} to be a notebook, got" in each["ended"]
        assert reason in each["ended"]
    assert outcome(graded) == ({"write"}, [])

    def interrupt(submission, *limits):  # by the teacher
        if submission.notebook == str(right):
            raise KeyboardInterrupt
        return grade(submission, *limits)

    out.unlink()
    monkeypatch.setattr(grading, "grade", interrupt)
    assert fwlab("exercises", "grade", *arguments)[0] == 130
    assert len(json.loads(out.read_text("utf-8"))) == len(bad)

    listed = fwlab("exercises", "list")[1]
    assert all(name in listed for name in EXERCISES)
    wrong = ["grade", str(right), "--handout", str(bad[1])]
    for arguments in (["grade"], ["export"], wrong):
        code, _, error = fwlab("exercises", *arguments)
        assert code == 2 and "expected" in error and error.count("\n") == 1


def test_a_notebook_deletes_the_others(tmp_path, monkeypatch):
    """Where nothing keeps it in, which the teacher is told before it runs."""
    monkeypatch.setattr(grading, "_tried", lambda: ((), []))
    own, other = tmp_path / "own.py", tmp_path / "b.ipynb"
    own.write_text(OWN)
    monkeypatch.setattr("fwlab.exercises.EXERCISES", dict(EXERCISES))
    deletes = f"import os\nfor path in {[str(own), str(other)]}: os.remove(path)"
    first = hostile.notebook(tmp_path / "a.ipynb", deletes)
    answer = (
        "from fwlab.exercises import check\ndef twice(x): return 2 * x\ncheck(twice)"
    )
    hostile.notebook(other, answer)
    both = map(str, (first, other))
    code, text, error = fwlab("exercises", "grade", *both, "--from", str(own))
    assert code == 0 and f"{other}: 1 of 1 right" in text and not other.exists()
    assert error.startswith("fwlab: grading without bwrap and libseccomp: see")


@pytest.mark.parametrize(
    ("python", "says"),
    [
        ("", 'it needs the package IPython: pip install "fwlab[train]"'),
        ("kill -9 $$", "signal 9: perhaps the memory limit"),
        ("exit 0", "it ended Python"),
        ("echo 'no torch' >&2", "no torch"),
    ],
)
def test_what_is_no_fault_of_a_notebook(python, says, tmp_path, monkeypatch):
    """Nothing is graded then, not even what is no notebook."""
    monkeypatch.setattr(grading, "_tried", grading._tried.__wrapped__)
    monkeypatch.setattr(grading, "_bwrap", lambda: ("/bin/false",))
    if python:
        command = tmp_path / "python"
        command.write_text(f"#!/bin/sh\n{python}\n")
        command.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(command))
    else:
        error = 'raise ModuleNotFoundError("No module", name="IPython")'
        (tmp_path / "IPython.py").write_text(error)
        places = [str(tmp_path), *grading._path()]
        monkeypatch.setattr(grading, "_path", lambda: places)
    right, out = hostile.notebook(tmp_path / "right.ipynb", FIRST), tmp_path / "out"
    paths = str(tmp_path / "no-file"), str(right)
    found = fwlab("exercises", "grade", *paths, "--out", str(out))
    said = f"fwlab: the process that grades did not reach the first cell: {says}\n"
    assert found == (2, "", said) and not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("bwrap", [True, False], ids=["bwrap", "plain"])
@pytest.mark.parametrize("name", CELLS)
def test_hostile_notebooks(name, bwrap, tmp_path, monkeypatch, left):
    cell = CELLS[name]
    if not bwrap:
        monkeypatch.setattr(grading, "_tried", lambda: ((), []))
    if not find_library("seccomp") and "C" in name.split():
        pytest.skip("nothing on this machine holds C code")
    path = hostile.notebook(tmp_path / "a", FIRST, cell.source, LAST, listed=LISTED)
    waits = "more than" in cell.error
    seconds = 40 if cell.ended == hostile.LIMIT else 600
    # Not in tmp_path: pytest cannot delete what "deep folders" would leave there.
    with tempfile.TemporaryDirectory() as places:
        monkeypatch.setattr(tempfile, "tempdir", places)
        graded = grade(path, seconds, cell_seconds=3 if waits else 60)
        assert not left() and not os.listdir(places)
    right, errors = outcome(graded)
    assert right == ({"write"} if cell.ended else {"write", "read_memory"})
    assert cell.ended in graded["ended"]
    assert bool(cell.ended) == (graded["ended"] != "finished")
    assert len(errors) == bool(cell.error)
    for error in errors:
        assert cell.error in error and len(error) < 400 and error.isprintable()


def test_tasks_are_those_of_the_notebooks():
    """And the line to start from, too, or the one whose function has a bug."""
    cells = [
        "".join(cell["source"])
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
        for cell in json.loads(path.read_text("utf-8"))["cells"]
    ]

    def plain(text):
        return "".join(text.split()).replace(",)", ")")

    cells = [plain(cell) for cell in cells]
    once = []
    for name, exercise in EXERCISES.items():
        # Without the imports of a bug hunt, which a notebook has above.
        start = re.sub(r"^from .*\n+", "", exercise.signature, flags=re.M)
        wanted = plain(exercise.task.removeprefix("**")), plain(start)
        if all(sum(part in cell for cell in cells) == 1 for part in wanted):
            once.append(name)
    assert once == list(EXERCISES)
