"""Anyone who follows docs/contribute.md adds a rule, or a recurrence.

The sections "How to add ..." are followed in a copy of the tree: their blocks
are written into the files that they name, and their commands are run.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from fwlab.experiments import language_model, recall

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "contribute.md").read_text("utf-8")
SECTIONS = [
    TEXT.partition(f"## How to add {what}\n")[2].partition("\n## ")[0]
    for what in ("a rule", "a recurrence")
]
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


def test_the_number_of_the_example_is_never_given_out():
    """Otherwise the first rule that takes it breaks the test below."""
    listed = (ROOT / "docs" / "equations.toml").read_text("utf-8")
    assert re.findall(r"^\+(\w+) = ", SECTIONS[0], re.M) == ["n0"]
    assert not re.search(r"^n0 = ", listed, re.M)


def test_rules_and_recurrences_are_added_as_the_page_says(tmp_path):
    # What Python has compiled stays, by the times of the files.
    left = shutil.ignore_patterns("results", "site")
    for name in ("fwlab", "docs", "tests", "notebooks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=left)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    blocks = BLOCK.findall("".join(SECTIONS))
    assert len(blocks) == 13
    for kind, file, content in blocks:
        path = tmp_path / file
        assert path.exists() == (kind == "diff"), file
        if kind == "diff":
            content = changed(path.read_text("utf-8"), content)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, "utf-8")
    path = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    # Both commands as one: what they have in common is the same in this copy.
    commands = re.findall(
        r'^python -m pytest -q (.*) -k "(.*)"$', "".join(SECTIONS), re.M
    )
    files = dict.fromkeys(" ".join(files for files, _ in commands).split())
    words = " or ".join(words for _, words in commands)
    done = subprocess.run(
        [sys.executable, "-c", RUN, "-q", "-rp", *files, "-k", words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    (passed,) = re.findall(r"(\d+) passed", done.stdout)
    assert len(commands) == 2 and int(passed) > 120
    # Each word of a command names a test that passed.
    tests = " ".join(re.findall(r"^PASSED (.*)$", done.stdout, re.M))
    assert [word for word in words.split(" or ") if word not in tests] == []
    # What is published stays as it is.
    before = [recall.points(False), language_model.points(False)]
    assert done.stdout.splitlines()[0] == str(before)
