"""GPU kernels in Triton's interpreter, in a process of their own.

Triton reads TRITON_INTERPRET when a kernel is defined, so a fixture would
come too late. In another process nothing of this folder is imported; one skip,
whatever was asked for, says how to run it.
"""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def poison():
    """Fill new memory with NaN: what a kernel does not write shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small(monkeypatch):
    """Four steps per segment and tile, and blocks of 4 memories."""
    from fwlab.ops.aft.simple import kernels as scan
    from fwlab.ops.aft.window import kernels as window
    from fwlab.ops.feedback import kernels as feedback

    sizes = ((scan, "SEGMENT", 4), (window, "TILE", 4), (window, "KEYS", 4))
    for module, name, size in (*sizes, (feedback, "TILE", 64)):
        monkeypatch.setattr(module, name, size)


class Elsewhere(pytest.Item):
    """A test that cannot run in this process."""

    def runtest(self):
        here = ".venv/bin/python -m pytest -m '' tests/interpreter"
        pytest.skip(f"kernels are interpreted by TRITON_INTERPRET=1 {here}")


class File(pytest.File):
    """Its tests by the names alone that were asked for."""

    def collect(self):
        asked = {x.partition("::")[2] for x in self.config.args if "::" in x}
        names = sorted(asked | {"tests"})
        return [Elsewhere.from_parent(self, name=name) for name in names]


if os.environ.get("TRITON_INTERPRET") != "1":

    def pytest_pycollect_makemodule(module_path, parent):
        return File.from_parent(parent, path=module_path)

    def pytest_collection_modifyitems(items):
        elsewhere = [item for item in items if isinstance(item, Elsewhere)]
        for item in elsewhere[1:]:
            items.remove(item)
