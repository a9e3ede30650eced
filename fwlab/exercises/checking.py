"""Check the properties of an answer in order, up to the first that fails."""

import ast
import ctypes
import inspect
import io
import math
import queue
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Generator, Tensor

from fwlab import plots
from fwlab.exercises import lab, progress
from fwlab.exercises.answers import (
    Answer,
    Call,
    Wrong,
    calls,
    copied,
    described,
    raised,
    shown,
    smallest,
    tensors,
    where,
)
from fwlab.exercises.notation import EXERCISES, Exercise, Property, printed
from fwlab.exercises.questions import DERIVATIONS, QUESTIONS, Question, say

#: Time limit for the check of one property, in seconds.
SECONDS = 10.0
#: Function that is called with the name of each checked exercise and an error text.
#: The text is "" if the answer is right.
listener: Callable[[str, str], object] | None = None


def check(answer: Any, name: str | None = None) -> bool:
    """Check an answer, and print the properties that hold and the first that fails.

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
        for line in verdict.lines:
            print(f"  {line}")
            right = False
    if right:
        progress.note(exercise.name, True)
    print(
        f"{exercise.name}: "
        + ("all right." if right else f'not yet. Try hint("{exercise.name}").')
    )
    if (
        right
        and not _ours(exercise, answer)
        and (kept := lab.keep(exercise.name, answer))
    ):
        print(kept)
    return right


def assert_correct(answer: Any, name: str | None = None) -> None:
    """Check an answer without printing, for pytest, and raise if it is wrong.

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
        print(complaint or f"{name or answer.__name__} has no example to draw.")
        return None
    draw = exercise.example
    arguments = draw(Generator().manual_seed(0))
    targets = _compared(exercise, _outcome(exercise.reference, arguments), arguments)
    assert targets is not None

    drawn: list[Any] = []

    def holds(answer: Answer, reference: Answer, generator: Generator) -> None:
        result = _explained(answer, arguments)
        drawn.append(_compared(exercise, result, arguments))

    draws = Property("returns something", "", "", exercise.reference, draw, ())
    draws.holds = holds
    (verdict,) = _verdicts(replace(exercise, properties=(draws,)), answer)
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


def hint(name: Any, number: int = 1) -> None:
    """Print a hint for an exercise, a derivation or a question.

    - `name`: the exercise, derivation or question, or the function that answers it.
    - `number`: hint 1 is a nudge; later ones reveal more.
    """
    asked = _asked(name)
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
    """Print the solution to an exercise or derivation, or the answer to a question.

    - `name`: the exercise, derivation or question, or a function that answers it.
    """
    asked = _asked(name)
    if isinstance(asked, Exercise):
        print(printed(asked))
    elif asked is not None and asked.blanks:
        for letter, blank in asked.blanks.items():
            print(f"{letter} = {blank.truth}")
        say(asked.because)
    elif asked is not None:
        say(f"The answer: {asked.answer}. {asked.because}")


def yours_or(answer: Any, name: str | None = None) -> Callable[..., Any]:
    """Return your function if it is right, else fwlab's, and print the choice.

    If the cell is empty or wrong, a right function in my_lab.py is yours.

    - `answer`, `name`: as for `check`. A wrong answer never raises an error.
    - Returns a function to use from here on.
    """
    for each in EXERCISES.values():
        if answer is each.reference:  # This cell has run before.
            name = each.name
    exercise, complaint = _find(answer if name is None else name)
    if exercise is None:
        print(complaint)
        return answer
    if _ours(exercise, answer):
        print(f"{exercise.name}: fwlab's.")
        return answer
    if _is_right(exercise, answer):
        print(f"{exercise.name}: yours, from here on.")
        return answer
    if getattr(answer, "__module__", "my_lab") != "my_lab":  # `mine` may pass None.
        kept = getattr(lab.load(), exercise.name, None)
        if kept and _is_right(exercise, kept):
            print(f"{exercise.name}: not right yet; yours in {lab.FILE}, from here on.")
            return kept
    print(f"{exercise.name}: fwlab's, until yours passes check.")
    return exercise.reference


def _is_right(exercise: Exercise, answer: Answer) -> bool:
    with redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
        return not any(verdict.wrong for verdict in _verdicts(exercise, answer))


def mine(*names: str) -> Any:
    """Return your functions from my_lab.py, or fwlab's where yours are not right.

    The choice is printed, as by `yours_or`.

    - `names`: exercises that `check` found right in an earlier notebook.
    - Returns the function, or several in a list.
    """
    kept = lab.load()
    found = [yours_or(getattr(kept, name, None), name) for name in names]
    return found if len(names) > 1 else found[0]


