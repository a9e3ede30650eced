"""Makes the pages of annotated source, from docs/templates/annotated.

Every file of fwlab/ops and fwlab/layers, and feature_maps.py, has a page with
notes on the left and code on the right. Every rule, and every other operation,
has a page with its specification, the file of its loop, beside one of the other
versions: they come from the forms of `fwlab.ops`. The mark
`<!-- versions: delta -->` of a page is replaced by kernels.py beside one of
them.

Where versions are side by side, each row of one knows the row of the other
that computes the same equations; scripts/annotated.js keeps the two in line.
"""

import inspect
import re
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import equations
from literate import TAG, Source, linked, named, note
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, InclusionLevel
from repository import ROOT, source
from templates import render

from fwlab.ops import TABLE

VERSIONS = {
    "naive": "Naive: the specification",
    "chunked": "Chunked: the same in matrix form",
    "efficient": "Efficient: the default",
    "kernels": "Triton: the GPU kernels",
}
#: Other files that kernels are built from.
SHARED = {
    "linear": {"tiles": ("What the kernels share", "triton_tiles.py")},
    "delta": {"chunks": ("Triton: the kernels of chunks", "linear/kernels.py")},
    "aft/full": {
        "windows": ("Triton: the kernels of windows", "aft/window/kernels.py")
    },
    "aft/window": {"scan": ("Triton: the running mean", "aft/simple/kernels.py")},
}


#: Folders in which each rule has a file, which is its specification, too.
RECURRENCES = "linear", "delta"


class Versions(NamedTuple):
    """A page with several versions side by side.

    - `title`: the first words of what its specification says of itself.
    - `folder`: of its recurrence, in fwlab/ops.
    - `operations`: what the specification computes.
    - `files`: the file of each version, from the specification on.
    """

    title: str
    folder: str
    operations: list[Any]
    files: dict[str, str]


def _title(path: str) -> str:
    words = re.split("[,:]", Source(path).summary)[0]
    words = words.rstrip(".").removeprefix("The ")
    return words[0].upper() + words[1:]


def _folder_of(operation: Any) -> str:
    """The folder in fwlab/ops of the file of an operation."""
    path = inspect.getfile(inspect.unwrap(operation))
    return PurePosixPath(path).parent.relative_to(ROOT / "fwlab" / "ops").as_posix()


def _file_of(operation: Any, version: str) -> str:
    """The file of a form of an operation."""
    if version == "triton":
        return f"fwlab/ops/{_folder_of(operation)}/kernels.py"
    form = inspect.unwrap(operation.forms[version])
    return PurePosixPath(inspect.getfile(form)).relative_to(ROOT).as_posix()


def _pages() -> dict[str, Versions]:
    """All pages of versions, by name: one for each file of a loop."""
    pages: dict[str, Versions] = {}
    for operation in TABLE.values():
        folder = _folder_of(operation)
        if folder == "softmax":
            continue  # its efficient version is PyTorch's
        naive, own = _file_of(operation, "naive"), folder in RECURRENCES
        name = PurePosixPath(naive).stem if own else folder.replace("/", "-")
        title = _title(naive if own else f"fwlab/ops/{folder}/__init__.py")
        page = pages.setdefault(name, Versions(title, folder, [], {}))
        page.operations.append(operation)
        for form in operation.forms:
            version = "kernels" if form == "triton" else form
            page.files.setdefault(version, _file_of(operation, form))
    return pages


PAGES = _pages()
#: The files of versions, and the first page that shows each.
SHOWN = {
    path: (name, version)
    for name, page in reversed(PAGES.items())
    for version, path in page.files.items()
}
#: The folders of recurrences, after those of their families.
FOLDERS = dict.fromkeys(
    part
    for folder in (*(page.folder for page in PAGES.values()), "softmax")
    for part in (folder.partition("/")[0], folder)
)
#: The files with a page of their own, in the best order to read them.
TREE = {
    "Feature maps": ["fwlab/feature_maps.py"],
    "Operations": [f"fwlab/ops/{folder}" for folder in FOLDERS],
    "What the operations share": ["fwlab/ops"],
    "Layers": ["fwlab/layers"],
}
INDEX, EQUATIONS = "annotated/index.md", "annotated/equations.md"
MARK = re.compile(r"<!-- versions: ([\w-]+) -->")


