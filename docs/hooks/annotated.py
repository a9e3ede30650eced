"""Puts the versions of an operation side by side.

Every operation gets a page with naive.py and efficient.py; and the mark
`<!-- versions: delta -->` of a page is replaced by these two and kernels.py.

A file becomes rows. Its docstrings and full-line comments are notes, set
as Markdown above the code they belong to; the code keeps its true line
numbers. A comment such as `# Eq. 24` or `# (d1)` and the equation with
that tag link to each other.
"""

import ast
import io
import re
import textwrap
import tokenize
from typing import NamedTuple

from mkdocs.structure.files import File
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
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

MARK = re.compile(r"<!-- versions: (\w+) -->")

DISPLAY = re.compile(r"[ \t]*\$\$.*?\$\$", re.DOTALL)
TAG = re.compile(r"\\tag\{(\w+)\}")
REFERENCE = re.compile(r"\b(?P<word>Eq\. )(?P<number>\w+)|\((?P<own>[a-z]\d+)\)")


class Row(NamedTuple):
    """A note and the lines of code below it; both may be empty."""

    name: str  # of the function or class that begins here
    note: str
    lines: list[int]


def on_files(files, config):
    for operation, title in OPERATIONS.items():
        content = _page(operation, title, config)
        files.append(File.generated(config, _uri(operation), content=content))
    for entry in config.nav:
        for title, value in entry.items():
            if value == "annotated/":
                entry[title] = [_uri(operation) for operation in OPERATIONS]
    return files


def on_page_markdown(markdown, page, config, files):
    return MARK.sub(lambda mark: _versions(mark[1], config), markdown)


def page_of(path: str) -> tuple[str, str] | None:
    """Page and fragment where a file of the repository is shown."""
    match = re.fullmatch(r"fwlab/ops/(\w+)/(\w+)\.py", path)
    if match and match[1] in OPERATIONS and match[2] in KERNELS:
        page = f"kernels/{match[1]}.md" if match[2] == "kernels" else _uri(match[1])
        return page, f"#{match[2]}"
    return None


def _uri(operation: str) -> str:
    return f"annotated/{operation}.md"


def _page(operation: str, title: str, config) -> str:
    gpu = ""
    if (ROOT / "docs" / "kernels" / f"{operation}.md").exists():
        gpu = f" On a GPU there is a third: [its kernels](../kernels/{operation}.md)."
    return (
        "---\nhide: [navigation, toc]\n---\n\n"
        f"# {title}: naive and efficient\n\n"
        "Two ways to compute the same thing; the tests hold them together. Below "
        "an equation stand the lines that compute it, and the number in a comment "
        f"leads back to the equation.{gpu}\n\n"
        f"{_columns(operation, FILES, config)}"
    )


def _versions(operation: str, config) -> str:
    """Three versions: the third beside one of the first two."""
    tabs = "".join(
        f'<label><input type="radio" name="left" id="show-{name}"'
        f"{' checked' * (name == 'efficient')}> {name}</label>"
        for name in FILES
    )
    return (
        f'<fieldset class="tabs"><legend>Beside the kernels</legend>{tabs}</fieldset>'
        f"\n\n{_columns(operation, KERNELS, config)}"
    )


def _columns(operation: str, files: dict[str, str], config) -> str:
    titles = dict(files)
    paths = {name: f"fwlab/ops/{operation}/{name}.py" for name in files}
    if "kernels" in files:
        for name, (title, path) in SHARED.get(operation, {}).items():
            titles[name], paths[name] = title, f"fwlab/ops/{path}"
    texts = {name: (ROOT / path).read_text("utf-8") for name, path in paths.items()}
    tags = set(TAG.findall("".join(texts.values())))
    lines = {name: _highlighted(name, text, tags) for name, text in texts.items()}
    computed = {tag: _lines_of(tag, lines) for tag in tags}
    shown: set[str] = set()
    columns = []
    for name, text in texts.items():
        rows = "\n".join(
            _row(name, row, lines[name], tags, computed, shown) for row in _rows(text)
        )
        columns.append(
            f'<div class="column column-{name}" role="region" tabindex="0" '
            f'aria-label="{paths[name]}" markdown>\n\n'
            f"## {titles[name]} {{#{name}}}\n\n"
            f"[`{paths[name]}`]({source(config, paths[name])})\n{{: .path }}\n\n"
            f"{rows}\n\n</div>\n"
        )
    kind = "annotated three" if "kernels" in files else "annotated"
    return f'<div class="{kind}" markdown>\n\n{"".join(columns)}\n</div>\n'


