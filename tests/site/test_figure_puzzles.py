"""Puzzles: three solved by hand, and the answers to all."""

import json
import tomllib
from itertools import zip_longest

import pytest
import torch
from built import ROOT

from fwlab import ops

FIGURES = ROOT / "docs" / "figures"
PAGE = (FIGURES / "puzzles.md").read_text("utf-8")
PUZZLES = tomllib.loads((FIGURES / "puzzles.toml").read_text("utf-8"))


@pytest.fixture
def figure(fresh):
    figure = fresh("puzzles")
    figure.tab.evaluate("localStorage.clear()")
    return fresh("puzzles")


def pick(figure, name):
    figure.role("combobox", name="Puzzle").select_option(name)


def fill(figure, typed: dict[str, str]):
    for label, text in typed.items():
        figure.role("textbox", name=label, exact=True).fill(text)


def typed(steps) -> list[dict[str, str]]:
    """Rows of puzzles.toml as a reader types them."""
    return [
        {n: " ".join(map(str, p if isinstance(p, list) else [p])) for n, p in s.items()}
        for s in steps
    ]


@pytest.mark.parametrize("name", PUZZLES)
def test_answers_are_right_and_of_the_best_size(figure, name):
    puzzle = PUZZLES[name]
    rows = {kind: typed(steps) for kind, steps in puzzle["answer"].items()}
    verdict = figure.ask("root.figure.judge(given[0], given[1])", [name, rows])
    assert verdict["right"] and verdict["size"] == puzzle["best"]
    assert verdict["says"].endswith(f"Nothing smaller exists: {puzzle['why']}.")


@pytest.mark.parametrize("name", PUZZLES)
def test_answers_by_the_rules_of_fwlab(name):
    puzzle = PUZZLES[name]
    rows, given = puzzle["answer"], puzzle.get("given", {})
    columns, height = puzzle["best"][1], puzzle["numbers"]
    empty = {"key": [0] * columns, "value": 0, "beta": 1, "query": [0] * columns}
    steps = {
        kind: [
            empty | a | b
            for a, b in zip_longest(
                given.get(kind, []), rows.get(kind, []), fillvalue={}
            )
        ]
        for kind in given | rows
    }
    for case in puzzle["cases"]:
        inputs, expected = [], {}
        for token in case.split():
            written, _, wanted = token.partition(":")
            kind, mark, x = written.partition("=")
            x = [*map(float, x.split(","))] if x else [0.0] * height
            for step in steps[kind + mark]:
                v = step["value"]
                v = [v] * height if isinstance(v, int | float) else v
                v = x if v == "x" else [-n for n in x] if v == "-x" else v
                inputs.append((step["query"], step["key"], v, step["beta"]))
            if wanted:
                expected[len(inputs) - 1] = [*map(float, wanted.split(","))]
        q, k, v, beta = (
            torch.tensor(part, dtype=torch.float64)[None, :, None]
            for part in zip(*inputs, strict=True)
        )
        if puzzle["rule"] == "sum":
            y = ops.sum_rule(q, k, v, normalize=False)
        else:
            y = ops.delta_rule(q, k, v, beta)
        wanted = torch.tensor([*expected.values()], dtype=torch.float64)
        assert torch.allclose(y[0, [*expected], 0], wanted)


def test_swap_by_hand(figure):
    """Blank, wrong, right: what is drawn, what is said, and what is kept."""
    pick(figure, "swap")
    assert figure.words() == "Still blank: a=, b=, swap, a?, b?."
    assert figure.texts(".fw-tape em") == ["→ 4,2", "→ 3,1"]
    fill(figure, {"a=: key": "1 0", "a=: value": "x", "b=: key": "0 1"})
    fill(figure, {"b=: value": "x", "a?: query": "1 0", "b?: query": "0, 1"})
    fill(figure, {"swap: key": "1 −1", "swap: β": "1/2"})
    assert "sequence a=3,1 b=4,2 swap a?: the last reading is 3.5,1.5" in figure.words()
    assert figure.texts(".fw-tape b") == ["a=3,1", "b=4,2", "swap", "a?"]
    assert figure.texts(".fw-tape em") == ["✗ 3.5,1.5,\nexpected 4,2"]
    fill(figure, {"swap: β": ""})
    assert figure.words().startswith("✓ Right in all 8 sequences: 1 step × 2 columns")
    assert figure.texts(".fw-tape em") == ["✓ 4,2", "✓ 3,1"]
    assert figure.texts(".fw-tape > :nth-child(3) i") == ["4", "3", "2", "1"]
    assert figure.state()["solved"] == ["keep", "swap"]
    assert "10. ★ Swap two" in figure.texts("option")
    # After the page has been left, too.
    figure.tab.reload()
    assert figure.state()["name"] == "keep"
    pick(figure, "swap")
    assert figure.words().startswith("✓ Right")
    figure.press("Clear")
    assert figure.words().startswith("Still blank")
    # The example begins as an example.
    pick(figure, "keep")
    fill(figure, {"a=: value": "-x"})
    assert "the last reading is -3, expected 3." in figure.words()
    figure.tab.reload()
    assert figure.words().startswith("✓ Right")


