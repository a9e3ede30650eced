"""Programs whose variables a model has to follow: Fan et al. 2020.

A layer of a transformer sees what the layers below it made of the past.
With feedback, every layer sees what all layers made of it, so that each
statement can build on the result of the one before.
"""

import random
from collections import Counter
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure

from fwlab import plots
from fwlab.data import programs
from fwlab.data.programs import CLAUSES, TOKENS, execute, program
from fwlab.experiments import feedback
from fwlab.experiments.experiment import Claim, Experiment, Point, numbers_claim, select
from fwlab.models import LanguageModel
from fwlab.plots import FAST, INK, OTHER

#: Accuracy in percent, by variables and model (the authors' repository).
PUBLISHED = {
    3: {"feedback, 4 layers": 99.1, "transformer, 8 layers": 33.7},
    5: {"feedback, 4 layers": 92.6, "transformer, 8 layers": 37.5},
}
MIXERS = {"feedback": "feedback", "transformer": "softmax"}
#: Rules that get some answers right without executing everything.
RULES = ("most frequent value", "last print", "skip every if", "every if is true")
COLORS = {"feedback": FAST, "transformer": OTHER}
#: The points that count as clearly above.
MARGIN = 10
#: Programs for the accuracy.
TEST = 500


def points(quick: bool) -> list[Point]:
    """Every seed with all models, so that a stopped run can be compared."""
    size = {
        "tokens": "clauses" if quick else "words",
        "statements": 30 if quick else 100,
        "width": 64,
        "batch": 48 if quick else 32,
        "steps": 1000 if quick else 4000,
        "rate": 4e-3 if quick else 1e-3,
    }
    deep = 1 if quick else 4
    models = [
        ("feedback", deep),
        ("transformer", deep),
        ("transformer", 2 * deep),
        *((rule, 0) for rule in RULES),
    ]
    return [
        {"variables": variables, "model": model, "layers": layers, **size, "seed": seed}
        for variables in ((3,) if quick else (3, 5))
        for seed in (1, 2, 3)
        for model, layers in models
    ]


def run(point: Point) -> Point:
    size, seed = (point["statements"], point["variables"]), point["seed"]
    if point["model"] in RULES:
        right = rule_accuracy(point["model"], *size, test_rng(seed))
        return {"accuracy": right, "loss": None, "parameters": 0}
    clauses = point["tokens"] == "clauses"
    torch.manual_seed(seed)
    model = LanguageModel(
        len(CLAUSES if clauses else TOKENS),
        MIXERS[point["model"]],
        layers=point["layers"],
        d_model=point["width"],
        # A condition with an assignment is the longest statement.
        max_len=(2 if clauses else 9) * point["statements"] + 1,
    )
    draw = feedback.growing(point, point["variables"], 3, 0.8, clauses)
    for _ in feedback.train(model, draw, point["steps"], rate=point["rate"]):
        pass
    test = programs(TEST, *size, test_rng(seed), clauses)
    score = feedback.score(model, (test.tokens, test.labels))
    return {**score._asdict(), "parameters": model.num_parameters()}


def test_rng(seed: int) -> random.Random:
    """Seed the programs for the accuracy, which no training sees.

    A negative seed would not do: Python takes its absolute value.
    """
    return random.Random(1000 + seed)


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


def by_name(points: list[Point]) -> dict[str, list[Point]]:
    """Points of models and of rules, in their order."""
    named: dict[str, list[Point]] = {}
    for point in points:
        named.setdefault(name_of(point), []).append(point)
    return named


def claims(points: list[Point]) -> list[Claim]:
    full = points[0]["statements"] == 100
    every = []
    for variables in (3, 5) if full else (3,):
        rows = {
            name: median(p["accuracy"] for p in own)
            for name, own in by_name(select(points, variables=variables)).items()
        }
        deep = 4 if full else 1
        ours, equal, deeper = (
            name_of({"model": model, "layers": layers})
            for model, layers in (
                ("feedback", deep),
                ("transformer", deep),
                ("transformer", 2 * deep),
            )
        )
        rules = {name: rows[name] for name in RULES if name in rows}
        best = max(rules, key=rules.__getitem__, default=RULES[2])
        published = " against ".join(f"{x} %" for x in PUBLISHED[variables].values())
        task = f"{variables} variables: feedback at least {MARGIN} points above"
        for text, source, other in (
            (
                f"{task} a transformer of equal size",
                "higher (no number published)",
                equal,
            ),
            (f"{task} one with twice as many layers", published, deeper),
            (f"{task} the best rule ({best})", "above (ours)", best),
        ):
            every.append(_above(text, source, rows.get(ours), rows.get(other)))
        if full:
            every.append(_solved(variables, rows.get(ours)))
    return every


def _solved(variables: int, ours: float | None) -> Claim:
    return numbers_claim(
        f"{variables} variables: feedback gets 90 % or more right",
        f"{PUBLISHED[variables]['feedback, 4 layers']} %",
        [ours],
        lambda ours: ours >= 90,
        ".1f",
        unit=" %",
    )


def _above(text: str, source: str, ours: float | None, other: float | None) -> Claim:
    return numbers_claim(
        text,
        source,
        [ours, other],
        lambda ours, other: ours >= other + MARGIN,
        ".1f",
        " % against ",
        " %",
    )


def draw(points: list[Point]) -> Figure:
    tasks = dict.fromkeys(p["variables"] for p in points)
    full = points[0]["statements"] == 100
    rows = by_name(points)
    height = 1 + (0.5 + 0.3 * len(rows)) * len(tasks)
    figure, axes = plots.panels(height, len(tasks), sharex=True)
    for ax, variables in zip(axes, tasks, strict=True):
        own = by_name(select(points, variables=variables))
        for row, name in enumerate(rows):
            color = next((c for key, c in COLORS.items() if name.startswith(key)), INK)
            right = [p["accuracy"] for p in own.get(name, [])]
            rule = name in RULES
            marker, at = "s" if rule else "o", [row] * len(right)
            plots.marks(ax, right, at, marker, markersize=5.5, alpha=0.7, color=color)
            if full and name in PUBLISHED[variables]:
                plots.published(ax, {PUBLISHED[variables][name]: row}, color)
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
    cost="quick: 5 min of one core; full: about 18 hours (estimated)",
    points=points,
    run=run,
    claims=claims,
    draw=draw,
    setup=lambda point: feedback.SETUP,
)
