"""Test that every reference to an equation names an equation of its paper.

docs/equations.toml lists the equations of the papers and of fwlab.
"""

import ast
import functools
import io
import json
import re
import tokenize
from pathlib import Path

import equations
from literate import TAG, Source, named

ROOT = Path(__file__).resolve().parents[1]

LIST = equations.listed()
FILES = [
    path.relative_to(ROOT).as_posix()
    for folder, pattern in (
        ("fwlab", "**/*.py"),
        ("fwlab/exercises", "*.toml"),
        ("notebooks", "*.ipynb"),
        ("docs", "**/*.md"),
        ("docs/figures", "**/*.js"),
        ("docs/figures", "**/*.html"),
        (".", "README.md"),
    )
    for path in sorted((ROOT / folder).glob(pattern))
]


@functools.cache
def words(path: str) -> str:
    """Return the prose of a file: comments and docstrings, or text without code."""
    text = (ROOT / path).read_text("utf-8")
    if path.endswith(".js"):  # Attributes of SVG look like equation numbers.
        return re.sub(r"\b[xy]\d\b", "", text)
    if path.endswith((".md", ".toml", ".html")):
        return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    if path.endswith(".py"):
        return _words_of_code(text)
    cells = json.loads(text)["cells"]
    sources = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n".join(
        text if kind == "markdown" else "\n".join(re.findall("#.*", text))
        for kind, text in sources
    )


def _words_of_code(text: str) -> str:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [t.string for t in tokens if t.type == tokenize.COMMENT]
    constants = [node for node in ast.walk(ast.parse(text)) if _is_text(node)]
    # Skip single words: an argument name in brackets is no equation number.
    return "\n".join([*comments, *(c.value for c in constants if " " in c.value)])


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def own(path: str) -> set[str]:
    """Return the fwlab equation numbers that a file may refer to."""
    families = LIST["fwlab"]
    for name, family in families.items():
        if path.startswith(f"fwlab/ops/{name}/"):
            # Delta rules and linear attention share chunks and kernels.
            shared = {"delta": "linear", "linear": "delta"}
            return {*family, *families[shared.get(name, name)]}
    return set().union(*families.values())


def test_references():
    unknown = {}
    for path in FILES:
        paper, text = equations.paper(path), words(path)
        known = set(LIST["exceptions"].get(path, {})) | own(path)
        known |= set(equations.papers().get(paper, {}).get("equations", {}))
        if others := (named(text) | set(TAG.findall(text))) - known:
            unknown[f"{path}, by {paper}"] = others
    assert not unknown, unknown


def test_own_numbers_are_those_of_the_code():
    for name, family in LIST["fwlab"].items():
        place = ROOT / "fwlab" / "ops" / name
        files = [place] if place.is_file() else sorted(place.rglob("*.py"))
        sources = [Source(path.relative_to(ROOT).as_posix()) for path in files]
        tags = set().union(*(source.tags for source in sources))
        assert {tag for tag in tags if not tag[0].isdigit()} == set(family), name


def test_every_equation_of_the_specification_is_computed():
    """Each equation on a rule's page or in naive.py has a code line with the number."""
    for path, source in equations.sources().items():
        if equations.specifies(source):
            assert source.tags <= set(source.computed), path


def test_exceptions_name_a_paper_that_has_the_number():
    for path, numbers in LIST["exceptions"].items():
        for number, paper in numbers.items():
            assert number in equations.papers()[paper]["equations"], path


def test_every_equation_has_its_places():
    """Every equation has a notebook, a test, and code or a reason for having none."""
    papers = {name: set(LIST[name]["equations"]) for name in ("schlag2021", "zhai2021")}
    papers["fan2020"] = {tag for tag in LIST["fwlab"]["feedback"] if tag[0] == "f"}
    code = {number for found in equations.code() for number in found}
    for paper, tags in papers.items():
        numbers = "feedback" if paper == "fan2020" else paper
        have = {tag for whose, tag in code if whose == numbers} & tags
        reasons = equations.said_of("no_code", paper)
        assert tags - have == set(reasons), paper
        seen = {tag for whose, tag in equations.in_notebooks() if whose == numbers}
        assert tags <= seen, f"{paper}, in no notebook: {tags - seen}"
        shown = equations.said_of("shown_by", paper)
        assert set(shown) == tags, paper
        for file, test in map(str.split, set(shown.values())):
            text = (ROOT / "tests" / f"{file}.py").read_text("utf-8")
            assert f"def test_{test}(" in text, (file, test)
