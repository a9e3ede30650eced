"""The cost of tests is measured and printed; only counts make a verdict."""

import json
import os
import subprocess
import sys
from pathlib import Path

import budget
import pytest

TESTS = Path(__file__).parent
#: A run of pytest for itself: no options or plugins of others, which take time.
ALONE = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def record(seconds: float = 1.0, tests: int = 1, **costs: float) -> dict:
    counts = {"tests": tests, "pages": 0, "processes": 0}
    return {
        "processor_seconds": seconds,
        "slowness": 2.0,
        "counts": counts,
        "tests": costs,
    }


@pytest.mark.parametrize(
    ("records", "arguments", "wrong"),
    [
        ({"site": record(10 * budget.TOTAL)}, [], ""),
        ({"site": record(tests=2)}, [], "site has 2 tests, and may have 1"),
        ({"site": record(tests=2)}, ["--all"], ""),
        ({"other": record()}, [], "site left no record"),
        ({"other": record()}, ["--all"], "site left no record"),
    ],
)
def test_counts_make_the_verdict(
    records, arguments, wrong, monkeypatch, tmp_path, capsys
):
    limits = {"tests": 1, "pages": 0, "processes": 0}
    monkeypatch.setattr(budget, "RECORDS", tmp_path)
    monkeypatch.setattr(budget, "LIMITS", {"site": limits})
    monkeypatch.setattr(sys, "argv", ["budget.py", *arguments])
    for name, content in records.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content), "utf-8")
    assert budget.main() == bool(wrong)
    printed = capsys.readouterr().out
    assert wrong in printed and f"{budget.TOTAL} s" in printed


def test_the_dearest_come_first():
    records = {"a": record(x=1.0, y=3.0), "b": record(z=2.0)}
    lines = budget.dearest(records, most=2)
    assert [line.split()[::2] for line in lines] == [["1.5", "y"], ["1.0", "z"]]


def test_every_group_has_limits():
    makefile = (TESTS.parent / "Makefile").read_text("utf-8")
    groups = {word.split("=")[1] for word in makefile.split() if "FWLAB_GROUP=" in word}
    assert groups == set(budget.LIMITS)


def test_processes_that_tests_start_count(tmp_path):
    """In a run of pytest in which a child and its orphan are busy."""
    (tmp_path / "conftest.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(TESTS)!r})\n"
        "import budget\n"
        "from pathlib import Path\n"
        "budget.RECORDS = Path(__file__).parent / 'records'\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(budget.Record())\n",
        "utf-8",
    )
    (tmp_path / "test_it.py").write_text(
        "import subprocess, sys\n"
        "WORK = 'import time\\nwhile time.process_time() < 1: pass'\n"
        "START = f'import subprocess; subprocess.Popen([{sys.executable!r}, \"-c\", {WORK!r}])'\n"
        "def test_child():\n"
        "    subprocess.run([sys.executable, '-c', WORK], check=True)\n"
        "    subprocess.run([sys.executable, '-c', START], check=True)  # an orphan\n",
        "utf-8",
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    subprocess.run(
        [*command, "-c", os.devnull, "--rootdir", tmp_path, tmp_path],
        env=os.environ | {"FWLAB_GROUP": "site"} | ALONE,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    spent = json.loads((tmp_path / "records" / "site.json").read_text("utf-8"))
    assert spent["counts"] == {"tests": 1, "pages": 0, "processes": 2}
    assert spent["processor_seconds"] > 2 and spent["slowness"] >= 1
    ((name, seconds),) = spent["tests"].items()
    assert name.endswith("test_it.py::test_child") and seconds > 1