@event_priority(100)  # redirects must find the files
def on_files(files, config):
    equations.forget()
    for name in PAGES:
        files.append(File.generated(config, _uri(name), content=_side(name, config)))
    for path in _paths():
        files.append(
            File.generated(
                config,
                _uri_of(path),
                content=_file(path, config),
                # Pages link to them; they would fill the menu.
                inclusion=InclusionLevel.NOT_IN_NAV,
            )
        )
    files.append(File.generated(config, INDEX, content=_index()))
    files.append(File.generated(config, EQUATIONS, content=_equations()))
    (code,) = (entry["Code"] for entry in config.nav if "Code" in entry)
    code[0] = {"Annotated source": [INDEX, EQUATIONS, *map(_uri, PAGES)]}
    return files


def on_page_markdown(markdown, page, config, files):
    markdown = MARK.sub(lambda mark: _versions(mark[1], config), markdown)
    if '<div class="annotated' in markdown:
        page.meta.setdefault("scripts", []).append("scripts/annotated.js")
        page.meta.setdefault("styles", []).append("styles/annotated.css")
    return markdown


def page_of(path: str, alone: bool = False) -> tuple[str, str] | None:
    """Page and fragment where a file of the repository is shown.

    - `alone`: the page of this file, not one of several versions.
    """
    name, version = SHOWN.get(path, ("", "kernels"))
    if not alone and version != "kernels":
        return _uri(name), f"#{version}"
    return (_uri_of(path), "") if path in _paths() else None


def _paths() -> list[str]:
    """The files that have a page."""
    found = [ROOT / "fwlab" / "feature_maps.py"]
    for folder in ("ops", "layers"):
        found += sorted((ROOT / "fwlab" / folder).rglob("*.py"))
    return [path.relative_to(ROOT).as_posix() for path in found]


def _uri(name: str) -> str:
    return f"annotated/{name}.md"


def _uri_of(path: str) -> str:
    # A page __init__.html would be hidden by some hosts.
    path = path.removeprefix("fwlab/").removesuffix(".py")
    return f"annotated/source/{path.replace('__init__', 'init')}.md"


def _kernel_page(name: str) -> str | None:
    """The page of its kernels: one for all folders of a family."""
    folder = PAGES[name].folder.partition("/")[0]
    page = f"kernels/{folder}.md"
    here = "kernels" in PAGES[name].files and (ROOT / "docs" / page).exists()
    return page if here else None


def _side(name: str, config) -> str:
    values = {"title": PAGES[name].title, "kernels": _kernel_page(name)}
    values |= _columns(name, "naive", config)
    return render("annotated/operation.md.jinja", **values)


def _versions(name: str, config) -> str:
    """All versions, the kernels beside one of the others."""
    return render("annotated/versions.md.jinja", **_columns(name, "kernels", config))


def _columns(page: str, stays: str, config) -> dict:
    """Versions beside each other: `stays` is always there, with one other."""
    files, folder = PAGES[page].files, PAGES[page].folder
    titles = {name: title for name, title in VERSIONS.items() if name in files}
    paths = {name: files[name] for name in titles}
    versions = [*titles]
    if "kernels" in titles:
        for name, (title, path) in SHARED.get(folder, {}).items():
            titles[name], paths[name] = title, f"fwlab/ops/{path}"
    sources = {name: Source(path, name) for name, path in paths.items()}
    rows = _Rows(sources)
    version = {name: name if name in VERSIONS else "kernels" for name in paths}
    # On the left is what scrolls by itself, and follows the page on the right.
    left = [name for name in versions if (name == stays) == (stays == "naive")]
    columns = [
        {
            "name": name,
            "version": version[name],
            "left": name in left,
            "title": titles[name],
            "path": path,
            "source": source(config.repo_url, path),
            "rows": [
                row | {"beside": name not in left and beside}
                for row, beside in zip(
                    rows.of(name),
                    _beside_rows(folder, sources[name], [sources[n] for n in left]),
                    strict=True,
                )
            ],
        }
        for name, path in paths.items()
    ]
    chosen = next(name for name in versions if name not in ("naive", stays))
    return {
        "stays": stays,
        "versions": versions,
        "chosen": chosen,
        "columns": columns,
    }


