"""The retrieval tasks, their model and training, and the experiments about them."""

import pytest
import torch
from torch.nn import functional as F

from fwlab import ops
from fwlab.data.retrieval import loss, retrieval
from fwlab.models import retriever
from fwlab.models.retriever import Retriever, feature_map


def test_without_repetition_every_key_and_value_occurs_once():
    pairs = retrieval(5, 7)
    for part in pairs[:2]:
        assert torch.equal(part.sort(-1).values, torch.arange(7).expand(5, 7))
    assert torch.equal(pairs.answers.gather(1, pairs.keys), pairs.values)
    assert ((retrieval(5, 7, 3).answers < 0).sum(-1) == 4).all()


def test_with_repetition_the_most_recent_value_counts():
    keys, values, answers = retrieval(20, 6, 12, repeat=True)
    for row in range(20):
        wanted = dict(zip(keys[row].tolist(), values[row].tolist(), strict=True))
        assert answers[row].tolist() == [wanted.get(key, -1) for key in range(6)]


def test_what_does_not_fit():
    for said, make in {
        "batch to be at least 0, got -1": lambda: retrieval(-1, 3),
        "symbols to be at least 1, got 0": lambda: retrieval(1, 0),
        "from 0 to 3, the number of symbols, got 4": lambda: retrieval(1, 3, 4),
        "a feature map such as dpfp-1, got 'dpfp'": lambda: feature_map("dpfp", 4),
        "got add, linear": lambda: Retriever(3, 4, "add", "linear"),
        "got sum, softmax": lambda: Retriever(3, 4, "sum", "softmax"),
    }.items():
        with pytest.raises(ValueError, match=said):
            make()


def test_finding_nothing_costs_one_half():
    assert loss(torch.zeros(4, 7), torch.arange(4)).item() == 0.5
    assert loss(torch.eye(7)[:4], torch.arange(4)).item() == 0


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("rule", ["sum", "delta", "gated"])
@pytest.mark.parametrize("phi", ["linear", "dpfp-2", "favor-5-stable"])
def test_training_retrieves_what_the_operation_retrieves(rule, phi, repeat):
    model = Retriever(9, 4, rule, phi).double()
    if phi.startswith("favor"):
        model.phi.redraw = lambda seed=None: None  # the same features twice
    keys, values, _ = retrieval(3, 9, 18 if repeat else 9, repeat=repeat)
    queries = torch.arange(9).expand(3, -1)
    one, other = (f(keys, values, queries) for f in (model, model.retrieve))
    assert (one - other).norm() < 1e-10 * other.norm()


def test_the_key_depends_on_the_value_and_the_query_does_not():
    model = Retriever(6, 4, "sum", "linear")
    key = torch.tensor([[2]])
    first, other = (model._project(key, torch.tensor([[v]]), key) for v in (1, 3))
    assert torch.equal(first[0], other[0]) and not torch.equal(first[1], other[1])
    # A projection of the concatenation, as in the authors' code.
    whole = model.to_k(torch.cat([torch.eye(6)[1], model.embedding[2]]))
    assert torch.allclose(first[1][0, 0], model.phi(whole), atol=1e-6)


def test_fast_weight_memory_is_a_delta_rule_while_its_norm_is_small():
    model = Retriever(5, 3, "fwm", "tanh").double()
    torch.nn.init.uniform_(model.to_k.weight, -0.01, 0.01)
    torch.nn.init.zeros_(model.to_k.bias)
    keys, values, _ = retrieval(2, 5)
    queries = torch.arange(5).expand(2, -1)
    q, k, logits = model._project(keys, values, queries)
    k, v = k[:, :, None], torch.eye(5).double()[values][:, :, None]
    _, W = ops.delta_rule(k, k, v, logits.sigmoid()[..., None], return_state=True)
    assert W.flatten(1).norm(dim=-1).max() < 1
    wanted = F.layer_norm(q @ W[:, 0].mT, [5])
    assert torch.allclose(model(keys, values, queries), wanted, atol=1e-12)


def test_sizes_of_the_model_are_those_of_the_paper():
    model = Retriever(20, 64, "delta", "dpfp-1")
    assert model.to_k.weight.shape == (64, 44 + 20)  # 44 = int(1.1 * 2 * 20)
    assert model.to_k.weight.abs().max() <= 1 / 8
    widths = {"linear": 64, "dpfp-3": 384, "favor-512": 1024, "tanh": 64}
    assert {name: retriever.d_dot(name, 64) for name in widths} == widths


@pytest.mark.parametrize(("rule", "repeat"), [("sum", False), ("delta", True)])
def test_asking_all_keys_trains_on_each_key_that_occurs(rule, repeat):
    model = Retriever(7, 4, rule, "dpfp-1").double()
    pairs = retrieval(5, 7, 14 if repeat else 7, repeat=repeat)
    every = torch.arange(7).expand(5, -1)
    trained = retriever.loss_of(model, (pairs, every, pairs.answers))
    found = model.retrieve(pairs.keys, pairs.values, every)
    known = pairs.answers >= 0
    assert bool(known.all()) is not repeat
    wrong = found[known] - torch.eye(7)[pairs.answers[known]]
    assert torch.allclose(trained, wrong.square().sum() / (2 * known.sum()))


def test_the_authors_evaluate_groups_of_the_first_keys(monkeypatch):
    """Of 225 keys, seven groups of the first 200 count, and the last has eight."""
    model = Retriever(225, 2, "sum", "linear")

    def retrieve(keys, values, queries):
        found = F.one_hot(values.gather(1, keys.argsort(-1)), 225).float()
        found[:, [199, 224]] = 0  # each costs 0.5; one is in the last group
        return found

    monkeypatch.setattr(model, "retrieve", retrieve)
    ours, theirs = (retriever.evaluate(model, 225, False, way) for way in (0, 1))
    assert (ours, theirs) == pytest.approx((2 * 0.5 / 225, 0.5 / 8 / 7))


@pytest.mark.parametrize(
    ("gain", "losses", "steps", "ended"),
    [
        (0.0, [0.5 - 1e-5 * i for i in range(30)], 30, "budget"),  # each is better
        (0.0, [0.4] * 30, 12, "no progress"),  # the first, and 11 that are not
        (0.002, [0.5 - 1e-5 * i for i in range(30)], 6, "no progress"),
        (0.002, [0.5 - 5e-4 * i for i in range(30)], 30, "budget"),  # a gain in 5
        (0.002, [0.4, 0.3, 0.1, 0.0009], 4, "solved"),
        (0.0, [0.4, 0.3, float("nan")], 3, "diverged"),
    ],
)
def test_when_training_ends(monkeypatch, gain, losses, steps, ended):
    evaluations = iter(losses)
    monkeypatch.setattr(retriever, "EVERY", 1)
    monkeypatch.setattr(retriever, "evaluate", lambda *_: next(evaluations))
    model = Retriever(3, 2, "sum", "linear")
    trained = retriever.train(model, 3, False, len(losses), gain=gain)
    assert (trained["steps"], trained["ended"]) == (steps, ended)
    last = None if ended == "diverged" else round(losses[steps - 1], 5)
    assert trained["loss"] == last and len(trained["curve"]) <= 20
    assert trained["curve"][-1] == ([2, 0.3] if last is None else [steps, last])
