"""Makes pages of notebooks/*.ipynb.

mkdocs-jupyter converts a notebook into JupyterLab's markup with all its
styles and scripts, and has no option for another template of nbconvert. So
its HTML is taken apart here: only the cells are kept, in the plain markup
that Markdown pages have, so that they look, search and copy alike.
"""

import base64
import json
import logging
import posixpath
import re
from html import escape, unescape
from itertools import takewhile
from urllib.parse import unquote, urlsplit

import course
import formulas
import plots
from annotated import page_of
from bs4 import BeautifulSoup, Tag
from markupsafe import Markup
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File
from mkdocs.structure.toc import get_toc
from repository import ROOT, colab, source
from templates import render
from tex import plain, typeset

from fwlab.exercises import EXERCISES, QUESTIONS, Question

log = logging.getLogger("mkdocs.hooks.notebooks")

FOLDER = "notebooks"
CELL = re.compile("^cell-id=")
#: A cell that only asks, as in `predict("crosstalk", ...)`.
ASKS = re.compile(r'((predict|quiz)\("\w+", \.\.\.\)\s*)+')
ASKED = re.compile(r'(predict|quiz)\("(\w+)"')
#: The first line of a cell that does not teach: it prepares or draws.
FOLDED = re.compile(r"# (?:@title )?(Setup|Draws [^\n]+)")
SVG = "data:image/svg+xml;base64,"


@event_priority(100)  # mkdocs-jupyter must find the files
def on_files(files, config):
    uris = [f"{FOLDER}/{path.name}" for path in sorted(ROOT.glob(f"{FOLDER}/*.ipynb"))]
    for uri in uris:
        files.append(File(uri, str(ROOT), config.site_dir, config.use_directory_urls))
    config.nav = _filled(config.nav, uris)
    return files


def _filled(nav, uris: list[str]):
    """The menu, with all notebooks where it has "notebooks/"."""
    mark = f"{FOLDER}/"
    if nav == mark:
        return uris
    if isinstance(nav, dict):
        return {title: _filled(value, uris) for title, value in nav.items()}
    if isinstance(nav, list):
        parts = [uris if part == mark else [_filled(part, uris)] for part in nav]
        return [entry for part in parts for entry in part]
    return nav


def on_page_content(html, page, config, files):
    if not page.file.src_uri.startswith(f"{FOLDER}/"):
        return html
    page.edit_url = source(config.repo_url, page.file.src_uri)
    svgs: list[str] = []
    stem = posixpath.basename(page.file.src_uri).removesuffix(".ipynb")
    cells = map(_cell, BeautifulSoup(html, "html.parser").find_all(id=CELL))
    body = _parsed("notebook/cells.html", cells=cells)
    for badge in body.select('p > a[href*="colab.research"] > img'):
        badge.find_parent("div").decompose()
    for image in body.select(f'img[src^="{SVG}"]'):
        svgs.append(_inline_svg(image["src"], len(svgs) + 1))
        image.replace_with(f"\0{len(svgs) - 1}\0")
    for pre in body.select(".highlight > pre"):
        code = body.new_tag("code")
        code.extend(list(pre.contents))
        pre.append(code)
    _formulas(body)
    _headings(body, page)
    _sections(body)
    exercises = _answers(body)
    _fold(body, stem)
    _links(body, page, config, files)
    entry = course.entry_of(page, files)
    if entry:
        _drop_facts(body)
    predicts = bool(body("fw-fold"))
    head, title = _head(page, config, entry, predicts, exercises), body.find("h1")
    title.insert_after(head) if title else body.insert(0, head)
    if entry:
        page.meta["early_scripts"] = [course.PROGRESS]
        body.append(_parsed("notebook/foot.html", entry=entry))
    # Drawings go in last: a parser of HTML would change them.
    return re.sub("\0(\\d+)\0", lambda match: svgs[int(match[1])], str(body))


def _parsed(template: str, **values) -> BeautifulSoup:
    return BeautifulSoup(render(template, **values), "html.parser")


