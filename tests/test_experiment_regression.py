"""`regression`: that a layer can be the solver it is compared with, and the claims."""

import pytest
import torch

from fwlab.experiments import regression
from fwlab.experiments.regression import LAWS, Layer, draw_pairs, error, law

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
    assert min(found) == pytest.approx(law(rule, N, D, noise), rel=0.05)


@pytest.mark.parametrize("noise", regression.NOISES)
def test_nothing_is_below_least_squares(noise):
    pairs = draw_pairs(20_000, N, D, noise, torch.Generator().manual_seed(2))
    best = regression.least_squares(*pairs[:3], noise)
    left = (best - pairs[3]).square().mean().item()
    assert left < min(law(rule, N, D, noise) for rule in LAWS)
    assert left == pytest.approx(0, abs=1e-3) if not noise else left > 0.05


def finished(off: float = 0.0):
    """Points as theory has them; those of the delta rule are `off` by a share."""
    for p in regression.points(True):
        if p["rule"] in LAWS:
            p["loss"] = law(p["rule"], p["n"], p["d"], p["noise"])
            p["loss"] *= 1 + off * (p["rule"] == "delta")
        else:
            p["loss"] = 0.001
        p["beta"] = 0.9 - p["noise"] if p["rule"] == "delta" else None
        yield p


def test_claims_follow_the_losses():
    assert {c.verdict for c in regression.claims([*finished()])} == {"holds"}
    found = {c.text: c.verdict for c in regression.claims([*finished(0.2)])}
    wrong = [text for text, verdict in found.items() if verdict == "does not"]
    assert [text.split(" ends ")[0] for text in wrong] == [
        "no noise: delta",
        "noise: delta",
    ]
