"""Read the pages for the search, and write its index as one script.

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
#: Of several pages that have the same text, the first of these keeps it.
FIRST = (
    r"notebooks/|course\.|exercises\.",
    r"api/",
    r"(?!annotated/|kernels/)",
    r"annotated/(?!source/)",
    r"kernels/",
    "",
)
#: Shorter texts, such as numbers in a table, may be the same by chance.
SHORT = 40
#: Tables whose rows readers look up, by the head of the first column: what a row
#: is called, from its cells.
ROWS = {"Eq.": "Eq. {}", "Symbol": "{} · {}"}
#: Elements to skip: links beside headings, code of the annotated pages, numbers of
#: lines, and elements without text.
OUT = (
    ".headerlink, .doc-labels, .mkdocstrings-source, [data-search-exclude], pre a, "
    "button, col, hr, img, input, script, style, wbr"
)
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
INLINE = {
    *("a", "abbr", "b", "code", "del", "em", "i", "kbd", "label", "mark", "q", "s"),
    *("small", "span", "strong", "sub", "sup", "u", "var"),
}
#: Many tags without a word to find. No drawing is inside another one.
DRAWING = re.compile(r"<svg\b.*?</svg>", re.DOTALL)
FORMULA = re.compile(
    r"\\\((.*?)\\\)|\\\[(.*?)\\\]|\$\$(.*?)\$\$|\$([^$\n]+)\$", re.DOTALL
)

sections: list[dict] = []


def on_pre_build(config):
    sections.clear()


@event_priority(-60)  # links between pages are there, and formulas still TeX
def on_env(env, config, files):
    for page in (file.page for file in files.documentation_pages()):
        search = page.meta.setdefault("search", {})
        if not search.get("exclude"):
            whole, *others = read(page.url, page.title, page.content)
            # The navigation may have another name for the page than its heading.
            sections.extend([whole | {"name": page.title}, *others])
            search["exclude"] = True  # from the plugin's own index


def on_post_build(config):
    (path,) = fetched(MODULES / "minisearch", "dist/umd/index.js")
    library = path.read_text("utf-8").partition("//# sourceMappingURL")[0]
    index = json.dumps(once(sections), ensure_ascii=False, separators=(",", ":"))
    parts = [library, f"const SECTIONS = {index};", SCRIPT.read_text("utf-8")]
    path = Path(config.site_dir, "assets", "search.js")
    path.write_text("\n".join(parts), "utf-8")


def once(sections: list[dict]) -> list[dict]:
    """Return the sections without texts of earlier pages; drop empty sections."""

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
    """Split a page into sections: location, title, and lists of text and of code."""
    page = BeautifulSoup(DRAWING.sub("", html), "html.parser")
    for element in page.select(OUT):
        element.decompose()
    for cell in page.find_all(["td", "th"]):
        cell.insert(0, "\t")
    for line in page.find_all("br"):
        line.replace_with(" ")
    blocks = {id(page): page}  # the block of each element and text
    for node in page.descendants:
        around = blocks[id(node.parent)]
        # A row is one text, whatever is in its cells.
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
        elif ids:  # a term of the glossary
            rows.append(_section(place, text.split(". ")[0], text))
        else:
            section["text"].append(text)
    return sections + rows


def _section(location: str, title: str = "", *text: str) -> dict:
    return {"location": location, "title": title, "text": [*text], "code": []}


def _words(text: NavigableString) -> str:
    """Return a text in which a formula is no TeX."""
    if text.find_parent("code"):
        return text
    return FORMULA.sub(lambda found: tex.plain(found[found.lastindex]), text)
