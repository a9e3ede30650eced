"""Measure recall in Zoology's smallest setting, also after keys get new values.

Arora et al. 2023, and the generators of their repository: pairs of a key and a
value, in the second task every key once more with a new value, then a query for
each key, among random tokens.
"""

from functools import partial

import torch
from answers import UNASKED, WIDTH, Batch, enlarge, loss, right
from frame import Point, Points, holds, main, order
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from fwlab import plots
from fwlab.feature_maps import ELU1, Identity
from fwlab.fit import fit
from fwlab.layers import FastWeightAttention
from fwlab.models import LanguageModel, Mixer
from fwlab.plots import FAST, OTHER, SERIES, WRONG

TITLE = "Associative recall as in Zoology, and its forgetting"
SOURCE = "Arora et al. 2023, and the authors' repository"
COST = "quick: 5 min of one core; full: about 38 min"

PAIRS = 4
#: Names of the tasks, by the number of keys that return with a new value.
TASKS = {0: "each key once", PAIRS: "every key returns"}
#: Numbers of sequences: for training (the same in all epochs), for tests, per batch.
TRAIN, TEST, BATCH = 10_000, 1_000, 32
#: Test accuracy above which training ends after an epoch.
SOLVED = 0.99
#: Exponent of the power law from which the positions of queries are sampled.
POWER = -0.99
LR, DECAY = 1e-2, 0.1
#: Mixers, with their colour, marker and line.
LOOKS = {
    "softmax": (OTHER, "^", "-"),
    "sum": (WRONG, "D", "-."),
    "delta": (FAST, "o", "-"),
    "gated-delta": (SERIES[0], "s", "--"),
}


def points(quick: bool) -> list[Point]:
    vocabulary, time, epochs = (64, 32, 4) if quick else (256, 64, 8)
    size = {"vocabulary": vocabulary, "time": time, "epochs": epochs}
    return [
        {"mixer": mixer, "returns": returns, **size, "seed": seed}
        for seed in (1, 2, 3)
        for returns in TASKS
        for mixer in LOOKS
        if not (quick and mixer == "softmax")
    ]


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    size = point["vocabulary"], point["time"]
    train, test = (sequences(n, point["returns"], *size) for n in (TRAIN, TEST))
    model, epoch = build(point["mixer"], *size), -(-TRAIN // BATCH)
    left: list[Tensor] = []

    def draw(_: int) -> Batch:
        left[:] = left or torch.randperm(TRAIN).split(BATCH)
        one = left.pop()
        return train[0][one], train[1][one]

    fitted = fit(
        *(model, draw, loss, point["epochs"] * epoch, LR),
        optimizer=partial(torch.optim.AdamW, weight_decay=DECAY),
        schedule=lambda optimizer, _, steps: CosineAnnealingLR(optimizer, steps),
        clip=None,
        every=epoch,
        evaluate=lambda _: round(right(model, *test).mean().item(), 4),
        stop=lambda curve: "solved" if curve[-1][1] > SOLVED else "",
    )
    curve = [accuracy for _, accuracy in fitted.curve]
    return {
        "accuracy": curve[-1],
        "curve": curve,
        "parameters": model.num_parameters(),
        "state": model.state_size(point["time"]),
    }


def sequences(count: int, returns: int, vocabulary: int, time: int) -> Batch:
    """Sample sequences with pairs, repeated keys, and queries among random tokens.

    - `returns`: number of keys that are shown a second time, from 0 to `PAIRS`.
    - Returns the tokens and the answer after each, `[count, time]`: the most
      recent value of a queried key, elsewhere `UNASKED`. Keys are tokens from 1,
      and values are from the upper half, without repetition.
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
    """Build a language model of two layers with one head, as in the authors' example.

    Fast weights have a convolution of width 4 before their keys, so that a value
    meets its key, as in the authors' example. The keys of the delta rules have
    length 1 and no feature map.
    """
    features, norm = (ELU1(), None) if mixer == "sum" else (Identity(), "l2")
    fast_weights = Mixer(
        lambda s: FastWeightAttention(
            *(s.d_model, s.heads, features, mixer.replace("-", "_"), norm), conv_size=4
        )
    )
    own = mixer if mixer == "softmax" else fast_weights
    model = LanguageModel(vocabulary, own, 2, 1, WIDTH, time, 2 * WIDTH)
    enlarge(model)
    return model


def claims(points: Points):
    """Yield a claim for each task and mixer. Only one of the claims is published."""
    tokens, epochs = (points[0][name] for name in ("vocabulary", "epochs"))
    protocol = f"{tokens} tokens for 8,192, width {WIDTH} for 64 and more, {TRAIN:,} "
    protocol += f"sequences for 100,000, {epochs} epochs for 64, one learning rate"
    for returns, task in TASKS.items():
        for mixer in LOOKS:
            known = (mixer, returns) == ("softmax", 0)
            yield holds(
                f"{task}, {mixer}: above {SOLVED}",
                points(mixer=mixer, returns=returns)["accuracy"],
                lambda accuracy: accuracy > SOLVED,
                "solved, at every size (Fig. 2)" if known else "",
                protocol=protocol,
            )
    again = points(returns=PAIRS)
    both = [again(mixer=mixer)["accuracy"] for mixer in ("sum", "delta")]
    yield order(f"{TASKS[PAIRS]}: sum below delta", both)


def draw(points: Points):
    epochs = range(1, points[0]["epochs"] + 1)
    figure, axes = plots.panels(6.4, len(TASKS), sharex=True)
    for ax, (returns, task) in zip(axes, TASKS.items(), strict=True):
        for mixer, look in LOOKS.items():
            # Continue the curve of an ended run at its last accuracy.
            own = [
                {"epoch": epoch, "accuracy": curve[min(epoch, len(curve)) - 1]}
                for curve in points(mixer=mixer, returns=returns)["curve"]
                for epoch in epochs
            ]
            plots.series(ax, own, *look, mixer, "accuracy", "epoch")
        ax.set(title=task, ylabel="accuracy", ylim=(-0.04, 1.04), yticks=[0, 0.5, 1])
    axes[-1].set(xlabel="epoch", xticks=epochs)
    plots.legend(figure, axes[0], columns=2)
    return figure


setup = {
    "optimiser": f"AdamW, weight decay {DECAY:g}",
    "schedule": "falls along a cosine",
    **{"lr": LR, "batch": BATCH, "width": WIDTH, "layers": 2, "heads": 1},
}

if __name__ == "__main__":
    main(__file__)
