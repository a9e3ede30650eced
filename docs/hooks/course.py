"""Fills in what docs/course.toml says about the notebooks.

The marks `<!-- course: map -->`, `<!-- course: notebooks -->` and
`<!-- exercises -->` of a page are replaced; notebooks.py asks here for the
head and foot of a notebook's page. Of an exercise, the task, signature and
place come from its notebook, and all that is checked from the registry of
fwlab.exercises.
"""

import json
import logging
import re
import textwrap
import tomllib
from html import escape

from markdown.extensions.toc import slugify
from repository import ROOT

log = logging.getLogger("mkdocs.hooks.course")

FILE = "docs/course.toml"
MAP = "<!-- course: map -->"
NOTEBOOKS = "<!-- course: notebooks -->"
EXERCISES = "<!-- exercises -->"
LEVELS = {1: "a line or two", 2: "one idea to find", 3: "cases at the edge"}
#: Kinds of pages that go with a notebook: how they are called, and where
#: they lie.
COMPANIONS = {
    "figures": ("Figures that go with it", "figures/{}.md"),
    "annotated": ("Annotated source", "annotated/{}.md"),
    "kernels": ("GPU kernels", "kernels/{}.md"),
}


def on_files(files, config):
    entries = {entry["file"]: entry for entry in _table()["notebook"]}
    notebooks = [path.stem for path in sorted(ROOT.glob("notebooks/*.ipynb"))]
    for stem in notebooks:
        if stem not in entries:
            log.warning("notebooks/%s.ipynb has no entry in %s", stem, FILE)
    for stem, entry in entries.items():
        named = [stem, *entry["after"]]
        for missing in (name for name in named if name not in notebooks):
            log.warning("%s names notebooks/%s.ipynb: no such file", FILE, missing)
    return files


def on_page_markdown(markdown, page, config, files):
    if NOTEBOOKS in markdown:
        parts = [_part(entry, files) for entry in _course().values()]
        markdown = markdown.replace(NOTEBOOKS, "\n".join(parts))
    if EXERCISES in markdown:
        markdown = markdown.replace(EXERCISES, _exercises())
    return markdown


def on_page_content(html, page, config, files):
    # Here and not in the Markdown, which would change a drawing.
    return html.replace(MAP, _map(page, files)) if MAP in html else html


def head(page, files) -> str:
    """What stands under the title of a notebook's page."""
    entry = _course().get(_stem(page.file.src_uri))
    if entry is None:
        return ""
    needs = [_link(_uri(stem), page, files) for stem in entry["after"]]
    items = {
        "Time": f"{entry['run']} to run on two CPU cores, about {entry['read']} "
        "minutes to work through",
        "Needs": "; ".join([*needs, *map(escape, entry["ideas"])]),
    }
    if entry["exercises"]:
        exercises = _link("exercises.md", page, files, _count(entry["exercises"]))
        items["Exercises"] = f"{exercises}, at the end"
    return _list("nb-facts", items)


def foot(page, files) -> str:
    """What stands at the end of a notebook's page."""
    entry = _course().get(_stem(page.file.src_uri))
    if entry is None:
        return ""
    following = entry["next"]
    items = {
        "Next": _link(
            following if following.endswith(".md") else _uri(following), page, files
        )
    }
    for kind, (label, pattern) in COMPANIONS.items():
        links = [_link(pattern.format(name), page, files) for name in entry[kind]]
        if found := ", ".join(filter(None, links)):
            items[label] = found
    items["All notebooks"] = _link("course.md", page, files)
    return "<hr>" + _list("nb-next", items)


def _table() -> dict:
    with open(ROOT / FILE, "rb") as file:
        return tomllib.load(file)


def _course() -> dict[str, dict]:
    """The entries whose notebook is there: of others, `on_files` warns."""
    found = {
        entry["file"]: entry
        for entry in _table()["notebook"]
        if (ROOT / _uri(entry["file"])).exists()
    }
    for entry in found.values():
        entry["after"] = [stem for stem in entry["after"] if stem in found]
    return found


def _stem(uri: str) -> str:
    return uri.rpartition("/")[2].removesuffix(".ipynb")


def _uri(stem: str) -> str:
    return f"notebooks/{stem}.ipynb"


def _number(entry: dict) -> str:
    return str(int(entry["file"].split("_")[0]))


def _count(exercises: int) -> str:
    return f"{exercises} exercise{'s' * (exercises != 1)}"


