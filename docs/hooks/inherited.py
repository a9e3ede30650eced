"""Extend mkdocstrings with inherited docstrings and signatures of operations.

An overriding method without a docstring shows the docstring of the base class. An
operation shows the signature that callers see, with the options that a
decorator adds.
"""

import inspect
import re
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import griffe

from fwlab.ops import TABLE


class Shown(griffe.Extension):
    """Add inherited docstrings and call signatures to the data of griffe."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        inherit(pkg)
        for operation in TABLE.values():
            place = operation.__module__.removeprefix(f"{pkg.name}.")
            sign(pkg[f"{place}.{operation.__name__}"], inspect.signature(operation))


def inherit(place: griffe.Module | griffe.Class) -> None:
    """Copy docstrings of base classes to overriding methods that have none."""
    for name, member in place.members.items():
        if member.is_alias:
            continue
        if member.is_module or member.is_class:
            inherit(member)
        elif place.is_class and member.is_function and not member.has_docstring:
            bases = [base for base in place.mro() if name in base.members]
            documented = (base.members[name].docstring for base in bases)
            member.docstring = next(filter(None, documented), None)


def sign(function: griffe.Function, signature: inspect.Signature) -> None:
    """Replace the parameters of a function, but keep its defaults as written."""
    written = {parameter.name: parameter.default for parameter in function.parameters}
    function.parameters = griffe.Parameters(
        *(
            griffe.Parameter(
                name,
                annotation=words(p.annotation),
                kind=griffe.ParameterKind(p.kind.description),
                default=None
                if p.default is p.empty
                else written.get(name) or repr(p.default),
            )
            for name, p in signature.parameters.items()
        )
    )
    streams = "return_state" in signature.parameters
    function.returns = "Tensor | tuple[Tensor, Any]" if streams else "Tensor"


def words(hint: Any) -> str:
    """Format a type hint without tensor dimensions and module names."""
    if get_origin(hint) is Annotated:
        return words(hint.__origin__)
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(map(words, get_args(hint)))
    if hint is NoneType:
        return "None"
    return re.sub(r"\b(\w+\.)+", "", inspect.formatannotation(hint))
