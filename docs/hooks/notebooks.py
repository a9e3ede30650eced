"""Convert notebooks/*.ipynb to Markdown pages before MkDocs reads them.

Headings, formulas, links and code are then processed as on any page. Content that
Markdown would change, such as a drawing or a question, replaces a mark once the
page is HTML.
"""

import base64
import json
import posixpath
import re
from html import escape, unescape

import course
import nbformat
import plots
from annotated import page_of
from markupsafe import Markup
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File
from mkdocs_jupyter.plugin import NotebookFile
from repository import ROOT, colab, source
from templates import render
from tex import plain, typeset

from fwlab.exercises import EXERCISES, QUESTIONS

FOLDER = "notebooks"
MARK = re.compile(r"<!-- nb: (\w+) -->")
#: A cell that contains only questions, such as `predict("crosstalk", ...)`.
ASKS = re.compile(r'((predict|quiz)\("\w+", \.\.\.\)\s*)+')
ASKED = re.compile(r'(predict|quiz)\("(\w+)"')
#: The first line of a setup or drawing cell, which the page folds.
FOLDED = re.compile(r"# (?:@title )?(Setup|Draws [^\n]+)")
#: The paragraph of an exercise or a derivation, which begins with a number.
TASK = re.compile(r"^\*\*\d\. .+?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
#: The paragraph on time and requirements, which the page header repeats.
ITALIC = re.compile(r"^\*(?=[^*])(.+?)\*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\(\.\./(docs|fwlab)/([^)\s]*)\)")
FRAME = re.compile(r'<img [^>]*src="data:image/svg\+xml;base64,([^"]+)"[^>]*>')
#: The notebooks as Markdown, by the URI of the page.
pages: dict[str, "Page"] = {}


@event_priority(100)  # Run early, so that the redirects plugin finds the files.
def on_files(files, config):
    uris = [f"{FOLDER}/{path.name}" for path in sorted(ROOT.glob(f"{FOLDER}/*.ipynb"))]
    site, folders = config.site_dir, config.use_directory_urls
    for uri in uris:
        file = File(uri, str(ROOT), site, folders)
        files.append(NotebookFile(file, folders, site))
    (learn,) = (entry["Learn"] for entry in config.nav if "Learn" in entry)
    (menu,) = (entry for entry in learn if "Notebooks" in entry)
    menu["Notebooks"] = uris
    return files


def on_page_read_source(page, config):
    uri = page.file.src_uri
    if not uri.endswith(".ipynb"):
        return None
    pages[uri] = Page(uri, config)
    page.edit_url = source(config.repo_url, uri)
    return pages[uri].markdown


def on_page_content(html, page, config, files):
    uri = page.file.src_uri
    if uri not in pages:
        return html
    made, entry = pages[uri], course.entry_of(page, files)
    table = course._course()
    values = {
        "name": posixpath.basename(uri),
        "colab": colab(config.repo_url, uri),
        "wheel": config.extra["wheel"],
        "needs": [
            {"short": table[stem]["short"], "url": f"{stem}.html"}
            for stem in entry["after"]
        ],
        "picture": made.picture(entry["picture"]),
        "exercises": [name for name in made.exercises if name in EXERCISES],
        "entry": entry,
    }
    page.meta["early_scripts"] = [course.PROGRESS]
    page.present_anchor_ids.update(made.exercises)

    def html_of(mark: re.Match) -> str:
        if not mark[1].isdigit():
            return render(f"notebook/{mark[1]}.html", **values)
        # A search result links to a section and opens its folded content.
        section = re.findall('<h2 id="([^"]*)"', html[: mark.start()])[-1:]
        return made.raw[int(mark[1])].replace("SECTION", "".join(section))

    return MARK.sub(html_of, html)


class Page:
    """Convert a notebook to Markdown with placeholders for the HTML in `raw`."""

    def __init__(self, uri: str, config):
        self.config, self.stem = config, posixpath.basename(uri).removesuffix(".ipynb")
        self.raw: list[str] = []
        self.parts: list[str] = []
        self.exercises: list[str] = []
        self.drawings, self.folds, self.predicts = 0, 0, False
        for cell in nbformat.read(ROOT / uri, as_version=4).cells:
            if cell.cell_type == "code":
                self._code(cell)
            else:
                self._text(cell.source)
        self._end_section()
        self.html = "".join(self.raw)
        title = f"{int(self.stem.partition('_')[0])}. {self.title}"
        about = course._course()[self.stem]["about"]
        meta = f"title: {json.dumps(title)}\ndescription: {json.dumps(about)}"
        self.markdown = "\n\n".join(
            [f"---\n{meta}\n---", *self.parts, "<!-- nb: foot -->"]
        )

    def picture(self, number: int) -> dict:
        """Return the name and view box of a drawing, for the head of the page."""
        drawn = re.search(f'<svg id="fig{number}".*? (viewBox="[^"]*")', self.html)
        return {"name": f"fig{number}", "view": Markup(drawn[1])}

    def _put(self, html: str) -> None:
        self.parts.append(f"<!-- nb: {len(self.raw)} -->")
        self.raw.append(html)

    def _text(self, text: str) -> None:
        text = LINK.sub(self._link, text)
        # Markdown needs a displayed equation in a paragraph of its own.
        text = re.sub(r"\s*(\$\$.+?\$\$[.,]?)\s*", r"\n\n\1\n\n", text, flags=re.S)
        for part in re.split(r"^(?=##? )", text, flags=re.MULTILINE):
            if part.startswith("#"):
                self._end_section()
            if part.startswith("# "):
                head, _, rest = part.partition("\n")
                self.title = head.removeprefix("# ")
                rest = ITALIC.sub(_without_facts, rest)
                self.parts += [head, "<!-- nb: head -->", rest]
            else:
                self.parts.append(part)

    def _link(self, link: re.Match) -> str:
        """Convert a link to a repository file into a link to a page of the site."""
        text, folder, path = link.groups()
        if folder == "docs":
            return f"[{text}](../{path})"
        found, module = page_of(f"fwlab/{path}"), re.match(r"(\w+)[./]", path)
        if found:
            return f"[{text}](../{''.join(found)})"
        if module and (ROOT / f"docs/api/{module[1]}.md").exists():
            return f"[{text}](../api/{module[1]}.md)"
        there = source(self.config.repo_url, f"fwlab/{path}")
        return f"[{text}]({there})" if there else text

    def _code(self, cell) -> None:
        if ASKS.fullmatch(cell.source):
            self._ask(ASKED.findall(cell.source))
            return
        names = dict.fromkeys(course.CHECK.findall(cell.source))
        anchors = [name for name in names if name not in self.exercises]
        self.exercises += anchors
        here = f' id="{anchors[0]}"' if anchors and not self._task(anchors[0]) else ""
        self._put(f'<div class="nb-code"{here}>')
        fold = FOLDED.match(cell.source)
        if fold:
            title = escape(fold[1].rstrip("."))
            self._put(f"<details data-search-exclude><summary>{title}</summary>")
        self.parts.append(f"```python\n{cell.source}\n```")
        if fold:
            self._put("</details>")
        for output in cell.outputs:
            self._put(self._output(output))
        for name in anchors:
            self._put(course.answer(name))
        self._put("</div>")

    def _task(self, name: str) -> bool:
        """Make `name` the HTML id of the section's last task. Return True if done."""
        for place, text in reversed([*enumerate(self.parts)]):
            if tasks := [*TASK.finditer(text)]:
                end = tasks[-1].end()
                if text[:end].endswith(" }"):  # This task already has an id.
                    return False
                self.parts[place] = f"{text[:end]}\n{{: #{name} }}{text[end:]}"
                return True
            if text.startswith("## "):
                break
        return False

    def _output(self, output) -> str:
        data = output.get("data", {})
        if "image/svg+xml" in data:
            kind, html = "svg+xml", self._drawing(data["image/svg+xml"])
        elif "text/html" in data:
            kind = "html"
            html = FRAME.sub(
                lambda image: self._drawing(base64.b64decode(image[1]).decode()),
                data["text/html"],
            )
        else:
            # Long output scrolls, so it must be reachable by keyboard.
            kind, text = "plain", output.get("text") or data["text/plain"]
            html = f'<pre tabindex="0">{escape(text, quote=False)}</pre>'
        return f'<div class="nb-output nb-{kind}">{html}</div>'

    def _drawing(self, svg: str) -> str:
        self.drawings += 1
        svg = svg[svg.index("<svg") :]
        # Equal images of a figure share an id, so drop ids that nothing refers to.
        svg = re.sub(r' id="(image\w+)"', lambda m: m[0] * (f"#{m[1]}" in svg), svg)
        # matplotlib writes each text into a comment next to its outlines.
        texts = [text.strip() for text in re.findall("<!--(.*?)-->", svg, re.DOTALL)]
        words = dict.fromkeys(text for text in texts if re.search("[^\\W\\d_]", text))
        title = re.search("<title>(.*?)</title>", svg, re.DOTALL)
        label = escape("; ".join(words)) or str(self.drawings)
        label = title[1].strip() if title else label
        label = re.sub(
            r"\$([^$]+)\$", lambda tex: escape(plain(unescape(tex[1]))), label
        )
        return plots.inline(svg, f"fig{self.drawings}", f"Figure: {label}")

    def _ask(self, asked: list[tuple[str, str]]) -> None:
        """Render the questions of a cell, and fold the content after a prediction."""
        names = [name for how, name in asked if how == "predict"]
        questions = [_question(name, how == "predict") for how, name in asked]
        self._put(render("notebook/quiz.html", questions=questions, names=names))
        if names:
            values = {"names": names, "first": not self.predicts}
            self._put(render("notebook/fold.html", **values))
            self.folds, self.predicts = self.folds + 1, True

    def _end_section(self) -> None:
        if self.folds:
            self._put("</fw-fold>" * self.folds)
        self.folds = 0


def _without_facts(found: re.Match) -> str:
    parts = re.split(r"(?<=\.)\s+(?=[A-Z])", found[1])
    kept = " ".join(p for p in parts if not re.match("(Time|Needs|Next):", p))
    return kept and f"*{kept}*"


def _question(name: str, predicted: bool) -> dict:
    """Return the template data of a question, with feedback on each answer."""
    question = QUESTIONS[name]
    plain = ("name", "text", "choices", "truth", "tolerance", "percent")
    return {field: getattr(question, field) for field in plain} | {
        "said": typeset(f"{question.answer}. {question.because}"),
        "tempting": [(wrong, typeset(why)) for wrong, why in question.tempting.items()],
        "predicted": predicted,
    }
