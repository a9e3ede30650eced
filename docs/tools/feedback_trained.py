"""Trains the models of notebook 14, and records what they answer.

One seed trains an equal transformer, a feedback model from scratch, and a
feedback model that starts from that transformer, all on the same programs.
`python docs/tools/feedback_trained.py SEED` writes
`fwlab/data/results/feedback-trained-SEED.json`.
"""

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fwlab.data import programs
from fwlab.data.programs import CLAUSES, Programs
from fwlab.experiments import feedback
from fwlab.experiments.feedback_variables import RULES, rule_accuracy, test_rng
from fwlab.models import LanguageModel
from fwlab.provenance import provenance

CONFIG: dict[str, Any] = {
    "variables": 3,
    "statements": 100,
    "first": 3,
    "share": 0.8,
    "layers": 1,
    "heads": 4,
    "width": 64,
    "batch": 48,
    "steps": 1500,
    "rate": 4e-3,
    "eval_every": 100,
    "eval_programs": 500,
}
FOLDER = Path(__file__).parents[2] / "fwlab/data/results"
#: Programs whose every statement is recorded, and their statements.
RACES, RACE = 3, 24
#: Statements that share a row of `by_position`.
BIN = 10


def build(mixer: str) -> LanguageModel:
    return LanguageModel(
        len(CLAUSES),
        mixer,
        layers=CONFIG["layers"],
        heads=CONFIG["heads"],
        d_model=CONFIG["width"],
        # A condition with its statement is two tokens, and then comes END.
        max_len=2 * CONFIG["statements"] + 1,
    )


def trained(model: LanguageModel, seed: int, test: Programs) -> dict[str, Any]:
    """Train on growing programs; the curve, its cost, and the last score."""
    point: dict[str, Any] = {**CONFIG, "seed": seed}
    draw = feedback.growing(point, point["variables"], point["first"], point["share"])
    asked, cpu = (test.tokens, test.labels), 0.0
    curve = [(0, 0.0, *feedback.score(model, asked))]
    start = time.process_time()
    for step in feedback.train(model, draw, point["steps"], point["rate"]):
        if step % point["eval_every"] == 0:
            cpu += time.process_time() - start
            curve.append((step, round(cpu, 1), *feedback.score(model, asked)))
            print(seed, *curve[-1], flush=True)
            start = time.process_time()
    return {
        "parameters": model.num_parameters(),
        "curve": curve,
        "accuracy": curve[-1][2],
        "loss": curve[-1][3],
        "by_position": by_position(model, test),
    }


@torch.no_grad()
def answers(model: LanguageModel, tokens: Tensor) -> Tensor:
    """The value that a model gives at every token."""
    parts = [model(part).argmax(-1) for part in tokens.split(128)]
    return torch.cat(parts)


def by_position(model: LanguageModel, test: Programs) -> list[float]:
    """Right answers at prints in percent, for each `BIN` of statements."""
    condition = torch.tensor([clause.startswith("if") for clause in CLAUSES])
    statement = (~condition[test.tokens]).cumsum(1) - 1
    right = answers(model, test.tokens) == test.labels
    asked = test.labels >= 0
    return [
        round(100 * right[asked & (statement // BIN == row)].float().mean().item(), 2)
        for row in range(CONFIG["statements"] // BIN)
    ]


def race(models: dict[str, LanguageModel]) -> list[dict[str, Any]]:
    """Programs in clauses, and what each model answers after every clause."""
    made = programs(RACES, RACE, CONFIG["variables"], random.Random(0), clauses=True)
    said = {name: answers(model, made.tokens) for name, model in models.items()}
    rows = []
    for at, tokens in enumerate(made.tokens):
        length = sum(CLAUSES[token] != "END" for token in tokens)
        row: dict[str, Any] = {"program": [CLAUSES[token] for token in tokens[:length]]}
        for name, values in said.items():
            row[name] = [CLAUSES[value] for value in values[at, :length]]
        rows.append(row)
    return rows


def main(seed: int) -> None:
    torch.set_num_threads(1)
    size = (CONFIG["statements"], CONFIG["variables"])
    test = programs(CONFIG["eval_programs"], *size, test_rng(seed), clauses=True)
    start = time.time()
    models: dict[str, LanguageModel] = {}
    results: dict[str, Any] = {}
    for name in ("transformer", "feedback", "warm"):
        torch.manual_seed(seed)
        model = build("softmax" if name == "transformer" else "feedback")
        if name == "warm":
            model.start_from(models["transformer"])
        results[name] = trained(model, seed, test)
        models[name] = model
    record = {
        "config": {**CONFIG, "seed": seed},
        "columns": ["step", "cpu seconds", "accuracy", "loss"],
        "rules": {rule: rule_accuracy(rule, *size, test_rng(seed)) for rule in RULES},
        "models": results,
        "race": race(models),
        "seconds": round(time.time() - start, 1),
        **provenance(f"python docs/tools/feedback_trained.py {seed}"),
    }
    path = FOLDER / f"feedback-trained-{seed}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
