"""Trains the models of notebook 17, and records what they answer.

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
from fwlab.data.programs import CLAUSES, RULES, Programs, rule_accuracy, test_rng
from fwlab.fit import answer_loss, fit, score
from fwlab.models import LanguageModel
from fwlab.provenance import provenance

sys.path.append(str(Path(__file__).parents[1] / "reproduce"))
from statements import ADAM, growing

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
    """Return the settings of this model that differ from `CONFIG`."""
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
    draw = growing(point, point["variables"], point["first"], point["share"])
    seed, steps = point["seed"], point["steps"]
    curve, cpu, start = [], 0.0, time.process_time()

    def evaluate(step: int) -> float:
        nonlocal cpu, start
        cpu += time.process_time() - start
        found = score(model, (test.tokens, test.labels))
        curve.append((step, round(cpu, 1), *found))
        print(seed, *curve[-1], flush=True)
        start = time.process_time()
        return found.loss

    fit(
        *(model, draw, answer_loss, steps, point["rate"]),
        optimizer=ADAM,
        every=point["eval_every"],
        evaluate=evaluate,
    )
    if curve[-1][0] < steps:
        evaluate(steps)
    return {
        "parameters": model.num_parameters(),
        "steps": steps,
        "curve": curve,
        "accuracy": curve[-1][2],
        "loss": curve[-1][3],
    }


def main(seed: int) -> None:
    torch.set_num_threads(1)
    size = (CONFIG["eval_programs"], CONFIG["statements"], CONFIG["variables"])
    test = programs(*size, test_rng(seed), clauses=True)
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
