"""Find the paper whose equation numbers a file uses, and the files that state them.

docs/equations.toml lists the equations of each paper.
"""

import json
import re
import tomllib
from collections import defaultdict
from functools import cache

from literate import DISPLAY, Source, named
from markdown.extensions.toc import slugify
from repository import ROOT

#: An equation: the paper or folder that numbers it (if known), and the number.
Number = tuple[str | None, str]
#: Places in files, as pairs of path and line number.
Places = list[tuple[str, int]]


@cache
def listed() -> dict:
    return tomllib.loads((ROOT / "docs" / "equations.toml").read_text("utf-8"))


def papers() -> dict[str, dict]:
    """Return the entries of all papers in docs/equations.toml, by name."""
    return {name: part for name, part in listed().items() if "arxiv" in part}


def every(numbers: str) -> list[str]:
    """Expand a range of equation numbers, such as "f3-f5", into a list."""
    letter, low, high = re.fullmatch(
        r"([a-z]?)(\d+)(?:-[a-z]?(\d+))?", numbers
    ).groups()
    return [f"{letter}{n}" for n in range(int(low), int(high or low) + 1)]


def said_of(table: str, paper: str) -> dict[str, str]:
    """Return a paper's entries in a table of equations.toml, by equation number."""
    rows = listed()[table].get(paper, {})
    return {tag: words for numbers, words in rows.items() for tag in every(numbers)}


def paper(path: str) -> str | None:
    """Return the paper whose equation numbers a file uses, or None."""
    counts_by = listed()["counts_by"]
    known = [start for start in counts_by if path.startswith(start)]
    return counts_by[max(known, key=len)] if known else None


def whose(path: str, tag: str) -> str | None:
    """Return the paper, or the folder of fwlab/ops, that defines an equation number."""
    if tag[0].isdigit():
        return listed()["exceptions"].get(path, {}).get(tag) or paper(path)
    having = [family for family, tags in listed()["fwlab"].items() if tag in tags]
    # An equation number may have different meanings in two folders.
    own = [family for family in having if path.startswith(f"fwlab/ops/{family}")]
    alike = [family for family in having if family in path]
    return next(iter(own + alike + having), None)


def by_steps(folder: str, tags: set[str]) -> set[str]:
    """Return the given equations and all equations of single steps that they combine.

    A letter without a number means all of the folder's numbers that begin with it.
    """
    known = listed()["by_steps"].get(folder, {})
    steps = tags.union(*(known.get(tag, ()) for tag in tags))
    own = listed()["fwlab"].get(folder, {})
    return steps | {tag for tag in own if tag[0] in steps}


@cache
def sources() -> dict[str, Source]:
    """Return the parsed files of the package by path, specifications first."""
    paths = [p.relative_to(ROOT).as_posix() for p in (ROOT / "fwlab").rglob("*.py")]
    files = sorted(map(Source, paths), key=lambda f: (not specifies(f), f.path))
    return {file.path: file for file in files}


def specifies(file: Source) -> bool:
    """Return True if a file is a specification: it has a loop over time."""
    return file.path.endswith("naive.py") or "\ndef loop(" in file.text


@cache
def code() -> tuple[dict[Number, Places], dict[Number, Places]]:
    """Return the lines that compute each equation, and functions that mention it."""
    computed, described = defaultdict(list), defaultdict(list)
    library = {p: file for p, file in sources().items() if "/exercises/" not in p}
    for path, file in library.items():
        for tag, lines in file.computed.items():
            computed[whose(path, tag), tag] += [(path, line) for line in lines]
        for row in file.rows:
            for tag in named(row.note) if row.name else ():
                described[whose(path, tag), tag].append((path, row.lines[0]))
    return computed, described


@cache
def sections() -> list[tuple[str, str, str]]:
    """Return notebook stem, HTML anchor and text of each section of the notebooks."""
    found = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        anchor = ""
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            for part in re.split(r"^(?=#+ )", "".join(cell["source"]), flags=re.M):
                if cell["cell_type"] == "markdown" and part.startswith("##"):
                    title = part.partition("\n")[0].lstrip("# ")
                    anchor = "#" + slugify(title, "-")
                found.append((path.stem, anchor, part))
    return found


@cache
def in_notebooks() -> dict[Number, dict[str, str]]:
    """Return the notebooks that contain each equation, and the anchors of sections.

    Notebooks that state an equation come before notebooks that only name it.
    """
    found = defaultdict(dict)
    for tags_of in (_tagged, named):
        for stem, anchor, text in sections():
            for tag in tags_of(text):
                number = whose(f"notebooks/{stem}.ipynb", tag), tag
                found[number].setdefault(stem, anchor)
    return found


def _tagged(text: str) -> list[str]:
    """Return the numbers of the equations that a text states."""
    tags = re.findall(r"\\tag\{([\w-]+)\}", text)
    return [tag for numbers in tags for tag in every(numbers.replace("--", "-"))]


@cache
def formulas() -> dict[Number, str]:
    """Return the TeX of each equation, from a notebook or else from the package."""
    texts = [(f"notebooks/{stem}.ipynb", text) for stem, _, text in sections()]
    texts += [(path, file.text) for path, file in sources().items()]
    found: dict[Number, str] = {}
    for path, text in texts:
        for shown in DISPLAY.findall(text):
            tex = re.sub(r"\\tag\{.*?\}|\s+", " ", shown).strip("$ .,")
            tags = _tagged(shown)
            # A display with many equations shows only their common part.
            for tag in tags if len(tags) < 5 else ():
                found.setdefault((whose(path, tag), tag), tex)
    return found


@cache
def stated() -> dict[Number, str]:
    """Return the path of the first file that states each equation."""
    found: dict[Number, str] = {}
    for path, file in sources().items():
        for tag in file.tags:
            found.setdefault((whose(path, tag), tag), path)
    return found


def forget() -> None:
    """Clear the caches of this module, since files change while the site is served."""
    for known in (listed, sources, code, sections, in_notebooks, formulas, stated):
        known.cache_clear()
