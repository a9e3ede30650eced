"""Render docs/templates: HTML of tables and figures, Markdown of pages.

Templates for HTML (.html) escape inserted values, templates for
Markdown (.md.jinja) do not. Material reads the templates in theme/, which
override its own.
"""

import tex
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from repository import ROOT

TEMPLATES = Environment(
    loader=FileSystemLoader(ROOT / "docs" / "templates"),
    autoescape=select_autoescape(["html"], default_for_string=False),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def number(value: float | None, spec: str) -> str:
    """Format a number with a Python format spec, or return a dash for None."""
    return "–" if value is None else format(value, spec)


TEMPLATES.filters["number"] = number
TEMPLATES.filters["typeset"] = lambda text: Markup(tex.typeset(text))


def render(template: str, /, **values) -> str:
    """Render a template of docs/templates with the given values."""
    return TEMPLATES.get_template(template).render(values)