def test_stack_by_keyboard(figure):
    """Two steps for a token: the query stays with the last."""
    pick(figure, "stack")
    press = figure.tab.keyboard.press
    for kind in ("push=", "pop"):
        figure.role("button", name=f"{kind}: one more step", exact=True).focus()
        press("Enter")
    assert figure.tab.evaluate("document.activeElement.ariaLabel") == "pop, step 1: key"
    figure.role("textbox", name="push=, step 1: key").focus()
    for text in ("1 -1", "", "", "1 0", "x", "", None, None):
        if text is None:
            continue
        figure.tab.keyboard.type(text)
        press("Tab")
    fill(figure, {"pop, step 1: key": "1 0", "pop, step 2: key": "1 -1"})
    fill(figure, {"top?: query": "1 0"})
    assert "2 steps × 2 columns, score 4" in figure.words()
    assert figure.texts(".fw-tape b")[:3] == ["push=3 1/2", "push=3 2/2", "push=5 1/2"]
    figure.role("button", name="pop: one step less").click()
    assert "✗ Wrong in the sequence push=3 push=5 top? pop top?" in figure.words()
    pick(figure, "shift")
    for _ in range(3):
        figure.role("button", name="x=: one more step").click()
    assert figure.role("button", name="x=: one more step").is_disabled()
    fill(figure, {"x=, step 4: query": "0 0 1"})
    figure.role("button", name="x=: one step less").click()
    query = figure.role("textbox", name="x=, step 3: query", exact=True)
    assert query.input_value() == "0 0 1"


def test_clock_by_touch(fresh):
    """With roots and fractions, and with the hints; on a phone."""
    figure = fresh("puzzles", (390, 844), touch=True)
    figure.tab.evaluate("localStorage.clear()")
    pick(figure, "clock")
    for number in range(1, 4):
        figure.role("button", name="Hint").tap()
        hint = PUZZLES["clock"]["hints"][number - 1]
        assert figure.texts(".fw-note")[1].endswith(hint)
    assert figure.role("button", name="Hint (0 left)").is_disabled()
    for kind in ("on", "back"):
        figure.role("button", name=f"{kind}: one more step").tap()
    one = {"key": "1 0", "value": "1/2", "β": "2"}
    other = {"key": "1/√3 1", "value": "√3/3", "β": "3/2"}
    for kind, steps in {"on": (one, other), "back": (other, one)}.items():
        for number, parts in enumerate(steps, 1):
            fill(figure, {f"{kind}, step {number}: {f}": t for f, t in parts.items()})
        fill(figure, {f"{kind}, step 2: query": "1 √3"})
    assert "✓ Right" in figure.words() and "score 4" in figure.words()
    assert figure.wide() <= 390
    figure.role("button", name="Next puzzle").tap()
    assert figure.state()["name"] == "cups"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"a=: key": "one"}, "✗ a=, key: expected numbers such as 1, 0.5, 1/2 or √3,"),
        ({"a=: key": "1 0"}, "the query of a? has 1."),
        ({"a=: key": "1 0", "a?: query": "1 0"}, "✗ At most 1 column, got 2."),
        ({"a=: β": "2"}, "✗ a=: expected β · |key|² from 0 to 1, got 2."),
        (
            {"a=: β": "1000"},
            "✗ a=, β: numbers are 0, or 0.01 to 100 in size; got 1000.",
        ),
        ({"a=: key": "0.001"}, "in size; got 0.001."),
        ({"a=: β": "1 1"}, "✗ a=: expected one number as β."),
        ({"a=: value": "1 1"}, "✗ a=: expected 1 numbers as the value."),
        ({"a=: value": "7"}, "the last reading is 7, expected 3."),
        ({"a?: query": ""}, "Still blank: a?."),
    ],
)
def test_what_is_wrong_is_said(figure, changed, says):
    fill(figure, changed)
    assert says in figure.words()


def test_nothing_kept_that_cannot_be_read(figure):
    kept = {"swap": {"a=": [{"key": "1 0"}]}, "none": 3}
    for text in (json.dumps(kept), "{", "[1]", '{"swap": 1}'):
        figure.tab.evaluate(
            "(text) => localStorage.setItem('fwlab.puzzles', text)", text
        )
        figure.tab.reload()
        pick(figure, "swap")
        first = "b=" if text == json.dumps(kept) else "a="
        assert figure.words().startswith(f"Still blank: {first}")


def test_page_says_what_is_in_the_puzzles():
    assert "Twenty fast weight puzzles" in PAGE and len(PUZZLES) == 1 + 20
    names = [*PUZZLES]
    (first,) = (n for n in names if PUZZLES[n]["title"] == "Change the sign")
    strengths = [PUZZLES[n].get("strength", 1) for n in names]
    assert strengths == [1 if n < names.index(first) else 2 for n in range(len(names))]
    assert [n for n in names if PUZZLES[n]["rule"] == "sum"] == ["votes"]
