"""Insert data on notebooks and exercises from docs/course.toml and fwlab.exercises.

The marks `<!-- course: map -->`, `<!-- course: ways -->`, `<!-- course: class -->`,
`<!-- exercises -->` and `<!-- scoreboard -->` of a page are replaced, and notebooks.py
takes the head and foot of a notebook's page from here.
"""

import re
import tomllib
from collections.abc import Callable

from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from repository import ROOT
from templates import render

from fwlab.exercises import DERIVATIONS, EXERCISES, score
from fwlab.exercises.course.pairs import MEMORIES
from fwlab.exercises.notation import printed

PROGRESS = "scripts/progress.js"
MAP = "<!-- course: map -->"
#: Pattern of a call that checks an exercise or a derivation.
CHECK = re.compile(r'\b(?:check|check_formula|golf)\((?:\w+, )?"?(\w+)')
#: Label and URI pattern of the pages that accompany a notebook, by kind.
COMPANIONS = {
    "figures": ("Figures", "figures/{}.md"),
    "annotated": ("Annotated source", "annotated/{}.md"),
    "kernels": ("GPU kernels", "kernels/{}.md"),
}


def on_page_markdown(markdown, page, config, files):
    for mark, made in MADE.items():
        if mark in markdown:
            markdown = markdown.replace(mark, made())
    return markdown


def on_page_content(html, page, config, files):
    """Insert the course map into the HTML of a page, since Markdown would change it."""
    if MAP not in html:
        return html
    return html.replace(MAP, _map(page, files))


def entry_of(page, files) -> dict:
    """Return the course entry of a notebook's page, with links relative to the page."""
    entry = _course()[_stem(page.file.src_uri)]
    return _linked(entry, files, lambda uri: _url(uri, page, files))


def _table() -> dict:
    return tomllib.loads((ROOT / "docs" / "course.toml").read_text("utf-8"))


def _course() -> dict[str, dict]:
    """Return the course entry of each notebook, by file stem."""
    found = {entry["file"]: entry for entry in _table()["notebook"]}
    for stem, entry in found.items():
        entry["number"] = int(stem.partition("_")[0])
        entry["mark"] = f"{entry['number']}. "
        entry["uri"] = _uri(stem)
    return found


def _stem(uri: str) -> str:
    return uri.rpartition("/")[2].removesuffix(".ipynb")


def _uri(stem: str) -> str:
    return f"notebooks/{stem}.ipynb"


def _url(uri: str, page, files) -> str:
    return files.get_file_from_path(uri).url_relative_to(page.file)


def _title(uri: str, files) -> str:
    """Return the title of a notebook, or the first heading of another page."""
    if uri.endswith(".ipynb"):
        return _course()[_stem(uri)]["title"]
    text = files.get_file_from_path(uri).content_string
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    plain = re.sub(r"<[^>]*>|`|\{.*?\}", "", heading[1])
    return plain.removesuffix(": naive and efficient").strip()


def _linked(entry: dict, files, address: Callable[[str], str]) -> dict:
    """Return a course entry with the titles and URLs of the pages that it names."""

    def links(*uris: str) -> list[dict[str, str]]:
        return [{"title": _title(uri, files), "url": address(uri)} for uri in uris]

    following = entry["next"]
    companions = {
        label: links(*map(pattern.format, entry[kind]))
        for kind, (label, pattern) in COMPANIONS.items()
    }
    return entry | {
        "needs": links(*map(_uri, entry["after"])),
        "companions": {label: found for label, found in companions.items() if found},
        "following": links(following if following.endswith(".md") else _uri(following)),
        "course": address("course.md"),
    }


def _ways() -> list[dict]:
    """Return the reading paths of the course, each with its notebooks and hours."""
    course = _course()
    ways = []
    for way in _table()["way"]:
        stems = way["files"] or course
        entries = [course[stem] for stem in stems]
        hours = sum(entry["read"] for entry in entries) / 60
        ways.append(way | {"entries": entries, "hours": round(2 * hours) / 2})
    return ways


