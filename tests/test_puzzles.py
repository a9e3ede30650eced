"""Fast weight puzzles: the jobs in plain Python, and the best solutions."""

import itertools
import random
import re
from collections import defaultdict
from dataclasses import replace
from io import StringIO
from math import sqrt
from numbers import Real

import pytest

from fwlab.exercises.puzzles import PUZZLES, Token, judge, puzzle, row, solve

# --- The jobs: what each puzzle asks for, without any matrix -----------


def keep(tokens):
    a = 0
    for kind, x in tokens:
        a = x if kind == "a=" else a
        yield a if kind == "a?" else None


def names(tokens):
    held = {"a": (0, 0), "b": (0, 0)}
    for kind, x in tokens:
        if kind.endswith("="):
            held[kind[0]] = x
        yield held[kind[0]] if kind.endswith("?") else None


def ask(tokens):
    held = {"a": 0, "b": 0}
    for kind, x in tokens:
        if kind.endswith("="):
            held[kind[0]] = x
        a, b = held.values()
        answers = {"sum?": a + b, "difference?": a - b, "mean?": (a + b) / 2}
        yield answers.get(kind)


def forget(tokens):
    held = defaultdict(int)
    for kind, x in tokens:
        if kind.endswith("="):
            held[kind[0]] = x
        elif kind == "forget":
            held.pop("a", None)
        yield held[kind[0]] if kind.endswith("?") else None


def mean(tokens):
    seen = []
    for kind, x in tokens:
        seen = [x] if kind == "first=" else [*seen, x]
        yield sum(seen) / len(seen)


def votes(tokens):
    cast = [kind for kind, _ in tokens]
    for t, kind in enumerate(cast):
        now = cast[:t]
        yield now.count("a") - now.count("b") if kind == "lead?" else None


def mix(tokens):
    held = {"a": 0, "b": 0}
    for kind, x in tokens:
        if kind.endswith("="):
            held[kind[0]] = x
        elif kind == "mix":
            held = dict.fromkeys("ab", sum(held.values()) / 2)
        yield held[kind[0]] if kind.endswith("?") else None


def overlap(tokens):
    return (None if kind == "fill" else 2 for kind, _ in tokens)


def flip(tokens):
    a = 0
    for kind, x in tokens:
        a = {"a=": x, "flip": -a, "a?": a}[kind]
        yield a if kind == "a?" else None


def parity(tokens):
    odd = False
    for kind, _ in tokens:
        odd ^= kind == "1"
        yield int(odd)


def swap(tokens):
    held = {"a": (0, 0), "b": (0, 0)}
    for kind, x in tokens:
        if kind.endswith("="):
            held[kind[0]] = x
        elif kind == "swap":
            held = {"a": held["b"], "b": held["a"]}
        yield held[kind[0]] if kind.endswith("?") else None


def count(tokens):
    return itertools.accumulate(1 if kind == "up" else -1 for kind, _ in tokens)


def difference(tokens):
    numbers = [0, *(x for _, x in tokens)]
    return (new - old for old, new in itertools.pairwise(numbers))


def undo(tokens):
    now = before = 0
    for kind, x in tokens:
        if kind == "a=":
            now, before = x, now
        elif kind == "undo":
            now, before = before, now
        yield now if kind == "a?" else None


def stack(tokens):
    held = []
    for kind, x in tokens:
        if kind == "push=":
            held.append(x)
        elif kind == "pop":
            held = held[:-1]
        assert len(held) < 3
        yield ([0, *held][-1]) if kind == "top?" else None


def turn(tokens):
    held = {"x": 0, "y": 0}
    for kind, x in tokens:
        if kind.endswith("="):
            held[kind[0]] = x
        elif kind == "turn":
            held = {"x": -held["y"], "y": held["x"]}
        yield held[kind[0]] if kind.endswith("?") else None


