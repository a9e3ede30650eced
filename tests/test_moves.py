"""Test generated texts about people who move, and the models of the home page."""

import json
import random
import sys

import torch
import tyro
from moves import WORDS, moves
from pair import PairConfig, main, pair_model
from safetensors import safe_open


def questions(tokens):
    """Map the position of each `?` to the answer's place and the number of moves."""
    words = [WORDS[token] for token in tokens.tolist()]
    at, moved, asked = {}, {}, {}
    for i, word in enumerate(words):
        if words[i + 1 : i + 3] == ["is", "in"]:
            at[word] = words[i + 3]
            moved[word] = moved.get(word, -1) + 1
        if word == "?":
            asked[i] = (at[words[i - 1]], moved[words[i - 1]])
    return asked


def test_labels_are_what_the_text_says():
    texts = moves(40, 24, 8, random.Random(0))
    every = set()
    for tokens, labels, moved in zip(*texts, strict=True):
        answers = questions(tokens)
        asked = (labels >= 0).nonzero()[:, 0].tolist()
        assert asked == (moved >= 0).nonzero()[:, 0].tolist() == list(answers)
        for i, (place, times) in answers.items():
            assert WORDS[labels[i]] == place and moved[i] == times
            assert tokens[i + 1] == labels[i]  # The text contains the answer.
            every.add(min(times, 2))
    assert every == {0, 1, 2}


# --- The pair of models ---


def test_pair_differs_only_in_what_a_write_corrects():
    """After two writes with one key, only the delta rule removes the first value.

    After the first write, both memories are equal.
    """
    mixers = [pair_model(PairConfig(rule)).blocks[0].mixer for rule in ("sum", "delta")]
    for mixer in mixers:
        with torch.no_grad():
            mixer.conv.weight.zero_()[:, -1] = 1  # The convolution does not mix tokens.
            mixer.gates.beta.projection.weight.mul_(100)
    x = torch.randn(1, 1, 32, generator=torch.Generator().manual_seed(0))
    states = [mixer.prefill(x)[1].memory for mixer in mixers]
    torch.testing.assert_close(*states)
    twice = x.expand(1, 2, 32)
    added, corrected = (mixer.prefill(twice)[1].memory for mixer in mixers)
    beta = torch.sigmoid(mixers[0].gates.beta.projection(x)).item()
    torch.testing.assert_close(added, 2 * states[0])
    torch.testing.assert_close(corrected, (2 - beta) * states[0])


def test_train_pair(tmp_path, monkeypatch):
    """A short run of docs/tools/pair.py writes the command, weights and result."""
    monkeypatch.chdir(tmp_path)
    options = "--rule sum --steps 4 --eval-every 2 --eval-texts 10"
    monkeypatch.setattr(sys, "argv", ["pair.py", *options.split()])
    main(tyro.cli(PairConfig))
    folder = tmp_path / "runs" / "pair-sum"
    result = json.loads((folder / "result.json").read_text("utf-8"))
    assert result["command"] == f"python docs/tools/pair.py {options}"
    assert [row[0] for row in result["curve"]] == [2, 4]
    assert len(result["curve"][0]) == len(result["columns"])
    with safe_open(folder / "sum.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["model"])
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    assert about["mixer"] == "sum" and about["words"] == list(WORDS)
    model = pair_model(PairConfig("sum"))
    assert shapes == {name: [*x.shape] for name, x in model.named_parameters()}
