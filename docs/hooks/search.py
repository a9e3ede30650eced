"""Keeps noise out of search, and searches for numbers working.

A page loads the index when a reader opens the search, not before.
"""

import json
import re
import textwrap
from html import escape, unescape
from pathlib import Path

import tex
from annotated import repeated
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority

# Templates leave out tables of results: the plugin writes their cells without a
# gap, so that nobody would find a number by them.

#: Code, which buries names of functions that the API and headings have, too.
#: The tools that write these tags have no option for another attribute.
CODE = re.compile(
    r'<details class="mkdocstrings-source"|<div class="([\w-]+ )*highlight"'
)
#: Notes that also appear on another page.
AGAIN = re.compile(
    r"kernels/\w+\.html#(naive|chunked|efficient)"
    + "".join(
        rf"|{uri.replace('.md', '.html')}#{version}" for uri, version in repeated()
    )
    + r"|annotated/[\w-]+\.html#(kernels|tiles|chunks|windows|scan)"
)
#: How much pages count that have the same words: more those to learn from,
#: less single exercises and pages for developers.
WEIGHTS = {
    r"notebooks/|figures/|memory_essay": 1.5,
    # Of each number it says only a few words.
    r"annotated/equations": 3,
    r"exercises\.html#|annotated/source/|kernels/|contribute|tested|changelog": 0.5,
}
#: TeX, which search would show as it is written.
FORMULA = re.compile(
    r"\\\((.*?)\\\)|\\\[(.*?)\\\]|\$\$(.*?)\$\$|\$([^$\n]+)\$", re.DOTALL
)
#: Where a text is cut, so that search shows only what was found.
BLOCK = re.compile(r"</?(?:p|li|ol|ul|pre)>")
#: Characters of a piece of text that search shows.
LONGEST = 200

#: What is replaced in the theme's scripts, which have no option for it.
MENDED = {
    # lunr, the theme's search, tells the nodes of its word tree apart by the
    # letters and numbers of their edges, written without a gap. With digits as
    # letters, different nodes look alike, the tree gets words that no page has,
    # and a search that meets one finds nothing. Here, the gap.
    "workers/search.*.min.js": {"e=e+s+o.id}return e": 'e=e+s+o.id+","}return e'},
    # The index is loaded at once from a server, and when the search is opened
    # from disk. Here, always when it is opened.
    "bundle.*.min.js": {
        'location.protocol!=="file:"),Je("search")': '!1),Je("search")',
        # Which words to mark on a page that was found, the index says, too.
        'V("search.highlight")?': "/[?&]h=/.test(location.search)?",
    },
}


def on_page_content(html, page, config, files):
    return CODE.sub(lambda match: f"{match[0]} data-search-exclude", html)


@event_priority(-200)  # the plugins write the index before
def on_post_build(config):
    _mend(Path(config.site_dir, "assets", "javascripts"))
    folder = Path(config.site_dir, "search")
    index = json.loads((folder / "search_index.json").read_text("utf-8"))
    index["docs"] = [
        entry | {"text": _pieces(entry["text"]), "boost": _weight(entry["location"])}
        for entry in index["docs"]
        if not AGAIN.match(entry["location"])
    ]
    _once(index["docs"])
    text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
    (folder / "search_index.json").write_text(text, "utf-8")
    # For pages opened from disk.
    (folder / "search_index.js").write_text(f"var __index = {text}", "utf-8")


def _weight(location: str) -> float:
    found = (WEIGHTS[pages] for pages in WEIGHTS if re.match(pages, location))
    return next(found, 1)


def _pieces(text: str) -> str:
    """A text in pieces: of these, search shows the first two that match."""
    text = FORMULA.sub(lambda match: _readable(match[match.lastindex]), text)
    pieces = []
    for block in BLOCK.split(text):
        words = " ".join(re.sub("<[^>]*>", "", block).split())
        piece = ""
        for sentence in re.split(r"(?<=[.!?:]) (?=[A-Z(])", words):
            if len(piece) + len(sentence) < LONGEST:
                piece = f"{piece} {sentence}".strip()
                continue
            pieces.append(piece)
            *whole, piece = textwrap.wrap(sentence, LONGEST, break_on_hyphens=False)
            pieces += whole
        pieces.append(piece)
    return "".join(f"<p>{piece}</p>" for piece in pieces if piece)


def _readable(formula: str) -> str:
    return escape(tex.plain(unescape(formula)), quote=False)


def _once(entries):
    """Leave a text to the first entry that has it, as of a method that
    several classes have; the others are found by their titles.
    """
    seen = set()
    for entry in entries:
        if entry["text"] in seen:
            entry["text"] = ""
        seen.add(entry["text"])


def _mend(scripts: Path) -> None:
    for name, replacements in MENDED.items():
        (path,) = scripts.glob(name)
        code = path.read_text("utf-8")
        for old, new in replacements.items():
            if new not in code and code.count(old) != 1:
                raise PluginError(f"expected {old} once in {name}, as in Material 9.8")
            code = code.replace(old, new)
        path.write_text(code, "utf-8")
