"""Measure depth, memory size and speed of the Feedback Transformer.

A transformer follows as many statements of a program, one after the other,
as it has layers. With feedback one layer can follow them all, even if it
sees few memories, because each contains what came before. The price is a
loop over time in training.
"""

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from frame import Claim, Numbers, Point, Points, main
from matplotlib.figure import Figure
from statements import SETUP, TEST, above, build, learn, named, tuned
from torch import Tensor
from torch.nn import functional as F

from fwlab import ops, plots
from fwlab.bench.measure import in_turns
from fwlab.data.programs import CLAUSES, RULES, rule_accuracy, test_rng
from fwlab.layers import FeedbackTransformer, SoftmaxAttention
from fwlab.models import MIXERS, LanguageModel, Mixer
from fwlab.models.language_model import Size
from fwlab.plots import FAST, INK, OTHER

TITLE = "Feedback: depth, memory size and speed"
SOURCE = "Fan et al. 2020, claims on shallow models, memory and speed"
COST = "quick: 6 min of one core; full: 73 min"

#: Number of variables, and number of statements of the first training programs.
VARIABLES, FIRST = 3, 10
#: Number of statements of a program in the quick (True) and the full version.
STATEMENTS = {True: 16, False: 24}
#: Learning rates of the quick and the full version. All models run at the first rate.
#: Models of `DEEP` also run at the other rates, for the usual number of steps.
RATES = {True: (2e-3,), False: (1e-3, 5e-4, 2e-3)}
HEADS = 2
#: Value of `memory` for a model that sees all earlier tokens.
ALL = 0
#: Layers of models that see all tokens, in the quick and the full version.
#: `LOW`: layers of feedback with a limited memory; `MEMORIES`: tokens per block.
DEPTHS = {
    True: {"feedback": (1,), "transformer": (1, 2)},
    False: {"feedback": (1, 2, 4), "transformer": (1, 2, 4, 8)},
}
LOW, MEMORIES = {True: 1, False: 2}, {True: (4,), False: (4, 16)}
#: Models of the published comparison, and a transformer of equal depth.
#: These models are also trained for twice as many steps.
DEEP = [("feedback", 4, ALL), ("transformer", 4, ALL), ("transformer", 8, ALL)]
#: Batch size and length of the sequences that are timed.
TIMED = (16, 64)
#: Mixers of the models that are timed, by name.
SPEEDS = {
    "feedback": "feedback",
    "feedback, shared": "feedback-shared",
    "transformer": "softmax",
}


def points(quick: bool) -> list[Point]:
    usual, *others = RATES[quick]
    size = {
        "statements": STATEMENTS[quick],
        "width": 64,
        "batch": 48 if quick else 32,
        "steps": 600 if quick else 1200,
        "rate": usual,
    }
    low = LOW[quick]
    trained = [(model, n, ALL) for model, each in DEPTHS[quick].items() for n in each]
    for memory in MEMORIES[quick]:
        trained += [("feedback", low, memory), ("transformer", 2 * low, memory)]
    timed = [(name, n, ALL) for n in (2, 4) for name in SPEEDS if name != "transformer"]
    kinds = [
        ("rule", [("rule", 0, ALL)], {}),
        ("accuracy", trained, {}),
        # Within the usual steps, deep feedback does not learn with every seed.
        ("accuracy", [] if quick else DEEP, {"steps": 2 * size["steps"]}),
        ("time", timed, {}),
        *(("accuracy", DEEP, {"rate": rate}) for rate in others),
    ]
    return [
        {"kind": kind, "model": model, "layers": layers, "memory": memory}
        | size
        | changes
        | {"seed": seed}
        for seed in (1, 2, 3)
        for kind, each, changes in kinds
        for model, layers, memory in each
    ]


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    empty: Point = dict.fromkeys(("accuracy", "loss", "parameters", "train", "predict"))
    if point["kind"] == "time":
        return empty | measure(point)
    if point["kind"] == "rule":
        size, seed = (TEST, point["statements"], VARIABLES), point["seed"]
        scores = [rule_accuracy(rule, *size, test_rng(seed)) for rule in RULES]
        return empty | {"accuracy": max(scores)}
    model = reader(mixer(point["model"], point["memory"]), point)
    return empty | learn(model, point, VARIABLES, FIRST)


