"""`regression`: a layer can be the solver it is compared with."""

import pytest
import regression
import torch
from regression import LAWS, Layer, draw_pairs, error

D, N = 4, 6


@pytest.mark.parametrize("noise", regression.NOISES)
@pytest.mark.parametrize("rule", LAWS)
def test_the_layer_of_the_best_step_has_the_loss_of_its_solver(rule, noise):
    layer = Layer(rule, D)
    betas = [1.0] if not noise or rule == "sum" else [0.6, 0.7, 0.8]
    pairs = draw_pairs(30_000, N, D, noise, torch.Generator().manual_seed(1))
    found = []
    with torch.no_grad():
        layer.query.weight.copy_(torch.eye(D))
        layer.key.weight.copy_(torch.eye(D))
        if rule == "sum":
            layer.scale.fill_(1 / (1 + noise + (N - 1) / D))
        for beta in betas:
            layer.strength.copy_(torch.logit(torch.as_tensor(beta), 1e-6))
            found.append(error(layer, pairs).item())
    # Of 30,000 sequences, the mean is off by about 1 %.
    assert min(found) == pytest.approx(LAWS[rule](N, D, noise), rel=0.05)


@pytest.mark.parametrize("noise", regression.NOISES)
def test_nothing_is_below_least_squares(noise):
    pairs = draw_pairs(20_000, N, D, noise, torch.Generator().manual_seed(2))
    best = regression.least_squares(*pairs[:3], noise)
    left = (best - pairs[3]).square().mean().item()
    assert left < min(LAWS[rule](N, D, noise) for rule in LAWS)
    assert left == pytest.approx(0, abs=1e-3) if not noise else left > 0.05
