"""What the experiments with the Feedback Transformer share.

A model reads tokens, and answers at those that have a label.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab.models import LanguageModel

#: Tokens and labels, `[batch, time]`; a label of -1 asks for nothing.
Batch = tuple[Tensor, Tensor]


class Score(NamedTuple):
    """Right answers in percent, and the mean loss of an answer in nats."""

    accuracy: float
    loss: float


def train(
    model: LanguageModel, draw: Callable[[int], Batch], steps: int, rate: float
) -> Iterator[int]:
    """Train on new sequences in every step.

    - `draw`: makes the batch of a step, counted from 0.
    - `rate`: the highest learning rate, after a warm-up of a tenth of the
      steps; then it falls to 0 along a cosine.
    - Returns an iterator over the optimiser steps, counted from 1, that
      takes one step per item.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, steps, pct_start=0.1, cycle_momentum=False
    )
    for step in range(steps):
        loss = loss_of(model, draw(step))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield step + 1


def answers(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits where there are labels, and these labels."""
    tokens, labels = batch
    asked = labels >= 0
    return model(tokens)[asked], labels[asked]


def loss_of(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(*answers(model, batch))


@torch.no_grad()
def score(model: Any, batch: Batch) -> Score:
    """Of all answers of a batch, which may be large."""
    right, loss, count = 0, 0.0, 0
    for part in zip(*(x.split(128) for x in batch), strict=True):
        logits, labels = answers(model, part)
        right += int((logits.argmax(-1) == labels).sum())
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        count += len(labels)
    return Score(round(100 * right / count, 2), round(loss / count, 4))