def reader(mix: Mixer | str, point: Point) -> LanguageModel:
    """Build a model that is long enough for programs and for the timed sequences."""
    return build(mix, point, HEADS, length=TIMED[1] + 1)


# --- A memory of few steps ------------------------------------------------


def mixer(model: str, memory: int) -> Mixer:
    """Return a mixer with a memory of limited length, for a `LanguageModel`.

    - `model`: "feedback" or "transformer".
    - `memory`: tokens per block; a token sees its own block and the one
      before, which are `memory` to `2 * memory - 1` earlier tokens. `ALL`
      = no limit.
    """
    if memory == ALL:
        return MIXERS[SPEEDS[model]]
    if model == "feedback":
        return Mixer(lambda size: ShortFeedback(size, memory), whole=True)
    return Mixer(lambda size: ShortAttention(size, memory), positions=True)


class ShortFeedback(FeedbackTransformer):
    """Limit the attention of a Feedback Transformer to two blocks of memories."""

    def __init__(self, size: Size, memory: int):
        super().__init__(size.d_model, size.heads, size.layers, size.d_ff)
        self.block = memory

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        weights, outputs = self.weights(), []
        state: Any = None
        for block in x.split(self.block, dim=1):
            result: Any = ops.feedback(
                block, weights, heads=self.heads, state=state, return_state=True
            )
            y, (k, v, _) = result
            state = ops.FeedbackState(k[:, -self.block :], v[:, -self.block :], None)
            outputs.append(y)
        return torch.cat(outputs, dim=1)