def _scoreboard() -> str:
    """Return the score table in Markdown, with one row per operation in `MEMORIES`."""
    return "\n".join(
        f"| {name} | {first:.3f} | {second:.3f} |"
        for known in MEMORIES.values()
        for name, (first, second) in ((n, score(m)) for n, m in known.items())
    )


# --- The course page ---------------------------------------------------

#: Columns of the course map. Three columns can be read on a phone.
COLUMNS = 3


def _map(page, files) -> str:
    """Draw the course map as HTML, with a line for each prerequisite."""
    course = _course()
    cells = {stem: tuple(entry["cell"]) for stem, entry in course.items()}
    needs = {
        stem: [course[before] for before in entry["after"]]
        for stem, entry in course.items()
        if entry["after"]
    }
    return render(
        "course/map.html",
        columns=COLUMNS,
        rows=1 + max(row for row, _ in cells.values()),
        lines=[
            _line(cells[before["file"]], cells[stem], {*cells.values()})
            for stem, found in needs.items()
            for before in found
        ],
        boxes=[
            entry
            | {"row": cells[stem][0], "column": cells[stem][1]}
            | {"url": _url(entry["uri"], page, files)}
            | {"asks": entry["title"].partition(": ")[2] or entry["title"]}
            for stem, entry in course.items()
        ],
        first=[entry for entry in course.values() if not entry["after"]],
        needs=[(course[stem], found) for stem, found in needs.items()],
    )


def _line(start: tuple, end: tuple, boxes: set) -> list[tuple[float, float]]:
    """Return the corners of a line from one cell to another below it.

    The line connects the centres and avoids boxes in between. A cell is 1 wide and
    1 high, its box slightly smaller.
    """
    (row, column), (to_row, to_column) = start, end
    x, to_x = column + 0.5, to_column + 0.5
    between = range(row + 1, to_row)
    if not any((r, column) in boxes for r in between):
        corners = [(x, to_row), (to_x, to_row)]
    elif not any((r, to_column) in boxes for r in between):
        corners = [(x, row + 1), (to_x, row + 1)]
    else:  # Both columns are blocked, so the line runs between them.
        side = max(column, to_column)
        corners = [(x, row + 1), (side, row + 1), (side, to_row), (to_x, to_row)]
    return [(x, row + 0.5), *corners, (to_x, to_row + 0.5)]


# --- The page of exercises ---------------------------------------------


def _exercises() -> str:
    """Render the table of exercises as Markdown, in the order of the notebooks."""
    course = _course()
    found = [
        {
            "exercise": exercise,
            "entry": course[exercise.notebook],
            "title": re.match(r"\*\*(.+?)\.?\*\*", exercise.task)[1],
        }
        for exercise in EXERCISES.values()
    ]
    return render("course/exercises.md.jinja", exercises=found)


#: Functions that return the Markdown that replaces each of these HTML comments.
MADE = {
    "<!-- course: ways -->": lambda: render("course/ways.md.jinja", ways=_ways()),
    "<!-- course: class -->": lambda: render("course/class.md.jinja", course=_course()),
    "<!-- exercises -->": _exercises,
    "<!-- scoreboard -->": _scoreboard,
}


def answer(name: str) -> str:
    """Return HTML with the folded hints and answer of an exercise or derivation."""
    if name in EXERCISES:
        asked, why = EXERCISES[name], ""
        code = printed(asked)
    else:
        asked = DERIVATIONS[name]
        why = asked.because
        code = "\n".join(f"{a} = {blank.truth}" for a, blank in asked.blanks.items())
    shown = highlight(code, PythonLexer(), HtmlFormatter(wrapcode=True))
    return render("course/answer.html", hints=asked.hints, code=Markup(shown), why=why)
