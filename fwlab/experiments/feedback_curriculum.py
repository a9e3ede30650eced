"""Three ways to train a Feedback Transformer, and what each costs.

Training has to compute the steps of a sequence one after the other. Short
sequences first, or a trained parallel transformer to start from, may save
some of that.
"""

import time
from collections.abc import Iterator
from math import inf
from typing import Any

import torch
from matplotlib.figure import Figure

from fwlab import plots
from fwlab.data import programs
from fwlab.data.programs import CLAUSES
from fwlab.experiments import feedback
from fwlab.experiments.experiment import Claim, Experiment, Point, compared, select
from fwlab.experiments.feedback import test_rng
from fwlab.experiments.fit import thinned
from fwlab.layers import FeedbackTransformer
from fwlab.models import LanguageModel
from fwlab.plots import FAST, INK, TRAINED

VARIABLES, HEADS = 3, 2
#: Programs for the loss, and optimiser steps between two evaluations.
TEST, EVERY = 250, 25
WAYS = ("from scratch", "growing length", "from a transformer")


def points(quick: bool) -> list[Point]:
    size = {
        "statements": 16 if quick else 32,
        "layers": 1 if quick else 2,
        "width": 64,
        "batch": 32,
        # Of training with feedback, and of the parallel transformer before.
        "budget": 800 if quick else 2000,
        "parallel": 200 if quick else 500,
        "rate": 2e-3 if quick else 1e-3,
        # Loss of an answer in nats, at which training ends.
        "target": 0.8,
    }
    return [{"way": way, **size, "seed": seed} for seed in (1, 2, 3) for way in WAYS]


def run(point: Point) -> Point:
    """Train until the loss is at the target, or the budget is spent.

    - Returns what all stages together have cost: `steps` of the optimiser,
      the longest `chain` of layers, and seconds of the processor (`cpu`),
      without evaluation; None if the target was not reached; the `lowest`
      loss; and pairs of an optimiser step of all stages and the loss, at most 20.
    """
    torch.manual_seed(point["seed"])
    test = programs(
        TEST, point["statements"], VARIABLES, test_rng(point["seed"]), clauses=True
    )
    asked = (test.tokens, test.labels)
    cost = Cost()
    curve: list[list[float]] = []
    model = build("feedback", point)
    if point["way"] == "from a transformer":
        parallel = build("softmax", point)
        for _ in cost.of(parallel, point, point["parallel"]):
            pass
        model.start_from(parallel)
    for step in cost.of(model, point, point["budget"]):
        if step % EVERY:
            continue
        curve.append([cost.steps, feedback.score(model, asked).loss])
        if curve[-1][1] <= point["target"]:
            break
    lowest = min((loss for _, loss in curve), default=inf)
    spent = cost.spent() if lowest <= point["target"] else dict.fromkeys(cost.spent())
    return {**spent, "lowest": lowest, "curve": thinned(curve)}


def build(mixer: str, point: Point) -> LanguageModel:
    return LanguageModel(
        len(CLAUSES),
        mixer,
        layers=point["layers"],
        heads=HEADS,
        d_model=point["width"],
        # A condition with its statement is two tokens, and then comes END.
        max_len=2 * point["statements"] + 1,
    )


def chain(model: LanguageModel, tokens: int) -> int:
    """Layers that a sequence passes through one after the other.

    A parallel transformer computes all tokens of a layer at once. This is
    what training would take if everything else were free.
    """
    if isinstance(model.blocks[0], FeedbackTransformer):
        return tokens * model.blocks[0].layers
    return len(model.blocks)


class Cost:
    """The cost of training, summed over all its stages."""

    def __init__(self) -> None:
        self.steps, self.chain, self.cpu = 0, 0, 0.0

    def of(self, model: LanguageModel, point: Point, steps: int) -> Iterator[int]:
        """Train, and count; an iterator over optimiser steps, from 1."""
        first = 4 if point["way"] == "growing length" else point["statements"]
        growing = feedback.growing({**point, "steps": steps}, VARIABLES, first, 0.5)

        def draw(step: int) -> feedback.Batch:
            tokens, values = growing(step)
            self.chain += chain(model, tokens.shape[1])
            return tokens, values

        start = time.process_time()
        for step in feedback.train(model, draw, steps, point["rate"]):
            self.cpu += time.process_time() - start
            self.steps += 1
            yield step
            start = time.process_time()

    def spent(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "chain": self.chain,
            "cpu": round(self.cpu, 2),
        }


# --- What came out --------------------------------------------------------

COLORS = dict(zip(WAYS, (INK, TRAINED, FAST), strict=True))
MARKS = dict(zip(WAYS, "Dso", strict=True))
COSTS = {
    "steps": "optimiser steps",
    "chain": "chain, in thousands of layers",
    "cpu": "seconds of the processor",
}


def claims(points: list[Point]) -> list[Claim]:
    """Both are ours: the paper's numbers were not found."""
    scratch, *others = WAYS
    text = "shorter chain than from scratch, all stages counted (thousands of layers)"
    chains = {way: _chains(select(points, way=way)) for way in WAYS}
    return [
        compared(f"{way}: {text}", "", [chains[way], chains[scratch]], spec=".1f")
        for way in others
    ]


def _chains(points: list[Point]) -> list[float | None]:
    """In thousands; None where the loss was not reached."""
    return [p["chain"] and p["chain"] / 1000 for p in points]


def draw(points: list[Point]) -> Figure:
    figure, axes = plots.panels(4.8, 3)
    for ax, (cost, label) in zip(axes, COSTS.items(), strict=True):
        unit = 1000 if cost == "chain" else 1
        for way, color in COLORS.items():
            rows = {
                name: [
                    p[cost] / unit
                    for p in select(points, way=name)
                    if name == way and p[cost] is not None
                ]
                for name in WAYS
            }
            plots.rows(ax, rows, color, MARKS[way])
        ax.set_xlim(0, 1.05 * max((p[cost] or 0) / unit for p in points) or 1)
        ax.set_xlabel(label)
    return figure


EXPERIMENT = Experiment(
    name="feedback-curriculum",
    title="Feedback: short sequences first, or a transformer first",
    source="Fan et al. 2020, faster training",
    cost="quick: 4 min of one core; full: 10 min",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: feedback.SETUP,
)
