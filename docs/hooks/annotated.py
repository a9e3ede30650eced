"""Makes the pages of annotated source.

Every file of fwlab/ops, of fwlab/layers, and feature_maps.py has a page:
notes on the left, code on the right. Every operation has a page with
naive.py beside efficient.py or kernels.py; and the mark
`<!-- versions: delta -->` of a page is replaced by kernels.py beside one of
the other two.
"""

import re

import equations
from literate import TAG, Source, linked, note
from mkdocs.structure.files import File, InclusionLevel
from repository import ROOT, source

#: Folder of fwlab/ops, and the title of its page: one line per operation.
OPERATIONS = {
    "fwp": "Fast weight programmer of 1991",
    "linear": "Sum rule and gated rule",
    "delta": "Delta rule and gated delta rule",
    "aft": "Attention Free Transformer",
    "feedback": "Feedback memory",
}
FILES = {"naive": "Naive: the specification", "efficient": "Efficient: the default"}
KERNELS = {**FILES, "kernels": "Triton: the GPU kernels"}
#: What the kernels of an operation are built of, besides its own folder.
SHARED = {
    "linear": {"tiles": ("What the kernels share", "tiles.py")},
    "delta": {"chunks": ("Triton: the kernels of chunks", "linear/kernels.py")},
}
#: What has a page of its own, in the order in which it is best read.
TREE = {
    "Feature maps": ["fwlab/feature_maps.py"],
    "Operations": [f"fwlab/ops/{name}" for name in (*OPERATIONS, "softmax")],
    "What the operations share": ["fwlab/ops/*.py"],
    "Layers": ["fwlab/layers/*.py"],
}
INDEX, EQUATIONS = "annotated/index.md", "annotated/equations.md"
VERSIONS = re.compile(r"<!-- versions: (\w+) -->")


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
                # Links lead there; in the menu of every page they would
                # be most of it.
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
    return VERSIONS.sub(lambda mark: _versions(mark[1], config), markdown)


def page_of(path: str) -> tuple[str, str] | None:
    """Page and fragment where a file of the repository is shown."""
    match = re.fullmatch(r"fwlab/ops/(\w+)/(\w+)\.py", path)
    if match and match[1] in OPERATIONS and match[2] in FILES:
        return _uri(match[1]), f"#{match[2]}"
    return (_uri_of(path), "") if path in _paths() else None


def _paths() -> list[str]:
    """The files that have a page."""
    found = [ROOT / "fwlab" / "feature_maps.py"]
    for folder in ("ops", "layers"):
        found += sorted((ROOT / "fwlab" / folder).rglob("*.py"))
    return [path.relative_to(ROOT).as_posix() for path in found]


def _uri(operation: str) -> str:
    return f"annotated/{operation}.md"


def _uri_of(path: str) -> str:
    # A page __init__.html would be hidden by some hosts.
    path = path.removeprefix("fwlab/").removesuffix(".py")
    return f"annotated/source/{path.replace('__init__', 'init')}.md"


def _operation(operation: str, title: str, config) -> str:
    gpu, files, tabs = "", FILES, ""
    if (ROOT / "docs" / "kernels" / f"{operation}.md").exists():
        gpu = (
            " A third version runs on a GPU; why it is fast stands with "
            f"[its kernels](../kernels/{operation}.md)."
        )
        files = KERNELS
        tabs = _tabs("Beside naive", ("efficient", "kernels")) + "\n\n"
    return (
        "---\nhide: [navigation, toc]\n"
        f"description: {title}, naive and memory-efficient PyTorch side by side, "
        "equation by equation.\n---\n\n"
        f"# {title}: naive and efficient\n\n"
        "Two ways to compute the same thing; the tests hold them together. Below "
        "most equations stand the lines that compute them, and the number in a "
        f"comment leads back to the equation.{gpu} "
        "[All files](index.md).\n\n"
        f"{tabs}{_columns(operation, files, 'naive', config)}"
    )


def _versions(operation: str, config) -> str:
    """Three versions: the third beside one of the first two."""
    tabs = _tabs("Beside the kernels", ("efficient", "naive"))
    return f"{tabs}\n\n{_columns(operation, KERNELS, 'kernels', config)}"


def _tabs(legend: str, names: tuple[str, str]) -> str:
    """One of two columns is shown beside the one that stays."""
    tabs = "".join(
        f'<label><input type="radio" name="beside" id="show-{name}"'
        f"{' checked' * (name == names[0])}> {name}</label>"
        for name in names
    )
    return f'<fieldset class="tabs"><legend>{legend}</legend>{tabs}</fieldset>'


