"""Test the cells, outputs and exercises of every notebook; nbval runs the cells."""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from fwlab.exercises import DERIVATIONS, EXERCISES, QUESTIONS
from fwlab.exercises.notation import printed

ROOT = Path(__file__).resolve().parents[1]
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))


BOOKS = {path.stem: nbformat.read(path, as_version=4) for path in PATHS}
#: The notebooks of the course, without the notebooks on later articles.
COURSE = {name: book for name, book in BOOKS.items() if name[0].isdigit()}


def code(book):
    return [cell for cell in book.cells if cell.cell_type == "code"]


def test_all_have_the_same_setup():
    """All notebooks have one setup cell, which tests/test_setup_cell.py runs."""
    first = [{c.id: c.source for c in book.cells[:3]} for book in BOOKS.values()]
    assert len({cells.get("setup") for cells in first}) == 1
    assert "%pip install" in first[0]["setup"]


def test_outputs_are_committed():
    for name, book in BOOKS.items():
        nbformat.validate(book)
        cells = code(book)
        assert any(cell.outputs for cell in cells), name
        counts = [cell.execution_count for cell in cells]
        assert counts == list(range(1, len(cells) + 1)), name
        assert set(book.metadata) == {"kernelspec", "language_info"}, name
        assert all(set(cell.metadata) <= {"tags"} for cell in book.cells), name
        for cell in cells:
            for output in cell.outputs:
                place = f"{name}, {cell.id}"
                assert output.output_type != "error", place
                assert output.get("name") != "stderr", f"{place}: {output.text}"
                assert len(str(output)) < 200_000, place


def test_figures_in_house_style():
    for name, book in BOOKS.items():
        outputs = [output for cell in code(book) for output in cell.outputs]
        figures = [o["data"].get("image/svg+xml", "") for o in outputs if "data" in o]
        assert any(figures), name
        assert any("plots.style()" in cell.source for cell in code(book)), name
        # Figures have transparent backgrounds and no date.
        assert not re.search("<dc:date>|fill: #ffffff", "".join(figures)), name


def test_ids_are_stable():
    for name, book in BOOKS.items():
        ids = [cell.id for cell in book.cells]
        assert len(set(ids)) == len(ids), name
        odd = [i for i in ids if not re.fullmatch(r"[a-z]+(-[a-z0-9]+)*", i)]
        assert not odd, f"{name}: {odd}"


def test_cells_fit_on_a_screen():
    cells = {
        f"{name}, {cell.id}": len(cell.source.splitlines())
        for name, book in COURSE.items()
        for cell in code(book)
        if cell.id != "setup"
    }
    long = {place: lines for place, lines in cells.items() if lines > 15}
    assert not long, long


def test_exercises_exist():
    text = "\n".join(cell.source for book in BOOKS.values() for cell in code(book))
    ask = r"\b(?:check|golf|hint|solution)\((?:\w+, )?\"?(\w+)"
    asked = re.findall(ask, text)
    assert set(asked) <= EXERCISES.keys()
    assert (
        set(re.findall(r"\b(?:predict|quiz|reveal)\(\"(\w+)", text)) <= QUESTIONS.keys()
    )


def test_every_exercise_is_asked_once():
    text = "\n".join(cell.source for book in BOOKS.values() for cell in code(book))
    asked = re.findall(r"^_ = (?:check|golf)\((\w+)", text, re.MULTILINE)
    assert sorted(asked) == sorted(EXERCISES)


def plain(text):
    return "".join(text.split()).replace(",)", ")")


@pytest.mark.parametrize("name", COURSE)
def test_exercises_stand_beside_their_idea(name):
    """An exercise is below its task, and precedes all code that answers it."""
    cells, asked, before = COURSE[name].cells, [], set()
    for i, cell in enumerate(cells):
        if cell.cell_type == "code" and cell.id != "setup":
            for exercise in re.findall(
                r"^_ = (?:check|golf)\((\w+)", cell.source, re.MULTILINE
            ):
                asked.append(exercise)
                title = (
                    "**" if cells[i - 1].source[:3] == "**E" else f"**{len(asked)}. "
                )
                task = EXERCISES[exercise].task.replace("**", title, 1)
                assert " ".join(task.split()) in " ".join(cells[i - 1].source.split())
                start = re.sub("from .*\n+", "", EXERCISES[exercise].signature)
                assert plain(start) in plain(cell.source)
                answers = {exercise, EXERCISES[exercise].reference.__name__}
                assert not answers & before, exercise
            before |= {
                getattr(node, kind, None)
                for node in ast.walk(ast.parse(cell.source))
                for kind in ("id", "attr", "name")
            }
    assert asked


@pytest.mark.parametrize("name", COURSE)
def test_predictions_are_blind(name):
    """Each prediction comes before the result, in the same section."""
    asked = []
    for cell in COURSE[name].cells:
        if cell.cell_type == "markdown" and re.search("^## ", cell.source, re.M):
            assert not asked, f"no result in its section: {asked}"
        elif cell.cell_type == "code" and cell.id != "setup":
            for node in ast.walk(ast.parse(cell.source)):
                call = getattr(getattr(node, "func", None), "id", "")
                if call == "predict":
                    asked.append(node.args[0].value)
                elif call == "reveal":
                    # Results are revealed one at a time, or in a loop over names.
                    asked = [name for name in asked if f'"{name}"' not in cell.source]
    assert not asked


def answered(cell: str, right: bool) -> str:
    """Return the source of a cell with right or wrong answers to its questions."""
    for asks, name in re.findall(r"^_ = ((?:check|golf)\((\w+))", cell, re.M):
        each = EXERCISES[name]
        wrong = f"EXERCISES[{name!r}].misconceptions[0][1](*given)"
        if not each.misconceptions:
            wrong = "None"
        answer = (
            printed(each)
            if right
            else (
                "from fwlab.exercises import EXERCISES\n"
                f"def {name}(*given):\n    return {wrong}\n"
            )
        )
        cell = cell.replace(f"_ = {asks}", f"{answer}\n_ = {asks}")
    for name in re.findall(r"\bcheck_formula\(\"(\w+)\"", cell):
        for letter, blank in DERIVATIONS[name].blanks.items():
            text = blank.truth if right else next(iter(blank.tempting))
            cell = re.sub(rf"\b{letter}=\.\.\.", f"{letter}={text!r}", cell, count=1)
    for name in re.findall(r"\b(?:predict|quiz)\(\"(\w+)\", \.\.\.", cell):
        each = QUESTIONS[name]
        answer = each.truth if right else next(iter(each.tempting))
        cell = cell.replace(f'"{name}", ...', f'"{name}", {answer!r}')
    return cell


@pytest.mark.slow
@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("name", COURSE)
def test_notebooks_run_whatever_is_answered(name, right, monkeypatch):
    """Notebooks run to the end with right answers and with wrong answers."""
    monkeypatch.setenv("FWLAB_PROGRESS", "")
    book = nbformat.from_dict(COURSE[name])
    for cell in code(book):
        cell.source = answered(cell.source, right)
    folder = {"metadata": {"path": str(ROOT / "notebooks")}}
    NotebookClient(
        book, timeout=1200, kernel_name="python3", resources=folder
    ).execute()
    said = "".join(
        output.text
        for cell in code(book)
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )
    expected = "all right" if right else "not yet"
    asked = set(re.findall(r"^(\w+): (?:all right|not yet)\b", said, re.M))
    got = set(re.findall(rf"^(\w+): {expected}\b", said, re.M))
    assert asked and got == asked
