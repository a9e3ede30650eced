"""Split a Python file into notes and code.

Docstrings and full-line comments become notes, set as Markdown; the code keeps its
line numbers. A comment such as `# Eq. 24` or `# (d1)` names the equation with that tag.
"""

import ast
import inspect
import io
import re
import textwrap
import tokenize
from collections.abc import Callable, Iterable
from functools import cached_property
from html import escape
from itertools import groupby, pairwise
from typing import NamedTuple

from pygments.lexers import PythonLexer
from pygments.token import STANDARD_TYPES, Comment, Name, Operator, Punctuation, Text
from repository import ROOT

DISPLAY = re.compile(r"([ \t]*\$\$.*?\$\$)", re.DOTALL)
TAG = re.compile(r"\\tag\{(\w+)\}")
#: References to equations: "Eq. 24", "Eqs. 26 and 27", "Eqs. 20-25", "(d1)".
REFERENCE = re.compile(
    r"\bEqs?\.\s+\w+(?:(?:-|, | and | to )[a-z]?\d+)*|\((?P<own>[a-z]\d+)\)"
)
NUMBER = re.compile(r"\b(?:[a-z]\d+|\d+[a-z]?)\b")
#: Colours of variables, by their names in the code without the suffix `_t`.
TINTS = {"k": "key", "K": "key", "v": "value", "V": "value", "v_bar": "value"}
TINTS |= {"V_bar": "value", "W": "W", "beta": "beta", "b_t": "beta"}
#: Tokens without markup. They are half of all tokens and need no style.
PLAIN = Name, Operator, Punctuation, Text


class Row(NamedTuple):
    """Hold a note and the line numbers of the code below it. Either may be empty."""

    name: str  # The function or class that begins here.
    note: str
    lines: list[int]


class Source:
    """Parse a file of the package into notes, code and equations."""

    def __init__(self, path: str):
        self.path = path
        self.text = (ROOT / path).read_text("utf-8")
        self.tree = ast.parse(self.text)
        #: Tags of the equations that the file states.
        self.tags = set(TAG.findall(self.text))

    @property
    def summary(self) -> str:
        """Return the first line of the module docstring, without a heading mark."""
        return (ast.get_docstring(self.tree) or "").partition("\n")[0].lstrip("# ")

    @cached_property
    def comments(self) -> list[tuple[int, str, bool]]:
        """List comments as (line number, text, True if the line has no code)."""
        return [
            (token.start[0], token.string, not token.line[: token.start[1]].strip())
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline)
            if token.type == tokenize.COMMENT
        ]

    @cached_property
    def computed(self) -> dict[str, list[int]]:
        """Return the code lines whose comments name an equation, by equation."""
        lines: dict[str, list[int]] = {}
        for number, comment, alone in self.comments:
            for tag in () if alone else sorted(named(comment)):
                lines.setdefault(tag, []).append(number)
        return lines

    @cached_property
    def rows(self) -> list[Row]:
        notes: dict[int, tuple[str, str]] = {}  # By line number where the code starts.
        hidden: set[int] = set()

        def visit(node: ast.AST, name: str) -> None:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                name = f"{name}.{node.name}".lstrip(".")
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                notes[first] = name, ast.get_docstring(node) or ""
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for before, text in pairwise([None, *node.body]):
                    # Docstrings, and strings below constants or fields, become notes.
                    if _is_text(text) and not isinstance(before, ast.Expr):
                        hidden.update(range(text.lineno, text.end_lineno + 1))
                        if before:
                            said = inspect.cleandoc(text.value.value)
                            notes[before.lineno] = "", said
            for child in ast.iter_child_nodes(node):
                visit(child, name)

        about = ast.get_docstring(self.tree) or ""
        notes[1] = "", re.sub(r"\A# .*\n*", "", about)  # The page has its own title.
        visit(self.tree, "")
        alone = {number: text for number, text, whole in self.comments if whole}
        for run in runs(alone):
            hidden.update(run)
            note = "\n".join(re.sub("^#:? ?", "", alone[number]) for number in run)
            name, own = notes.get(run[-1] + 1, ("", ""))
            notes[run[-1] + 1] = name, f"{note}\n\n{own}"
        starts = [*sorted(notes), len(self.text.splitlines()) + 1]
        return [
            Row(*notes[start], [n for n in range(start, stop) if n not in hidden])
            for start, stop in pairwise(starts)
        ]

    @property
    def functions(self) -> list[list[Row]]:
        """Return the rows grouped by function, beginning with the module docstring."""
        found: list[list[Row]] = []
        for row in self.rows:
            if row.name or not found:
                found.append([])
            found[-1].append(row)
        return found

    @cached_property
    def tokens(self) -> list[tuple]:
        return [*PythonLexer(stripnl=False).get_tokens(self.text)]

    def lines(
        self, prefix: str, link: Callable[[str], str], defined: dict[str, str]
    ) -> list[str]:
        """Render each line of the file as HTML with its line number.

        - `prefix`: prefix of the HTML ids.
        - `link`: a function that turns a comment into HTML.
        - `defined`: the URLs of functions and classes that the file uses.
        """
        html, before = "", ""
        for (kind, text), (_, after) in pairwise([*self.tokens, (Text, "")]):
            style = "" if kind in PLAIN else STANDARD_TYPES[kind]
            shown = escape(text, quote=False)
            if kind in Comment:
                shown = link(shown)
            elif kind is Name and before != "." and text in defined:
                if after.startswith("(") or text[0].isupper():
                    shown = f'<a class="def" href="{defined[text]}">{shown}</a>'
            elif kind is Name:
                tint = TINTS.get(text) or TINTS.get(text.removesuffix("_t"))
                tint = None if tint == "beta" and "aft" in self.path else tint
                style = f"tint-{tint}" if tint else ""
            for part in shown.splitlines(keepends=True):
                plain = not style or part.isspace()
                html += part if plain else f'<span class="{style}">{part}</span>'
            before = text
        return [
            self._line(prefix, number, line) if line else "\n"
            for number, line in enumerate(html.splitlines(), 1)
        ]

    def _line(self, prefix: str, number: int, html: str) -> str:
        place = f"{prefix}L{number}"
        tags = " ".join(tag for tag, at in self.computed.items() if number in at)
        computes = f' data-eq="{tags}"' if tags else ""
        return (
            f'<span class="line" id="{place}"{computes}>'
            f'<a href="#{place}" tabindex="-1">{number}</a>{html}</span>\n'
        )


