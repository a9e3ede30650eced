"""The training loop of all experiments but those on text, and learning curves."""

from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

#: Makes the schedule of an optimiser, from its highest learning rate and the
#: number of steps.
Schedule = Callable[[torch.optim.Optimizer, float, int], LRScheduler]
#: Numbers of a learning curve, at most.
CURVE = 20
#: What `fit` does unless it is told otherwise, in words.
SETUP = {
    "optimiser": "Adam, gradients clipped to 1",
    "schedule": "rises for a tenth of the steps, falls along a cosine",
}


def one_cycle(
    optimizer: torch.optim.Optimizer, lr: float, steps: int, rise: float = 0.1
) -> LRScheduler:
    """A rate that rises for a share of the steps, and falls along a cosine."""
    return OneCycleLR(optimizer, lr, steps, pct_start=rise, cycle_momentum=False)


def learning_curve(losses: list[float], steps: int) -> list[list[float]]:
    """The training losses of all steps, as the means of at most 20 equal parts.

    - `steps`: number of steps of the whole run, which may have ended before.
    - Returns pairs of a step and the mean loss of the part that ends there.
    """
    every = -(-steps // CURVE)
    ends = range(every, len(losses) + 1, every)
    return [[end, round(fmean(losses[end - every : end]), 4)] for end in ends]


def thinned(curve: list[list[float]]) -> list[list[float]]:
    """At most 20 of the pairs of a step and its loss, with the last one."""
    return curve[:: -max(1, -(-len(curve) // CURVE))][::-1]


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
    losses: list[float] | None = None,
) -> Iterator[int]:
    """Train on a new batch in every step.

    - `model`: trained in place.
    - `draw`: makes the batch of a step, counted from 0.
    - `loss`: of the model, and a batch.
    - `steps`, `lr`: number of optimiser steps, highest learning rate.
    - `optimizer`: takes parameters and `lr`.
    - `schedule`: of the learning rate; None = constant.
    - `clip`: maximum norm of the gradient; None = any.
    - `losses`: gets the loss of every step.
    - Returns an iterator over the optimiser steps, counted from 1, that
      takes one step per item.
    """
    adam = optimizer(model.parameters(), lr=lr)
    rate = None if schedule is None else schedule(adam, lr, steps)
    for step in range(steps):
        batch = draw(step)
        adam.zero_grad(set_to_none=True)
        now = loss(model, batch)
        if losses is not None:
            losses.append(now.item())
        now.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        adam.step()
        if rate is not None:
            rate.step()
        yield step + 1


def fitted(
    model: nn.Module,
    draw: Callable[[int], Any],
    loss: Callable[[Any, Any], Tensor],
    steps: int,
    lr: float,
    **options: Any,
) -> list[list[float]]:
    """Train to the end, as `fit` does, and return the `learning_curve`."""
    losses: list[float] = []
    for _ in fit(model, draw, loss, steps, lr, losses=losses, **options):
        pass
    return learning_curve(losses, steps)
