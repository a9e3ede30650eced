"""Hints and solutions, of exercises, derivations and questions alike."""

import ast
import inspect
from functools import cache
from typing import Any

from fwlab.exercises import checker, solutions
from fwlab.exercises.exercise import Exercise, Question, say
from fwlab.exercises.formulas import DERIVATIONS, Derivation


def hint(name: Any, number: int = 1) -> None:
    """Print a hint.

    - `name`: the exercise or derivation, or the function that answers it.
    - `number`: hint 1 is a nudge; later ones reveal more.
    """
    asked = _find(name)
    if asked is None:
        return
    count = len(asked.hints)
    if type(number) is not int or number not in range(1, count + 1):
        print(
            f"{asked.name} has {count} hints, 1 to {count}; after that, "
            f'use solution("{asked.name}").'
            if count
            else f"{asked.name} has no hints."
        )
        return
    print(f"Hint {number} of {count}: {asked.hints[number - 1]}")
    if number < count:
        print(f'More: hint("{asked.name}", {number + 1})')


def solution(name: Any) -> None:
    """Print how one may write an exercise, fill a derivation, or answer a question.

    - `name`: the exercise, derivation or question, or a function that answers it.
    """
    asked = _find(name)
    if isinstance(asked, Exercise):
        print(source(asked))
    elif isinstance(asked, Derivation):
        for letter, blank in asked.blanks.items():
            print(f"{letter} = {blank.truth}")
        say(asked.because)
    elif isinstance(asked, Question):
        say(f"The answer: {asked.answer}. {asked.because}")


def source(exercise: Exercise) -> str:
    """The function in `solutions`, with its imports and the functions that it
    calls; for an exercise from elsewhere, what answers are compared with.
    """
    names, imports, functions = {exercise.name}, [], []
    for node, source in reversed(_solutions()):  # it calls what stands above it
        if isinstance(node, ast.FunctionDef) and node.name in names:
            functions.append(source)
            names |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom) and any(
            (alias.asname or alias.name) in names for alias in node.names
        ):
            imports.append(source)
    if not functions:
        return inspect.getsource(exercise.reference).rstrip()
    head = ["\n".join(reversed(imports))] if imports else []
    return "\n\n\n".join([*head, *reversed(functions)])


@cache
def _solutions() -> list[tuple[ast.stmt, str]]:
    """The statements of `solutions`, each with its lines."""
    text = inspect.getsource(solutions)
    lines = text.splitlines()
    return [
        (node, "\n".join(lines[node.lineno - 1 : node.end_lineno]))
        for node in ast.parse(text).body
    ]


def _find(name: Any) -> Exercise | Derivation | Question | None:
    from fwlab.exercises import QUESTIONS

    for known in (DERIVATIONS, QUESTIONS):
        if isinstance(name, str) and name in known:
            return known[name]
    exercise, complaint = checker._find(name)
    if exercise is None:
        print(complaint)
    return exercise
