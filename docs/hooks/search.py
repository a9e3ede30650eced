"""Reads the pages for the search, and writes it as one script.

The theme has the field and draws what is found; its own index stays empty.
`scripts/iframe-worker.js` loads the script when a reader first enters the field;
`scripts/search.js`, the last part of it, finds and ranks.
"""

import json
import re
from html.parser import HTMLParser
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
            whole, *others = Reader(page.url, page.title).read(page.content)
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
    """The sections without what an earlier page says; those left empty are dropped."""

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


class Reader(HTMLParser):
    """Splits a page into sections: location, title, and lists of text and of code."""

    def __init__(self, url: str, title: str):
        super().__init__()
        self.url = url
        self.found: list[dict] = []
        self.rows: list[dict] = []
        #: The tags that are open, and how many were at the start of what is left out.
        self.tags: list[str] = []
        self.skipped = 0
        #: Of the text being read: its pieces, and its own anchor.
        self.pieces: list[str] = []
        self.anchor = ""
        #: Of the table being read: the head of its first column.
        self.head = ""
        self._begin(self.found, url, title)

    def read(self, html: str) -> list[dict]:
        self.feed(DRAWING.sub("", html))
        self.close()
        self._end()
        return self.found + self.rows

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if not self.skipped and self._divides(tag):
            self._end()
        if tag in VOID:
            self.pieces += [" "] * (tag == "br")
            return
        self.tags.append(tag)
        if self.skipped:
            return
        if (
            tag in ("button", "script", "style")
            or "data-search-exclude" in attributes
            or AGAIN.search(attributes.get("class") or "")
            or (tag == "a" and "pre" in self.tags)  # the number of a line
        ):
            self.skipped = len(self.tags)
        elif tag in ("td", "th"):
            self.pieces.append("\t")
        elif tag == "table":
            self.head = ""
        elif tag in HEADINGS and "id" in attributes:
            first = tag == "h1" and len(self.found) == 1
            if first:
                self.found[0]["title"] = ""
            else:
                self._begin(self.found, f"{self.url}#{attributes['id']}")
        elif tag in ("span", "tr") and "id" in attributes:
            self.anchor = attributes["id"]

    def handle_endtag(self, tag):
        if tag not in self.tags:
            return
        if not self.skipped and self._divides(tag):
            self._end()
        while self.tags.pop() != tag:
            pass
        if len(self.tags) < self.skipped:
            self.skipped = 0

    def handle_data(self, data):
        if self.skipped:
            return
        if "pre" not in self.tags:
            data = re.sub(r"\s+", " ", data)
            if "code" not in self.tags:
                data = FORMULA.sub(
                    lambda found: tex.plain(found[found.lastindex]), data
                )
        self.pieces.append(data)

    def _divides(self, tag: str) -> bool:
        """Whether a text ends here. A row is one text, whatever is in its cells."""
        return tag not in INLINE | VOID and (tag == "tr" or "tr" not in self.tags)

    def _begin(self, sections: list[dict], location: str, title: str = "", *text: str):
        sections.append(
            {"location": location, "title": title, "text": [*text], "code": []}
        )

    def _end(self) -> None:
        """Put the text that was read where it belongs."""
        raw, self.pieces = "".join(self.pieces), []
        anchor, self.anchor = self.anchor, ""
        section = self.found[-1]
        if "pre" in self.tags:
            section["code"] += [raw.strip("\n")] if raw.strip() else []
            return
        cells = [" ".join(cell.split()) for cell in raw.split("\t")]
        text = " · ".join(filter(None, cells))
        if not text:
            return
        if HEADINGS.intersection(self.tags):
            section["title"] += text
            return
        if "thead" in self.tags:
            self.head = cells[1]
        elif row := "tr" in self.tags and ROWS.get(self.head):
            anchor = anchor and f"{self.url}#{anchor}"
            title = row.format(*filter(None, cells))
            self._begin(self.rows, anchor or section["location"], title, text)
            return
        elif anchor:  # a term of the glossary
            self._begin(self.rows, f"{self.url}#{anchor}", text.split(". ")[0], text)
            return
        section["text"].append(text)
