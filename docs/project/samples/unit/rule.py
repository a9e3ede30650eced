"""A delta rule whose keys have length 1."""

import torch


def bar(W, k, v):
    """Return the fast weights after a write by the delta rule."""
    old = torch.einsum("...vk,...k->...v", W, k)
    return W + torch.einsum("...v,...k->...vk", v - old, k)


def step(W, k, v):
    return bar(W, k / k.norm(dim=-1, keepdim=True), v)


SEEDS = (0, 1, 2)
BAR = {"step": bar, "rates": (0.03, 0.1, 0.3), "width": 6}
YOURS = {"step": step, "rates": (0.03, 0.1, 0.3), "width": 6}
