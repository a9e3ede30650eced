"""Save a reader's right answers in `my_lab.py`, for later notebooks."""

import ast
import inspect
import re
import symtable
import sys
import textwrap
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from fwlab.exercises import progress
from fwlab.files import replacing

#: Name of the file for right answers, beside the notebooks.
FILE = "my_lab.py"
HEAD = '''"""What you wrote in the notebooks of fwlab. Read it, and change it as you like.

    from my_lab import delta_step
"""
'''
#: The line above each function, which editors recognise as the start of a cell.
MARK = re.compile(r"^# %% (\w+)\n", re.MULTILINE)


def keep(name: str, answer: Callable[..., Any]) -> str:
    """Save a right answer in my_lab.py, in place of an earlier answer.

    - `name`: the exercise.
    - Returns a sentence that says that the answer is saved, or why not; "" =
      nothing is saved here.
    """
    if (file := _place()) is None:
        return ""
    if getattr(answer, "__module__", "") == "my_lab":
        return f"It is in {FILE} already."
    try:
        head, *kept = MARK.split(file.read_text("utf-8") if file.exists() else HEAD)
        functions = dict(zip(kept[::2], kept[1::2], strict=True))
        others = {n: _defined(text) for n, text in functions.items() if n != name}
        own = getattr(answer, "__name__", name)
        parts = {own: ""}
        function = _source(answer, parts, others)
        rest = [*parts.values(), function] + [f"{name} = {own}"] * (own != name)
        imports = [x for x in rest if x.startswith(("import ", "from "))]
        rest = [x for x in rest if x and x not in imports]
        functions[name] = "\n\n\n".join(["\n".join(imports), *rest])
        new = _defined(functions[name])
        for n, other in others.items():
            if twice := [x for x in new if other.get(x, new[x]) != new[x]]:
                raise NameError(f"its part {n} has another {twice[0]}; rename one.")
        cells = (f"\n\n# %% {n}\n{text.strip()}\n" for n, text in functions.items())
        text = head.rstrip() + "\n" + "".join(cells)
        exec(compile(text, FILE, "exec"), ModuleType("my_lab").__dict__)
        with replacing(file) as safe:
            safe.write_text(text, "utf-8")
    except Exception as error:  # For example, the file has a syntax error.
        return f"It is not kept in {FILE}: {error}"
    return f"It is kept in {FILE}."


def shelf(folder: Path) -> list[str]:
    """Return the names of functions saved in a folder or in its folder `notebooks`."""
    for file in (_place(), folder / FILE, folder / "notebooks" / FILE):
        if file is not None and file.is_file():
            return MARK.findall(file.read_text("utf-8", errors="replace"))
    return []


def load() -> ModuleType:
    """Import my_lab.py from the notebook's folder, or return an empty module."""
    empty, file = ModuleType("my_lab"), _place()
    spec = spec_from_file_location("my_lab", file) if file and file.is_file() else None
    if spec is None or spec.loader is None:
        return empty
    module = sys.modules["my_lab"] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # A reader may have broken the file.
        del sys.modules["my_lab"]
        print(f"{FILE} cannot be imported: {error!r}")
        return empty
    return module


def _place() -> Path | None:
    where = progress.place()
    return where and where.with_name(FILE)


def _defined(text: str) -> dict[str, str]:
    """Return, for each name in a section of my_lab.py, the statement defining it."""
    found = {}
    for node in ast.parse(text).body:
        for part in getattr(node, "names", getattr(node, "targets", [node])):
            if isinstance(node, ast.Import | ast.ImportFrom):
                node.names = [part]
            names = (getattr(part, each, None) for each in ("asname", "name", "id"))
            found[next(filter(None, names), "")] = ast.unparse(node)
    return {name: statement for name, statement in found.items() if name}


def _globals(table: symtable.SymbolTable) -> set[str]:
    """Return the global names in a symbol table and its nested tables."""
    own = {each.get_name() for each in table.get_symbols() if each.is_global()}
    return own.union(*map(_globals, table.get_children()))


def _source(function: Any, parts: dict[str, str], others: dict[str, Any]) -> str:
    """Return the source of a function, and add its dependencies to `parts`, by name.

    Raises `NameError` if a dependency cannot be saved. `others` is in the file already.
    """
    if not isinstance(function, FunctionType) or function.__closure__:
        raise NameError("only a function that stands alone can be kept.")
    source = textwrap.dedent(inspect.getsource(function))
    if getattr(ast.parse(source).body[0], "name", "") != function.__name__:
        raise NameError("only a function with a name can be kept.")
    used = _globals(symtable.symtable(source, FILE, "exec")) - {function.__name__}
    found = sorted(used & function.__globals__.keys())
    for name in (each for each in found if each not in parts):
        value, parts[name] = function.__globals__[name], ""
        where = getattr(value, "__module__", "")
        home = where not in ("__main__", "my_lab") and sys.modules.get(where)
        called = getattr(value, "__name__", "")
        new = f" as {name}" if called != name else ""
        if isinstance(value, float) and value - value != 0:  # The value is inf or NaN.
            parts[name] = f'{name} = float("{value}")'
        elif isinstance(value, bool | int | float | str | None):
            parts[name] = f"{name} = {value!r}"
        elif isinstance(value, ModuleType):
            above, _, called = called.rpartition(".")
            new = f" as {name}" if called != name else ""
            parts[name] = f"{f'from {above} ' * bool(above)}import {called}{new}"
        elif where == "my_lab" and any(called in x for x in others.values()):
            parts[name] = f"{name} = {called}" if new else ""  # The function is saved.
        elif value is getattr(home, called, parts):
            parts[name] = f"from {where} import {called}{new}"
        elif isinstance(value, FunctionType):
            alias = f"\n\n\n{name} = {called}" * bool(new)
            text = _source(value, parts, others) + alias
            section = others.get(name, {}).get(name) == ast.unparse(ast.parse(text))
            del parts[name]  # Move the name after its dependencies.
            parts[name] = "" if section else text
        else:
            raise NameError(f"it uses {name}, which belongs to the notebook.")
    return source.strip()