def named(text: str) -> set[str]:
    """Return the tags of the equations that a text refers to."""
    tags: set[str] = set()
    for match in REFERENCE.finditer(text):
        tags.update([match["own"]] if match["own"] else NUMBER.findall(match[0]))
        for low, high in re.findall(r"\b(\d+)-(\d+)\b", match[0]):
            tags.update(map(str, range(int(low), int(high) + 1)))
    return tags


def linked(text: str, address: Callable[[str], str | None]) -> str:
    """Turn equation numbers in a text into links to the equations."""

    def one(match: re.Match) -> str:
        numbers = NUMBER.findall(match[0])
        if len(numbers) == 1:  # Link the word too, to enlarge the click target.
            return anchor(numbers[0], match[0])
        return NUMBER.sub(lambda number: anchor(number[0], number[0]), match[0])

    def anchor(tag: str, label: str) -> str:
        target = address(tag)
        return f'<a class="eq" href="{target}">{label}</a>' if target else label

    return REFERENCE.sub(one, text)


def note(
    text: str,
    address: Callable[[str], str | None],
    equation: Callable[[str, str], str],
) -> str:
    """Convert a docstring or comment to Markdown with linked equations.

    - `address`: a function that returns the URL of an equation.
    - `equation`: a function that turns a displayed equation and its tag into HTML.
    """

    def displayed(part: str) -> str:
        formula, tag = textwrap.dedent(part), TAG.search(part)
        return f"\n\n{equation(tag[1], formula) if tag else formula}\n\n"

    parts = DISPLAY.split(re.sub(r"^#", "####", text, flags=re.MULTILINE))
    parts[::2] = [linked(part, address) for part in parts[::2]]
    parts[1::2] = map(displayed, parts[1::2])
    return "".join(parts)


def code(lines: list[str], numbers: list[int]) -> list[str]:
    """Join the HTML of the given lines into blocks of consecutive lines."""
    blocks = ["".join(lines[n - 1] for n in run).strip("\n") for run in runs(numbers)]
    blocks = [f"{block}\n" for block in blocks if block]
    # Make one line focusable, so that the keyboard can scroll the block.
    return [b.replace(' tabindex="-1"', "", i == 0) for i, b in enumerate(blocks)]


def runs(numbers: Iterable[int]) -> list[list[int]]:
    """Split increasing line numbers into runs of consecutive numbers."""
    from_place = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    return [[number for _, number in run] for _, run in from_place]


def _is_text(node: ast.AST) -> bool:
    value = getattr(node, "value", None)
    said = isinstance(node, ast.Expr) and isinstance(value, ast.Constant)
    return said and isinstance(value.value, str)
