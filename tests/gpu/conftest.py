"""Skip these tests without an NVIDIA GPU: python -m pytest -m gpu tests/gpu."""

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    missing = pytest.mark.skip(reason="there is no NVIDIA GPU")
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(missing)
