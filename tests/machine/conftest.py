"""Compiling takes minutes, so it is done by night."""

from pathlib import Path

import pytest

from fwlab.ops import _triton

HERE = Path(__file__).resolve().parent

if _triton.INTERPRETED or not _triton.installed():
    collect_ignore_glob = ["test_*.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
