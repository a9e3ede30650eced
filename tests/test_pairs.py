"""Test the scores of memories on the eight pairs of the notebooks."""

import pytest
import torch

from fwlab.exercises import eight_pairs, score
from fwlab.exercises.course.pairs import MEMORIES, attention, trained
from fwlab.feature_maps import FAVOR


def test_scores_of_what_is_known():
    keys, values = eight_pairs()
    assert score(lambda q, k, v: torch.zeros_like(q)) == (1, 1)
    overlap = keys @ keys.T - torch.eye(8)
    first, _ = score(MEMORIES[1]["sum"])
    assert first == pytest.approx(
        float((overlap @ values).square().sum() / values.square().sum())
    )

    def last_of_each(queries, keys, values):
        same = (queries @ keys.T > 1 - 1e-9) * torch.arange(1, len(keys) + 1)
        return values[same.argmax(1)]

    assert score(last_of_each) == (0, 0)


def test_random_features_are_those_that_layers_use():
    """FAVOR+ in `MEMORIES` has the features of layers, and a seed with median error."""
    stable = FAVOR(8, 64, seed=1).double()

    def scaled(x):
        features, top = stable.scaled(10**0.5 * 8**0.25 * x)
        return features * (top - top.max()).exp()[:, None]

    row = MEMORIES[2]["linear attention, FAVOR+, 128 features"]
    assert score(row) == pytest.approx(score(attention(scaled)))
    errors = []
    for seed in range(21):
        phi = FAVOR(8, 64, stabilize=False, seed=seed).double()
        errors.append(score(attention(lambda x, phi=phi: phi(10**0.5 * x)))[0])
    assert sorted(errors)[10] == score(row)[0]


def test_trained_keys_are_orthogonal_to_any_digit_that_is_shown():
    """Trained keys are orthogonal in all displayed digits, even under `no_grad`."""
    with torch.no_grad():
        phi = trained(eight_pairs()[0])
    assert torch.allclose(phi @ phi.T, torch.eye(8).double(), atol=1e-4)
    first, replaced = score(MEMORIES[6]["delta rule, trained keys"])
    assert max(first, replaced) < 1e-6
