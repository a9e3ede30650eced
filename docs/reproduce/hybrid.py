"""Test mixed stacks: a parity decides which value to look up.

After Steifer 2026 (arXiv:2605.16640), whose task is parity-conditioned retrieval.
Counting needs a state that changes with every token; looking up needs a memory for
all pairs.
"""

import torch
from answers import UNASKED, Batch, Recaller, columns, growing, loss, right
from frame import Point, Points, holds, main, order
from torch import Tensor

from fwlab import plots
from fwlab.fit import SETUP, fit

TITLE = "What a mixed stack can do: a parity says what to look up"
SOURCE = "ours, after Steifer 2026"
COST = "quick: 4 min of one core; full: 20 min"

#: Stacks by name: their mixers, and the maximum of beta.
BOTH, WEAK = "gated delta, then attention", "the same, β up to 1"
TURNED = "attention, then gated delta"
DELTA, SOFTMAX = "gated delta alone", "attention alone"
DEEP = (f"{DELTA}, four layers", f"{SOFTMAX}, four layers")
STACKS = {
    BOTH: (["gated-delta", "softmax"], 2),
    WEAK: (["gated-delta", "softmax"], 1),
    TURNED: (["softmax", "gated-delta"], 2),
    DELTA: (["gated-delta"] * 2, 2),
    SOFTMAX: (["softmax"] * 2, 2),
    DEEP[0]: (["gated-delta"] * 4, 2),
    DEEP[1]: (["softmax"] * 4, 2),
}
#: Stacks of the quick version.
QUICK = (BOTH, WEAK, DELTA, SOFTMAX)
#: Numbers of pairs in a sequence. One layer of fast weights can store `FEW` pairs.
FEW, MANY = 4, 16
#: Number of heads, and width of their keys.
HEADS, HEAD_WIDTH = 2, 4
#: Number of values, and maximum number of questions after the pairs in training.
VALUES, NEAR = 8, 24
#: Number of questions after the pairs in the test.
FAR = 4 * NEAR
BATCH, TEST, LR = 32, 256, 5e-3
#: Plurals of the kinds of answers.
ANSWERS = {"parity": "parities", "value": "values"}
#: Accuracy of a model that knows both values, but not which value is correct.
HALF = (1 + 1 / VALUES) / 2
#: Accuracy above which answers of one kind count as solved, and limits of failures.
#: A failure is at most a little better than a guess between two answers.
SOLVED, AT_MOST = 0.95, {"parity": 0.65, "value": 0.7}


def points(quick: bool) -> list[Point]:
    budget = 600 if quick else 1200
    return [
        {"stack": stack, "pairs": pairs, "budget": budget, "seed": seed}
        for pairs in ((MANY,) if quick else (FEW, MANY))
        for stack in (QUICK if quick else STACKS)
        for seed in (1, 2, 3)
    ]


def run(point: Point) -> Point:
    """Train a stack, and return its parameter count, accuracies and training curve.

    Accuracies on parities and values are given at both lengths.
    """
    torch.manual_seed(point["seed"])
    pairs, budget = point["pairs"], point["budget"]
    model = build(point["stack"], pairs)

    def draw(step: int) -> Batch:
        return sequences(BATCH, pairs, growing(step, budget, NEAR))

    curve = fit(model, draw, loss, budget, LR).curve
    return {
        "parameters": model.num_parameters(),
        **score(model, pairs, NEAR, "_near"),
        **score(model, pairs, FAR),
        "curve": curve,
    }


def build(stack: str, pairs: int) -> Recaller:
    """Build a `Recaller` for a stack of mixers, without positions or convolution."""
    mixers, limit = STACKS[stack]
    options = {}
    if "gated-delta" in mixers:
        options["fast_weights"] = {
            **{"like": "gated-delta-net", "conv_size": 0, "expand_v": 1},
            **{"head_width": HEAD_WIDTH, "beta_max": limit},
        }
    if "softmax" in mixers:
        options["softmax"] = {"rope": 0}
    sizes = 2 * pairs + VALUES + 2, len(mixers), HEADS, 2 * (pairs + FAR)
    return Recaller(mixers, "own", *sizes, **options)


