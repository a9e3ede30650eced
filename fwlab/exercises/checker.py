"""Checking an answer: properties in order, up to the first that fails."""

import ctypes
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Generator, Tensor

from fwlab import plots
from fwlab.exercises import progress
from fwlab.exercises.asking import (
    Answer,
    Call,
    Wrong,
    calls,
    copied,
    described,
    raised,
    tensors,
    where,
)
from fwlab.exercises.exercise import Exercise, Property

#: How long an answer may take to check one property.
SECONDS = 10.0
#: Called with the name of each exercise that is checked, and why the answer is
#: wrong ("" = it is right).
listener: Callable[[str, str], object] | None = None


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
    for verdict in _heard(exercise, answer):
        print(f"{'✗' if verdict.wrong else '✓'} {verdict.sentence}")
        for line in filter(None, (verdict.misconception, verdict.wrong)):
            print(f"  {line}")
            right = False
    if right:
        progress.note(exercise.name, True)
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
    for verdict in list(_heard(exercise, answer)):
        if verdict.wrong:
            raise AssertionError(f"{exercise.name} is wrong: {verdict.why}")


def show(answer: Any, name: str | None = None) -> Figure | None:
    """Draw the result of an answer, the target, and their difference.

    - `answer`, `name`: as for `check`.
    - Returns the figure, which a notebook displays. If there is nothing to
      draw, prints why and returns None.
    """
    exercise, complaint = _find(answer if name is None else name, callable(answer))
    if exercise is None or exercise.example is None:
        print(complaint or f"{name} has no example to draw.")
        return None
    arguments = exercise.example(Generator().manual_seed(0))
    targets = _compared(exercise, _outcome(exercise.reference, arguments), arguments)
    assert targets is not None

    drawn: list[Any] = []

    def holds(answer: Answer, reference: Answer, generator: Generator) -> None:
        result = _explained(answer, arguments)
        drawn.append(_compared(exercise, result, arguments))

    draws = Property("returns something", holds)
    one = Exercise(exercise.name, "", exercise.reference, (draws,), ())
    (verdict,) = _verdicts(one, answer)
    if verdict.wrong or drawn[0] is None:
        print(verdict.wrong or "Your function returned nothing that can be drawn.")
        return None
    figure = Figure(figsize=(6.4, 2.2 * len(targets)), layout="constrained")
    rows = figure.subplots(len(targets), 3, squeeze=False)
    for row, yours, target in zip(rows, drawn[0], targets, strict=False):
        if yours.is_complex():
            print("Your result has complex numbers.")
            return None
        if yours.shape != target.shape:
            print(f"Yours is {list(yours.shape)}, the target {list(target.shape)}.")
            return None
        yours, target = yours.double(), target.double()
        limit = max(target.abs().max().item(), 1e-3)
        difference = yours - target
        parts = {"yours": yours, "target": target, "difference": difference}
        for ax, (title, values) in zip(row, parts.items(), strict=True):
            plots.matrix(ax, _as_matrix(values), title, limit)
    return figure


class _Verdict(NamedTuple):
    """The sentence of a property, what is wrong ("" = nothing), and what is wrong
    with a well-known mistake if it is one.
    """

    sentence: str
    wrong: str
    misconception: str = ""

    @property
    def why(self) -> str:
        """The whole explanation, if something is wrong."""
        return " ".join(
            filter(None, (f"{self.sentence}?", self.misconception, self.wrong))
        )


def _heard(exercise: Exercise, answer: Answer) -> Iterator[_Verdict]:
    """Yield the verdicts, and tell the listener their outcome."""
    why = "its check was stopped"  # unless we get further
    try:
        for verdict in _verdicts(exercise, answer):
            if verdict.wrong:
                why = verdict.why
            yield verdict
            if verdict.wrong:
                return
        why = "this is fwlab's own function" if _ours(exercise, answer) else ""
    finally:
        if listener is not None:
            listener(exercise.name, why)


def _ours(exercise: Exercise, answer: Answer) -> bool:
    """Whether an answer is a function of the package."""
    module = getattr(answer, "__module__", None) or ""
    return answer is exercise.reference or module.partition(".")[0] == "fwlab"


def _verdicts(exercise: Exercise, answer: Answer) -> Iterator[_Verdict]:
    """The verdict on each property, in order, up to the first that fails.

    The answer runs in a thread of its own: there it cannot hang the caller,
    whose modes (no_grad, autocast, default device) do not matter either.
    """
    verdicts: queue.Queue[_Verdict] = queue.Queue()

    def work() -> None:
        calls.set([])
        for number, each in enumerate(exercise.properties):
            generator = Generator().manual_seed(number)
            try:
                verdict = _verdict(exercise, each, answer, generator)
            except BaseException as error:  # the answer was stopped
                verdict = _Verdict(each.says, f"It ended with {type(error).__name__}.")
            verdicts.put(verdict)
            if verdict.wrong:
                return

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    for each in exercise.properties:
        try:
            verdict = verdicts.get(timeout=None if _debugged() else SECONDS)
        except queue.Empty:
            place = _stop(thread, answer)
            yield _Verdict(
                each.says,
                f"This took more than {SECONDS:g} seconds, and was stopped"
                f"{f' at {place}' if place else ''}. Is there a loop that never ends?",
            )
            return
        except BaseException:
            _stop(thread, answer)
            raise
        if verdict.wrong or each is exercise.properties[-1]:
            thread.join(1)  # a thread that lives when a script ends would abort it
        yield verdict
        if verdict.wrong:
            return


