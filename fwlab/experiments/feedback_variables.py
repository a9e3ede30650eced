"""Programs whose variables a model has to follow: Fan et al. 2020.

A layer of a transformer sees what the layers below it made of the past.
With feedback, every layer sees what all layers made of it, so that each
statement can build on the result of the one before.
"""

import random
from collections import Counter
from math import floor, inf
from operator import gt
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure

from fwlab import plots
from fwlab.data.programs import CLAUSES, execute, program
from fwlab.experiments import feedback
from fwlab.experiments.experiment import Claim, Experiment, Point, compared, select
from fwlab.experiments.feedback import TEST, at_best_rate, test_rng
from fwlab.models import LanguageModel
from fwlab.plots import FAST, INK, OTHER

#: Accuracy in percent, by variables: of feedback with 4 layers, and of a
#: transformer with 8 (the authors' repository).
PUBLISHED = {3: (99.1, 33.7), 5: (92.6, 37.5)}
#: Learning rates of the quick version, and of the full one. The first was chosen
#: for feedback; the others run with three variables, with every model.
RATES = {True: (4e-3,), False: (1.5e-3, 5e-4, 4e-3)}
MIXERS = {"feedback": "feedback", "transformer": "softmax"}
#: Rules that get some answers right without executing everything.
RULES = ("most frequent value", "last print", "skip every if", "every if is true")
COLORS = {"feedback": FAST, "transformer": OTHER}


def points(quick: bool) -> list[Point]:
    """Every seed with all models, so that a stopped run can be compared."""
    size = {
        "statements": 30 if quick else 50,
        "width": 64,
        "batch": 48,
        "steps": 1000 if quick else 2000,
    }
    usual, *others = RATES[quick]
    deep = 1 if quick else 2
    models = [
        ("feedback", deep),
        ("transformer", deep),
        ("transformer", 2 * deep),
    ]
    rules = [(rule, 0) for rule in RULES]
    grid = [(3, usual, models + rules)]
    if not quick:
        grid += [(5, usual, models + rules), *((3, rate, models) for rate in others)]
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
        right = rule_accuracy(point["model"], *size, test_rng(seed))
        return {"accuracy": right, "loss": None, "parameters": 0}
    torch.manual_seed(seed)
    model = LanguageModel(
        len(CLAUSES),
        MIXERS[point["model"]],
        layers=point["layers"],
        d_model=point["width"],
        # A condition with its statement is two tokens, and then comes END.
        max_len=2 * point["statements"] + 1,
    )
    return feedback.learn(model, point, point["variables"], first=3)


# --- Rules ----------------------------------------------------------------


def rule_accuracy(
    rule: str, statements: int, variables: int, rng: random.Random
) -> float:
    """Right answers of a rule in percent, for the programs of a test."""
    answers: list[tuple[Any, Any]] = []
    for _ in range(TEST):
        tokens, labels, _ = program(statements, variables, rng)
        guesses = guess(rule, tokens, labels)
        answers += [
            (label, answer)
            for label, answer in zip(labels, guesses, strict=True)
            if label is not None
        ]
    if rule == "most frequent value":
        right = max(Counter(label for label, _ in answers).values())
    else:
        right = sum(label == answer for label, answer in answers)
    return round(100 * right / len(answers), 2)


def guess(rule: str, tokens: list[str], labels: list[int | None]) -> list[int | None]:
    """A rule's guess at each print; None = no guess."""
    if rule == "skip every if":
        return execute(tokens, conditions=False)
    if rule == "every if is true":
        return execute(tokens, conditions=True)
    guesses: list[int | None] = [None] * len(tokens)
    if rule == "last print":
        known: dict[str, int | None] = {}
        for at, label in enumerate(labels):
            if label is not None:  # "print", the variable, ";"
                name = tokens[at - 1]
                guesses[at], known[name] = known.get(name), label
    return guesses


# --- What came out --------------------------------------------------------


def name_of(point: Point) -> str:
    if point["model"] in RULES:
        return point["model"]
    plural = "s" if point["layers"] > 1 else ""
    return f"{point['model']}, {point['layers']} layer{plural}"


def compare(points: list[Point]) -> tuple[bool, list[str]]:
    """Whether points are of the full version; and the names of feedback, of a
    transformer of equal size, and of one with twice as many layers.
    """
    full = points[0]["statements"] != 30
    layers = 2 if full else 1
    return full, [
        name_of({"model": model, "layers": layers * times})
        for model, times in (("feedback", 1), ("transformer", 1), ("transformer", 2))
    ]


def by_name(points: list[Point]) -> dict[str, list[Point]]:
    """Points of models and of rules, in their order."""
    named: dict[str, list[Point]] = {}
    for point in points:
        named.setdefault(name_of(point), []).append(point)
    return named


