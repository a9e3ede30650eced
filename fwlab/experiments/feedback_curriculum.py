"""Three ways to train a Feedback Transformer, and what each costs.

Training has to compute the steps of a sequence one after the other. Short
sequences first, or a trained parallel transformer to start from, may save
some of that.
"""

import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from matplotlib.figure import Figure

from fwlab.data import programs
from fwlab.data.programs import CLAUSES
from fwlab.experiments import charts, feedback
from fwlab.experiments.experiment import Claim, Experiment, Point, medians, select
from fwlab.experiments.feedback_variables import test_rng
from fwlab.layers import FeedbackTransformer
from fwlab.models import LanguageModel
from fwlab.plots import FAST, INK, OTHER, TRAINED

VARIABLES, HEADS = 3, 2
#: Programs for the loss, and optimiser steps between two evaluations.
TEST, EVERY = 250, 25
WAYS = ("from scratch", "growing length", "from a transformer")


def points(quick: bool) -> list[Point]:
    size = {
        "statements": 16 if quick else 50,
        "layers": 1 if quick else 2,
        "width": 64 if quick else 128,
        "batch": 32,
        # Of training with feedback, and of the parallel transformer before.
        "budget": 800 if quick else 4000,
        "parallel": 200 if quick else 1000,
        "rate": 2e-3 if quick else 1e-3,
        # Loss of an answer in nats, at which training ends.
        "target": 0.8,
    }
    return [{"way": way, **size, "seed": seed} for seed in (1, 2, 3) for way in WAYS]


def run(point: Point) -> Point:
    """Train until the loss is at the target, or the budget is spent.

    - Returns what all stages together have cost: `steps` of the optimiser,
      `chain` (see `chain`) and seconds of the processor without evaluation (`cpu`); all
      None if the target was not reached. `lowest` is the lowest loss.
    """
    torch.manual_seed(point["seed"])
    test = programs(
        TEST, point["statements"], VARIABLES, test_rng(point["seed"]), clauses=True
    )
    asked = (test.tokens, test.labels)
    cost, lowest = Cost(), float("inf")
    model = build("feedback", point)
    if point["way"] == "from a transformer":
        parallel = build("softmax", point)
        for _ in cost.of(parallel, point, point["parallel"]):
            pass
        warm_start(model, parallel)
    for step in cost.of(model, point, point["budget"]):
        if step % EVERY:
            continue
        lowest = min(lowest, feedback.score(model, asked).loss)
        if lowest <= point["target"]:
            return {**cost.found(), "lowest": lowest}
    return {**dict.fromkeys(cost.found()), "lowest": lowest}


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


def warm_start(model: LanguageModel, parallel: LanguageModel) -> None:
    """Take over embeddings, blocks and norm of a parallel transformer.

    Its table of positions has no counterpart.
    """
    model.embedding.load_state_dict(parallel.embedding.state_dict())
    model.norm.load_state_dict(parallel.norm.state_dict())
    model.blocks[0] = FeedbackTransformer.from_transformer(parallel)


def chain(model: LanguageModel, time: int) -> int:
    """Layers that a sequence passes through one after the other.

    A parallel transformer computes all tokens of a layer at once. This is
    what training would take if everything else were free.
    """
    if isinstance(model.blocks[0], FeedbackTransformer):
        return time * model.blocks[0].layers
    return len(model.blocks)


class Cost:
    """What training takes, over all its stages."""

    def __init__(self) -> None:
        self.steps, self.chain, self.cpu = 0, 0, 0.0

    def of(self, model: LanguageModel, point: Point, steps: int) -> Iterator[int]:
        """Train, and count; an iterator over optimiser steps, from 1."""
        rng, growing = random.Random(point["seed"]), point["way"] == "growing length"

        def draw(step: int) -> feedback.Batch:
            statements = point["statements"]
            if growing:  # for half of the budget, from 4 statements on
                grown = min(1, (step + 1) / (0.5 * steps))
                statements = 4 + round((statements - 4) * grown)
            made = programs(point["batch"], statements, VARIABLES, rng, clauses=True)
            self.chain += chain(model, made.tokens.shape[1])
            return made.tokens, made.values

        start = time.process_time()
        for step in feedback.train(model, draw, steps, point["rate"]):
            self.cpu += time.process_time() - start
            self.steps += 1
            yield step
            start = time.process_time()

    def found(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "chain": self.chain,
            "cpu": round(self.cpu, 2),
        }
