"""Fast weight puzzles: write keys, values, strengths and queries by hand.

```python
from fwlab.exercises.puzzles import puzzle, row, solve

puzzle("keep")          # the task; puzzle("keep", hint=1) prints a hint
solve(
    "keep",
    {
        "a=": row(key=[1], value="x", beta=1),
        "a?": row(query=[1]),
    },
)
```

A sequence of tokens comes in, such as `a=3 a? a=5 a?`. For each kind of token
you write a row, or a list of rows if it takes several steps. `solve` runs the
rows on many sequences: one matrix, which begins as 0, is updated by each row,
and read with the query of a token's last row. The puzzles are in puzzles.toml.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import isfinite
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from fwlab import ops, plots
from fwlab.exercises.asking import Wrong
from fwlab.exercises.exercise import say

__all__ = ["Verdict", "puzzle", "row", "solve"]

#: Query, key, value and strength of a step, in numbers.
Inputs = tuple[list[float], ...]
#: Numbers that are not 0 are in these bounds: otherwise a tiny strength and a
#: huge value could pass for a rule that adds.
SMALL, LARGE = 0.01, 100
#: Steps that fit into one picture, and side by side in it.
SHOWN, COLUMNS = 12, 6


@dataclass(frozen=True)
class Row:
    """What one step does; `None` = left out, `...` = still blank."""

    key: Any = None
    value: Any = None
    beta: Any = None
    query: Any = None


def row(key: Any = None, value: Any = None, beta: Any = None, query: Any = None) -> Row:
    """A row of a puzzle: one step.

    - `key`: its numbers; without a key, nothing is written.
    - `value`: a number or several, or "x" for what comes with the token, or
      "-x". Without a value it is 0.
    - `beta`: the strength; without one it is 1.
    - `query`: its numbers.
    """
    return Row(key, value, beta, query)


@dataclass(frozen=True)
class Token:
    """A token of a sequence.

    - `kind`: what its row depends on.
    - `x`: the numbers that come with it.
    - `expected`: what has to be read after it; None = anything.
    """

    kind: str
    x: tuple[float, ...]
    expected: tuple[float, ...] | None

    def __str__(self) -> str:
        return self.kind + _shown(self.x)


@dataclass(frozen=True)
class Puzzle:
    """A puzzle, with the fields of puzzles.toml."""

    name: str
    title: str
    task: str
    rule: str
    numbers: int
    limit: tuple[int, int]
    best: tuple[int, int]
    why: str
    hints: tuple[str, ...]
    rows: dict[str, tuple[str, ...]]
    given: dict[str, tuple[Row, ...]]
    cases: tuple[tuple[Token, ...], ...]
    strength: float = 1
    example: dict[str, tuple[Row, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """A row, completed and in numbers; the value is `times` · x + `plus`."""

    key: list[float]
    times: float
    plus: list[float]
    beta: float
    query: list[float]


@dataclass(frozen=True)
class Verdict:
    """What `solve` found; it is true if the rows are right.

    - `says`: the verdict in words.
    - `size`: steps for a token, and columns; None = the rows are not complete.
    - `case`: the sequence that fails; None = no sequence does.
    - `readings`: after each of the tokens of that sequence up to the first
      wrong one.
    """

    puzzle: Puzzle
    says: str
    steps: dict[str, list[Step]] = field(default_factory=dict)
    size: tuple[int, int] | None = None
    case: int | None = None
    readings: tuple[tuple[float, ...], ...] = ()

    def __bool__(self) -> bool:
        return self.size is not None and self.case is None

    def figure(self) -> Figure | None:
        """The matrix after each step of the sequence that fails, or of one that
        is right; None if there is nothing to draw.
        """
        return None if self.size is None else _draw(self)

    def _ipython_display_(self) -> None:
        if figure := self.figure():
            from IPython.display import display

            display(figure)


def puzzle(name: str, hint: int = 0) -> None:
    """Print the task of a puzzle.

    - `name`: the puzzle.
    - `hint`: print this hint instead; hint 1 is a nudge.
    """
    asked = _find(name)
    if asked is None:
        return
    if hint:
        count = len(asked.hints)
        if hint not in range(1, count + 1):
            print(f"{name} has {count} hints: 1 to {count}.")
            return
        say(f"Hint {hint} of {count}: {asked.hints[hint - 1]}")
        return
    rule = "sum rule, no strengths"
    if asked.rule == "delta":
        rule = f"delta rule, β · |key|² up to {asked.strength:g}"
    print(asked.title.upper())
    say(asked.task)
    print(f"For example:  {_told(asked.cases[0])}")
    kinds: dict[tuple[str, ...], list[str]] = {}
    for kind, names in asked.rows.items():
        kinds.setdefault(names, []).append(kind)
    wanted = (f"{', '.join(n)} of {', '.join(k)}" for n, k in kinds.items())
    say(f"You write: {'; '.join(wanted)}.")
    for kind, rows in asked.given.items():
        print(f"Given: {kind} {' then '.join(map(_of_row, rows))}.")
    print(
        f"Limits: {rule}; at most {_steps(asked.limit[0])} for a token, "
        f"{_columns(asked.limit[1])}."
    )


def solve(name: str, rows: Any = ...) -> Verdict | None:
    """Check the rows of a puzzle, and print what is wrong, or their score.

    - `name`: the puzzle.
    - `rows`: by kind of token, a row or a list of rows.
    - Returns the verdict, which is true or false; a notebook displays it as
      the matrix at work. None = there is no such puzzle.
    """
    asked = _find(name)
    if asked is None:
        return None
    verdict = judge(asked, rows)
    say(verdict.says)
    return verdict


def judge(asked: Puzzle, rows: Any) -> Verdict:
    """The verdict on some rows, as `solve` prints it."""
    try:
        blank = _blank(asked, rows)
        if blank:
            return Verdict(asked, f"Still blank: {', '.join(blank)}.")
        steps = _steps_of(asked, rows)
    except Wrong as error:
        return Verdict(asked, f"✗ {error}")
    width = len(next(iter(steps.values()))[0].key)
    size = max(len(of_token) for of_token in steps.values()), width
    read = _read(asked, steps)
    for n, (case, readings) in enumerate(zip(asked.cases, read, strict=True)):
        for t, (token, found) in enumerate(zip(case, readings, strict=True)):
            if token.expected is None or _near(found, token.expected):
                continue
            before = " ".join(str(token) for token in case[: t + 1])
            says = (
                f"✗ Wrong in the sequence {before}: the last reading is "
                f"{_shown(found)}, expected {_shown(token.expected)}."
            )
            failed = tuple(tuple(r) for r in readings[: t + 1])
            return Verdict(asked, says, steps, size, n, failed)
    return Verdict(asked, _praise(asked, size), steps, size)


def _praise(asked: Puzzle, size: tuple[int, int]) -> str:
    score, best = size[0] * size[1], asked.best[0] * asked.best[1]
    found = (
        f"✓ Right in all {len(asked.cases)} sequences: {_size(size)}, score {score}."
    )
    if score > best:
        return f"{found} A smaller one is known: {_size(asked.best)}, score {best}."
    return f"{found} Nothing smaller exists: {asked.why}."


# --- From what a reader wrote to numbers -------------------------------


def _blank(asked: Puzzle, rows: Any) -> list[str]:
    """The kinds of tokens whose rows are not written yet."""
    if rows is ...:
        return [*asked.rows]
    if not isinstance(rows, Mapping):
        first = next(iter(asked.rows))
        raise Wrong(f'Expected rows by kind of token, as in {{"{first}": row(...)}}.')
    for kind in rows:
        if kind not in asked.rows:
            why = (
                "its row is given" if kind in asked.given else "there is no such token"
            )
            raise Wrong(f"{kind!r}: {why}. Expected rows for {', '.join(asked.rows)}.")

    def is_blank(kind: str) -> bool:
        parts = rows.get(kind, ...)
        parts = parts if isinstance(parts, list | tuple) else [parts]
        return not parts or any(
            part is ... or (isinstance(part, Row) and ... in _parts(part).values())
            for part in parts
        )

    return [kind for kind in asked.rows if is_blank(kind)]


def _parts(of: Row) -> dict[str, Any]:
    return {f.name: getattr(of, f.name) for f in fields(of)}


def _steps_of(asked: Puzzle, rows: Mapping[str, Any]) -> dict[str, list[Step]]:
    """The steps of each kind of token, completed and in numbers."""
    whole: dict[str, list[Row]] = {}
    for kind in {**asked.rows, **asked.given}:
        given = asked.given.get(kind, ())
        written = rows[kind] if kind in asked.rows else [Row()] * len(given)
        whole[kind] = _merged(asked, kind, written, given)
    width = _width(asked, whole)
    return {
        kind: [_step(asked, kind, each, width) for each in parts]
        for kind, parts in whole.items()
    }


def _merged(asked: Puzzle, kind: str, written: Any, given: Sequence[Row]) -> list[Row]:
    """Rows of a token, with what is given in them."""
    written = [*written] if isinstance(written, list | tuple) else [written]
    if not all(isinstance(each, Row) for each in written):
        raise Wrong(f"{kind}: expected row(...) or a list of them.")
    if given and len(written) != len(given):
        raise Wrong(f"{kind}: expected {_steps(len(given))}, got {len(written)}.")
    if len(written) > asked.limit[0]:
        raise Wrong(
            f"{kind}: at most {_steps(asked.limit[0])} for a token, got {len(written)}."
        )
    wanted = asked.rows.get(kind, ())
    for number, each in enumerate(written):
        has = [name for name, part in _parts(each).items() if part is not None]
        for name in has:
            if name not in wanted:
                raise Wrong(f"{kind}: expected {' and '.join(wanted)}, and no {name}.")
        last = number == len(written) - 1
        if "query" in has and not last:
            raise Wrong(f"{kind}: the query belongs into the last row.")
        needed = wanted if "key" not in wanted else ("query",) if last else ()
        for name in needed:
            if name in wanted and name not in has:
                raise Wrong(f"{kind}: expected a {name}.")
    merged = zip(written, given or [Row()] * len(written), strict=True)
    return [
        Row(
            *(
                a if b is None else b
                for a, b in zip(
                    _parts(one).values(), _parts(other).values(), strict=True
                )
            )
        )
        for one, other in merged
    ]


def _width(asked: Puzzle, whole: Mapping[str, Sequence[Row]]) -> int:
    """The number of columns of the matrix: the length of all keys and queries."""
    first: tuple[str, int] | None = None
    for kind, parts in whole.items():
        for each in parts:
            for name in ("key", "query"):
                if (vector := getattr(each, name)) is None:
                    continue
                if not isinstance(vector, list | tuple | Tensor) or not len(vector):
                    raise Wrong(f"{kind}: expected the {name} as a list, as [1, 0].")
                here = f"the {name} of {kind}"
                if first and first[1] != len(vector):
                    raise Wrong(
                        f"All keys and queries need the same length: {first[0]} has "
                        f"{first[1]}, {here} has {len(vector)}."
                    )
                first = first or (here, len(vector))
    if first is None:
        raise Wrong("Expected at least one key.")
    if first[1] > asked.limit[1]:
        raise Wrong(f"At most {_columns(asked.limit[1])}, got {first[1]}.")
    return first[1]


def _step(asked: Puzzle, kind: str, of: Row, width: int) -> Step:
    zeros = [0.0] * width
    key = zeros if of.key is None else [_number(kind, "key", n) for n in of.key]
    query = zeros if of.query is None else [_number(kind, "query", n) for n in of.query]
    beta = 1.0 if of.beta is None else _number(kind, "beta", of.beta)
    times, plus = _value(asked, kind, of.value)
    if asked.rule == "delta":
        strength = beta * sum(n * n for n in key)
        if beta < 0 or strength > asked.strength + 1e-9:
            raise Wrong(
                f"{kind}: expected β · |key|² from 0 to {asked.strength:g}, "
                f"got {strength:g}."
            )
    return Step(key, times, plus, beta, query)


def _value(asked: Puzzle, kind: str, value: Any) -> tuple[float, list[float]]:
    zeros = [0.0] * asked.numbers
    if isinstance(value, str) and value.strip() in ("x", "-x"):
        if not kind.endswith("="):
            raise Wrong(f"{kind}: no number comes with this token, so there is no x.")
        return (-1.0 if "-" in value else 1.0), zeros
    if value is None:
        return 0.0, zeros
    several = isinstance(value, list | tuple | Tensor)
    numbers = [_number(kind, "value", n) for n in (value if several else [value])]
    if len(numbers) == 1:
        numbers *= asked.numbers
    if len(numbers) != asked.numbers:
        raise Wrong(f"{kind}: expected {asked.numbers} numbers as the value.")
    return 0.0, numbers


def _number(kind: str, name: str, number: Any) -> float:
    if isinstance(number, Tensor) and number.dim() == 0:
        number = number.item()
    if isinstance(number, bool) or not isinstance(number, Real):
        also = ', or "x"' if name == "value" else ""
        raise Wrong(f"{kind}: expected numbers in the {name}{also}, got {number!r}.")
    size = abs(float(number))
    if not isfinite(size) or (size and not SMALL <= size <= LARGE):
        raise Wrong(
            f"{kind}: numbers are 0, or {SMALL:g} to {LARGE} in size; got {number} in "
            f"the {name}."
        )
    return float(number)


# --- Running them ------------------------------------------------------


def _inputs(
    asked: Puzzle, steps: Mapping[str, Sequence[Step]], case: Sequence[Token]
) -> list[Inputs]:
    """Query, key, value and strength of each step of a sequence."""
    found: list[Inputs] = []
    for token in case:
        x = token.x or (0.0,) * asked.numbers
        for s in steps[token.kind]:
            v = [s.times * n + plus for n, plus in zip(x, s.plus, strict=True)]
            found.append((s.query, s.key, v, [s.beta]))
    return found


def _run(asked: Puzzle, rows: Sequence[Any], state: Tensor | None = None) -> Any:
    """Readings `[sequence, step, number]` and the last matrices, by fwlab's rules."""
    q, k, v, beta = (
        torch.tensor(
            [[step[part] for step in each] for each in rows], dtype=torch.float64
        )[:, :, None]
        for part in range(4)
    )
    options: dict[str, Any] = {
        "state": state,
        "return_state": True,
        "implementation": "naive",
    }
    if asked.rule == "sum":
        y, W = ops.sum_rule(q, k, v, normalize=False, **options)
    else:
        y, W = ops.delta_rule(q, k, v, beta[..., 0], **options)
    return y[:, :, 0], W


