"""Puts an interactive figure in place of `<!-- figure: NAME -->`.

A figure is docs/figures/NAME.js. Next to it are NAME.html, the picture it
starts with, and NAME.txt, a description of that picture; both are written by
docs/tools/keep_figures.py, for readers without scripts and for print.
docs/templates/theme/main.html loads the scripts that a page's figures need.
"""

import re

from markupsafe import Markup
from repository import ROOT
from templates import render

MARK = re.compile(r"<!-- figure: (\w+) -->")
FOLDER = ROOT / "docs" / "figures"
#: Scripts that a figure needs besides its own.
NEEDS = {"live": ["model"]}


def on_page_content(html, page, config, files):
    """Not in the Markdown: converting it would change a drawing."""
    if names := MARK.findall(html):
        scripts = [script for name in names for script in (*NEEDS.get(name, []), name)]
        page.meta["scripts"] = list(dict.fromkeys(["common", *scripts]))
    return MARK.sub(lambda mark: _figure(mark[1]), html)


def _figure(name: str) -> str:
    return render(
        "figure.html",
        name=name,
        picture=Markup(_text(f"{name}.html")),
        words=_text(f"{name}.txt"),
    )


def _text(name: str) -> str:
    path = FOLDER / name
    return path.read_text("utf-8").strip() if path.exists() else ""
