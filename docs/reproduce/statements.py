"""Share code between the experiments with the Feedback Transformer.

A model reads the statements of programs, which get longer while it trains, and
predicts the output of each print.
"""

import random
from collections.abc import Callable
from functools import partial

import torch
from frame import Point, Points, order
from torch import Tensor

from fwlab.data import programs
from fwlab.data.programs import CLAUSES, test_rng
from fwlab.fit import SETUP as USUAL
from fwlab.fit import answer_loss, fit, score
from fwlab.models import LanguageModel, Mixer

#: Number of test programs for the accuracy.
TEST = 500
#: Function that builds the optimiser from parameters and `lr`.
ADAM = partial(torch.optim.Adam, betas=(0.9, 0.98))
#: Hyper-parameters of the training, as texts for the page.
SETUP = USUAL | {"optimiser": "Adam, betas 0.9 and 0.98, gradients clipped to 1"}
#: Function that claims an order of accuracies, the largest first.
above = partial(order, sign=">", spec=".1f")


def named(model: str, layers: int) -> str:
    """Return a model's name with its layers, such as "feedback, 2 layers"."""
    return f"{model}, {layers} layer{'s' if layers > 1 else ''}"


def build(
    mixer: Mixer | str, point: Point, heads: int, length: int = 0
) -> LanguageModel:
    """Build a language model for programs with the given settings.

    - `point`: has `statements`, and the model's `layers` and `width`.
    - `length`: minimum number of tokens that the model can read.
    """
    # A condition and its statement have two tokens, followed by END.
    length = max(2 * point["statements"] + 1, length)
    sizes = point["layers"], heads, point["width"], length
    return LanguageModel(len(CLAUSES), mixer, *sizes)


def growing(
    point: Point, variables: int, first: int, share: float
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a function that samples programs, which get longer during training.

    - `point`: has `seed`, `batch`, `steps` and the last number of
      `statements`.
    - `first`: number of statements at the start; they grow for a `share` of training.
    - Returns a function that makes the batch of a step, from 0: tokens, and a label
      for every statement.
    """
    rng = random.Random(point["seed"])

    def draw(step: int) -> tuple[Tensor, Tensor]:
        grown = min(1, (step + 1) / (share * point["steps"]))
        statements = first + round((point["statements"] - first) * grown)
        made = programs(point["batch"], statements, variables, rng, clauses=True)
        return made.tokens, made.values

    return draw


def learn(model: LanguageModel, point: Point, variables: int, first: int) -> Point:
    """Train a model on growing programs, and score it on test programs.

    - `point`, `variables`, `first`: as for `growing`; `point` also has a `rate`.
    - Returns the accuracy, the loss, the number of parameters and the learning curve.
    """
    draw = growing(point, variables, first, 0.8)
    steps, rate = point["steps"], point["rate"]
    fitted = fit(model, draw, answer_loss, steps, rate, optimizer=ADAM)
    size = TEST, point["statements"], variables
    test = programs(*size, test_rng(point["seed"]), clauses=True)
    right = score(model, (test.tokens, test.labels))._asdict()
    return {**right, "parameters": model.num_parameters(), "curve": fitted.curve}


def tuned(points: Points) -> Points:
    """Select the runs of each model at the rate with the highest median accuracy.

    The rate is chosen on the same programs that are scored.
    """
    return points.at_best_rate("model", "layers", by="accuracy", best=max, rate="rate")