def _verdict(
    exercise: Exercise, tried: Property, answer: Answer, generator: Generator
) -> _Verdict:
    try:
        tried.holds(answer, exercise.reference, generator)
        return _Verdict(tried.says, "")
    except Wrong as wrong:
        why = str(wrong)
    except Exception as error:  # an answer that we did not foresee
        why = f"Your result led to {described(error)}"
    return _Verdict(tried.says, why, _recognise(exercise, answer))


def _recognise(exercise: Exercise, answer: Answer) -> str:
    """The misconception that gives the same results as an answer, if any:
    in all calls so far, and on examples.
    """
    asked = list(calls.get() or ())
    if exercise.example:
        for seed in range(3):
            arguments = exercise.example(Generator().manual_seed(seed))
            asked.append(Call(arguments, _outcome(answer, arguments)))
    if all(call.result is None for call in asked):
        return ""

    def gives_all(function: Answer) -> bool:
        return all(
            _same(
                _compared(exercise, _outcome(function, c.arguments), c.arguments),
                _compared(exercise, c.result, c.arguments),
            )
            for c in asked
        )

    if gives_all(exercise.reference):
        return ""  # the numbers are right: something else is wrong
    for text, misconception in exercise.misconceptions:
        if gives_all(misconception):
            return text
    return ""


def _outcome(
    function: Answer, arguments: dict[str, Any], catch: bool = True
) -> tuple[Tensor, ...] | None:
    """The tensors that a function returns; None = none, or an error."""
    try:
        with torch.enable_grad():  # it may take a gradient itself
            return tensors(function(*copied(arguments).values()))
    except BaseException:
        if catch:
            return None
        raise


def _compared(
    exercise: Exercise, result: tuple[Tensor, ...] | None, arguments: dict[str, Any]
) -> tuple[Tensor, ...] | None:
    """The part of a result that matters, if there is one."""
    if result is None or exercise.matters is None:
        return result
    try:
        whole = result if len(result) > 1 else result[0]
        return tensors(exercise.matters(whole, *arguments.values()))
    except Exception:  # of another shape, for example
        return result


def _explained(answer: Answer, arguments: dict[str, Any]) -> Any:
    """What `_outcome` returns; an error raises `Wrong`, which says its place."""
    try:
        return _outcome(answer, arguments, catch=False)
    except BaseException as error:
        reason = raised(answer, error)
        raise Wrong(reason[0].upper() + reason[1:]) from None


def _same(a: tuple[Tensor, ...] | None, b: tuple[Tensor, ...] | None) -> bool:
    if a is None or b is None:
        return a is b
    return len(a) == len(b) and all(
        (x.shape, x.layout, x.device) == (y.shape, y.layout, y.device)
        and x.is_complex() == y.is_complex()
        and torch.allclose(
            x.to(wide := torch.promote_types(x.dtype, torch.float64)),
            y.to(wide),
            1e-5 if torch.float32 in (x.dtype, y.dtype) else 1e-9,
            1e-12,
            equal_nan=True,
        )
        for x, y in zip(a, b, strict=True)
    )


def _stop(thread: threading.Thread, answer: Answer) -> str:
    """End a thread, as far as Python can; returns where it was."""
    frames, frame = [], sys._current_frames().get(thread.ident or 0)
    while frame:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_globals))
        frame = frame.f_back
    place = where(answer, frames[::-1])
    end = time.monotonic() + 1
    # An answer may catch it, so ask more than once.
    while thread.is_alive() and time.monotonic() < end:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
        )
        thread.join(0.02)
    return place


def _debugged() -> bool:
    """Whether somebody may stand at a breakpoint."""
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    return sys.gettrace() is not None or bool(
        monitoring and monitoring.get_tool(monitoring.DEBUGGER_ID)
    )


def _as_matrix(x: Tensor) -> Tensor:
    """The first matrix of a batch; a vector is a matrix of one row."""
    return x.reshape(-1, *x.shape[-2:])[0] if x.dim() > 1 else x.reshape(1, -1)


def _find(name: Any, is_function: bool = True) -> tuple[Exercise | None, str]:
    from fwlab.exercises import EXERCISES

    known = ", ".join(EXERCISES)
    if not is_function:
        kind = type(name).__name__ if not isinstance(name, str) else "name"
        return None, (
            f"Pass your function itself, as in check(delta_step), not a {kind}."
        )
    title = name if isinstance(name, str) else getattr(name, "__name__", None)
    if not isinstance(title, str):
        title = type(name).__name__  # of a module, for example
    if title not in EXERCISES:
        return None, f"There is no exercise named {title!r}. The exercises: {known}."
    return EXERCISES[title], ""
