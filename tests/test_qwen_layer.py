"""The layer of notebook 11 is that of transformers, and its stored runs are complete."""

import sys

import pytest
import torch

import fwlab.models
from fwlab.exercises.course.to_qwen import (
    as_published,
    measured,
    modern_layer,
    new_qwen,
    published,
    ran,
)
from fwlab.ops.linear.sum import read


@pytest.mark.parametrize("case", ["plain", "grouped"])
def test_the_solution_returns_what_transformers_returned(case):
    arguments, theirs = published(case)
    off = (modern_layer(**arguments) - theirs).norm() / theirs.norm()
    assert off < 1e-5  # the module computes in float32


@pytest.mark.slow
def test_transformers_returns_it_again():
    """In any version, so that a change there is seen."""
    pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    import qwen_layer

    for name, case in qwen_layer.made()["cases"].items():
        arguments, stored = published(name)
        again = torch.tensor(case["outputs"], dtype=torch.float64)
        assert arguments["x"].shape == again.shape
        assert (again - stored).norm() / stored.norm() < 1e-5


@pytest.mark.parametrize("name", ["recall", "shakespeare", "hybrid"])
def test_every_row_has_the_same_seeds(name):
    seeds = [sorted(run["seed"] for run in runs) for runs in measured(name).values()]
    assert seeds == seeds[:1] * len(seeds) and len(seeds) >= 3
    assert seeds[0][:3] == [1, 2, 3]


def test_the_tracer_names_what_of_fwlab_runs():
    arguments, _ = published("plain")
    names = ran(lambda: modern_layer(**arguments))
    assert "fwlab.exercises.course.delta_rule.delta_step" in names
    assert not [name for name in names if not name.startswith("fwlab.exercises.course")]
    assert "fwlab.ops.linear.sum.read" in ran(read, torch.ones(2, 2), torch.ones(2))
    assert ran(torch.ones, 3) == []


def test_a_small_qwen_is_a_checkpoint(monkeypatch):
    """All its names are published ones; notebook 11 opens it in transformers."""
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
