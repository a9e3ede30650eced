"""Says whose number an equation has.

formulas.py makes the number of a displayed equation a link to the line that
computes it, or to where it is listed (a paper's) or stated (our own), and the link
explains the number on hover and focus.
"""

import re
from html import escape

import equations
from annotated import EQUATIONS, PAGES, SHOWN

#: Of an equation, or of several that belong together: "24", "8--11", "d1".
TAG = re.compile(r"\\tag\{((\w+)(?:--\w+)?)\}")
#: What follows an equation that has lines, up to the first of them.
LINE = re.compile(r'\s*<p class="places"[^>]*>[^<]*<a href="([^"]+)"')


def link(tag: tuple[str, str], found: re.Match, page, files) -> str:
    """Return the number of a formula that was found on a page, as a link."""
    label, first = tag
    said, uri, fragment = about(label, first, page.file.src_uri)
    line = LINE.match(found.string, found.end())
    there = files.get_file_from_path(uri).url_relative_to(page.file)
    href = line[1] if line else f"{there}#{fragment}"
    shown = label.replace("--", "–")
    said = f"{said[0]}. {said[1][0].upper()}{said[1][1:]}."
    return f'<a class="fw-number" href="{href}" title="{escape(said)}">({shown})</a>'


def about(label: str, tag: str, uri: str) -> tuple[tuple[str, str], str, str]:
    """Whose number it is on a page and what it is; page and anchor where it leads."""
    # A page of source counts as its first file.
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
