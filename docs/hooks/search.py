"""Reads the pages for the search, and writes it as one script.

The theme has the field and draws what is found; its own index stays empty.
`scripts/iframe-worker.js` loads the script when a reader first enters the field;
`scripts/search.js`, the last part of it, finds and ranks.
"""

import json
import re
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path

import tex
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
#: Beside headings, and source code that the annotated pages have.
AGAIN = re.compile(r"\b(headerlink|doc-labels|mkdocstrings-source)\b")
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
INLINE = {
    *("a", "abbr", "b", "code", "del", "em", "i", "kbd", "label", "mark", "q", "s"),
    *("small", "span", "strong", "sub", "sup", "u", "var"),
}
VOID = {"br", "col", "hr", "img", "input", "link", "source", "wbr"}
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
    """Return the sections without what an earlier page says; drop those left empty."""

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


class Element:
    """An element around a text: its parents, and which block it belongs to."""

    def __init__(self, tag: str, attributes: dict, parent: "Element | None" = None):
        self.tag, self.parent, self.id = tag, parent, attributes.get("id")
        self.within = {tag} | (parent.within if parent else set())
        self.out = bool(
            (parent and parent.out)
            or tag in ("button", "script", "style")
            or "data-search-exclude" in attributes
            or AGAIN.search(attributes.get("class") or "")
            or {"pre", "a"} <= self.within  # the number of a line
        )
        # A row is one text, whatever is in its cells.
        inside = parent and (tag in INLINE or "tr" in parent.within)
        self.block: Element = parent.block if inside else self


class Texts(HTMLParser):
    """The texts of a page, each with the element that it is in."""

    def __init__(self, html: str):
        super().__init__()
        self.last, self.found = Element("article", {}), []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag in VOID:
            self.handle_data(" " * (tag == "br"))
        else:
            self.last = Element(tag, dict(attrs), self.last)
            self.handle_data("\t" * (tag in ("td", "th")))

    def handle_endtag(self, tag):
        if tag in self.last.within:
            while self.last.tag != tag:
                self.last = self.last.parent
            self.last = self.last.parent

    def handle_data(self, data):
        if not self.last.out:
            self.found.append((self.last, data))


def read(url: str, title: str, html: str) -> list[dict]:
    """Split a page into sections: location, title, and lists of text and of code."""
    sections, rows, head = [_section(url, title)], [], ""
    texts = Texts(DRAWING.sub("", html)).found
    for block, group in groupby(texts, key=lambda pair: pair[0].block):
        group = [*group]
        if block.tag in HEADINGS and block.id:
            if block.tag == "h1" and len(sections) == 1:
                sections[0]["title"] = ""
            else:
                sections.append(_section(f"{url}#{block.id}"))
        section, raw = sections[-1], "".join(text for _, text in group)
        if "pre" in block.within:
            section["code"] += [raw.strip("\n")] if raw.strip() else []
            continue
        cells = "".join(map(_words, group)).split("\t")
        cells = [*filter(None, (" ".join(cell.split()) for cell in cells))]
        if not cells:
            continue
        text = " · ".join(cells)
        ids = [e.id for e, _ in group if e.id and e.tag in ("span", "tr")]
        place = f"{url}#{ids[-1]}" if ids else section["location"]
        if HEADINGS & block.within:
            section["title"] += text
        elif "thead" in block.within:
            head = cells[0]
            section["text"].append(text)
        elif block.tag == "tr" and head in ROWS:
            rows.append(_section(place, ROWS[head].format(*cells), text))
        elif ids:  # a term of the glossary
            rows.append(_section(place, text.split(". ")[0], text))
        else:
            section["text"].append(text)
    return sections + rows


def _section(location: str, title: str = "", *text: str) -> dict:
    return {"location": location, "title": title, "text": [*text], "code": []}


def _words(pair: tuple[Element, str]) -> str:
    """Return a text in which a formula is no TeX."""
    element, text = pair
    if "code" in element.within:
        return text
    return FORMULA.sub(lambda found: tex.plain(found[found.lastindex]), text)
