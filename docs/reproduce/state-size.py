"""Measure the loss against the size of the state, without truncated context.

Table 4 of Schlag et al. 2021, at a size that a processor can train; and
when carried state helps the delta rule.
"""

from itertools import pairwise
from math import inf, log
from typing import Any

import text
import torch
from frame import Claim, Numbers, Point, Points, holds, main, order
from text import LR, finite
from torch import Tensor
from torch.nn import functional as F

from fwlab import plots
from fwlab.layers import TransformerXL
from fwlab.layers.transformer_xl import RelativeAttention
from fwlab.models import Mixer
from fwlab.plots import FAST, INK, OTHER, SERIES, TRAINED
from fwlab.training.batches import in_rows

TITLE = "Loss against the size of the state, with no truncated context"
SOURCE = "Schlag et al. 2021, Table 4"
COST = "quick: 5 min of one core; full: about 2 hours"

#: Published state sizes in scalars, and perplexities per word on WikiText-103.
#: The models are medium, and the Linear Transformer has a perplexity above 260.
DELTA = (131_072, 27.8)
XL = {131_072: 65.7, 1_048_576: 29.3, 2_097_152: 26.4, 6_291_456: 24.6}
#: Lengths of memory and segments in tokens, which are equal, by model size.
MEMORIES = {"nanogpt": (8, 32, 128), "small": (4, 16, 64)}
#: Sizes of the small models with the delta rule, by number of optimiser steps.
SMALL = {400: "small", 1600: "small-1600", 6400: "small-6400"}
RATES = (4e-3, 1e-3, 2.5e-4)
#: Number of characters on which a stale and a fresh state are compared.
AHEAD = 1024


def points(quick: bool) -> list[Point]:
    size = "small" if quick else "nanogpt"
    delta = ("delta", "linear", 0, 0)
    models = [delta, ("sum", "linear", 1, 0), ("gated-delta", "identity", 0, 0)]
    models += [(text.ALONE, "", 0, 0)]
    if not quick:
        models += [("delta", "dpfp", 0, 0), ("sum", "linear", 0, 0)]
    models += [("transformer-xl", "", 0, memory) for memory in MEMORIES[size]]
    runs = [(*model, size, LR[size]) for model in models]
    # Whether carried state helps the delta rule depends on training.
    if quick:
        runs += [(*delta, "small-1600", 1e-3)]
    else:
        runs += [(*delta, size, lr) for size in SMALL.values() for lr in RATES]
    names = ("model", "map", "normalize", "memory", "size", "lr")
    return text.points(quick, [dict(zip(names, run, strict=True)) for run in runs])


def mixer(point: Point) -> Mixer:
    if not (memory := point["memory"]):
        if point["model"] == text.ALONE:
            return text.CONVOLUTION
        normalize = bool(point["normalize"])
        return text.fast_weights(point["model"], point["map"], normalize)

    def new(s: Any) -> TransformerXL:
        sizes = s.d_model, s.heads, s.layers, s.d_ff
        return TransformerXL(*sizes, memory, segment=memory)

    return Mixer(new, whole=True)


# --- Runs -----------------------------------------------------------------


def run(point: Point) -> Point:
    run = text.new_run(point | {"carry": 1}, mixer(point))
    # One sequence would take many steps, so small models evaluate a batch at once.
    run.eval_rows = 1 if point["size"] == "nanogpt" else run.config.batch
    result = text.train(run)
    result["state_size"] = run.model.state_size(10**9)  # The largest possible size.
    result["windows_loss"] = finite(run.evaluate(carry=False))
    if not point["memory"]:
        return result | by_position(run) | by_state(run)
    memories = MEMORIES[point["size"]]
    if point["memory"] == max(memories):
        result["by_memory"] = {str(m): by_memory(run, m) for m in memories}
    return result


def by_memory(run: text.Run, memory: int) -> float | None:
    """Measure the loss of a Transformer-XL with memory and segments of `memory` tokens.

    Appendix F of the paper also cuts one trained model at evaluation.
    """
    for part in run.model.modules():
        if isinstance(part, RelativeAttention):
            part.memory = part.segment = memory
    return finite(run.evaluate())


