"""Test the programs of the Feedback Transformer's task, and rules that guess output."""

import random
import re

import pytest

from fwlab.data import programs
from fwlab.data.programs import (
    CLAUSES,
    RULES,
    TOKENS,
    execute,
    guess,
    program,
    rule_accuracy,
)


def run(words, names):
    """Execute one statement of a program in Python, with the variables `names`."""
    text = " ".join(words).replace("++", "+= 1").replace("--", "-= 1")
    exec(re.sub(r"print (\w)", r"printed.append(\1)", text), {}, names)


def statements(tokens):
    return [text.split() for text in " ".join(tokens[:-1]).split(" ;") if text]


def in_python(tokens):
    """Execute a program in Python, and return the values that it prints."""
    names = {"printed": []}
    for statement in statements(tokens):
        run(statement, names)
        assert all(1 <= names[name] <= 10 for name in names.keys() - {"printed"})
    return names["printed"]


def said(labels):
    return [label for label in labels if label is not None]


@pytest.mark.parametrize("variables", [1, 3, 5])
def test_labels_are_what_python_prints(variables):
    rng = random.Random(variables)
    for _ in range(30):
        tokens, labels, _ = program(40, variables, rng)
        assert said(labels) == in_python(tokens)
        assert execute(tokens) == labels
        asked = [i for i, label in enumerate(labels) if label is not None]
        assert all(tokens[i - 2] == "print" and tokens[i] == ";" for i in asked)
        assert len(asked) == tokens.count("print") and tokens.count("END") == 1


@pytest.mark.parametrize(("variables", "assigned"), [(3, 2.8), (5, 4.5)])
def test_statistics(variables, assigned):
    """Mean statement counts agree with 2000 programs of another implementation."""
    rng = random.Random(0)
    made = [program(100, variables, rng) for _ in range(150)]
    kinds = dict.fromkeys(("=", "++", "--", "if", "print"), 0)
    for tokens, *_ in made:
        for statement in statements(tokens):
            first = statement[0]
            kinds[first if first in kinds else statement[1]] += 1
    mean = {kind: count / len(made) for kind, count in kinds.items()}
    assert sum(kinds.values()) == 100 * len(made)
    assert abs(mean["="] - assigned) < 0.15
    for kind, wanted in {"++": 23, "--": 23, "if": 25, "print": 25.5}.items():
        assert abs(mean[kind] - wanted) < 1.2, (kind, mean)
    lengths = [len(tokens) for tokens, *_ in made]
    assert abs(sum(lengths) / len(made) - 430) < 5 and max(lengths) < 530


def test_sizes_of_programs():
    for sizes, what in (
        ((0, 1, 1), "batch to be at least 1, got 0"),
        ((1, 0, 1), "statements to be at least 1, got 0"),
        ((1, 1, 6), "variables to be from 1 to 5, got 6"),
    ):
        with pytest.raises(ValueError, match=what):
            programs(*sizes, random.Random(0))


def test_clauses_are_the_same_programs():
    words, clauses = (
        programs(6, 9, 3, random.Random(0), clauses=c) for c in (False, True)
    )
    for row in range(6):
        text = " ".join(TOKENS[i] for i in words.tokens[row])
        joined = " ".join(CLAUSES[i] for i in clauses.tokens[row])
        assert joined.rstrip(" END") == text.rstrip(" END")
        for one, other in ((1, words), (2, words)):
            said = [TOKENS[i] for i in other[one][row] if i >= 0]
            assert said == [CLAUSES[i] for i in clauses[one][row] if i >= 0]
    assert len(set(CLAUSES)) == len(CLAUSES)


# --- Rules ------------------------------------------------------------


def test_guesses():
    text = "x = 3 ; print x ; x ++ ; print x ; if x > 9 : x -- ; print x ; END"
    tokens = text.split()
    labels = execute(tokens)
    guesses = {rule: said(guess(rule, tokens, labels)) for rule in RULES}
    assert said(labels) == [3, 4, 4]
    assert guesses == {
        "most frequent value": [],
        "last print": [3, 4],  # The first print has no print before it.
        "skip every if": [3, 4, 4],
        "every if is true": [3, 4, 3],
    }


def test_rules_are_scored_on_the_programs_of_a_batch():
    printed = programs(40, 20, 2, random.Random(3)).labels
    printed = printed[printed >= 0]
    most = printed.bincount().max().item() / len(printed)
    found = rule_accuracy("most frequent value", 40, 20, 2, random.Random(3))
    assert found == pytest.approx(100 * most, abs=0.005)
    with pytest.raises(ValueError, match=r"expected rule to be one of .*'chance'"):
        guess("chance", [], [])