def _list(kind: str, items: dict[str, str]) -> str:
    """Not for search, where every notebook would be found for every word."""
    rows = "".join(f"<li><strong>{k}:</strong> {v}</li>" for k, v in items.items())
    return f'<ul class="{kind}" data-search-exclude>{rows}</ul>'


def _title(uri: str, files) -> str | None:
    """The first heading of a page; None, and a warning, if there is none."""
    course = _course()
    if _stem(uri) in course and uri.endswith(".ipynb"):
        return course[_stem(uri)]["title"]
    file = files.get_file_from_path(uri)
    if file is None:
        log.warning("%s names %r: no such page", FILE, uri)
        return None
    heading = re.search(r"^# (.+)$", file.content_string, re.MULTILINE)
    plain = re.sub(r"<[^>]*>|`|\{.*?\}", "", heading[1]) if heading else uri
    return plain.removesuffix(": naive and efficient").strip()


def _link(uri: str, page, files, text: str | None = None) -> str:
    """In HTML; nothing where there is no such page."""
    title = _title(uri, files)
    if title is None:
        return ""
    url = files.get_file_from_path(uri).url_relative_to(page.file)
    return f'<a href="{escape(url)}">{escape(text or title)}</a>'


# --- The course page ---------------------------------------------------


def _part(entry: dict, files) -> str:
    """A notebook's section of the course page, in Markdown."""
    course = _course()
    needs = [f"[{course[s]['title']}]({_uri(s)})" for s in entry["after"]]
    items = [
        f"**Time:** {entry['run']} to run on two CPU cores, about {entry['read']} "
        "minutes to work through.",
        f"**Needs:** {'; '.join([*needs, *entry['ideas']])}.",
        f"**Afterwards you can:** {entry['can'][0].lower()}{entry['can'][1:]}",
    ]
    names = [
        f"[`{name}`](exercises.md#{name})"
        for name, place in _places().items()
        if place["file"] == entry["file"]
    ]
    if len(names) != entry["exercises"]:
        log.warning(
            "%s counts %d exercises in %s: there are %d",
            FILE,
            entry["exercises"],
            entry["file"],
            len(names),
        )
    if names:
        items.append(f"**Exercises:** {', '.join(names)}.")
    for kind, (label, pattern) in COMPANIONS.items():
        uris = [pattern.format(name) for name in entry[kind]]
        links = [f"[{t}]({u})" for u in uris if (t := _title(u, files))]
        if links:
            items.append(f"**{label}:** {', '.join(links)}.")
    listed = "\n".join(f"- {item}" for item in items)
    title = f"[{entry['title']}]({_uri(entry['file'])})"
    return (
        f"### {_number(entry)}. {title} {{#{entry['file']}}}\n\n"
        f"{entry['about']}\n\n{listed}\n"
    )


WIDTH, HEIGHT, GAP_X, GAP_Y = 118, 66, 10, 34


def _map(page, files) -> str:
    """Which notebook builds on which: a row for each distance from the
    first, an arrow from each notebook to those that build on it.
    """
    course = _course()
    rows: dict[str, int] = {}
    for stem, entry in course.items():  # in the order of the course
        rows[stem] = 1 + max((rows[s] for s in entry["after"]), default=-1)
    by_row = [
        [s for s in course if rows[s] == r] for r in range(max(rows.values()) + 1)
    ]
    places: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(by_row):
        for column, stem in enumerate(row):
            # Alone below its only teacher, it stands straight below it.
            x = column * (WIDTH + GAP_X) + 1
            above = course[stem]["after"]
            if len(row) == 1 and above:
                x = places[above[0]][0]
            places[stem] = (x, number * (HEIGHT + GAP_Y) + 1)
    width = max(x for x, _ in places.values()) + WIDTH + 1
    height = max(y for _, y in places.values()) + HEIGHT + 1
    arrows = "".join(
        _arrow(places[before], places[stem])
        for stem, entry in course.items()
        for before in entry["after"]
    )
    boxes = "".join(
        _box(entry, *places[stem], page, files) for stem, entry in course.items()
    )
    words = "; ".join(
        f"{_number(e)} builds on {' and '.join(_number(course[s]) for s in e['after'])}"
        for e in course.values()
        if e["after"]
    )
    first = ", ".join(_number(e) for e in course.values() if not e["after"])
    return (
        f'<svg class="course-map" role="group" viewBox="0 0 {width:g} {height:g}" '
        f'aria-label="Map of the course: which notebook builds on which" '
        f'style="display:block;margin:1rem 0;max-width:min(100%,{width * 1.3:g}px);'
        'width:100%;height:auto;overflow:visible" font-size="13" '
        f'stroke-linejoin="round">{arrows}{boxes}</svg>'
        f"<p>In words: start with {first}; {words}.</p>"
    )


