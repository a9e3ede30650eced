"""Which paper's equation numbers a file uses, and where each is stated.

docs/equations.toml lists the equations of each paper.
"""

import tomllib
from functools import cache
from pathlib import Path

from literate import Source
from repository import ROOT

LIST = ROOT / "docs" / "equations.toml"


@cache
def listed() -> dict:
    return tomllib.loads(LIST.read_text("utf-8"))


def papers() -> dict[str, dict]:
    """The papers by their names, each with `title`, `equations` and so on."""
    return {name: part for name, part in listed().items() if "arxiv" in part}


def paper(path: str) -> str | None:
    """The paper whose numbers a file uses: that of its longest known parent."""
    counts_by = listed()["counts_by"]
    known = [start for start in counts_by if path.startswith(start)]
    return counts_by[max(known, key=len)] if known else None


def by_steps(folder: str, tags: set[str]) -> set[str]:
    """The equations of single steps that these compute, and those themselves.

    A letter alone means all of the folder's own numbers that begin with it.
    """
    known = listed()["by_steps"].get(folder, {})
    steps = tags.union(*(known.get(tag, ()) for tag in tags))
    own = listed()["fwlab"].get(folder, {})
    return steps | {tag for tag in own if tag[0] in steps}


def family(path: str) -> str:
    """The folder of fwlab/ops with numbers of its own that has a file, or ""."""
    folder = path.removeprefix("fwlab/ops/").partition("/")[0]
    return folder if folder in listed()["fwlab"] else ""


@cache
def sources() -> dict[str, Source]:
    """The files of the package, each specification before its other forms."""
    paths = [p.relative_to(ROOT).as_posix() for p in (ROOT / "fwlab").rglob("*.py")]
    paths.sort(key=lambda path: (not specifies(path), path))
    return {path: Source(path) for path in paths}


def specifies(path: str) -> bool:
    """Whether a file is a specification: a page of a rule, or naive.py."""
    parts = Path(path).parts
    return parts[-1] == "naive.py" or "rules" in parts[:-1]


@cache
def computed() -> dict[tuple[str | None, str], list[tuple[str, int]]]:
    """Paper and number of an equation, and the lines that compute it."""
    found: dict[tuple[str | None, str], list[tuple[str, int]]] = {}
    for path, file in sources().items():
        for tag, lines in file.computed.items():
            if tag not in listed()["exceptions"].get(path, {}):
                places = found.setdefault((paper(path), tag), [])
                places += [(path, line) for line in lines]
    return found


@cache
def stated() -> dict[tuple[str | None, str], str]:
    """Paper and number of an equation, and the file that states it first.

    Of our own numbers, by the folder in place of the paper; and by the paper
    those with a single meaning.
    """
    found: dict[tuple[str | None, str], str] = {}
    twice = set()
    for path, file in sources().items():
        for tag in file.tags:
            first = found.setdefault((paper(path), tag), path)
            if not tag[0].isdigit():
                found.setdefault((family(path), tag), path)
                if family(first) != family(path):
                    twice.add((paper(path), tag))
    return {number: path for number, path in found.items() if number not in twice}


def stated_for(path: str, tag: str) -> str | None:
    """The file that states what a file means by a number."""
    by_folder = stated().get((family(path), tag))
    return by_folder or stated().get((paper(path), tag))


def forget() -> None:
    """Read everything again: files change while the site is served."""
    for known in (listed, sources, computed, stated):
        known.cache_clear()
