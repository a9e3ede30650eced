"""An extension of mkdocstrings: a method that overrides another one without a
docstring of its own shows that of the other.
"""

import griffe


class Inherited(griffe.Extension):
    """Copies docstrings to the methods that override."""

    def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
        inherit(pkg)


def inherit(place: griffe.Module | griffe.Class) -> None:
    for name, member in place.members.items():
        if member.is_alias:
            continue
        if member.is_module or member.is_class:
            inherit(member)
        elif place.is_class and member.is_function and not member.has_docstring:
            bases = [base for base in place.mro() if name in base.members]
            documented = (base.members[name].docstring for base in bases)
            member.docstring = next(filter(None, documented), None)
