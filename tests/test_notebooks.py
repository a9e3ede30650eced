"""The form of every notebook; nbval runs the cells."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import address
import nbformat
import pytest
import torch
from accelerator import DEVICE, Accelerator

from fwlab import data, exercises, plots, training
from fwlab.exercises import EXERCISES, QUESTIONS

ROOT = Path(__file__).resolve().parents[1]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=PATHS, ids=lambda p: p.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return nbformat.read(path, as_version=4)


def code(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert {"01_fast_weights", "04_delta_rule", "07_transformer"} <= {
        p.stem for p in PATHS
    }


def test_badge_and_setup(notebook, path):
    """They are as the tool writes them for the current address."""
    sources = [cell.source for cell in notebook.cells]
    cells = address.with_cells(notebook.cells, path.name, address.current())
    assert [cell["source"] for cell in cells] == sources
    assert [cell["id"] for cell in cells][:3].count("setup") == 1


def test_outputs_are_committed(notebook):
    nbformat.validate(notebook)
    assert any(cell.outputs for cell in code(notebook))
    assert [c.execution_count for c in code(notebook)] == list(
        range(1, len(code(notebook)) + 1)
    )
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}
    for cell in code(notebook):
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output.text
            assert len(str(output)) < 200_000


def test_figures_in_house_style(notebook):
    text = "\n".join(cell.source for cell in code(notebook))
    figures = [
        output.data["image/svg+xml"]
        for cell in code(notebook)
        for output in cell.outputs
        if "image/svg+xml" in output.get("data", {})
    ]
    assert figures
    assert "plots.style()" in text
    for svg in figures:
        assert "<dc:date>" not in svg
        assert "fill: #ffffff" not in svg  # backgrounds are transparent


def test_cells_are_short_and_ids_are_stable(notebook):
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z]+(-[a-z0-9]+)*", name) for name in ids)
    for cell in code(notebook):
        ast.parse(cell.source)


@pytest.mark.parametrize("path", PATHS[:9], ids=[path.stem for path in PATHS[:9]])
def test_cells_fit_on_a_screen(notebook):
    cells = {c.id: len(c.source.splitlines()) for c in code(notebook)}
    assert {name: n for name, n in cells.items() if n > 15 and name != "setup"} == {}


def test_exercises_exist(notebook):
    for cell in code(notebook):
        for name in re.findall(r"\b(?:check|hint|solution)\(\"?(\w+)", cell.source):
            assert name in EXERCISES
        for name in re.findall(r"\b(?:predict|quiz|reveal)\(\"(\w+)", cell.source):
            assert name in QUESTIONS


@pytest.mark.parametrize("path", PATHS[:9], ids=[path.stem for path in PATHS[:9]])
def test_exercises_stand_beside_their_idea(notebook, path):
    """Each with its task above it, and before any code that is its answer."""
    cells, asked, before = notebook.cells, [], set()
    for i, cell in enumerate(cells):
        if cell.cell_type == "code":
            for name in re.findall(r"^_ = check\((\w+)", cell.source, re.MULTILINE):
                asked.append(name)
                title = (
                    "**" if cells[i - 1].source[:3] == "**E" else f"**{len(asked)}. "
                )
                task = EXERCISES[name].task.replace("**", title, 1)
                assert " ".join(task.split()) in " ".join(cells[i - 1].source.split())
                assert not {name, EXERCISES[name].reference.__name__} & before, name
            before |= {
                getattr(node, kind, None)
                for node in ast.walk(ast.parse(cell.source))
                for kind in ("id", "attr", "name")
            }
    assert len(asked) == (1 if path.stem.startswith("00") else 3)


@pytest.fixture
def briefly(monkeypatch):
    """On a GPU runtime, with a short text, two layers and two steps of training."""
    made = []

    class Brief(training.Trainer):
        def __init__(self, config, text=None, resume=None):
            config = replace(config, steps=2, eval_every=2, layers=2)
            super().__init__(config, text, resume)
            made.append(self)

    text = (ROOT / "docs" / "errata.md").read_text("utf-8")
    text = "It is To be A a" + "".join(x for x in text if x.isascii())
    monkeypatch.setattr(training, "Trainer", Brief)
    monkeypatch.setattr(training.engine, "device", lambda name: DEVICE)
    monkeypatch.setattr(data, "corpus", lambda name=None: text[:12_000])
    for name in ("check", "predict", "quiz", "reveal", "scoreboard"):
        monkeypatch.setattr(exercises, name, lambda *given: None)
    return made


class WithoutVerdict(ast.NodeTransformer):
    """Computes what is asserted, but expects nothing."""

    def visit_Assert(self, node):
        return ast.copy_location(ast.Expr(node.test), node)


#: Notebooks that train; the others compute for long before they do.
TRAINING = [
    pytest.param(
        path, id=path.stem, marks=() if "07" in path.stem else pytest.mark.slow
    )
    for path in PATHS
    if "Trainer(" in path.read_text("utf-8")
]


@pytest.mark.parametrize("path", TRAINING)
def test_training_runs_on_an_accelerator(path, briefly):
    """`Trainer` moves the model there; all else has to follow."""
    names = {}
    with Accelerator():
        for cell in code(nbformat.read(path, as_version=4)):
            if cell.id != "setup":
                tree = WithoutVerdict().visit(ast.parse(cell.source))
                exec(compile(tree, f"{path.name}, {cell.id}", "exec"), names)
    assert briefly and all(trainer.device == DEVICE for trainer in briefly)


def test_what_a_gpu_refuses_is_refused():
    with Accelerator():
        x = torch.ones(3).to(DEVICE)
        assert (x + 1).device == DEVICE and (x + torch.tensor(1)).device == DEVICE
        assert x.cpu().numpy().sum() == x.sum().item() == 3
        assert torch.equal(x[torch.tensor([0])].cpu(), torch.ones(1))
        for mixed in (lambda: x + torch.ones(3), lambda: torch.ones(3)[x.long()]):
            with pytest.raises(RuntimeError, match="one on the CPU"):
                mixed()
        with pytest.raises(TypeError, match="copy this tensor to the CPU"):
            x.numpy()
        ax = plots.new()[1]
        with pytest.raises(TypeError):
            ax.plot(x)