def golf(answer: Any, name: str) -> bool:
    """Check an answer, and print its number of lines if it is right.

    - `answer`, `name`: as for `check`.
    - Returns True if the answer is right, whatever its number of lines.
    """
    right = check(answer, name)
    exercise, _ = _find(name, callable(answer))
    if exercise is not None and right:
        try:
            yours = lines_of(answer)
        except (OSError, TypeError, SyntaxError):
            print("Its lines cannot be counted: its source is not in a cell or a file.")
        else:
            print(f"Your lines: {yours}. Par: {lines_of(exercise.reference)}.")
    return right


def lines_of(function: Any) -> int:
    """Count the lines of code of a function, one for each statement.

    Comments, blank lines and the docstring do not count.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
    return sum(bool(line.strip()) for line in ast.unparse(tree).splitlines())


class _Verdict(NamedTuple):
    """Hold the verdict on one property of an answer.

    - `wrong`: the error; "" = none. `misconception`: the known mistake behind it, or
      else `case`: the smallest arguments that show the error.
    """

    sentence: str
    wrong: str
    misconception: str = ""
    case: str = ""

    @property
    def lines(self) -> list[str]:
        """Return the lines that `check` prints below the property's sentence."""
        return [x for x in (self.misconception, self.wrong, self.case) if x]

    @property
    def why(self) -> str:
        """Return the property's sentence and the explanation of the error."""
        return " ".join(filter(None, (f"{self.sentence}?", *self.lines)))


def _heard(exercise: Exercise, answer: Answer) -> Iterator[_Verdict]:
    """Yield the verdicts on an answer, and report the outcome to `listener`."""
    exercise.compile()  # Show errors in the exercise to its author.
    why = "its check was stopped"  # This text is replaced when the check ends.
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
    """Return True if an answer is a function of the package."""
    module = getattr(answer, "__module__", None) or ""
    return answer is exercise.reference or module.partition(".")[0] == "fwlab"


def _verdicts(exercise: Exercise, answer: Answer) -> Iterator[_Verdict]:
    """Yield the verdict on each property, in order, up to the first that fails.

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
            except BaseException as error:  # The check is faulty or was stopped.
                verdict = _Verdict(
                    each.says, f"The check ended with {described(error)}"
                )
            verdicts.put(verdict)
            if verdict.wrong or each is exercise.properties[-1]:
                return
            verdicts.join()  # Redirected output would swallow the caller's line.

    thread, stdout = threading.Thread(target=work, daemon=True), sys.stdout
    thread.start()
    for each in exercise.properties:
        try:
            verdict = verdicts.get(timeout=None if _debugged() else SECONDS)
        except queue.Empty:
            place = _stop(thread, answer)
            sys.stdout = stdout
            yield _Verdict(
                each.says,
                f"This took more than {SECONDS:g} seconds, and was stopped"
                f"{f' at {place}' if place else ''}. Is there a loop that never "
                "ends? (If the machine is busy, run the cell again.)",
            )
            return
        except BaseException:
            _stop(thread, answer)
            raise
        if verdict.wrong or each is exercise.properties[-1]:
            thread.join(1)  # A live thread would abort a script at its end.
        try:
            yield verdict
        finally:
            verdicts.task_done()
        if verdict.wrong:
            return


def _verdict(
    exercise: Exercise, tried: Property, answer: Answer, generator: Generator
) -> _Verdict:
    before, start = len(calls.get() or ()), time.monotonic()
    try:
        tried.holds(answer, exercise.reference, generator)
        return _Verdict(tried.says, "")
    except Wrong as wrong:
        why = str(wrong)
    except Exception as error:  # The result was unexpected.
        why = f"Your result led to {described(error)}"
    misconception = case = ""
    try:
        with redirect_stdout(io.StringIO()):  # The output has been printed already.
            misconception = _recognise(exercise, tried, answer, before)
            slow = time.monotonic() > start + SECONDS / 4  # Leave time for a message.
            if not misconception and not slow:
                case = _counterexample(exercise, answer)
    except SystemExit:  # The answer was stopped, or called `sys.exit`.
        pass
    return _Verdict(tried.says, why, misconception, case)


def _recognise(
    exercise: Exercise, failed: Property, answer: Answer, before: int
) -> str:
    """Return the text of the misconception that explains a wrong answer, or "".

    A misconception must agree in all calls and examples; a misconception of the failed
    property must agree only in the calls of this property, from `before` on. There,
    calls that raised an error and small differences do not count, because an answer
    may have other epsilons.
    """
    asked = list(calls.get() or ())
    here = [call for call in asked[before:] if call.result is not None]
    if exercise.example:
        for seed in range(3):
            arguments = exercise.example(Generator().manual_seed(seed))
            asked.append(Call(arguments, _outcome(answer, arguments)))

    def gives(function: Answer, some: list[Call]) -> bool:
        return any(call.result is not None for call in some) and all(
            _same(
                _compared(exercise, _outcome(function, c.arguments), c.arguments),
                _compared(exercise, c.result, c.arguments),
            )
            for c in some
        )

    if gives(exercise.reference, asked):
        return ""  # The results are right, so something else is wrong.
    for text, misconception in exercise.misconceptions:
        if gives(misconception, asked):
            return text
    if gives(exercise.reference, here):
        return ""
    examples = asked[-3:] if exercise.example else []
    for text, functions in failed.catches.items():
        for function in functions:
            agree = [example for example in examples if gives(function, [example])]
            if _varied(here + agree) and _far(exercise, here, function) < 1e-3:
                return text
    return ""


def _varied(some: list[Call]) -> bool:
    """Return True if results vary, since a single value may agree by chance."""
    results = [x for call in some for x in call.result or ()]
    if any(x.layout != torch.strided or x.is_meta for x in results):
        return True  # The values cannot be read.
    return len({number for x in results for number in x.unique().tolist()}) > 1


def _far(exercise: Exercise, asked: list[Call], function: Answer) -> float:
    """Return the ratio of an answer's distances to a function and to the solution."""
    from_function = from_right = 0.0
    for call in asked:
        results = (
            call.result,
            *(_outcome(f, call.arguments) for f in (function, exercise.reference)),
        )
        found, one, right = (
            _compared(exercise, x, call.arguments) or () for x in results
        )
        if [*map(_kind, found)] != [*map(_kind, one)] or len(found) != len(right):
            return math.inf
        for x, y, z in zip(found, one, right, strict=True):
            if x.shape != z.shape or not x.numel() or x.is_complex():
                return math.inf
            if not all(each.isfinite().all() for each in (x, y, z)):
                return math.inf
            from_function = max(from_function, _gap(x, y))
            from_right = max(from_right, _gap(x, z))
    return from_function / from_right if from_right else math.inf