def claims(points: list[Point]) -> list[Claim]:
    full, (ours, equal, deeper) = compare(points)
    usual = select(points, rate=RATES[not full][0])
    protocol = "one token and one label per clause, smaller models, fewer steps"
    protocol += f", {points[0]['statements']} statements"
    right = {variables: _right(usual, variables) for variables in PUBLISHED}

    def above(what: str, sides: list[tuple[int, str]], published: str = "") -> Claim:
        accuracies = [right[variables].get(name, []) for variables, name in sides]
        known = protocol if published else ""
        return compared(what, published, accuracies, gt, spec=".1f", protocol=known)

    every = []
    for variables, (solved, deep) in PUBLISHED.items():
        task, least = f"{variables} variables: feedback", floor(solved)
        # One that has not run is the best: then there is nothing to compare with.
        rules = {name: right[variables].get(name, [inf]) for name in RULES}
        best = max(rules, key=lambda name: median(rules[name]))
        every += [
            above(
                f"{task} above a transformer with twice as many layers",
                [(variables, ours), (variables, deeper)],
                f"{solved}, {deep} % (authors' README)",
            ),
            compared(
                f"{task} gets {least} % or more right",
                f"{solved} % (authors' README)",
                [right[variables].get(ours, [])],
                lambda ours, least=least: ours >= least,
                spec=".1f",
                protocol=protocol,
            ),
        ]
        if full or variables == 3:  # ours; the quick version has one task
            every += [
                above(
                    f"{task} above a transformer of equal size",
                    [(variables, ours), (variables, equal)],
                ),
                above(
                    f"{task} above the best rule",
                    [(variables, ours), (variables, best)],
                ),
            ]
    if full:
        tuned = {
            name: at_best_rate(each, RATES[False])
            for name, each in by_name(select(points, variables=3)).items()
        }
        every += [
            compared(
                f"3 variables, each at its best rate of {len(RATES[False])}: feedback "
                f"above a transformer {what}",
                "",
                [tuned.get(ours, []), tuned.get(name, [])],
                gt,
                spec=".1f",
            )
            for name, what in (
                (equal, "of equal size"),
                (deeper, "with twice as many layers"),
            )
        ]
    (feedback_3, deep_3), (feedback_5, deep_5) = PUBLISHED.values()
    source = "% (authors' README)"
    return [
        *every,
        above(
            "feedback: 3 variables above 5",
            [(3, ours), (5, ours)],
            f"{feedback_3}, {feedback_5} {source}",
        ),
        above(
            "transformer with twice as many layers: 5 variables above 3",
            [(5, deeper), (3, deeper)],
            f"{deep_5}, {deep_3} {source}",
        ),
    ]


def _right(points: list[Point], variables: int) -> dict[str, list[float]]:
    """The accuracy of every seed, by model and rule."""
    named = by_name(select(points, variables=variables))
    return {name: [p["accuracy"] for p in own] for name, own in named.items()}


def draw(points: list[Point]) -> Figure:
    tasks = dict.fromkeys(p["variables"] for p in points)
    full, (ours, _, deeper) = compare(points)
    points = select(points, rate=RATES[not full][0])
    rows = by_name(points)
    height = 1 + (0.5 + 0.3 * len(rows)) * len(tasks)
    figure, axes = plots.panels(height, len(tasks), sharex=True)
    for ax, variables in zip(axes, tasks, strict=True):
        own = by_name(select(points, variables=variables))
        known = dict(zip((ours, deeper), PUBLISHED[variables], strict=True))
        for row, name in enumerate(rows):
            color = next((c for key, c in COLORS.items() if name.startswith(key)), INK)
            right = [p["accuracy"] for p in own.get(name, [])]
            rule = name in RULES
            marker, at = "s" if rule else "o", [row] * len(right)
            plots.marks(ax, right, at, marker, markersize=5.5, alpha=0.7, color=color)
            if full and name in known:
                plots.published(ax, {known[name]: row}, color)
        ax.set_title(f"{variables} variables")
        ax.set_yticks(range(len(rows)), list(rows))
        ax.set_ylim(len(rows) - 0.5, -0.5)
        ax.set_xlim(0, 102)
    axes[-1].set_xlabel("right answers in percent")
    entries = [("o", "none", "trained models"), ("s", "none", "rules")]
    if full:
        entries.append(("x", "none", "published"))
    plots.key(figure, entries)
    return figure


EXPERIMENT = Experiment(
    name="feedback-variables",
    title="Programs: following variables through conditions",
    source="Fan et al. 2020, the algorithmic task",
    cost="quick: 5 min of one core; full: 97 min",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: feedback.SETUP,
)
