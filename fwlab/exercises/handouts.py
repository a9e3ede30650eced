"""Write notebooks to hand out: only tasks, or course notebooks without results."""

import inspect
import linecache
import re
import sys
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

from fwlab.exercises.notation import EXERCISES, Exercise, printed
from fwlab.files import read_json, replacing, write_json

GUIDE = (
    "`check` says which property holds, and explains the first one that does not. "
    '`hint("NAME")` and `hint("NAME", 2)` help, and `show(NAME)` draws your result '
    "beside the right one."
)


def student_notebook(
    title: str, exercises: Iterable[Exercise], own: str = ""
) -> dict[str, Any]:
    """Return a notebook to hand out: a task, a function and a check for each exercise.

    - `title`, `exercises`: heading and exercises of the notebook.
    - `own`: a module to import, if the exercises are not fwlab's.
    """
    exercises = list(exercises)
    start = [*_imports(exercises), *([f"import {own}"] if own else [])]
    start.append("from fwlab.exercises import check, hint, show, solution")
    cells = [("markdown", f"# {title}\n\n{GUIDE}"), ("code", "\n".join(start))]
    for number, exercise in enumerate(exercises, 1):
        code = f"{exercise.signature}\n\n\n_ = check({exercise.name})"
        cells += [("markdown", f"**{number}.** {exercise.task}"), ("code", code)]
    extra: dict[str, Any] = {
        "code": {"outputs": [], "execution_count": None},
        "markdown": {},
    }
    language = {"name": "python"}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {
            "kernelspec": kernel,
            "language_info": language,
            "fwlab": {"exercises": [each.name for each in exercises]},
        },
        "cells": [
            {
                "cell_type": kind,
                "id": f"cell-{number}",
                "metadata": {},
                "source": text,
                **extra[kind],
            }
            for number, (kind, text) in enumerate(cells)
        ],
    }


def working_edition(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a notebook without the outputs of its cells.

    - `notebook`: the content of its file.
    """
    notebook = deepcopy(notebook)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    return notebook


def own_exercises(name: str, text: str) -> dict[str, Exercise]:
    """Run a module that adds exercises to `EXERCISES`, or questions to `QUESTIONS`.

    - `name`, `text`: name and source of the module, which can be imported from here on.
    - Returns the new exercises.
    - Raises `ValueError` if there are none.
    """
    before = dict(EXERCISES)
    module, file = ModuleType(name), f"{name}.py"
    module.__file__ = file
    sys.modules[name] = module
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), vars(module))
    new = {n: e for n, e in EXERCISES.items() if before.get(n) is not e}
    if not new:
        raise ValueError(f"expected {name}.py to add exercises to EXERCISES, got none")
    return new


def export(
    folder: Path,
    *notebooks: Path,
    topics: Mapping[str, Mapping[str, Exercise]],
    own: Path | None,
    force: bool,
) -> list[Path]:
    """Write a notebook for each topic, and copies of notebooks without their outputs.

    - `folder`: folder to write to, which is made if it is missing.
    - `notebooks`: files that are copied there without their outputs.
    - `topics`: exercises, by topic and name.
    - `own`: the file that defines the exercises, which is copied as well.
    - `force`: overwrite existing files.
    - Returns the files.
    - Raises `FileExistsError`, before anything is written, if a file exists.
    """
    files: dict[Path, Any] = {}
    for topic, named in topics.items():
        name = f"{topic.lower().replace(' ', '_')}.ipynb"
        module = own.stem if own else ""
        files[folder / name] = student_notebook(topic, named.values(), module)
    for path in notebooks:
        files[folder / path.name] = working_edition(read_json(path))
    if own and own.resolve() != (folder / own.name).resolve():
        files[folder / own.name] = own.read_text("utf-8-sig")
    if there := [path for path in files if path.exists() and not force]:
        raise FileExistsError(f"{there[0]} is there: use --force to write over it")
    for path, content in files.items():
        if isinstance(content, str):
            with replacing(path) as part:
                part.write_text(content, encoding="utf-8")
        else:
            write_json(path, content)
    return list(files)


def _imports(exercises: list[Exercise]) -> list[str]:
    """Return the import lines that tasks, hints and solutions use."""
    said = " ".join(
        " ".join((e.task, *e.hints, e.start, printed(e))) for e in exercises
    )
    lines = ["import math"]
    for name in {exercise.reference.__module__: None for exercise in exercises}:
        source = inspect.getsource(sys.modules[name])
        lines += re.findall(r"^(?:from \S+ )?import [^(\n]*$", source, re.MULTILINE)
    return [
        line
        for line in dict.fromkeys(lines)
        if any(
            re.search(rf"\b{part.split()[-1]}\b[.(]", said)
            for part in line.partition("import ")[2].split(",")
        )
    ]
