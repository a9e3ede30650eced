"""The cost of tests is measured and printed; no verdict depends on it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import budget
import pytest

TESTS = Path(__file__).parent


def record(seconds: float, slowness: float = 1.0, **tests: float) -> dict:
    return {"processor_seconds": seconds, "slowness": slowness, "tests": tests}


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ({"site": record(9.0)}, "site: 9 of 10 s of processor time"),
        ({"site": record(11.0)}, "make it quicker"),
        # A slower processor has more time.
        ({"site": record(11.0, slowness=1.375)}, "site: 8 of 10 s"),
        # Parts of a group share its budget.
        ({"site-a": record(6.0), "site-b": record(6.0)}, "make it quicker"),
        ({"other": record(1.0)}, "site: no record"),
    ],
)
def test_costs_are_printed(records, said, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(budget, "RECORDS", tmp_path)
    monkeypatch.setattr(budget, "BUDGETS", {"site": 10})
    for name, content in records.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content), "utf-8")
    # Too much time is no failure; a group that did not run is one.
    assert budget.main() == (said == "site: no record")
    printed = capsys.readouterr().out
    assert said in printed
    assert ("make it quicker" in printed) == (said == "make it quicker")


def test_the_slowest_come_first():
    records = {"a": record(1.0, x=1.0, y=3.0), "b": record(1.0, z=2.0)}
    lines = budget.slowest(records, most=2)
    assert [line.split()[-1] for line in lines] == ["y", "z"]


def test_every_group_has_a_budget():
    makefile = (TESTS.parent / "Makefile").read_text("utf-8")
    groups = {word.split("=")[1] for word in makefile.split() if "FWLAB_GROUP=" in word}
    assert {name.split("-")[0] for name in groups} == set(budget.BUDGETS)


@pytest.fixture
def spent(tmp_path):
    """The record of a run of pytest in which a child process is busy."""
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
        env=os.environ | {"FWLAB_GROUP": "site-one", "PYTEST_ADDOPTS": ""},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    (path,) = (tmp_path / "records").iterdir()
    assert path.name == "site-one.json"
    return json.loads(path.read_text("utf-8"))


def test_processes_that_tests_start_count(spent):
    assert spent["processor_seconds"] > 2
    assert spent["slowness"] >= 1
    ((name, seconds),) = spent["tests"].items()
    assert name.endswith("test_it.py::test_child") and seconds > 0
