"""Test `yours_or`, `golf`, stored progress, and functions kept in my_lab.py."""

import itertools
import json
import linecache
import sys
from types import SimpleNamespace

import pytest
import torch
from terminal import fwlab

from fwlab.exercises import (
    DERIVATIONS,
    EXERCISES,
    QUESTIONS,
    check,
    check_formula,
    checking,
    golf,
    lab,
    mine,
    predict,
    predictions,
    progress,
    reveal,
    yours_or,
)
from fwlab.exercises.checking import lines_of


def write(W, k, v):
    """Return W plus a pair; `golf` does not count lines of a docstring.

    The second line does not count, either.
    """
    # Comments do not count.
    return (
        W  # One statement counts as one line.
        + v[..., :, None] * k[..., None, :]
    )


def noisy(W, k, v):
    print("here I am")
    torch.rand(3)
    return write(W, k, v)


def blank(W, k, v): ...


def hopeless(W, k, v):
    raise KeyboardInterrupt


@pytest.fixture
def notebook(monkeypatch, tmp_path):
    """Simulate a notebook kernel in an empty folder; return its progress file."""
    for name in ("CI", "PYTEST_VERSION", "FWLAB_PROGRESS"):
        monkeypatch.delenv(name, raising=False)
    shell = SimpleNamespace(kernel="")
    ipython = SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(progress, "_session", {})
    monkeypatch.setattr(progress, "_sure", {})
    monkeypatch.chdir(tmp_path)
    return tmp_path / progress.FILE


# --- Your own functions -------------------------------------------------


def test_your_function_is_used_if_it_is_right(capsys):
    assert yours_or(write) is write
    assert capsys.readouterr().out == "write: yours, from here on.\n"
    mine = lambda W, k, v: write(W, k, v)  # noqa: E731
    assert yours_or(mine, "write") is mine


@pytest.mark.parametrize("answer", [blank, hopeless, None, ...])
def test_ours_is_used_otherwise(answer, capsys):
    ours = yours_or(answer, name="write")
    assert ours is EXERCISES["write"].reference
    assert capsys.readouterr().out == "write: fwlab's, until yours passes check.\n"
    assert yours_or(ours) is ours  # The cell runs again.
    assert capsys.readouterr().out == "write: fwlab's.\n"


def test_an_unknown_function_stays_what_it_is(capsys):
    def unknown(): ...

    assert yours_or(unknown) is unknown
    assert "no exercise named 'unknown'" in capsys.readouterr().out


def test_yours_or_leaves_nothing_behind(notebook, monkeypatch, capsys):
    """`yours_or` changes no random state, prints one line, and stores nothing."""
    heard: list[str] = []
    monkeypatch.setattr(
        checking, "listener", lambda *arguments: heard.append(arguments)
    )
    torch.manual_seed(0)
    wanted = torch.rand(2)
    torch.manual_seed(0)
    assert yours_or(noisy, "write") is noisy
    assert torch.equal(torch.rand(2), wanted)
    assert capsys.readouterr().out == "write: yours, from here on.\n"
    assert not heard and not notebook.exists() and not progress.done()


def test_golf_counts_statements(capsys):
    assert lines_of(write) == 2
    assert golf(write, "write")
    assert capsys.readouterr().out.endswith("all right.\nYour lines: 2. Par: 2.\n")
    made: dict = {}
    exec("def write(W, k, v): return W + v[..., :, None] * k[..., None, :]", made)
    assert golf(made["write"], "write")
    assert "cannot be counted" in capsys.readouterr().out
    assert not golf(blank, "write")
    assert "lines" not in capsys.readouterr().out


def test_golf_is_not_won_with_semicolons():
    def joined(x):
        a = x; b = a; return b  # noqa: E702  # fmt: skip

    assert lines_of(joined) == 4


# --- Saved progress -------------------------------------------------------