class ShortAttention(SoftmaxAttention):
    """Limit causal softmax attention to a token's own block and the block before."""

    def __init__(self, size: Size, memory: int):
        super().__init__(size.d_model, size.heads)
        self.block = memory

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.to_q, self.to_k, self.to_v)
        )
        step = torch.arange(x.shape[1])
        block = step // self.block
        seen = (step <= step[:, None]) & (block >= block[:, None] - 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.to_out(y.transpose(1, 2).flatten(-2))


# --- Speed ----------------------------------------------------------------


def measure(point: Point) -> Point:
    """Measure times relative to a transformer with as many layers, timed in turns.

    - Returns the ratios: `train` for the loss of a sequence and all its
      gradients, `predict` for one more token after the sequence.
    """
    models = {
        name: reader(SPEEDS[name], point) for name in (point["model"], "transformer")
    }
    tokens = torch.randint(len(CLAUSES), TIMED)

    def step(model: LanguageModel) -> Any:
        return lambda: model(tokens).sum().backward()

    def predict(model: LanguageModel) -> Any:
        state = model.prefill(tokens)[1]
        return lambda: model.step(tokens[:, 0], state)

    def ratio(prepare: Any) -> float:
        calls = {name: prepare(model) for name, model in models.items()}
        ours, theirs = map(median, in_turns(calls, rounds=5, turn=0.02).values())
        return round(ours / theirs, 3)

    train = ratio(step)
    with torch.no_grad():
        return {"train": train, "predict": ratio(predict)}


# --- Claims and figures ---------------------------------------------------

#: Accuracies in percent by layers, for three variables (authors' repository).
PUBLISHED = {"feedback": {4: 99.1}, "transformer": {8: 33.7}}
TIMES = {"train": "training step", "predict": "next token"}
COLORS = {"feedback": (FAST, "o", "-"), "transformer": (OTHER, "s", "--")}


def about(points: Points) -> tuple[bool, int, Points]:
    """Return (True if quick, usual number of steps, runs at the usual learning rate).

    The usual learning rate is the first rate in `RATES`.
    """
    quick = points[0]["statements"] == STATEMENTS[True]
    return quick, min(points["steps"]), points(rate=RATES[quick][0])


def claims(points: Points) -> Iterator[Claim]:
    quick, usual, same_rate = about(points)
    trained = same_rate(kind="accuracy")
    protocol = f"{points[0]['statements']} statements, one token and label per clause"
    protocol += ", 1 and 2 layers" if quick else ", steps added later"

    def right(model: str, layers: int, memory: int, steps: int = usual) -> Numbers:
        own = trained(model=model, layers=layers, memory=memory, steps=steps)
        return own["accuracy"]

    low = 1 if quick else 4
    longest, *shorter = (usual,) if quick else (2 * usual, usual)
    for steps in (longest, *shorter):
        ours = right("feedback", low, ALL, steps)
        text = f"{named('feedback', low)}, {steps:,} steps: above"
        deeper, equal = (right("transformer", n * low, ALL, steps) for n in (2, 1))
        # The published models were trained for longer than any of our models.
        known = steps == longest
        yield above(
            f"{text} {named('transformer', 2 * low)}",
            [ours, deeper],
            "99.1, 33.7 % (4 and 8 layers, authors' README)" if known else "",
            protocol=protocol if known else "",
        )
        yield above(f"{text} {named('transformer', low)}", [ours, equal])
        rules = same_rate(kind="rule")["accuracy"]
        yield above(f"{text} the best rule", [ours, rules])
    shallow = LOW[quick]
    for memory in MEMORIES[quick]:
        text = f"memory of {memory} to {2 * memory - 1} tokens: feedback above a "
        text += "transformer with twice as many layers"
        other = right("transformer", 2 * shallow, memory)
        yield above(text, [right("feedback", shallow, memory), other])
    if quick:
        return
    best = tuned(points(kind="accuracy", memory=ALL, steps=usual))
    ours, *others = (best(model=model, layers=n)["accuracy"] for model, n, _ in DEEP)
    text = f"{usual:,} steps, each at its best rate of {len(RATES[False])}: "
    text += f"{named(*DEEP[0][:2])}: above"
    for (model, layers, _), other in zip(DEEP[1:], others, strict=True):
        yield above(f"{text} {named(model, layers)}", [ours, other])


def draw(points: Points) -> Figure:
    quick, usual, points = about(points)
    trained = points(kind="accuracy")
    figure, axes = plots.panels(6.8, 3, height_ratios=[3, 3, 2])
    depth, size, speed = axes
    sizes = sorted({*trained["memory"]} - {ALL})
    place = {memory: at for at, memory in enumerate([*sizes, ALL])}
    for model, (color, marker, line) in COLORS.items():
        own = trained(model=model)
        for steps, mark, style in ((usual, marker, line), (2 * usual, "D", "-.")):
            label = model if steps == usual else f"{steps:,} steps"
            same = own(memory=ALL, steps=steps)
            plots.series(depth, same, color, mark, style, label, "accuracy", "layers")
        if not quick:
            plots.published(depth, PUBLISHED[model], color)
        limited = Points(p for p in own if p["memory"] != ALL)
        for layers in limited.by("layers"):
            same = own(layers=layers, steps=usual)
            placed = [{**p, "at": place[p["memory"]]} for p in same]
            label = named(model, layers)
            plots.series(size, placed, color, marker, line, label, "accuracy", "at")
    rules = points(kind="rule")["accuracy"]
    for ax, label in ((depth, "best rule"), (size, None)):
        if rules:
            level = median(rules)
            ax.axhline(level, color=INK, linestyle=":", linewidth=1.2, label=label)
        ax.set_ylabel("right answers, %")
    depth.set_xscale("log", base=2)
    depths = sorted({*trained["layers"]})
    depth.set_xticks(depths, list(map(str, depths)))
    depth.minorticks_off()
    depth.set_xlabel("layers")
    ranges = [f"{s} to {2 * s - 1}" for s in sizes]
    size.set_xticks(range(len(place)), [*ranges, "all"])
    size.set_xlim(-0.3, len(sizes) + 0.3)
    size.set_xlabel("past tokens that a layer sees")

    timed = points(kind="time").by("model", "layers")
    for y, marker, color in (("train", "o", FAST), ("predict", "D", OTHER)):
        rows = {f"{model}, {n}": some[y] for (model, n), some in timed.items()}
        plots.rows(speed, rows, color, marker, TIMES[y])
    speed.axvline(1, color=INK, linewidth=1)
    speed.set_xlim(0, None)
    speed.set_xlabel("time, in multiples of a transformer's")
    for ax in axes:
        # Labels of the lowest panel leave space on the left side of all panels.
        ax.legend(loc="lower left", bbox_to_anchor=(-0.4, 1), ncols=3, columnspacing=1)
    return figure


setup = SETUP

if __name__ == "__main__":
    main(__file__)
