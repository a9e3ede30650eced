"""Test that the API reference shows every public name with its arguments.

Public names are the `__all__` of a module with a page, or without `__all__` all names
without underscore, and the methods of public classes.
"""

import ast
import dataclasses
import doctest
import importlib
import inspect
import itertools
import random
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from fwlab import ops

#: Modules with a page of the same name.
MODULES = [
    "fwlab.ops",
    "fwlab.feature_maps",
    "fwlab.layers",
    "fwlab.models",
    "fwlab.data",
    "fwlab.training",
    "fwlab.hf",
    "fwlab.exercises",
    "fwlab.plots",
]
#: A module without a page, whose names are on the pages of other modules.
TOP = "fwlab"


class Public(NamedTuple):
    """Describe one public name.

    - `name`: the full name, as a caller writes it.
    - `value`: the object of that name; for a property, its function.
    - `owner`: the class of a method, or None.
    """

    name: str
    value: Any
    owner: type | None = None

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]


def names_of(module: str) -> list[str]:
    """List the public names of a module in source order."""
    loaded = importlib.import_module(module)
    if hasattr(loaded, "__all__"):
        return list(loaded.__all__)
    return [name for name in defined(loaded) if not name.startswith("_")]


def defined(module: Any) -> dict[str, str]:
    """Map each defined name to the source line above it and the string below it."""
    source = inspect.getsource(module)
    found, lines = {}, source.splitlines()
    for node, after in itertools.pairwise([*ast.parse(source).body, ast.Pass()]):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = ""
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.target if hasattr(node, "target") else node.targets[0]
            below = ast.unparse(after) if isinstance(after, ast.Expr) else ""
            found[ast.unparse(target)] = lines[node.lineno - 2] + below
    return {name: about for name, about in found.items() if name.isidentifier()}


def methods(name: str, cls: type) -> Iterator[Public]:
    """Yield the public methods and properties that fwlab defines for a class.

    A hook that PyTorch specifies, such as `extra_repr`, is left out;
    `forward` is not, because only the class knows its arguments.
    """
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("fwlab"):
            continue
        for last, value in vars(base).items():
            value = getattr(value, "__func__", getattr(value, "fget", value))
            theirs = last != "forward" and hasattr(nn.Module, last)
            if last.startswith("_") or last in seen or theirs:
                continue
            value = inspect.unwrap(value)
            if inspect.isfunction(value):
                seen.add(last)
                yield Public(f"{name}.{last}", value, cls)


def public() -> Iterator[Public]:
    for module in [TOP, *MODULES]:
        for last in names_of(module):
            value = getattr(importlib.import_module(module), last)
            yield Public(f"{module}.{last}", value)
            if inspect.isclass(value):
                yield from methods(f"{module}.{last}", value)


ALL = list(public())
CALLED = [p for p in ALL if inspect.isclass(p.value) or inspect.isfunction(p.value)]
CONSTANTS = [p for p in ALL if p not in CALLED]


def doc_of(p: Public) -> str:
    """Return a public name's docstring, or that of the method that it overrides."""
    if p.owner is None:
        return inspect.cleandoc(p.value.__doc__ or "")
    for base in p.owner.__mro__:
        if base.__module__.startswith("fwlab"):
            value = vars(base).get(p.last)
            value = getattr(value, "__func__", value)
            if getattr(value, "__doc__", None):
                return inspect.cleandoc(value.__doc__)
    return ""


def parameters(p: Public) -> list[str]:
    """List the names of the arguments that a caller may pass."""
    value = p.value
    if inspect.isclass(value):
        if hasattr(value, "_fields"):
            return list(value._fields)
        own = inspect.isfunction(value.__init__)
        # PyTorch and Python document the constructors that they define.
        if not own or not value.__init__.__module__.startswith("fwlab"):
            return []
        value = value.__init__
    names = inspect.signature(value).parameters
    return [n for n in names if n not in ("self", "cls") and not n.startswith("_")]


SPAN = re.compile(r"`([^`]+)`")
ELSEWHERE = re.compile(r"\bas (?:in|for) (?:`([\w.]+)`|(the class)\b)")


def documented(p: Public) -> set[str]:
    """List the argument names in a docstring and in the docstrings it refers to."""
    doc = doc_of(p)
    names = {span.lstrip("*") for span in SPAN.findall(doc)}
    if dataclasses.is_dataclass(p.value):
        names |= described_fields(p.value)
    for place in ELSEWHERE.finditer(" ".join(doc.split())):
        for other in referred(p, place):
            names |= documented(other)
    return names


