"""What an exercise is: a function to write, or a question to answer."""

import inspect
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Generator

from fwlab.exercises.asking import Answer

Catches = Mapping[str, Answer | tuple[Answer, ...]]


@dataclass(frozen=True)
class Property:
    """Something that holds for every right answer.

    - `says`: the sentence that `check` prints: what the answer does.
    - `holds`: takes the answer, fwlab's own function and a seeded generator,
      and raises `Wrong` if the property does not hold.
    - `catches`: functions that many write instead and that fail here first,
      one or several by a sentence that says what is wrong with them.
    """

    says: str
    holds: Callable[[Answer, Answer, Generator], None]
    catches: Catches = field(default_factory=dict)


@dataclass(frozen=True)
class Exercise:
    """A function to write.

    - `name`: the name of the learner's function.
    - `task`: what to write, in Markdown: a title, then arguments and result.
    - `reference`: the function that answers are compared with.
    - `properties`: what must hold, easiest first.
    - `hints`: each reveals more than the one before.
    - `example`: draws arguments, by name and in order; for `show`, and to
      recognise misconceptions.
    - `matters`: the part of a result in which all right answers agree, as a
      function of the result and the arguments; None = all of it.
    - `difficulty`: from 1, a line that copies an equation, to 5.
    - `importance`: from 1, a side road, to 5, what all later notebooks need.
    - `minutes`: how long it takes, task and thought included.
    - `notebook`: the notebook that asks it, such as "04_delta_rule".
    - `start`: the faulty code that a bug hunt begins with; "" = an empty function.
    """

    name: str
    task: str
    reference: Answer
    properties: tuple[Property, ...]
    hints: tuple[str, ...]
    example: Callable[[Generator], dict[str, Any]] | None = None
    matters: Callable[..., Any] | None = None
    difficulty: int = 2
    importance: int = 3
    minutes: int = 10
    notebook: str = ""
    start: str = ""

    @property
    def signature(self) -> str:
        """The code that a learner starts from."""
        if self.start:
            return self.start
        parameters = inspect.signature(self.reference).parameters.values()
        names = ", ".join(p.name for p in parameters if p.default is p.empty)
        return f"def {self.name}({names}): ...  # your code here"

    @property
    def misconceptions(self) -> list[tuple[str, Answer]]:
        """What is wrong with a function that many write instead, and the function."""
        return [
            (text, function)
            for each in self.properties
            for text, functions in each.catches.items()
            for function in (
                functions if isinstance(functions, tuple) else (functions,)
            )
        ]


@dataclass(frozen=True)
class Question:
    """Something to predict: a number, or one of several choices.

    - `name`: what `predict` is called with.
    - `text`: the question.
    - `truth`: the right number, or the right choice.
    - `because`: why.
    - `choices`: all choices, the right one among them; none = a number.
    - `tempting`: wrong choices or numbers, and why each is wrong, without a full
      stop at the end.
    - `tolerance`: a number that is off by less is right.
    - `hints`: each reveals more than the one before; a question may have none.
    - `difficulty`, `importance`, `minutes`: as for an `Exercise`.
    - `notebook`: the notebook that explains the answer.
    - `asked`: the notebook that asks.
    """

    name: str
    text: str
    truth: float | str
    because: str
    choices: tuple[str, ...] = ()
    tempting: dict[Any, str] = field(default_factory=dict)
    tolerance: float = 0.0
    hints: tuple[str, ...] = ()
    difficulty: int = 2
    importance: int = 3
    minutes: int = 1
    notebook: str = ""
    asked: str = ""

    @property
    def answer(self) -> str:
        """The truth as a reader sees it: three digits of a fraction."""
        if isinstance(self.truth, str):
            return self.truth
        whole = math.isfinite(self.truth) and self.truth == round(self.truth)
        return f"{self.truth:.0f}" if whole else f"{self.truth:.3g}"


def say(text: str) -> None:
    """Print a paragraph."""
    print(textwrap.fill(text, 80, break_long_words=False, break_on_hyphens=False))


def joined(field: Any) -> Any:
    """A field of a TOML file whose texts have no line breaks, lists as tuples."""
    if isinstance(field, dict):
        return {key: joined(part) for key, part in field.items()}
    if isinstance(field, list):
        return tuple(map(joined, field))
    return " ".join(field.split()) if isinstance(field, str) else field
