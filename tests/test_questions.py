"""Test predictions, and derivations with blanks, in the notebooks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fwlab.exercises import (
    DERIVATIONS,
    QUESTIONS,
    check_formula,
    hint,
    predict,
    predictions,
    progress,
    quiz,
    reveal,
    solution,
)
from fwlab.exercises.questions import _predicted, _question, is_right


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Clear all predictions before each test."""
    monkeypatch.setattr(progress, "_session", {})
    monkeypatch.setattr(progress, "_sure", {})
    _predicted.clear()


@pytest.fixture
def said(capsys):
    """Return a helper that calls a function and returns its output as one line."""

    def said(function, *given, **named):
        capsys.readouterr()
        function(*given, **named)
        return " ".join(capsys.readouterr().out.split())

    return said


(PERCENT, *_) = [name for name, each in QUESTIONS.items() if each.percent]
LETTERS = ("c", "c)", " C", "(c)", "c.", "v1 + v2", " v1 + v2 ")
HALVES = (0.5, np.float32(0.5), torch.tensor([0.5]), "0.5", " 1/2 ", "50 %", "50%")


@pytest.mark.parametrize(
    ("name", "typed", "phrase"),
    [
        *(("same_key", letter, "Your prediction: v1 + v2.") for letter in LETTERS),
        *(("crosstalk", half, "Your prediction: 0.5.") for half in HALVES),
        (PERCENT, "69 %", "Your prediction: 69."),
        ("same_key", ..., 'as in predict("same_key", "a", sure=0.8).'),
        ("same_key", "z", 'expected one of "a", "b", "c", "d", got'),
        ("same_key", 3, 'expected one of "a", "b", "c", "d", got 3'),
        ("crosstalk", "a", "expected a number, got 'a'"),
        ("crosstalk", True, "expected a number, got True"),
        ("nothing", 1, "no question named 'nothing'"),
    ],
)
def test_a_prediction_as_people_type_it(name, typed, phrase, said):
    assert phrase in said(predict, name, typed)


def test_without_a_prediction_the_question_is_asked(said):
    predict("same_key", "a")
    asked = said(predict, "same_key", ...)
    assert QUESTIONS["same_key"].text in asked and " c) v1 + v2 " in asked
    assert "You predicted" not in said(reveal, "same_key")


@pytest.mark.parametrize(
    ("name", "predicted", "computed", "phrase"),
    [
        ("same_key", "b", "v1 + v2", "answer: v1 + v2. "),
        ("same_key", "b", "v1 + v2", "You predicted v2. That is what"),
        ("same_key", "v1 + v2", "v1 + v2", "You predicted v1 + v2: right."),
        ("crosstalk", 0, 0.88, "You predicted 0, off by 0.875. A matrix of width 8"),
        ("crosstalk", 0.9, 0.88, "You predicted 0.9: right."),
        ("crosstalk", 7, 0.88, "You predicted 7, off by 6.12."),
        # 0.935 is the square root of 0.875, and 1/256 is the square of 1/16.
        ("crosstalk", 0.935, 0.88, "That is its square root"),
        ("mean_square", 1 / 256, 1 / 16, "a square was taken once too often"),
        ("crosstalk", 7, 0.5, "This notebook found 0.5 instead."),
        ("crosstalk", 7, torch.tensor(torch.nan), "notebook found nan instead."),
        ("crosstalk", 7, "none", "This notebook found none instead."),
        ("same_key", "v2", "v2", "This notebook found v2 instead."),
        ("same_key", "v2", "v2", "You predicted v2: right."),
        ("same_key", "c", torch.tensor([1, 2]), "found tensor([1, 2]) instead."),
    ],
)
def test_a_prediction_is_answered(name, predicted, computed, phrase, said):
    predict(name, predicted)
    answer = said(reveal, name, computed)
    assert f"The answer: {QUESTIONS[name].answer}." in answer and phrase in answer
    assert ("instead" in answer) is ("instead" in phrase or computed == "v2")