def _rows(text: str) -> list[Row]:
    """Cut a file into rows."""
    tree, last = ast.parse(text), len(text.splitlines())
    notes: dict[int, tuple[str, str]] = {}  # first line of the code below
    hidden: set[int] = set()
    owner = {  # of a method, or of a function inside a function
        inner: node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
        for inner in node.body
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        note = ast.get_docstring(node)
        if note:
            hidden.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        if isinstance(node, ast.Module):
            notes[1] = ("", note or "")
        else:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            name, outer = node.name, node
            while outer := owner.get(outer):
                name = f"{outer.name}.{name}"
            notes[first] = (name, note or "")
    comments = {
        token.start[0]: re.sub("^#:? ?", "", token.string)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
    }
    for run in _runs(sorted(comments)):
        hidden.update(run)
        note = "\n".join(comments[number] for number in run)
        name, own = notes.get(run[-1] + 1, ("", ""))
        notes[run[-1] + 1] = (name, f"{note}\n\n{own}")
    starts = sorted(notes)
    return [
        Row(*notes[start], [n for n in range(start, stop) if n not in hidden])
        for start, stop in zip(starts, [*starts[1:], last + 1], strict=True)
    ]


def _runs(numbers: list[int]) -> list[list[int]]:
    """Cut rising numbers where one is left out."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _row(
    column: str, row: Row, lines: list[str], tags: set, computed: dict, shown: set
) -> str:
    parts = ['<div class="row" markdown>']
    if row.name:
        fragment = f"{column}-{row.name.replace('.', '-')}"
        parts.append(f"### {row.name} {{#{fragment}}}")
    if row.note.strip():
        note = _note(row.note, tags, computed, shown)
        parts += ['<div class="note" markdown>', note, "</div>"]
    return "\n\n".join([*parts, _blocks(row.lines, lines), "</div>"])


def _note(note: str, tags: set, computed: dict, shown: set) -> str:
    """Markdown of a note, with an anchor and its lines at each equation.

    An equation may be said again in another file: the first has the anchor.
    """
    note = re.sub(r"^#", "###", note, flags=re.MULTILINE)
    out, end = [], 0
    for match in DISPLAY.finditer(note):
        out.append(_link(note[end : match.start()], tags))
        equation, end = textwrap.dedent(match[0]), match.end()
        if match := TAG.search(equation):
            tag = match[1]
            places = f"{computed[tag]}\n{{: .places }}" if computed[tag] else ""
            anchor = "" if tag in shown else f'id="eq-{tag}" '
            shown.add(tag)
            equation = (
                f'<div class="equation" {anchor}data-eq="{tag}" tabindex="-1" '
                f"markdown>\n\n{equation}\n\n{places}\n\n</div>"
            )
        out.append(f"\n\n{equation}\n\n")
    return "".join([*out, _link(note[end:], tags)])


def _link(text: str, tags: set) -> str:
    """Turn the numbers of equations into links to them."""

    def link(match: re.Match) -> str:
        tag = match["number"] or match["own"]
        if tag not in tags:
            return match[0]
        return f'<a class="eq" href="#eq-{tag}">{match[0]}</a>'

    return REFERENCE.sub(link, text)


def _highlighted(column: str, text: str, tags: set) -> list[str]:
    """The lines of a file as HTML, numbered and with links to equations."""
    html = highlight(text, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    out = []
    for number, line in enumerate(html.splitlines(), 1):
        code, mark, comment = line.rpartition('<span class="c1">')
        named = sorted(
            {m["number"] or m["own"] for m in REFERENCE.finditer(comment)} & tags
        )
        if _blank(code):  # a comment of its own line becomes a note
            named = []
        anchor = f"{column}-L{number}"
        out.append(
            f'<span class="line" id="{anchor}" tabindex="-1"'
            + (f' data-eq="{" ".join(named)}"' if named and mark else "")
            + f'><a class="number" href="#{anchor}" tabindex="-1" aria-label="Line {number}" '
            f'data-n="{number}"></a>{code}{mark}'
            f"{_link(comment, tags) if mark else comment}\n</span>"
        )
    return out


def _lines_of(tag: str, lines: dict[str, list[str]]) -> str:
    """Links to the lines whose comment names an equation."""
    places = []
    for column, html in lines.items():
        numbers = [
            number
            for number, line in enumerate(html, 1)
            if re.search(rf'data-eq="[^"]*\b{tag}\b', line)
        ]
        links = ", ".join(f'<a href="#{column}-L{n}">{n}</a>' for n in numbers)
        if links:
            places.append(f"{column} line{'s' * (len(numbers) > 1)} {links}")
    return " · ".join(places)


def _blocks(numbers: list[int], lines: list[str]) -> str:
    """Code of a row; where lines are left out, a new block begins."""
    blocks = []
    for run in _runs(numbers):
        block = [lines[n - 1] for n in run]
        while block and _blank(block[0]):
            block.pop(0)
        while block and _blank(block[-1]):
            block.pop()
        if block:
            blocks.append(f"<pre><code>{''.join(block)}</code></pre>")
    return f'<div class="highlight no-copy">{"".join(blocks)}</div>' if blocks else ""


def _blank(line: str) -> bool:
    return not re.sub("<[^>]*>", "", line).strip()
