"""Ask the questions of a notebook beside its exercises: predictions and derivations.

The questions of a notebook are in the file course/NN_name.toml. Lines of a long text
are joined with spaces, except in derivations.
"""

import ast
import builtins
import math
import re
import textwrap
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Generator, Tensor

from fwlab import plots
from fwlab.exercises import progress
from fwlab.exercises.answers import shown, smallest


@dataclass(frozen=True)
class Blank:
    """Hold a blank of a derivation, where the reader writes an expression.

    - `truth`: the right expression, in Python.
    - `tempting`: wrong expressions, and why each is wrong, without a full stop.
    """

    truth: str
    tempting: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """Hold a derivation, or a question whose answer is a number or a choice.

    - `name`: what `predict`, `quiz` or `check_formula` is called with.
    - `text`: the question; or the steps, where `[a]` is the place of the blank a.
    - `because`: why the answer is right.
    - `truth`: the right number, or the right choice; of a derivation: nothing.
    - `choices`: all choices, the right one among them; none = a number.
    - `tempting`: wrong choices or numbers, and why each is wrong, without a full
      stop at the end.
    - `tolerance`: a number that is off by less is right.
    - `blanks`: the blanks of a derivation, by letter.
    - `symbols`: for each symbol of a derivation its shape, `()` = a number; or an
      expression in those before it.
    - `counts`: the symbols that are whole numbers.
    - `hints`: each reveals more than the one before; a question may have none.
    - `difficulty`, `importance`, `minutes`: as for an `Exercise`.
    - `notebook`: the notebook that explains the answer.
    - `asked`: the notebook that asks.
    - Raises `ValueError` if no answer is right, or a tempting one is no choice.
    """

    name: str
    text: str
    because: str
    truth: float | str = ""
    choices: tuple[str, ...] = ()
    tempting: dict[Any, str] = field(default_factory=dict)
    tolerance: float = 0.0
    blanks: dict[str, Blank] = field(default_factory=dict)
    symbols: dict[str, tuple[int, ...] | str] = field(default_factory=dict)
    counts: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    difficulty: int = 2
    importance: int = 3
    minutes: int = 1
    notebook: str = ""
    asked: str = ""

    def __post_init__(self) -> None:
        if self.blanks:
            return
        if self.choices:
            if {self.truth, *self.tempting} != {*self.choices}:
                raise ValueError(
                    f"{self.name}: expected truth and tempting to be the choices"
                )
            return
        if isinstance(self.truth, str) or self.tolerance <= 0:
            raise ValueError(
                f"{self.name}: expected choices, or a number with a tolerance"
            )
        given = sorted([self.truth, *self.tempting])
        if any(abs(a - b) <= self.tolerance for a, b in pairwise(given)):
            raise ValueError(
                f"{self.name}: expected numbers further apart than the tolerance"
            )

    @property
    def percent(self) -> bool:
        """Return True if the answer is in percent."""
        return bool(re.search("(in|many) percent", self.text))

    @property
    def answer(self) -> str:
        """Format the right answer for a reader, with three digits for a fraction."""
        if isinstance(self.truth, str):
            return self.truth
        whole = math.isfinite(self.truth) and self.truth == round(self.truth)
        return f"{self.truth:.0f}" if whole else f"{self.truth:.3g}"


def _joined(part: Any) -> Any:
    """Convert a TOML value: join the lines of texts, and convert lists to tuples."""
    if isinstance(part, dict):
        return {key: _joined(each) for key, each in part.items()}
    if isinstance(part, list):
        return tuple(map(_joined, part))
    return " ".join(part.split()) if isinstance(part, str) else part


def _question(name: str, notebook: str, table: dict[str, Any]) -> Question:
    """Return a question from its table in the file of a notebook."""
    fields = {"notebook": notebook, "asked": notebook} | _joined(table)
    if "blanks" in fields:
        fields["text"] = table["text"].strip()
        fields["blanks"] = {a: Blank(**blank) for a, blank in fields["blanks"].items()}
        fields = {"difficulty": 3, "minutes": 10} | fields
    elif "choices" not in fields:
        fields["tempting"] = {float(n): why for n, why in fields["tempting"].items()}
    return Question(name, **fields)


def _all() -> dict[str, Question]:
    """Collect the questions of all notebooks, and raise if two share a name."""
    every: dict[str, Question] = {}
    for file in sorted(Path(__file__).with_name("course").glob("*.toml")):
        for name, table in tomllib.loads(file.read_text("utf-8")).items():
            if name in every:
                raise ValueError(f"{name}: in {every[name].asked} and {file.stem}")
            every[name] = _question(name, file.stem, table)
    return every