def test_a_notebook_remembers_what_passed(notebook, capsys):
    check(blank, "write")
    assert not notebook.exists()
    check(write)
    predict("same_key", "b", sure=0.8)
    reveal("same_key")
    predict("same_key", "c", sure=0.9)
    reveal("same_key")
    check_formula("unit_factor", a="1")
    check(blank, "write")  # A wrong answer does not undo progress.
    done = {"write": True, "same_key": False, "sure": {"same_key": 0.8}}
    assert json.loads(notebook.read_text()) == done
    progress._session.clear()  # Start a new session.
    progress._sure.clear()
    assert progress.given() == {"same_key": 0.8}
    check_formula("unit_factor", a="phi @ phi", b="1 - beta * a", c="beta")
    capsys.readouterr()
    predictions()
    printed = " ".join(capsys.readouterr().out.split())
    assert "0 of 1 predictions were right. Look again at 00_start_here" in printed
    assert str(notebook) in printed
    listed = fwlab("exercises", "list")[1]
    assert "✓ write " in listed and "✗ same_key " in listed
    assert "  delta_step " in listed and "  unit_factor " in listed


@pytest.mark.parametrize("name", ["CI", "PYTEST_VERSION"])
def test_tests_remember_nothing_unless_asked(name, notebook, monkeypatch, tmp_path):
    monkeypatch.setenv(name, "1")
    check(write)
    assert not notebook.exists()
    asked = tmp_path / "asked.json"
    monkeypatch.setenv("FWLAB_PROGRESS", str(asked))
    check(write)
    assert json.loads(asked.read_text()) == {"write": True}