def _cell(cell) -> dict:
    """The parts of a cell: its text, or its code and outputs."""
    if text := cell.select_one(".jp-RenderedMarkdown"):
        return {"text": Markup(text.decode_contents()), "questions": []}
    code, outputs = cell.select_one(".jp-InputArea pre"), []
    if code and ASKS.fullmatch(code.get_text()):
        asked = ASKED.findall(code.get_text())
        return {
            "text": "",
            "questions": [
                _question(QUESTIONS[name]) | {"predicted": how == "predict"}
                for how, name in asked
            ],
        }
    for output in cell.select(".jp-OutputArea-output"):
        # Long output scrolls, so it must be reachable by keyboard.
        for pre in output.find_all("pre"):
            pre["tabindex"] = "0"
        kind = output.get("data-mime-type", "").rpartition("/")[2].rpartition(".")[2]
        outputs.append({"kind": kind, "html": Markup(output.decode_contents())})
    found = FOLDED.match(code.get_text()) if code else None
    return {
        "text": "",
        "questions": [],
        "code": Markup(code or ""),
        "folded": found and found[1].rstrip("."),
        "outputs": outputs,
    }


def _question(question: Question) -> dict:
    """What the page needs in order to ask it, and to judge an answer.

    What quiz.js shows is HTML.
    """
    return {
        "name": question.name,
        "text": question.text,
        "choices": question.choices,
        "truth": question.truth,
        "said": typeset(f"{question.answer}. {question.because}"),
        "tempting": [(wrong, typeset(why)) for wrong, why in question.tempting.items()],
        "tolerance": question.tolerance,
        "percent": question.percent,
    }


def _inline_svg(source: str, number: int) -> str:
    svg = base64.b64decode(source.removeprefix(SVG)).decode()
    svg = svg[svg.index("<svg") :]
    # Equal images in one figure have the same name, which nothing uses.
    svg = re.sub(r' id="(image\w+)"', lambda m: m[0] * (f"#{m[1]}" in svg), svg)
    # matplotlib puts each text into a comment next to its outlines.
    texts = [text.strip() for text in re.findall("<!--(.*?)-->", svg, re.DOTALL)]
    words = dict.fromkeys(text for text in texts if re.search("[^\\W\\d_]", text))
    title = re.search("<title>(.*?)</title>", svg, re.DOTALL)
    label = title[1].strip() if title else escape("; ".join(words)) or str(number)
    label = re.sub(r"\$([^$]+)\$", lambda tex: escape(plain(unescape(tex[1]))), label)
    return plots.inline(svg, f"fig{number}", f"Figure: {label}")


def _formulas(body) -> None:
    """Formulas marked as on Markdown pages: the text of a notebook has them as TeX."""
    for box in body.select(".nb-text, .nb-latex"):
        box.smooth()
        for text in box.find_all(string=formulas.TEX):
            if not text.find_parent(["code", "pre"]):
                marked = BeautifulSoup(formulas.marked(text), "html.parser")
                text.replace_with(marked)


def _headings(body, page) -> None:
    """Permanent links as on other pages, and a table of contents.

    mkdocs-jupyter's own drops inline code from titles and anchors.
    """
    root: list[dict] = []
    open_: list[dict] = []
    for heading in body.find_all(re.compile("^h[1-6]$"), id=True):
        if link := heading.select_one(".anchor-link"):
            link.extract()
        token = {
            "level": int(heading.name[1]),
            "id": heading["id"],
            "name": escape(heading.get_text(), quote=False),
            "children": [],
        }
        if link:
            link["class"], link["title"] = "headerlink", "Permanent link"
            heading.append(link)
        while open_ and open_[-1]["level"] >= token["level"]:
            open_.pop()
        (open_[-1]["children"] if open_ else root).append(token)
        open_.append(token)
    if root and root[0]["level"] == 1:
        number = re.match(r"(\d+)_|", posixpath.basename(page.file.src_uri))[1]
        title = BeautifulSoup(root[0]["name"], "html.parser").get_text()
        page.title = f"{int(number)}. {title}" if number else title
    page.toc = get_toc(root)


def _sections(body) -> None:
    """Headings beside the text below them, not in a box with it: search takes
    what follows such a box for the text of the page.
    """
    for box in body.select(".nb-text"):
        part = box
        for child in list(box.contents):
            if child.name in ("h1", "h2", "h3", "h4", "h5", "h6"):
                part.insert_after(child)
                child["class"] = "nb-text"
                part = body.new_tag("div", attrs={"class": "nb-text"})
                child.insert_after(part)
            elif part is not box:
                part.append(child)
    for box in body.select("div.nb-text"):
        if not box.get_text(strip=True) and not box.find(True):
            box.decompose()


