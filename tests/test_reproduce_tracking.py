"""`state-tracking` and `reversal`: what updates can do, and how to undo them."""

from importlib import import_module
from itertools import permutations

import pytest
import reversal
import torch

from fwlab.bench.undoing import METHODS, recovered

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


def test_parity_is_learned_with_beta_up_to_2_alone():
    scores = []
    for limit in (1, 2):
        torch.manual_seed(1)
        model = tracking.Composer(2, 1, limit)
        tracking.train(model, 100)
        scores.append(tracking.score(model, 64))
        assert 0 <= model.strength.min() <= model.strength.max() <= 1
    assert scores[0] < 0.3 and scores[1] > 0.9, scores


def test_what_was_erased_does_not_interfere():
    torch.manual_seed(0)
    alone = tracking.recall(1, 1.0)
    assert tracking.recall(4, None) == pytest.approx(alone, rel=0.1)
    assert tracking.recall(4, 1.0) > 1.1 * alone < tracking.recall(1, 0.9)


def test_increments_must_be_stored():
    point = {"dtype": "float32", "key_norm": "l2", "length": 1024, "d_key": 16}
    point["seed"] = 1
    error = {how: reversal.run(point | {"method": how})["error"] for how in METHODS}
    assert error["stored"] < 1e-6 and 1e-5 < error["decay"] < 1e-1
    assert error["inverted"] is None or error["inverted"] > 1e6


def test_an_inverted_update_gives_its_increment():
    W, k, v = (torch.randn(*size).double() for size in ((3, 4), (4,), (3,)))
    beta = torch.tensor(0.7).double()
    increment = beta * (v - W @ k)
    after = W + torch.outer(increment, k)
    assert torch.allclose(recovered(after, k, v, beta), increment)
