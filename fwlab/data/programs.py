"""Draw programs that set, change and print variables."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: Names of variables. A task with fewer variables takes the first names.
NAMES = ("x", "y", "z", "p", "r")
VALUES = range(1, 11)
#: The vocabulary: the index of a word is its token.
TOKENS = (
    *NAMES,
    *map(str, VALUES),
    *("=", "++", "--", "print", "if", "<", ">", ":", ";", "END"),
)
#: The vocabulary with one token per clause: a statement, or a condition.
CLAUSES = (
    *map(str, VALUES),
    *(f"{name} = {value} ;" for name in NAMES for value in VALUES),
    *(f"{name} {step} ;" for name in NAMES for step in ("++", "--")),
    *(f"print {name} ;" for name in NAMES),
    *(
        f"if {name} {sign} {limit} :"
        for name in NAMES
        for sign in "<>"
        for limit in (*NAMES, *VALUES)
    ),
    "END",
)
#: Kinds of statements, which are equally likely, and kinds that may follow an `if`.
KINDS = ("assign", "increment", "decrement", "print", "if")
INNER = ("assign", "increment", "decrement")
#: Rules that predict some prints correctly without executing everything.
RULES = ("most frequent value", "last print", "skip every if", "every if is true")
#: A program in words, with its labels and values as numbers.
Made = tuple[list[str], list[int | None], list[int | None]]


class Programs(NamedTuple):
    """Hold a batch of programs, with labels for their print statements.

    - `tokens`: indices into `TOKENS`, or into `CLAUSES`, `[batch, time]`; a
      program ends with END, which also fills the shorter rows.
    - `labels`: at the `;` of a print, the token of the printed value;
      -1 elsewhere. `[batch, time]`.
    - `values`: at every `;`, the token of the value that the variable of
      the statement has after it; -1 elsewhere, and for a variable that is
      not set. `[batch, time]`.
    """

    tokens: Tensor
    labels: Tensor
    values: Tensor


def programs(
    batch: int,
    statements: int,
    variables: int,
    rng: random.Random,
    clauses: bool = False,
) -> Programs:
    """Draw programs of the algorithmic task of Fan et al. 2020, with their output.

    A variable is set once, to a value from 1 to 10, and then goes up and
    down by 1 within this range. A statement may have a condition, which
    compares a variable with another one or with a constant.

        >>> from fwlab.data.programs import TOKENS
        >>> made = programs(1, statements=4, variables=2, rng=random.Random(9))
        >>> words = [TOKENS[i] for i in made.tokens[0]]
        >>> labels = [TOKENS[i] if i >= 0 else "." for i in made.labels[0]]
        >>> print(*words)
        y = 9 ; print y ; y -- ; print y ; END
        >>> row = (f"{x:<{len(word)}}" for x, word in zip(labels, words))
        >>> print(" ".join(row).rstrip())
        . . . . .     . 9 . .  . .     . 8 .

    - `batch`: number of programs, at least 1.
    - `statements`: number of statements per program, at least 1; 100 in
      the paper.
    - `variables`: number of variables, 1 to 5; 3 or 5 in the paper.
    - `rng`: generator of random numbers.
    - `clauses`: one token per statement or condition, which makes the
      sequences shorter; False = one per word, as in the paper.
    - Returns a `Programs`.
    - Raises `ValueError` for a number out of range.

    Source: Fan et al. 2020 (arXiv:2002.09402), the authors' generator.
    """
    for name, size, most in (
        ("batch", batch, None),
        ("statements", statements, None),
        ("variables", variables, len(NAMES)),
    ):
        if size < 1 or (most is not None and size > most):
            wanted = f"from 1 to {most}" if most else "at least 1"
            raise ValueError(f"expected {name} to be {wanted}, got {size}")
    made = [program(statements, variables, rng) for _ in range(batch)]
    if clauses:
        made = [_joined(*parts) for parts in made]
    numbers = {word: i for i, word in enumerate(CLAUSES if clauses else TOKENS)}
    time = max(len(tokens) for tokens, *_ in made)

    def rows(part: int, rest: int) -> Tensor:
        padded = []
        for each in made:
            row = [-1 if x is None else numbers[str(x)] for x in each[part]]
            padded.append(row + [rest] * (time - len(row)))
        return torch.tensor(padded)

    return Programs(rows(0, numbers["END"]), rows(1, -1), rows(2, -1))


def program(statements: int, variables: int, rng: random.Random) -> Made:
    """Draw one random program as words, with labels and values.

    - `statements`, `variables`, `rng`: as for `programs`.
    - Returns `(tokens, labels, values)`: words, and numbers from 1 to 10 or None, each
      of the length of the program.
    """
    values: dict[str, int] = {}
    tokens: list[str] = []
    labels: list[int | None] = []
    after: list[int | None] = []
    for _ in range(statements):
        statement = _statement(KINDS, NAMES[:variables], values, rng)
        _execute(statement, values)
        at = {"print": 1, "if": 5}.get(statement[0], 0)  # Index of the variable.
        value = values.get(statement[at])
        nothing = [None] * (len(statement) - 1)
        tokens += statement
        labels += [*nothing, value if statement[0] == "print" else None]
        after += [*nothing, value]
    return [*tokens, "END"], [*labels, None], [*after, None]


def _joined(
    tokens: list[str], labels: list[int | None], values: list[int | None]
) -> Made:
    """Merge the words of each clause of a program into one token."""
    ends = [at for at, token in enumerate(tokens) if token in (":", ";", "END")]
    starts = [0, *(end + 1 for end in ends)]
    clauses = [" ".join(tokens[i : j + 1]) for i, j in zip(starts, ends, strict=False)]
    return clauses, [labels[end] for end in ends], [values[end] for end in ends]


def _statement(
    kinds: Sequence[str],
    names: Sequence[str],
    values: dict[str, int],
    rng: random.Random,
) -> list[str]:
    """Draw a random statement that is valid for the current values of variables."""
    while True:
        kind = rng.choice(kinds)
        if kind == "assign":
            unset = [name for name in names if name not in values]
            if unset:
                return [rng.choice(unset), "=", str(rng.choice(VALUES)), ";"]
        elif values:
            name = rng.choice(list(values))
            if kind == "print":
                return ["print", name, ";"]
            if kind == "if":
                sign, limit = rng.choice("<>"), _limit(name, values, rng)
                inner = _statement(INNER, names, values, rng)
                return ["if", name, sign, limit, ":", *inner]
            step = 1 if kind == "increment" else -1
            if values[name] + step in VALUES:
                return [name, "++" if step == 1 else "--", ";"]


def _limit(name: str, values: dict[str, int], rng: random.Random) -> str:
    """Draw the right side of a comparison: another variable or a constant."""
    others = [other for other in values if other != name]
    return (
        rng.choice(others) if others and rng.random() < 0.5 else str(rng.choice(VALUES))
    )


def _execute(
    statement: Sequence[str], values: dict[str, int], conditions: bool | None = None
) -> None:
    """Execute a statement, which may change `values` in place."""
    if statement[0] == "print":
        return
    if statement[0] == "if":
        _, name, sign, limit, _, *statement = statement
        if not (
            _holds(values, name, sign, limit) if conditions is None else conditions
        ):
            return
    name, change, *value = statement
    if change == "=":
        values[name] = int(value[0])
    elif name in values:
        after = values[name] + (1 if change == "++" else -1)
        values[name] = min(max(after, VALUES[0]), VALUES[-1])


def _holds(values: dict[str, int], name: str, sign: str, limit: str) -> bool:
    """Return True if a condition holds. Conditions on unset variables are false."""
    if name not in values or (limit in NAMES and limit not in values):
        return False
    other = values[limit] if limit in NAMES else int(limit)
    return values[name] < other if sign == "<" else values[name] > other


def execute(tokens: Sequence[str], conditions: bool | None = None) -> list[int | None]:
    """Execute a program; evaluate its conditions, or take all as true or all as false.

    - `tokens`: as from `program`.
    - `conditions`: None = evaluate them; True or False = take every condition as true,
      or as false.
    - Returns a label for each token, as `program` does. A variable that was never set
      prints None, and a value stays in its range.
    """
    values: dict[str, int] = {}
    labels: list[int | None] = [None] * len(tokens)
    start = 0
    for end, token in enumerate(tokens):
        if token != ";":
            continue
        statement, start = tokens[start:end], end + 1
        if statement[0] == "print":
            labels[end] = values.get(statement[1])
        _execute(statement, values, conditions)
    return labels


def test_rng(seed: int) -> random.Random:
    """Return a random generator for test programs with a seed that training never uses.

    - `seed`: seed of the training, from 0 to 999. A negative seed would not differ, as
      Python takes its absolute value.
    """
    return random.Random(1000 + seed)


def guess(
    rule: str, tokens: Sequence[str], labels: Sequence[int | None]
) -> list[int | None]:
    """Predict every print statement of a program by one of `RULES`.

    - `rule`: one of `RULES`. "most frequent value" needs many programs, and predicts
      nothing here: see `rule_accuracy`.
    - `tokens`, `labels`: as from `program`; "last print" repeats the last label of the
      same variable.
    - Returns a prediction for each token; None = no prediction.
    - Raises `ValueError` for another rule.
    """
    if rule not in RULES:
        raise ValueError(f"expected rule to be one of {RULES}, got {rule!r}")
    if rule == "skip every if":
        return execute(tokens, conditions=False)
    if rule == "every if is true":
        return execute(tokens, conditions=True)
    guesses: list[int | None] = [None] * len(tokens)
    if rule == "last print":
        known: dict[str, int | None] = {}
        for at, label in enumerate(labels):
            if label is not None:  # The clause is "print", variable, ";".
                name = tokens[at - 1]
                guesses[at], known[name] = known.get(name), label
    return guesses


def rule_accuracy(
    rule: str, batch: int, statements: int, variables: int, rng: random.Random
) -> float:
    """Return a rule's accuracy, in percent, on the print statements of programs.

    - `rule`: one of `RULES`.
    - `batch`, `statements`, `variables`, `rng`: as for `programs`, which draws the
      same programs; at least one of them has to print something.
    - Returns the right answers in percent, from 0 to 100, to two decimals.
    - Raises `ValueError` for another rule.
    """
    answers: list[tuple[int, int | None]] = []
    for _ in range(batch):
        tokens, labels, _ = program(statements, variables, rng)
        guesses = guess(rule, tokens, labels)
        answers += [
            (label, answer)
            for label, answer in zip(labels, guesses, strict=True)
            if label is not None
        ]
    if rule == "most frequent value":
        right = max(Counter(label for label, _ in answers).values())
    else:
        right = sum(label == answer for label, answer in answers)
    return round(100 * right / len(answers), 2)