def rename(tokens):
    held = defaultdict(lambda: (0, 0))
    for kind, x in tokens:
        if kind.endswith("="):
            held[kind[0]] = x
        elif kind.endswith("->c"):
            held["c"] = held.pop(kind[0], (0, 0))
        yield held[kind[0]] if kind.endswith("?") else None


def shift(tokens):
    numbers = [0, 0, *(x for _, x in tokens)]
    return iter(numbers[:-2])


def clock(tokens):
    return (n % 3 for n in count([("up" if k == "on" else "", ()) for k, _ in tokens]))


def cups(tokens):
    ball = 0
    for kind, _ in tokens:
        one, other = int(kind[-2]), int(kind[-1])
        ball = {one: other, other: one}.get(ball, ball)
        yield ball


def copy(tokens):
    a = b = 0
    for kind, x in tokens:
        if kind == "a+=":
            a += x
        elif kind == "b+=":
            b += x
        elif kind == "copy":
            b = a
        yield {"a?": a, "b?": b}.get(kind)


JOBS = {name: globals()[name] for name in PUZZLES}


def done(name, tokens):
    """What has to be read after each token, by the job."""
    one = PUZZLES[name].numbers == 1
    inputs = [(t.kind, t.x[0] if t.x and one else t.x) for t in tokens]
    return [
        y if y is None else y if isinstance(y, tuple) else (y,)
        for y in JOBS[name](inputs)
    ]


def sequence(name, draw, length=10):
    """Random tokens, as they may come."""
    kinds = [*{**PUZZLES[name].rows, **PUZZLES[name].given}]
    made = []
    for t in range(length):
        kind = draw.choice(kinds)
        if name == "mean":
            kind = kinds[t % 3]
        elif name == "overlap":
            kind = kinds[min(t, 1 + draw.randrange(2))]
        elif name == "stack" and kind == "push=":
            depth = 0
            for token in made:
                depth = max(0, depth + {"push=": 1, "pop": -1}.get(token.kind, 0))
            kind = kind if depth < 2 else "pop"
        count = PUZZLES[name].numbers if kind.endswith("=") else 0
        x = tuple(draw.randint(-9, 9) for _ in range(count))
        made.append(Token(kind, x, None))
    pairs = zip(made, done(name, made), strict=True)
    return tuple(replace(token, expected=y) for token, y in pairs)


# --- Solutions: the smallest known ones --------------------------------


def slots(*which, names="abc", width=2):
    """Orthogonal keys for names, which read and write as usual."""
    rows = {}
    for name in which:
        key = [float(names[i] == name[0]) for i in range(width)]
        rows[name] = row(query=key) if name.endswith("?") else row(key=key, value="x")
    return rows


