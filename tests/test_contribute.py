"""Test that the steps of docs/contribute.md add a rule.

The section "How to add a rule" is followed in a copy of the tree: its blocks are written
into the files that they name, and its command is run.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "contribute.md").read_text("utf-8")
SECTION = TEXT.partition("## How to add a rule\n")[2].partition("\n## ")[0]
BLOCK = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', re.M | re.S)
#: User code that calls the new rule.
USE = """
import torch
from fwlab import layers, models, ops
forms = ["naive", "chunked", "efficient", "triton"]
assert [*ops.leaky_delta_rule.forms] == forms
model = models.LanguageModel(9, "leaky-delta", d_model=8, heads=2, layers=1)
tokens = torch.arange(6)[None]
states, logits = None, []
with torch.no_grad():
    for t in range(6):
        y, states = model.step(tokens[:, t], states)
        logits.append(y)
    torch.testing.assert_close(torch.stack(logits, 1), model(tokens))
"""


def changed(text: str, diff: str) -> str:
    """Insert the lines of a diff that begin with "+" into a text.

    Each line is inserted after the line above it, which begins with a space. The
    text has these lines in the same order.
    """
    lines, place = text.splitlines(), 0
    for line in diff.splitlines():
        sign, words = line[:1], line[1:]
        if sign == " ":
            place = lines.index(words, place) + 1
        else:
            assert sign == "+", line
            lines.insert(place, words)
            place += 1
    return "\n".join([*lines, ""])


def test_a_rule_is_added_as_the_page_says(tmp_path):
    for name in ("fwlab", "docs", "tests"):
        left = shutil.ignore_patterns("results", "site", "figures")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=left)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for kind, file, content in BLOCK.findall(SECTION):
        path = tmp_path / file
        assert path.exists() == (kind == "diff"), file
        if kind == "diff":
            content = changed(path.read_text("utf-8"), content)
        path.write_text(content, "utf-8")
    path = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    (command,) = re.findall(r"^python (-m pytest .*)$", SECTION, re.M)

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
            capture_output=True,
            encoding="utf-8",
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        return done.stdout

    (passed,) = re.findall(r"(\d+) passed", run(*command.split()))
    assert int(passed) == 12
    run("-c", USE)
