"""Loss against the size of the state, without truncated context.

Table 4 of Schlag et al. 2021, at a size that a processor can train; and
when carried state helps the delta rule.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import inf, log
from statistics import median

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from fwlab import plots
from fwlab.experiments import text
from fwlab.experiments.experiment import (
    Claim,
    Experiment,
    Point,
    compared,
    losses,
    select,
)
from fwlab.experiments.text import LR, median_loss
from fwlab.layers import TransformerXL
from fwlab.layers.transformer_xl import RelativeAttention
from fwlab.models import Mixer
from fwlab.plots import FAST, OTHER, SERIES, TRAINED
from fwlab.training import Config
from fwlab.training.batches import in_rows

#: State in scalars, and validation perplexity per word on WikiText-103 of
#: the medium model; the Linear Transformer's is above 260.
PUBLISHED = {
    "delta": {131_072: 27.8},
    "transformer-xl": {
        131_072: 65.7,
        1_048_576: 29.3,
        2_097_152: 26.4,
        6_291_456: 24.6,
    },
}
#: Tokens of segment memory, and of a segment.
MEMORIES = {"nanogpt": (8, 32, 128), "small": (4, 16, 64)}
#: Sizes of the small models that are trained for longer: 1600 optimiser
#: steps in place of 400, and 6400.
LONGER = ("small-1600", "small-6400")
RATES = (4e-3, 1e-3, 2.5e-4)
PROTOCOL = "characters, small models, minutes of training"
#: Characters that are read with a state made in one way or another.
AHEAD = 1024


def points(quick: bool) -> list[Point]:
    size = "small" if quick else "nanogpt"
    delta = ("delta", "linear", 0, 0)
    settings = [delta, ("sum", "linear", 1, 0), ("gated-delta", "identity", 0, 0)]
    if not quick:
        settings += [("delta", "dpfp", 0, 0), ("sum", "linear", 0, 0)]
    settings += [("transformer-xl", "", 0, memory) for memory in MEMORIES[size]]
    runs = [(each, size, LR[size]) for each in settings]
    # Carried state helps the delta rule or not, by training.
    if quick:
        runs += [(delta, "small-1600", 1e-3)]
    else:
        runs += [(delta, size, lr) for size in ("small", *LONGER) for lr in RATES]
    names = ("model", "map", "normalize", "memory")
    return text.points(
        quick,
        [
            {**dict(zip(names, each, strict=True)), "size": size, "lr": lr}
            for each, size, lr in runs
        ],
    )


def run(point: Point) -> Point:
    # A step for each segment takes long, so small models read as many
    # sequences at once as in training, instead of one.
    config, mixer = model(point)
    rows = 1 if point["size"] == "nanogpt" else config.batch
    corpus = text.load(point["corpus"])
    run = text.Run(config, mixer, corpus, carry=True, rows=rows)
    result = text.train(run)
    result["state_size"] = run.model.state_size(10**9)  # at its largest
    result["windows_loss"] = text.finite(run.evaluate(carry=False))
    if not point["memory"]:
        return result | summary(by_position(run)) | by_state(run)
    memories = MEMORIES[point["size"]]
    if point["memory"] == max(memories):
        result["by_memory"] = {str(m): by_memory(run, m) for m in memories}
    return result


def by_memory(run: text.Run, memory: int) -> float | None:
    """The loss of a trained Transformer-XL with less memory, and segments as long.

    As in appendix F of the paper: one model, cut at evaluation.
    """
    for part in run.model.modules():
        if isinstance(part, RelativeAttention):
            part.memory = part.segment = memory
    return text.finite(run.evaluate())


@torch.no_grad()
def by_state(run: text.Run) -> Point:
    """The loss of the text that would come next in training, with two states.

    The final weights read it. `stale_loss` is with the state that training has
    carried: each part of it was written by the weights of its time. `own_loss`
    is with the state that the final weights make of the same text, which has
    `carried` characters.
    """
    block, rows = run.config.block, in_rows(run.train_tokens, run.config.batch).long()
    past = run.step % ((rows.shape[1] - 1) // block) * block
    own = None
    for part in rows[:, :past].split(AHEAD, 1):
        own = run.model.prefill(part, own)[1]
    ahead = rows[:, past : past + AHEAD + 1]
    targets = ahead[:, 1:].flatten()
    result: Point = {"carried": past}
    for name, state in (("stale", run.states[0]), ("own", own)):
        logits = run.model.prefill(ahead[:, :-1], state)[0].flatten(0, 1)
        result[f"{name}_loss"] = text.finite(F.cross_entropy(logits, targets).item())
    return result


@torch.no_grad()
def by_position(run: text.Run) -> list[list[float | None]]:
    """Measure the loss with carried state, and how large the state becomes.

    Returns rows of the number of characters read, the loss since the row
    before, and the norm of a head's fast weights, the mean over layers
    and heads; None if the state is not fast weights alone.
    """
    tokens = in_rows(run.val_tokens, run.eval_rows).long()
    ends = [run.config.block]
    while 2 * ends[-1] < tokens.shape[1]:
        ends.append(2 * ends[-1])
    rows: list[list[float | None]] = []
    state = None
    for start, end in pairwise([0, *ends]):
        inputs, targets = tokens[:, start:end], tokens[:, start + 1 : end + 1]
        loss, state = run.loss.eval()(inputs, targets, state, carry=True)
        layers = state[1:]
        norm = None
        if all(isinstance(W, Tensor) for W in layers):
            norms = torch.stack(layers).norm(dim=(-2, -1))
            norm = text.finite(norms.mean().item())
        rows.append([end, text.finite(loss.item()), norm])
    return rows


def summary(rows: list[list[float | None]]) -> Point:
    """The first and last norm, and the lowest and last loss, of `by_position`."""
    (_, _, first), (_, loss, last) = rows[0], rows[-1]
    lowest = min(rows, key=lambda row: inf if row[1] is None else row[1])
    return {
        "first_norm": first,
        "last_norm": last,
        "lowest_loss": lowest[1],
        "lowest_at": lowest[0],
        "last_loss": loss,
    }


def model(point: Point) -> tuple[Config, Mixer]:
    """The configuration of a point, and how its model mixes."""
    if memory := point["memory"]:
        mixer = Mixer(
            lambda s: TransformerXL(
                s.d_model, s.heads, s.layers, s.d_ff, memory, segment=memory
            ),
            whole=True,
        )
    else:
        normalize = bool(point["normalize"])
        mixer = text.fast_weights(point["model"], point["map"], normalize)
    return text.config(point, mixer), mixer


# --- What came out ------------------------------------------------------


def claims(points: list[Point]) -> list[Claim]:
    main = of_the_table(points)
    delta = losses(main, model="delta", map="linear")
    sums = losses(main, model="sum", normalize=1)
    gated = losses(main, model="gated-delta")
    xl, own = cut(main), trained(main)
    worst = max(xl.values(), key=_middle, default=[])
    smallest = xl[min(xl)] if xl else []
    every = [
        _published(
            "sum: above Transformer-XL with every memory",
            "above 260, 65.7 to 24.6",
            [worst, sums],
        ),
        _published("delta: below sum", "27.8, above 260", [delta, sums]),
        _published(
            "delta: below Transformer-XL with an equal state",
            "27.8, 65.7",
            [delta, smallest],
        ),
        _published(
            "Transformer-XL with 16 times the state: below delta",
            "26.4, 27.8",
            [xl[max(xl)] if xl else [], delta],
        ),
        _published(
            "Transformer-XL: the larger the memory, the lower the loss",
            "24.6, 26.4, 29.3, 65.7",
            [xl[m] for m in sorted(xl, reverse=True)],
        ),
        compared(
            "each trained for its memory: lower with the smallest than the largest",
            "",
            [own[m] for m in sorted(own) if m in (min(own), max(own))],
        ),
        compared("gated delta: below delta", "", [gated, delta]),
        _kept(main),
    ]
    if _nanogpt(points):
        bare = losses(main, model="sum", normalize=0)
        what = "sum: below sum without attention normalisation"
        every.append(_published(what, "above 260, above 1600", [sums, bare]))
    return every + _stale(points)


def _published(text: str, perplexities: str, sides: list) -> Claim:
    """Claim that the sides are in increasing order, as published."""
    source = f"perplexity per word {perplexities} (Table 4)"
    return compared(text, source, sides or [[]], _increase, protocol=PROTOCOL)


def _increase(*losses: float) -> bool:
    return len(losses) > 1 and all(a < b for a, b in pairwise(losses))


def _stale(points: list[Point]) -> list[Claim]:
    """When does carried state help the delta rule? Each seed is its own pair."""
    every = []
    for (steps, lr), some in by_training(points).items():
        for one, other, what in (
            ("loss", "windows_loss", "loss in windows minus with carried state"),
            (
                "stale_loss",
                "own_loss",
                "loss with own minus with stale state",
            ),
        ):
            pairs = [(p[one], p[other]) for p in some if one in p]
            gains = [
                -inf if a is None else inf if b is None else b - a for a, b in pairs
            ]
            text = f"delta, {steps} steps at {lr:g}: {what}: above 0"
            every.append(compared(text, "", [gains], lambda gain: gain > 0))
    return every


def of_the_table(points: list[Point]) -> list[Point]:
    """The points of the models of Table 4."""
    size = "nanogpt" if _nanogpt(points) else "small"
    return select(points, size=size, lr=LR[size])


def by_training(points: list[Point]) -> dict[tuple[int, float], list[Point]]:
    """Small models with the delta rule, by optimiser steps and learning rate."""
    groups: dict[tuple[int, float], list[Point]] = {}
    for p in select(points, model="delta", map="linear"):
        if p["size"] != "nanogpt":
            groups.setdefault((steps(p), p["lr"]), []).append(p)
    return groups


def steps(point: Point) -> int:
    """The optimiser steps of a small model."""
    return int(point["size"].partition("-")[2] or text.SIZES["small"]["steps"])


def cut(points: list[Point]) -> dict[int, list[float | None]]:
    """Losses of Transformer-XL by memory, cut at evaluation, of all seeds."""
    ends: dict[int, list[float | None]] = {}
    for p in select(points, model="transformer-xl"):
        for memory, loss in p.get("by_memory", {}).items():
            ends.setdefault(int(memory), []).append(loss)
    return ends


def trained(points: list[Point]) -> dict[int, list[float | None]]:
    """The same of models that were trained with this memory."""
    xl = select(points, model="transformer-xl")
    return {m: losses(xl, memory=m) for m in sorted({p["memory"] for p in xl})}


def _nanogpt(points: list[Point]) -> bool:
    return any(p["size"] == "nanogpt" for p in points)


def _middle(ends: Sequence[float | None]) -> float:
    return median(inf if loss is None else loss for loss in ends)


def _kept(points: list[Point]) -> Claim:
    """How much norms grow from the first window to the last position."""
    growth = [
        [(p["last_norm"] or inf) / p["first_norm"] for p in some if p.get("first_norm")]
        for some in (
            select(points, model="gated-delta"),
            select(points, model="delta", map="linear"),
        )
    ]
    what = "gated delta: norm of the fast weights grows by less than that of delta"
    return compared(what, "", growth, spec=",.1f")


def draw(points: list[Point]) -> Figure:
    """Draw losses and states in multiples of the delta rule's, and small models
    with the delta rule, with carried state and in windows.
    """
    figure, (ax, below) = plots.panels(7.6, 2)
    main = of_the_table(points)
    delta = select(main, model="delta", map="linear")
    loss = median_loss(delta) or inf
    state = delta[0]["state_size"] if delta else 1

    def relative(some: list[tuple[int, float | None]]) -> list[Point]:
        return [
            {"state": size / state, "loss": y if y is None else 100 * (y / loss - 1)}
            for size, y in some
        ]

    xl = select(main, model="transformer-xl")
    per_token = xl[0]["state_size"] // xl[0]["memory"] if xl else 0
    series = {
        "delta": (FAST, "o", select(main, model="delta")),
        "sum": (TRAINED, "s", select(main, model="sum", normalize=1)),
        "gated delta": (SERIES[0], "^", select(main, model="gated-delta")),
        "Transformer-XL, trained for it": (SERIES[1], "v", xl),
    }
    for name, (color, marker, some) in series.items():
        pairs = [(p["state_size"], p["loss"]) for p in some]
        plots.series(ax, relative(pairs), color, marker, "-", name, "loss", "state")
    pairs = [(m * per_token, y) for m, ends in cut(main).items() for y in ends]
    name = "Transformer-XL, cut"
    plots.series(ax, relative(pairs), OTHER, "D", "-", name, "loss", "state")
    (unit, one), *_ = PUBLISHED["delta"].items()
    theirs = {
        size / unit: 100 * (log(perplexity) / log(one) - 1)
        for size, perplexity in PUBLISHED["transformer-xl"].items()
    }
    plots.published(ax, theirs, OTHER, "the same, published")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.set_xlabel("state, in multiples of the delta rule's")
    ax.set_ylabel("loss above the delta rule's, %")

    looks = dict(zip(RATES, zip(SERIES, "o^s", strict=True), strict=True))
    small = [
        {**p, "steps": steps(p)} for each in by_training(points).values() for p in each
    ]
    for lr, (color, marker) in looks.items():
        some = select(small, lr=lr)
        plots.series(below, some, color, marker, "-", f"rate {lr:g}", x="steps")
        windows = plots.medians(some, "steps", "windows_loss")
        below.plot(
            [*windows],
            [*windows.values()],
            color=color,
            marker=marker,
            linestyle="--",
            markerfacecolor="none",
        )
    below.set_xscale("log", base=2)
    ticks = sorted({p["steps"] for p in small})
    below.set_xticks(ticks, [f"{n:,}" for n in ticks])
    below.minorticks_off()
    below.set_xlabel("optimiser steps of small models with the delta rule")
    below.set_ylabel("loss: state carried (full), windows (hollow)")
    below.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, columnspacing=1)
    plots.legend(figure, ax, 2)
    return figure


EXPERIMENT = Experiment(
    name="state-size",
    title="Loss against the size of the state, with no truncated context",
    source="Schlag et al. 2021, Table 4",
    cost="quick: 5 min of one core; full: about 2 hours",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: text.setup(model(point)[0]),
)
