"""Notebooks for students, and grades for what comes back."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
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


#: Graded between two right answers.
FIRST = """
from fwlab.exercises import check

def write(W, k, v):
    return W + v[..., :, None] * k[..., None, :]

_ = check(write)
"""
LAST = """
import fwlab.exercises

def read_memory(W, q):
    return (W @ q[..., None])[..., 0]

fwlab.exercises.check(read_memory)
"""
#: A notebook that asks for more than its cells check.
LISTED = ["write", "read_memory", "delta_step"]
NO = "no network and no other programs"
#: Cells that break out of a notebook, break it, or mean no harm and do; and part of the
#: error that the teacher is told ("" = none). None does harm if nothing holds it.
HOSTILE = [
    # Leaving, and never ending.
    ("import sys; sys.exit(3)", "SystemExit: 3"),
    ("import os; os.kill(os.getppid(), 0)", NO),
    ("import time\nwhile True: time.sleep(1)", "more than 12 seconds"),
    (
        "import threading, time\nthreading.Thread(target=time.sleep, args=[1e6]).start()",
        "",
    ),
    ("import atexit, time; atexit.register(time.sleep, 1e6)", ""),
    # Errors and output.
    (
        "class E(Exception):\n    def __str__(self): 1 / 0\nraise E",
        "an error whose message cannot be read",
    ),
    ("raise ValueError('\\x1b[2J\\x1b]0;owned\\x07')", "ValueError:  [2J ]0;owned"),
    ("raise ValueError('x' * 10**7)", "ValueError: xxx"),
    ("(" * 100_000, "SyntaxError"),
    ("x = '\ud800'", "Error"),
    ("import os; [os.close(n) for n in range(3)]", ""),
    # Programs, network, memory and disk.
    ("!sleep 60", NO),
    ("import os; os.forkpty()", NO),
    (
        "import multiprocessing as m, time\n"
        "m.get_context('spawn').Process(target=time.sleep, args=[60]).start()",
        NO,
    ),
    ("import urllib.request as u; u.urlopen('http://127.0.0.1:9', timeout=1)", NO),
    ("x = bytearray(2**40)", "MemoryError"),
    ("open('x', 'wb').truncate(2**31)", "File too large"),
    # What the checks use, and what they say.
    (
        "class E(BaseException):\n    def __str__(self): raise E\n"
        "def delta_step(*given): raise E\ncheck(delta_step)",
        "",
    ),
    ("import torch; torch.set_default_device('meta')", ""),
    (
        "import json, os, torch\njson.dumps = os.write = torch.equal = lambda *_: True",
        "",
    ),
    (
        "import fwlab.exercises\n"
        "check = fwlab.exercises.checker.check = lambda *given: True\n"
        "def delta_step(*given): pass\ncheck(delta_step)",
        "",
    ),
    (
        "import json, os\n"
        "what = json.dumps({'name': 'delta_step', 'right': True, 'why': ''})\n"
        "for n in range(4096):\n"
        "    try: os.write(n, f'\\n{what}\\n'.encode())\n"
        "    except OSError: pass",
        "",
    ),
]
#: Where nothing holds C code, it may start what nobody sees.
FORK = (
    "import ctypes, os, time\npid = ctypes.CDLL(None).fork()\n"
    "if pid == 0:\n    os.setsid()\n    time.sleep(60)\n"
)
SYSTEM = "import ctypes; ctypes.CDLL(None).system(b'setsid sleep 60 &')"
CATCHES = (
    "import time\nwhile True:\n    try: time.sleep(1)\n    except BaseException: pass"
)


def write_notebook(path: Path, *sources: str, listed: list[str] | None = None) -> Path:
    """Write a notebook of these cells, which lists these exercises."""
    code = [{"cell_type": "code", "source": source} for source in sources]
    metadata = {"fwlab": {"exercises": listed}} if listed else {}
    path.write_text(json.dumps({"metadata": metadata, "cells": code}), "utf-8")
    return path


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
        graded = grade(write_notebook(tmp_path / "a", *cells, listed=[*EXERCISES]))
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
    path = write_notebook(
        tmp_path / "answers.ipynb",
        *(FIRST, WAYS, *OURS, sees),
        *(source for source, _ in HOSTILE),
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
    expected = [error for _, error in HOSTILE if error]
    if "bwrap" in graded["kept"]:
        expected = ["FileNotFoundError", *expected]
    assert len(errors) == len(expected)
    for error, part in zip(errors, expected, strict=True):
        assert part in error
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
    leaves = [FORK, "import os; os._exit(0)"]
    path = write_notebook(tmp_path / "a", FIRST, *leaves, "check(sum_normalize)")
    graded = grade(path)
    assert "ended Python" in graded["ended"] and not graded["listed"]
    assert not (graded["kept"] and left())
    write, other = graded["exercises"]
    assert write == {"name": "write", "right": True, "why": ""}
    assert other["name"] == "sum_normalize" and "ended Python" in other["why"]
    text = report(graded)
    assert "not finished: the notebook ended" in text and "lists no exercises" in text


def test_a_notebook_that_cannot_be_stopped(tmp_path, left, monkeypatch):
    stubborn = [SYSTEM, CATCHES]
    path = write_notebook(tmp_path / "a", *stubborn, LAST, listed=LISTED)
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
    write_notebook(path, listed=["write", "sum_normalize"])
    bad = [tmp_path / str(number) for number in range(len(UNREADABLE))]
    for each, make in zip(bad, UNREADABLE.values(), strict=True):
        make(each)
    right = write_notebook(tmp_path / "right.ipynb", FIRST)
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
    first = write_notebook(tmp_path / "a.ipynb", deletes)
    answer = (
        "from fwlab.exercises import check\ndef twice(x): return 2 * x\ncheck(twice)"
    )
    write_notebook(other, answer)
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
    right, out = write_notebook(tmp_path / "right.ipynb", FIRST), tmp_path / "out"
    paths = str(tmp_path / "no-file"), str(right)
    found = fwlab("exercises", "grade", *paths, "--out", str(out))
    said = f"fwlab: the process that grades did not reach the first cell: {says}\n"
    assert found == (2, "", said) and not out.exists()


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
