"""Check arguments that are not tensors: numbers, flags and names.

`owner` is the function or class whose argument it is. Every error is one
sentence that names both, and says what was expected and what was passed.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any


def number(value: Any) -> bool:
    """Return True if a value is an int or a float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def flags(owner: str, /, **values: Any) -> None:
    """Raise `TypeError` unless all values are True or False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(
                f"{owner}: expected {name} to be True or False, got {value!r}"
            )


def integers(owner: str, minimum: int | None, /, **values: Any) -> None:
    """Check that all values are integers, and at least `minimum` unless it is None.

    Raises `TypeError` for any other type, and `ValueError` below the minimum.
    """
    for name, value in values.items():
        text = f"{owner}: expected {name} to be"
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{text} an integer, got {value!r}")
        if minimum is not None and value < minimum:
            raise ValueError(f"{text} at least {minimum}, got {value!r}")


def numbers(
    owner: str, wanted: str, fits: Callable[[Any], bool], /, **values: Any
) -> None:
    """Check that all values are numbers and satisfy `fits`, which `wanted` describes.

    Raises `TypeError` for any other type, and `ValueError` where `fits` is false.
    """
    for name, value in values.items():
        if not number(value) or not fits(value):
            error = ValueError if number(value) else TypeError
            raise error(f"{owner}: expected {name} to be {wanted}, got {value!r}")


def dropout(owner: str, value: Any, argument: str = "dropout") -> None:
    """Check a dropout probability: a number of at least 0 and below 1."""
    wanted = "at least 0 and below 1"
    numbers(owner, wanted, lambda p: 0 <= p < 1, **{argument: value})


def epsilon(owner: str, /, **values: Any) -> None:
    """Check the epsilon of a norm: a finite number, 0 or more."""
    wanted = "a number, 0 or more"
    numbers(owner, wanted, lambda eps: 0 <= eps < math.inf, **values)


def choice(owner: str, options: Iterable[str | None], /, **values: Any) -> None:
    """Check that all values are among `options`, which are names or None.

    Raises `TypeError` for anything but a name, such as a list of names, and
    `ValueError` for an unknown name.
    """
    known = tuple(options)
    for name, value in values.items():
        if value not in known:  # A tuple also accepts an unhashable value.
            error = ValueError if isinstance(value, str) else TypeError
            names = ", ".join(map(repr, known))
            raise error(f"{owner}: expected {name} to be one of {names}, got {value!r}")


def function(owner: str, /, **values: Any) -> None:
    """Raise `TypeError` unless all values are functions or None."""
    for name, value in values.items():
        if value is not None and not callable(value):
            raise TypeError(
                f"{owner}: expected {name} to be a function or None, got {value!r}"
            )


def require(
    owner: str, holds: Any, wanted: str, error: type[Exception] = ValueError
) -> None:
    """Raise an error that says what was expected (`wanted`), unless `holds` is true."""
    if not holds:
        raise error(f"{owner}: expected {wanted}")
