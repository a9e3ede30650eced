"""Kernels of the feedback memory against naive in float64."""

import fuzz
import pytest
import torch
from alike import (
    call,
    parts,
    problem,
    rebuild,
    weighted,
)

from fwlab import ops
from fwlab.ops.feedback import kernels

pytestmark = pytest.mark.slow
SIZES = "batch=2 heads=2 key=4 value=5 layers=2 window=3 dtype=float32"
#: Memories per layer, shared, and as they are.
KINDS = ("", "fewer=1", "edges=1")


def drawn(kind="", time=5, **options):
    return problem(f"op=feedback time={time} state=1 {kind} {SIZES}", **options)


def outcome(p, state):
    """Compute outputs, states and gradients."""
    y, after = call(p, state=state, return_state=True, implementation="triton")
    leaves = [x for x in (*p.x.values(), *parts(state)) if x.requires_grad]
    gradients = torch.autograd.grad(weighted(y, *parts(after)), leaves)
    return [y, *parts(after), *gradients]


#: Also widths that fill no block, and one head.
CASES = [
    f"{kind} {more} {time}"
    for kind in KINDS
    for more in ("state=0", "state=1", "mask=some cuts=1")
    for time in ("time=1", "time=6")
]
CASES += ["time=6 heads=3 key=5", "time=6 heads=1 key=17", "time=6 key=32"]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_agrees(case, dtype, small):
    c = fuzz.parsed(f"op=feedback {SIZES} implementation=triton {case}")
    assert fuzz.check(c | {"dtype": dtype}) is None


def test_a_state_that_wants_no_gradient(small, monkeypatch):
    """Then the memories of earlier calls are left alone."""
    p = drawn(time=3)
    state = ops.FeedbackState(*p.state, None)
    wanted = outcome(p, state)
    counts, pull = [], kernels.pull_memories
    monkeypatch.setattr(
        kernels,
        "pull_memories",
        lambda loop, count, clock: [counts.append(count), pull(loop, count, clock)][1],
    )
    state = rebuild(state, lambda s: s.detach())
    found = outcome(p, state)
    assert counts == [1, 1, 1]
    assert all(map(torch.equal, found, wanted[:-2]))
