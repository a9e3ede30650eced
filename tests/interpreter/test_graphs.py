"""Test with `torch.library.opcheck` the custom operators that call kernels."""

import pytest
import torch

from fwlab.ops.aft.simple import kernels as scan
from fwlab.ops.aft.window import kernels as window
from fwlab.ops.delta import kernels as delta
from fwlab.ops.linear import kernels as linear

pytestmark = pytest.mark.slow


def leaves(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(s, generator=generator).requires_grad_() for s in shapes]


heads, gate, memory = (1, 20, 2, 8), (1, 20, 2), (1, 2, 8, 8)
q, k, v, d, b, W, z = leaves(heads, heads, heads, gate, gate, memory, (1, 2, 8))
flat, older, state = (1, 20, 6), (1, 24, 6), (1, 6)
NODES = {
    "sum": (linear._sum, (q, k, v, None, None, W, None)),
    "gated": (linear._sum, (q, k, v, d, b, None, None)),
    "normalized": (linear._mean, (q, k, v, d, b, W, z)),
    "delta": (delta._delta, (q, k, v, None, b, W, None)),
    "gated delta": (delta._delta, (q, k, v, d, b, None, None)),
    "aft-simple": (scan._causal, leaves(flat, flat, flat, state, state)),
    "aft-local": (
        window.window,
        (*leaves(flat, older, older, (1, 20, 5), state, state), None),
    ),
}


@pytest.mark.parametrize("name", NODES)
def test_nodes(name):
    """Each custom operator passes the checks of `torch.library.opcheck`."""
    recurrence, arguments = NODES[name]
    torch.library.opcheck(recurrence.node, (*arguments, True))