#: Maximum length of a counterexample. A longer one is hard to verify by hand.
LONGEST = 200


def _counterexample(exercise: Exercise, answer: Answer) -> str:
    """Return a text with small arguments for which an answer is wrong, or ""."""
    draw = exercise.example
    if draw is None or exercise.open or exercise.matters:
        return ""  # Other results are right too.
    if any(callable(x) for x in draw(Generator().manual_seed(0)).values()):
        return ""  # An argument is a model.

    def both(given: dict[str, Any]) -> list[tuple[Tensor, ...] | None]:
        return [_outcome(function, given) for function in (answer, exercise.reference)]

    def differ(given: dict[str, Any]) -> bool:
        yours, right = both(given)
        if yours is None or right is None or len(yours) != len(right):
            return False
        if any(_kind(x) != _kind(y) for x, y in zip(yours, right, strict=True)):
            return False
        return all(x.isfinite().all() for x in right) and not _same(yours, right)

    given = smallest(lambda seed: draw(Generator().manual_seed(seed)), differ)
    if given is None:
        return ""
    yours, right = both(given)
    if not yours or not right or len(yours) != len(right) or _same(yours, right):
        return ""  # The answer draws random numbers.
    number = [_same((x,), (y,)) for x, y in zip(yours, right, strict=True)].index(False)
    which = f"result {number + 1} of yours" if len(right) > 1 else "yours"
    arguments = ", ".join(f"{name} = {shown(x)}" for name, x in given.items())
    case = (
        f"With {arguments} {which} is {shown(yours[number])}; right is "
        f"{shown(right[number])}.{_first_step(exercise, answer, given)}"
    )
    return case if len(case) <= LONGEST else ""


def _first_step(exercise: Exercise, answer: Answer, given: dict[str, Any]) -> str:
    """Describe the first variable of the solution that has wrong values in the answer.

    The right values, up to the sign, occur nowhere in the answer. "" = none is wrong.
    """
    yours, right = (_variables(f, given) for f in (answer, exercise.reference))
    numbers = [x for x in yours.values() if isinstance(x, Tensor)]
    for name, x in right.items():
        if not isinstance(x, Tensor):
            continue
        mine = yours.get(name)
        known = any(_same((x,), (sign * y,)) for y in numbers for sign in (1, -1))
        if isinstance(mine, Tensor) and mine.shape == x.shape and not known:
            return f" There {name} is {shown(mine)} in yours, and {shown(x)} in the solution."
    return ""