def _beside_rows(folder: str, file: Source, left: list[Source]) -> list[str]:
    """For each row of a file, the first rows of the functions on the left that
    compute most of the same equations, such as "naive-4". The first row of a
    file is what it says of itself.
    """

    # What a chunk computes is many rules' equations.
    here = set().union(
        file.tags, file.computed, *(s.tags | {*s.computed} for s in left)
    )

    def functions(source: Source) -> dict[int, set[str]]:
        """The index of the first row of each function, and its equations."""
        found: dict[int, set[str]] = {}
        for index, row in enumerate(source.rows):
            if row.name or not index:
                first = index
            lines = {*row.lines}
            tags = {tag for tag, at in source.computed.items() if lines & {*at}}
            found.setdefault(first, set()).update(tags, TAG.findall(row.note))
        for index, tags in found.items():
            if not tags:
                tags.update(named(source.rows[index].note))
        return {i: equations.by_steps(folder, tags) & here for i, tags in found.items()}

    def best(source: Source, tags: set[str]) -> int | None:
        shared = {
            index: len(tags & others) / len(tags | others)
            for index, others in functions(source).items()
            if index
            and tags & others
            # The public function passes its arguments on.
            and source.rows[index].name.lower() not in TABLE
        }
        return max(shared, key=shared.__getitem__) if shared else None

    pairs = {
        index: " ".join(
            f"{s.prefix}{i}"
            for s in left
            if (i := best(s, tags) if index else 0) is not None
        )
        for index, tags in functions(file).items()
    }
    return [pairs.get(index, "") for index in range(len(file.rows))]


def _file(path: str, config) -> str:
    name = SHOWN.get(path, (None,))[0]
    return render(
        "annotated/file.md.jinja",
        path=path,
        up="../" * (_uri_of(path).count("/") - 1),
        versions=name and _uri(name).removeprefix("annotated/"),
        kernels=name and _kernel_page(name),
        source=source(config.repo_url, path),
        rows=_Rows({"": Source(path)}, path=path).of(""),
    )


class _Rows:
    """The rows of files that share a page, linked with each other.

    - `path`: of a file with a page of its own; its numbers link to other
      pages where it does not state the equation itself.
    """

    def __init__(self, sources: dict[str, Source], path: str = ""):
        self.sources, self.path = sources, path
        #: The first file that states each equation.
        self.first: dict[str, Source] = {}
        for file in sources.values():
            for tag in file.tags:
                self.first.setdefault(tag, file)

    def of(self, name: str) -> list[dict[str, str]]:
        return [self._row(self.sources[name], row) for row in self.sources[name].rows]

    def _row(self, file: Source, row) -> dict[str, str]:
        level = 2 if self.path else 3

        def address(tag: str) -> str | None:
            return self._address(file, tag)

        def equation(tag: str, formula: str) -> str:
            return self._equation(file, tag, formula)

        return {
            "name": row.name,
            # Markdown would make __init__ bold, and a_ a mark, also in here.
            "fragment": file.prefix
            + row.name.replace(".", "-").replace("__", "").rstrip("_"),
            "note": note(row.note, level, address, equation),
            "code": file.blocks(row.lines, lambda text: linked(text, address)),
        }

    def _address(self, file: Source, tag: str) -> str | None:
        """Of an equation: best in the same file, which is in view."""
        if tag in self.first:
            return f"#{self._anchor(file, tag)}"
        return self._elsewhere(tag)

    def _anchor(self, file: Source, tag: str) -> str:
        repeated = tag in file.tags and self.first[tag] is not file
        return f"{file.prefix if repeated else ''}eq-{tag}"

    def _elsewhere(self, tag: str) -> str | None:
        """An equation that another page states, or at least lists."""
        path = next(iter(self.sources.values())).path
        paper = equations.paper(path)
        if tag in equations.listed()["exceptions"].get(path, {}):
            return None  # another paper's
        up = "../" * _uri_of(path).count("/") if self.path else "../"
        place = equations.stated_for(path, tag)
        if place in _paths():
            return f"{up}{_uri_of(place).removesuffix('.md')}.html#eq-{tag}"
        if tag in equations.papers().get(paper, {}).get("equations", {}):
            return f"{up}annotated/equations.html#{paper}-{tag}"
        return None

    def _equation(self, file: Source, tag: str, formula: str) -> str:
        """An equation with an anchor, and links to the lines that compute it."""
        anchor = self._anchor(file, tag)
        places = {
            name: {other.anchor(line): line for line in other.computed[tag]}
            for name, other in self.sources.items()
            if tag in other.computed
        }
        return render(
            "annotated/equation.md.jinja",
            tag=tag,
            formula=formula,
            anchor=anchor,
            places=places,
        )


