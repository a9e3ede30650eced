"""Keep what a reader wrote in `my_lab.py` beside the notebooks, for later notebooks."""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from fwlab.exercises import progress
from fwlab.files import replacing

#: The file, beside the notebooks.
FILE = "my_lab.py"
HEAD = '''"""What you wrote in the notebooks of fwlab. Read it, and change it as you like.

    from my_lab import delta_step
"""
'''
#: The line above each function; editors know it as the beginning of a cell.
MARK = re.compile(r"^# %% (\w+)\n", re.MULTILINE)


def keep(name: str, answer: Callable[..., Any]) -> str:
    """Write a right answer into the file, in place of an earlier one.

    - `name`: the exercise.
    - Returns a sentence: that it is kept, or why it is not; "" = nothing is
      remembered here.
    """
    if (file := _place()) is None:
        return ""
    try:
        own = getattr(answer, "__name__", name)
        parts = {own: ""}
        function = _source(answer, parts)
        rest = [*parts.values(), function] + [f"{name} = {own}"] * (own != name)
        imports = [x for x in rest if x.startswith(("import ", "from "))]
        rest = [x for x in rest if x and x not in imports]
        head, *kept = MARK.split(file.read_text("utf-8") if file.exists() else HEAD)
        functions = dict(zip(kept[::2], kept[1::2], strict=True))
        functions[name] = "\n\n\n".join(["\n".join(imports), *rest])
        with replacing(file) as new:
            cells = (f"\n\n# %% {n}\n{text.strip()}\n" for n, text in functions.items())
            new.write_text(head.rstrip() + "\n" + "".join(cells), "utf-8")
    except (OSError, TypeError, SyntaxError, UnicodeError, NameError) as error:
        return f"It is not kept in {FILE}: {error}"
    return f"It is kept in {FILE}."


def shelf(folder: Path) -> list[str]:
    """List the functions that are kept in a folder, or in `notebooks` inside it."""
    for file in (_place(), folder / FILE, folder / "notebooks" / FILE):
        if file is not None and file.is_file():
            return MARK.findall(file.read_text("utf-8", errors="replace"))
    return []


def load() -> ModuleType:
    """Import the file of this notebook's folder; an empty module without one."""
    empty, file = ModuleType("my_lab"), _place()
    spec = spec_from_file_location("my_lab", file) if file and file.is_file() else None
    if spec is None or spec.loader is None:
        return empty
    module = sys.modules["my_lab"] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # somebody has changed it
        del sys.modules["my_lab"]
        print(f"{FILE} cannot be imported: {error!r}")
        return empty
    return module


def _place() -> Path | None:
    where = progress.place()
    return where and where.with_name(FILE)


def _source(function: Any, parts: dict[str, str]) -> str:
    """Return the source of a function, and put what it uses into `parts`, by name.

    Raises `NameError` for what cannot be written down.
    """
    if not isinstance(function, FunctionType) or function.__closure__:
        raise NameError("only a function that stands alone can be kept.")
    source = textwrap.dedent(inspect.getsource(function))
    tree = ast.parse(source)
    if getattr(tree.body[0], "name", "") != function.__name__:
        raise NameError("only a function with a name can be kept.")
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for name in sorted(used & function.__globals__.keys() - parts.keys()):
        value, parts[name] = function.__globals__[name], ""
        where = getattr(value, "__module__", None) or ""
        called = getattr(value, "__name__", "")
        new = f" as {name}" if called != name else ""
        if isinstance(value, bool | int | float | str | None):
            parts[name] = f"{name} = {value!r}"
        elif isinstance(value, ModuleType):
            above, _, called = called.rpartition(".")
            new = f" as {name}" if called != name else ""
            parts[name] = f"{f'from {above} ' * bool(above)}import {called}{new}"
        elif where == "my_lab":
            pass  # it is in the file
        elif where != "__main__" and value is getattr(
            sys.modules.get(where), called, 0
        ):
            parts[name] = f"from {where} import {called}{new}"
        elif isinstance(value, FunctionType):
            parts[name] = _source(value, parts)
        else:
            raise NameError(f"it uses {name}, which belongs to the notebook.")
    return source.strip()
