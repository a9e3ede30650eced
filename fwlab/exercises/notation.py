"""Define an exercise by its solution, whose docstring has the task and the checks.

README.md says how it is written. Code in docstrings is compiled when it is first used.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from fwlab.exercises.answers import Answer
from fwlab.exercises.properties import Checks, Draw, Holds, exactly


@dataclass
class Property:
    """Describe a property that every right answer has.

    - `says`: the sentence that `check` prints: what the answer does.
    - `code`: the check below it, an expression.
    - `right`: the expected result, as an expression of the arguments; "" = the result
      of the solution.
    - `solution`, `draw`, `returns`: as for `exercise`.
    - `because`: the likely cause of a failure.
    - `catches`: common wrong functions that fail here first, by a sentence that says
      what is wrong with them.
    """

    says: str
    code: str
    right: str
    solution: Answer
    draw: Draw | None
    returns: tuple[str, ...]
    because: str = ""
    catches: dict[str, tuple["Misconception", ...]] = field(default_factory=dict)

    @cached_property
    def holds(self) -> Holds:
        """Return the check, which raises `Wrong` for an answer without the property."""
        scope, expected = self.solution.__globals__, None
        try:
            if self.right:
                expected = eval(_lambda(self.solution, self.right), scope)
            checks = Checks(
                self.draw or exactly(), self.returns, self.because, expected
            )
            names = {n: getattr(checks, n) for n in KINDS} | {"because": self.because}
            holds: Holds = eval(self.code, scope, names)
            if holds in names.values():
                raise TypeError("it is not called")
            return holds
        except Exception as error:
            line = self.code.splitlines()[0]
            raise _fault(self.solution, line, f"raises {error!r}") from error


#: Names of the methods of `Checks` that the code below a ✓ may call.
KINDS = ("shape", "agrees", "gradient", "is_causal", "in_chunks")


@dataclass(frozen=True)
class Exercise:
    """Describe an exercise: a function that the learner writes.

    - `name`: the name of the learner's function.
    - `task`: what to write, in Markdown: a title, then arguments and result.
    - `reference`: the solution; answers are compared with it.
    - `properties`: properties that must hold, easiest first.
    - `hints`: each reveals more than the one before.
    - `example`: draws arguments, by name and in order; for `show`, and to
      recognise misconceptions.
    - `matters`: the part of a result in which all right answers agree, as a
      function of the result and the arguments; None = all of it.
    - `difficulty`: from 1, a line that copies an equation, to 5.
    - `importance`: from 1, optional, to 5, needed by all later notebooks.
    - `minutes`: time for the exercise, with reading and thinking.
    - `notebook`: the notebook that asks it, such as "04_delta_rule".
    - `start`: the faulty code that a bug hunt begins with; "" = an empty function.
    - `open`: True if many answers with other results are right.
    """

    name: str
    task: str
    reference: Answer
    properties: tuple[Property, ...]
    hints: tuple[str, ...]
    example: Draw | None = None
    matters: Callable[..., Any] | None = None
    difficulty: int = 2
    importance: int = 3
    minutes: int = 10
    notebook: str = ""
    start: str = ""
    open: bool = False

    @property
    def signature(self) -> str:
        """Return the code that a learner starts from."""
        if self.start:
            return self.start
        parameters = inspect.signature(self.reference).parameters.values()
        names = ", ".join(p.name for p in parameters if p.default is p.empty)
        return f"def {self.name}({names}): ...  # your code here"

    def compile(self) -> None:
        """Compile all code in the docstring of the exercise.

        - Raises `ValueError`, with file and line, if some code is faulty.
        """
        for each in self.properties:
            _ = each.holds
        for _, misconception in self.misconceptions:
            _ = misconception.made

    @property
    def misconceptions(self) -> list[tuple[str, "Misconception"]]:
        """Return common wrong functions, each with an explanation of the mistake."""
        return [
            (text, function)
            for each in self.properties
            for text, functions in each.catches.items()
            for function in functions
        ]


COURSE = Path(__file__).with_name("course")
EXERCISES: dict[str, Exercise] = {}
"""Every exercise by name."""


def exercise(
    draw: Draw | None = None,
    *,
    returns: tuple[str, ...] = (),
    example: Draw | None = None,
    matters: Callable[..., Any] | None = None,
    difficulty: int = 2,
    importance: int = 3,
    minutes: int = 10,
    start: str = "",
    open: bool = False,
) -> Callable[[Answer], Answer]:
    """Register the decorated solution as an exercise in `EXERCISES`.

    - `draw`: draws the arguments of the checks.
    - `returns`: names of the results, if there are several.
    - `example`: draws other arguments for the example; None = use `draw`.
    - `matters`, `difficulty`, `importance`, `minutes`, `start`, `open`: as in `Exercise`.
    - Returns a decorator, which returns the solution unchanged.
    - Raises `ValueError`, with file and line, if the docstring cannot be read.
    """

    def add(function: Answer) -> Answer:
        task, properties, hints = _read(function, draw, returns, start)
        file = Path(inspect.getfile(function))
        notebook = file.stem if file.parent == COURSE else ""
        EXERCISES[function.__name__] = Exercise(
            function.__name__,
            task,
            function,
            properties,
            hints,
            example or (draw if _draws_alone(draw) else None),
            matters,
            difficulty,
            importance,
            minutes,
            notebook,
            start,
            open,
        )
        return function

    return add


def _read(
    function: Answer, draw: Draw | None, returns: tuple[str, ...], start: str
) -> tuple[str, tuple[Property, ...], tuple[str, ...]]:
    """Return the task, the properties and the hints in a docstring."""
    (_, task, _), *items = _items(function)
    properties: list[Property] = []
    hints = []
    for sign, words, code in items:
        if sign in "!✗" and not properties:
            raise _fault(function, words, "comes before the first ✓")
        if sign == "?":
            hints.append(words)
        elif sign == "✓":
            check, _, right = "\n".join(code).partition("\n== ")
            properties.append(Property(words, check, right, function, draw, returns))
        elif sign == "!":
            properties[-1].because = words
        elif words in properties[-1].catches:
            raise _fault(function, words, "is there twice")
        else:
            lines = re.sub(r"\n +", " ", "\n".join(code)).split("\n")
            wrong = tuple(Misconception(function, line, start) for line in lines)
            properties[-1].catches[words] = wrong
    if not properties:
        raise _fault(function, function.__name__, "has no ✓")
    return task, tuple(properties), tuple(hints)


class Misconception:
    """Hold a common wrong function, which a line below a ✗ describes."""

    def __init__(self, function: Answer, line: str, start: str) -> None:
        self.line = line
        self._function, self._start = function, start

    @property
    def source(self) -> str:
        """Return the wrong function's code: an edited solution, or an expression."""
        name = self._function.__name__
        if self.line.startswith("start:"):
            edits = self.line.removeprefix("start:").strip()
            return _edited(self._function, self.line, self._start, edits)
        if " ->" in self.line:
            return _edited(self._function, self.line, bare(self._function), self.line)
        if re.match(r"\w+=[^=]", self.line):
            return f"{name}(**locals() | dict({self.line}))"
        return self.line

    @cached_property
    def made(self) -> Answer:
        name = self._function.__name__
        try:
            if self.line.startswith("start:") or " ->" in self.line:
                return _defined(name, self.source, self._function)
            whole = _lambda(self._function, self.source)
            made: Answer = eval(whole, self._function.__globals__)
            return made
        except SyntaxError as error:
            raise _fault(
                self._function, self.line, f"is not Python: {error}"
            ) from error

    def __call__(self, *given: Any) -> Any:
        return self.made(*given)


