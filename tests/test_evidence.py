"""Evidence is up to date: no source has changed since it was recorded."""

import json
import re
import shutil
from pathlib import Path

import evidence
import pytest

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    "mutants", [False, pytest.param(True, marks=pytest.mark.slow)], ids=str
)
def test_evidence_is_up_to_date(mutants):
    """That of mutants by night: every change of a quick test leaves all of it
    behind, and renewing it takes half an hour.
    """
    stale = {
        name: changed
        for name, changed in evidence.stale().items()
        if bool(evidence.PIECES[name].mutants) == mutants
    }
    reasons = [f"{name}: {', '.join(changed)}" for name, changed in stale.items()]
    command = f'make evidence NAME="{" ".join(stale)}"'
    assert not stale, "\n".join(["renew by", command, "what has changed:", *reasons])


def test_all_evidence_is_recorded():
    """What is marked as evidence, and what has mutants, is part of a piece."""
    marked = {
        path.relative_to(evidence.ROOT).as_posix()
        for path in TESTS.rglob("test_*.py")
        if "mark.evidence" in path.read_text("utf-8") and path != Path(__file__)
    }
    # What is in tests/machine, its conftest.py marks.
    marked.add("tests/machine/test_compiled.py")
    pieces = evidence.PIECES.values()
    assert marked == {x for one in pieces for x in one.tests.split() if ".py" in x}
    files = {file for one in pieces for file in one.mutants.split()}
    ops = TESTS.parent / "fwlab/ops"
    loops = {*ops.rglob("naive.py"), *ops.glob("*/rules/[a-z]*.py")}
    loops = {path.relative_to(evidence.ROOT).as_posix() for path in loops}
    assert files == loops | {"fwlab/feature_maps.py", "efficient"}


def test_the_page_says_how_many_mutants():
    page = (evidence.ROOT / "docs" / "tested.md").read_text("utf-8")
    rows = re.findall(r"^\| (.+?) \| (\d+) \| (\d+) \| \d+ \| (\d+) \|$", page, re.M)
    counted = {}
    for name, piece in evidence.PIECES.items():
        if piece.mutants and (path := evidence.RECORDS / f"{name}.json").exists():
            record = json.loads(path.read_text("utf-8"))
            first = piece.mutants.split()[0].removeprefix("fwlab/")
            row = f"`{first}`"
            if first == "efficient":
                row = "a sample of all `efficient.py`"
            elif "/rules/" in first:
                row = f"`{first.rpartition('/')[0]}/`"
            counts = (record.get(x, 0) for x in ("mutants", "equivalent", "survive"))
            counted[row] = tuple(map(str, counts))
    assert counted.items() <= {name: tuple(counts) for name, *counts in rows}.items()


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A repository with one piece, which speaks of nothing of AFT."""
    pytest.importorskip("triton", reason="a record has its version")
    for name in ("tests/problems", "docs"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("tests/evidence.py", "pyproject.toml", "constraints.txt"):
        shutil.copy(evidence.ROOT / name, tmp_path / name)
    shutil.copytree(TESTS / "processor", tmp_path / "tests/processor")
    (tmp_path / "tests/test_small.py").write_text(
        "import part\n"
        "import pytest\n"
        "from problems import aft\n"
        "@pytest.mark.evidence\n"
        "def test_part():\n"
        "    assert part.NUMBER > aft.NUMBER\n"
        "def test_another():\n"
        "    assert False\n",
        "utf-8",
    )
    (tmp_path / "tests/part.py").write_text("NUMBER = 1\n", "utf-8")
    (tmp_path / "tests/problems/aft.py").write_text("NUMBER = 0\n", "utf-8")
    (tmp_path / "docs/table.json").write_text("1\n", "utf-8")
    piece = evidence.Piece("tests/test_small.py", ("rules",), ("docs/*.json",))
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(evidence, "PIECES", {"small": piece})
    return tmp_path


def test_what_has_changed_is_noticed(small, monkeypatch):
    assert evidence.stale() == {"small": ["there is no record"]}
    assert evidence.renew("small")
    assert evidence.stale() == {}
    path = evidence.RECORDS / "small.json"
    before = path.read_text("utf-8")
    record = json.loads(before)
    own = {"tests/test_small.py", "tests/part.py", "docs/table.json"}
    assert record["sources"].keys() == own | {"constraints.txt"}
    assert record["passed"] == 1
    # A version of another package, and of one that results depend on.
    with (small / "constraints.txt").open("a") as file:
        file.write("pytest==0\n")
    (small / "tests/problems/aft.py").write_text("NUMBER = -1\n", "utf-8")
    assert evidence.stale() == {}
    with (small / "constraints.txt").open("a") as file:
        file.write("torch==0\n")
    (small / "tests/part.py").write_text("NUMBER = -2\n", "utf-8")
    (small / "docs/another.json").write_text("1\n", "utf-8")
    monkeypatch.setitem(
        evidence.PIECES,
        "small",
        evidence.PIECES["small"]._replace(tests="-x tests/test_small.py"),
    )
    new = ["constraints.txt", "docs/another.json", "tests/part.py", "its command"]
    assert evidence.stale() == {"small": new}
    # What is wrong now is not recorded.
    assert not evidence.renew("small")
    assert path.read_text("utf-8") == before


def test_a_source_that_changes_meanwhile(small):
    test = small / "tests/test_small.py"
    code = "    open(part.__file__, 'a').write('#')\n"
    test.write_text(test.read_text("utf-8").replace("def test_a", f"{code}def test_a"))
    assert not evidence.renew("small")
    assert not evidence.RECORDS.exists()
