"""Explain each glossary term where a page first uses it.

The term becomes a link to its entry in docs/notation.md; the first sentences
of the entry appear on hover and focus, and on the first tap. There, each symbol
has an anchor: its name in the code.
"""

import re
from collections import Counter
from functools import cache
from html import escape

import tex
from mkdocs.plugins import event_priority
from repository import ROOT

GLOSSARY = "notation.md"
ENTRY = re.compile(
    r'^(?:<span id="[\w-]+"></span>)*<span id="(term-[\w-]+)"></span>'
    r"(?:<span [^>]*></span>)*\*\*(.+?)\.\*\* (.+)$",
    re.MULTILINE,
)
#: The start of a symbol's table row, up to the symbol's name in the code.
SYMBOL = re.compile(r"<tr>(?=\s*<td>(?:(?!</td>).)*</td>\s*<td><code>(\w+)</code>)")
#: Terms that are not linked because most pages use them in another sense.
COMMON = {"capacity", "causal", "gate", "head", "key", "query", "value", "kernel"}
COMMON |= {"step", "state", "naive", "efficient", "retrieval", "streaming"}
#: Maximum length of an explanation in characters. Longer ones end after a sentence.
LONGEST = 240
#: HTML elements in which terms are not linked.
SKIPPED = "a|h[1-6]|code|pre|svg|script|style|summary|button|label|legend|form|t[dh]"
SKIPPED = re.compile(rf"<(/?)({SKIPPED})\b")
PARTS = re.compile(r"(<[^>]*>|\\\(.*?\\\)|\\\[.*?\\\]|\$[^$]*\$)", re.DOTALL)


@cache
def terms() -> dict[str, tuple[str, str]]:
    """Return the anchor and explanation of each term, by lower-case name."""
    text = (ROOT / "docs" / GLOSSARY).read_text("utf-8")
    found = {}
    for anchor, title, explanation in ENTRY.findall(text):
        said, *more = re.split(r"(?<=\.) (?=[A-Z])", plain(explanation))
        while more and len(said) + len(more[0]) < LONGEST:
            said += f" {more.pop(0)}"
        for name in re.split(r", | \(|\)", title):
            if name and name.lower() not in COMMON:
                found[name.lower()] = (anchor, said)
    return found


def plain(markdown: str) -> str:
    """Remove the Markdown markup of links, code and formulas from a text."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    text = re.sub(r"\$([^$]+)\$", lambda formula: tex.plain(formula[1]), text)
    return re.sub(r"[`*]", "", text)


@cache
def names() -> re.Pattern:
    """Return a pattern that matches all terms, longest first, also in the plural."""
    known = sorted(terms(), key=len, reverse=True)
    each = "|".join(re.escape(name) for name in known)
    return re.compile(rf"(?<![\w-])({each})(?=s?(?![\w-]))", re.IGNORECASE)


@event_priority(-50)  # Run after the hooks that write the content.
def on_page_content(html, page, config, files):
    if page.file.src_uri == GLOSSARY:
        seen: Counter[str] = Counter()

        def row(symbol: re.Match) -> str:
            seen[symbol[1]] += 1
            again = f"-{seen[symbol[1]]}" if seen[symbol[1]] > 1 else ""
            return f'<tr id="symbol-{symbol[1]}{again}">'

        return SYMBOL.sub(row, html)
    if page.file.src_uri in ("changelog.md", "references.md"):
        return html
    there = files.get_file_from_path(GLOSSARY).url_relative_to(page.file)
    html = explained(html, there)
    if 'class="fw-term"' in html:
        page.meta.setdefault("scripts", []).append("scripts/glossary.js")
    return html


def explained(html: str, there: str) -> str:
    """Link each glossary term at its first use in the HTML of a page."""
    seen: set[str] = set()

    def link(match: re.Match) -> str:
        anchor, said = terms()[match[1].lower()]
        if anchor in seen:
            return match[0]
        seen.add(anchor)
        title = escape(said, quote=True)
        return (
            f'<a class="fw-term" href="{there}#{anchor}" title="{title}">{match[0]}</a>'
        )

    parts, inside, skipped = PARTS.split(html), 0, 0
    for i, part in enumerate(parts):
        if tag := SKIPPED.match(part):
            skipped += -1 if tag[1] else 1
        elif re.match(r"</?(p|li)\b", part):
            inside += -1 if part[1] == "/" else 1
        elif inside and not skipped and not i % 2:
            parts[i] = names().sub(link, part)
    return "".join(parts)
