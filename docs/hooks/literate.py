"""Cuts a Python file into rows of notes and code.

Docstrings and full-line comments become notes, set as Markdown; the code
keeps its line numbers. A comment such as `# Eq. 24` or `# (d1)` and the
equation with that tag link to each other.
"""

import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup
from pygments import highlight
from pygments.filter import simplefilter
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from pygments.token import Name, Operator, Punctuation, Text
from repository import ROOT
from templates import render

DISPLAY = re.compile(r"[ \t]*\$\$.*?\$\$", re.DOTALL)
TAG = re.compile(r"\\tag\{(\w+)\}")
#: "Eq. 24", "Eqs. 26 and 27", "Eqs. 20-25", "(d1)".
REFERENCE = re.compile(
    r"\bEqs?\.\s+\w+(?:(?:-|, | and | to )[a-z]?\d+)*|\((?P<own>[a-z]\d+)\)"
)
NUMBER = re.compile(r"\b(?:[a-z]\d+|\d+[a-z]?)\b")


class Row(NamedTuple):
    """A note and the lines of code below it; both may be empty."""

    name: str  # of the function or class that begins here
    note: str
    lines: list[int]


class Source:
    """A file of the package.

    - `path`: from the root of the repository.
    - `prefix`: of its anchors, where a page shows several files.
    """

    def __init__(self, path: str, prefix: str = ""):
        self.path = path
        self.prefix = f"{prefix}-" if prefix else ""
        self.text = (ROOT / path).read_text("utf-8")
        self.tags = set(TAG.findall(self.text))

    @property
    def summary(self) -> str:
        """First line of the docstring, without the mark of a heading."""
        note = ast.get_docstring(ast.parse(self.text)) or ""
        return note.partition("\n")[0].lstrip("# ")

    @property
    def rows(self) -> list[Row]:
        return _rows(self.text)

    @property
    def computed(self) -> dict[str, list[int]]:
        """The lines whose comment names an equation."""
        return _computed(self.text)

    def anchor(self, line: int) -> str:
        return f"{self.prefix}L{line}"

    def blocks(self, numbers: list[int], link: Callable[[str], str]) -> str:
        """Code of a row; where lines are left out, a new block begins."""
        blocks, lines = [], self.text.splitlines()
        for run in _runs(numbers):
            while run and not lines[run[0] - 1].strip():
                run.pop(0)
            while run and not lines[run[-1] - 1].strip():
                run.pop()
            if run:
                blocks.append([self._line(number, link) for number in run])
        return render("annotated/code.html", blocks=blocks)

    def _line(self, number: int, link: Callable[[str], str]) -> dict:
        code, comment = _code(self.text)[number - 1]
        return {
            "number": number,
            "anchor": self.anchor(number),
            "html": Markup(code + link(comment)),
            "tags": sorted(t for t, at in self.computed.items() if number in at),
        }


@cache  # a file stands on several pages
def _rows(text: str) -> list[Row]:
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
    for assignment, words in _described(tree):
        hidden.update(range(words.lineno, words.end_lineno + 1))
        notes[assignment.lineno] = ("", inspect.cleandoc(words.value.value))
    comments = {
        number: re.sub("^#:? ?", "", comment)
        for number, comment, alone in _comments(text)
        if alone
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


@cache
def _comments(text: str) -> list[tuple[int, str, bool]]:
    """Each comment: its line, its text, and whether it has that line alone."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [
        (token.start[0], token.string, not token.line[: token.start[1]].strip())
        for token in tokens
        if token.type == tokenize.COMMENT
    ]


@cache
def _computed(text: str) -> dict[str, list[int]]:
    """The lines whose comment names an equation."""
    lines: dict[str, list[int]] = {}
    for number, comment, alone in _comments(text):
        for tag in () if alone else sorted(named(comment)):  # alone it is a note
            lines.setdefault(tag, []).append(number)
    return lines


@cache
def _code(text: str) -> list[tuple[str, str]]:
    """Of each line its code and, as `<span>`, the comment behind it."""
    lines = []
    for line in _coloured(text).splitlines():
        code, mark, comment = line.rpartition('<span class="c1">')
        lines.append((code, mark + comment) if mark else (line, ""))
    return lines


def _coloured(text: str) -> str:
    lexer = PythonLexer(stripnl=False)
    lexer.add_filter(_plain())
    return highlight(text, lexer, HtmlFormatter(nowrap=True))


@simplefilter
def _plain(self, lexer, stream, options):
    """Names and punctuation as text: they look alike, and are half of a page."""
    for kind, text in stream:
        yield Text if kind in (Name, Operator, Punctuation) else kind, text


def _described(tree: ast.AST) -> Iterator[tuple[ast.stmt, ast.Expr]]:
    """Constants and fields, each with the string below it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            for before, after in pairwise(node.body):
                if (
                    isinstance(before, ast.Assign | ast.AnnAssign)
                    and isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                    and isinstance(after.value.value, str)
                ):
                    yield before, after


def named(text: str) -> set[str]:
    """The equations that a text names."""
    tags: set[str] = set()
    for match in REFERENCE.finditer(text):
        if match["own"]:
            tags.add(match["own"])
            continue
        found = NUMBER.findall(match[0])
        tags.update(found)
        for low, high in re.findall(r"\b(\d+)-(\d+)\b", match[0]):
            tags.update(map(str, range(int(low), int(high) + 1)))
    return tags


def linked(text: str, address: Callable[[str], str | None]) -> str:
    """Turn the numbers of equations into links to them."""

    def one(match: re.Match) -> str:
        if match["own"]:
            return anchor(match["own"], match[0])
        numbers = NUMBER.findall(match[0])
        if len(numbers) == 1:  # with the word, which is easier to hit
            return anchor(numbers[0], match[0])
        return NUMBER.sub(lambda number: anchor(number[0], number[0]), match[0])

    def anchor(tag: str, label: str) -> str:
        target = address(tag)
        return f'<a class="eq" href="{target}">{label}</a>' if target else label

    return REFERENCE.sub(one, text)


def note(
    text: str,
    level: int,
    address: Callable[[str], str | None],
    equation: Callable[[str, str], str],
) -> str:
    """Markdown of a note.

    - `level`: of the headings in it.
    - `address`: where an equation is to be found.
    - `equation`: what to make of a displayed equation and its tag.
    """
    text = re.sub(r"^#", "#" * level, text, flags=re.MULTILINE)
    out, end = [], 0
    for match in DISPLAY.finditer(text):
        out.append(linked(text[end : match.start()], address))
        formula, end = textwrap.dedent(match[0]), match.end()
        if tag := TAG.search(formula):
            formula = equation(tag[1], formula)
        out.append(f"\n\n{formula}\n\n")
    return "".join([*out, linked(text[end:], address)])


def _runs(numbers: list[int]) -> list[list[int]]:
    """Cut rising numbers where one is left out."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