def _answers(body) -> list[str]:
    """Hints and answer below each cell that judges an exercise or a derivation,
    which gets an anchor where its task begins. Returns the exercises.
    """

    def begins(element) -> bool:
        task = element.name == "p" and re.match(r"\d\. ", element.get_text())
        return element.name == "h2" or bool(task)

    found: list[str] = []
    for box in body.select(".nb-code:has(> .highlight)"):
        for name in course.CHECK.findall(box.select_one(".highlight").get_text()):
            if name in found:
                continue
            found.append(name)
            task = box.find_previous(begins)
            (box if task.has_attr("id") else task)["id"] = name
            answer = BeautifulSoup(course.answer(name), "html.parser")
            box.append(answer)
    return [name for name in found if name in EXERCISES]


def _fold(body, stem: str) -> None:
    """What follows the predictions of a cell, up to the next section, goes into a
    part that progress.js folds until they are answered. Such a part may have
    predictions of its own, and so another part.
    """
    for box in reversed(body.select(".nb-predict")):
        asked = [json.loads(form["data-question"]) for form in box("form")]
        names = [question["name"] for question in asked if question["predicted"]]
        rest = [e for e in box.next_siblings if isinstance(e, Tag)]
        rest = list(takewhile(lambda e: e.name not in ("h1", "h2"), rest))
        if not rest:
            continue
        section = box.find_previous("h2")["id"]
        part = _parsed("notebook/fold.html", names=names, stem=stem, section=section)
        part.find("fw-fold").extend(rest)
        box.insert_after(part)


def _drop_facts(body) -> None:
    """What a notebook says of its time and needs: the page's head says it."""
    for part in body.select("p > em"):
        parts = re.split(r"(?<=\.)\s+(?=[A-Z])", part.decode_contents())
        kept = [p for p in parts if not re.match("(Time|Needs|Next):", p)]
        if len(kept) < len(parts) and kept:
            part.clear()
            part.append(BeautifulSoup(" ".join(kept), "html.parser"))
        elif len(kept) < len(parts):
            part.parent.decompose()


def _links(body, page, config, files) -> None:
    ids = {element["id"] for element in body.find_all(id=True)}
    for element in body.select("a[href], img[src]"):
        name = "href" if element.name == "a" else "src"
        url = urlsplit(element[name])
        if url.scheme or url.netloc:
            if name == "src" and url.scheme != "data":
                _warn(page, element[name], "an image from elsewhere")
            continue
        if not url.path:
            if unquote(url.fragment) not in ids:
                _warn(page, element[name], "no such heading on this page")
            continue
        path = posixpath.normpath(posixpath.join(FOLDER, unquote(url.path)))
        fragment = f"#{url.fragment}" if url.fragment else ""
        file = files.get_file_from_path(path.removeprefix("docs/"))
        if not file and not fragment and (uri := page_of(path)):
            file, fragment = files.get_file_from_path(uri[0]), uri[1]
        if not file and (module := re.match(r"fwlab/(\w+)[./]", path)):
            file = files.get_file_from_path(f"api/{module[1]}.md")
        if file:
            element[name] = file.url_relative_to(page.file) + fragment
        elif name == "href" and not path.startswith("..") and (ROOT / path).exists():
            if there := source(config.repo_url, path):
                element[name] = there + fragment
            else:
                element.unwrap()
        else:
            _warn(page, element[name], "no such file")


def _warn(page, target: str, why: str) -> None:
    log.warning("%s links to %r: %s", page.file.src_uri, target, why)


def _head(
    page, config, entry: dict | None, predicts: bool, exercises: list[str]
) -> BeautifulSoup:
    """What follows the title: downloads, and what the reader needs.

    - `predicts`: whether parts of the page are folded.
    - `exercises`: those of the page.
    """
    name = posixpath.basename(page.file.src_uri)
    return _parsed(
        "notebook/head.html",
        name=name,
        colab=colab(config.repo_url, page.file.src_uri),
        wheel=config.extra["wheel"],
        root=posixpath.relpath(".", posixpath.dirname(page.file.dest_uri)),
        predicts=predicts,
        exercises=exercises,
        entry=entry,
    )
