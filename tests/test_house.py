"""Test that the package has the structure that docs/inside.md draws."""

import ast
import graphlib
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fwlab.__main__ import EXTRA

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "fwlab"
INSIDE = (ROOT / "docs" / "inside.md").read_text("utf-8")
FOLDERS = re.findall(r"^- `(\w+)`", INSIDE, re.M)
#: Rows of docs/inside.md that describe folders in `ops`: names and a description.
ROWS = re.findall(r"^    - ((?:`\w+`(?:, )?)+)(.*)", INSIDE, re.M)
#: Folders in the order of docs/inside.md; each imports only from earlier folders.
ORDER = [*FOLDERS, "__main__"]
INNER = [name for names, _ in ROWS for name in re.findall(r"`(\w+)`", names)]
INNER += ["__init__"]
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> list[str]:
    """List the full names that a file imports, such as `module.name`."""
    names = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def file_of(name: str) -> Path:
    """Return the file of a module, or of the module that defines a name."""
    parts = name.split(".")
    if parts[:3] == ["fwlab", "exercises", "course"] and len(parts) > 3:
        # File names in exercises/course begin with the number of a notebook.
        for file in (PACKAGE / "exercises" / "course").glob(f"*{parts[3]}.py"):
            if file.stem.lstrip("0123456789_") == parts[3]:
                return file
    for path in (ROOT.joinpath(*parts), ROOT.joinpath(*parts[:-1])):
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    raise AssertionError(f"no file of fwlab has {name}")


def arrows(folder: str) -> dict[Path, set[Path]]:
    """Map each file in a folder to the fwlab files that it imports."""
    return {
        path: {file_of(name) for name in imported(path) if name.startswith("fwlab")}
        for path in FILES
        if path.is_relative_to(PACKAGE / folder)
    }


@pytest.mark.parametrize(("folder", "order"), [("", ORDER), ("ops", INNER)])
def test_imports_point_up(folder, order):
    def floor(path: Path) -> str:
        name = path.relative_to(PACKAGE / folder).parts[0].removesuffix(".py")
        assert name in (*order, "__init__"), f"docs/inside.md does not draw {name}"
        return name

    for name in order:
        path = PACKAGE / folder / name
        assert path.is_dir() or path.with_suffix(".py").is_file(), name
    down = []
    for path, others in arrows(folder).items():
        if path == PACKAGE / "__init__.py":
            continue
        below = order[order.index(floor(path)) + 1 :]
        down += [
            f"{path} imports {other}"
            for other in others
            if other.is_relative_to(PACKAGE / folder) and floor(other) in below
        ]
    assert not down, down


def test_no_circle_in_ops():
    """Imports in `ops` have no cycle, not even within a folder."""
    graphlib.TopologicalSorter(arrows("ops")).prepare()


def test_nothing_else_computes_with_the_specification():
    """Chunked, efficient, Triton and shared code imports no naive loop.

    Loops are only in `naive.py` and on the pages of rules.
    """
    forms = ("chunked.py", "efficient.py", "kernels.py")
    ops = PACKAGE / "ops"
    paths = [*ops.glob("_*.py"), ops / "efficient.py"]
    paths += [path for path in ops.rglob("*.py") if path.name in forms]
    imports = [
        f"{path} imports {name}"
        for path in paths
        if path.name != "__init__.py"
        for name in imported(path)
        if {"naive", "loop"} & {*name.split(".")} or name.endswith("_loop")
    ]
    assert len(paths) > 20 and not imports, imports


def test_training_says_which_extra_it_needs(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("fwlab.training")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    said = r'^training needs .* safetensors: pip install "fwlab\[train\]"$'
    with pytest.raises(ModuleNotFoundError, match=said):
        importlib.import_module("fwlab.training")


def loaded(before, code, after=""):
    """Return the modules that `code` loads after `before` has run, in a new process."""
    code = f"{before}\nimport sys; before = {{*sys.modules}}\n{code}"
    code += f"\nprint(*sys.modules.keys() - before)\n{after}"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, encoding="utf-8"
    )
    return set(done.stdout.split())


def test_the_core_needs_and_loads_nothing_else():
    """Operations, layers, models and exercises work without the extras.

    An import with a compiler would take twice as long.
    """
    extras = ["pooch", "sacrebleu", "safetensors", "tqdm", "tyro", "IPython"]
    extras += ["mkdocs", "triton"]
    before = f"import sys\nfor name in {extras}: sys.modules[name] = None\n"
    before += "import torch, numpy, matplotlib"
    after = "import fwlab.models, fwlab.exercises, fwlab.plots, fwlab.data\n"
    after += "fwlab.plots.style(), fwlab.data.corpus('python')"
    new = loaded(before, "import fwlab", after)
    assert "fwlab.ops" in new
    assert not {name for name in new if not name.startswith("fwlab")}


def test_help_is_quick():
    """`fwlab --help` loads no heavy module; imports set no environment variable."""
    pytest.importorskip("tyro")
    code = """
import runpy
sys.argv = ["fwlab", "--help"]
try:
    runpy.run_module("fwlab", run_name="__main__")
except SystemExit:
    pass
"""
    before = "import os; environment = {**os.environ}"
    after = "import fwlab.bench.operations; assert environment == os.environ"
    found = loaded(before, code, after)
    assert "fwlab.cli" in found
    heavy = {"torch._dynamo", "torch._inductor", "matplotlib"}
    assert not found & (heavy | {"fwlab.bench", "fwlab.exercises"})


def test_what_the_package_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    names = [re.split("[>=<]", d)[0] for d in project["dependencies"]]
    assert sorted(names) == ["matplotlib", "numpy", "torch"]
    assert "torch>=2.6" in project["dependencies"]
    train = project["optional-dependencies"]["train"]
    assert [d.split(">=")[0] for d in train] == sorted(map(str.lower, EXTRA))


#: Words that begin a noun phrase, not a description of what a function does.
NOUNS = "A All An Both Each Every How Its Nothing That The These Those What Whether"


def test_a_docstring_begins_with_a_verb():
    """Docstrings of functions begin with a verb, even if ruff's D401 finds no error."""
    wrong = []
    for path in [
        *FILES,
        *(ROOT / "docs").rglob("*.py"),
        *(ROOT / "tests").rglob("*.py"),
    ]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("test"):
                first, *_ = (ast.get_docstring(node) or "Do").split(maxsplit=1)
                if first in NOUNS.split():
                    wrong.append(f"{path}:{node.lineno}: {first} ...")
    assert not wrong, wrong
