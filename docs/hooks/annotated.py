"""Makes the pages of annotated source, from docs/templates/annotated.

Every file of fwlab/ops and fwlab/layers, and feature_maps.py, has a page with
notes on the left and code on the right. Every operation has a page with
naive.py beside one of the other versions. The mark `<!-- versions: delta -->`
of a page is replaced by kernels.py beside one of them.

Where versions are side by side, each row of one knows the row of the other
that computes the same equations; scripts/annotated.js keeps the two in line.
"""

import inspect
import json
import re
from typing import Any

import equations
import stepped
from literate import TAG, Source, linked, named, note
from mkdocs.structure.files import File, InclusionLevel
from repository import ROOT, source
from templates import render

from fwlab.ops import TABLE
from fwlab.ops.call import gpu
from fwlab.ops.call.call import Variants


def _title(folder: str) -> str:
    """The first words of what the folder says of itself."""
    words = Source(f"fwlab/ops/{folder}/__init__.py").summary
    words = words.partition(":")[0].rstrip(".").removeprefix("The ")
    return words[0].upper() + words[1:]


#: The folders of fwlab/ops that hold an operation, and the titles of their pages.
OPERATIONS = {
    folder: _title(folder)
    for folder in dict.fromkeys(record.folder for record in TABLE.values())
    if folder != "softmax"
}
VERSIONS = {
    "naive": "Naive: the specification",
    "chunked": "Chunked: the same in matrix form",
    "efficient": "Efficient: the default",
    "kernels": "Triton: the GPU kernels",
}
#: Files outside its own folder that an operation's kernels are built from.
SHARED = {
    "linear": {"tiles": ("What the kernels share", "tiles.py")},
    "delta": {"chunks": ("Triton: the kernels of chunks", "linear/kernels.py")},
    "aft/full": {
        "windows": ("Triton: the kernels of windows", "aft/window/kernels.py")
    },
    "aft/window": {"scan": ("Triton: the running mean", "aft/simple/kernels.py")},
}
#: The folders of operations, and the folders of their families above them.
FOLDERS = dict.fromkeys(
    folder
    for operation in (*OPERATIONS, "softmax")
    for folder in (operation.partition("/")[0], operation)
)
#: The files with a page of their own, in the best order to read them.
TREE = {
    "Feature maps": ["fwlab/feature_maps.py"],
    "Operations": [f"fwlab/ops/{folder}" for folder in FOLDERS],
    "What the operations share": ["fwlab/ops/*.py"],
    "Layers": ["fwlab/layers/*.py"],
}
INDEX, EQUATIONS = "annotated/index.md", "annotated/equations.md"
MARK = re.compile(r"<!-- versions: ([\w/]+) -->")
FILE = re.compile(r"fwlab/ops/([\w/]+)/(\w+)\.py")


def on_files(files, config):
    equations.forget()
    for operation, title in OPERATIONS.items():
        content = _operation(operation, title, config)
        files.append(File.generated(config, _uri(operation), content=content))
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
    for entry in config.nav:
        for title, value in entry.items():
            if value == "annotated/":
                entry[title] = [INDEX, EQUATIONS, *map(_uri, OPERATIONS)]
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
    match = FILE.fullmatch(path)
    if not alone and match and match[1] in OPERATIONS and match[2] in [*VERSIONS][:-1]:
        return _uri(match[1]), f"#{match[2]}"
    return (_uri_of(path), "") if path in _paths() else None


def _paths() -> list[str]:
    """The files that have a page."""
    found = [ROOT / "fwlab" / "feature_maps.py"]
    for folder in ("ops", "layers"):
        found += sorted((ROOT / "fwlab" / folder).rglob("*.py"))
    return [path.relative_to(ROOT).as_posix() for path in found]


def _uri(operation: str) -> str:
    return f"annotated/{operation.replace('/', '-')}.md"


def _uri_of(path: str) -> str:
    # A page __init__.html would be hidden by some hosts.
    path = path.removeprefix("fwlab/").removesuffix(".py")
    return f"annotated/source/{path.replace('__init__', 'init')}.md"


def _kernel_page(operation: str) -> str | None:
    """The page of its kernels: one for all folders of a family."""
    page = f"kernels/{operation.partition('/')[0]}.md"
    return page if (ROOT / "docs" / page).exists() else None


def _operation(operation: str, title: str, config) -> str:
    values = {"title": title, "kernels": _kernel_page(operation)}
    values |= _columns(operation, "naive", config)
    return render("annotated/operation.md.jinja", **values)


