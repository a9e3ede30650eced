"""Derivations with blanks, checked by numbers."""

import pytest

from fwlab.exercises import DERIVATIONS, check_formula, hint, solution

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
        ("2 * phi @ phi", "differs from the right expression"),
        ("'phi'", "TypeError"),
        ("exit()", "SystemExit"),
        (3, "differs"),
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
    assert "✗ a: this differs" in printed and "✓ b\n✓ c\n" in printed


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
