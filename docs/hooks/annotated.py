"""Make the pages of annotated source, from docs/templates/annotated.

Every rule, and every other operation, has a page with its versions side by side, found
by the forms of `fwlab.ops`. They share the rows of a grid: each function of the
specification begins one, and what computes the same equations is in that row.
A file with formulas that no such page shows has a page of its own, with notes beside
its code.
"""

import ast
import inspect
import json
import posixpath
import re
from bisect import bisect
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path, PurePosixPath
from urllib.parse import urlencode

import equations
from literate import TAG, Row, Source, code, linked, named, note
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, InclusionLevel
from repository import ROOT, source
from templates import render

from fwlab.ops import TABLE

INDEX, EQUATIONS = "annotated/index.md", "annotated/equations.md"
#: The HTML that KaTeX writes for a letter that the site colours.
LETTER = re.compile('(<span class="mord mathnormal)("[^>]*>([kKvVWβ])<)')
TINTS = {"k": "key", "v": "value", "w": "W", "β": "beta"}
#: Letters with another meaning on some pages, by a part of the page's URI.
OTHER = {"/layers/": "w", "aft": "β"}
#: The query string that opens a page's rule in the rule editor, by the page's URI.
STEPS = {
    f"annotated/{rule['page']}.md": urlencode({"rule": rule["text"]})
    for rule in json.loads((ROOT / "docs/figures/rules.json").read_text("utf-8"))
}


class Page:
    """Render a page that shows one file, or several versions side by side.

    - `folder`: the folder of the operation in fwlab/ops.
    - `files`: paths by version, the specification first; "" names a single file.
    """

    def __init__(self, name: str, title: str, folder: str, files: dict[str, str]):
        self.uri, self.title = f"annotated/{name}.md", title
        self.folder, self.files = folder, files

    @property
    def sources(self) -> dict[str, Source]:
        return {v: equations.sources()[path] for v, path in self.files.items()}

    def markdown(self, repo_url: str | None) -> str:
        (first, naive), *others = self.sources.items()
        rows = {v: rows_of(self.folder, naive, file) for v, file in others}
        starts = sorted({1}.union(*rows.values()))
        # A function without a counterpart joins the row of the function before it.
        at = (bisect(starts, index) for index in range(len(naive.functions)))
        rows[first] = [starts[max(found, 1) - 1] for found in at]
        columns = []
        for version, file in self.sources.items():
            parts: dict[int, list[dict]] = {}
            functions = self._functions(version, file)
            for row, function in zip(rows[version], functions, strict=True):
                parts.setdefault(row, []).extend(function)
            ends = [*parts, len(naive.functions)][1:]
            columns.append(
                {
                    "version": version,
                    "file": file,
                    "source": source(repo_url, file.path),
                    "parts": [*zip(parts, ends, parts.values(), strict=True)],
                }
            )
        kernels = f"kernels/{self.folder.partition('/')[0]}.md"
        return render(
            "annotated/page.md.jinja",
            page=self,
            columns=columns,
            kernels=kernels if "kernels" in self.files else None,
            up=posixpath.relpath(".", posixpath.dirname(self.uri)),
        )

    def _functions(self, version: str, file: Source) -> Iterator[list[dict]]:
        """Yield the rows of each function, as notes (Markdown) and code (HTML)."""
        address = partial(self._address, version)
        equation = partial(self._equation, version)
        comment = partial(linked, address=address)
        lines = file.lines(prefix(version), comment, self._defined(version))
        tried = {"loop": STEPS.get(self.uri)} if version == "naive" else {}
        for function in file.functions:
            yield [
                {
                    "name": row.name,
                    "anchor": anchor(version, row.name),
                    "step": tried.get(row.name),
                    "note": note(row.note, address, equation),
                    "code": code(lines, row.lines),
                }
                for row in function
            ]

    def _defined(self, version: str) -> dict[str, str]:
        """Return links to the functions and classes that a file uses, by name."""
        file = self.sources[version]
        imported = {
            name.name: f"{node.module.replace('.', '/')}.py"
            for node in file.tree.body
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        }
        found = {}
        for name, path in imported.items():
            if path in SHOWN and name in [
                r.name for r in equations.sources()[path].rows
            ]:
                page, other = SHOWN[path]
                found[name] = self._link(page.uri, anchor(other, name))
        return found | {row.name: f"#{anchor(version, row.name)}" for row in file.rows}

    def _link(self, uri: str, fragment: str) -> str:
        there = posixpath.relpath(uri, posixpath.dirname(self.uri))
        return f"{there.removesuffix('.md')}.html#{fragment}"

    def _address(self, version: str, tag: str) -> str | None:
        """Return a link to an equation, or None if no page lists it.

        The link stays on this page if possible, else leads to a page that states it.
        """
        if any(tag in file.tags for file in self.sources.values()):
            return f"#{self._anchor(version, tag)}"
        whose = equations.whose(self.files[version], tag)
        place = equations.stated().get((whose, tag))
        if place in SHOWN:
            return self._link(SHOWN[place][0].uri, f"eq-{tag}")
        listed = tag in equations.papers().get(whose, {}).get("equations", {})
        return self._link(EQUATIONS, f"{whose}-{tag}") if listed else None

    def _anchor(self, version: str, tag: str) -> str:
        """Return an HTML id for an equation that is unique on the page."""
        stating = [v for v, file in self.sources.items() if tag in file.tags]
        again = version in stating[1:]
        return f"{prefix(version) if again else ''}eq-{tag}"

    def _equation(self, version: str, tag: str, formula: str) -> str:
        """Render an equation as HTML with an id and links to the lines that compute it.

        If no line of this page computes the equation, the links lead to other pages.
        """
        places = {
            other: {f"#{prefix(other)}L{line}": line for line in file.computed[tag]}
            for other, file in self.sources.items()
            if tag in file.computed
        }
        computed, _ = equations.code()
        number = equations.whose(self.files[version], tag), tag
        for path, line in () if places else computed.get(number, ()):
            if path in SHOWN:
                page, other = SHOWN[path]
                link = self._link(page.uri, f"{prefix(other)}L{line}")
                places.setdefault(f"{page.title}, {other}", {})[link] = line
        return render(
            "annotated/equation.md.jinja",
            tag=tag,
            formula=formula,
            anchor=self._anchor(version, tag),
            places=places,
        )


