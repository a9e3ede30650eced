"""Tests of the machine are slow: `make test` runs only one kernel."""

from pathlib import Path

import pytest

from fwlab.ops.call import launcher

HERE = Path(__file__).resolve().parent
SMOKE = "test_as_a_stand_in"

if launcher.INTERPRETED or not launcher.installed():
    collect_ignore_glob = ["**/test_*.py", "test_*.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents and item.name != SMOKE:
            item.add_marker(pytest.mark.slow)