def test_the_first_answer_counts(said):
    assert "0 of 0" in said(predictions)
    for name, answer in (("same_key", "b"), ("crosstalk", 0.875), ("break_even", 32)):
        predict(name, answer)
    reveal("same_key")
    reveal("crosstalk")
    predict("same_key", "c")
    reveal("same_key")
    assert said(predictions).startswith(
        "1 of 2 predictions were right. Not revealed yet: break_even. "
        "Look again at 00_start_here: same_key."
    )


@pytest.mark.parametrize("sure", [0.8, "0.8", "80 %", "4/5"])
def test_how_sure_somebody_is_as_people_type_it(sure, said):
    told = said(predict, "same_key", "c", sure=sure)
    assert told == "Your prediction: v1 + v2, 80% sure."
    assert said(predict, "same_key", "c") == "Your prediction: v1 + v2."


@pytest.mark.parametrize("sure", [80, -0.1, "very", float("nan"), "1/0", [0.8]])
def test_a_probability_is_from_0_to_1(sure, said):
    told = said(predict, "same_key", "c", sure=sure)
    assert "expected sure to be a number from 0 to 1, such as 0.8, got" in told


def test_the_curve_shows_how_often_somebody_was_right(said):
    """The calibration curve has the points (0.5, 1/2) and (0.9, 2/3)."""
    names = [name for name, each in QUESTIONS.items() if each.choices][:5]
    for i, name in enumerate(names):
        assert predictions() is None
        question = QUESTIONS[name]
        wrong = next(iter(question.tempting))
        answer = wrong if i in (2, 4) else question.truth
        predict(name, answer, sure=0.9 if i < 3 else 0.5)
        reveal(name)
    predict(names[0], QUESTIONS[names[0]].truth, sure=0.1)
    reveal(names[0])  # Only the first prediction counts.
    assert "74% on average; 60% of them were right." in said(predictions)
    (ax,) = predictions().axes
    _, low, high = ax.lines
    points = [(*line.get_xdata(), *line.get_ydata()) for line in (low, high)]
    assert points == [(0.5, 0.5), pytest.approx((0.9, 2 / 3))]
    assert [text.get_text() for text in ax.texts] == ["  2", "  3"]


def test_questions():
    for name, question in QUESTIONS.items():
        assert question.text.endswith("?") and question.because.endswith("."), name
        assert is_right(question, question.truth) and question.tempting, name
        for wrong, why in question.tempting.items():
            assert not is_right(question, wrong) and not why.endswith("."), name


@pytest.mark.parametrize(
    "fields",
    [
        {"truth": "c", "choices": ["a", "b"]},
        {"truth": "a", "choices": ["a", "b", "c"]},
        {"truth": 1.0},
        {"truth": "a", "tolerance": 0.1},
        {"truth": 1.95, "tolerance": 0.1},
    ],
)
def test_a_question_without_a_right_answer_is_refused(fields):
    table = {"text": "Why?", "because": "So.", "tempting": {"b": "No"}}
    if "choices" not in fields:
        table["tempting"] = {"2": "No"}
    with pytest.raises(ValueError, match="why: expected"):
        _question("why", "04_delta_rule", table | fields)


@pytest.mark.parametrize(
    ("truth", "answer"),
    [(1 / 6, "0.167"), (1 / 256, "0.00391"), (0.875, "0.875"), (4096.0, "4096")],
)
def test_an_answer_has_at_most_three_digits_of_a_fraction(truth, answer):
    assert replace(QUESTIONS["crosstalk"], truth=truth, tempting={}).answer == answer


def test_a_quiz_answers_at_once(said):
    assert 'as in quiz("same_key", "a").' in said(quiz, "same_key", ...)
    assert "The answer" not in said(quiz, "same_key", "z")
    assert "You predicted v1 + v2: right." in said(quiz, "same_key", "c")


# --- Derivations -------------------------------------------------------

RIGHT = {"a": "phi @ phi", "b": "1 - beta * (phi @ phi)", "c": "beta * (phi @ phi)"}


