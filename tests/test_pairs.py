"""The table of the eight pairs."""

import pytest
import torch

from fwlab import ops
from fwlab.exercises import eight_pairs, score, scoreboard
from fwlab.exercises.course.pairs import MEMORIES, attention, favor, trained
from fwlab.feature_maps import DPFP, ELU1, FAVOR, Identity, l2_normalize


def test_the_pairs_are_the_same_every_time():
    keys, values = eight_pairs()
    assert keys.shape == values.shape == (8, 8)
    assert torch.allclose(keys.norm(dim=1), torch.ones(8, dtype=torch.float64))
    torch.randn(3)
    for first, again in zip((keys, values), eight_pairs(), strict=True):
        assert torch.equal(first, again)


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


def heads(x):
    return x[None, :, None]


def with_sum(k, v, beta):
    _, (W, z) = ops.sum_rule(k, k, v, return_state=True)
    return W, z


def with_delta(k, v, beta, **options):
    return ops.delta_rule(k, k, v, beta, return_state=True, **options)[1], None


def with_denominators(k, v, beta):
    return with_delta(k, v, beta, normalize=True)[0]


def with_gated(k, v, beta):
    return ops.gated_rule(k, k, v, beta, return_state=True)[1], None


@pytest.mark.parametrize(
    ("notebook", "name", "rule", "phi", "beta"),
    [
        (2, "linear attention, ELU + 1", with_sum, ELU1(), 1),
        (2, "linear attention, FAVOR+, 128 features", with_sum, favor, 1),
        (3, "linear attention, DPFP, nu = 1", with_sum, DPFP(nu=1), 1),
        (4, "delta rule, beta = 1/2", with_delta, Identity(), 0.5),
        (4, "gated rule, beta = 1/2", with_gated, Identity(), 0.5),
        (5, "delta rule, DPFP, L2 norm", with_delta, lambda x: l2_normalize(DPFP(3)(x)), 1),
        (5, "delta rule, DPFP, attention norm", with_denominators, DPFP(3), 1),
        (6, "delta rule, trained keys", with_delta, trained, 1),
        (6, "linear attention, trained keys", with_sum, trained, 1),
    ],
)  # fmt: skip
def test_the_rows_are_what_the_operations_compute(notebook, name, rule, phi, beta):
    def memory(queries, keys, values):
        k, q = heads(phi(keys)), phi(queries)
        strength = torch.full((1, len(keys), 1), beta, dtype=k.dtype)
        W, z = rule(k, heads(values), strength)
        read = q @ W[0, 0].T
        return read if z is None else read / (q @ z[0, 0])[:, None]

    assert score(MEMORIES[notebook][name]) == pytest.approx(score(memory))


def test_random_features_are_those_that_layers_use():
    """With a maximum taken out, and of directions that are neither good nor bad."""
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
    """It does not depend on the machine, nor on the mode of the caller."""
    with torch.no_grad():
        phi = trained(eight_pairs()[0])
    assert torch.allclose(phi @ phi.T, torch.eye(8).double(), atol=1e-4)
    first, replaced = score(MEMORIES[6]["delta rule, trained keys"])
    assert max(first, replaced) < 1e-6


def test_only_earlier_notebooks_are_in_the_table(capsys):
    scoreboard(3, {"mine": lambda q, k, v: v[:8]})
    lines = capsys.readouterr().out.splitlines()
    assert [line[:4].strip() for line in lines] == ["", "01", "01", "02", "02", "new"]
    assert lines[-1].split()[1:] == [
        "mine",
        "0.000",
        f"{score(lambda q, k, v: v[:8])[1]:.3f}",
    ]