def _columns(operation: str, files: dict[str, str], stays: str, config) -> str:
    """Versions beside each other; with three, `stays` is always there."""
    titles = dict(files)
    paths = {name: f"fwlab/ops/{operation}/{name}.py" for name in files}
    if "kernels" in files:
        for name, (title, path) in SHARED.get(operation, {}).items():
            titles[name], paths[name] = title, f"fwlab/ops/{path}"
    sources = {name: Source(path, name) for name, path in paths.items()}
    kind = f"annotated three {stays}" if "kernels" in files else "annotated two"
    rows = _Rows(sources)
    columns = [
        f'<div class="column column-{name}" role="region" tabindex="0" '
        f'aria-label="{paths[name]}" markdown>\n\n'
        f"## {titles[name]} {{#{name}}}\n\n"
        f"{_in_repository(f'`{paths[name]}`', paths[name], config)}\n{{: .path }}\n\n"
        f"{rows.of(name)}\n\n</div>\n"
        for name in sources
    ]
    return f'<div class="{kind}" markdown>\n\n{"".join(columns)}\n</div>\n'


def _file(path: str, config) -> str:
    file = Source(path)
    up = "../" * (_uri_of(path).count("/") - 1)
    # The words of the others are found in the API, or on the pages with
    # several versions.
    shared = re.fullmatch(r"fwlab/ops/\w+\.py", path)
    search = "" if shared else "search:\n  exclude: true\n"
    beside = ""
    match = re.fullmatch(r"fwlab/ops/(\w+)/(\w+)\.py", path)
    if match and match[1] in OPERATIONS and match[2] in KERNELS:
        beside = f" · [naive and efficient side by side]({up}{match[1]}.md)"
        if (ROOT / "docs" / "kernels" / f"{match[1]}.md").exists():
            beside += f" · [with the GPU kernels]({up}../kernels/{match[1]}.md)"
    there = _in_repository("in the repository", path, config)
    there = f" · {there}" if config.repo_url else ""
    return (
        f"---\nhide: [navigation, toc]\n{search}"
        f"title: {path.removeprefix('fwlab/')}\n"
        f'description: "Annotated source of {path}: notes with mathematics beside '
        'the code."\n---\n\n'
        f"# {path.replace('/', '/<wbr>')}\n\n"
        f"[Annotated source]({up}index.md){beside}{there}\n{{: .path }}\n\n"
        '<div class="annotated one" markdown>\n\n'
        f"{_Rows({'': file}, path=path).of('')}\n\n</div>\n"
    )


def _in_repository(text: str, path: str, config) -> str:
    """A text that leads to a file of the repository, if that has an address."""
    url = source(config.repo_url, path)
    return f"[{text}]({url})" if url else text


class _Rows:
    """The rows of files that stand on one page, linked with each other.

    - `path`: of a file that stands alone; its numbers lead to other pages
      where it does not state the equation itself.
    """

    def __init__(self, sources: dict[str, Source], path: str = ""):
        self.sources, self.path = sources, path
        self.tags = set().union(*(file.tags for file in sources.values()))
        self.stated: set[str] = set()

    def of(self, name: str) -> str:
        return "\n".join(self._row(self.sources[name], row) for row in self._of(name))

    def _of(self, name: str):
        return self.sources[name].rows

    def _row(self, file: Source, row) -> str:
        parts = ['<div class="row" markdown>', '<div class="note" markdown>']
        if row.name:
            # Markdown would make __init__ bold, also in the fragment.
            fragment = f"{file.prefix}{row.name.replace('.', '-').replace('__', '')}"
            level = "##" if self.path else "###"
            parts.append(f"{level} `{row.name}` {{#{fragment}}}")
        if row.note.strip():
            level = 2 if self.path else 3
            parts.append(note(row.note, level, self._address, self._equation))
        parts.append("</div>")
        blocks = file.blocks(row.lines, lambda text: linked(text, self._address))
        return "\n\n".join([*parts, blocks, "</div>"])

    def _address(self, tag: str) -> str | None:
        if tag in self.tags:
            return f"#eq-{tag}"
        return self._elsewhere(tag)

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

    def _equation(self, tag: str, formula: str) -> str:
        """An equation with an anchor, and links to the lines that compute it.

        It may be said again in another file: the first has the anchor.
        """
        assert TAG.search(formula)
        anchor = "" if tag in self.stated else f'id="eq-{tag}" '
        self.stated.add(tag)
        places = self._places(tag)
        places = f"{places}\n{{: .places data-search-exclude=1 }}" if places else ""
        return (
            f'<div class="equation" {anchor}data-eq="{tag}" tabindex="-1" markdown>'
            f"\n\n{formula}\n\n{places}\n\n</div>"
        )

    def _places(self, tag: str) -> str:
        places = []
        for name, file in self.sources.items():
            lines = file.computed.get(tag, [])
            links = ", ".join(f'<a href="#{file.anchor(n)}">{n}</a>' for n in lines)
            if links:
                word = f"{name} line" if name else "line"
                places.append(f"{word}{'s' * (len(lines) > 1)} {links}")
        return " · ".join(places)


