"""Puts an interactive figure in place of `<!-- figure: NAME -->`.

A figure is docs/figures/NAME.js. Beside it lie NAME.html, its picture as it
begins, and NAME.txt, what is to be seen then in words: both written by
docs/tools/keep_figures.py. They serve readers without scripts, and print. A
page loads the scripts of its own figures only.
"""

import re

from mkdocs.utils import get_relative_url
from repository import ROOT

MARK = re.compile(r"<!-- figure: (\w+) -->")
FOLDER = ROOT / "docs" / "figures"
#: Scripts that a figure needs besides its own.
NEEDS = {"live": ["model"]}


def on_page_content(html, page, config, files):
    """Here and not in the Markdown, which would change a drawing."""
    return MARK.sub(lambda mark: _figure(mark[1]), html)


def on_post_page(output, page, config):
    names = re.findall(r'data-figure="(\w+)"', output)
    scripts = ["common"] * bool(names)
    for name in names:
        scripts += [*NEEDS.get(name, []), name]
    tags = "".join(
        f'<script src="{get_relative_url(f"figures/{name}.js", page.url)}"></script>'
        for name in dict.fromkeys(scripts)
    )
    return output.replace("</body>", f"{tags}</body>")


def _figure(name: str) -> str:
    picture, words = (FOLDER / f"{name}{end}" for end in (".html", ".txt"))
    drawn, said = (
        file.read_text("utf-8").strip() if file.exists() else ""
        for file in (picture, words)
    )
    return (
        f'<figure class="fw-figure" id="figure-{name}">'
        f'<div class="fw-stage" data-figure="{name}">{drawn}</div>'
        f'<figcaption class="fw-words">{said}</figcaption></figure>'
    )