_EVERY = _all()
QUESTIONS = {name: each for name, each in _EVERY.items() if not each.blanks}
"""Every question to predict, by name."""
DERIVATIONS = {name: each for name, each in _EVERY.items() if each.blanks}
"""Every derivation, by name."""


def say(text: str) -> None:
    """Print a text wrapped to 80 columns."""
    print(textwrap.fill(text, 80, break_long_words=False, break_on_hyphens=False))


# --- Derivations -------------------------------------------------------------


def check_formula(name: str, **blanks: Any) -> bool:
    """Check the blanks of a derivation with random numbers, and explain mistakes.

    - `name`: the derivation.
    - `blanks`: a Python expression for each letter, in quotes: `a="beta * k"`.
      It may use the symbols of the derivation, the blanks before it, and the
      functions of PyTorch and Python. No blanks = print the derivation.
    - Returns True if all blanks are right. A wrong blank never raises an error.
    """
    derivation = DERIVATIONS.get(name)
    if derivation is None:
        print(f"There is no derivation named {name!r}: {', '.join(DERIVATIONS)}.")
        return False
    if unknown := blanks.keys() - derivation.blanks.keys():
        known = ", ".join(derivation.blanks)
        print(f"There is no blank {', '.join(sorted(unknown))}. The blanks: {known}.")
        return False
    given = {letter: blanks.get(letter, ...) for letter in derivation.blanks}
    if all(str(expression) in ("Ellipsis", "...") for expression in given.values()):
        _print(derivation)
        return False
    wrong = {letter: _wrong(derivation, letter, e) for letter, e in given.items()}
    for letter, why in wrong.items():
        say(f"{'✗' if why else '✓'} {letter}" + (f": {why}" if why else ""))
    right = not any(wrong.values())
    if right:
        say(derivation.because)
        progress.note(name, True)
    print(f"{name}: " + ("all right." if right else f'not yet. Try hint("{name}").'))
    return right


def _print(derivation: Question) -> None:
    print(derivation.text, end="\n\n")
    values = _derived(derivation, _drawn(derivation, 0))
    symbols = [
        f"{name} {[*values[name].shape]}" if values[name].dim() else f"{name}, a number"
        for name in derivation.symbols
    ]
    say(f"Fill each blank with Python in quotes. The symbols: {'; '.join(symbols)}.")
    dots = ", ".join(f'{letter}="..."' for letter in derivation.blanks)
    print(f'check_formula("{derivation.name}", {dots})')


def _wrong(derivation: Question, letter: str, expression: Any) -> str:
    """Return what is wrong with the expression in a blank, or ""."""
    blank = derivation.blanks[letter]
    if str(expression).strip() in ("Ellipsis", "...", ""):
        return "still empty."
    draws = [_derived(derivation, _drawn(derivation, s), letter) for s in range(3)]
    truths = [_value(blank.truth, symbols) for symbols in draws]
    try:
        values = [_value(expression, symbols) for symbols in draws]
    except (Exception, SystemExit) as error:  # The expression may raise any exception.
        return f"{type(error).__name__}: {error}"
    if all(map(_same, values, truths)):
        return ""
    for mistake, why in blank.tempting.items():
        if all(map(_same, values, (_value(mistake, symbols) for symbols in draws))):
            return f"{why}."
    if values[0].shape != truths[0].shape:
        shapes = [list(each.shape) for each in (truths[0], values[0])]
        return f"expected the shape {shapes[0]}, got {shapes[1]}."
    return _counterexample(derivation, letter, expression)


