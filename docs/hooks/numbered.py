"""Says whose number an equation has.

formulas.py makes the number of a displayed equation a link to the line that
computes it, or to where it is listed (a paper's) or stated (our own), and the link
explains the number on hover and focus.
"""

import re
from html import escape

import equations
from annotated import EQUATIONS, PAGES, page_of

#: Of an equation, or of several that belong together: "24", "8--11", "d1".
TAG = re.compile(r"\\tag\{((\w+)(?:--\w+)?)\}")
#: What follows an equation that has lines, up to the first of them.
LINE = re.compile(r'\s*<p class="places"[^>]*>[^<]*<a href="([^"]+)"')


def link(tag: tuple[str, str], found: re.Match, page, files) -> str:
    """The number of a formula that was found on a page, as a link."""
    label, first = tag
    said, uri, fragment = about(label, first, page.file.src_uri)
    line = LINE.match(found.string, found.end())
    there = files.get_file_from_path(uri).url_relative_to(page.file)
    href = line[1] if line else f"{there}#{fragment}"
    shown = label.replace("--", "–")
    return f'<a class="fw-number" href="{href}" title="{escape(said)}">({shown})</a>'


def about(label: str, tag: str, uri: str) -> tuple[str, str, str]:
    """What to say of a number on a page; page and anchor where it leads."""
    path = _counts_as(uri)
    if tag[0].isdigit():
        exceptions = equations.listed()["exceptions"].get(path, {})
        name = exceptions.get(tag) or equations.paper(path)
        paper = equations.papers()[name]
        words = re.sub(r" \(Eqs\. [\d-]+\)$", "", paper["equations"][tag])
        whose = f"{paper['authors'].split(',')[0]} et al. {paper['year']}"
        word = "Eqs." if "--" in label else "Eq."
        said = f"{word} {label.replace('--', '–')} of {whose}"
        return _sentence(said, words), EQUATIONS, f"{name}-{tag}"
    families = equations.listed()["fwlab"]
    having = [family for family in families if tag in families[family]]
    # The same number may have another meaning in another family.
    family = next((family for family in having if family in path), having[0])
    stated = equations.stated()[family, tag]
    said = _sentence(f"({tag}) is our own number", families[family][tag])
    return said, page_of(stated, alone=True)[0], f"eq-{tag}"


def _counts_as(uri: str) -> str:
    """The path by which docs/equations.toml knows whose numbers a page has."""
    if uri.startswith("annotated/source/"):
        return f"fwlab/{uri.removeprefix('annotated/source/').removesuffix('.md')}"
    page = PAGES.get(uri.removeprefix("annotated/").removesuffix(".md"))
    if page:
        return f"fwlab/ops/{page.folder}/"
    return uri if uri.startswith("notebooks/") else f"docs/{uri}"


def _sentence(said: str, words: str) -> str:
    return f"{said}. {words[0].upper()}{words[1:]}."
