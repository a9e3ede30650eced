"""Keeps noise out of search, the index small, and searches for numbers working.

Every page fetches the index, so it adds to the size of each.
"""

import json
import re
import textwrap
from html import escape, unescape
from pathlib import Path

import tex
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority

#: Code, which buries names of functions that the API and headings have, too.
#: The tools that write these tags have no option for another attribute.
CODE = re.compile(
    r'<details class="mkdocstrings-source"|<div class="(language-\w+ )?highlight"'
)
#: Notes that also appear on another page.
AGAIN = re.compile(
    r"kernels/\w+\.html#(naive|chunked|efficient)"
    r"|annotated/kimi\.html#(chunked|efficient)"
    r"|annotated/[\w-]+\.html#(kernels|tiles|chunks|windows|scan)"
)
#: Pages and parts of pages that are found by their headings alone.
HEADINGS = re.compile(
    r"(contribute|tested|changelog|kernels/\w+|annotated/source/[\w/]+"
    r"|api/(exercises|training)|course)\.html"
    r"|annotated/[\w-]+\.html#efficient"
)
#: Pages of which search has the first sentences only: they list arguments.
SUMMARY = re.compile(r"api/\w+\.html")
#: TeX, which search would show as it is written.
FORMULA = re.compile(
    r"\\\((.*?)\\\)|\\\[(.*?)\\\]|\$\$(.*?)\$\$|\$([^$\n]+)\$", re.DOTALL
)
#: Where a text is cut, so that search shows only what was found.
BLOCK = re.compile(r"</?(?:p|li|ol|ul|pre)>")
#: Characters of a piece of text that search shows.
LONGEST = 200

#: lunr, the theme's search, tells the nodes of its word tree apart by the
#: letters and numbers of their edges, written without a gap. With digits as
#: letters, different nodes look alike, the tree gets words that no page has,
#: and a search that meets one finds nothing. Here, the gap.
EDGE, EDGE_WITH_GAP = "e=e+s+o.id}return e", 'e=e+s+o.id+","}return e'


def on_page_content(html, page, config, files):
    return CODE.sub(lambda match: f"{match[0]} data-search-exclude", html)


@event_priority(-200)  # the plugins write the index before
def on_post_build(config):
    _mend_lunr(Path(config.site_dir, "assets", "javascripts", "workers"))
    folder = Path(config.site_dir, "search")
    index = json.loads((folder / "search_index.json").read_text("utf-8"))
    index["docs"] = [
        entry | {"text": _found(entry)}
        for entry in index["docs"]
        if not AGAIN.match(entry["location"])
    ]
    _once(index["docs"])
    text = json.dumps(index, ensure_ascii=False, separators=(",", ":"))
    (folder / "search_index.json").write_text(text, "utf-8")
    # For pages opened from disk.
    (folder / "search_index.js").write_text(f"var __index = {text}", "utf-8")


def _found(entry: dict[str, str]) -> str:
    """What search has of a section besides its heading."""
    if HEADINGS.match(entry["location"]):
        return ""
    pieces = _pieces(entry["text"])
    if SUMMARY.match(entry["location"]):
        pieces = pieces[:2]
    return "".join(f"<p>{piece}</p>" for piece in pieces)


def _pieces(text: str) -> list[str]:
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
    return [piece for piece in pieces if piece]


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


def _mend_lunr(folder: Path) -> None:
    (worker,) = folder.glob("search.*.min.js")
    code = worker.read_text("utf-8")
    if EDGE_WITH_GAP in code:
        return
    if code.count(EDGE) != 1:
        raise PluginError(f"expected lunr as of Material 9 in {worker.name}: see EDGE")
    worker.write_text(code.replace(EDGE, EDGE_WITH_GAP), "utf-8")
