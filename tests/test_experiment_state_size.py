"""`state-size`: memory that is cut at evaluation, and states that are stale."""

from dataclasses import replace

import pytest
from test_experiment_text import SMALL, TEXT
from torch.nn import functional as F

from fwlab.experiments import state_size, text
from fwlab.layers import TransformerXL
from fwlab.models import MIXERS, Mixer
from fwlab.training.batches import in_rows


def transformer_xl(memory: int) -> text.Run:
    mixer = Mixer(
        lambda s: TransformerXL(
            s.d_model, s.heads, s.layers, s.d_ff, memory, segment=memory
        ),
        whole=True,
    )
    config = replace(SMALL, lr=0.03, min_lr=0.03, steps=30)
    return text.Run(config, mixer, TEXT, carry=True, rows=2)


def test_memory_is_cut_at_evaluation():
    """The trained weights in a model with less memory, and shorter segments."""
    run, other = transformer_xl(8), transformer_xl(2)
    text.train(run)
    other.model.load_state_dict(run.model.state_dict())
    whole = state_size.by_memory(run, 8)
    assert whole == text.finite(run.evaluate())
    assert state_size.by_memory(run, 2) == text.finite(other.evaluate()) != whole


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_a_state_is_stale_if_weights_have_changed(lr):
    config = replace(SMALL, lr=lr, min_lr=lr, steps=5)
    run = text.Run(config, MIXERS["delta"], TEXT, carry=True)
    text.train(run)
    found = state_size.by_state(run)
    assert found["carried"] == 5 * SMALL.block
    equal = pytest.approx(found["own_loss"], abs=1e-4)
    assert (found["stale_loss"] == equal) is (lr == 0)

    rows = in_rows(run.train_tokens, SMALL.batch).long()
    logits = run.model(rows[:, :-1])[:, found["carried"] :]
    targets = rows[:, found["carried"] + 1 :]
    whole = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    assert whole == equal


def test_small_models_are_trained_for_longer():
    point = next(p for p in state_size.points(True) if p["size"] == "small-1600")
    config, _ = state_size.model(point)
    usual, _ = state_size.model({**point, "size": "small"})
    assert (config.steps, usual.steps) == (1600, 400) == (state_size.steps(point), 400)
    assert config == replace(usual, steps=1600)


def finished(memories: tuple[float, ...]) -> list[dict]:
    """Points of the quick version with losses of Transformer-XL by memory."""
    losses = {"delta": 2.7, "sum": 2.75, "gated-delta": 2.3, "transformer-xl": 2.3}
    every = []
    for p in state_size.points(True):
        seed = 0.001 * p["seed"]
        p |= {"loss": losses[p["model"]] + seed, "windows_loss": 2.6 + seed}
        p |= {"first_norm": 2.0, "last_norm": 9.0 if p["model"] == "delta" else 1.0}
        p["state_size"] = 512 * (p["memory"] or 4)
        if p["memory"] == 64:
            loss = dict(zip(("4", "16", "64"), memories, strict=True))
            p["by_memory"] = {name: x + seed for name, x in loss.items()}
        elif not p["memory"]:
            p |= {"carried": 64, "stale_loss": 2.4, "own_loss": 3.4 + seed}
        every.append(p)
    return every


@pytest.mark.parametrize("memories", [(2.5, 2.4, 2.3), (2.3, 2.4, 2.5)])
def test_claims_about_memory(memories):
    found = {c.text: c for c in state_size.claims(finished(memories))}
    grows = found["Transformer-XL: the larger the memory, the lower the loss"]
    assert grows.apart and grows.holds is (memories[0] == 2.5)
    assert found["sum: above Transformer-XL with every memory"].holds
    equal = found["delta: below Transformer-XL with an equal state"]
    larger = found["Transformer-XL with 16 times the state: below delta"]
    assert larger.holds and larger.apart
    assert not equal.holds and f"{memories[0] + 0.002:.3f} [" in equal.found
    assert found["gated delta: below delta"].holds


def test_claims_about_training():
    every = [c for c in state_size.claims(finished((3, 2, 1))) if "steps" in c.text]
    steps = [(c.text.split()[1], c.holds) for c in every]
    assert steps == [("400", False), ("400", True), ("1600", False), ("1600", True)]
    assert every[1].found == "1.002 [1.001, 1.003]"
    points = finished((3, 2, 1))
    for p, name in zip(points[:4], ("loss", "windows_loss") * 2, strict=True):
        p[name] = None
    failed, *_ = state_size._stale(points)
    assert failed.found == "failed [failed, failed]" and failed.holds is False
    points = finished((3, 2, 1))
    for p in points[:3]:
        del p["stale_loss"]  # as older versions saved them
    assert state_size.claims(points)[-3].holds is None


def test_the_figure_has_every_series():
    figure = state_size.EXPERIMENT.draw(finished((2.5, 2.4, 2.3)))
    above, below = figure.axes
    drawn = {line.get_label(): [*line.get_xdata()] for line in above.lines}
    assert drawn["Transformer-XL, cut"] == [1, 4, 16]
    assert {
        float(line.get_label().removeprefix("rate ")): line.get_xdata()[0]
        for line in below.lines
        if not line.get_label().startswith("_")
    } == {4e-3: 400, 1e-3: 1600}
    assert drawn["delta"] == [1]
