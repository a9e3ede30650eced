"""Anyone who follows docs/contribute.md adds a rule.

The section "How to add a rule" is followed in a copy of the tree: its blocks
are written into the files that they name, and its command is run.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from fwlab.experiments import language_model, recall

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "contribute.md").read_text("utf-8")
SECTION = TEXT.partition("## How to add a rule\n")[2].partition("\n## ")[0]
BLOCK = re.compile(r'^```(\w+) title="([^"]+)"\n(.*?)^```$', re.M | re.S)
#: Prints what is published, then runs tests: one process, which loads PyTorch once.
RUN = """
import sys
import pytest
from fwlab.experiments import language_model, recall
print([recall.points(False), language_model.points(False)])
sys.exit(pytest.main(sys.argv[1:]))
"""


def changed(text: str, diff: str) -> str:
    """A text with the lines of a diff that begin with "+".

    They come behind the line above them, which begins with a space and is in
    the text, in this order.
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
    left = shutil.ignore_patterns("__pycache__", "results", "site")
    for name in ("fwlab", "docs", "tests", "notebooks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=left)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    blocks = BLOCK.findall(SECTION)
    assert len(blocks) == 4
    for kind, file, content in blocks:
        path = tmp_path / file
        assert path.exists() == (kind == "diff"), file
        if kind == "diff":
            content = changed(path.read_text("utf-8"), content)
        path.write_text(content, "utf-8")
    (command,) = re.findall(r"^python -m pytest (.*)$", SECTION, re.M)
    done = subprocess.run(
        [sys.executable, "-c", RUN, *shlex.split(command)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 40, done.stdout[-500:]
    # What is published stays as it is.
    before = [recall.points(False), language_model.points(False)]
    assert done.stdout.splitlines()[0] == str(before)
