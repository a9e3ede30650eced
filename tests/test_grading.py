"""Notebooks for students, and grades for what comes back."""

import json
from pathlib import Path

import pytest
from terminal import fwlab

from fwlab.exercises import EXERCISES
from fwlab.exercises.grading import asked, grade, report, student_notebook

ROOT = Path(__file__).parent.parent
RIGHT = """
def write(W, k, v):
    return W + v[..., :, None] * k[..., None, :]
"""
WRONG = """
def sum_normalize(x):
    return x / x.sum()
"""
ASKED = ("read_memory", "write", "sum_normalize", "delta_step")
#: Cells that must not disturb the rest.
MISUSE = {
    "loop": "import time\nwhile True: time.sleep(1)",
    "syntax": "def broken(:",
    "network": "import urllib.request as u; u.urlopen('http://127.0.0.1:9', timeout=1)",
    "program": "import subprocess; subprocess.run(['true'])",
    "memory": "x = bytearray(2**40)",
}


def notebook(folder: Path, *cells: str) -> Path:
    path = folder / "answers.ipynb"
    made = student_notebook("Answers", [EXERCISES[name] for name in ASKED])
    code = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    made["cells"] += [{**code, "id": f"x{i}", "source": s} for i, s in enumerate(cells)]
    path.write_text(json.dumps(made), encoding="utf-8")
    return path


def test_notebooks_for_students(tmp_path):
    assert fwlab("exercises", "export", str(tmp_path))[0] == 0
    found = []
    for path in tmp_path.glob("*.ipynb"):
        found += asked(path)
        cells = json.loads(path.read_text("utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
        for name in asked(path):
            assert EXERCISES[name].task in text and f"def {name}(" in text
    assert sorted(found) == sorted(EXERCISES)
    nbformat = pytest.importorskip("nbformat")
    for path in tmp_path.glob("*.ipynb"):
        nbformat.validate(nbformat.read(path, as_version=4))


def test_grades(tmp_path):
    path = notebook(tmp_path, RIGHT, WRONG, *MISUSE.values())
    graded = grade(path, cell_seconds=4)
    assert graded["ended"] == "finished"
    by = {each["name"]: each for each in graded["exercises"]}
    assert {name for name, each in by.items() if each["right"]} == {"write"}
    assert "Each key has its own" in by["sum_normalize"]["why"]
    assert "returned None" in by["delta_step"]["why"]
    errors = [each["error"] for each in graded["errors"]]
    assert len(errors) == len(MISUSE)
    for error, said in zip(
        errors,
        ("more than 4 seconds", "SyntaxError", "no network", "no other", "MemoryError"),
        strict=True,
    ):
        assert said in error
    text = report(graded)
    assert text.startswith("answers.ipynb: 1 of 4 right\n✗ read_memory\n")


MINE = RIGHT.replace("write", "mine")


def small(folder: Path, *cells: str) -> Path:
    path = folder / "answers.ipynb"
    made = [{"cell_type": "code", "source": source} for source in cells]
    path.write_text(json.dumps({"cells": made}), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("cell", "answer"),
    [
        ("check(mine, 'write')", "mine"),
        ("check(mine, name='write')", "mine"),
        ("check(mine)\ncheck()", None),
        ("%matplotlib inline\n_ = check(write)", "write"),
        ("import fwlab.exercises\nfwlab.exercises.check(write)", "write"),
        ("def write(W, k, v):\n    return (\n\n_ = check(write)", "write"),
    ],
)
def test_every_exercise_that_is_asked_for_is_found(tmp_path, cell, answer):
    assert asked(small(tmp_path, cell)) == ({"write": answer} if answer else {})


def test_a_notebook_that_leaves(tmp_path):
    graded = grade(small(tmp_path, "check(write)", "import os\nos._exit(0)"))
    assert "left Python" in graded["ended"]
    assert "left Python" in graded["exercises"][0]["why"]


def test_a_notebook_that_cannot_be_stopped(tmp_path):
    stubborn = "import time\nwhile True:\n    try: time.sleep(1)\n"
    stubborn += "    except BaseException: pass"
    graded = grade(notebook(tmp_path, RIGHT, stubborn), seconds=8)
    assert graded["ended"] == "the time limit, 8 seconds"
    assert not any(each["right"] for each in graded["exercises"])
    assert "not checked: the time limit" in report(graded)


def test_the_command(tmp_path):
    """With an answer of another name, after a magic command."""
    start = "%matplotlib inline\nfrom fwlab.exercises import check"
    path, out = small(tmp_path, start, MINE + "check(mine, 'write')"), tmp_path / "out"
    code, said, _ = fwlab("exercises", "grade", str(path), "--out", str(out))
    assert code == 0 and "1 of 1 right" in said
    (graded,) = json.loads(out.read_text("utf-8"))
    assert graded["exercises"] == [{"name": "write", "right": True, "why": ""}]
    assert not graded["errors"]
    listed = fwlab("exercises", "list")[1]
    assert all(name in listed for name in EXERCISES)
    path.write_text("{}", encoding="utf-8")
    for arguments in (["grade"], ["export"], ["grade", str(path)]):
        code, _, error = fwlab("exercises", *arguments)
        assert code == 2 and "expected" in error and error.count("\n") == 1


def test_tasks_are_those_of_the_notebooks():
    """And the line to start from, too."""
    cells = [
        "".join(cell["source"])
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
        for cell in json.loads(path.read_text("utf-8"))["cells"]
    ]
    plain = [" ".join(cell.split()) for cell in cells]
    once = [
        name
        for name, exercise in EXERCISES.items()
        if sum(exercise.task.removeprefix("**") in cell for cell in plain) == 1
        and sum(exercise.signature in cell for cell in cells) == 1
    ]
    assert once == list(EXERCISES)