@pytest.mark.parametrize("name", DERIVATIONS)
def test_the_truth_is_right_and_every_mistake_is_named(name, said):
    derivation = DERIVATIONS[name]
    # A page shows 82 characters of an output; the rest scrolls.
    assert max(map(len, derivation.text.splitlines())) <= 82
    truths = {letter: blank.truth for letter, blank in derivation.blanks.items()}
    assert check_formula(name, **truths)
    for letter, blank in derivation.blanks.items():
        assert f"[{letter}]" in derivation.text and blank.tempting
        for mistake, why in blank.tempting.items():
            told = said(check_formula, name, **truths | {letter: mistake})
            assert f"✗ {letter}: {why}." in told and told.count("✗") == 1


@pytest.mark.parametrize(
    "ways",
    [
        {"a": "(phi**2).sum()"},
        {"a": "norm(phi) ** 2", "c": "torch.dot(phi, phi) * beta"},
        {"b": " 1 - phi @ phi * beta "},
        # An answer may use an earlier blank and Python functions.
        {"b": "1 - beta * a", "c": "a * beta"},
        {"a": "sum([max(x, -x) ** 2 for x in phi])"},
        {"a": "sum(phi[i] ** 2 for i in range(4))", "b": "exp(0) - beta * (phi @ phi)"},
        {"a": "float(phi @ phi)", "c": "max(beta * a, 0)", "b": "1 -\n beta * a"},
        # Tensors that an expression creates have the precision of the symbols.
        {"a": "phi @ (eye(4) @ phi)"},
    ],
)
def test_any_way_to_write_it_is_right(ways):
    assert check_formula("unit_factor", **RIGHT | ways)


@pytest.mark.parametrize(
    ("blank", "phrase"),
    [
        ("x +", "SyntaxError"),
        ("unknown * 2", "name 'unknown' is not defined"),
        ("phi @ W", "RuntimeError"),
        ("W", "expected the shape [], got [3, 4]"),
        ("2 * phi @ phi", "with phi = 0.5 yours is 0.5; right is 0.25."),
        # Expressions get copies; otherwise phi = 0 would make this answer right.
        ("phi.zero_() @ phi", "with phi = "),
        ("exit()", "SystemExit"),
        (3, "with phi"),
        (None, "TypeError"),
        ("...", "still empty"),
        (..., "still empty"),
    ],
)
def test_what_is_wrong_is_said(blank, phrase, said):
    told = said(check_formula, "unit_factor", **RIGHT | {"a": blank})
    assert phrase in told.partition("✓ b ✓ c")[0] and "✓ b ✓ c" in told
    assert 'Try hint("unit_factor")' in told


def test_without_blanks_the_derivation_is_printed(said):
    for blanks in ({}, {"a": ..., "b": ...}, {"a": "..."}):
        told = said(check_formula, "unit_factor", **blanks)
        assert told.startswith(" ".join(DERIVATIONS["unit_factor"].text.split()))
        assert 'check_formula("unit_factor", a="...", b="...", c="...")' in told
        assert "beta, a number; phi [4]; v [3]; W [3, 4]" in told


def test_unknown_names(said):
    assert "no derivation named 'nothing'" in said(check_formula, "nothing", a="1")
    told = said(check_formula, "unit_factor", z="1")
    assert "no blank z. The blanks: a, b, c." in told


@pytest.mark.parametrize(
    ("function", "name", "start"),
    [
        (hint, "unit_factor", "Hint 1 of 3: The row"),
        (hint, "delta_step", "Hint 1 of "),
        (hint, "crosstalk", "crosstalk has no hints."),
        (hint, "nothing", "There is no exercise"),
        (solution, "unit_factor", "a = phi @ phi b = 1 - beta"),
        (solution, "crosstalk", "The answer: 0.875."),
        (solution, "nothing", "There is no exercise"),
    ],
)
def test_hints_and_solutions_of_every_kind(function, name, start, said):
    assert said(function, name).startswith(start)
