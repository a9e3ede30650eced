"""What the experiments with the Feedback Transformer share.

A model reads tokens, and answers at those that have a label.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab.data import programs
from fwlab.experiments.experiment import Point, select
from fwlab.experiments.fit import SETUP as USUAL
from fwlab.experiments.fit import fit, fitted
from fwlab.models import LanguageModel

#: Tokens and labels, `[batch, time]`; a label of -1 asks for nothing.
Batch = tuple[Tensor, Tensor]
#: Programs for the accuracy.
TEST = 500


class Score(NamedTuple):
    """Right answers in percent, and the mean loss of an answer in nats."""

    accuracy: float
    loss: float


def growing(
    point: Point, variables: int, first: int, share: float
) -> Callable[[int], Batch]:
    """Draws programs that get longer during a share of the training.

    - `point`: with `seed`, `batch`, `steps` and the last number of
      `statements`.
    - `first`: the number of statements from which they grow.
    - Returns what makes the batch of a step, counted from 0.
    """
    rng = random.Random(point["seed"])

    def draw(step: int) -> Batch:
        grown = min(1, (step + 1) / (share * point["steps"]))
        statements = first + round((point["statements"] - first) * grown)
        made = programs(point["batch"], statements, variables, rng, clauses=True)
        return made.tokens, made.values

    return draw


#: How models are trained, in words.
SETUP = USUAL | {"optimiser": "Adam, betas 0.9 and 0.98, gradients clipped to 1"}


#: The optimiser: takes parameters and `lr`.
ADAM = partial(torch.optim.Adam, betas=(0.9, 0.98))


def train(
    model: LanguageModel, draw: Callable[[int], Batch], steps: int, rate: float
) -> Iterator[int]:
    """Train on new sequences in every step, as `fit` does."""
    return fit(model, draw, loss_of, steps, rate, optimizer=ADAM)


def learn(model: LanguageModel, point: Point, variables: int, first: int) -> Point:
    """Train while programs grow, and score programs that no training sees.

    - `point`, `variables`, `first`: as for `growing`; also the highest `rate`.
    - Returns the accuracy, the loss, the number of parameters and the learning curve.
    """
    draw = growing(point, variables, first, 0.8)
    steps, rate = point["steps"], point["rate"]
    curve = fitted(model, draw, loss_of, steps, rate, optimizer=ADAM)
    size = TEST, point["statements"], variables
    test = programs(*size, test_rng(point["seed"]), clauses=True)
    right = score(model, (test.tokens, test.labels))._asdict()
    return {**right, "parameters": model.num_parameters(), "curve": curve}


def at_best_rate(points: list[Point], rates: Sequence[float]) -> list[float]:
    """The accuracy of every seed, at the rate with the highest median.

    The rate is chosen by the same programs that are scored, for every model.
    Returns nothing unless all rates have run, with equally many seeds.
    """
    each = [[p["accuracy"] for p in select(points, rate=rate)] for rate in rates]
    return max(each, key=median) if len({*map(len, each)}) == 1 and each[0] else []


def test_rng(seed: int) -> random.Random:
    """Seed the programs for the accuracy, which no training sees.

    A negative seed would not do: Python takes its absolute value.
    """
    return random.Random(1000 + seed)


def answers(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits where there are labels, and these labels."""
    tokens, labels = batch
    asked = labels >= 0
    return model(tokens)[asked], labels[asked]


def loss_of(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(*answers(model, batch))


@torch.no_grad()
def score(model: Any, batch: Batch) -> Score:
    """Score all answers of a batch, which may be large."""
    right, loss, count = 0, 0.0, 0
    for part in zip(*(x.split(128) for x in batch), strict=True):
        logits, labels = answers(model, part)
        right += int((logits.argmax(-1) == labels).sum())
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        count += len(labels)
    return Score(round(100 * right / count, 2), round(loss / count, 4))
