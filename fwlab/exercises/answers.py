"""Call a learner's function, compare its result, and report what is wrong."""

import inspect
import linecache
import math
import random
import time
import traceback
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Generator, Tensor, nn

Answer = Callable[..., Any]
#: Hint for an answer whose result is right, but whose gradient is wrong.
CUT = "Is there a detach() or a no_grad() on its way to the result?"


class Wrong(Exception):
    """Signal that a learner's answer is wrong, and say why in one sentence."""


@dataclass
class Call:
    """Hold the arguments and the result of one call to the learner's function.

    - `arguments`: the arguments by name, in order.
    - `result`: the tensors, or the number as a tensor; None = the call raised an
      error, or returned something else.
    """

    arguments: dict[str, Any]
    result: tuple[Tensor, ...] | None


#: All calls to the learner's function during a check.
calls: ContextVar[list[Call] | None] = ContextVar("calls", default=None)


def ask(
    answer: Answer,
    like: Tensor | Mapping[str, Tensor] | type[int] | type[float],
    **arguments: Any,
) -> Any:
    """Call the learner's function, and convert any failure to `Wrong`.

    - `answer`: a function, or a module.
    - `like`: a tensor of the expected shape and dtype; or several, by name:
      then the answer has to return as many, in this order; or int or float.
    - `arguments`: the arguments in order. The answer gets copies of modules,
      and of tensors, through which gradients flow.
    - Returns the tensor, a tuple of tensors, or the number.
    - Raises `Wrong`, which says what is wrong.
    """
    copies = copied(arguments)
    call = Call({n: a.detach() if _is(a) else a for n, a in arguments.items()}, None)
    if (recorded := calls.get()) is not None:
        recorded.append(call)
    case = "With " + ", ".join(_described(n, a) for n, a in arguments.items())
    try:
        with torch.enable_grad():  # The answer may have disabled gradients.
            result = answer(*copies.values())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise Wrong(f"{case}: {raised(answer, error)}") from None
    call.result = tensors(result)
    if isinstance(like, type):
        return _number(result, like, case)
    one = isinstance(like, Tensor)
    floats = any(_is(a) and a.is_floating_point() for a in arguments.values())
    wanted = {"your result": like} if isinstance(like, Tensor) else dict(like)
    parts = _parts(result, wanted, one)
    for (name, target), part in zip(wanted.items(), parts, strict=True):
        _check(name, part, target, case, one, floats)
    for name, copy in copies.items():
        if _is(copy) and not torch.equal(arguments[name], copy):
            raise Wrong(
                f"Your function changed its argument {name} in place; "
                "make a new tensor instead."
            )
    return parts[0] if one else parts


def normal(generator: Generator, *shape: int) -> Tensor:
    """Draw a float64 tensor of a given shape from a standard normal distribution."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def orthonormal(generator: Generator, width: int) -> Tensor:
    """Return a random orthogonal matrix `[width, width]` in float64."""
    return torch.linalg.qr(normal(generator, width, width)).Q


def copied(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the arguments that the learner's function could change in place."""
    copies = dict(arguments)
    for name, thing in arguments.items():
        if _is(thing):
            copies[name] = thing.clone()
        elif isinstance(thing, nn.Module | dict | list):
            copies[name] = deepcopy(thing)
    return copies


def tensors(result: Any) -> tuple[Tensor, ...] | None:
    """Convert the result of an answer to tensors, or return None if impossible."""
    if isinstance(result, Real):  # This includes NumPy scalars.
        result = torch.tensor(float(result), dtype=torch.float64)
    parts = tuple(result) if isinstance(result, tuple | list) else (result,)
    return tuple(part.detach() for part in parts) if all(map(_is, parts)) else None


def compare(found: Tensor, expected: Tensor, because: str = "") -> None:
    """Raise `Wrong` with the largest difference unless tensors agree up to rounding.

    - `found`: tensor of the answer, any shape; float32 is compared with fewer digits.
    - `expected`: the same shape.
    - `because`: a sentence on the likely cause.
    """
    tolerance = 1e-5 if found.dtype == torch.float32 else 1e-8
    found, expected = found.double(), expected.double()
    if not torch.isfinite(found).all():
        bad = int((~torch.isfinite(found)).sum())
        raise Wrong(
            f"{bad} of {found.numel()} numbers are NaN or infinite. {because}".strip()
        )
    difference = (found - expected).abs()
    outside = difference > tolerance * (1 + expected.abs())
    if not outside.any():
        return
    worst = int(difference.argmax())
    target, number = (x.flatten()[worst].item() for x in (expected, found))
    short, long = next(
        pair
        for digits in range(4, 18)
        if len(set(pair := (f"{target:.{digits}g}", f"{number:.{digits}g}"))) == 2
    )
    rounded = found.detach().float().double()
    if torch.equal(rounded, found) and (difference < 1e-5 * (1 + expected.abs())).all():
        because = (
            "All your numbers have the few digits of float32. Is there a .float(), "
            "or a tensor made without dtype=?"
        )
    raise Wrong(
        f"{int(outside.sum())} of {found.numel()} numbers differ; for the worst, "
        f"expected {short}, got {long} (off by {difference.flatten()[worst]:.2g}). "
        f"{because}".strip()
    )


