"""The matched pair on the home page: only the rule differs, and the page
computes what PyTorch computes.
"""

import functools
import json
import random
import re
from itertools import pairwise

import pytest
import torch
from built import ROOT, asks
from moves import NAMES, PLACES, WORDS, moves
from pair import PairConfig, pair_model, score
from safetensors import safe_open
from torch.utils._pytree import tree_leaves

from fwlab.models import LanguageModel

FOLDER = ROOT / "docs" / "figures" / "live"
RULES = ("sum", "delta")


def result(rule: str) -> dict:
    path = ROOT / "docs" / "results" / f"live-{rule}.json"
    return json.loads(path.read_text("utf-8"))


def weights(rule: str) -> tuple[dict, dict]:
    """The header of a weight file, and its tensors."""
    with safe_open(FOLDER / f"{rule}.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["model"])
        return about, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@functools.cache
def model(rule: str) -> LanguageModel:
    """The weights of the page in PyTorch."""
    made = pair_model(PairConfig(**result(rule)["config"]))
    made.load_state_dict({name: w.float() for name, w in weights(rule)[1].items()})
    return made.eval()


def words(facts: list[list[str]]) -> list[str]:
    return [word for name, place in facts for word in (name, "is", "in", place, ".")]


def logits_in_pytorch(rule: str, facts: list[list[str]], name: str) -> torch.Tensor:
    text = [*words(facts), "Where", "is", name, "?"]
    with torch.no_grad():
        return model(rule)(torch.tensor([[WORDS.index(word) for word in text]]))[0, -1]


@pytest.fixture
def home(fresh):
    """At rest: three people have moved."""
    figure = fresh("live", motion="reduce")
    figure.until("state().answers !== null")
    return figure


# The pair


def test_only_the_rule_differs():
    one, other = (result(rule) for rule in RULES)
    assert one["config"] | {"rule": "delta"} == other["config"]
    assert one["config"]["rule"] == "sum"
    for name in ("feature_map", "key_norm", "normalize", "parameters", "shapes"):
        assert one[name] == other[name], name
    assert one["state_size"] == other["state_size"]
    (about, tensors), (about_other, tensors_other) = map(weights, RULES)
    assert about | {"mixer": "delta"} == about_other
    shapes = {name: list(w.shape) for name, w in tensors.items()}
    assert shapes == {name: list(w.shape) for name, w in tensors_other.items()}
    assert shapes == one["shapes"]
    assert sum(w.numel() for w in tensors.values()) == one["parameters"]
    # They also began alike; training has moved them apart.
    start, start_other = (
        pair_model(PairConfig(**run["config"])).state_dict() for run in (one, other)
    )
    assert all(torch.equal(start[name], start_other[name]) for name in start)
    assert not torch.equal(
        tensors["embedding.weight"], tensors_other["embedding.weight"]
    )


def test_weights_are_light():
    assert sum(p.stat().st_size for p in FOLDER.iterdir()) < 500_000
    script = (FOLDER.parent / "live.js").read_text("utf-8")
    kb = sum(p.stat().st_size for p in FOLDER.iterdir()) / 1000
    assert f"({kb:.0f} kB)" in script


@pytest.mark.parametrize("rule", RULES)
def test_results_are_those_of_the_weights(rule):
    run = result(rule)
    config = PairConfig(**run["config"])
    rng = random.Random(config.seed + 2)
    texts = moves(config.eval_texts, config.sentences, config.people, rng)
    once, changed = score(model(rule), texts)
    assert once == pytest.approx(run["right"]["given once"], abs=2e-3)
    assert changed == pytest.approx(run["right"]["changed"], abs=2e-3)
    assert {"command", "date", "machine", "torch", "commit"} <= run.keys()
    assert f"--rule {rule}" in run["command"]


def test_only_delta_follows_a_change():
    added, corrected = (result(rule)["right"] for rule in RULES)
    assert min(added["given once"], corrected["given once"]) > 0.95
    assert abs(added["given once"] - corrected["given once"]) < 0.02
    assert corrected["changed"] > 0.95 and added["changed"] < 0.7


def test_home_page_says_what_was_measured():
    text = (ROOT / "docs" / "index.md").read_text("utf-8")
    for rule in RULES:
        for share in result(rule)["right"].values():
            assert re.search(rf"\b{100 * share:.1f} %", text)
    run = result("sum")
    assert f"models of {run['bytes'] / 1000:.0f} kB" in text
    assert f"{run['parameters']:,} parameters" in text
    assert f"{run['config']['eval_texts']:,} unseen texts" in text
    assert f"{len(NAMES)} people and {len(PLACES)} places" in text


# The model in the page


def compare(shown: dict, every: int = 1):
    """The logits of answers, to 1e-4; and what the page makes of them."""
    facts = shown["facts"]
    for rule in RULES:
        for answer in shown["answers"][rule][::every]:
            wanted = logits_in_pytorch(rule, facts, answer["name"])
            logits = torch.tensor(answer["logits"])
            torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
            assert answer["said"] == WORDS[int(wanted.argmax())]
            told = [place for name, place in facts if name == answer["name"]]
            assert answer["place"] == told[-1]  # the most recent
            assert answer["right"] == (answer["said"] == answer["place"])
            assert answer["moved"] == sum(a != b for a, b in pairwise(told))
            share = torch.softmax(wanted, -1)[WORDS.index(answer["place"])].item()
            assert answer["truth"] == pytest.approx(share, abs=1e-4)


def memory_in_pytorch(rule: str, facts: list[list[str]]) -> torch.Tensor:
    tokens = torch.tensor([[WORDS.index(word) for word in words(facts)]])
    with torch.no_grad():
        _, state = model(rule).prefill(tokens)
    leaves = filter(torch.is_tensor, tree_leaves(state))
    (W,) = (each for each in leaves if each.shape == (1, 1, 32, 32))
    return W[0, 0]


def test_memories_are_drawn_as_written_and_as_read(home):
    """Each number of W is a pixel; a question lights up what it reads."""
    before = home.ask(asks.LIVE)
    home.press("Ask where Dan is")
    during = home.ask(asks.LIVE)
    assert during["state"]["asked"] == "Dan" and "Asked where Dan is" in during["words"]
    home.press("Ask where Dan is")
    assert home.ask(asks.LIVE) == before
    maps = [torch.tensor([s["maps"][i] for s in (before, during)]) for i in range(2)]
    for rule, (plain, lit) in zip(RULES, maps, strict=True):
        W = memory_in_pytorch(rule, before["state"]["facts"])
        shown = torch.tensor(before["state"]["memories"][rule]).reshape(W.shape)
        torch.testing.assert_close(shown, W, atol=1e-4, rtol=0)
        wanted = 255 * (W.abs() / 2).sqrt().clamp(max=1)
        torch.testing.assert_close(plain[2:, 2:-2].float(), wanted, atol=1, rtol=0)
        # The key above, what was written on the left, what is read on the right.
        assert plain[0].max() == plain[:, 0].max() == 255 and plain[:, -1].max() == 0
        assert lit[0].max() == lit[:, -1].max() == 255 and lit[:, 0].max() == 0
        # What the query does not ask for is dark.
        asked = lit[0, 2:-2]
        assert lit[2:, 2:-2][:, asked < 50].max() < 70
        assert (lit[2:, 2:-2] > plain[2:, 2:-2] + 10).sum() == 0
        # With its sign, so that the sum of a row is what is read there.
        pixels = torch.tensor(during["state"]["pixels"][rule]).reshape(lit.shape)
        sums, read = pixels[2:, 2:-2].sum(1), pixels[2:, -1]
        torch.testing.assert_close(sums / sums.abs().max(), read, atol=1e-4, rtol=0)
        assert read.min() < -0.05 and read.max() > 0.1


def test_agrees_with_pytorch_for_many_people(home):
    facts = [[NAMES[i % 16], PLACES[5 * i % 16]] for i in range(20)]
    home.press("Empty both memories")
    home.until("state().answers !== null")
    home.tab.get_by_label("Or type:").fill(" ".join(words(facts)))
    home.press("Tell")
    home.until("state().facts.length === 20")
    assert home.state()["facts"] == facts
    compare(home.state(), every=5)
