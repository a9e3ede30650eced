"""Test the contest of update rules, `fairness`, and the template of a project."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fwlab.exercises import from_editor
from fwlab.exercises.course.contest import _streams, best, contest
from fwlab.exercises.course.project import FIELDS, fairness
from fwlab.ops.delta.delta import delta_step

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "project"
SAMPLES = {path.parent.name: path for path in FOLDER.glob("samples/*/results.json")}
NOTEBOOK = FOLDER.parents[1] / "notebooks" / "18_project.ipynb"
#: Rows of the rubric: a question, and the words for 0, 1 and 2 points.
RUBRIC = [
    row.split(" | ")
    for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    for row in re.findall(r"^\| ([^|]+\? \| .+) \|$", "".join(cell["source"]), re.M)
]
SMALL = {"rates": [0.1], "seeds": [0], "steps": 2}


def plain(W, k, v):
    return W + v[..., :, None] * k[..., None, :]


def test_a_seed_is_the_same_run_alone_and_beside_others():
    """A seed has the same results in contests of one run and of several runs."""
    alone = contest(plain, [0.1], [1], steps=3)
    beside = contest(plain, [0.3, 0.1], [0, 1], steps=3)
    for part in ("validation", "test"):
        assert abs(alone[part][0][0] - beside[part][1][1]) <= 2e-4  # Rounding differs.
        assert alone[part][0][0] != beside[part][1][0]


def test_only_the_rule_differs():
    nothing = contest(lambda W, k, v: W, **SMALL)
    assert fairness(nothing, contest(plain, **SMALL)) == []
    assert nothing["test"] != contest(plain, **SMALL)["test"]
    assert nothing["parameters"] == 4 * 8 * 6 + 8


def test_the_newest_value_is_asked_for():
    """The target of a query is the newest value of its key, as in a dict."""
    keys, values, ask, newest = _streams(3, 50)
    for row in range(50):
        table = dict(zip(keys[row].tolist(), values[row].tolist(), strict=True))
        assert table[ask[row].item()] == newest[row].item()


def test_the_validation_loss_chooses():
    record = {"rates": [1, 2], "validation": [[3, 3], [1, 4]], "test": [[0, 0], [5, 6]]}
    assert best(record) == (2, [5, 6])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"parameters": 264}, "Parameters: 264 against 200 (32.0% more)."),
        ({"parameters": 100}, "Parameters: 100 against 200 (50.0% fewer)."),
        ({"data": "other"}, "Data: other against hash."),
        ({"data": ""}, "Data: not said against hash."),
        ({"seeds": [2, 1]}, "Seeds: 1, 2 against 0, 1."),
        ({"tokens": 1500}, "Training tokens: 1,500 against 1,000 (50.0% more)."),
        ({"windows": 250}, "Evaluation windows: 250 against 500 (50.0% fewer)."),
        ({"rates": [0.1, 0.3]}, "Learning rates tried: 2 against 1."),
    ],
)
def test_fairness_says_what_is_unequal(change, sentence):
    record = dict(zip(FIELDS, (200, "hash", [0, 1], 1000, 500, [0.1]), strict=True))
    assert fairness(record, record) == []
    assert fairness(record | {"note": 1}, record | {"seeds": [1, 0]}) == []
    assert fairness(record | change, record) == [sentence]


def test_the_template_runs(tmp_path):
    """The project template runs, and its rule gives the same result as the baseline."""
    for name in ("rule.py", "compare.py"):
        shutil.copy(FOLDER / name, tmp_path)
    rule = (tmp_path / "rule.py").read_text("utf-8")
    short = rule.replace('"width": 6', '"width": 6, "steps": 2')
    assert short.count('"steps": 2') == 2
    (tmp_path / "rule.py").write_text(short, "utf-8")
    done = subprocess.run(
        [sys.executable, "compare.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "unequal" not in done.stdout
    result = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert result["bar"] == result["yours"] and result["torch"]


def test_samples_say_what_was_measured():
    sections = (FOLDER / "samples.md").read_text("utf-8").split("\n## ")[1:]
    assert len(sections) == len(SAMPLES) == 3
    for section in sections:
        (name,) = set(re.findall(r"compare\.py samples/(\w+)`", section))
        result = json.loads(SAMPLES[name].read_text("utf-8"))
        numbers = [f"{x:.3f}" for x in best(result["yours"])[1]]
        assert all(number in section for number in numbers), (name, numbers)
        sentences = fairness(result["yours"], result["bar"])
        assert re.findall("^unequal: (.*)$", section, re.M) == sentences
        marks = re.findall(r"^\|.*\| (\d) \| (.*) \|$", section, re.M)
        points = [int(mark) for mark, _ in marks]
        assert f"**{sum(points)} of 10.**" in section
        # Sample grades quote the rubric's words for each number of points.
        for (_, *words), mark, (_, why) in zip(RUBRIC, points, marks, strict=True):
            assert f"*{words[mark]}*" in why


# --- Rules of the site's editor ---------------------------------------------

HEAD = "def step(W, k, v, beta):\n    "


def test_a_rule_of_the_editor_is_a_step():
    """A rule from the editor accepts any heads, is differentiable, and copies W."""
    step = from_editor(f"{HEAD}W += beta * outer(v - W @ k, k)\n    return W", beta=0.7)
    for heads in ((), (3,), (2, 3)):
        W = torch.randn(*heads, 4, 5, requires_grad=True)
        before, k, v = (
            W.detach().clone(),
            torch.randn(*heads, 5),
            torch.randn(*heads, 4),
        )
        new = step(W, k, v)
        right = delta_step(W, k, v, torch.full(heads, 0.7))
        torch.testing.assert_close(new, right)
        torch.testing.assert_close(W.detach(), before, rtol=0, atol=0)
        torch.autograd.grad(new.sum(), W)


#: Texts of rules, without `HEAD` unless they contain `def`, and their errors.
REFUSED = """
return W.data => line 2: there is no Attribute here
return W[0] => line 2: there is no Subscript here
return (lambda: W)() => line 2: there is no Lambda here
return exp.__call__(W) => line 2: there is no Attribute here
return open(W) => line 2: no function open; there are outer, diag
return __builtins__ => line 2: no name __builtins__; there are W, beta
return 'W' => line 2: expected a number, got 'W'
import os => line 2: there is no Import here
def step(W, k=open(0)): return W => line 1: write def step
def step(): return W => line 1: write def step
def step(W, *k): return W => line 1: write def step
def step(W, *, k): return W => line 1: write def step
def step(W, k, /): return W => line 1: write def step
def step(W, k, k): return W => line 1: duplicate argument
x = W;;return x % 2 => line 4: no operator %
W //= 2;return W => line 2: no operator //
x = 2;return W + => line 3: invalid syntax
x = 2;  return W => line 3: unexpected indent
x = W => line 2: end with return, and the new W
x = W;return => line 3: end with return, and the new W
exp = W;return W => line 2: exp is a function; take another name
return y;y = W => line 2: no name y
return sum(W, 1) => line 2: sum takes 1, not 2
def step(W, n): return W / n => expected W, k, v and beta, got n
print(1) or def => line 1: write def step(W, k, v, beta): and nothing else
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_nothing_else_of_python_is_run(line):
    text, _, said = line.partition(" => ")
    text = text.removesuffix(" or def") if "def" in text else HEAD + text
    text = text.replace(";", "\n    ")
    with pytest.raises(ValueError) as refusal:
        from_editor(text)
    assert str(refusal.value).startswith(said)


def test_numbers_and_shapes_are_those_of_the_page():
    W, k, v = torch.ones(2, 4, 5), torch.ones(2, 5), torch.ones(2, 4)
    for number in ("9 ** 9 ** 9", "1 / 0", "10 ** 400", "1" * 400):
        new = from_editor(f"{HEAD}return {number} * W")(W, k, v)
        assert new.dtype == W.dtype and new.isinf().all()
    for wrong in ("k", "1"):
        with pytest.raises(ValueError, match="expected a new W of"):
            from_editor(f"{HEAD}return {wrong}")(W, k, v)
    with pytest.raises(ValueError, match="at most 2000 characters"):
        from_editor(f"{HEAD}return W{' ' * 2_000}")