def compare_gradients(
    answer: Answer,
    reference: Answer,
    generator: Generator,
    because: str,
    of: Callable[[Any], Any] = lambda result: result,
    /,
    **arguments: Any,
) -> None:
    """Raise `Wrong` unless every tensor among the arguments gets the right gradient.

    - `answer`: a function, or a module.
    - `reference`: returns a tensor, or a tuple of tensors.
    - `generator`: draws the gradient of the result.
    - `because`: a sentence on the likely cause.
    - `of`: what to differentiate, as a function of the result.
    - `arguments`: by name and in order; tensors are float64, or indices, which
      have no gradient.
    """
    inputs = {
        n: x.clone().requires_grad_()
        for n, x in arguments.items()
        if _is(x) and x.is_floating_point()
    }
    called = {**arguments, **inputs}
    right = reference(*called.values())
    like = right if _is(right) else {f"result {i}": x for i, x in enumerate(right)}
    expected = of(right)
    one = _is(expected)
    weights = [
        torch.randn(x.shape, generator=generator, dtype=x.dtype)
        for x in ([expected] if one else expected)
    ]

    def gradients(result: Any) -> tuple[Tensor, ...]:
        pairs = zip([result] if one else result, weights, strict=True)
        terms = [(x * w).sum() for x, w in pairs if x.requires_grad]
        if not terms:
            raise Wrong(
                "The result has no gradient. Is there a detach() or a no_grad()?"
            )
        total = torch.stack(terms).sum()
        leaves = list(inputs.values())
        try:
            return torch.autograd.grad(total, leaves, materialize_grads=True)
        except RuntimeError as error:
            if "inplace" not in str(error):
                raise
            raise Wrong(
                "The backward pass needs a tensor that your function has changed in "
                "place. Make a new one: write W = W + ..., not W += ..."
            ) from None

    truths = gradients(expected)
    results = gradients(of(ask(answer, like, **called)))
    for name, gradient, truth in zip(inputs, results, truths, strict=True):
        compare(gradient, truth, f"This is the gradient of {name}. {because}")


def smallest(
    draw: Callable[[int], Mapping[str, Any]],
    differ: Callable[[dict[str, Any]], bool],
    tries: int = 40,
) -> dict[str, Any] | None:
    """Search for the smallest arguments for which an answer is wrong.

    - `draw`: draws arguments with a seed. Tensors of floats are cut to one entry along
      each dimension, then to two along dimensions of one size, then along all; and they
      get easy numbers of the same kind.
    - `differ`: returns True if the answer is wrong on some arguments.
    - Returns the arguments with the fewest numbers other than 0; None = none found.
    """
    chance = random.Random(0)
    end = time.monotonic() + 1  # A slow answer gets fewer tries.
    drawn = [draw(seed) for seed in range(8)]
    easy = {name: _easy([each[name] for each in drawn]) for name in drawn[0]}
    sizes = dict.fromkeys(d for n in easy if easy[n] for d in drawn[0][n].shape)
    one = dict.fromkeys(sizes, 1)
    for cut in (one, *(one | {size: 2} for size in sizes), dict.fromkeys(sizes, 2)):
        found: dict[str, Any] | None = None
        least = math.inf
        for number in range(tries):
            given = dict(drawn[number % len(drawn)])
            for name, numbers in easy.items():
                if numbers:
                    given[name] = _small(given[name], cut, numbers, chance)
            effort = sum(map(_effort, given.values()))
            if effort < least and time.monotonic() < end and differ(given):
                found, least = given, effort
        if found:
            return found
    return None


def _easy(drawn: list[Any]) -> list[float]:
    """Return a few simple numbers of the same kind as the numbers in `drawn`."""
    if not _is(drawn[0]) or not drawn[0].is_floating_point():
        return []
    every = torch.cat([x.flatten() for x in drawn])
    every = every[every.isfinite()]
    if not len(every):
        return []
    if (every == every.round()).all():  # Bits, counts and one-hot keys are integers.
        return sorted(set(every.tolist()), key=abs)[:3]
    low, high = (x.item() for x in every.aminmax())
    numbers = [0.5, 1.0] if low >= 0 and high <= 1 else [0.5, 1.0, 2.0]
    if high <= 0:
        numbers = [-number for number in numbers]
    zero = low < 0 < high or bool((every == 0).any())
    return numbers + [0.0, 0.0] * zero


def _small(
    x: Tensor, cut: dict[int, int], numbers: list[float], chance: random.Random
) -> Tensor:
    """Shrink a tensor to the sizes in `cut`, and fill it at random from `numbers`."""
    x = x[tuple(slice(cut.get(size, size)) for size in x.shape)]
    some = [chance.choice(numbers) for _ in range(x.numel())]
    return torch.tensor(some, dtype=x.dtype).reshape(x.shape)


