"""Train on formal languages, with write strengths up to 1 and up to 2.

After Grazzi et al. 2024, Table 3: train on short sequences, test on long ones.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from answers import UNASKED, Batch, columns, enlarge, growing, loss, right, scaled
from frame import Point, Points, holds, main, order

from fwlab import plots
from fwlab.fit import SETUP, fit
from fwlab.models import LanguageModel

TITLE = "Formal languages: parity and arithmetic, far longer than in training"
SOURCE = "Grazzi et al. 2024, Table 3"
COST = "quick: 2 min of one core; full: 25 min"

#: Smallest and largest length of training sequences, and of long test sequences.
NEAR, FAR = (3, 40), (40, 256)
#: Modulus of the arithmetic task, and its operators, whose tokens follow the numbers.
MODULUS, OPERATORS = 5, "+-*"
#: Number of sequences per optimiser step, and in the test.
BATCH, TEST = 32, 256
#: Differences from the paper, which trains for 100,000 steps at width 128.
PROTOCOL = "answers after every prefix, medians instead of the best run, width"
#: Width of the short convolution, which the paper's models have.
CONV = 4


def parity(batch: int, length: int) -> Batch:
    """Sample random bits, with the parity of the bits so far as answers."""
    bits = torch.randint(2, (batch, length))
    return bits, bits.cumsum(1) % 2


def arithmetic(batch: int, length: int) -> Batch:
    """Sample random arithmetic expressions, with the value of each prefix as answers.

    - Returns the tokens and the values modulo `MODULUS`, `[batch, length]`. There is
      no answer after an operator. Products come before sums.
    """
    tokens = torch.randint(MODULUS, (batch, length))
    tokens[:, 1::2] = torch.randint(len(OPERATORS), (batch, length // 2)) + MODULUS
    answers = torch.full_like(tokens, UNASKED)
    total, term = torch.zeros_like(tokens[:, 0]), tokens[:, 0]
    answers[:, 0] = term
    for t in range(2, length, 2):
        number, operator = tokens[:, t], tokens[:, t - 1] - MODULUS
        times = operator == OPERATORS.index("*")
        signed = torch.where(operator == OPERATORS.index("-"), -number, number)
        total = torch.where(times, total, total + term)
        term = torch.where(times, term * number, signed) % MODULUS
        answers[:, t] = (total + term) % MODULUS
    return tokens, answers


class Task(NamedTuple):
    """Hold a formal language, the sizes of its model, and its accuracies from Table 3.

    - `draw`: returns a batch of tokens, and the answer after each token.
    - `tokens`, `answers`: number of tokens, and of answers, which are the first tokens.
    - `sizes`: sizes of the model and of its training.
    - `grows`: True if training begins with short sequences and large weights, which
      arithmetic needs, but which make parity worse on long sequences.
    - `published`: scaled accuracies with beta up to 1 and up to 2.
    """

    draw: Callable[[int, int], Batch]
    tokens: int
    answers: int
    sizes: dict[str, float]
    grows: bool
    published: tuple[str, str]


TASKS = {
    "parity": Task(
        *(parity, 2, 2),
        {"layers": 2, "heads": 2, "width": 32, "steps": 400, "lr": 5e-3},
        grows=False,
        published=("0.017", "1.000"),
    ),
    "arithmetic": Task(
        *(arithmetic, MODULUS + len(OPERATORS), MODULUS),
        {"layers": 3, "heads": 4, "width": 64, "steps": 6000, "lr": 2e-3},
        grows=True,
        published=("0.314", "0.971"),
    ),
}


def points(quick: bool) -> list[Point]:
    languages = [("parity", 0), ("parity", CONV)]
    if not quick:
        languages += [("arithmetic", CONV)]
    return [
        {"task": task, "limit": limit, "conv": conv, "seed": seed}
        for task, conv in languages
        for limit in (1, 2)
        for seed in (1, 2, 3)
    ]


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    task, (first, last) = TASKS[point["task"]], NEAR
    layers, heads, width, steps, lr = task.sizes.values()
    fast_weights = {"beta_max": point["limit"], "conv_size": point["conv"]}
    model = LanguageModel(
        *(task.tokens, "delta", layers, heads, width),
        d_ff=2 * width,
        fast_weights={"like": "delta-net", **fast_weights},
    )
    if task.grows:
        enlarge(model)

    def draw(step: int) -> Batch:
        length = growing(step, steps, last, first) if task.grows else last
        return asked(task, BATCH, first, length)

    curve = fit(model, draw, loss, steps, lr).curve
    near, far = (score(model, task, *lengths) for lengths in (NEAR, FAR))
    return {"near": near, "far": far, "curve": curve}


def asked(task: Task, batch: int, first: int, length: int) -> Batch:
    """Sample sequences of a task, with answers only from length `first` on."""
    tokens, answers = task.draw(batch, length)
    answers[:, : first - 1] = UNASKED
    return tokens, answers


def score(model: LanguageModel, task: Task, first: int, length: int) -> float:
    """Return the scaled accuracy of a model on lengths from `first` to `length`."""
    every = right(model, *asked(task, TEST, first, length), among=task.answers)
    return scaled(every.mean().item(), task.answers)


def claims(points: Points):
    """Yield the published claims, and our claims on parity without a convolution."""
    for name, conv in (("parity", CONV), ("arithmetic", CONV), ("parity", 0)):
        task, some = TASKS[name], points(task=name, conv=conv)
        low, high = (some(limit=limit)["far"] for limit in (1, 2))
        narrow, wide = task.published
        known = [f"{said} (Table 3)" for said in (f"{narrow} < {wide}", narrow, wide)]
        what, protocol = name, f"{PROTOCOL} {task.sizes['width']}"
        if not conv:
            what, known, protocol = f"{name}, no convolution", [""] * 3, ""
        what += ", beta up to"
        how = {"protocol": protocol}
        yield order(f"{what} 1: below beta up to 2", [low, high], known[0], **how)
        yield holds(f"{what} 1: not solved", low, lambda x: x < 0.5, known[1], **how)
        yield holds(f"{what} 2: solved", high, lambda x: x > 0.95, known[2], **how)


def draw(points: Points):
    rows = {
        f"{task}, β ≤ {limit}{', convolution' * bool(conv)}": own
        for (task, limit, conv), own in points.by("task", "limit", "conv").items()
    }
    figure, (ax,) = plots.panels(1.2 + 0.3 * len(rows))
    lengths = {"near": NEAR, "far": FAR}
    columns(ax, rows, {at: "lengths {} to {}".format(*lengths[at]) for at in lengths})
    ax.set(xlabel="scaled accuracy", xlim=(-0.1, 1.05))
    plots.legend(figure, ax, columns=2)
    return figure


def setup(point: Point) -> Point:
    task = TASKS[point["task"]]
    length = f"{NEAR[0]} to {NEAR[1]}" if task.grows else NEAR[1]
    return SETUP | task.sizes | {"batch": BATCH, "length": length}


if __name__ == "__main__":
    main(__file__)