def test_only_a_kernel_remembers(notebook, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython", None)
    check(write)
    assert not notebook.exists() and progress.done() == {"write": True}


def test_what_cannot_be_read_or_written_is_no_error(notebook):
    for content in ("{", "[]", '{"write": 3}'):
        notebook.write_text(content)
        assert progress.done() == {}
    notebook.unlink()
    notebook.mkdir()
    check(write)
    assert progress.done() == {"write": True}


def test_everything_is_listed_by_notebook():
    listed = progress.overview({"crosstalk": True})
    names = [*EXERCISES, *DERIVATIONS, *QUESTIONS]
    assert len(set(names)) == len(names)
    lines = [line[2:].split() for line in listed.splitlines()]
    assert sorted(line[0] for line in lines if len(line) == 5) == sorted(names)
    assert "✓ crosstalk" in listed
    for each in (*EXERCISES.values(), *DERIVATIONS.values(), *QUESTIONS.values()):
        assert min(each.difficulty, each.importance) >= 1, each.name
        assert max(each.difficulty, each.importance) <= 5, each.name


# --- my_lab.py: a function that passes can be imported in the next notebook ---


START = "import torch\nfrom torch import einsum as product\nfrom fwlab.ops.feedback import naive\nSIGN = 1\n"
HELPER = 'def outer(v, k):\n    return product("...v,...k->...vk", v, k)\n'
WRITE = "def write(W, k, v):\n    assert naive\n    return W + SIGN * outer(v, k)\n"
numbers = itertools.count()


def cells(*sources: str) -> dict:
    """Execute sources of cells as a notebook kernel does; return the defined names."""
    names = {"__name__": "__main__"}
    for source in sources:
        place = f"<cell {next(numbers)}>"
        linecache.cache[place] = (len(source), None, source.splitlines(True), place)
        exec(compile(source, place, "exec"), names)
    return names


def test_a_function_is_kept_with_what_it_uses_and_comes_back(notebook, capsys):
    file = notebook.with_name(lab.FILE)
    check(cells(START, HELPER, WRITE)["write"])
    assert "all right.\nIt is kept in my_lab.py.\n" in capsys.readouterr().out
    for line in (
        "# %% write",
        "from torch.functional import einsum as product",
        "from fwlab.ops.feedback import naive",
        "SIGN = 1",
    ):
        assert f"{line}\n" in file.read_text()
    write, delta_step = mine("write", "delta_step")
    assert write.__module__ == "my_lab"
    assert delta_step is EXERCISES["delta_step"].reference
    said = (
        "write: yours, from here on.\ndelta_step: fwlab's, until yours passes check.\n"
    )
    assert capsys.readouterr().out == said
    blank = cells("def write(W, k, v): ...")["write"]  # The notebook is opened again.
    assert yours_or(blank).__module__ == "my_lab"
    assert "not right yet; yours in my_lab.py" in capsys.readouterr().out
    assert write(torch.zeros(1, 1), *torch.ones(2, 1)).item() == 1
    # The file already contains the functions that `correct` calls.
    again = "def correct(W, k, v):\n    return write(W, k, v - (W @ k[..., None])[..., 0])\n"
    check(cells("from my_lab import write\n", again)["correct"])
    assert mine("correct").__module__ == "my_lab"


def test_a_later_answer_replaces_its_own_section_alone(notebook):
    file = notebook.with_name(lab.FILE)
    check(cells(START, HELPER, WRITE)["write"])
    file.write_text(file.read_text() + "\n\n# %% notes\n\nMINE = 7\n")
    check(
        cells("def put(W, k, v):\n    return W + v[..., :, None] * k[..., None, :]\n")[
            "put"
        ],
        "write",
    )
    text = file.read_text()
    assert "MINE = 7" in text and "write = put" in text and "outer" not in text
    assert lab.shelf(file.parent) == ["write", "notes"]
    assert "Yours, in my_lab.py: write, notes\n" in fwlab("exercises", "list")[1]
    assert mine("write").__name__ == "put"


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        (["ones = [1]\n", WRITE.replace("SIGN", "ones[0]")], "it uses ones"),
        (["write = lambda W, k, v: W + outer(v, k)\n"], "only a function with a name"),
        ([f"def made():\n    SIGN = 1\n    {WRITE.replace(chr(10), chr(10) + '    ')}\n    return write\n", "write = made()\n"], "stands alone"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_down_is_said(sources, why, notebook, capsys):
    file = notebook.with_name(lab.FILE)
    assert check(cells(START, HELPER, *sources)["write"], "write")
    said = capsys.readouterr().out
    assert "It is not kept in my_lab.py: " in said and why in said
    assert not file.exists()


def test_what_is_kept_runs_by_itself(notebook, capsys):
    file = notebook.with_name(lab.FILE)
    helper = "def outer(v, k, eps=EPS):\n    return (v[..., None] * k[..., None, :]).clamp(-inf, inf) + 0 * eps\n"
    uses = "def write(W, k, v):\n    one = SIGN\n    return W + outer(v, k)\n"
    names = cells(
        "SIGN, EPS, inf, k, one = 1, 1e-6, float('inf'), [1], [1]\n", helper, uses
    )
    check(names["write"])  # k is a parameter, and `one` is a local name.
    text = file.read_text()
    assert 'inf = float("inf")' in text and "1e-06" in text.split("def outer")[0]
    check(mine("write"), "write")
    assert (
        file.read_text() == text
        and "It is in my_lab.py already." in capsys.readouterr().out
    )
    other = "from my_lab import outer\ndef correct(W, k, v):\n    return W + outer(v - (W @ k[..., None])[..., 0], k) + EPS * 0\n"
    check(cells("EPS = 5.0\n", other)["correct"])
    assert (
        "write has another EPS" in capsys.readouterr().out and file.read_text() == text
    )
    check(cells(other.replace("EPS", "0"))["correct"])
    assert (
        file.read_text().count("def outer") == 1
        and mine("correct").__module__ == "my_lab"
    )
    changed = "def write(W, k, v):\n    return outer(v, k) + W\n"
    check(cells("from my_lab import outer\n", changed)["write"])
    assert (
        "return outer(v, k) + W" in file.read_text() and "def outer" in file.read_text()
    )
    file.write_text((before := file.read_text()) + "\n\n# %% notes\n\n1 / 0\n")
    check(
        cells(
            WRITE.replace(
                "SIGN * outer(v, k)", "v[..., None] * k[..., None, :]"
            ).replace("naive", "1")
        )["write"]
    )
    assert (
        file.read_text().startswith(before)
        and "not kept in my_lab.py: division" in capsys.readouterr().out
    )


def test_ours_is_not_kept(notebook, capsys):
    file = notebook.with_name(lab.FILE)
    check(EXERCISES["write"].reference)
    assert not file.exists() and "my_lab" not in capsys.readouterr().out


def test_a_broken_file_is_said(notebook, capsys):
    file = notebook.with_name(lab.FILE)
    file.write_text("def write(:\n")
    assert mine("write") is EXERCISES["write"].reference
    assert "my_lab.py cannot be imported: SyntaxError" in capsys.readouterr().out


def test_nothing_runs_where_nothing_is_remembered(notebook, monkeypatch):
    file = notebook.with_name(lab.FILE)
    file.write_text("raise SystemExit\n")
    monkeypatch.setenv("FWLAB_PROGRESS", "")
    assert mine("write") is EXERCISES["write"].reference
    check(cells(START, HELPER, WRITE)["write"])
    assert file.read_text() == "raise SystemExit\n"
