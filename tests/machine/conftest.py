"""Compiling takes minutes, so it is done by night."""

from pathlib import Path

import pytest

from fwlab.ops.call import launcher

HERE = Path(__file__).resolve().parent

if launcher.INTERPRETED or not launcher.installed():
    collect_ignore_glob = ["test_*.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
