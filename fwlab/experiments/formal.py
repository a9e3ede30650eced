"""Formal languages: what a write strength up to 2 is for in a trained network.

After Grazzi et al. 2024, Table 3: train on short sequences, test on long ones.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from fwlab import plots
from fwlab.experiments.experiment import (
    Claim,
    Experiment,
    Point,
    compared,
    losses,
)
from fwlab.experiments.fit import SETUP, fitted
from fwlab.experiments.recall import UNASKED, enlarge, loss_of
from fwlab.models import LanguageModel
from fwlab.plots import SERIES

#: Train and test on sequences from the first to the second length.
NEAR, FAR = (3, 40), (40, 256)
#: Arithmetic has the numbers below this one; its operators are the next tokens.
MODULUS, OPERATORS = 5, "+-*"
#: Sequences of an optimiser step, and of the test.
BATCH, TEST = 32, 256
#: Width of the heads.
HEAD = 16
#: How we differ from the paper, which trains for 100,000 steps at width 128.
PROTOCOL = "answers after every prefix, medians instead of the best run, width"
#: Width of the short convolution, which the paper's models have.
CONV = 4


def parity(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Random bits, and after each whether the number of ones is odd."""
    bits = torch.randint(2, (batch, length))
    return bits, bits.cumsum(1) % 2


def arithmetic(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Numbers with operators between them, and after each number the value so far.

    - Returns the tokens and the values modulo `MODULUS`, `[batch, length]`; after
      an operator nothing is asked. Products come before sums.
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
    """A language, and what Table 3 says of it.

    - `draw`: makes a batch of tokens, and what to answer after each.
    - `tokens`, `answers`: numbers of tokens and of possible answers, which are
      the first tokens.
    - `layers`, `width`, `budget`, `lr`: of the model, and of its training.
    - `grows`: whether training begins with short sequences and large weights, which
      arithmetic needs, and which make parity worse on long sequences.
    - `published`: scaled accuracies with beta up to 1 and up to 2.
    """

    draw: Callable[[int, int], tuple[Tensor, Tensor]]
    tokens: int
    answers: int
    layers: int
    width: int
    budget: int
    lr: float
    grows: bool
    published: tuple[str, str]


TASKS = {
    "parity": Task(
        *(parity, 2, 2),
        layers=2,
        width=32,
        budget=400,
        lr=5e-3,
        grows=False,
        published=("0.017", "1.000"),
    ),
    "arithmetic": Task(
        *(arithmetic, MODULUS + len(OPERATORS), MODULUS),
        layers=3,
        width=64,
        budget=6000,
        lr=2e-3,
        grows=True,
        published=("0.314", "0.971"),
    ),
}


def points(quick: bool) -> list[Point]:
    settings = [("parity", limit, conv) for conv in (0, CONV) for limit in (1, 2)]
    if not quick:
        settings += [("arithmetic", 1, CONV), ("arithmetic", 2, CONV)]
    return [
        {"task": task, "limit": limit, "conv": conv, "seed": seed}
        for task, limit, conv in settings
        for seed in (1, 2, 3)
    ]


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    task = TASKS[point["task"]]
    model = LanguageModel(
        *(task.tokens, "delta", task.layers, task.width // HEAD, task.width),
        d_ff=2 * task.width,
        fast_weights={
            "like": "delta-net",
            "beta_max": point["limit"],
            "conv_size": point["conv"],
        },
    )
    first, last = NEAR
    if task.grows:
        enlarge(model)

    def draw(step: int) -> tuple[Tensor, Tensor]:
        grown = first + 2 * last * step // task.budget if task.grows else last
        return asked(task, BATCH, first, min(last, grown))

    curve = fitted(model, draw, loss_of, task.budget, task.lr)
    near, far = (score(model, task, *lengths) for lengths in (NEAR, FAR))
    return {"near": near, "far": far, "curve": curve}


def asked(task: Task, batch: int, first: int, length: int) -> tuple[Tensor, Tensor]:
    """Sequences whose answers count from this length on."""
    tokens, answers = task.draw(batch, length)
    answers[:, : first - 1] = UNASKED
    return tokens, answers


@torch.no_grad()
def score(model: LanguageModel, task: Task, first: int, length: int) -> float:
    """Scaled accuracy at these lengths: 0 is chance, 1 is perfect."""
    tokens, answers = asked(task, TEST, first, length)
    given = model(tokens)[..., : task.answers].argmax(-1)
    right = (given == answers)[answers != UNASKED].double().mean().item()
    return round((right - 1 / task.answers) / (1 - 1 / task.answers), 4)


# --- What came out ------------------------------------------------------


def claims(points: list[Point]) -> list[Claim]:
    """As published, with a short convolution; and ours, of parity without one."""
    every = []
    for name, conv in (*((name, CONV) for name in TASKS), ("parity", 0)):
        low, high = (
            losses(points, "far", task=name, limit=limit, conv=conv) for limit in (1, 2)
        )
        what = f"{name}, beta up to" if conv else f"{name}, no convolution, beta up to"
        narrow, wide = TASKS[name].published
        for text, published, *rest in (
            (f"{what} 1: below beta up to 2", f"{narrow} < {wide}", [low, high]),
            (f"{what} 1: not solved", narrow, [low], lambda x: x < 0.5),
            (f"{what} 2: solved", wide, [high], lambda x: x > 0.95),
        ):
            known = f"{published} (Table 3)" if conv else ""
            protocol = f"{PROTOCOL} {TASKS[name].width}" * bool(conv)
            every.append(compared(text, known, *rest, protocol=protocol))
    return every


def draw(points: list[Point]) -> Figure:
    rows: dict[str, list[Point]] = {}
    for p in points:
        conv = ", convolution" if p["conv"] else ""
        rows.setdefault(f"{p['task']}, β ≤ {p['limit']}{conv}", []).append(p)
    figure, (ax,) = plots.panels(1.2 + 0.3 * len(rows))
    for where, (low, high), color, marker in (
        ("near", NEAR, SERIES[0], "^"),
        ("far", FAR, SERIES[1], "o"),
    ):
        numbers = {name: losses(own, where) for name, own in rows.items()}
        plots.rows(ax, numbers, color, marker, f"lengths {low} to {high}")
    ax.set(xlabel="scaled accuracy", xlim=(-0.1, 1.05))
    plots.legend(figure, ax, columns=2)
    return figure


def setup(point: Point) -> Point:
    task = TASKS[point["task"]]
    sizes = {"layers": task.layers, "width": task.width, "heads": task.width // HEAD}
    lengths = f"{NEAR[0]} to {NEAR[1]}" if task.grows else NEAR[1]
    steps = {"steps": task.budget, "length": lengths}
    return SETUP | {"lr": task.lr, "batch": BATCH} | steps | sizes


EXPERIMENT = Experiment(
    name="formal",
    title="Formal languages: parity and arithmetic, far longer than in training",
    source="Grazzi et al. 2024, Table 3",
    cost="quick: 2 min of one core; full: 25 min",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=setup,
)