AB = slots("a=", "b=", "a?", "b?")
ROOT = sqrt(3)
#: The corners of the clock's triangle are W = 0, (1, 0) and (1/2, √3/2); it
#: turns about (1/2, √3/6), by a reflection at each of two lines through it.
HOUR_1 = row(key=[1, 0], value=0.5, beta=2)
HOUR_2 = row(key=[1, ROOT], value=1, beta=0.5)
HOURS = [1, ROOT]
SOLUTIONS = {
    "keep": {"a=": row(key=[1], value="x"), "a?": row(query=[1])},
    "names": AB,
    "ask": {
        "sum?": row(query=[1, 1]),
        "difference?": row(query=[1, -1]),
        "mean?": row(query=[0.5, 0.5]),
    },
    "forget": {**AB, "forget": row(key=[1, 0])},
    "mean": {
        "first=": row(beta=1),
        "second=": row(beta=1 / 2),
        "third=": row(beta=1 / 3),
    },
    "votes": {
        "a": row(key=[1], value=1),
        "b": row(key=[1], value=-1),
        "lead?": row(query=[1]),
    },
    "mix": {**AB, "mix": row(key=[1, -1], beta=0.5)},
    "overlap": {"fill": [row(value=1.25), row(value=2)]},
    "flip": {**slots("a=", "a?", width=1), "flip": row(key=[1], beta=2)},
    "parity": {
        "0": row(query=[1]),
        "1": row(key=[1], value=0.5, beta=2, query=[1]),
    },
    "swap": {**AB, "swap": row(key=[1, -1])},
    "count": {
        "up": [row(key=[1], beta=2), row(key=[1], value=0.5, beta=2, query=[1])],
        "down": [row(key=[1], value=0.5, beta=2), row(key=[1], beta=2, query=[1])],
    },
    "difference": {
        "x=": [row(key=[1, -1]), row(key=[1, 0], value="x", query=[1, -1])],
    },
    "undo": {
        "a=": [row(key=[1, -1]), row(key=[1, 0], value="x")],
        "undo": row(key=[1, -1]),
        "a?": row(query=[1, 0]),
    },
    "stack": {
        "push=": [row(key=[1, -1]), row(key=[1, 0], value="x")],
        "pop": [row(key=[1, 0]), row(key=[1, -1])],
        "top?": row(query=[1, 0]),
    },
    "turn": {
        **slots("x=", "y=", "x?", "y?", names="xy"),
        "turn": [row(key=[1, -1]), row(key=[1, 0], beta=2)],
    },
    "rename": {
        **slots("a=", "b=", "a?", "b?", "c?", width=3),
        "a->c": [row(key=[0, 0, 1]), row(key=[1, 0, -1])],
        "b->c": [row(key=[0, 0, 1]), row(key=[0, 1, -1])],
    },
    "shift": {
        "x=": [
            row(key=[0, 1, -1]),
            row(key=[1, -1, 0]),
            row(key=[1, 0, 0], value="x", query=[0, 0, 1]),
        ],
    },
    "clock": {
        "on": [HOUR_1, replace(HOUR_2, query=HOURS)],
        "back": [HOUR_2, replace(HOUR_1, query=HOURS)],
    },
    "cups": {
        "swap01": row(key=[1, 1, 0], value=1, query=[0, 1, 2]),
        "swap12": row(key=[0, 1, -1], query=[0, 1, 2]),
        "swap23": row(key=[1, -1, 0], query=[0, 1, 2]),
    },
    "copy": {
        "a+=": [row(key=[1, -1]), row(key=[1, -1], value="x")],
        "b+=": [row(key=[0, 1], beta=2), row(key=[0, 2], value="x", beta=0.5)],
        "copy": row(key=[0, 1]),
        "a?": row(query=[1, 0]),
        "b?": row(query=[1, 1]),
    },
}


@pytest.mark.parametrize("name", PUZZLES)
def test_best_solution(name):
    """It is right, also in sequences that nobody wrote down, and has its size."""
    asked, draw = PUZZLES[name], random.Random(0)
    verdict = judge(asked, SOLUTIONS[name])
    assert verdict, verdict.says
    assert verdict.size == asked.best
    assert "Nothing smaller exists" in verdict.says
    drawn = tuple(sequence(name, draw) for _ in range(20))
    verdict = judge(replace(asked, cases=drawn), SOLUTIONS[name])
    assert verdict, verdict.says
    assert asked.best[0] <= asked.limit[0] and asked.best[1] <= asked.limit[1]


@pytest.mark.parametrize("name", PUZZLES)
def test_cases_are_what_the_job_does(name):
    asked = PUZZLES[name]
    for case in asked.cases:
        assert [token.expected for token in case] == done(name, case)
    seen = {token.kind for case in asked.cases for token in case}
    assert seen == {*asked.rows, *asked.given}


def changed(rows):
    """Rows with one number changed, or one step left out."""
    for kind, steps in rows.items():
        steps = steps if isinstance(steps, list) else [steps]
        for n, step in enumerate(steps):
            rest = [*steps[:n], *steps[n + 1 :]]
            if rest:
                yield {**rows, kind: rest}
            for name, part in vars(step).items():
                numbers = part if isinstance(part, list) else [part]
                for i, old in enumerate(numbers):
                    for new in (0, 1, -old if isinstance(old, Real) else "-x"):
                        if old is None or new == old:
                            continue
                        other = [*numbers[:i], new, *numbers[i + 1 :]]
                        other = other if isinstance(part, list) else other[0]
                        mended = replace(step, **{name: other})
                        yield {**rows, kind: [*steps[:n], mended, *steps[n + 1 :]]}