def referred(p: Public, place: re.Match) -> list[Public]:
    """Return the objects that "as in `x`" refers to.

    It can be a method of the same class, a function of the same module, a public name,
    or all functions of a module.
    """
    target, above = place[1], p.name.rpartition(".")[0]
    if place[2]:
        target = above
    for name in (f"{above}.{target}", target, f"{TOP}.{target}"):
        if callables := [q for q in CALLED if q.name == name]:
            return callables
    if target in MODULES:
        return [
            q
            for q in CALLED
            if q.name.rpartition(".")[0] == target and "implementation" in parameters(q)
        ]
    raise AssertionError(f"{p.name} refers to {target}, which does not exist")


def described_fields(cls: type) -> set[str]:
    """List the fields of a dataclass that are followed by a docstring."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {
        node.target.id
        for node, after in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


def test_every_name_has_a_docstring():
    silent = [p.name for p in CALLED if not doc_of(p)]
    assert not silent, silent


def test_every_parameter_is_documented():
    missing = {p.name: {*parameters(p)} - documented(p) for p in CALLED}
    missing = {name: names for name, names in missing.items() if names}
    assert not missing, missing


def says_what_is_returned(p: Public) -> bool:
    annotation = inspect.signature(p.value).return_annotation
    if p.owner and isinstance(inspect.getattr_static(p.owner, p.last), property):
        return annotation is not inspect.Signature.empty  # A property needs no Returns.
    if annotation is inspect.Signature.empty:
        return False
    return annotation is None or bool(re.search(r"\bReturns\b", doc_of(p)))


def test_what_is_returned_is_documented():
    functions = [p for p in CALLED if inspect.isfunction(p.value)]
    silent = [p.name for p in functions if not says_what_is_returned(p)]
    assert not silent, silent


def raised(p: Public) -> set[str]:
    """List the errors that a function or a constructor raises."""
    value = p.value
    if inspect.isclass(value):
        checks = "__post_init__" if dataclasses.is_dataclass(value) else "__init__"
        value = vars(value).get(checks)
        if not inspect.isfunction(value):
            return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(value)))
    errors = {
        ast.unparse(node.exc.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    }
    caught = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and node.type
        for name in ast.walk(node.type)
        if isinstance(name, ast.Name)
    }
    return errors - caught - {"NotImplementedError"}


def test_every_error_is_documented():
    silent = {p.name: raised(p) - set(SPAN.findall(doc_of(p))) for p in CALLED}
    silent = {name: errors for name, errors in silent.items() if errors}
    assert not silent, silent


def test_every_constant_is_described():
    described = set()
    for module in list(sys.modules.values()):
        if module.__name__.startswith("fwlab"):
            about = defined(module).items()
            described |= {name for name, x in about if re.search("^#: |'$|\"$", x)}
    silent = {p.last for p in CONSTANTS} - described
    assert not silent, silent


def test_formulas_do_not_look_like_html():
    """No formula in a docstring has `<` before a letter, which would begin a tag."""
    formulas = [f for p in CALLED for f in re.findall(r"\$[^$]+\$", doc_of(p))]
    tags = [f for f in formulas if re.search("<[a-zA-Z/!]", f)]
    assert not tags, tags


def test_the_package_lists_what_is_on_a_page():
    for name in names_of(TOP):
        value = getattr(importlib.import_module(TOP), name)
        at = [p.name for p in ALL if p.last == name and p.value is value]
        assert name == "__version__" or len(at) > 1, f"{name} is on no page"


def run_example(name: str, value: Any, names: dict[str, Any]) -> None:
    names = {"random": random, "torch": torch, **names}
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find(value, name, globs=names)
    assert test.examples, f"{name} has no example"
    assert not doctest.DocTestRunner().run(test).failed, name


@pytest.mark.parametrize("name", [n for n in ops.__all__ if n[0].islower()])
def test_examples_run(name):
    """The docstring of every operation has an example with correct output."""
    run_example(name, getattr(ops, name), {"ops": ops})


@pytest.mark.parametrize("module", MODULES[1:5])
def test_examples_of_a_module_run(module):
    """The docstring of each function and class in a module has an example that runs."""
    loaded = importlib.import_module(module)
    names = {name: getattr(loaded, name) for name in names_of(module)}
    for name, value in names.items():
        made = inspect.isclass(value) and not issubclass(value, tuple | Exception)
        base = "The base class" in (inspect.getdoc(value) or "")
        if inspect.isfunction(value) or (made and not base):
            run_example(name, value, names)
