"""Checking an answer: properties in order, up to the first that fails."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Answer = Callable[..., Tensor]
#: Takes the answer, fwlab's own function and a seeded generator; its
#: docstring says what the answer does if the property holds. Otherwise it
#: raises `Wrong`.
Property = Callable[[Answer, Answer, torch.Generator], None]


#: Why a gradient may be wrong although the result is right.
CUT = "Is there a detach() or a no_grad() on its way to the result?"


class Wrong(Exception):
    """Why an answer is not right yet, in a sentence for the learner."""


@dataclass(frozen=True)
class Exercise:
    """A function to write.

    - `name`: the name of the learner's function.
    - `solution`: fwlab's own function, and those that it calls.
    - `properties`: what must hold, easiest first.
    - `hints`: each reveals more than the one before.
    """

    name: str
    solution: tuple[Answer, ...]
    properties: tuple[Property, ...]
    hints: tuple[str, ...]

    @property
    def reference(self) -> Answer:
        """What answers are compared with."""
        return self.solution[0]


def check(answer: Any, name: str | None = None) -> bool:
    """Check an answer, and print what is right and the first mistake.

    - `answer`: the function itself.
    - `name`: the exercise; None = the name of the function.
    - Returns True or False. A wrong answer never raises an error, even if
      it does so itself.
    """
    exercise, complaint = _find(answer if name is None else name, callable(answer))
    if exercise is None:
        print(complaint)
        return False
    right = True
    for sentence, wrong in _verdicts(exercise, answer):
        print(f"{'✗' if wrong else '✓'} {sentence}")
        if wrong:
            print(f"  {wrong}")
            right = False
    print(
        f"{exercise.name}: "
        + ("all right." if right else f'not yet. Try hint("{exercise.name}").')
    )
    return right


def assert_correct(answer: Any, name: str | None = None) -> None:
    """Check an answer in pytest: print nothing, but raise if it is wrong.

    - `answer`, `name`: as for `check`.
    - Raises `AssertionError`, which says what is wrong.
    """
    exercise, complaint = _find(answer if name is None else name, callable(answer))
    if exercise is None:
        raise AssertionError(complaint)
    for sentence, wrong in _verdicts(exercise, answer):
        if wrong:
            raise AssertionError(f"{exercise.name} is wrong: {sentence}? {wrong}")


def hint(name: Any, number: int = 1) -> None:
    """Print a hint.

    - `name`: the exercise, or the function that answers it.
    - `number`: hint 1 is a nudge; later ones reveal more.
    """
    exercise, complaint = _find(name)
    if exercise is None:
        print(complaint)
        return
    count = len(exercise.hints)
    if number not in range(1, count + 1):
        print(
            f"{exercise.name} has {count} hints, 1 to {count}; after that, "
            f'use solution("{exercise.name}").'
        )
        return
    print(f"Hint {number} of {count}: {exercise.hints[number - 1]}")


def solution(name: Any) -> None:
    """Print the source of the package's own function.

    - `name`: the exercise, or the function that answers it.
    """
    exercise, complaint = _find(name)
    if exercise is None:
        print(complaint)
        return
    for function in exercise.solution:
        print(f"# {function.__name__} in {function.__module__}")
        print(inspect.getsource(function).rstrip(), end="\n\n")


def ask(answer: Answer, like: Tensor, **arguments: Tensor) -> Tensor:
    """Call an answer, and turn any failure into `Wrong`.

    - `like`: a tensor with the expected shape and dtype.
    - `arguments`: the arguments in order; the answer gets copies, through
      which gradients flow.
    """
    given = ", ".join(f"{n} {list(a.shape)}" for n, a in arguments.items())
    copies = [a.clone() for a in arguments.values()]
    try:
        result = answer(*copies)
    except (Exception, SystemExit) as error:
        reason = str(error).strip().splitlines() or ["no message"]
        raise Wrong(
            f"With {given} your function raised {type(error).__name__}: {reason[0]}"
        ) from None
    if result is None:
        raise Wrong("Your function returned None. Does it end in a `return`?")
    if not isinstance(result, Tensor):
        kind = type(result).__name__
        raise Wrong(f"Your function should return a tensor; it returned a {kind}.")
    if result.shape != like.shape:
        raise Wrong(
            f"With {given}: expected a result of shape {list(like.shape)}, "
            f"got {list(result.shape)}."
        )
    if result.dtype != like.dtype:
        raise Wrong(f"Expected a result of dtype {like.dtype}, got {result.dtype}.")
    for (name, before), after in zip(arguments.items(), copies, strict=True):
        if not torch.equal(before, after):
            raise Wrong(
                f"Your function changed its argument {name} in place; "
                "make a new tensor instead."
            )
    return result


def compare(found: Tensor, expected: Tensor, because: str = "") -> None:
    """Raise `Wrong`, with numbers, unless two tensors agree to rounding."""
    if not torch.isfinite(found).all():
        bad = int((~torch.isfinite(found)).sum())
        raise Wrong(
            f"{bad} of {found.numel()} numbers are NaN or infinite. {because}".strip()
        )
    difference = (found - expected).abs()
    outside = difference > 1e-8 * (1 + expected.abs())
    if outside.any():
        worst = int(difference.argmax())
        raise Wrong(
            f"{int(outside.sum())} of {found.numel()} numbers differ; for the worst, "
            f"expected {expected.flatten()[worst]:.4g}, got "
            f"{found.flatten()[worst]:.4g} (off by "
            f"{difference.flatten()[worst]:.2g}). {because}".strip()
        )


def compare_gradients(
    answer: Answer,
    reference: Answer,
    generator: torch.Generator,
    because: str,
    **arguments: Tensor,
) -> None:
    """Raise `Wrong` unless every argument gets the right gradient."""
    expected = reference(*arguments.values())
    weights = torch.randn(expected.shape, generator=generator, dtype=expected.dtype)
    gradients = []
    for function in (answer, reference):
        given = {n: x.clone().requires_grad_() for n, x in arguments.items()}
        result = ask(function, expected, **given)
        if not result.requires_grad:
            raise Wrong(
                "The result has no gradient. Is there a detach() or a no_grad()?"
            )
        gradients.append(
            torch.autograd.grad(
                (result * weights).sum(),
                list(given.values()),
                materialize_grads=True,
            )
        )
    for name, found, truth in zip(arguments, *gradients, strict=True):
        compare(found, truth, f"This is the gradient of {name}. {because}")


def _verdicts(exercise: Exercise, answer: Answer) -> Iterator[tuple[str, str]]:
    """Each property's sentence, and what is wrong ("" = nothing), in
    order, up to the first property that fails.
    """
    for number, holds in enumerate(exercise.properties):
        generator = torch.Generator().manual_seed(number)
        sentence = (holds.__doc__ or holds.__name__).strip()
        try:
            holds(answer, exercise.reference, generator)
        except Wrong as wrong:
            yield sentence, str(wrong)
            return
        except Exception as error:  # an answer that we did not foresee
            reason = str(error).strip().splitlines() or ["no message"]
            yield sentence, f"Your result led to {type(error).__name__}: {reason[0]}"
            return
        yield sentence, ""


def _find(name: Any, is_function: bool = True) -> tuple[Exercise | None, str]:
    from fwlab.exercises import EXERCISES

    known = ", ".join(EXERCISES)
    if not is_function:
        kind = type(name).__name__ if not isinstance(name, str) else "name"
        return None, (
            f"Pass your function itself, as in check(delta_step), not a {kind}."
        )
    title = name if isinstance(name, str) else getattr(name, "__name__", repr(name))
    if title not in EXERCISES:
        return None, f"There is no exercise named {title!r}. The exercises: {known}."
    return EXERCISES[title], ""
