"""Predictions, the questions they answer, and how they are counted."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fwlab.exercises import QUESTIONS, predict, predictions, progress, quiz, reveal
from fwlab.exercises.predicting import _predicted, is_right
from fwlab.exercises.questions import _question


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Each test starts with nothing predicted."""
    monkeypatch.setattr(progress, "_session", {})
    _predicted.clear()


def said(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_prediction_is_noted_and_answered(capsys):
    predict("same_key", "b")
    assert "Your prediction: v2." in capsys.readouterr().out
    reveal("same_key", "v1 + v2")
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "The answer: v1 + v2." in printed
        and "You predicted v2. That is what" in printed
    )
    predict("same_key", "v1 + v2")
    reveal("same_key")
    assert "You predicted v1 + v2: right." in capsys.readouterr().out

    predict("crosstalk", 0)
    reveal("crosstalk", 0.88)
    printed = " ".join(capsys.readouterr().out.split())
    assert "You predicted 0, off by 0.875. A matrix of width 8" in printed
    predict("crosstalk", 0.9)
    reveal("crosstalk")
    assert "You predicted 0.9: right." in capsys.readouterr().out
    predict("crosstalk", 7)
    reveal("crosstalk")
    assert capsys.readouterr().out.endswith("You predicted 7, off by 6.12.\n")


def test_without_a_prediction_the_question_is_asked(capsys):
    predict("same_key", "a")
    predict("same_key", ...)
    printed = capsys.readouterr().out
    assert "  c) v1 + v2\n" in printed
    assert QUESTIONS["same_key"].text in " ".join(printed.split())
    reveal("same_key")
    assert "You predicted" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "answer", "phrase"),
    [
        ("same_key", "z", 'expected one of "a", "b", "c", "d", got'),
        ("same_key", 3, 'expected one of "a", "b", "c", "d", got 3'),
        ("crosstalk", "a", "expected a number, got 'a'"),
        ("crosstalk", True, "expected a number, got True"),
        ("nothing", 1, "no question named 'nothing'"),
    ],
)
def test_answers_that_are_none(name, answer, phrase, capsys):
    predict(name, answer)
    assert phrase in capsys.readouterr().out


@pytest.mark.parametrize(
    "typed", ["c", "c)", " C", "(c)", "c.", "v1 + v2", " v1 + v2 "]
)
def test_a_letter_as_people_type_it(typed, capsys):
    predict("same_key", typed)
    assert said(capsys) == "Your prediction: v1 + v2."


@pytest.mark.parametrize("number", [0.5, np.float32(0.5), torch.tensor([0.5])])
def test_a_number_as_a_notebook_computes_it(number, capsys):
    predict("crosstalk", number)
    assert said(capsys) == "Your prediction: 0.5."


def test_the_first_question_shows_the_quotes(capsys):
    predict("same_key", ...)
    assert 'as in predict("same_key", "a").' in said(capsys)
    quiz("same_key", ...)
    assert 'as in quiz("same_key", "a").' in said(capsys)


@pytest.mark.parametrize(
    ("name", "computed", "shown"),
    [
        ("crosstalk", 0.5, "0.5"),
        ("crosstalk", torch.tensor(float("nan")), "nan"),
        ("crosstalk", "none", "none"),
        ("same_key", "v2", "v2"),
        ("same_key", torch.tensor([1, 2]), "tensor([1, 2])"),
    ],
)
def test_a_result_that_differs_is_shown_and_said(name, computed, shown, capsys):
    reveal(name, computed)
    printed = said(capsys)
    assert f"The answer: {QUESTIONS[name].answer}." in printed
    assert f"This notebook found {shown} instead." in printed


def test_a_result_that_was_expected_is_not(capsys):
    for name, computed in (("crosstalk", torch.tensor(0.88)), ("same_key", "v1 + v2")):
        reveal(name, computed)
        reveal(name)
    assert "instead" not in said(capsys)


def test_who_predicted_what_the_notebook_found_is_right(capsys):
    predict("same_key", "v2")
    reveal("same_key", "v2")
    assert said(capsys).endswith("You predicted v2: right.")


def test_a_root_and_a_square_have_their_own_reasons(capsys):
    """0.935 is the root of 0.875; 1/256 the square of 1/16."""
    predict("crosstalk", 0.935)
    reveal("crosstalk")
    assert "That is its square root" in said(capsys)
    predict("mean_square", 1 / 256)
    reveal("mean_square")
    assert "a square was taken once too often" in said(capsys)


def test_the_first_answer_counts(capsys):
    predictions()
    assert "0 of 0" in said(capsys)
    for name, answer in (("same_key", "b"), ("crosstalk", 0.875), ("break_even", 32)):
        predict(name, answer)
    reveal("same_key")
    reveal("crosstalk")
    predict("same_key", "c")
    reveal("same_key")
    capsys.readouterr()
    predictions()
    printed = said(capsys)
    assert "1 of 2 predictions were right." in printed
    assert "Not revealed yet: break_even." in printed
    assert "Look again at 00_start_here: same_key." in printed


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
        _question("why", table | fields)


@pytest.mark.parametrize(
    ("truth", "answer"),
    [(1 / 6, "0.167"), (1 / 256, "0.00391"), (0.875, "0.875"), (4096.0, "4096")],
)
def test_an_answer_has_at_most_three_digits_of_a_fraction(truth, answer):
    assert replace(QUESTIONS["crosstalk"], truth=truth).answer == answer


def test_a_quiz_answers_at_once(capsys):
    quiz("same_key", ...)
    assert "The answer" not in capsys.readouterr().out
    quiz("same_key", "z")
    assert "The answer" not in capsys.readouterr().out
    quiz("same_key", "c")
    assert "You predicted v1 + v2: right." in capsys.readouterr().out