def _read(asked: Puzzle, steps: dict[str, list[Step]]) -> list[list[list[float]]]:
    """What is read after each token of each sequence: all of them in one run,
    the shorter ones with steps at their end that write nothing.
    """
    rows = [_inputs(asked, steps, case) for case in asked.cases]
    most = max(map(len, rows))
    width = len(rows[0][0][0])
    empty = ([0.0] * width, [0.0] * width, [0.0] * asked.numbers, [0.0])
    y, _ = _run(asked, [each + [empty] * (most - len(each)) for each in rows])
    found = []
    for case, readings in zip(asked.cases, y.tolist(), strict=True):
        ends, t = [], -1
        for token in case:
            t += len(steps[token.kind])
            ends.append(readings[t])
        found.append(ends)
    return found


def _near(found: Sequence[float], expected: Sequence[float]) -> bool:
    return all(
        abs(a - b) <= 1e-8 * (1 + abs(b)) for a, b in zip(found, expected, strict=True)
    )


class Frame(NamedTuple):
    """The matrix after a step of a sequence, and what is read."""

    token: Token
    title: str
    W: Tensor
    reading: list[float]
    last: bool


def _frames(verdict: Verdict) -> list[Frame]:
    """The steps of the first sequence, or of the one that fails up to there."""
    asked, steps = verdict.puzzle, verdict.steps
    case = asked.cases[verdict.case or 0]
    if verdict.case is not None:
        case = case[: len(verdict.readings)]
    found, W = [], None
    for token in case:
        inputs = _inputs(asked, steps, [token])
        for n, each in enumerate(inputs, 1):
            y, W = _run(asked, [[each]], W)
            many = f" ({n}/{len(inputs)})" if len(inputs) > 1 else ""
            reading = y[0, 0].tolist()
            found.append(
                Frame(token, f"{token}{many}", W[0, 0], reading, n == len(inputs))
            )
    return found[-SHOWN:]