def sequences(batch: int, pairs: int, asks: int) -> Batch:
    """Sample key-value pairs in random order, followed by alternating bits and queries.

    - `pairs`: number of keys, which is even: tokens from 0. Then come the tokens of
      `VALUES` values, of the bits 0 and 1, and of the questions, one for each key.
    - `asks`: number of bits, and of questions.
    - Returns the tokens and the answer after each, `[batch, 2 (pairs + asks)]`.
      After a bit, this is the parity of all bits so far, as a bit. After a question
      it is the value of its key if the parity is 0; otherwise the value of the key's
      neighbour: 0 and 1 are neighbours, 2 and 3, and so on.
    """
    bit = pairs + VALUES
    keys = torch.rand(batch, pairs).argsort(-1)
    values = torch.randint(pairs, bit, (batch, pairs))
    bits, asked = torch.randint(2, (batch, asks)), torch.randint(pairs, (batch, asks))
    odd = bits.cumsum(1) % 2
    held = torch.zeros_like(keys).scatter(1, keys, values)
    found = held.gather(1, asked ^ odd)
    shown = _in_turn(keys, values)
    tokens = torch.cat([shown, _in_turn(bits + bit, asked + bit + 2)], 1)
    unasked = torch.full_like(shown, UNASKED)
    return tokens, torch.cat([unasked, _in_turn(odd + bit, found)], 1)


def _in_turn(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([a, b], -1).flatten(1)


def score(model: Recaller, pairs: int, asks: int, suffix: str = "") -> Point:
    """Return the accuracies of a model on parities and on values."""
    every = right(model, *sequences(TEST, pairs, asks)).view(-1, 2)
    parity, value = (round(share, 4) for share in every.mean(0).tolist())
    return {f"parity{suffix}": parity, f"value{suffix}": value}


def claims(points: Points):
    """Yield our own claims on trained stacks, since the paper trains no models."""
    few, many = points(pairs=FEW), points(pairs=MANY)
    deep = [stack for stack in DEEP if points(stack=stack)]
    for what, stack, solved in (
        ("value", BOTH, True),
        *(("value", stack, False) for stack in (WEAK, DELTA, SOFTMAX, *deep)),
        ("parity", DELTA, True),
        *(("parity", stack, False) for stack in (WEAK, SOFTMAX)),
    ):
        text = f"{MANY} pairs, {stack.replace('the same', BOTH)}:"
        shares = many(stack=stack)[what]
        if solved:
            text += f" more than {SOLVED} of the {ANSWERS[what]}"
            yield holds(text, shares, lambda share: share > SOLVED)
        else:
            most = AT_MOST[what]
            text += f" fewer than {most} of the {ANSWERS[what]}"
            yield holds(text, shares, lambda share, most=most: share < most)
    if few:
        text = f"values, {DELTA}: more with {FEW} pairs than with {MANY}"
        sizes = [some(stack=DELTA)["value"] for some in (few, many)]
        yield order(text, sizes, sign=">")
        text = f"values, {MANY} pairs: {BOTH} above {TURNED}"
        turns = [many(stack=stack)["value"] for stack in (BOTH, TURNED)]
        yield order(text, turns, sign=">")


def draw(points: Points):
    sizes = points.by("pairs")
    figure, axes = plots.panels(1 + 2 * len(sizes), len(sizes), columns=1, sharex=True)
    for ax, (pairs, some) in zip(axes, sizes.items(), strict=True):
        columns(ax, some.by("stack"), ANSWERS)
        ax.axvline(HALF, color=plots.INK, linestyle=":", linewidth=1)
        ax.set(xlim=(0, 1.05), title=f"{pairs} pairs")
    axes[-1].set_xlabel("share of right answers")
    plots.legend(figure, axes[0], columns=2)
    return figure


def setup(point: Point) -> Point:
    return {
        **SETUP,
        **{"lr": LR, "batch": BATCH, "heads": HEADS},
        "layers": len(STACKS[point["stack"]][0]),
    }


if __name__ == "__main__":
    main(__file__)
