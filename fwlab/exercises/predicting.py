"""Predicting a result before it is seen."""

import textwrap
from contextlib import suppress
from numbers import Real
from typing import Any

from fwlab.exercises import progress
from fwlab.exercises.exercise import Question, say

_predicted: dict[str, float | str] = {}


def predict(name: str, answer: Any = ...) -> None:
    """Write down what you expect, before you run the cell that shows it.

    - `name`: the question.
    - `answer`: a number, or the letter or the text of a choice, in quotes;
      `...` = only print the question.
    """
    _note(name, answer, "predict")


def reveal(name: str, computed: Any = None) -> None:
    """Print the answer to a question, and what a wrong prediction overlooks.

    - `name`: the question.
    - `computed`: what the notebook has found. If that is not the answer, both
      are shown, and a prediction of either is right.
    """
    question = _find(name)
    if question is None:
        return
    say(f"The answer: {question.answer}. {question.because}")
    found = _tried(question, computed)
    if differs := found is not None and not is_right(question, found):
        say(
            f"This notebook found {_shown(found)} instead. Chance, the machine or a "
            "cell that you changed can do that."
        )
    if name not in _predicted:
        return
    answer = _predicted[name]
    right = is_right(question, answer) or (differs and _near(question, answer, found))
    progress.note(name, right)
    if right:
        print(f"You predicted {_shown(answer)}: right.")
        return
    parts = [f"You predicted {_shown(answer)}"]
    if isinstance(answer, float) and isinstance(question.truth, float | int):
        parts[0] += f", off by {abs(answer - question.truth):.3g}"
    why = [
        text
        for wrong, text in question.tempting.items()
        if _near(question, answer, wrong)
    ]
    say(". ".join(parts + why[:1]) + ".")


def quiz(name: str, answer: Any = ...) -> None:
    """Ask a question on what you have read before, and answer it at once.

    - `name`, `answer`: as for `predict`.
    """
    _note(name, answer, "quiz")
    if name in _predicted:
        reveal(name)


def predictions() -> None:
    """Print how many predictions were right, and what to look at again.

    The first answer to each question counts, in this session and in earlier ones.
    """
    from fwlab.exercises import QUESTIONS

    judged = {n: right for n, right in progress.done().items() if n in QUESTIONS}
    print(f"{sum(judged.values())} of {len(judged)} predictions were right.")
    if waiting := [name for name in _predicted if name not in judged]:
        say(f"Not revealed yet: {', '.join(waiting)}.")
    again: dict[str, list[str]] = {}
    for name, right in judged.items():
        if not right:
            again.setdefault(QUESTIONS[name].notebook, []).append(name)
    for notebook, names in sorted(again.items()):
        say(f"Look again at {notebook}: {', '.join(names)}.")
    if file := progress.place():
        print(f"Kept in {file}. To start again, delete it and restart the kernel.")


def is_right(question: Question, answer: Any) -> bool:
    """Whether an answer is the right one, within the question's tolerance."""
    return _near(question, answer, question.truth)


def _near(question: Question, answer: Any, other: Any) -> bool:
    if question.choices or isinstance(answer, str) or isinstance(other, str):
        return bool(answer == other)
    return abs(answer - float(other)) <= question.tolerance


def _note(name: str, answer: Any, call: str) -> None:
    question = _find(name)
    if question is None:
        return
    _predicted.pop(name, None)
    if answer is ...:
        say(question.text)
        for letter, choice in _letters(question).items():
            print(f"  {letter}) {choice}")
        if question.choices:
            print(f'Put a letter in place of the dots, as in {call}("{name}", "a").')
        else:
            print(f'Put a number in place of the dots after "{name}".')
        return
    try:
        _predicted[name] = _read(question, answer)
    except ValueError as error:
        print(error)
    else:
        print(f"Your prediction: {_shown(_predicted[name])}.")


def _read(question: Question, answer: Any) -> float | str:
    """An answer as people type it, or as a notebook computes it."""
    if hasattr(answer, "item"):  # of PyTorch or NumPy
        with suppress(ValueError, RuntimeError):  # it has several numbers
            answer = answer.item()
    given = textwrap.shorten(repr(answer), 60)
    if not question.choices:
        if isinstance(answer, bool) or not isinstance(answer, Real):
            raise ValueError(f"expected a number, got {given}")
        return float(answer)
    letters = _letters(question)
    typed = answer.strip() if isinstance(answer, str) else ""
    choice = letters.get(typed.strip(" ().").lower(), typed)
    if choice not in question.choices:
        quoted = ", ".join(f'"{letter}"' for letter in letters)
        raise ValueError(f"expected one of {quoted}, got {given}")
    return choice


def _tried(question: Question, computed: Any) -> float | str | None:
    """What a notebook has found; where that is no answer, as text."""
    try:
        return None if computed is None else _read(question, computed)
    except ValueError:
        return textwrap.shorten(str(computed), 60)


def _shown(answer: float | str) -> str:
    return answer if isinstance(answer, str) else f"{answer:.5g}"


def _letters(question: Question) -> dict[str, str]:
    return dict(zip("abcdefgh", question.choices, strict=False))


def _find(name: str) -> Question | None:
    from fwlab.exercises import QUESTIONS

    if name not in QUESTIONS:
        known = ", ".join(QUESTIONS)
        print(f"There is no question named {name!r}. The questions: {known}.")
    return QUESTIONS.get(name)