def _counterexample(derivation: Question, letter: str, expression: Any) -> str:
    """Describe the smallest numbers for which an expression is wrong."""
    truth = derivation.blanks[letter].truth

    def both(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        symbols = _derived(derivation, given, letter)
        return _value(expression, symbols), _value(truth, symbols)

    def differ(given: dict[str, Any]) -> bool:
        try:
            yours, right = both(given)
        except Exception:  # The expression may need the original shapes.
            return False
        fine = yours.shape == right.shape and bool(right.isfinite().all())
        small = all(size <= 2 for size in right.shape)  # Show only small results.
        return fine and small and not _same(yours, right)

    given = smallest(lambda seed: _drawn(derivation, seed), differ)
    if given is None:
        return "this differs from the right expression at random numbers."
    yours, right = both(given)
    used = _names(f"({expression}, {truth})")
    named = _derived(derivation, given, letter)
    said = [f"{name} = {shown(x)}" for name, x in named.items() if name in used]
    where = f"with {', '.join(said)} " if said else ""
    return f"{where}yours is {shown(yours)}; right is {shown(right)}."


def _drawn(derivation: Question, seed: int) -> dict[str, Tensor]:
    """Draw a value for each symbol with a shape.

    A number is drawn from 0 to 1, and a count from 2 to 8.
    """
    generator = Generator().manual_seed(seed)
    drawn = {}
    for name, shape in derivation.symbols.items():
        if name in derivation.counts:
            drawn[name] = torch.randint(2, 9, (), generator=generator).double()
        elif not isinstance(shape, str):
            kind = torch.randn if shape else torch.rand
            drawn[name] = kind(shape, generator=generator, dtype=torch.float64)
    return drawn


def _derived(
    derivation: Question, drawn: Mapping[str, Tensor], letter: str = ""
) -> dict[str, Tensor]:
    """Return the values of all symbols and of the blanks before `letter`."""
    symbols: dict[str, Tensor] = {}
    for name, shape in derivation.symbols.items():
        fixed = isinstance(shape, str)
        symbols[name] = _value(shape, symbols) if fixed else drawn[name]
    for each, blank in derivation.blanks.items():
        if each == letter:
            break
        if letter and each not in symbols:
            symbols[each] = _value(blank.truth, symbols)
    return symbols


def _value(expression: Any, symbols: Mapping[str, Tensor]) -> Tensor:
    """Evaluate an expression with copies of the symbols, and return a tensor."""
    text = f"({str(expression).strip()})"  # Brackets allow several lines.
    names: dict[str, Any] = {"torch": torch}
    for name in _names(text):
        if name in symbols:
            names[name] = symbols[name].clone()
        elif callable(getattr(torch, name, None)):
            names[name] = _forgiving(name)
        elif hasattr(torch, name) and not hasattr(builtins, name):  # For example, pi.
            names[name] = getattr(torch, name)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # The expression may make tensors.
    try:
        return torch.as_tensor(eval(text, names), dtype=torch.float64)
    finally:
        torch.set_default_dtype(default)


def _forgiving(name: str) -> Callable[..., Any]:
    """Wrap the PyTorch or Python function `name` to accept both numbers and tensors."""
    if name == "range":  # `torch.range` differs from `range`.
        return range
    tried = [getattr(torch, name)]
    if name in ("max", "min"):  # `torch.max(x, 0)` is not `max(x, 0)`.
        tried = [getattr(builtins, name), getattr(torch, f"{name}imum"), *tried]
    elif hasattr(builtins, name):
        tried.append(getattr(builtins, name))

    def call(*given: Any, **named: Any) -> Any:
        plain = [isinstance(x, int | float) for x in given]
        tensors = [
            torch.as_tensor(x) if number else x
            for x, number in zip(given, plain, strict=True)
        ]
        for function in tried:
            for arguments in (given, tensors):
                with suppress(TypeError, RuntimeError, ValueError):
                    return function(*arguments, **named)
        return tried[0](*given, **named)  # This raises the most helpful error.

    return call


def _names(expression: str) -> set[str]:
    """Return the names in an expression, or an empty set if it cannot be parsed."""
    with suppress(SyntaxError):
        nodes = ast.walk(ast.parse(expression, mode="eval"))
        return {node.id for node in nodes if isinstance(node, ast.Name)}
    return set()


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, 1e-9, 1e-12)


# --- Predictions -------------------------------------------------------------

_predicted: dict[str, float | str] = {}
_sure: dict[str, float] = {}


def predict(name: str, answer: Any = ..., sure: Any = None) -> None:
    """Record your answer to a question, before a cell shows the result.

    - `name`: the question.
    - `answer`: a number, or the letter or the text of a choice, in quotes;
      `...` = only print the question.
    - `sure`: the probability that the answer is right, from 0 to 1, for `predictions`.
    """
    _sure.pop(name, None)
    if sure is not None:
        value = -1.0
        with suppress(ValueError, ZeroDivisionError):
            value = _typed(str(sure))
        if not 0 <= value <= 1:
            given = textwrap.shorten(repr(sure), 60)
            print(f"expected sure to be a number from 0 to 1, such as 0.8, got {given}")
            return
        _sure[name] = value
    _note(name, answer, "predict")