def _draw(verdict: Verdict) -> Figure:
    frames = _frames(verdict)
    lines = -(-len(frames) // COLUMNS)
    size = 6.4, lines * (0.75 + 0.4 * verdict.puzzle.numbers)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(lines, COLUMNS, squeeze=False).flat
    limit = max(1e-3, *(frame.W.abs().max().item() for frame in frames))
    numbered = zip(axes, enumerate(frames), strict=False)
    for ax, (n, (token, title, W, reading, last)) in numbered:
        plots.matrix(ax, W, title, limit)
        # By default equal matrices get equal ids, which a page may have only once.
        ax.images[0].set_gid(f"step{n}")
        if last and token.expected is not None:
            says, right = f"reads {_shown(reading)}", _near(reading, token.expected)
            if not right:
                says += f",\nexpected {_shown(token.expected)}"
            ax.set_xlabel(says, color=plots.INK if right else plots.WRONG)
    for ax in figure.axes[len(frames) :]:
        ax.remove()
    return figure


# --- Words -------------------------------------------------------------


def _shown(numbers: Sequence[float]) -> str:
    # + 0 turns -0.0 into 0.0
    return ",".join(f"{round(n, 4) + 0:g}" for n in numbers)


def _told(case: Sequence[Token]) -> str:
    """A sequence, with what has to be read."""
    return "  ".join(
        f"{token}" + ("" if token.expected is None else f" → {_shown(token.expected)}")
        for token in case
    )


def _of_row(each: Row) -> str:
    parts = {n: p for n, p in _parts(each).items() if p is not None}
    return f"row({', '.join(f'{n}={p!r}' for n, p in parts.items())})"


def _steps(count: int) -> str:
    return f"{count} step{'s' if count > 1 else ''}"


def _columns(count: int) -> str:
    return f"{count} column{'s' if count > 1 else ''}"


def _size(size: tuple[int, int]) -> str:
    return f"{_steps(size[0])} × {_columns(size[1])}"


def _find(name: str) -> Puzzle | None:
    if name not in PUZZLES:
        print(f"There is no puzzle named {name!r}. The puzzles: {', '.join(PUZZLES)}.")
    return PUZZLES.get(name)


# --- The file ----------------------------------------------------------


def _token(text: str, kinds: Sequence[str]) -> Token:
    """A token of puzzles.toml, such as `a=3,1` or `b?:4,2`."""
    text, _, expected = text.partition(":")
    named, mark, x = text.partition("=")
    if named + mark not in kinds:
        raise ValueError(f"expected one of {', '.join(kinds)}, got {text}")
    numbers = tuple(map(float, x.split(","))) if x else ()
    return Token(
        named + mark,
        numbers,
        tuple(map(float, expected.split(","))) if expected else None,
    )


def _puzzle(name: str, table: dict[str, Any]) -> Puzzle:
    def rows_of(named: dict[str, list[dict[str, Any]]]) -> dict[str, tuple[Row, ...]]:
        return {kind: tuple(Row(**r) for r in rows) for kind, rows in named.items()}

    given, example = (rows_of(table.pop(n, {})) for n in ("given", "example"))
    rows = {kind: tuple(names.split()) for kind, names in table.pop("rows").items()}
    cases = tuple(
        tuple(_token(text, [*rows, *given]) for text in case.split())
        for case in table.pop("cases")
    )
    lists: dict[str, Any] = {
        key: tuple(table.pop(key)) for key in ("limit", "best", "hints")
    }
    return Puzzle(
        name=name,
        rows=rows,
        given=given,
        cases=cases,
        example=example,
        **lists,
        **table,
    )


PUZZLES = {
    name: _puzzle(name, table)
    for name, table in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text("utf-8")
    ).items()
}
"""Every puzzle by name, in the order in which they are asked."""