def _versions(operation: str, config) -> str:
    """All versions, the kernels beside one of the others."""
    versions = _columns(operation, "kernels", config)
    return render("annotated/versions.md.jinja", **versions)


def versions_of(operation: str) -> dict[str, str]:
    """The file of each version: a folder may take one from another folder."""
    return {
        "kernels" if name == "triton" else name: _file_of(implementation)
        for record in TABLE.values()
        if record.folder == operation
        for name, implementation in record.implementations.items()
    }


def _file_of(implementation: Any) -> str:
    """The file of an entry of a record."""
    if isinstance(implementation, Variants):
        implementation = next(iter(implementation.by_names.values()))
    if isinstance(implementation, gpu.Kernel):
        module = implementation.module
    else:
        module = inspect.getmodule(implementation).__name__
    return f"{module.replace('.', '/')}.py"


def _columns(operation: str, stays: str, config) -> dict:
    """Versions beside each other: `stays` is always there, with one other."""
    files = versions_of(operation)
    titles = {name: title for name, title in VERSIONS.items() if name in files}
    paths = {name: files[name] for name in titles}
    versions = [*titles]
    if "kernels" in titles:
        for name, (title, path) in SHARED.get(operation, {}).items():
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
                    _beside_rows(operation, sources[name], [sources[n] for n in left]),
                    strict=True,
                )
            ],
        }
        for name, path in paths.items()
    ]
    steps = {}
    if stays == "naive" and "chunked" in sources:
        steps = stepped.record(operation, sources["naive"], sources["chunked"])
    return {
        "stays": stays,
        "versions": versions,
        "chosen": next(n for n in versions if n not in ("naive", stays)),
        "columns": columns,
        "runs": [*steps],
        "steps": json.dumps(steps, ensure_ascii=False, separators=(",", ":")),
    }


def _beside_rows(operation: str, file: Source, left: list[Source]) -> list[str]:
    """For each row of a file, the first rows of the functions on the left that
    compute most of the same equations, such as "naive-4". The first row of a
    file is what it says of itself.
    """

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
        return {i: equations.by_steps(operation, tags) for i, tags in found.items()}

    def best(source: Source, tags: set[str]) -> int | None:
        shared = {
            index: len(tags & others) / len(tags | others)
            for index, others in functions(source).items()
            if index and tags & others
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
    match, operation = FILE.fullmatch(path), None
    if match and match[1] in OPERATIONS and match[2] in VERSIONS:
        operation = match[1]
    return render(
        "annotated/file.md.jinja",
        path=path,
        up="../" * (_uri_of(path).count("/") - 1),
        versions=operation and _uri(operation).removeprefix("annotated/"),
        kernels=operation and _kernel_page(operation),
        source=source(config.repo_url, path),
        # Search finds the words of the others in the API, or on the pages
        # with several versions.
        searched=re.fullmatch(r"fwlab/ops/\w+\.py", path),
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
        place = equations.stated().get((paper, tag))
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
        paper | {"name": name, "rows": _stated_and_computed(name, paper["equations"])}
        for name, paper in equations.papers().items()
        if paper["equations"]
    ]
    return render("annotated/equations.md.jinja", papers=papers)


def _stated_and_computed(paper: str, listed: dict[str, str]) -> list[dict]:
    rows, pages = [], _paths()
    for words, tags in _together(listed):
        place = equations.stated().get((paper, tags[0]))
        computed: dict[str, dict] = {}
        for path, line in equations.computed().get((paper, tags[0]), []):
            if path in pages:
                found = computed.setdefault(path, {"uri": _beside(path), "lines": []})
                found["lines"].append(line)
        rows.append(
            {
                "tags": tags,
                "words": re.sub(r" \(Eqs\. [\d-]+\)$", "", words),
                "stated": place in pages and {"path": place, "uri": _beside(place)},
                "computed": computed,
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
        {
            "uri": _uri(name).removeprefix("annotated/"),
            "title": title,
            "kernels": _kernel_page(name),
        }
        for name, title in OPERATIONS.items()
    ]
    tree = {
        title: [
            {"path": path, "uri": _beside(path), "summary": Source(path).summary}
            for pattern in patterns
            for path in _paths()
            if _matches(path, pattern)
        ]
        for title, patterns in TREE.items()
    }
    return render("annotated/index.md.jinja", operations=operations, tree=tree)


def _matches(path: str, pattern: str) -> bool:
    """Whether a file is meant: by its name, its folder, or all of a folder."""
    folder = path.rpartition("/")[0]
    return pattern in (path, folder, f"{folder}/*.py")
