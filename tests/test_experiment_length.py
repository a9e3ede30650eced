"""`length`: windows of every length cover the same characters."""

from dataclasses import replace

import pytest
from test_experiment_text import SMALL, TEXT
from torch.nn import functional as F

from fwlab.experiments import length, text
from fwlab.models import MIXERS


@pytest.mark.parametrize("name", length.NAMES)
def test_loss_by_length(name, monkeypatch):
    monkeypatch.setattr(length, "LENGTHS", (8, 16, 32))
    mixer = {**MIXERS, **length.SOFTMAX}[name]
    run = text.Run(replace(SMALL, d_model=8), mixer, TEXT)
    found = length.by_length(run)
    count = (len(run.val_tokens) - 1) // 32 * 32
    assert count >= 128
    for size in (8, 32):
        ends = [
            F.cross_entropy(run.model(x[None])[0], y, reduction="sum").item()
            for x, y in zip(
                run.val_tokens[:count].long().split(size),
                run.val_tokens[1 : count + 1].long().split(size),
                strict=True,
            )
        ]
        assert found[str(size)] == pytest.approx(sum(ends) / count, abs=1e-4)


def finished(change: float) -> list[dict]:
    """Points of the quick version whose loss changes by this much at each length."""
    return [
        {
            **p,
            "by_length": {
                str(size): 2 + 0.001 * p["seed"] + i * change
                for i, size in enumerate(length.LENGTHS)
            },
        }
        for p in length.points(True)
    ]


@pytest.mark.parametrize("change", [-0.01, 0.01])
def test_claims_compare_the_longest_windows_with_those_of_training(change):
    every = length.claims(finished(change))
    assert len(every) == len(length.NAMES)
    assert {claim.verdict for claim in every} == {"holds" if change < 0 else "does not"}
    assert f"{2.002 + 4 * change:.3f} [" in every[0].found


def test_the_figure_shows_changes():
    axes = length.EXPERIMENT.draw(finished(0.25)).axes[: len(length.NAMES)]
    for ax in axes:
        assert [*ax.lines[-1].get_ydata()] == pytest.approx([0, 0.25, 0.5, 0.75, 1])
