"""The results and weights that notebook 14 reads."""

import json
from importlib.resources import files

import pytest
import torch

from fwlab.data import programs
from fwlab.data.programs import CLAUSES
from fwlab.data.programs import test_rng as rng_of
from fwlab.fit import score
from fwlab.models import LanguageModel

FOLDER = files("fwlab.data") / "results"


@pytest.mark.parametrize("name", ["transformer", "feedback"])
def test_shipped_weights_score_as_recorded(name):
    """In half precision, so a few answers in 2,500 may differ."""
    record = json.loads((FOLDER / "feedback-trained-1.json").read_text("utf-8"))
    config, recorded = record["config"], record["models"][name]
    model = LanguageModel(
        len(CLAUSES),
        {"transformer": "softmax"}.get(name, name),
        config["layers"],
        config["heads"],
        config["width"],
        max_len=2 * config["statements"] + 1,
    )
    with (FOLDER / "feedback-trained.pt").open("rb") as file:
        weights = torch.load(file, weights_only=True)[name]
    model.load_state_dict({key: x.float() for key, x in weights.items()})
    size = config["eval_programs"], config["statements"], config["variables"]
    test = programs(*size, rng_of(config["seed"]), clauses=True)
    found = score(model, (test.tokens, test.labels)).accuracy
    assert found == pytest.approx(recorded["accuracy"], abs=1)
    assert model.num_parameters() == recorded["parameters"]
