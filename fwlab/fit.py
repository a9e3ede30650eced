"""Train any model on batches that a function draws for each step."""

from collections.abc import Callable
from math import isfinite
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

#: Function (optimiser, highest learning rate, number of steps) that returns a schedule.
Schedule = Callable[[torch.optim.Optimizer, float, int], LRScheduler]
#: Maximum number of points of a learning curve.
CURVE = 20
#: Description of the defaults of `fit`.
SETUP = {
    "optimiser": "Adam, gradients clipped to 1",
    "schedule": "rises for a tenth of the steps, falls along a cosine",
}


def one_cycle(
    optimizer: torch.optim.Optimizer, lr: float, steps: int, rise: float = 0.1
) -> LRScheduler:
    """Return a schedule in which the learning rate rises and then falls along a cosine.

    - Raises `ValueError` if the rise lasts one step, which PyTorch does not support.
    """
    if rise * steps == 1:
        raise ValueError(f"expected other steps than {steps}: the rate rises for one")
    return OneCycleLR(optimizer, lr, steps, pct_start=rise, cycle_momentum=False)


class Fit(NamedTuple):
    """Hold the result of a training run: steps, learning curve and reason for its end.

    - `steps`: number of optimiser steps.
    - `curve`: pairs of a step and what was evaluated then; without `evaluate`, at
      most 20 pairs of a step and the mean loss of training since the pair before.
    - `ended`: what `stop` returned, or "diverged"; "" = all steps were taken.
    """

    steps: int
    curve: list[tuple[int, float]]
    ended: str

    @property
    def short(self) -> list[tuple[int, float]]:
        """Return at most 20 (step, value) pairs of the curve, including the last."""
        return self.curve[:: -max(1, -(-len(self.curve) // CURVE))][::-1]


def fit(
    model: nn.Module,
    draw: Callable[[int], Any],
    loss: Callable[[Any, Any], Tensor],
    steps: int,
    lr: float,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    schedule: Schedule | None = one_cycle,
    clip: float | None = 1.0,
    every: int = 0,
    evaluate: Callable[[int], float] | None = None,
    stop: Callable[[list[tuple[int, float]]], str] | None = None,
) -> Fit:
    """Train a model on a new batch in every step.

    - `model`: trained in place.
    - `draw`: returns the batch of a step, counted from 0.
    - `loss`: a function of the model and a batch.
    - `steps`, `lr`: number of optimiser steps, highest learning rate.
    - `optimizer`: takes parameters and `lr`.
    - `schedule`: schedule of the learning rate; None = constant.
    - `clip`: maximum norm of the gradient; None = no limit.
    - `every`, `evaluate`: call `evaluate` after every `every` steps, with the step;
      a result that is not finite ends the training.
    - `stop`: called with the curve after each evaluation; returns why to stop,
      or "".
    - Returns a `Fit`.
    - Raises `ValueError` for a rise of one step, or `evaluate` without `every`.
    """
    if evaluate is not None and every < 1:
        raise ValueError(f"expected every to be at least 1, got {every}")
    adam = optimizer(model.parameters(), lr=lr)
    rate = None if schedule is None else schedule(adam, lr, steps)
    losses: list[float] = []
    curve: list[tuple[int, float]] = []
    for step in range(1, steps + 1):
        batch = draw(step - 1)
        adam.zero_grad(set_to_none=True)
        now = loss(model, batch)
        losses.append(now.item())
        now.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        adam.step()
        if rate is not None:
            rate.step()
        if evaluate is None or step % every:
            continue
        curve.append((step, evaluate(step)))
        ended = "" if stop is None else stop(curve)
        if not isfinite(curve[-1][1]):
            return Fit(step, curve[:-1], "diverged")
        if ended:
            return Fit(step, curve, ended)
    return Fit(steps, curve if evaluate else learning_curve(losses, steps), "")


def learning_curve(losses: list[float], steps: int) -> list[tuple[int, float]]:
    """Average the training losses of all steps over at most 20 equal parts of a run.

    - `steps`: number of steps of the whole run, which may have ended before.
    - Returns pairs of a step and the mean loss of the part that ends there.
    """
    part = -(-steps // CURVE)
    ends = range(part, len(losses) + 1, part)
    return [(end, round(fmean(losses[end - part : end]), 4)) for end in ends]


@torch.no_grad()
def pair_loss(train: Tensor, valid: Tensor, vocabulary: int) -> float:
    """Return the loss of predicting each token from the previous token alone.

    - `train`: tokens whose pairs are counted, each pair once more than it occurs, so
      that none is impossible.
    - `valid`: tokens that are predicted.
    - `vocabulary`: number of different tokens.
    - Returns the mean loss of a token of `valid`, in nats.
    """
    pairs = vocabulary * train[:-1].cpu().long() + train[1:].cpu()
    counts = 1.0 + pairs.bincount(minlength=vocabulary**2).view(vocabulary, vocabulary)
    log_p = (counts / counts.sum(1, keepdim=True)).log()
    return -log_p[valid[:-1].cpu().long(), valid[1:].cpu().long()].mean().item()


# --- Labelled answers -----------------------------------------------------


class Score(NamedTuple):
    """Hold the accuracy in percent, and the mean loss per answer in nats."""

    accuracy: float
    loss: float


def answer_loss(
    model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the mean loss in nats over the tokens that have a label.

    - `model`: takes tokens, returns logits `[batch, time, vocabulary]`.
    - `batch`: tokens and labels, both integers `[batch, time]`; a label from 0 to
      `vocabulary - 1` asks for an answer, and a negative one for nothing. Without
      any answer the loss is NaN.
    - Returns a scalar `[]`.
    """
    return F.cross_entropy(*_answers(model, batch))


@torch.no_grad()
def score(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Score:
    """Return accuracy and loss of a model on a batch, 128 sequences at a time.

    - `model`, `batch`: as for `answer_loss`. The model runs in the mode it is in.
    - Returns a `Score`: percent to two decimals, nats to four.
    - Raises `ValueError` if no label asks for an answer.
    """
    if not (batch[1] >= 0).any():
        raise ValueError("expected a label that is not negative, got none")
    right, loss, count = 0, 0.0, 0
    for part in zip(*(x.split(128) for x in batch), strict=True):
        logits, labels = _answers(model, part)
        right += int((logits.argmax(-1) == labels).sum())
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        count += len(labels)
    return Score(round(100 * right / count, 2), round(loss / count, 4))


def _answers(
    model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the logits and the labels of all tokens that have a label."""
    tokens, labels = batch
    asked = labels >= 0
    return model(tokens)[asked], labels[asked]