def _equations() -> str:
    """Every equation of the papers, and where it is."""
    papers = [
        paper | {"name": name, "rows": _places(name, paper["equations"])}
        for name, paper in equations.papers().items()
        if paper["equations"]
    ]
    # Fan et al. have no numbers: those of the operation stand for them.
    own = equations.listed()["fwlab"]["feedback"]
    own = {tag: words for tag, words in own.items() if tag[0] == "f"}
    fan = equations.papers()["fan2020"]
    papers.append(fan | {"name": "fan2020", "rows": _places("fwlab", own, "fan2020")})
    return render("annotated/equations.md.jinja", papers=papers)


def _places(whose: str, listed: dict[str, str], paper: str = "") -> list[dict]:
    """The rows of a paper: the formula of each equation, and in which notebooks,
    lines and tests it is.

    - `whose`: numbers they are, where files name them.
    """
    rows, pages = [], _paths()
    shown_by = equations.said_of("shown_by", paper or whose)
    reasons = equations.said_of("no_code", paper or whose)
    for words, tags in _together(listed):
        lines, notebooks, tests, formulas = {}, {}, {}, {}
        for places in (equations.computed(), equations.described()):
            for tag in tags if not lines else ():
                for path, line in places.get((whose, tag), []):
                    if path in pages:
                        lines.setdefault(path, {}).setdefault(line)
        for tag in tags:
            for stem, at in equations.in_notebooks().get((whose, tag), {}).items():
                notebooks.setdefault(stem, at)
            formulas |= dict.fromkeys([equations.formulas().get((whose, tag), "")])
            tests |= dict.fromkeys([shown_by[tag]] if tag in shown_by else [])
        rows.append(
            {
                "tags": tags,
                "words": re.sub(r" \(Eqs\. [\d-]+\)$", "", words),
                # In a table of Markdown, | begins a cell.
                "formulas": [f.replace("|", r"\vert ") for f in formulas if f],
                "notebooks": [*notebooks.items()][:3],
                "code": {
                    path: (_beside(path), [*at][:4]) for path, at in lines.items()
                },
                "reason": reasons.get(tags[0], ""),
                "tests": [test.split() for test in tests],
            }
        )
    return rows


def _together(listed: dict[str, str]) -> list[tuple[str, list[str]]]:
    """Neighbours of which the same is said, and that it is."""
    groups: list[tuple[str, list[str]]] = []
    for tag, words in listed.items():
        if groups and groups[-1][0] == words:
            groups[-1][1].append(tag)
        else:
            groups.append((words, [tag]))
    return groups


def _beside(path: str) -> str:
    """The page of a file, for a page of the folder annotated/."""
    return _uri_of(path).removeprefix("annotated/")


def _index() -> str:
    operations = [
        {"uri": f"{name}.md", "title": page.title, "kernels": _kernel_page(name)}
        for name, page in PAGES.items()
    ]
    tree = {
        title: [
            {"path": path, "uri": _beside(path), "summary": Source(path).summary}
            for pattern in patterns
            for path in _paths()
            if pattern in (path, path.rpartition("/")[0])
        ]
        for title, patterns in TREE.items()
    }
    return render("annotated/index.md.jinja", operations=operations, tree=tree)
