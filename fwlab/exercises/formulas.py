"""Derivations with blanks, and a check of them by numbers."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor

from fwlab.exercises import progress
from fwlab.exercises.course import asked
from fwlab.exercises.exercise import joined, say


@dataclass(frozen=True)
class Blank:
    """A place in a derivation where the reader writes an expression.

    - `truth`: the right expression, in Python.
    - `tempting`: wrong ones, and why each is wrong, without a full stop.
    """

    truth: str
    tempting: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Derivation:
    """A derivation with blanks.

    - `name`: what `check_formula` is called with.
    - `text`: the steps; `[a]` is the place of the blank a.
    - `symbols`: the shape of each symbol, `()` = a number; or an expression in
      those before it.
    - `blanks`: by letter.
    - `because`: what to say when all blanks are right.
    - `hints`: each reveals more than the one before.
    - `difficulty`, `importance`, `minutes`, `notebook`: as for an `Exercise`.
    - `asked`: the same notebook, as for a `Question`.
    """

    name: str
    text: str
    symbols: dict[str, tuple[int, ...] | str]
    blanks: dict[str, Blank]
    because: str
    hints: tuple[str, ...]
    difficulty: int = 3
    importance: int = 3
    minutes: int = 10
    notebook: str = ""
    asked: str = ""


def check_formula(name: str, **blanks: Any) -> bool:
    """Check the blanks of a derivation with random numbers, and say what is wrong.

    - `name`: the derivation.
    - `blanks`: for each letter a Python expression, in quotes: `a="beta * k"`.
      It may use the symbols of the derivation and the functions of PyTorch.
      None at all = print the derivation.
    - Returns whether all blanks are right. A wrong one never raises an error.
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
    if all(expression in (..., "...") for expression in given.values()):
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


def _print(derivation: Derivation) -> None:
    print(derivation.text, end="\n\n")
    symbols = [
        f"{name} {[*value.shape]}" if value.dim() else f"{name}, a number"
        for name, value in _draw(derivation, 0).items()
    ]
    say(f"Fill each blank with Python in quotes. The symbols: {'; '.join(symbols)}.")
    dots = ", ".join(f'{letter}="..."' for letter in derivation.blanks)
    print(f'check_formula("{derivation.name}", {dots})')


def _wrong(derivation: Derivation, letter: str, expression: Any) -> str:
    """What is wrong with the expression in a blank; "" = nothing."""
    blank = derivation.blanks[letter]
    if expression in (..., "...") or not str(expression).strip():
        return "still empty."
    draws = [_draw(derivation, seed) for seed in range(3)]
    truths = [_value(blank.truth, symbols) for symbols in draws]
    try:
        values = [_value(expression, symbols) for symbols in draws]
    except (Exception, SystemExit) as error:  # whatever a reader writes
        return f"{type(error).__name__}: {error}"
    for mistake, why in blank.tempting.items():
        wrongs = [_value(mistake, symbols) for symbols in draws]
        if all(map(_same, values, wrongs)):
            return f"{why}."
    if values[0].shape != truths[0].shape:
        shapes = [list(each.shape) for each in (truths[0], values[0])]
        return f"expected the shape {shapes[0]}, got {shapes[1]}."
    if all(map(_same, values, truths)):
        return ""
    return "this differs from the right expression at random numbers."


def _draw(derivation: Derivation, seed: int) -> dict[str, Tensor]:
    """A value for each symbol: random, and from 0 to 1 where it is a number."""
    generator = Generator().manual_seed(seed)
    symbols: dict[str, Tensor] = {}
    for name, shape in derivation.symbols.items():
        if isinstance(shape, str):
            symbols[name] = _value(shape, symbols)
        else:
            draw = torch.randn if shape else torch.rand
            symbols[name] = draw(shape, generator=generator, dtype=torch.float64)
    return symbols


def _value(expression: Any, symbols: dict[str, Tensor]) -> Tensor:
    """What an expression gives; it gets copies of the symbols."""
    copies = {name: value.clone() for name, value in symbols.items()}
    names = {**vars(torch), "torch": torch, **copies}
    return torch.as_tensor(eval(str(expression).strip(), names), dtype=torch.float64)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, 1e-9, 1e-12)


def _derivation(name: str, fields: dict[str, Any]) -> Derivation:
    text, fields = fields["text"].strip(), joined(fields)
    blanks = {letter: Blank(**blank) for letter, blank in fields["blanks"].items()}
    return Derivation(**fields | {"name": name, "text": text, "blanks": blanks})


DERIVATIONS = {name: _derivation(name, fields) for name, fields in asked(True).items()}
"""Every derivation by name."""
