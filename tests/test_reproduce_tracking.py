"""`state-tracking` and `reversal`: what updates can do, and how to undo them."""

from importlib import import_module
from itertools import permutations

import torch

from fwlab.bench.undoing import recovered

tracking = import_module("state-tracking")
EYE, FOUR = torch.eye(4), [*permutations(range(4))]
#: Each moves entry `i` to place `permutation[i]`.
MATRICES = [EYE[:, permutation] for permutation in FOUR]


def test_compositions_are_products_of_matrices():
    for tokens, answers in zip(*tracking.sequences(4, 50, 9), strict=True):
        product = EYE
        for token, answer in zip(tokens, answers, strict=True):
            product = product @ MATRICES[token]
            assert torch.equal(product, MATRICES[answer])


def test_an_update_with_beta_2_swaps_two_items():
    """Weights by hand make no error, also where a token has 3 updates."""
    point = {"task": "compose", "weights": "by hand", "limit": 2, "seed": 1}
    found = tracking.run(point | {"items": 4, "steps": 3})
    assert found["near"] == found["far"] == 1
    for permutation, matrix in zip(FOUR, MATRICES, strict=True):
        turned = EYE
        for i, j in tracking.swaps(torch.tensor(permutation)):
            k = (EYE[i] - EYE[j]) / 2**0.5
            turned = turned @ (EYE - 2 * torch.outer(k, k))
        assert torch.allclose(turned, matrix, atol=1e-6), permutation


def test_an_inverted_update_gives_its_increment():
    W, k, v = (torch.randn(*size).double() for size in ((3, 4), (4,), (3,)))
    beta = torch.tensor(0.7).double()
    increment = beta * (v - W @ k)
    after = W + torch.outer(increment, k)
    assert torch.allclose(recovered(after, k, v, beta), increment)
