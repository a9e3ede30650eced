"""Train on programs whose variables a model has to follow: Fan et al. 2020.

A layer of a transformer sees what the layers below it made of the past.
With feedback, every layer sees what all layers made of it, so that each
statement can build on the result of the one before.
"""

from collections.abc import Iterator
from math import floor, inf
from statistics import median

import torch
from frame import Claim, Numbers, Point, Points, holds, main
from matplotlib.figure import Figure
from statements import SETUP, TEST, above, build, learn, named, tuned

from fwlab import plots
from fwlab.data.programs import RULES, rule_accuracy, test_rng
from fwlab.plots import FAST, INK, OTHER

TITLE = "Programs: following variables through conditions"
SOURCE = "Fan et al. 2020, the algorithmic task"
COST = "quick: 5 min of one core; full: 97 min"

#: Published accuracies (feedback, transformer) in percent, by number of variables.
#: Feedback has 4 layers, and the transformer has 8 layers (authors' repository).
PUBLISHED = {3: (99.1, 33.7), 5: (92.6, 37.5)}
#: Learning rates of the quick (True) and full version; feedback's best rate is first.
#: All models run at the other rates with three variables only.
RATES = {True: (4e-3,), False: (1.5e-3, 5e-4, 4e-3)}
#: Number of statements of a program in the quick (True) and the full version.
STATEMENTS = {True: 30, False: 50}
MIXERS = {"feedback": "feedback", "transformer": "softmax"}
COLORS = {"feedback": FAST, "transformer": OTHER}
HEADS = 4


def models(quick: bool) -> list[tuple[str, int]]:
    """Return (model, layers) of feedback and of two transformers, one twice as deep."""
    layers = 1 if quick else 2
    return [("feedback", layers), ("transformer", layers), ("transformer", 2 * layers)]


def points(quick: bool) -> list[Point]:
    """List settings by seed, so that partial results can be compared."""
    size = {
        "statements": STATEMENTS[quick],
        "width": 64,
        "batch": 48,
        "steps": 1000 if quick else 2000,
    }
    usual, *others = RATES[quick]
    trained, rules = models(quick), [(rule, 0) for rule in RULES]
    grid = [(3, usual, trained + rules)]
    if not quick:
        grid.append((5, usual, trained + rules))
        grid += [(3, rate, trained) for rate in others]
    return [
        {"variables": variables, "model": model, "layers": layers}
        | size
        | {"rate": rate, "seed": seed}
        for variables, rate, each in grid
        for seed in (1, 2, 3)
        for model, layers in each
    ]


def run(point: Point) -> Point:
    size, seed = (point["statements"], point["variables"]), point["seed"]
    if point["model"] in RULES:
        right = rule_accuracy(point["model"], TEST, *size, test_rng(seed))
        return {"accuracy": right, "loss": None, "parameters": 0}
    torch.manual_seed(seed)
    model = build(MIXERS[point["model"]], point, HEADS)
    return learn(model, point, point["variables"], first=3)


# --- Claims and figures ---------------------------------------------------


def is_quick(points: Points) -> bool:
    return points[0]["statements"] == STATEMENTS[True]


def claims(points: Points) -> Iterator[Claim]:
    quick = is_quick(points)
    ours, equal, deeper = models(quick)
    usual = points(rate=RATES[quick][0])
    protocol = "one token and one label per clause, smaller models, fewer steps"
    protocol += f", {points[0]['statements']} statements"

    def right(variables: int, model: str, layers: int) -> list[float]:
        return usual(variables=variables, model=model, layers=layers)["accuracy"]

    def known(text: str, high: Numbers, low: Numbers, *published: float) -> Claim:
        source = f"{published[0]}, {published[1]} % (authors' README)"
        return above(text, [high, low], source, protocol=protocol)

    for variables, (solved, deep) in PUBLISHED.items():
        task, least = f"{variables} variables: feedback", floor(solved)
        feedback = right(variables, *ours)
        text = f"{task} above a transformer with twice as many layers"
        yield known(text, feedback, right(variables, *deeper), solved, deep)
        yield holds(
            f"{task} gets {least} % or more right",
            feedback,
            lambda x, least=least: x >= least,
            f"{solved} % (authors' README)",
            spec=".1f",
            protocol=protocol,
        )
        if quick and variables == 5:
            continue  # The quick version has only one task for our claims.
        # A rule that has not run counts as best, so that its claim counts as not run.
        rules = [right(variables, rule, 0) for rule in RULES]
        best = max(rules, key=lambda numbers: median(numbers or [inf]))
        of_size = right(variables, *equal)
        yield above(f"{task} above a transformer of equal size", [feedback, of_size])
        yield above(f"{task} above the best rule", [feedback, best])
    if not quick:
        best = tuned(points(variables=3))
        text = f"3 variables, each at its best rate of {len(RATES[False])}: "
        text += "feedback above a transformer"
        for size, other in (
            ("of equal size", equal),
            ("with twice as many layers", deeper),
        ):
            each = [best(model=m, layers=n)["accuracy"] for m, n in (ours, other)]
            yield above(f"{text} {size}", each)
    solved, deep = zip(*PUBLISHED.values(), strict=True)
    text = "feedback: 3 variables above 5"
    yield known(text, right(3, *ours), right(5, *ours), *solved)
    text = "transformer with twice as many layers: 5 variables above 3"
    yield known(text, right(5, *deeper), right(3, *deeper), *deep[::-1])


def draw(points: Points) -> Figure:
    quick = is_quick(points)
    ours, _, deeper = models(quick)
    tasks = points.by("variables")
    points = points(rate=RATES[quick][0])
    rows = [*points.by("model", "layers")]
    names = [m if m in RULES else named(m, layers) for m, layers in rows]
    height = 1 + (0.5 + 0.3 * len(rows)) * len(tasks)
    figure, axes = plots.panels(height, len(tasks), sharex=True)
    for ax, variables in zip(axes, tasks, strict=True):
        known = dict(zip((ours, deeper), PUBLISHED[variables], strict=True))
        for row, (model, layers) in enumerate(rows):
            own = points(variables=variables, model=model, layers=layers)
            color, marker = COLORS.get(model, INK), "s" if model in RULES else "o"
            right, at = own["accuracy"], [row] * len(own)
            plots.marks(ax, right, at, marker, markersize=5.5, alpha=0.7, color=color)
            if not quick and (model, layers) in known:
                plots.published(ax, {known[model, layers]: row}, color)
        ax.set_title(f"{variables} variables")
        ax.set_yticks(range(len(rows)), names)
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_xlim(0, 102)
    axes[-1].set_xlabel("right answers in percent")
    entries = [("o", "none", "trained models"), ("s", "none", "rules")]
    if not quick:
        entries.append(("x", "none", "published"))
    plots.key(figure, entries)
    return figure


setup = SETUP

if __name__ == "__main__":
    main(__file__)
