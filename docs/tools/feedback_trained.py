"""Train the models of notebook 17, and record their results.

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
from fwlab.data.programs import RULES, rule_accuracy, test_rng
from fwlab.fit import answer_loss, fit, score
from fwlab.models import LanguageModel
from fwlab.provenance import provenance

sys.path.append(str(Path(__file__).parents[1] / "reproduce"))
from statements import ADAM, build, growing

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
#: The share of statements that growing programs save over full-length programs.
SAVED = CONFIG["share"] * (1 - CONFIG["first"] / CONFIG["statements"]) / 2
FULL = {"first": CONFIG["statements"]}
#: The mixer of each model, and its differences from `CONFIG`.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer": ("softmax", {}),
    "feedback": ("feedback", {}),
    "warm": ("feedback", {}),
    "full": ("feedback", FULL),
    "full, equal chain": (
        "feedback",
        FULL | {"steps": round(CONFIG["steps"] * (1 - SAVED))},
    ),
}


def trained(model: LanguageModel, point: dict[str, Any], test: Any) -> dict[str, Any]:
    """Train a model, and return its size, its learning curve and its last score."""
    draw = growing(point, point["variables"], point["first"], point["share"])
    curve, cpu, start = [], 0.0, time.process_time()

    def evaluate(step: int) -> float:
        nonlocal cpu, start
        cpu += time.process_time() - start
        found = score(model, test)
        curve.append((step, round(cpu, 1), *found))
        print(point["seed"], *curve[-1], flush=True)
        start = time.process_time()
        return found.loss

    fit(
        *(model, draw, answer_loss, point["steps"], point["rate"]),
        optimizer=ADAM,
        every=point["eval_every"],
        evaluate=evaluate,
    )
    if curve[-1][0] < point["steps"]:
        evaluate(point["steps"])
    *_, accuracy, loss = curve[-1]
    found = {"curve": curve, "accuracy": accuracy, "loss": loss}
    return {"parameters": model.num_parameters(), "steps": point["steps"], **found}


def main(seed: int) -> None:
    torch.set_num_threads(1)
    size = (CONFIG["eval_programs"], CONFIG["statements"], CONFIG["variables"])
    test = programs(*size, test_rng(seed), clauses=True)
    models: dict[str, LanguageModel] = {}
    results: dict[str, Any] = {}
    for name, (mixer, changes) in MODELS.items():
        torch.manual_seed(seed)
        point = CONFIG | {"seed": seed} | changes
        models[name] = model = build(mixer, point, CONFIG["heads"])
        if name == "warm":
            model.start_from(models["transformer"])
        results[name] = trained(model, point, (test.tokens, test.labels))
    record = {
        "config": CONFIG | {"seed": seed},
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