@pytest.mark.parametrize("name", PUZZLES)
def test_nothing_passes_that_is_wrong_elsewhere(name):
    """Solutions with one number changed: those that pass are right, too."""
    asked, draw = PUZZLES[name], random.Random(0)
    drawn = replace(asked, cases=tuple(sequence(name, draw) for _ in range(20)))
    others = [judge(asked, rows) for rows in changed(SOLUTIONS[name])]
    complete = [verdict for verdict in others if verdict.size]
    assert complete and not all(complete)
    for rows, verdict in zip(changed(SOLUTIONS[name]), others, strict=True):
        assert not verdict or judge(drawn, rows), rows


EASY = {
    "votes": {
        "a": row(key=[1, 0], value=1),
        "b": row(key=[0, 1], value=1),
        "lead?": row(query=[1, -1]),
    },
    "clock": {
        "on": [row(key=[0, 1, -1]), row(key=[-1, 1, 0], value=1, query=[0, 1, 2])],
        "back": [row(key=[-1, 1, 0], value=1), row(key=[0, 1, -1], query=[0, 1, 2])],
    },
    "cups": {
        "swap01": row(key=[-1, 1, 0, 0], value=1, query=[0, 1, 2, 3]),
        "swap12": row(key=[0, 1, -1, 0], query=[0, 1, 2, 3]),
        "swap23": row(key=[0, 0, 1, -1], query=[0, 1, 2, 3]),
    },
}


@pytest.mark.parametrize("name", EASY)
def test_larger_solution_is_told_of_a_smaller_one(name):
    asked = PUZZLES[name]
    verdict = judge(asked, EASY[name])
    assert verdict, verdict.says
    score = asked.best[0] * asked.best[1]
    assert verdict.size[0] * verdict.size[1] > score
    assert f"A smaller one is known: {asked.best[0]} step" in verdict.says
    assert f"score {score}." in verdict.says


UP, DOWN = row(key=[1], beta=2), row(key=[1], value=0.5, beta=2, query=[1])
READS = row(query=[1])


@pytest.mark.parametrize(
    ("name", "rows", "says"),
    [
        ("keep", ..., "Still blank: a=, a?."),
        ("keep", {}, "Still blank: a=, a?."),
        ("keep", {"a=": ..., "a?": READS}, "Still blank: a=."),
        ("keep", {"a=": row(key=..., value="x"), "a?": READS}, "Still blank: a=."),
        ("keep", [READS], 'Expected rows by kind of token, as in {"a=": row(...)}.'),
        ("keep", {"b=": READS}, "'b=': there is no such token. Expected rows for a="),
        ("ask", {"a=": READS}, "'a=': its row is given. Expected rows for sum?"),
        ("keep", {"a=": 1, "a?": READS}, "a=: expected row(...) or a list of them."),
        ("keep", {"a=": row(key=1), "a?": READS}, "a=: expected the key as a list"),
        ("keep", {"a=": row(key=[]), "a?": READS}, "a=: expected the key as a list"),
        ("keep", {"a=": row(), "a?": row()}, "a?: expected a query."),
        ("keep", {"a=": READS, "a?": READS}, "a=: expected key and value and beta,"),
        ("keep", {"a=": [row(), row()], "a?": READS}, "a=: at most 1 step for a token"),
        (
            "names",
            {**AB, "b=": row(key=[1])},
            "the key of a= has 2, the key of b= has 1",
        ),
        ("keep", {"a=": row(key=[1, 0]), "a?": row(query=[1, 0])}, "At most 1 column,"),
        ("keep", {"a=": row(key=["1"]), "a?": READS}, "in the key, got '1'."),
        ("keep", {"a=": row(key=[1], value="y"), "a?": READS}, "or \"x\", got 'y'."),
        ("keep", {"a=": row(key=[1], beta=2), "a?": READS}, "from 0 to 1, got 2."),
        ("keep", {"a=": row(key=[1], beta=-1), "a?": READS}, "from 0 to 1, got -1."),
        ("keep", {"a=": row(key=[1], value="-x"), "a?": READS}, "is -3, expected 3."),
        ("keep", {"a=": row(key=[0.001]), "a?": READS}, "got 0.001 in the key."),
        ("keep", {"a=": row(key=[1], value=1e3), "a?": READS}, "in the value."),
        ("forget", {**AB, "forget": row(key=[1, 0], value="x")}, "there is no x."),
        ("names", {**AB, "a=": row(key=[1, 0], value=[1, 2, 3])}, "2 numbers as the"),
        ("count", {"up": [DOWN, DOWN], "down": UP}, "query belongs into the last row"),
        ("count", {"up": UP, "down": DOWN}, "up: expected a query."),
        ("overlap", {"fill": row(value=2)}, "fill: expected 2 steps, got 1."),
        (
            "swap",
            {**AB, "swap": row(key=[1, -1], beta=0.5)},
            "swap a?: the last reading is 3.5,1.5, expected 4,2.",
        ),
    ],
)
def test_what_is_wrong_is_said(name, rows, says):
    verdict = judge(PUZZLES[name], rows)
    assert not verdict
    assert says in verdict.says