def started(name: str) -> Answer:
    """Return the faulty function that a bug hunt starts with.

    - `name`: the exercise.
    - Returns the faulty function.
    """
    return Misconception(
        EXERCISES[name].reference, "start:", EXERCISES[name].start
    ).made


@cache
def bare(function: Answer) -> str:
    """Return the code of a function without decorators and docstring."""
    source = textwrap.dedent(inspect.getsource(function))
    tree: Any = ast.parse(source).body[0]
    lines = source.splitlines()
    doc = tree.body[0]
    head, body = lines[tree.lineno - 1 : doc.lineno - 1], lines[doc.end_lineno :]
    return "\n".join(head) + "\n" + "\n".join(body).lstrip("\n")


def printed(exercise: Exercise) -> str:
    """Return the solution with its imports, and with the functions that it calls."""
    imports: dict[str, None] = {}
    functions: list[str] = []
    found = [exercise.reference]
    for each in found:
        nodes = ast.walk(ast.parse(bare(each)))
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        functions.append(bare(each))
        for name in sorted(used - {f.__name__ for f in found}):
            helper: Any = vars(sys.modules[each.__module__]).get(name)
            if name in EXERCISES:
                found.append(EXERCISES[name].reference)
            elif getattr(helper, "__module__", "") == each.__module__:
                found.append(helper)
        source = ""
        with suppress(OSError, TypeError):  # The source may be a notebook cell.
            source = inspect.getsource(sys.modules[each.__module__])
        for node in ast.parse(source).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                named = {a.asname or a.name: a for a in node.names}
                node.names = [named[n] for n in named if n in used - EXERCISES.keys()]
                if node.names:
                    imports[ast.unparse(node)] = None
    head = ["\n".join(imports)] if imports else []
    return "\n\n\n".join([*head, *reversed(functions)])


