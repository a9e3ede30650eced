"""The reader's own functions at work: `yours_or`, `golf`."""

import ast
import inspect
import io
import textwrap
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import torch

from fwlab.exercises import checker, solutions


def yours_or(answer: Any, name: str | None = None) -> Callable[..., Any]:
    """Your function if it is right, else fwlab's; prints which of them.

    - `answer`, `name`: as for `check`. A wrong answer never raises an error.
    - Returns a function to use from here on.
    """
    from fwlab.exercises import EXERCISES

    for each in EXERCISES.values():
        if answer is each.reference:  # the cell ran before
            name = each.name
    exercise, complaint = checker._find(answer if name is None else name)
    if exercise is None:
        print(complaint)
        return answer
    if checker._ours(exercise, answer):
        print(f"{exercise.name}: fwlab's.")
        return answer
    with redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
        verdicts = [*checker._verdicts(exercise, answer)]
    right = not any(verdict.wrong for verdict in verdicts)
    print(
        f"{exercise.name}: yours, from here on."
        if right
        else f"{exercise.name}: fwlab's, until yours passes check."
    )
    return answer if right else exercise.reference


def golf(answer: Any, name: str) -> bool:
    """Check an answer, and count its lines.

    - `answer`, `name`: as for `check`.
    - Returns whether it is right, in whatever number of lines.
    """
    right = checker.check(answer, name)
    exercise, _ = checker._find(name, callable(answer))
    if exercise is not None and right:
        par = getattr(solutions, exercise.name, exercise.reference)
        try:
            yours = lines_of(answer)
        except (OSError, TypeError, SyntaxError):
            print("Its lines cannot be counted: its source is not in a cell or a file.")
        else:
            print(f"Your lines: {yours}. Par: {lines_of(par)}.")
    return right


def lines_of(function: Any) -> int:
    """The lines of code of a function: each statement is one, however it is broken.

    Comments, blank lines and the docstring do not count.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    return sum(bool(line.strip()) for line in ast.unparse(tree).splitlines())
