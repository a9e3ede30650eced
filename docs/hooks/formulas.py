"""Typeset the formulas of all pages with KaTeX in Node, after all pages are rendered.

Formulas then need no script in the browser: they appear without scripts and in
print, and nothing moves when they appear. arithmatex marks them. A formula that KaTeX
cannot set stops the build.

The number of a displayed equation is a link to the line that computes it, or to where
it is listed (a paper's) or stated (our own), and explains itself on hover and focus.
"""

import json
import re
import subprocess
from functools import partial
from html import escape, unescape

import equations
from annotated import EQUATIONS, PAGES, SHOWN
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from packages import MODULES, fetched, npm
from repository import ROOT

#: A formula marked by arithmatex, with the punctuation that follows the formula.
#: An inline formula includes the punctuation, so that it cannot begin a line.
MARKED = re.compile(
    r'(<(span|div) class="arithmatex">)\s*(?:\\\((.*?)\\\)|\\\[(.*?)\\\])\s*</\2>([.,;:!?)\]]*)',
    re.DOTALL,
)
#: The tag of one equation or of a range of equations: "24", "8--11", "d1".
TAG = re.compile(r"\\tag\{((\w+)(?:--\w+)?)\}")
#: HTML after a displayed equation, up to the URL of the first line that computes it.
LINE = re.compile(r'\s*<p class="places"[^>]*>[^<]*<a href="([^"]+)"')
#: Cache of typeset formulas, so that `mkdocs serve` typesets only new ones.
done: dict[tuple[str, bool], str] = {}


@event_priority(-100)  # Run after all hooks that write or read pages.
def on_env(env, config, files):
    pages = [f.page for f in files.documentation_pages() if f.page and f.page.content]
    asked = {
        _formula(found): page.file.src_uri
        for page in pages
        for found in MARKED.finditer(page.content)
    }
    _set({formula: uri for formula, uri in asked.items() if formula not in done})
    for page in pages:
        html = partial(_html, page=page, files=files)
        page.content, found = MARKED.subn(html, page.content)
        if found:
            page.meta.setdefault("styles", []).append("assets/katex/katex.min.css")


def _formula(found: re.Match) -> tuple[str, bool]:
    """Return a formula's TeX without its number, and True for a displayed formula."""
    tex, display = unescape(found[3] or found[4]).strip(), found[4] is not None
    if not display and found[5]:
        tex += rf"\text{{{found[5]}}}"
    return (TAG.sub("", tex) if _label(found) else tex), display


def _label(found: re.Match) -> tuple[str, str] | None:
    """Return the label and the first tag of a numbered equation, or None."""
    labels = TAG.findall(found[4] or "")
    return labels[0] if len(labels) == 1 else None


def _set(asked: dict[tuple[str, bool], str]) -> None:
    """Typeset new formulas with KaTeX and store their HTML in `done`."""
    if not asked:
        return
    (katex,) = fetched(MODULES / "katex", "dist/katex.min.js")
    script = ROOT / "docs" / "tools" / "formulas.js"
    answer = subprocess.run(
        [*npm.program("node"), str(script), str(katex)],
        input=json.dumps(list(asked)),
        capture_output=True,
        encoding="utf-8",
    )
    if answer.returncode:
        raise PluginError(f"Node could not set the formulas:\n{answer.stderr}")
    for (formula, uri), each in zip(
        asked.items(), json.loads(answer.stdout), strict=True
    ):
        if "error" in each:
            raise PluginError(f"{uri}: {each['error']}, in {formula[0]}")
        done[formula] = each["html"]


def _html(found: re.Match, page, files) -> str:
    """Return the HTML that replaces a marked formula."""
    element, name, mark = found[1], found[2], found[5]
    html = done[_formula(found)]
    if label := _label(found):
        link = _link(label, found, page, files)
        # The link must be outside the part that is hidden from screen readers.
        html = html.removesuffix("</span></span>") + link + "</span></span>"
    return f"{element}{html}</{name}>{mark if name == 'div' else ''}"


def _link(tag: tuple[str, str], found: re.Match, page, files) -> str:
    """Return HTML that links the number of an equation to its code or definition."""
    label, first = tag
    said, uri, fragment = _about(label, first, page.file.src_uri)
    line = LINE.match(found.string, found.end())
    there = files.get_file_from_path(uri).url_relative_to(page.file)
    href = line[1] if line else f"{there}#{fragment}"
    shown = label.replace("--", "–")
    said = f"{said[0]}. {said[1][0].upper()}{said[1][1:]}."
    return f'<a class="fw-number" href="{href}" title="{escape(said)}">({shown})</a>'


def _about(label: str, tag: str, uri: str) -> tuple[tuple[str, str], str, str]:
    """Return a description of an equation, and the page and anchor of its link."""
    # An equation on a page of annotated source belongs to the page's first file.
    sources = {page.uri: next(iter(page.files.values())) for page in PAGES.values()}
    path = sources.get(uri, uri if uri.startswith("notebooks/") else f"docs/{uri}")
    whose = equations.whose(path, tag)
    if not tag[0].isdigit():
        words = equations.listed()["fwlab"][whose][tag]
        page, _ = SHOWN[equations.stated()[whose, tag]]
        return (f"({tag}) is our own number", words), page.uri, f"eq-{tag}"
    paper = equations.papers()[whose]
    words = re.sub(r" \(Eqs\. [\d-]+\)$", "", paper["equations"][tag])
    number = f"{'Eqs.' if '--' in label else 'Eq.'} {label.replace('--', '–')}"
    said = f"{number} of {paper['authors'].split(',')[0]} et al. {paper['year']}"
    return (said, words), EQUATIONS, f"{whose}-{tag}"
