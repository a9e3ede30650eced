"""Grading a notebook: its cells run in a process of their own, with limits.

The limits stop accidents, such as a loop that never ends or memory that
grows. They are no sandbox: an answer that wants to get out can.
"""

import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fwlab.exercises.exercise import Exercise

#: What a graded notebook may not do: use the network, or start programs.
NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.sendto")
PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork")


GUIDE = (
    "`check` says which property holds, and explains the first one that does not. "
    '`hint("NAME")` and `hint("NAME", 2)` help, and `show(NAME)` draws your result '
    "beside the right one."
)


def grade(
    notebook: Path, seconds: float = 300, cell_seconds: float = 60, gib: float = 4
) -> dict[str, Any]:
    """Run a notebook, and check every exercise that it asks for.

    - `notebook`: the answers of a learner.
    - `seconds`: time limit of the whole.
    - `cell_seconds`: time limit of one cell, and of checking one answer;
      not on Windows.
    - `gib`: how much memory it may take, on top of that of PyTorch; only
      where the system can limit it (not on Windows or macOS).
    - Returns `exercises`, a list of `name`, `right` and `why`; `errors`,
      the cells that raised an error; and `ended`: "finished", or why not.
    - Raises `ValueError` if the file is no notebook.
    """
    names = asked(notebook)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        limits = [str(cell_seconds), str(gib)]
        inside = Path(folder, "work")
        inside.mkdir()
        command = [sys.executable, "-m", "fwlab.exercises.grading"]
        environment = {**os.environ, "MPLBACKEND": "agg", "PYTHONPATH": _path()}
        process = subprocess.Popen(
            [*command, str(notebook.resolve()), str(log), *limits],
            cwd=inside,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        ended = "finished"
        try:
            if code := process.wait(seconds):
                ended = f"an error (code {code}): perhaps the memory limit"
        except subprocess.TimeoutExpired:
            ended = f"the time limit, {seconds:g} seconds"
        finally:  # also if somebody interrupts this
            process.kill()
            process.wait()
        lines = log.read_text("utf-8").splitlines() if log.exists() else []
    said = [json.loads(line) for line in lines]
    errors = [each for each in said if "cell" in each]
    known = {each["name"]: each for each in said if "name" in each}
    if ended == "finished" and len(known) < len(names):
        ended = "the notebook itself, which left Python"
    missing = {"right": False, "why": f"not checked: {ended}"}
    return {
        "notebook": notebook.name,
        "exercises": [known.get(name, {"name": name, **missing}) for name in names],
        "errors": errors,
        "ended": ended,
    }


def student_notebook(title: str, exercises: Iterable[Exercise]) -> dict[str, Any]:
    """A notebook to hand out: each task, a function to fill in, a check."""
    start = "from fwlab.exercises import check, hint, show, solution"
    cells = [("markdown", f"# {title}\n\n{GUIDE}"), ("code", start)]
    for number, exercise in enumerate(exercises, 1):
        code = f"{exercise.signature}  # your code here\n\n\n_ = check({exercise.name})"
        cells += [("markdown", f"**{number}.** {exercise.task}"), ("code", code)]
    extra: dict[str, Any] = {
        "code": {"outputs": [], "execution_count": None},
        "markdown": {},
    }
    language = {"name": "python"}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": kernel, "language_info": language},
        "cells": [
            {
                "cell_type": kind,
                "id": f"cell-{number}",
                "metadata": {},
                "source": source,
                **extra[kind],
            }
            for number, (kind, source) in enumerate(cells)
        ],
    }


def report(graded: dict[str, Any]) -> str:
    """What `grade` has found, as text."""
    exercises = graded["exercises"]
    right = sum(each["right"] for each in exercises)
    lines = [f"{graded['notebook']}: {right} of {len(exercises)} right"]
    for each in exercises:
        lines.append(f"{'✓' if each['right'] else '✗'} {each['name']}")
        if not each["right"]:
            lines.append(f"  {each['why']}")
    for each in graded["errors"]:
        lines.append(f"cell {each['cell']} raised {each['error']}")
    if graded["ended"] != "finished":
        lines.append(f"ended by {graded['ended']}")
    return "\n".join(lines)


def asked(notebook: Path) -> dict[str, str]:
    """The exercises that the cells of a notebook check, in order, and what
    they check: the name of a function, or an expression.

    - Raises `ValueError` if the file is no notebook.
    """
    from fwlab.exercises import EXERCISES

    found: dict[str, str] = {}
    for source in _cells(notebook):
        for call in _calls(source):
            named = [k.value for k in call.keywords if k.arg == "name"]
            for part in [*call.args, *named][-1:]:
                name = getattr(part, "value", getattr(part, "id", None))
                if name in EXERCISES:
                    found[name] = ast.unparse(call.args[0])
    return found


def _cells(notebook: Path) -> list[str]:
    """The source of each code cell."""
    try:
        cells = json.loads(notebook.read_text("utf-8"))["cells"]
        return ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"expected a notebook, got {notebook}") from error


def _calls(source: str) -> list[ast.Call]:
    """Calls of `check`. If the cell does not parse, because of a mistake or a
    magic command, in those lines that do.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        lines = source.strip().splitlines()
        return [c for line in lines if line != source for c in _calls(line.strip())]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = ("id", "attr")  # check, or exercises.check
    return [
        c
        for c in calls
        if c.args and "check" in [getattr(c.func, n, "") for n in names]
    ]


def _path() -> str:
    """Also a checkout that is not installed."""
    root = str(Path(__file__).parents[2])
    return os.pathsep.join([root, *filter(None, [os.getenv("PYTHONPATH")])])


# --- In the process of its own ------------------------------------------


def _run(notebook: Path, log: Path, seconds: float, gib: float) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    from fwlab.exercises import assert_correct

    class Shell(InteractiveShell):
        def enable_gui(self, gui: Any = None) -> None:
            """%matplotlib calls this; there is no window to open."""

    cells, names = _cells(notebook), asked(notebook)
    shell = Shell.instance(history_length=0)
    _limit_memory(gib)
    sys.addaudithook(_forbid)
    with log.open("w", encoding="utf-8") as out:

        def say(**what: Any) -> None:
            print(json.dumps(what), file=out, flush=True)

        for number, source in enumerate(cells, 1):
            with _alarm(seconds):
                done = shell.run_cell(source)
            if error := done.error_before_exec or done.error_in_exec:
                say(cell=number, error=f"{type(error).__name__}: {error}")
        for name, answer in names.items():
            try:
                with _alarm(seconds):
                    assert_correct(eval(answer, shell.user_ns), name)
            except NameError:
                say(name=name, right=False, why="there is no function of this name")
            except BaseException as error:
                say(name=name, right=False, why=str(error) or type(error).__name__)
            else:
                say(name=name, right=True, why="")


class _alarm:
    """Raise `TimeoutError` after this many seconds, where signals can."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __enter__(self) -> None:
        if hasattr(signal, "setitimer"):
            signal.signal(signal.SIGALRM, self._ring)
            signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def __exit__(self, *error: object) -> None:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, *given: object) -> None:
        raise TimeoutError(f"it took more than {self.seconds:g} seconds")


def _limit_memory(gib: float) -> None:
    try:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    size = used * resource.getpagesize() + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _forbid(event: str, given: tuple[Any, ...]) -> None:
    if event in NETWORK + PROGRAMS:
        raise PermissionError("no network and no other programs while grading")


if __name__ == "__main__":
    notebook, log, seconds, gib = sys.argv[1:]
    _run(Path(notebook), Path(log), float(seconds), float(gib))
