"""Set threads and random seeds for all tests, and mark slow tests."""

import gc
import os
import re

# Set one thread before torch is imported, because more threads slow small tests down.
# Processes that tests start also use one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    """Seed PyTorch before each test, so that tests do not depend on earlier tests."""
    torch.manual_seed(0)


def pytest_collection_finish():
    """After test collection, exclude all existing objects from garbage collection."""
    gc.collect()
    gc.freeze()


#: Rules whose recurrence is that of another rule with different inputs.
#: `make test` only compares these rules with loops; other rules test the shared code.
#: `make test-all` also runs all other tests on these rules.
RELATIVES = re.compile(
    r"(^|-)(kimi-delta|comba|implicit-delta|gated-delta-2|sum-channels)(-|$)"
)
COMPARED = ("adapters_act", "every_parameter_learns", "prefill_and_step")
COMPARED += ("by_hand", "trains_and_generates")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if not hasattr(item, "callspec"):
            continue
        relative = RELATIVES.search(item.callspec.id.replace("_", "-"))
        if relative and not any(part in item.originalname for part in COMPARED):
            item.add_marker(pytest.mark.slow)
