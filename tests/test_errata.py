"""Test that code in docs/errata.md and docs/api/models.md prints the text below it."""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).resolve().parents[1] / "docs" / "errata.md"
ENTRY = re.compile(r"^### .+? \{#([a-z0-9-]+)\}$", re.MULTILINE)
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: A pattern for code that is directly followed by its expected output.
PROOF = re.compile(
    r"^```python\n((?:(?!^```).)*?)^```\n\n```text\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def entries() -> dict[str, str]:
    """Return the text of each entry in docs/errata.md, by anchor."""
    _, *parts = ENTRY.split(PAGE.read_text("utf-8"))
    return dict(zip(parts[::2], parts[1::2], strict=True))


MODELS = PAGE.parent.joinpath("api", "models.md").read_text("utf-8")
PROOFS = [
    pytest.param(code, printed, id=f"{anchor}-{i}" if i else anchor)
    for anchor, text in [*entries().items(), ("models", MODELS)]
    for i, (code, printed) in enumerate(PROOF.findall(text))
]


def test_every_entry_has_an_anchor_and_a_proof():
    text = PAGE.read_text("utf-8")
    anchors = ENTRY.findall(text)
    assert len(anchors) == len(set(anchors)) == len(re.findall("^### ", text, re.M))
    without = [name for name, part in entries().items() if not PROOF.search(part)]
    assert not without
    assert len(PROOFS) == len(CODE.findall(text)) + 1, "code without its output"


@pytest.mark.parametrize(("code", "printed"), PROOFS)
def test_proof(code, printed):
    out = io.StringIO()
    # The code may set a seed, which must not change later tests.
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(out):
        exec(compile(code, str(PAGE), "exec"), {"__name__": "proof"})
    assert printed.strip(), "it prints nothing"
    assert out.getvalue() == printed
