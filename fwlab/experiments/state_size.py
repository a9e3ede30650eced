"""Loss against the size of the state, without truncated context.

Table 4 of Schlag et al. 2021, at a size that a processor can train.
"""

from itertools import pairwise
from math import inf, log
from operator import lt
from statistics import median

import torch
from matplotlib.figure import Figure
from torch import Tensor

from fwlab import plots
from fwlab.experiments import text
from fwlab.experiments.experiment import Claim, Experiment, Point, numbers_claim, select
from fwlab.experiments.text import LR, median_loss
from fwlab.layers import TransformerXL
from fwlab.models import Mixer
from fwlab.plots import FAST, OTHER, SERIES, TRAINED
from fwlab.training import Config

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


def points(quick: bool) -> list[Point]:
    size = "small" if quick else "nanogpt"
    settings = [("delta", "linear", 0, 0), ("sum", "linear", 1, 0)]
    settings += [("gated-delta", "identity", 0, 0)]
    if not quick:
        settings += [("delta", "dpfp", 0, 0), ("sum", "linear", 0, 0)]
    settings += [("transformer-xl", "", 0, memory) for memory in MEMORIES[size]]
    names = ("model", "map", "normalize", "memory")
    return [
        {
            **dict(zip(names, each, strict=True)),
            "size": size,
            "corpus": "any" if quick else "shakespeare",
            "lr": LR[size],
            "seed": seed,
        }
        for each in settings
        for seed in (1, 2, 3)
    ]


def run(point: Point) -> Point:
    # A step for each segment takes long, so quick versions read as many
    # sequences at once as in training, instead of one.
    config, mixer = model(point)
    rows = config.batch if point["size"] == "small" else 1
    corpus = text.load(point["corpus"])
    run = text.Run(config, mixer, corpus, carry=True, rows=rows)
    result = text.train(run)
    result["state_size"] = run.model.state_size(10**9)  # at its largest
    result["windows_loss"] = text.finite(run.validation.of_windows())
    if not point["memory"]:
        result |= summary(by_position(run))
    return result


def by_position(run: text.Run) -> list[list[float | None]]:
    """Measure the loss with carried state, and how large the state becomes.

    Returns rows of the number of characters read, the loss since the row
    before, and the norm of a head's fast weights, the mean over layers
    and heads; None if the state is not fast weights alone.
    """
    length, ends = len(run.val_tokens) // run.validation.rows, [run.config.block]
    while 2 * ends[-1] < length:
        ends.append(2 * ends[-1])
    rows: list[list[float | None]] = []
    for end, loss, (_, *layers) in run.validation.read(ends):
        norm = None
        if all(isinstance(W, Tensor) for W in layers):
            norms = torch.stack(layers).norm(dim=(-2, -1))
            norm = text.finite(norms.mean().item())
        rows.append([end, text.finite(loss), norm])
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
    delta = select(points, model="delta", map="linear")
    sums = select(points, model="sum", normalize=1)
    gated = select(points, model="gated-delta")
    published = "perplexity per word 27.8, above 260"
    every = [
        _fails(points, sums),
        _below("delta: below sum", published, delta, sums),
        _equal_state(points, delta),
        _grows(points),
        _below("gated delta: below delta", "not published", gated, delta),
        _kept(delta, gated),
    ]
    if points[0]["size"] == "nanogpt":
        bare = select(points, model="sum", normalize=0)
        what = "sum: below sum without attention normalisation"
        published = "perplexity per word above 260, above 1600"
        every.append(_below(what, published, sums, bare))
    return every


def _fails(points: list[Point], sums: list[Point]) -> Claim:
    xl = select(points, model="transformer-xl")
    losses = [
        loss for m in _memories(xl) if (loss := median_loss(select(xl, memory=m)))
    ]
    ours = median_loss(sums)
    return Claim(
        "sum: above Transformer-XL with every memory",
        "perplexity per word above 260, 65.7 to 24.6",
        f"{_nats(ours)} against {', '.join(map(_nats, losses)) or '–'}",
        ours > max(losses) if ours and losses else None,
    )


def _below(what: str, source: str, one: list[Point], other: list[Point]) -> Claim:
    """Claim that the median loss of `one` is below that of `other`."""
    return numbers_claim(what, source, [median_loss(one), median_loss(other)], lt)


def _equal_state(points: list[Point], delta: list[Point]) -> Claim:
    size = delta[0]["state_size"] if delta else None
    return _below(
        "delta: below Transformer-XL with an equal state",
        "perplexity per word 27.8, 65.7",
        delta,
        select(points, model="transformer-xl", state_size=size),
    )


def _grows(points: list[Point]) -> Claim:
    xl = select(points, model="transformer-xl")
    losses = [median_loss(select(xl, memory=m)) for m in _memories(xl)]
    known = [inf if loss is None else loss for loss in losses]
    return Claim(
        "Transformer-XL: the larger the memory, the lower the loss",
        "perplexity per word 65.7, 29.3, 26.4, 24.6",
        ", ".join(map(_nats, losses)) or "–",
        all(a > b for a, b in pairwise(known)) if len(known) > 1 else None,
    )


def _kept(delta: list[Point], gated: list[Point]) -> Claim:
    """Norms after the first window and at the last position, medians."""
    norms = [
        [median(p[name] or inf for p in some) for name in ("first_norm", "last_norm")]
        for some in (delta, gated)
        if some and all("first_norm" in p for p in some)
    ]
    grown = [last / first for first, last in norms]
    return Claim(
        "delta: fast weights grow with the text, more than with a decay",
        "not published",
        ", ".join(f"norm {first:,.1f} to {last:,.1f}" for first, last in norms) or "–",
        grown[0] > grown[1] if len(grown) == 2 else None,
    )


def _memories(points: list[Point]) -> list[int]:
    return sorted({p["memory"] for p in points})


def _nats(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.3f}"


def draw(points: list[Point]) -> Figure:
    """Draw losses and states in multiples of the delta rule's."""
    figure, (ax,) = plots.panels(4.2)
    delta = select(points, model="delta", map="linear")
    loss = median_loss(delta) or inf
    state = delta[0]["state_size"] if delta else 1

    def relative(some: list[Point]) -> list[Point]:
        return [
            {
                "state": p["state_size"] / state,
                "loss": None if p["loss"] is None else 100 * (p["loss"] / loss - 1),
            }
            for p in some
        ]

    series = {
        "delta": (FAST, "o", select(points, model="delta")),
        "sum": (TRAINED, "s", select(points, model="sum", normalize=1)),
        "Transformer-XL": (OTHER, "D", select(points, model="transformer-xl")),
        "gated delta": (SERIES[0], "^", select(points, model="gated-delta")),
    }
    for name, (color, marker, some) in series.items():
        plots.series(ax, relative(some), color, marker, "-", name, "loss", "state")
    (unit, one), *_ = PUBLISHED["delta"].items()
    theirs = {
        size / unit: 100 * (log(perplexity) / log(one) - 1)
        for size, perplexity in PUBLISHED["transformer-xl"].items()
    }
    plots.published(ax, theirs, OTHER, "Transformer-XL, published")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.set_xlabel("state, in multiples of the delta rule's")
    ax.set_ylabel("loss above the delta rule's, %")
    plots.legend(figure, ax, 2)
    return figure


EXPERIMENT = Experiment(
    name="state-size",
    title="Loss against the size of the state, with no truncated context",
    source="Schlag et al. 2021, Table 4",
    cost="quick: 3 min of one core; full: about 1.5 hours",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: text.setup(model(point)[0]),
)
