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
    """The equations of single steps that these compute, and those themselves."""
    known = listed()["by_steps"].get(folder, {})
    return tags.union(*(known.get(tag, ()) for tag in tags))


@cache
def sources() -> dict[str, Source]:
    """The files of the package, each specification before its other forms."""
    paths = [p.relative_to(ROOT).as_posix() for p in (ROOT / "fwlab").rglob("*.py")]
    paths.sort(key=lambda path: (not path.endswith("/naive.py"), path))
    return {path: Source(path) for path in paths}


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

    Of our own numbers, only those with a single meaning.
    """
    found: dict[tuple[str | None, str], str] = {}
    twice = set()
    for path, file in sources().items():
        for tag in file.tags:
            first = found.setdefault((paper(path), tag), path)
            if not tag[0].isdigit() and Path(first).parent != Path(path).parent:
                twice.add((paper(path), tag))
    return {number: path for number, path in found.items() if number not in twice}


def forget() -> None:
    """Read everything again: files change while the site is served."""
    for known in (listed, sources, computed, stated):
        known.cache_clear()
