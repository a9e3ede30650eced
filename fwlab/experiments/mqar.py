"""Associative recall in the smallest setting of Zoology, and its forgetting.

Arora et al. 2023, and the generators of their repository: pairs of a key and a
value, in the second task every key once more with a new value, then a query for
each key, among random tokens.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

from fwlab import plots
from fwlab.experiments.experiment import Claim, Experiment, Point, compared, select
from fwlab.experiments.fit import fit
from fwlab.models import LanguageModel
from fwlab.plots import FAST, OTHER, SERIES, WRONG

VOCABULARY, TIME, PAIRS = 256, 64, 4
#: Keys that return with a new value, and what that is called.
TASKS = {0: "each key once", PAIRS: "every key returns"}
#: Numbers of sequences: for training, the same ones in every epoch, and others.
TRAIN, TEST, BATCH = 10_000, 1_000, 32
#: Training ends with the first epoch that ends above this accuracy.
SOLVED = 0.99
#: Places of queries are drawn in proportion to this power of their number.
POWER = -0.99
#: The target of a token that is not a query.
UNASKED = -100
MIXERS = ("softmax", "softmax-rotary", "sum", "delta", "gated-delta")


class Sequences(NamedTuple):
    """Tokens and what to answer after each, `[count, TIME]`."""

    tokens: Tensor
    wanted: Tensor


def points(quick: bool) -> list[Point]:
    size = (
        {"width": 64, "epochs": 8, "lr": 4e-3}
        if quick
        else {"width": 128, "epochs": 32, "lr": 1e-3}
    )
    return [
        {"mixer": mixer, "returns": returns, **size, "seed": seed}
        for seed in (1, 2, 3)
        for returns in TASKS
        for mixer in MIXERS
    ]


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    train, test = (sequences(count, point["returns"]) for count in (TRAIN, TEST))
    model = build(point["mixer"], point["width"])
    epoch = -(-TRAIN // BATCH)  # in steps
    rows: list[Tensor] = []

    def draw(_: int) -> Sequences:
        if not rows:
            rows.extend(torch.randperm(TRAIN).split(BATCH))
        one = rows.pop()
        return Sequences(train.tokens[one], train.wanted[one])

    curve: list[float] = []
    steps = fit(
        *(model, draw, loss_of, point["epochs"] * epoch, point["lr"]),
        optimizer=partial(torch.optim.AdamW, weight_decay=0.1),
        schedule=lambda optimizer, lr, steps: CosineAnnealingLR(optimizer, steps),
        clip=None,
    )
    for step in steps:
        if step % epoch == 0:
            curve.append(accuracy(model, test))
            if curve[-1] > SOLVED:
                break
    return {
        "accuracy": curve[-1],
        "curve": curve,
        "parameters": model.num_parameters(),
        "state": model.state_size(TIME),
    }


def sequences(count: int, returns: int) -> Sequences:
    """Pairs, those that return, and queries among random tokens.

    - `returns`: number of keys that are shown a second time, from 0 to `PAIRS`.
    - Keys are tokens from 1, and values are in the upper half of the vocabulary;
      no sequence has one twice. The most recent value of a key counts.
    """
    half, shown = VOCABULARY // 2, PAIRS + returns
    keys = torch.rand(count, half - 1).argsort(-1)[:, :PAIRS] + 1
    values = torch.rand(count, half).argsort(-1)[:, :shown] + half
    again = torch.rand(count, PAIRS).argsort(-1)[:, :returns]
    tokens = torch.randint(VOCABULARY, (count, TIME))
    tokens[:, : 2 * shown : 2] = torch.cat([keys, keys.gather(1, again)], 1)
    tokens[:, 1 : 2 * shown : 2] = values
    answers = values[:, :PAIRS].scatter(1, again, values[:, PAIRS:])
    places = torch.arange(1.0, TIME // 2 - shown + 1) ** POWER
    at = 2 * (shown + torch.multinomial(places.expand(count, -1), PAIRS))
    wanted = torch.full_like(tokens, UNASKED).scatter(1, at, answers)
    return Sequences(tokens.scatter(1, at, keys), wanted)


def build(mixer: str, width: int) -> LanguageModel:
    """Two layers with one head, as in the authors' example.

    Fast weights have a convolution of width 4 before their keys, so that a value
    and its key meet; the authors put one in front of every mixer but attention.
    """
    options: dict[str, Any] = {"fast_weights": {"conv_size": 4}}
    if mixer == "softmax-rotary":
        mixer, options = "softmax", {"softmax": {"rope": 1.0}}
    elif mixer == "softmax":
        options = {}
    return LanguageModel(VOCABULARY, mixer, 2, 1, width, TIME, **options)


def loss_of(model: nn.Module, batch: Sequences) -> Tensor:
    return F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.wanted.flatten())


@torch.no_grad()
def accuracy(model: nn.Module, test: Sequences) -> float:
    """The share of queries that get the right value."""
    asked = test.wanted != UNASKED
    logits = torch.cat([model(part) for part in test.tokens.split(250)])
    right = logits[asked].argmax(-1) == test.wanted[asked]
    return round(right.double().mean().item(), 4)


# --- What came out ------------------------------------------------------

LOOKS = {
    "softmax": (OTHER, "^", "-"),
    "softmax-rotary": (OTHER, "v", ":"),
    "sum": (WRONG, "D", "-."),
    "delta": (FAST, "o", "-"),
    "gated-delta": (SERIES[0], "s", "--"),
}


def claims(points: list[Point]) -> list[Claim]:
    """All are ours: the authors have curves, and an accuracy at which to stop."""

    def right(mixer: str, returns: int) -> list[float]:
        return [p["accuracy"] for p in select(points, mixer=mixer, returns=returns)]

    every = [
        compared(
            f"{task}, {mixer}: {SOLVED} or more",
            "",
            [right(mixer, returns)],
            lambda accuracy: accuracy >= SOLVED,
        )
        for returns, task in TASKS.items()
        for mixer in MIXERS
        if mixer != "sum" or not returns
    ]
    sides = [right("sum", PAIRS), right("delta", PAIRS)]
    return [*every, compared(f"{TASKS[PAIRS]}: sum below delta", "", sides)]


def draw(points: list[Point]) -> Figure:
    figure, axes = plots.panels(6.4, len(TASKS), sharex=True)
    for ax, (returns, task) in zip(axes, TASKS.items(), strict=True):
        for mixer, (color, marker, line) in LOOKS.items():
            own = [
                {"epoch": at, "accuracy": x}
                for p in select(points, mixer=mixer, returns=returns)
                for at, x in enumerate(p["curve"], 1)
            ]
            look = color, marker, line, mixer
            plots.series(ax, own, *look, "accuracy", "epoch")
        ax.set(title=task, ylabel="accuracy", ylim=(-0.04, 1.04), yticks=[0, 0.5, 1])
    axes[-1].set_xlabel("epoch")
    plots.legend(figure, axes[0], columns=2)
    return figure


EXPERIMENT = Experiment(
    name="mqar",
    title="Associative recall as in Zoology, and its forgetting",
    source="Arora et al. 2023, and the authors' repository",
    cost="quick: 5 min of one core; full: about 4 hours (estimated)",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
)
