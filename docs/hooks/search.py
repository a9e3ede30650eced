"""Index the text of all pages, and write the search index as one script.

The theme has the field and shows the results; its own index stays empty.
`scripts/iframe-worker.js` loads the script when a reader first enters the field;
`scripts/search.js`, the last part of it, finds and ranks.
"""

import json
import re
from itertools import groupby
from pathlib import Path

import tex
from bs4 import BeautifulSoup, NavigableString
from mkdocs.plugins import event_priority
from packages import MODULES, fetched

SCRIPT = Path(__file__).parents[1] / "scripts" / "search.js"
#: Page order as URL patterns: of equal texts, the search keeps only the first.
FIRST = (
    r"notebooks/|course\.|exercises\.",
    r"api/",
    r"(?!annotated/|kernels/)",
    r"annotated/(?!source/)",
    r"kernels/",
    "",
)
#: Length below which equal texts, such as numbers in tables, are all kept.
SHORT = 40
#: Format of row titles in tables with searchable rows, by the first column's header.
ROWS = {"Eq.": "Eq. {}", "Symbol": "{} · {}"}
#: Elements to skip: heading links, annotated code, line numbers, textless elements.
OUT = (
    ".headerlink, .doc-labels, .mkdocstrings-source, [data-search-exclude], pre a, "
    "button, col, hr, img, input, script, style, wbr"
)
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
INLINE = {
    *("a", "abbr", "b", "code", "del", "em", "i", "kbd", "label", "mark", "q", "s"),
    *("small", "span", "strong", "sub", "sup", "u", "var"),
}
#: Drawings have many tags and no text to find. They are never nested.
DRAWING = re.compile(r"<svg\b.*?</svg>", re.DOTALL)
FORMULA = re.compile(
    r"\\\((.*?)\\\)|\\\[(.*?)\\\]|\$\$(.*?)\$\$|\$([^$\n]+)\$", re.DOTALL
)

sections: list[dict] = []


def on_pre_build(config):
    sections.clear()


@event_priority(-60)  # Links are resolved by now, and formulas are still TeX.
def on_env(env, config, files):
    for page in (file.page for file in files.documentation_pages()):
        search = page.meta.setdefault("search", {})
        if not search.get("exclude"):
            whole, *others = read(page.url, page.title, page.content)
            # The navigation may have another name for the page than its heading.
            sections.extend([whole | {"name": page.title}, *others])
            search["exclude"] = True  # Keep the plugin's own index empty.


def on_post_build(config):
    (path,) = fetched(MODULES / "minisearch", "dist/umd/index.js")
    library = path.read_text("utf-8").partition("//# sourceMappingURL")[0]
    index = json.dumps(once(sections), ensure_ascii=False, separators=(",", ":"))
    parts = [library, f"const SECTIONS = {index};", SCRIPT.read_text("utf-8")]
    path = Path(config.site_dir, "assets", "search.js")
    path.write_text("\n".join(parts), "utf-8")


def once(sections: list[dict]) -> list[dict]:
    """Remove texts that an earlier page contains, and drop sections without text."""

    def rank(section):
        pages = enumerate(FIRST)
        return next(i for i, page in pages if re.match(page, section["location"]))

    seen, kept = set(), []
    for section in sorted(sections, key=rank):
        new = dict(section)
        for kind in ("text", "code"):
            texts = section[kind]
            new[kind] = "\n".join(t for t in texts if len(t) < SHORT or t not in seen)
            seen.update(texts)
        whole = section["text"] or section["code"]
        if "#" not in new["location"] or not whole or new["text"] or new["code"]:
            kept.append(new)
    return kept


def read(url: str, title: str, html: str) -> list[dict]:
    """Split the HTML of a page into sections with location, title, texts and code."""
    page = BeautifulSoup(DRAWING.sub("", html), "html.parser")
    for element in page.select(OUT):
        element.decompose()
    for cell in page.find_all(["td", "th"]):
        cell.insert(0, "\t")
    for line in page.find_all("br"):
        line.replace_with(" ")
    blocks = {id(page): page}  # The block that contains each node.
    for node in page.descendants:
        around = blocks[id(node.parent)]
        # A table row is indexed as one text.
        inside = node.name is None or node.name in INLINE or around.name == "tr"
        blocks[id(node)] = around if inside else node
    sections, rows, head = [_section(url, title)], [], ""
    for _, group in groupby(page.descendants, lambda node: id(blocks[id(node)])):
        group = [*group]
        block = blocks[id(group[0])]
        within = {block.name, *(element.name for element in block.parents)}
        if block.name in HEADINGS and block.get("id"):
            if block.name == "h1" and len(sections) == 1:
                sections[0]["title"] = ""
            else:
                sections.append(_section(f"{url}#{block['id']}"))
        section = sections[-1]
        texts = [node for node in group if type(node) is NavigableString]
        if "pre" in within:
            raw = "".join(texts)
            section["code"] += [raw.strip("\n")] if raw.strip() else []
            continue
        cells = "".join(map(_words, texts)).split("\t")
        cells = [*filter(None, (" ".join(cell.split()) for cell in cells))]
        if not cells:
            continue
        text = " · ".join(cells)
        ids = [n["id"] for n in group if n.name in ("span", "tr") and n.get("id")]
        place = f"{url}#{ids[-1]}" if ids else section["location"]
        if HEADINGS & within:
            section["title"] += text
        elif "thead" in within:
            head = cells[0]
            section["text"].append(text)
        elif block.name == "tr" and head in ROWS:
            rows.append(_section(place, ROWS[head].format(*cells), text))
        elif ids:  # Elements with these ids are glossary entries.
            rows.append(_section(place, text.split(". ")[0], text))
        else:
            section["text"].append(text)
    return sections + rows


def _section(location: str, title: str = "", *text: str) -> dict:
    return {"location": location, "title": title, "text": [*text], "code": []}


def _words(text: NavigableString) -> str:
    """Return the text of a node, with TeX formulas converted to plain text."""
    if text.find_parent("code"):
        return text
    return FORMULA.sub(lambda found: tex.plain(found[found.lastindex]), text)