def prefix(version: str) -> str:
    """Return the prefix of all HTML ids of a version."""
    return f"{version}-" if version else ""


def anchor(version: str, name: str) -> str:
    """Return the HTML id of a function, without underscores that Markdown formats."""
    return prefix(version) + name.replace(".", "-").replace("__", "").rstrip("_")


def rows_of(folder: str, naive: Source, file: Source) -> list[int]:
    """Return the grid row of each function of a version.

    A function shares the row of the specification's function that computes most of the
    same equations. The order is kept: unmatched functions follow their predecessor.
    """
    here = {*naive.tags, *naive.computed, *file.tags, *file.computed}
    theirs = [_tags(folder, naive, function) & here for function in naive.functions]
    chains: dict[int, list[tuple[int, int]]] = {}  # Longest chain per last row.
    for index, function in enumerate(file.functions):
        ours = _tags(folder, file, function) & here
        shared = [len(ours & tags) / len(ours | tags or {0}) for tags in theirs]
        if any(shared):
            row = shared.index(max(shared))
            before = (chain for end, chain in chains.items() if end <= row)
            chains[row] = [*max(before, key=len, default=[]), (index, row)]
    kept, rows = dict(max(chains.values(), key=len, default=[])), [1]
    for index in range(len(file.functions)):
        rows.append(kept.get(index, rows[-1]))
    return rows[1:]


def _tags(folder: str, file: Source, function: list[Row]) -> set[str]:
    """Return the equation tags of a function and of the steps that the tags combine."""
    name, text, _ = function[0]
    if not name or name.lower() in TABLE:
        return set()  # Modules and delegating functions compute no equation.
    lines = {number for row in function for number in row.lines}
    tags = {tag for tag, at in file.computed.items() if lines & {*at}}
    tags.update(tag for row in function for tag in TAG.findall(row.note))
    return equations.by_steps(folder, tags or named(text))


def page_of(path: str) -> tuple[str, str] | None:
    """Return the URI of the page that shows a file, and the URL fragment, or None."""
    if path not in SHOWN:
        return None
    page, version = SHOWN[path]
    return page.uri, f"#{version}" if version else ""


def _path(function) -> str:
    path = Path(inspect.getfile(inspect.unwrap(function)))
    return path.relative_to(ROOT).as_posix()


def _operations() -> dict[str, Page]:
    """Return one page per naive file, with all versions side by side, by page name."""
    pages: dict[str, Page] = {}
    for operation in TABLE.values():
        path = PurePosixPath(_path(operation)).parent
        naive = _path(operation.forms["naive"])
        folder = path.relative_to("fwlab/ops").as_posix()
        if folder == "softmax":
            continue  # PyTorch has the efficient version of softmax attention.
        own = not naive.endswith("naive.py")
        name = PurePosixPath(naive).stem if own else folder.replace("/", "-")
        title = Source(naive if own else f"{path}/__init__.py").summary
        title = re.split("[,:]", title)[0].rstrip(".").removeprefix("The ")
        title = title[0].upper() + title[1:]
        page = pages.setdefault(name, Page(name, title, folder, {}))
        for form, function in operation.forms.items():
            if form == "triton":
                page.files["kernels"] = f"{path}/kernels.py"
            else:
                page.files.setdefault(form, _path(function))
    return pages