def _effort(x: Any) -> float:
    """Estimate how hard mental arithmetic with an argument is."""
    if isinstance(x, int):
        return float(x)
    if not _is(x):
        return 0.0
    return float((x != 0).sum()) + 0.1 * float(x.double().abs().sum())


def shown(x: Any) -> str:
    """Format a tensor or value as text, and a tensor with one entry as a number."""
    if not _is(x):
        return repr(x)
    x = x.detach().squeeze()
    if x.dim():
        return f"[{', '.join(map(shown, x))}]"
    return f"{x.item() + 0.0:.4g}"


def where(answer: Answer, frames: "list[tuple[str, int, dict[str, Any]]]") -> str:
    """Return the last line of the learner's code in `frames` as text, or "".

    - `frames`: file, line and globals of each frame, the innermost last.
    """
    own = _globals(answer)
    for file, line, names in reversed(frames):
        if names is own:
            text = linecache.getline(file, line).strip()
            return f"line {line}, `{text}`" if text else f"line {line}"
    return ""


def raised(answer: Answer, error: BaseException) -> str:
    """Describe the exception that an answer raised, and the line that raised it."""
    frames = [
        (frame.f_code.co_filename, line, frame.f_globals)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    place = where(answer, frames)
    return f"{place or 'your function'} raised {described(error)}"


def described(error: BaseException) -> str:
    """Return the type of an error and the first line of its message.

    The learner's own class may make the message long, or fail to make it.
    """
    try:
        reason = str(error).strip().splitlines() or ["no message"]
        return f"{type(error).__name__}: {short(reason[0])}"
    except KeyboardInterrupt:
        raise
    except BaseException:
        return "an error whose message cannot be read"


def short(text: str) -> str:
    """Return a text, shortened to at most 300 characters."""
    return text if len(text) <= 300 else f"{text[:300]}..."


def _globals(answer: Answer) -> Any:
    """Return the globals of the file or notebook that an answer was written in."""
    while isinstance(answer, partial):
        answer = answer.func
    if isinstance(answer, nn.Module):
        answer = type(answer).forward
    return getattr(inspect.unwrap(answer), "__globals__", None)


def _is(thing: Any) -> bool:
    return isinstance(thing, Tensor)


def _described(name: str, thing: Any) -> str:
    """Describe an argument by name and shape or value, but a function only by name."""
    if _is(thing):
        return f"{name} {list(thing.shape)}"
    return name if callable(thing) else f"{name} = {thing!r}"


def _parts(result: Any, wanted: dict[str, Tensor], one: bool) -> tuple[Any, ...]:
    if result is None:
        raise Wrong("Your function returned None. Does it end in a `return`?")
    if one:
        (target,) = wanted.values()
        if not (target.dim() or target.requires_grad or _is(result)):
            number = _plain(result)  # A number may replace a tensor without dimensions.
            if number is not None:
                result = torch.tensor(number, dtype=target.dtype)
        return (result,)
    names = f"({', '.join(wanted)})"
    if not isinstance(result, tuple | list):
        kind = type(result).__name__
        raise Wrong(f"Your function should return {names}; it returned a {kind}.")
    if len(result) != len(wanted):
        raise Wrong(
            f"Your function should return {names}; it returned {len(result)} things."
        )
    return tuple(result)


def _number(result: Any, kind: type[int] | type[float], case: str) -> int | float:
    if result is None:
        raise Wrong("Your function returned None. Does it end in a `return`?")
    number = _plain(result)
    if isinstance(number, int if kind is int else int | float):
        return kind(number)
    what = "a number" if kind is float else "an integer"
    got = f"a tensor {list(result.shape)}" if _is(result) else short(repr(result))
    hint = " Try float(...) at its end." if isinstance(result, Fraction) else ""
    raise Wrong(f"{case}: expected {what}, got {got}.{hint}")


def _plain(result: Any) -> Any:
    """Return a PyTorch or NumPy scalar as a Python number, or None for other values."""
    if getattr(result, "ndim", None) == 0:
        result = result.item()
    is_number = isinstance(result, int | float) and not isinstance(result, bool)
    return result if is_number else None


def _check(
    name: str, part: Any, target: Tensor, case: str, one: bool, floats: bool
) -> None:
    """Raise `Wrong` unless a part of the result matches the target.

    Kind, shape and dtype must match. Without `floats` among the arguments, any
    floating dtype is accepted.
    """
    if not isinstance(part, Tensor):
        kind = type(part).__name__
        raise Wrong(
            f"Your function should return a tensor; it returned a {kind}."
            if one
            else f"Expected {name} to be a tensor, got a {kind}."
        )
    if part.shape != target.shape:
        what = "a result" if one else name
        raise Wrong(
            f"{case}: expected {what} of shape {list(target.shape)}, "
            f"got {list(part.shape)}."
        )
    free = target.is_floating_point() and not floats
    if part.dtype != target.dtype and not free:
        like = " like the arguments" if target.is_floating_point() else ""
        raise Wrong(
            f"Expected {name} to be {_short(target)}{like}, got {_short(part)}. A "
            "tensor that you make yourself needs dtype=, and needs no .float()."
        )


def _short(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