def test_a_tiny_strength_does_not_add():
    """A rule that adds, but for a part of a million: within the bounds of numbers,
    it is not near enough."""
    step = row(key=[0.01], value=100, beta=0.01, query=[100])
    down = replace(step, value=-100)
    verdict = judge(PUZZLES["count"], {"up": step, "down": down})
    assert verdict.case is not None
    assert verdict.readings[-1] == pytest.approx(
        [PUZZLES["count"].cases[0][len(verdict.readings) - 1].expected[0]], rel=1e-4
    )


def test_printed(capsys):
    for name, asked in PUZZLES.items():
        puzzle(name)
        text = " ".join(capsys.readouterr().out.split())
        assert asked.title.upper() in text and asked.task in text
        assert "For example: " + str(asked.cases[0][0]) in text
        assert all(kind in text for kind in {**asked.rows, **asked.given})
        for number in range(1, len(asked.hints) + 1):
            puzzle(name, hint=number)
            assert f"Hint {number} of" in capsys.readouterr().out
    puzzle("keep", hint=9)
    assert "keep has 2 hints" in capsys.readouterr().out
    assert solve("kepe") is None
    assert "The puzzles: keep, names," in capsys.readouterr().out


def test_example_is_right():
    assert {name for name in PUZZLES if PUZZLES[name].example} == {"keep"}
    assert judge(PUZZLES["keep"], PUZZLES["keep"].example)


def test_figure():
    """The matrix after each step, up to the first wrong reading."""
    verdict = solve("stack", SOLUTIONS["stack"])
    figure = verdict.figure()
    titles = [ax.get_title() for ax in figure.axes]
    assert titles[:3] == ["push=3 (1/2)", "push=3 (2/2)", "push=5 (1/2)"]
    figure.savefig(svg := StringIO(), format="svg")
    ids = re.findall(r'<image [^>]*id="(\w+)"', svg.getvalue())
    assert len(ids) == len({*ids}) == len(titles) == 11
    wrong = solve("swap", {**AB, "swap": row(key=[1, -1], beta=0.5)})
    axes = wrong.figure().axes
    assert [ax.get_title() for ax in axes] == ["a=3,1", "b=4,2", "swap", "a?"]
    assert axes[-1].get_xlabel() == "reads 3.5,1.5,\nexpected 4,2"
    numbers = [text.get_text() for text in axes[2].texts]
    assert numbers == ["3.5", "3.5", "1.5", "1.5"]
    assert solve("swap").figure() is None
