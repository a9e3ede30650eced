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

#: Programs for the accuracy.
TEST = 500
#: The optimiser: takes parameters and `lr`.
ADAM = partial(torch.optim.Adam, betas=(0.9, 0.98))
#: The training of models, in words.
SETUP = USUAL | {"optimiser": "Adam, betas 0.9 and 0.98, gradients clipped to 1"}
#: Claims that accuracies are in this order, the largest first.
above = partial(order, sign=">", spec=".1f")


def named(model: str, layers: int) -> str:
    """Name a model by its layers, as in "feedback, 2 layers"."""
    return f"{model}, {layers} layer{'s' if layers > 1 else ''}"


def build(
    mixer: Mixer | str, point: Point, heads: int, length: int = 0
) -> LanguageModel:
    """Build a model for the programs of a point.

    - `point`: with `statements`, and the model's `layers` and `width`.
    - `length`: the model reads at least as many tokens.
    """
    # A condition with its statement is two tokens, and then comes END.
    length = max(2 * point["statements"] + 1, length)
    sizes = point["layers"], heads, point["width"], length
    return LanguageModel(len(CLAUSES), mixer, *sizes)


def growing(
    point: Point, variables: int, first: int, share: float
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Draw programs that get longer during a share of the training.

    - `point`: with `seed`, `batch`, `steps` and the last number of
      `statements`.
    - `first`: the number of statements from which they grow.
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
    """Train while programs grow, and score programs that no training sees.

    - `point`, `variables`, `first`: as for `growing`; also the highest `rate`.
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
    """Keep the rate with the highest median accuracy, for each model.

    It is chosen by the same programs that are scored.
    """
    return points.at_best_rate("model", "layers", by="accuracy", best=max, rate="rate")