def _alone() -> dict[str, Page]:
    """Return a page for each file with formulas that is on no operation's page."""
    pages = {}
    for path in ("feature_maps.py", "ops/**/*.py", "layers/*.py"):
        for found in sorted((ROOT / "fwlab").glob(path)):
            file = Source(found.relative_to(ROOT).as_posix())
            formulas = sum(row.note.count("$") for row in file.rows) > 2
            if (
                (formulas or file.computed)
                and file.path not in SHOWN
                and found.stem != "__init__"
            ):
                name = file.path.removesuffix(".py").replace("fwlab", "source", 1)
                pages[name] = Page(name, file.path, "", {"": file.path})
    return pages


def _shown(pages: dict[str, Page]) -> dict[str, tuple[Page, str]]:
    return {
        path: (page, version)
        for page in reversed(pages.values())
        for version, path in page.files.items()
    }


OPERATIONS = _operations()
#: For each file, by its path: the first page that shows it, and its version there.
SHOWN = _shown(OPERATIONS)
ALONE = _alone()
SHOWN |= _shown(ALONE)
PAGES = OPERATIONS | ALONE


@event_priority(100)  # Run early, so that the redirects plugin finds the files.
def on_files(files, config):
    equations.forget()
    made = {page.uri: page.markdown(config.repo_url) for page in PAGES.values()}
    index = render("annotated/index.md.jinja", operations=OPERATIONS, alone=ALONE)
    made |= {INDEX: index, EQUATIONS: _equations()}
    listed = [INDEX, EQUATIONS, *(page.uri for page in OPERATIONS.values())]
    for uri, text in made.items():
        file = File.generated(config, uri, content=text)
        if uri not in listed:  # The menu would be too long with all pages.
            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    (code,) = (entry["Code"] for entry in config.nav if "Code" in entry)
    code[0] = {"Annotated source": listed}
    return files


def on_page_context(context, page, config, nav):
    """Colour the letters of formulas after KaTeX has written their HTML."""
    uri = page.file.src_uri
    if uri in [page.uri for page in PAGES.values()]:
        other = {letter for part, letter in OTHER.items() if part in uri}

        def tint(found: re.Match) -> str:
            letter = found[3].lower()
            name = "" if letter in other else f" tint-{TINTS[letter]}"
            return f"{found[1]}{name}{found[2]}"

        page.content = LETTER.sub(tint, page.content)


def _equations() -> str:
    """Render the page that lists every equation of the papers and its locations."""
    papers = []
    for name, paper in equations.papers().items():
        listed, whose = paper["equations"], name
        if name == "fan2020":  # The paper numbers no equation: use our own numbers.
            own = equations.listed()["fwlab"]["feedback"]
            listed, whose = {tag: own[tag] for tag in own if tag[0] == "f"}, "feedback"
        if listed:
            rows = _places(name, listed, whose)
            papers.append(paper | {"name": name, "rows": rows})
    return render("annotated/equations.md.jinja", papers=papers)


def _places(paper: str, listed: dict[str, str], whose: str) -> list[dict]:
    """Return a paper's table rows: formulas with notebooks, lines of code and tests.

    Adjacent equations with the same description share a row.

    - `whose`: the paper or folder whose equation numbers the files use.
    """
    shown_by = equations.said_of("shown_by", paper)
    reasons = equations.said_of("no_code", paper)
    computed, described = equations.code()
    rows = []
    for words, group in groupby(listed, key=listed.__getitem__):
        tags = [*group]
        code, notebooks, formulas = {}, {}, {}
        for number in [(whose, tag) for tag in tags]:
            formulas[equations.formulas().get(number)] = number
            for stem, at in equations.in_notebooks().get(number, {}).items():
                notebooks.setdefault(stem, at)
            for path, line in computed.get(number) or described.get(number, ()):
                if path in SHOWN:
                    page, version = SHOWN[path]
                    place = f"{page.uri.partition('/')[2]}#{prefix(version)}L{line}"
                    code.setdefault(path, {})[line] = place
        rows.append(
            {
                "tags": tags,
                "words": re.sub(r" \(Eqs\. [\d-]+\)$", "", words),
                "formulas": [*filter(None, formulas)],
                "notebooks": [*notebooks.items()][:3],
                "code": code,
                "reason": reasons.get(tags[0], ""),
                "tests": dict.fromkeys(shown_by[t] for t in tags if t in shown_by),
            }
        )
    return rows