def _variables(function: Answer, given: dict[str, Any]) -> dict[str, Any]:
    """Return the local variables that a function has at its end, without arguments."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:  # The function is a module, for example.
        return {}
    found: dict[str, Any] = {}

    def watch(frame: Any, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is code:
            found.update(frame.f_locals)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        _outcome(function, given)
    finally:
        sys.setprofile(before)
    own = code.co_varnames[code.co_argcount :]
    return {name: found[name] for name in own if name in found}


def _gap(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).abs().max())


def _outcome(
    function: Answer, arguments: dict[str, Any], catch: bool = True
) -> tuple[Tensor, ...] | None:
    """Call a function and return its tensors, or None after an error."""
    try:
        with torch.enable_grad():  # The function may compute gradients itself.
            return tensors(function(*copied(arguments).values()))
    except SystemExit:
        raise
    except BaseException:
        if catch:
            return None
        raise


def _compared(
    exercise: Exercise, result: tuple[Tensor, ...] | None, arguments: dict[str, Any]
) -> tuple[Tensor, ...] | None:
    """Return the part of a result that `exercise.matters` selects, or all of it."""
    if result is None or exercise.matters is None:
        return result
    try:
        whole = result if len(result) > 1 else result[0]
        return tensors(exercise.matters(whole, *arguments.values()))
    except Exception:  # The result may have another shape.
        return result


def _explained(answer: Answer, arguments: dict[str, Any]) -> Any:
    """Call `_outcome`, and convert an exception to `Wrong` with the learner's line."""
    try:
        return _outcome(answer, arguments, catch=False)
    except BaseException as error:
        reason = raised(answer, error)
        raise Wrong(reason[0].upper() + reason[1:]) from None


def _same(a: tuple[Tensor, ...] | None, b: tuple[Tensor, ...] | None) -> bool:
    if a is None or b is None:
        return a is b
    return len(a) == len(b) and all(
        _kind(x) == _kind(y)
        and torch.allclose(
            x.to(wide := torch.promote_types(x.dtype, torch.float64)),
            y.to(wide),
            1e-5 if torch.float32 in (x.dtype, y.dtype) else 1e-9,
            1e-12,
            equal_nan=True,
        )
        for x, y in zip(a, b, strict=True)
    )


def _kind(x: Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor that two results must share to be compared."""
    return x.shape, x.layout, x.device, x.is_complex()


def _stop(thread: threading.Thread, answer: Answer) -> str:
    """Stop a thread if Python can, and return the learner's line that was running."""
    frames, frame = [], sys._current_frames().get(thread.ident or 0)
    while frame:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_globals))
        frame = frame.f_back
    place = where(answer, frames[::-1])
    end = time.monotonic() + 1
    # An answer may catch the exception, so raise it more than once.
    while thread.is_alive() and time.monotonic() < end:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
        )
        thread.join(0.02)
    return place


def _debugged() -> bool:
    """Return True if a debugger may be at a breakpoint."""
    monitoring = getattr(sys, "monitoring", None)  # This is new in Python 3.12.
    return sys.gettrace() is not None or bool(
        monitoring and monitoring.get_tool(monitoring.DEBUGGER_ID)
    )


def _as_matrix(x: Tensor) -> Tensor:
    """Return the first matrix of a batch, or a vector as a matrix of one row."""
    return x.reshape(-1, *x.shape[-2:])[0] if x.dim() > 1 else x.reshape(1, -1)


def _asked(name: Any) -> Exercise | Question | None:
    """Look up an exercise or question by name, or print the known names."""
    if isinstance(name, str) and name in DERIVATIONS | QUESTIONS:
        return (DERIVATIONS | QUESTIONS)[name]
    exercise, complaint = _find(name)
    if exercise is None:
        print(complaint)
    return exercise


def _find(name: Any, is_function: bool = True) -> tuple[Exercise | None, str]:
    known = ", ".join(EXERCISES)
    if not is_function:
        kind = type(name).__name__ if not isinstance(name, str) else "name"
        return None, (
            f"Pass your function itself, as in check(delta_step), not a {kind}."
        )
    title = name if isinstance(name, str) else getattr(name, "__name__", None)
    if not isinstance(title, str):
        title = type(name).__name__  # The answer may be a module.
    if title not in EXERCISES:
        return None, f"There is no exercise named {title!r}. The exercises: {known}."
    return EXERCISES[title], ""