def reveal(name: str, computed: Any = None) -> None:
    """Print the answer to a question, and explain a wrong prediction.

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
    progress.note(name, right, _sure.get(name))
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
    """Ask a question about earlier notebooks, and check the answer at once.

    - `name`, `answer`: as for `predict`.
    """
    _note(name, answer, "quiz")
    if name in _predicted:
        reveal(name)


def predictions() -> Figure | None:
    """Print how many predictions were right, and which notebooks to look at again.

    The first answer to each question counts, in this session and in earlier ones.

    - Returns the calibration curve: how often the reader was right, over how sure the
      reader was; None before five predictions have `sure`.
    """
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
    sure = {n: p for n, p in progress.given().items() if n in judged}
    if len(sure) < 5:
        if sure:
            print(f"After {5 - len(sure)} more with sure= you see a curve.")
        return None
    mean = sum(sure.values()) / len(sure)
    share = sum(judged[name] for name in sure) / len(sure)
    say(
        f"For {len(sure)} predictions you said how sure you were, {mean:.0%} on average; "
        f"{share:.0%} of them were right. On the line you are right as often as you "
        "expect; above it you may be surer. A number counts predictions."
    )
    return _calibration([(p, judged[n]) for n, p in sure.items()])


def _calibration(answers: list[tuple[float, bool]]) -> Figure:
    """Draw the share of right answers for five ranges of stated probability."""
    groups: dict[int, list[tuple[float, bool]]] = {}
    for sure, right in answers:
        groups.setdefault(min(int(5 * sure), 4), []).append((sure, right))
    figure = Figure(figsize=(3.2, 2.8), layout="constrained")
    ax = figure.subplots()
    ax.plot([0, 1], [0, 1], color=plots.INK, linewidth=0.8)
    for _, group in sorted(groups.items()):
        x, y = (sum(each) / len(group) for each in zip(*group, strict=True))
        ax.plot(x, y, "o", color=plots.FAST)
        ax.annotate(f"  {len(group)}", (x, y), va="center")
    ax.set(xlabel="how sure you were", ylabel="share that was right")
    ax.set(xlim=(0, 1.1), ylim=(-0.05, 1.1))
    return figure


def is_right(question: Question, answer: Any) -> bool:
    """Return True if an answer is right, within the question's tolerance."""
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
        place = (
            f"Put a {'letter' if question.choices else 'number'} in place of the dots"
        )
        example = '"a"' if question.choices else "1.5"
        sure = ", sure=0.8" if call == "predict" else ""
        print(f'{place}, as in {call}("{name}", {example}{sure}).')
        return
    try:
        _predicted[name] = _read(question, answer)
    except ValueError as error:
        print(error)
    else:
        sure = f", {_sure[name]:.0%} sure" if name in _sure else ""
        print(f"Your prediction: {_shown(_predicted[name])}{sure}.")


def _read(question: Question, answer: Any) -> float | str:
    """Convert an answer, typed or computed, to a number or a choice."""
    if hasattr(answer, "item"):  # The answer is a tensor or an array.
        with suppress(ValueError, RuntimeError):  # `item` raises for several numbers.
            answer = answer.item()
    given = textwrap.shorten(repr(answer), 60)
    if not question.choices:
        if isinstance(answer, str):
            with suppress(ValueError, ZeroDivisionError):
                answer = _typed(answer, question.percent)
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


def _typed(text: str, percent: bool = False) -> float:
    """Parse a typed number such as "1/20" or "76 %" (76 if `percent`, else 0.76)."""
    plain = "".join(text.split()).replace("−", "-")
    above, _, below = plain.removesuffix("%").partition("/")
    value = float(above) / float(below or 1)
    return value / 100 if plain.endswith("%") and not percent else value


def _tried(question: Question, computed: Any) -> float | str | None:
    """Convert a computed value to an answer, or to text if it is no valid answer."""
    try:
        return None if computed is None else _read(question, computed)
    except ValueError:
        return textwrap.shorten(str(computed), 60)


def _shown(answer: float | str) -> str:
    return answer if isinstance(answer, str) else f"{answer:.5g}"


def _letters(question: Question) -> dict[str, str]:
    return dict(zip("abcdefgh", question.choices, strict=False))


def _find(name: str) -> Question | None:
    if name not in QUESTIONS:
        known = ", ".join(QUESTIONS)
        print(f"There is no question named {name!r}. The questions: {known}.")
    return QUESTIONS.get(name)