def _equations() -> str:
    """Every equation of the papers, and where it is."""
    parts = [
        "---\nhide: [navigation]\n"
        "description: The equations of the papers by their numbers, and the lines of "
        "fwlab that compute them.\n---\n\n# Equations of the papers\n\n"
        "By the numbers of the papers, in our words; and where fwlab states and "
        "computes them. A number without a place is one that the notes only mention. "
        "A test holds every reference in the code, the notebooks and these pages "
        "to this list.\n"
    ]
    for name, paper in equations.papers().items():
        if not paper["equations"]:
            continue
        parts.append(
            f"\n## {paper['authors'].split(',')[0]} et al. {paper['year']} {{#{name}}}\n\n"
            f"[{paper['title']}](https://arxiv.org/abs/{paper['arxiv']})\n\n"
            "| Eq. | What it says | Stated | Computed |\n|---|---|---|---|\n"
        )
        for words, tags in _together(paper["equations"]):
            tag, stated = tags[0], ""
            if (place := equations.stated().get((name, tag))) in _paths():
                stated = f"[{_short(place)}]({_link(place, f'eq-{tag}')})"
            lines: dict[str, list[str]] = {}
            for path, line in equations.computed().get((name, tag), []):
                if path in _paths():
                    link = f"[{line}]({_link(path, f'L{line}')})"
                    lines.setdefault(path, []).append(link)
            computed = "<br>".join(
                f"{_short(p)} {', '.join(n)}" for p, n in lines.items()
            )
            anchors = ", ".join(f'<span id="{name}-{t}">{t}</span>' for t in tags)
            words = re.sub(r" \(Eqs\. [\d-]+\)$", "", words)
            parts.append(f"| {anchors} | {words} | {stated} | {computed} |\n")
    return "".join(parts)


def _together(listed: dict[str, str]) -> list[tuple[str, list[str]]]:
    """Neighbours of which the same is said, and that it is."""
    groups: list[tuple[str, list[str]]] = []
    for tag, words in listed.items():
        if groups and groups[-1][0] == words:
            groups[-1][1].append(tag)
        else:
            groups.append((words, [tag]))
    return groups


def _short(path: str) -> str:
    """The name of a file; on a phone it may break after a slash."""
    name = path.removeprefix("fwlab/").removesuffix(".py")
    return f"<code>{name.replace('/', '/<wbr>')}</code>"


def _link(path: str, fragment: str) -> str:
    return f"{_uri_of(path).removeprefix('annotated/')}#{fragment}"


def _index() -> str:
    parts = [
        "---\nhide: [navigation]\n"
        "description: Every file of the operations, the feature maps and the layers, "
        "with notes and mathematics beside the code.\n---\n\n"
        "# Annotated source\n\n"
        "Notes and mathematics on the left, code on the right, made of the files "
        "themselves. The number of an equation leads to the lines that compute it, and "
        "back; a symbol of a formula or a name in the code, clicked, lights up "
        "wherever it is used. There is also a [list of the equations](equations.md).\n\n"
        "## Side by side\n\n"
        "| Operation | Versions beside each other |\n|---|---|\n"
    ]
    for operation, title in OPERATIONS.items():
        versions = f"[naive and efficient]({operation}.md)"
        if (ROOT / "docs" / "kernels" / f"{operation}.md").exists():
            versions += f", [with the GPU kernels](../kernels/{operation}.md)"
        parts.append(f"| {title} | {versions} |\n")
    for title, patterns in TREE.items():
        parts.append(f"\n## {title}\n\n| File | What it is |\n|---|---|\n")
        for pattern in patterns:
            for path in _paths():
                inside = path.rpartition("/")[0]
                folder, _, name = pattern.rpartition("/")
                if (
                    path == pattern
                    or inside == pattern
                    or (name == "*.py" and inside == folder)
                ):
                    uri = _uri_of(path).removeprefix("annotated/")
                    parts.append(f"| [`{path}`]({uri}) | {Source(path).summary} |\n")
    return "".join(parts)
