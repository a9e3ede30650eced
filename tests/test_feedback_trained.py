"""The results and weights that notebook 17 reads, and how answers are scored."""

import json
from importlib.resources import files

import pytest
import torch

from fwlab.data import programs
from fwlab.data.programs import CLAUSES
from fwlab.data.programs import test_rng as rng_of
from fwlab.fit import answer_loss, score
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


def test_scores_count_answers_alone():
    """Of 300 sequences, which are more than are scored at once."""
    torch.manual_seed(0)
    tokens, labels = torch.randint(5, (300, 4)), torch.randint(-2, 5, (300, 4))
    logits = torch.randn(5, 5)  # by token
    right, losses = [], []
    for token, label in zip(tokens.flatten(), labels.flatten(), strict=True):
        if label >= 0:
            right.append(logits[token].argmax().item() == label.item())
            losses.append(-logits[token].log_softmax(-1)[label].item())
    mean = sum(losses) / len(losses)
    found = score(logits.__getitem__, (tokens, labels))
    assert found.accuracy == round(100 * sum(right) / len(right), 2)
    assert found.loss == pytest.approx(mean, abs=1e-4)
    loss = answer_loss(logits.__getitem__, (tokens, labels))
    assert loss.item() == pytest.approx(mean, abs=1e-5)
    with pytest.raises(ValueError, match="label that is not negative"):
        score(logits.__getitem__, (tokens, torch.full_like(labels, -1)))
