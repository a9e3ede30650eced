"""Compare the costs of three ways to train a Feedback Transformer.

Training has to compute the steps of a sequence one after the other. Short
sequences first, or a trained parallel transformer to start from, may save
some of that.
"""

import time
from collections.abc import Iterator
from math import inf

import torch
from frame import Claim, Point, Points, main, order
from matplotlib.figure import Figure
from statements import ADAM, SETUP, build, growing
from torch import Tensor

from fwlab import plots
from fwlab.data import programs
from fwlab.data.programs import test_rng
from fwlab.fit import Fit, answer_loss, fit, score
from fwlab.layers import FeedbackTransformer
from fwlab.models import LanguageModel
from fwlab.plots import FAST, INK, TRAINED

TITLE = "Feedback: short sequences first, or a transformer first"
SOURCE = "Fan et al. 2020, faster training"
COST = "quick: 4 min of one core; full: 10 min"

VARIABLES, HEADS = 3, 2
#: Number of test programs, and optimiser steps between evaluations.
TEST, EVERY = 250, 25
WAYS = ("from scratch", "growing length", "from a transformer")


def points(quick: bool) -> list[Point]:
    size = {
        "statements": 16 if quick else 32,
        "layers": 1 if quick else 2,
        "width": 64,
        "batch": 32,
        # Optimiser steps of the feedback model, and of a parallel model trained first.
        "budget": 800 if quick else 2000,
        "parallel": 200 if quick else 500,
        "rate": 2e-3 if quick else 1e-3,
        # Test loss, in nats per answer, at which training ends.
        "target": 0.8,
    }
    return [{"way": way, **size, "seed": seed} for seed in (1, 2, 3) for way in WAYS]


def run(point: Point) -> Point:
    """Train until the test loss reaches the target or the budget is spent.

    - Returns the cost of all stages together: `steps` of the optimiser,
      the longest `chain` of layers, and seconds of the processor (`cpu`),
      without evaluation; None if the target was not reached; the `lowest`
      loss; and pairs of an optimiser step of all stages and the loss, at most 20.
    """
    torch.manual_seed(point["seed"])
    size = TEST, point["statements"], VARIABLES
    test = programs(*size, test_rng(point["seed"]), clauses=True)
    asked = test.tokens, test.labels
    cost = {"steps": 0, "chain": 0, "cpu": 0.0}
    model = build("feedback", point, HEADS)
    if point["way"] == "from a transformer":
        parallel = build("softmax", point, HEADS)
        train(parallel, point, point["parallel"], cost)
        model.start_from(parallel)
    before = cost["steps"]
    fitted = train(model, point, point["budget"], cost, asked)
    lowest = min((loss for _, loss in fitted.curve), default=inf)
    reached = lowest <= point["target"]
    return {
        **(cost | {"cpu": round(cost["cpu"], 2)} if reached else dict.fromkeys(cost)),
        "lowest": lowest,
        "curve": [(before + step, loss) for step, loss in fitted.short],
    }


def train(
    model: LanguageModel,
    point: Point,
    steps: int,
    cost: dict[str, float],
    asked: tuple[Tensor, Tensor] | None = None,
) -> Fit:
    """Train a model on random programs, and add the cost of training to `cost`.

    - `steps`: maximum number of optimiser steps.
    - `cost`: cost of the earlier stages, which is updated in place.
    - `asked`: tokens and labels of the test programs. Training ends when their loss
      reaches the target. None = train to the end.
    """
    first = 4 if point["way"] == "growing length" else point["statements"]
    longer = growing({**point, "steps": steps}, VARIABLES, first, 0.5)
    cost["cpu"] -= time.process_time()

    def draw(step: int) -> tuple[Tensor, Tensor]:
        tokens, values = longer(step)
        cost["chain"] += chain(model, tokens.shape[1])
        return tokens, values

    def evaluate(step: int) -> float:
        cost["cpu"] += time.process_time()
        loss = score(model, asked).loss
        cost["cpu"] -= time.process_time()
        return loss

    fitted = fit(
        *(model, draw, answer_loss, steps, point["rate"]),
        optimizer=ADAM,
        every=EVERY,
        evaluate=evaluate if asked else None,
        stop=lambda curve: "target" if curve[-1][1] <= point["target"] else "",
    )
    cost["cpu"] += time.process_time()
    cost["steps"] += fitted.steps
    return fitted


def chain(model: LanguageModel, tokens: int) -> int:
    """Count the layers that a model has to compute in sequence for `tokens` tokens.

    A parallel transformer computes all tokens of a layer at once. The count
    measures the time of training if all other work were free.
    """
    if isinstance(model.blocks[0], FeedbackTransformer):
        return tokens * model.blocks[0].layers
    return len(model.blocks)


# --- Claims and figures ---------------------------------------------------

LOOKS = dict(zip(WAYS, ((INK, "D"), (TRAINED, "s"), (FAST, "o")), strict=True))
COSTS = {
    "steps": "optimiser steps",
    "chain": "chain, in thousands of layers",
    "cpu": "seconds of the processor",
}


def claims(points: Points) -> Iterator[Claim]:
    """Yield two claims of our own, since the paper's numbers were not found."""
    scratch, *others = WAYS
    text = "shorter chain than from scratch, all stages counted (thousands of layers)"
    # A chain is infinite if training did not reach the target loss.
    chains = {way: [x / 1000 for x in points(way=way)["chain"]] for way in WAYS}
    for way in others:
        yield order(f"{way}: {text}", [chains[way], chains[scratch]], spec=".1f")


def draw(points: Points) -> Figure:
    figure, axes = plots.panels(4.8, 3)
    for ax, (cost, label) in zip(axes, COSTS.items(), strict=True):
        unit = 1000 if cost == "chain" else 1
        for way, look in LOOKS.items():
            own = [x / unit for x in points(way=way)[cost] if x < inf]
            plots.rows(ax, dict.fromkeys(WAYS, ()) | {way: own}, *look)
        ax.set_xlim(0, 1.05 * max([x for x in points[cost] if x < inf] or [1]) / unit)
        ax.set_xlabel(label)
    return figure


setup = SETUP

if __name__ == "__main__":
    main(__file__)
