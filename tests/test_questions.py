"""What notebooks ask beside exercises: predictions, and derivations with blanks."""

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
    """Start each test with nothing predicted."""
    monkeypatch.setattr(progress, "_session", {})
    monkeypatch.setattr(progress, "_sure", {})
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


@pytest.mark.parametrize(
    "number",
    [0.5, np.float32(0.5), torch.tensor([0.5]), "0.5", " 1/2 ", "50 %", "50%"],
)
def test_a_number_as_people_type_it_or_a_notebook_computes_it(number, capsys):
    predict("crosstalk", number)
    assert said(capsys) == "Your prediction: 0.5."


def test_a_percentage_where_percent_are_asked_for(capsys):
    (name, *_) = [name for name, each in QUESTIONS.items() if each.percent]
    predict(name, "69 %")
    assert said(capsys) == "Your prediction: 69."


def test_the_first_question_shows_the_quotes(capsys):
    predict("same_key", ...)
    assert 'as in predict("same_key", "a", sure=0.8).' in said(capsys)
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


@pytest.mark.parametrize("sure", [0.8, "0.8", "80 %", "4/5"])
def test_how_sure_somebody_is_as_people_type_it(sure, capsys):
    predict("same_key", "c", sure=sure)
    assert said(capsys) == "Your prediction: v1 + v2, 80% sure."
    predict("same_key", "c")  # not said this time
    assert said(capsys) == "Your prediction: v1 + v2."


@pytest.mark.parametrize("sure", [80, -0.1, "very", float("nan"), "1/0", [0.8]])
def test_a_probability_is_from_0_to_1(sure, capsys):
    predict("same_key", "c", sure=sure)
    assert "expected sure to be a number from 0 to 1, such as 0.8, got" in said(capsys)


def test_the_curve_shows_how_often_somebody_was_right(capsys):
    """Two groups: of three at 90 % two are right, of two at 50 % one."""
    names = [name for name, each in QUESTIONS.items() if each.choices][:5]
    for i, name in enumerate(names):
        assert predictions() is None
        right = i not in (2, 4)
        answer = (
            QUESTIONS[name].truth if right else next(iter(QUESTIONS[name].tempting))
        )
        predict(name, answer, sure=0.9 if i < 3 else 0.5)
        reveal(name)
    predict(names[0], QUESTIONS[names[0]].truth, sure=0.1)
    reveal(names[0])  # the first one counts
    capsys.readouterr()
    (ax,) = predictions().axes
    assert "74% on average; 60% of them were right." in said(capsys)
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


def test_a_quiz_answers_at_once(capsys):
    quiz("same_key", ...)
    assert "The answer" not in capsys.readouterr().out
    quiz("same_key", "z")
    assert "The answer" not in capsys.readouterr().out
    quiz("same_key", "c")
    assert "You predicted v1 + v2: right." in capsys.readouterr().out


# --- Derivations -------------------------------------------------------

RIGHT = {"a": "phi @ phi", "b": "1 - beta * (phi @ phi)", "c": "beta * (phi @ phi)"}


@pytest.mark.parametrize("name", DERIVATIONS)
def test_the_truth_is_right_and_every_mistake_is_named(name, capsys):
    derivation = DERIVATIONS[name]
    # A page shows 82 characters of an output; the rest scrolls.
    assert max(map(len, derivation.text.splitlines())) <= 82
    truths = {letter: blank.truth for letter, blank in derivation.blanks.items()}
    assert check_formula(name, **truths)
    for letter, blank in derivation.blanks.items():
        assert f"[{letter}]" in derivation.text and blank.tempting
        for mistake, why in blank.tempting.items():
            capsys.readouterr()
            assert not check_formula(name, **truths | {letter: mistake})
            printed = " ".join(capsys.readouterr().out.split())
            assert f"✗ {letter}: {why}." in printed and printed.count("✗") == 1


@pytest.mark.parametrize(
    "ways",
    [
        {"a": "(phi**2).sum()"},
        {"a": "norm(phi) ** 2", "c": "torch.dot(phi, phi) * beta"},
        {"b": " 1 - phi @ phi * beta "},
        # By the blank before it, and with functions of Python.
        {"b": "1 - beta * a", "c": "a * beta"},
        {"a": "sum(x * x for x in phi)"},
        {"a": "sum([max(x, -x) ** 2 for x in phi])"},
        {"a": "sum(phi[i] ** 2 for i in range(4))", "b": "exp(0) - beta * (phi @ phi)"},
        {"a": "float(phi @ phi)", "c": "max(beta * a, 0)", "b": "1 -\n beta * a"},
        # A tensor that an expression makes has as many digits as the symbols.
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
        ("'phi'", "TypeError"),
        ("exit()", "SystemExit"),
        (3, "with phi"),
        (None, "TypeError"),
        ("", "still empty"),
        ("...", "still empty"),
        (..., "still empty"),
    ],
)
def test_what_is_wrong_is_said(blank, phrase, capsys):
    assert not check_formula("unit_factor", **RIGHT | {"a": blank})
    printed = " ".join(capsys.readouterr().out.split())
    assert f"✗ a: {phrase}" in printed or phrase in printed.partition("✓")[0]
    assert 'Try hint("unit_factor")' in printed


def test_an_expression_cannot_change_the_symbols(capsys):
    """Where phi is 0, its length would be right, too."""
    assert not check_formula("unit_factor", **RIGHT | {"a": "phi.zero_() @ phi"})
    printed = capsys.readouterr().out
    assert "✗ a: with phi = " in printed and "✓ b\n✓ c\n" in printed


def test_without_blanks_the_derivation_is_printed(capsys):
    for blanks in ({}, {"a": ..., "b": ...}, {"a": "..."}):
        assert not check_formula("unit_factor", **blanks)
        printed = capsys.readouterr().out
        assert printed.startswith(DERIVATIONS["unit_factor"].text)
        assert 'check_formula("unit_factor", a="...", b="...", c="...")' in printed
        assert "beta, a number; phi [4]; v [3]; W [3, 4]" in " ".join(printed.split())


def test_unknown_names(capsys):
    assert not check_formula("nothing", a="1")
    assert "no derivation named 'nothing'" in capsys.readouterr().out
    assert not check_formula("unit_factor", z="1")
    assert "no blank z. The blanks: a, b, c." in capsys.readouterr().out


def test_hints_and_solutions_of_every_kind(capsys):
    for name, said in {
        "unit_factor": "Hint 1 of 3: The row",
        "delta_step": "Hint 1 of ",
        "crosstalk": "crosstalk has no hints.",
        "nothing": "There is no exercise",
    }.items():
        hint(name)
        assert capsys.readouterr().out.startswith(said)
    for name, said in {
        "unit_factor": "a = phi @ phi\nb = 1 - beta",
        "crosstalk": "The answer: 0.875.",
        "nothing": "There is no exercise",
    }.items():
        solution(name)
        assert capsys.readouterr().out.startswith(said)