def _items(function: Answer) -> list[tuple[str, str, list[str]]]:
    """Split a docstring into the task and items (sign, text and lines of code)."""
    items: list[tuple[str, list[str], list[str]]] = [("", [], [])]
    for line in inspect.cleandoc(function.__doc__ or "").splitlines():
        sign, words, code = items[-1]
        if line[:2] in ("✓ ", "! ", "✗ ", "? "):
            items.append((line[0], [line[2:]], []))
        elif sign in ("✓", "✗") and line.startswith("    "):
            code.append(line[4:])
        elif sign and line.strip() and (code or not line.startswith("  ")):
            raise _fault(function, line, "is neither text nor code of an item")
        else:
            words.append(line)
    for sign, said, code in items:
        if sign in ("✓", "✗") and not code:
            raise _fault(function, said[0], "has no code below it")
    return [
        (sign, " ".join(" ".join(said).split()), code) for sign, said, code in items
    ]


def _draws_alone(draw: Draw | None) -> bool:
    """Return True if `draw` needs no argument except a generator."""
    if draw is None:
        return False
    _, *others = inspect.signature(draw).parameters.values()
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return all(p.default is not p.empty or p.kind in several for p in others)


def _lambda(function: Answer, expression: str) -> str:
    """Return the source of a lambda with the parameters of `function`."""
    return f"lambda {', '.join(inspect.signature(function).parameters)}: ({expression})"


def _edited(function: Answer, line: str, source: str, edits: str) -> str:
    """Apply `old -> new` edits to a source, in which each old text occurs once."""
    found = []
    for edit in filter(None, edits.split(" ; ")):
        old, arrow, new = edit.partition(" ->")
        old, times = old.strip(), source.count(old.strip())
        if not arrow:
            raise _fault(function, line, f"there is no -> in {edit!r}")
        if times != 1:
            raise _fault(function, line, f"{old!r} occurs {times} times, not once")
        found.append((source.index(old), old, new.strip()))
    end = len(source)
    for place, old, new in sorted(found, reverse=True):
        if place + len(old) > end:
            raise _fault(function, line, "two edits overlap")
        end = place
        source = source[:place] + new + source[place + len(old) :]
    return source


def _defined(name: str, source: str, beside: Answer) -> Answer:
    """Compile function `name` from a source, with the globals of function `beside`."""
    scope = dict(beside.__globals__)
    exec(compile(source, f"<{name}, changed>", "exec"), scope)
    defined: Answer = scope[name]
    return defined


def _fault(function: Answer, line: str, why: str) -> ValueError:
    """Return an error that names the file, the line and the exercise."""
    lines, first = inspect.getsourcelines(function)
    line = line.strip()
    texts = [each.strip().lstrip("✓✗!? ") for each in lines]
    here = [i for i, each in enumerate(texts, first) if each and line.startswith(each)]
    where = f"{inspect.getsourcefile(function)}:{[*here, first][0]}"
    return ValueError(f"{where}: {function.__name__}: {line!r}: {why}")
