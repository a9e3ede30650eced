"""Test `fit` (steps, schedule, clipping, hooks), the loss of pairs, and scores."""

from math import log

import pytest
import torch
from torch import nn

from fwlab.fit import answer_loss, fit, pair_loss, score


class Line(nn.Module):
    """Define a model with a single weight, which is initially 0."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))


def slope(model, batch):
    """Return a loss whose gradient for the weight is `batch`."""
    return batch * model.w


def train(steps=20, grad=-1.0, **options):
    model = Line()
    options.setdefault("optimizer", torch.optim.SGD)
    fitted = fit(model, lambda step: torch.tensor(grad), slope, steps, 0.1, **options)
    return model.w.item(), fitted


def test_rates_rise_and_fall_and_gradients_are_clipped():
    constant, _ = train(schedule=None)
    assert constant == pytest.approx(20 * 0.1)
    clipped, _ = train(schedule=None, grad=-5.0)
    assert clipped == pytest.approx(20 * 0.1)
    free, _ = train(schedule=None, grad=-5.0, clip=None)
    assert free == pytest.approx(20 * 0.5)
    places = []
    model = Line()

    def draw(step):
        places.append(model.w.item())
        return torch.tensor(-1.0)

    fit(model, draw, slope, 100, 0.1, optimizer=torch.optim.SGD)
    rates = [b - a for a, b in zip(places, [*places[1:], model.w.item()], strict=True)]
    assert max(rates) == pytest.approx(0.1, rel=1e-3)
    assert rates.index(max(rates)) in (9, 10)  # The peak is at a tenth of the steps.
    assert rates[0] < 0.01 and rates[-1] < 1e-3


def test_the_curve_without_evaluation_is_the_mean_of_parts():
    _, fitted = train(steps=40, schedule=None)
    assert fitted.steps == 40 and fitted.ended == "" and len(fitted.curve) == 20
    # The first entry is the mean loss of steps 1 and 2, where w is 0 and 0.1.
    assert fitted.curve[0] == (2, pytest.approx(-0.05))


def test_evaluations_and_what_ends_a_training():
    _, fitted = train(every=5, evaluate=float, schedule=None)
    assert fitted.curve == [(5, 5.0), (10, 10.0), (15, 15.0), (20, 20.0)]
    end = {
        "every": 5,
        "evaluate": float,
        "stop": lambda curve: "far" * (len(curve) > 1),
    }
    _, fitted = train(**end, schedule=None)
    assert (fitted.steps, fitted.ended, len(fitted.curve)) == (10, "far", 2)
    nan = {"every": 5, "evaluate": lambda step: float("nan") if step > 5 else 1.0}
    _, fitted = train(**nan, schedule=None)
    assert fitted == (10, [(5, 1.0)], "diverged")
    many = train(steps=50, every=1, evaluate=float, schedule=None)[1]
    assert len(many.short) <= 20 and many.short[-1] == (50, 50.0)


def test_arguments_that_do_not_fit():
    with pytest.raises(ValueError, match="expected other steps than 10"):
        train(steps=10)
    with pytest.raises(ValueError, match="expected every to be at least 1, got 0"):
        train(evaluate=float)


def test_loss_of_pairs():
    """`pair_loss` smooths counts; here, 1 follows 0 with probability 3/4."""
    train, valid = torch.tensor([0, 1, 0, 1, 0]), torch.tensor([0, 1, 1])
    found = pair_loss(train.to(torch.uint8), valid.to(torch.uint8), 2)
    assert found == pytest.approx(-(log(3 / 4) + log(1 / 4)) / 2)


def test_scores_count_answers_alone():
    """`score` counts only answers, and averages them over several batches."""
    torch.manual_seed(0)
    tokens, labels = torch.randint(5, (300, 4)), torch.randint(-2, 5, (300, 4))
    logits = torch.randn(5, 5)  # Each row has the logits of a token.
    right, losses = [], []
    for token, label in zip(tokens.flatten(), labels.flatten(), strict=True):
        if label >= 0:
            right.append(logits[token].argmax().item() == label.item())
            losses.append(-logits[token].log_softmax(-1)[label].item())
    mean = sum(losses) / len(losses)
    found = score(logits.__getitem__, (tokens, labels))
    assert found.accuracy == round(100 * sum(right) / len(right), 2)
    assert found.loss == pytest.approx(mean, abs=1e-4)
    loss = answer_loss(logits.__getitem__, (tokens, labels))
    assert loss.item() == pytest.approx(mean, abs=1e-5)
    with pytest.raises(ValueError, match="label that is not negative"):
        score(logits.__getitem__, (tokens, torch.full_like(labels, -1)))
