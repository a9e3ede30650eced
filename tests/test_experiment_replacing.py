"""`replacing`: the layer that removes nothing, and claims about gaps."""

from math import inf
from statistics import median

import pytest
import torch

from fwlab.experiments import replacing
from fwlab.feature_maps import ELU1, sum_normalize
from fwlab.layers import FastWeightAttention
from fwlab.models import LanguageModel


def layers(conv_size: int = 0):
    """The layer of the delta rule, and the one that removes nothing."""
    made = []
    for layer in (FastWeightAttention, replacing.Adding):
        torch.manual_seed(0)
        options = {"key_norm": "sum", "conv_size": conv_size}
        made.append(layer(8, 2, ELU1(), "delta", **options).double())
    return made


def test_it_adds_what_delta_would_write_into_an_empty_memory():
    _, layer = layers()
    x = torch.randn(3, 7, 8).double()
    q, k, v = (
        project(x).unflatten(-1, (2, 4))
        for project in (layer.to_q, layer.to_k, layer.to_v)
    )
    q, k = (sum_normalize(ELU1()(part)) for part in (q, k))
    beta = layer.gates.beta(x, k)
    W = torch.einsum("bth,bthv,bthk->bthvk", beta, v, k).cumsum(1)
    wanted = layer.to_out(torch.einsum("bthvk,bthk->bthv", W, q).flatten(-2))
    assert torch.allclose(layer(x), wanted, atol=1e-12)


@pytest.mark.parametrize("conv_size", [0, 4])
def test_only_removal_differs_from_delta(conv_size):
    """Equal parameters and first outputs; later ones differ."""
    delta, adding = layers(conv_size)
    for one, other in zip(delta.parameters(), adding.parameters(), strict=True):
        assert torch.equal(one, other)
    x = torch.randn(3, 7, 8).double()
    one, other = delta(x), adding(x)
    assert torch.allclose(one[:, 0], other[:, 0], atol=1e-12)
    assert not torch.allclose(one[:, 1:], other[:, 1:], atol=1e-3)


@pytest.mark.parametrize("conv_size", [0, 4])
def test_step_by_step_it_computes_the_same(conv_size):
    _, layer = layers(conv_size)
    x, state, y = torch.randn(2, 6, 8).double(), None, []
    for x_t in x.unbind(1):
        y_t, state = layer.step(x_t, state)
        y.append(y_t)
    assert torch.allclose(torch.stack(y, 1), layer(x), atol=1e-12)


def test_all_models_have_the_same_number_of_parameters():
    for quick in (True, False):
        counts = []
        for point in replacing.points(quick)[::3]:
            c, mixer = replacing.model(point)
            with torch.device("meta"):
                model = LanguageModel(
                    65, mixer, c.layers, c.heads, c.d_model, c.block, c.d_ff
                )
            counts.append(model.num_parameters())
        assert len(counts) == 15 and max(counts) < 1.03 * min(counts)


def finished(gap: float) -> list[dict]:
    """Points of the quick version, with this gap of delta to gated after
    a convolution.
    """
    names = (*replacing.LAYERS, replacing.ATTENTION)
    losses = (2.5, 2.51, 2.34, 2.2, 2.27, 2.17, 2.34, 2.15)
    loss = dict(zip(names, losses, strict=True))
    points = []
    for p in replacing.points(True):
        p["loss"] = loss[p["layer"]] + 0.001 * p["seed"] - 0.1 * bool(p["conv_size"])
        if p["conv_size"] and p["layer"] == "delta":
            p["loss"] += gap - 0.14
        points.append(p)
    return points


@pytest.mark.parametrize("gap", [0.03, 0.1])
def test_claims(gap):
    found = {c.text: c for c in replacing.claims(finished(gap))}
    halves = found["a convolution halves the gap by which delta ends above gated"]
    assert halves.holds is (gap == 0.03) and halves.apart and not halves.published
    assert "against 0.140 [0.140, 0.140]" in halves.found
    assert halves.found.startswith(f"{gap:.3f} [")
    assert found["no convolution: delta below delta without removal"].holds
    within = found["no convolution: delta without removal within 0.05 of sum"]
    assert within.holds and within.apart
    assert found["no convolution: gated below delta"].holds
    # The bar has no convolution; the others may have one.
    below = f"gated delta, unit keys below {replacing.ATTENTION}"
    assert not found[f"no convolution: {below}"].holds
    assert found[f"convolution of 4: {below}"].holds


def test_gaps_are_between_equal_seeds():
    points = finished(0.03)
    points[0]["loss"] = None
    gaps = replacing.gap([p for p in points if not p["conv_size"]], "delta", "sum")
    assert gaps.pop(1) == -inf and median(gaps.values()) == pytest.approx(-0.16)
    gaps = replacing.gap([p for p in points if not p["conv_size"]], "sum", "delta")
    assert gaps[1] == inf
