"""Renders docs/templates: the HTML of tables, figures and other fixed parts.

Templates ending in .html escape whatever is put into them. The folder theme/
is not read here: Material reads it, and its templates override the theme's.
"""

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from repository import ROOT

TEMPLATES = Environment(
    loader=FileSystemLoader(ROOT / "docs" / "templates"),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def number(value: float | None, spec: str) -> str:
    """A number in Python's format; a dash if it is missing."""
    return "–" if value is None else format(value, spec)


TEMPLATES.filters["number"] = number


def render(template: str, /, **values) -> str:
    """What a template makes of the values."""
    return TEMPLATES.get_template(template).render(values)
