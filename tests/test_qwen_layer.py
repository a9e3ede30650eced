"""Test the layer and the small Qwen of notebook 11 against transformers."""

import sys

import pytest
import torch

import fwlab.models
from fwlab.exercises.course.to_qwen import (
    as_published,
    new_qwen,
    published,
)


@pytest.mark.slow
def test_transformers_returns_it_again():
    """The installed version of transformers reproduces the stored outputs."""
    pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    import qwen_layer

    for name, case in qwen_layer.made()["cases"].items():
        arguments, stored = published(name)
        again = torch.tensor(case["outputs"], dtype=torch.float64)
        assert arguments["x"].shape == again.shape
        assert (again - stored).norm() / stored.norm() < 1e-5


def test_a_small_qwen_is_a_checkpoint(monkeypatch):
    """`as_published` compares a small Qwen's logits with those of `models.load`."""
    load, seen = fwlab.models.load, []

    def spy(*given):
        model = load(*given)
        return lambda text: seen.append(model(text)) or seen[-1]

    monkeypatch.setattr(fwlab.models, "load", spy)
    monkeypatch.setitem(sys.modules, "transformers", None)
    _, weights = new_qwen(5)
    text = torch.tensor([[0, 1, 2]])
    what = " the logits of all 3 tokens as fwlab.models.load does"
    assert f"not compute{what}" in as_published(weights, text, torch.zeros(1, 3, 5))
    assert f"computes{what}, to 1e-5" in as_published(weights, text, seen[0])
