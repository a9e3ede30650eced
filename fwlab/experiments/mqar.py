"""Associative recall in the smallest setting of Zoology, and its forgetting.

Arora et al. 2023, and the generators of their repository: pairs of a key and a
value, in the second task every key once more with a new value, then a query for
each key, among random tokens.
"""

from functools import partial

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from fwlab import plots
from fwlab.experiments.experiment import (
    Claim,
    Experiment,
    Point,
    compared,
    losses,
    select,
)
from fwlab.experiments.fit import fit
from fwlab.experiments.recall import UNASKED, enlarge, loss_of, right
from fwlab.experiments.text import fast_weights
from fwlab.models import LanguageModel
from fwlab.plots import FAST, OTHER, SERIES, WRONG

PAIRS = 4
#: Keys that return with a new value, and what that is called.
TASKS = {0: "each key once", PAIRS: "every key returns"}
#: Numbers of sequences: for training, the same ones in every epoch, and others.
TRAIN, TEST, BATCH = 10_000, 1_000, 32
#: Training ends with the first epoch that ends above this accuracy.
SOLVED = 0.99
#: Places of queries are drawn in proportion to this power of their number.
POWER = -0.99
WIDTH, LR, DECAY = 32, 1e-2, 0.1
#: Features of fast weights; the keys of the delta rules have length 1.
MAPS = {"sum": "linear", "delta": "identity", "gated-delta": "identity"}
#: Mixers, with their colour, marker and line.
LOOKS = {
    "softmax": (OTHER, "^", "-"),
    "sum": (WRONG, "D", "-."),
    "delta": (FAST, "o", "-"),
    "gated-delta": (SERIES[0], "s", "--"),
}


def points(quick: bool) -> list[Point]:
    sizes = (64, 32, 4) if quick else (256, 64, 8)
    size = dict(zip(("vocabulary", "time", "epochs"), sizes, strict=True))
    return [
        {"mixer": mixer, "returns": returns, **size, "seed": seed}
        for seed in (1, 2, 3)
        for returns in TASKS
        for mixer in (MAPS if quick else LOOKS)
    ]


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    size = point["vocabulary"], point["time"]
    train, test = (sequences(n, point["returns"], *size) for n in (TRAIN, TEST))
    model, epoch = build(point["mixer"], *size), -(-TRAIN // BATCH)
    curve: list[float] = []
    left: list[Tensor] = []

    def draw(_: int) -> tuple[Tensor, Tensor]:
        left[:] = left or torch.randperm(TRAIN).split(BATCH)
        one = left.pop()
        return train[0][one], train[1][one]

    for step in fit(
        *(model, draw, loss_of, point["epochs"] * epoch, LR),
        optimizer=partial(torch.optim.AdamW, weight_decay=DECAY),
        schedule=lambda optimizer, _, steps: CosineAnnealingLR(optimizer, steps),
        clip=None,
    ):
        if step % epoch == 0:
            curve.append(round(right(model, *test), 4))
            if curve[-1] > SOLVED:
                break
    return {
        "accuracy": curve[-1],
        "curve": curve,
        "parameters": model.num_parameters(),
        "state": model.state_size(point["time"]),
    }


def sequences(
    count: int, returns: int, vocabulary: int, time: int
) -> tuple[Tensor, Tensor]:
    """Pairs, those that return, and queries among random tokens.

    - `returns`: number of keys that are shown a second time, from 0 to `PAIRS`.
    - Returns the tokens and what to answer after each, `[count, time]`: the most
      recent value of a queried key, elsewhere `UNASKED`. Keys are tokens from 1,
      and values are in the upper half; no sequence has one twice.
    """
    half, shown = vocabulary // 2, PAIRS + returns
    keys = torch.rand(count, half - 1).argsort(-1)[:, :PAIRS] + 1
    values = torch.rand(count, half).argsort(-1)[:, :shown] + half
    again = torch.rand(count, PAIRS).argsort(-1)[:, :returns]
    tokens = torch.randint(vocabulary, (count, time))
    tokens[:, : 2 * shown : 2] = torch.cat([keys, keys.gather(1, again)], 1)
    tokens[:, 1 : 2 * shown : 2] = values
    answers = values[:, :PAIRS].scatter(1, again, values[:, PAIRS:])
    places = torch.arange(1.0, time // 2 - shown + 1) ** POWER
    at = 2 * (shown + torch.multinomial(places.expand(count, -1), PAIRS))
    wanted = torch.full_like(tokens, UNASKED).scatter(1, at, answers)
    return tokens.scatter(1, at, keys), wanted


def build(mixer: str, vocabulary: int, time: int) -> LanguageModel:
    """Two layers with one head, as in the authors' example.

    Fast weights have a convolution of width 4 before their keys, so that a value
    and its key meet; the authors' example has one in front of theirs, too.
    """
    name = MAPS.get(mixer)
    own = fast_weights(mixer, name, conv_size=4) if name else mixer
    model = LanguageModel(vocabulary, own, 2, 1, WIDTH, time, 2 * WIDTH)
    enlarge(model)
    return model


# --- What came out ------------------------------------------------------


def claims(points: list[Point]) -> list[Claim]:
    """That a mixer solves a task was published of attention and each key once."""

    def accuracies(mixer: str, returns: int) -> list[float | None]:
        return losses(points, "accuracy", mixer=mixer, returns=returns)

    published = "solved, at every size (Fig. 2)"
    tokens, epochs = (points[0][name] for name in ("vocabulary", "epochs"))
    protocol = f"{tokens} tokens for 8,192, width {WIDTH} for 64 and more, {TRAIN:,} "
    protocol += f"sequences for 100,000, {epochs} epochs for 64, one learning rate"
    every = [
        compared(
            f"{task}, {mixer}: above {SOLVED}",
            published if (mixer, returns) == ("softmax", 0) else "",
            [accuracies(mixer, returns)],
            lambda accuracy: accuracy > SOLVED,
            protocol=protocol,
        )
        for returns, task in TASKS.items()
        for mixer in LOOKS
    ]
    sides = [accuracies(mixer, PAIRS) for mixer in ("sum", "delta")]
    return [*every, compared(f"{TASKS[PAIRS]}: sum below delta", "", sides)]


def draw(points: list[Point]) -> Figure:
    figure, axes = plots.panels(6.4, len(TASKS), sharex=True)
    for ax, (returns, task) in zip(axes, TASKS.items(), strict=True):
        for mixer, look in LOOKS.items():
            # A run that has ended stays where it was.
            own = [
                {"epoch": at + 1, "accuracy": p["curve"][min(at, len(p["curve"]) - 1)]}
                for p in select(points, mixer=mixer, returns=returns)
                for at in range(p["epochs"])
            ]
            plots.series(ax, own, *look, mixer, "accuracy", "epoch")
        ax.set(title=task, ylabel="accuracy", ylim=(-0.04, 1.04), yticks=[0, 0.5, 1])
    axes[-1].set(xlabel="epoch", xticks=range(1, points[0]["epochs"] + 1))
    plots.legend(figure, axes[0], columns=2)
    return figure


EXPERIMENT = Experiment(
    name="mqar",
    title="Associative recall as in Zoology, and its forgetting",
    source="Arora et al. 2023, and the authors' repository",
    cost="quick: 5 min of one core; full: about 38 min",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: {
        "optimiser": f"AdamW, weight decay {DECAY:g}",
        "schedule": "falls along a cosine",
        **{"lr": LR, "batch": BATCH, "width": WIDTH, "layers": 2, "heads": 1},
    },
)