def _box(entry: dict, x: float, y: float, page, files) -> str:
    url = files.get_file_from_path(_uri(entry["file"])).url_relative_to(page.file)
    lines = textwrap.wrap(f"{_number(entry)}. {entry['short']}", 15)
    lines.append(f"about {entry['read']} min")
    top = y + HEIGHT / 2 - 9 * (len(lines) - 1) + 4.5
    text = "".join(
        f'<text x="{x + WIDTH / 2:g}" y="{top + 18 * i:g}" text-anchor="middle" '
        f'fill="currentColor" font-weight="{600 if i < len(lines) - 1 else 400}">'
        f"{escape(line)}</text>"
        for i, line in enumerate(lines)
    )
    return (
        f'<a href="{escape(url)}"><rect x="{x:g}" y="{y:g}" width="{WIDTH}" '
        f'height="{HEIGHT}" rx="5" fill="var(--md-default-bg-color)" '
        f'stroke="currentColor"/>{text}</a>'
    )


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    x, y = start[0] + WIDTH / 2, start[1] + HEIGHT
    to_x, to_y = end[0] + WIDTH / 2, end[1] - 2
    middle = y + GAP_Y / 2 - 2
    return (
        f'<path d="M{x:g} {y:g}V{middle:g}H{to_x:g}V{to_y:g}'
        f'm-4 -6l4 6l4 -6" fill="none" stroke="currentColor" stroke-width="1.3"/>'
    )


# --- The page of exercises ---------------------------------------------


def _exercises() -> str:
    from fwlab.exercises import EXERCISES

    levels, places, course = _table()["exercises"], _places(), _course()
    for name in sorted(levels.keys() - EXERCISES.keys()):
        log.warning("%s knows how hard %s is: no such exercise", FILE, name)
    parts = []
    for name, exercise in EXERCISES.items():
        if name not in levels:
            log.warning("%s does not say how hard the exercise %s is", FILE, name)
            continue
        if name not in places:
            log.warning("no notebook has a cell that checks the exercise %s", name)
            continue
        place, level = places[name], levels[name]
        if place["file"] not in course:
            continue  # on_files has warned of it
        entry = course[place["file"]]
        lines = "\n".join(f"1. {sentence(p)}" for p in exercise.properties)
        section = f"{_uri(place['file'])}#{slugify(place['section'], '-')}"
        parts.append(
            f"### `{name}` {{#{name}}}\n\n"
            f"{place['task']}\n\n"
            f"```python\n{place['signature']}\n```\n\n"
            f"- **Notebook:** {_number(entry)}, [{entry['title']}]({_uri(entry['file'])}), "
            f"section [{place['section']}]({section}).\n"
            f"- **Difficulty:** {level} of {max(LEVELS)}, {LEVELS[level]}.\n"
            f"- **Hints:** {len(exercise.hints)}.\n\n"
            f"Checked in this order. Your function\n\n{lines}\n"
        )
    return "\n".join(parts)


def sentence(holds) -> str:
    """What `check` prints for a property, in Markdown."""
    text = " ".join((holds.__doc__ or holds.__name__).split())
    return re.sub(r"([\[\]_*])", r"\\\1", text)


def _places() -> dict[str, dict[str, str]]:
    """Where the notebooks ask for each exercise: file, section, task and
    signature. The task is the text above the cell, from its number on.
    """
    places: dict[str, dict[str, str]] = {}
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        section = text = ""
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                text = source
                section = ([section, *re.findall(r"^## (.+)$", source, re.M)])[-1]
            elif check := re.search(r"\bcheck\((\w+)", source):
                name = check[1]
                if name in places:
                    continue
                asked = re.search(r"^\*\*\d+\. (.*)", text, re.DOTALL | re.MULTILINE)
                signature = re.search(rf"^def {name}\(.*\):", source, re.MULTILINE)
                places[name] = {
                    "file": path.stem,
                    "section": section,
                    "task": f"**{asked[1].strip()}" if asked else "",
                    "signature": f"{signature[0]} ..." if signature else name,
                }
    return places
