"""Trains the models of notebook 14, and records what they answer.

One seed trains, all on the same growing programs, a transformer, a feedback model of
equal size, and another one that starts from the weights of that transformer; then, on
programs of full length from the first step on, two more feedback models: for as many
steps, and for as many statements, one after another, as growing programs have.
`python docs/tools/feedback_trained.py SEED` writes
`fwlab/data/results/feedback-trained-SEED.json`, and for seed 1 the weights of the
first two models, in half precision, beside it.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fwlab.data import programs
from fwlab.data.programs import CLAUSES, Programs
from fwlab.experiments import feedback
from fwlab.experiments.feedback import test_rng
from fwlab.experiments.feedback_variables import RULES, rule_accuracy
from fwlab.models import LanguageModel
from fwlab.provenance import provenance

CONFIG: dict[str, Any] = {
    "variables": 1,
    "statements": 24,
    "first": 2,
    "share": 0.8,
    "layers": 1,
    "heads": 4,
    "width": 32,
    "batch": 16,
    "steps": 1600,
    "rate": 1e-2,
    "eval_every": 100,
    "eval_programs": 500,
}
FOLDER = Path(__file__).parents[2] / "fwlab/data/results"
#: Their mixers.
MODELS = {
    "transformer": "softmax",
    "feedback": "feedback",
    "warm": "feedback",
    "full": "feedback",
    "full, equal chain": "feedback",
}


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


def changes(name: str) -> dict[str, Any]:
    """What is different from `CONFIG` for this model."""
    last, steps = CONFIG["statements"], CONFIG["steps"]
    if not name.startswith("full"):
        return {}
    if name == "full":
        return {"first": last}
    saved = CONFIG["share"] * (last - CONFIG["first"]) / (2 * last)
    return {"first": last, "steps": round(steps * (1 - saved))}


def trained(
    model: LanguageModel, point: dict[str, Any], test: Programs
) -> dict[str, Any]:
    """Train, and return the curve, its cost, and the last score."""
    draw = feedback.growing(point, point["variables"], point["first"], point["share"])
    seed = point["seed"]
    asked = (test.tokens, test.labels)
    curve, cpu, start = [], 0.0, time.process_time()
    for step in feedback.train(model, draw, point["steps"], point["rate"]):
        if step % point["eval_every"] == 0 or step == point["steps"]:
            cpu += time.process_time() - start
            curve.append((step, round(cpu, 1), *feedback.score(model, asked)))
            print(seed, *curve[-1], flush=True)
            start = time.process_time()
    return {
        "parameters": model.num_parameters(),
        "steps": point["steps"],
        "curve": curve,
        "accuracy": curve[-1][2],
        "loss": curve[-1][3],
    }


def main(seed: int) -> None:
    torch.set_num_threads(1)
    size = (CONFIG["statements"], CONFIG["variables"])
    test = programs(CONFIG["eval_programs"], *size, test_rng(seed), clauses=True)
    models: dict[str, LanguageModel] = {}
    results: dict[str, Any] = {}
    for name, mixer in MODELS.items():
        torch.manual_seed(seed)
        models[name] = model = build(mixer)
        if name == "warm":
            model.start_from(models["transformer"])
        point = {**CONFIG, "seed": seed, **changes(name)}
        results[name] = trained(model, point, test)
    record = {
        "config": {**CONFIG, "seed": seed},
        "columns": ["step", "cpu seconds", "accuracy", "loss"],
        "rules": {rule: rule_accuracy(rule, *size, test_rng(seed)) for rule in RULES},
        "models": results,
        **provenance(f"python docs/tools/feedback_trained.py {seed}"),
    }
    path = FOLDER / f"feedback-trained-{seed}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    if seed == 1:
        weights = {
            name: {key: x.half() for key, x in models[name].state_dict().items()}
            for name in ("transformer", "feedback")
        }
        torch.save(weights, FOLDER / "feedback-trained.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]))
