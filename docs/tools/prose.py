"""Check the English of all text with proselint: part of `make lint`.

The phrases of docs/tools/words.toml are reported, too. The checks cover pages and notebooks without their code and formulas, and the
comments and strings of Python files.
"""

import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

from proselint.checks import __register__ as rules
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check, CheckFlags, types
from proselint.tools import LintFile

ROOT = Path(__file__).resolve().parents[2]
#: Rules that do not fit: source code has straight quotes, three dots and
#: repetitions (the rows of a matrix), and a cliché may be meant literally.
OFF = (
    "cliches",
    "dates_times",
    "lexical_illusions",
    "spelling.consistency",
    "typography",
    "weasel_words",
)
#: Not yet revised: phrases of the list are still allowed here.
LATER = ("notebooks/",)
#: Code, formulas, tags and addresses within prose.
NOT_PROSE = re.compile(
    r"^ *```.*?^ *```|<(script|style|svg)\b.*?</\1>|\$\$.*?\$\$"
    r"|`[^`]{1,160}`|\$[^$\n]+\$|\]\([^)\s]*\)|https?://\S+|<[^>\n]*>",
    re.DOTALL | re.MULTILINE,
)
#: Tokens of Python that contain prose.
WORDS = (
    tokenize.COMMENT,
    tokenize.STRING,
    getattr(tokenize, "FSTRING_MIDDLE", None),  # since Python 3.12
)


def preferred() -> dict[str, str]:
    """Discouraged phrases, as patterns, with what to write instead."""
    words = tomllib.loads((ROOT / "docs/tools/words.toml").read_text("utf-8"))
    return {
        phrase.replace(" ", r"\s+"): better
        for phrase, better in words["phrases"].items()
    }


def dots(text: str) -> str:
    """Dots in place of a text, so that the rest keeps its position."""
    return re.sub(r"\S", "·", text)


def prose_of_python(source: str) -> str:
    """The comments and strings of a file, with dots in place of its code."""
    old = source.splitlines(keepends=True)
    new = [dots(line) for line in old]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in WORDS:
            continue
        (first, start), (last, end) = token.start, token.end
        for row in range(first - 1, last):
            left = start if row == first - 1 else 0
            right = end if row == last - 1 else len(old[row])
            new[row] = new[row][:left] + old[row][left:right] + new[row][right:]
    # A phrase may go on in the next comment.
    return re.sub(r"^( *)#:?", lambda m: " " * len(m[0]), "".join(new), flags=re.M)


def prose(path: Path) -> str:
    """The text of a file that people read, each word in its position."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        sources = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
        text = "\n\n".join(sources)
    if path.suffix == ".py":
        text = prose_of_python(text)
    return NOT_PROSE.sub(lambda match: dots(match[0]), text)


def files() -> list[Path]:
    """All pages, notebooks and Python files in the repository."""
    command = ["git", "ls-files", "*.md", "*.ipynb", "*.py"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in done.stdout.splitlines()]


def main(paths: list[Path]) -> int:
    """Print a line per finding; return 1 if there is any, else 0."""
    words = Check(
        check_type=types.PreferredForms(preferred()),
        path="words",
        message="Write '{}', not '{}'.",
        flags=CheckFlags(allow_quotes=True),
    )
    CheckRegistry().register_many((*rules, words))
    # The first name that matches a rule decides.
    checks = dict.fromkeys(OFF, False) | {
        name: on for name, on in DEFAULT["checks"].items() if name not in OFF
    }
    found = 0
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        checks["words"] = not name.startswith(LATER)
        file = LintFile(name, prose(path))
        for result in file.lint({"max_errors": 1000, "checks": checks}):
            row, column = result.pos
            print(f"{name}:{row}:{column}: {result.check_result.message}")
            found += 1
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main([Path(name).resolve() for name in sys.argv[1:]] or files()))
