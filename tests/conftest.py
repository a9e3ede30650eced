"""Shared by all tests."""

import gc
import os
import re

# Before torch is there. Small problems: a second thread costs more than it
# brings, and test processes run beside each other. Processes that the tests
# start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed():
    """Draw the same random numbers in any order of tests."""
    torch.manual_seed(0)


def pytest_collection_finish():
    """Keep what is loaded now out of every later garbage collection."""
    gc.collect()
    gc.freeze()


#: Rules that differ from another one only in the inputs of their recurrence.
#: `make test` compares them with their loop; what every call has in common, the
#: others show, and `make test-all` these, too.
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