@torch.no_grad()
def by_state(run: text.Run) -> Point:
    """Measure the loss on the next training text with a stale and with a fresh state.

    The final weights read the text. `stale_loss` uses the state that training has
    carried, which earlier weights have written. `own_loss` uses the state that the
    final weights compute from the same past text, which has `carried`
    characters.
    """
    block, rows = run.config.block, in_rows(run.train_tokens, run.config.batch).long()
    past = run.step % ((rows.shape[1] - 1) // block) * block
    own = None
    for part in rows[:, :past].split(AHEAD, 1):
        own = run.model.prefill(part, own)[1]
    ahead = rows[:, past : past + AHEAD + 1]
    result: Point = {"carried": past}
    for name, state in (("stale", run.states[0]), ("own", own)):
        logits = run.model.prefill(ahead[:, :-1], state)[0]
        loss = F.cross_entropy(logits.flatten(0, 1), ahead[:, 1:].flatten())
        result[f"{name}_loss"] = finite(loss.item())
    return result


@torch.no_grad()
def by_position(run: text.Run) -> Point:
    """Measure the loss and the norm of the carried state by position in the text.

    The parts of the text double in length. Returned are the lowest and last loss of a
    part, and the norm of fast weights (mean over layers and heads) after the first and
    the last part; None if the state is not fast weights alone.
    """
    tokens = in_rows(run.val_tokens, run.eval_rows).long()
    ends = [run.config.block]
    while 2 * ends[-1] < tokens.shape[1]:
        ends.append(2 * ends[-1])
    losses: list[float | None] = []
    norms: list[float | None] = []
    state = None
    for start, end in pairwise([0, *ends]):
        inputs, targets = tokens[:, start:end], tokens[:, start + 1 : end + 1]
        loss, state = run.loss.eval()(inputs, targets, state, carry=True)
        losses.append(finite(loss.item()))
        norm = None
        if all(isinstance(W, Tensor) for W in state[1:]):
            norm = finite(torch.stack(state[1:]).norm(dim=(-2, -1)).mean().item())
        norms.append(norm)
    lowest = min(losses, key=lambda loss: inf if loss is None else loss)
    return {
        "first_norm": norms[0],
        "last_norm": norms[-1],
        "lowest_loss": lowest,
        "lowest_at": ends[losses.index(lowest)],
        "last_loss": losses[-1],
    }


# --- Claims and figures -------------------------------------------------


def claims(points: Points):
    table = of_the_table(points)
    delta, gated = table(model="delta", map="linear"), table(model="gated-delta")
    ends = delta["loss"]
    sums, bare = (table(model="sum", normalize=n)["loss"] for n in (1, 0))
    xl = [some["loss"] for some in cut(table).by("memory").values()] or [[]]
    what = "sum: above Transformer-XL with every memory"
    worst = max(xl, key=text.middle)
    yield published(what, "above 260, 65.7 to 24.6", worst, sums)
    yield published("delta: below sum", "27.8, above 260", ends, sums)
    what = "delta: below Transformer-XL with an equal state"
    yield published(what, "27.8, 65.7", ends, xl[0])
    what = "Transformer-XL with 16 times the state: below delta"
    yield published(what, "26.4, 27.8", xl[-1], ends)
    what = "Transformer-XL: the larger the memory, the lower the loss"
    yield published(what, "24.6, 26.4, 29.3, 65.7", *xl[::-1])
    trained = table(model="transformer-xl").by("memory")
    own = [trained[memory]["loss"] for memory in sorted(trained)] or [[]]
    what = "each trained for its memory: lower with the smallest than the largest"
    yield text.below(what, [own[0], own[-1]])
    alone = table(model=text.ALONE)["loss"]
    yield text.below("gated delta: below delta", [gated["loss"], ends])
    yield text.below(f"gated delta: below {text.ALONE}", [gated["loss"], alone])
    # Compute the growth of the norm from the first window to the last position.
    growth = [
        [(p["last_norm"] or inf) / p["first_norm"] for p in some if p.get("first_norm")]
        for some in (gated, delta)
    ]
    what = "gated delta: norm of the fast weights grows by less than that of delta"
    yield order(what, growth, spec=",.1f")
    if "nanogpt" in points["size"]:
        what = "sum: below sum without attention normalisation"
        yield published(what, "above 260, above 1600", sums, bare)
    yield from carried(points)


def published(what: str, perplexities: str, *sides: Numbers) -> Claim:
    source = f"perplexity per word {perplexities} (Table 4)"
    protocol = f"{text.PROTOCOL}, small models, minutes of training"
    return text.below(what, sides, source, protocol=protocol)


def carried(points: Points):
    """Yield claims on when carried state helps the delta rule, seed by seed."""
    for (steps, lr), some in small(points).by("steps", "lr").items():
        for one, other, what in (
            ("loss", "windows_loss", "loss in windows minus with carried state"),
            ("stale_loss", "own_loss", "loss with own minus with stale state"),
        ):
            gains = [
                0 - text.above(*x) for x in zip(some[one], some[other], strict=True)
            ]
            what = f"delta, {steps} steps at {lr:g}: {what}: above 0"
            yield holds(what, gains, lambda gain: gain > 0)


def of_the_table(points: Points) -> Points:
    """Select the runs of the models in Table 4."""
    size = "nanogpt" if "nanogpt" in points["size"] else "small"
    return points(size=size, lr=LR[size])


def small(points: Points) -> Points:
    """Select the runs of small delta rule models, and add a column `steps` to them."""
    own = points(model="delta", map="linear")
    return Points(p | {"steps": n} for n in SMALL for p in own(size=SMALL[n]))


def cut(points: Points) -> Points:
    """Return a result for each memory length at which Transformer-XL is evaluated."""
    some = [
        {
            "memory": int(memory),
            "state_size": p["state_size"] // p["memory"] * int(memory),
            "loss": loss,
        }
        for p in points(model="transformer-xl")
        for memory, loss in p.get("by_memory", {}).items()
    ]
    return Points(sorted(some, key=lambda p: p["memory"]))


def draw(points: Points):
    """Draw losses and state sizes relative to the delta rule's.

    Small models with the delta rule are drawn with carried state and in windows.
    """
    figure, (above, below) = plots.panels(7.6, 2)
    draw_table(above, of_the_table(points))
    draw_small(below, small(points))
    plots.legend(figure, above, 2)
    return figure


def draw_table(ax, points: Points):
    delta = points(model="delta", map="linear")
    loss = text.middle(delta["loss"])
    state = delta[0]["state_size"] if delta else 1
    xl = points(model="transformer-xl")
    for name, color, marker, some in (
        ("delta", FAST, "o", points(model="delta")),
        ("sum", TRAINED, "s", points(model="sum", normalize=1)),
        ("gated delta", SERIES[0], "^", points(model="gated-delta")),
        (text.ALONE, INK, "P", points(model=text.ALONE)),
        ("Transformer-XL, trained", SERIES[1], "v", xl),
        ("Transformer-XL, cut", OTHER, "D", cut(points)),
    ):
        states = [size / state for size in some["state_size"]]
        losses = text.percent_above(some["loss"], loss)
        pairs = zip(states, losses, strict=True)
        relative = [{"state": size, "loss": above} for size, above in pairs]
        plots.series(ax, relative, color, marker, "-", name, x="state")
    unit, one = DELTA
    theirs = {size / unit: 100 * (log(x) / log(one) - 1) for size, x in XL.items()}
    plots.published(ax, theirs, OTHER, "the same, published")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.set_xlabel("state, in multiples of the delta rule's")
    ax.set_ylabel("loss above the delta rule's, %")


def draw_small(ax, points: Points):
    for lr, color, marker in zip(RATES, SERIES, "o^s", strict=True):
        some = points(lr=lr)
        plots.series(ax, some, color, marker, "-", f"rate {lr:g}", x="steps")
        windows = plots.medians(some, "steps", "windows_loss")
        looks = {"color": color, "marker": marker, "linestyle": "--"}
        ax.plot([*windows], [*windows.values()], markerfacecolor="none", **looks)
    ax.set_xscale("log", base=2)
    ticks = sorted({*points["steps"]})
    ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
    ax.minorticks_off()
    ax.set_xlabel("optimiser steps of small models with the delta rule")
    ax.set_ylabel("loss (hollow: in windows)")
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, columnspacing=1)


def setup(point: Point) -> Point:
    return text.setup(point, mixer(point))


if __name__ == "__main__":
    main(__file__)
