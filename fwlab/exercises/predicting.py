"""Predicting a result before it is seen."""

import textwrap
from numbers import Real
from types import EllipsisType
from typing import Any

from fwlab.exercises.exercise import Question

_predicted: dict[str, float | str] = {}


def predict(name: str, answer: float | str | EllipsisType = ...) -> None:
    """Write down what you expect, before you run the cell that shows it.

    - `name`: the question.
    - `answer`: a number, or the letter or the text of a choice; `...` =
      only print the question.
    """
    question = _find(name)
    if question is None:
        return
    _predicted.pop(name, None)
    if answer is ...:
        _say(question.text)
        for letter, choice in _letters(question).items():
            print(f"  {letter}) {choice}")
        kind = "a letter" if question.choices else "a number"
        print(f'Put {kind} in place of the dots after "{name}".')
        return
    try:
        _predicted[name] = _read(question, answer)
    except ValueError as error:
        print(error)
    else:
        print(f"Your prediction: {_predicted[name]}.")


def reveal(name: str, found: float | str | None = None) -> None:
    """Print the answer to a question, and what a wrong prediction overlooks.

    - `name`: the question.
    - `found`: what the notebook has found.
    - Raises `AssertionError` if that is not the answer of the question.
    """
    question = _find(name)
    if question is None:
        return
    if found is not None and not is_right(question, found):
        raise AssertionError(f"{name}: expected to find {question.truth}, got {found}")
    _say(f"The answer: {question.answer}. {question.because}")
    if name not in _predicted:
        return
    answer = _predicted[name]
    if is_right(question, answer):
        print(f"You predicted {answer}: right.")
        return
    parts = [f"You predicted {answer}"]
    if isinstance(answer, float) and isinstance(question.truth, float | int):
        parts = [f"You predicted {answer:g}, off by {abs(answer - question.truth):.3g}"]
    why = [
        text
        for wrong, text in question.tempting.items()
        if _near(question, answer, wrong)
    ]
    _say(". ".join(parts + why[:1]) + ".")


def quiz(name: str, answer: float | str | EllipsisType = ...) -> None:
    """Ask a question on what you have read before, and answer it at once.

    - `name`, `answer`: as for `predict`.
    """
    predict(name, answer)
    if name in _predicted:
        reveal(name)


def is_right(question: Question, answer: float | str) -> bool:
    """Whether an answer is the right one, within the question's tolerance."""
    return _near(question, answer, question.truth)


def _near(question: Question, answer: Any, other: Any) -> bool:
    if question.choices:
        return bool(answer == other)
    return abs(float(answer) - float(other)) <= question.tolerance


def _read(question: Question, answer: Any) -> float | str:
    letters = _letters(question)
    if not letters:
        if isinstance(answer, bool) or not isinstance(answer, Real):
            raise ValueError(f"expected a number, got {answer!r}")
        return float(answer)
    choice = letters.get(answer.lower(), answer) if isinstance(answer, str) else answer
    if choice not in question.choices:
        raise ValueError(f"expected one of {', '.join(letters)}, got {answer!r}")
    return str(choice)


def _say(text: str) -> None:
    print(textwrap.fill(text, 80, break_long_words=False, break_on_hyphens=False))


def _letters(question: Question) -> dict[str, str]:
    return dict(zip("abcdefgh", question.choices, strict=False))


def _find(name: str) -> Question | None:
    from fwlab.exercises import QUESTIONS

    if name not in QUESTIONS:
        known = ", ".join(QUESTIONS)
        print(f"There is no question named {name!r}. The questions: {known}.")
    return QUESTIONS.get(name)
