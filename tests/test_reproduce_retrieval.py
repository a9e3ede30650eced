"""Test tasks, models and loss formulas of the experiments on retrieval of pairs."""

import csv
from hashlib import sha256
from importlib import import_module
from pathlib import Path

import erasing
import pytest
import regression
import torch
from erasing import ERASED, FADE, FIXED, MAPS, NONE, OWN, Erasing
from regression import LAWS, Layer, draw_pairs, error
from torch.nn import functional as F

from fwlab import ops
from fwlab.data.retrieval import loss, retrieval
from fwlab.models import retriever
from fwlab.models.retriever import Retriever, feature_map

# --- The task and model of `capacity`, `overwrite` and `favor-underflow` ---


@pytest.mark.parametrize("repeat", [False, True])
def test_the_most_recent_value_of_a_key_counts(repeat):
    """The last value of a key is the answer; without repetition, all keys differ."""
    pairs = retrieval(20, 6, 12 if repeat else 6, repeat=repeat)
    for keys, values, answers in zip(*map(torch.Tensor.tolist, pairs), strict=True):
        known = dict(zip(keys, values, strict=True))
        assert answers == [known.get(key, -1) for key in range(6)]
        assert repeat or sorted(keys) == sorted(values) == [*range(6)]
    assert ((retrieval(5, 7, 3).answers < 0).sum(-1) == 4).all()


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
        model.phi.redraw = lambda seed=None: None  # Use equal features twice.
    keys, values, _ = retrieval(3, 9, 18 if repeat else 9, repeat=repeat)
    queries = torch.arange(9).expand(3, -1)
    one, other = (f(keys, values, queries) for f in (model, model.retrieve))
    assert (one - other).norm() < 1e-10 * other.norm()


def test_the_key_depends_on_the_value_and_the_query_does_not():
    model = Retriever(6, 4, "sum", "linear")
    key = torch.tensor([[2]])
    first, other = (model._project(key, torch.tensor([[v]]), key) for v in (1, 3))
    assert torch.equal(first[0], other[0]) and not torch.equal(first[1], other[1])
    # Keys are projections of a concatenation, as in the authors' code.
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
    assert model.to_k.weight.shape == (64, 44 + 20)  # The widths of a key and a value.
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
    """The authors' loss is an average over groups of the first 200 of 225 keys."""
    model = Retriever(225, 2, "sum", "linear")

    def retrieve(keys, values, queries):
        found = F.one_hot(values.gather(1, keys.argsort(-1)), 225).float()
        found[:, [199, 224]] = 0  # Each error costs 0.5; one is in the last group.
        return found

    monkeypatch.setattr(model, "retrieve", retrieve)
    ours, theirs = (retriever.evaluate(model, 225, False, way) for way in (0, 1))
    assert (ours, theirs) == pytest.approx((2 * 0.5 / 225, 0.5 / 8 / 7))


@pytest.mark.parametrize(
    ("gain", "losses", "steps", "ended"),
    [
        (0.0, [0.5 - 1e-5 * i for i in range(30)], 30, "budget"),  # Each loss improves.
        (0.0, [0.4] * 30, 12, "no progress"),  # 11 losses do not improve.
        (0.002, [0.5 - 1e-5 * i for i in range(30)], 6, "no progress"),
        (0.002, [0.5 - 5e-4 * i for i in range(30)], 30, "budget"),  # Losses fall fast.
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


# --- `erasing` ---


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("erased", ERASED)
def test_all_steps_at_once_are_the_loop(name, erased):
    torch.manual_seed(0)
    layer = Erasing(12, 3, 4, name, erased).double().eval()
    shape = (2, 3, 9)
    q, k = (layer.normalize(layer.phi(torch.randn(*shape, 4).double())) for _ in "qk")
    v, beta = torch.randn(*shape, 4).double(), torch.rand(shape).double()
    e = torch.zeros_like(k) if erased in (NONE, FADE) else layer.direction(k)
    assert erased in (NONE, FADE) or torch.allclose(
        e.norm(dim=-1)[:, :, 1:], k.norm(dim=-1)[:, :, 1:]
    )
    W, outputs = torch.zeros(2, 3, 4, k.shape[-1]).double(), []
    for t in range(9):
        b, k_t, v_t, e_t = beta[..., t, None, None], k[:, :, t], v[:, :, t], e[:, :, t]
        if erased == FADE:
            W = W * (1 - b * k_t.square().sum(-1)[..., None, None])
        W = W - b * (W @ e_t[..., None]) * e_t[..., None, :]
        W = W + b * v_t[..., None] * k_t[..., None, :]
        outputs.append((W @ q[:, :, t, :, None])[..., 0])
    found = layer.remember(q, k, v, beta)
    assert torch.allclose(found, torch.stack(outputs, 2), atol=1e-12)
    if erased == OWN:
        heads = (x.transpose(1, 2) for x in (q, k, v, beta))
        assert torch.allclose(found.transpose(1, 2), ops.delta_rule(*heads), atol=1e-12)


def test_each_direction_is_what_its_name_says():
    """Each direction that is erased matches its name, and has the length of the key."""
    k = torch.rand(3, 2, 5, 4).double() + 0.1

    def direction(erased, mean=0.0):
        layer = Erasing(8, 2, 4, "ELU + 1", erased).double().eval()
        layer.mean += mean
        return layer.direction(k)

    lengths = k.norm(dim=-1, keepdim=True)
    wanted = {
        erasing.OTHERS: k[[2, 0, 1]],
        erasing.PREVIOUS: torch.cat([torch.zeros_like(k[:, :, :1]), k[:, :, :-1]], 2),
        FIXED: torch.ones_like(k),
        OWN: k,
    }
    for erased, e in wanted.items():
        unit = e / e.norm(dim=-1, keepdim=True).clamp(min=1e-9)
        assert torch.allclose(direction(erased), unit * lengths), erased
    centred = k - 0.3
    unit = centred / centred.norm(dim=-1, keepdim=True)
    assert torch.allclose(direction(erasing.CENTRED, 0.3), unit * lengths)
    layer = Erasing(8, 2, 4, "ELU + 1", erasing.CENTRED).double()
    layer.direction(torch.cat([k, torch.zeros_like(k)], 2))  # Keys of 0 write nothing.
    assert torch.allclose(layer.mean[:, 0], k.mean((0, 2)))


def test_rates_are_chosen_and_scored_on_different_parts_of_a_text():
    read, symbols, *parts = erasing.tokens("source code")
    whole = erasing.corpus("python")[:1_000_000]
    assert sum(map(len, parts)) == len(whole) and symbols == len({*whole})
    assert [round(len(x) / len(whole), 2) for x in parts] == [0.9, 0.05, 0.05]
    assert read["corpus_sha256"] == sha256(whole.encode()).hexdigest()[:12]


@pytest.mark.parametrize("returns", erasing.RETURNS.values())
def test_the_last_value_of_a_key_is_asked(returns):
    torch.manual_seed(0)
    keys, values, last = erasing.draw_pairs(20, returns)
    for k, v, wanted in zip(keys.tolist(), values.tolist(), last.tolist(), strict=True):
        known = dict(zip(k, v, strict=True))
        assert [known[key] for key in range(erasing.PAIRS)] == wanted
        assert len(k) - len(known) == round(returns * erasing.PAIRS)


def test_the_rate_of_a_text_counts_other_successors():
    now = torch.tensor([[1, 2, 1, 2, 1, 3, 3, 3]])
    # 2, 2, 3 follow 1; 1, 1 follow 2; 3, 3 follow 3: one of seven successors differs.
    assert erasing.returned(now) == round(1 / 7, 4)


# --- `capacity-law` ---

law = import_module("capacity-law")
FILE = Path(law.__file__).with_name("capacity-law.predicted.csv")


def test_the_predictions_are_those_that_were_written_down():
    with FILE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    points = law.points(False)
    assert len(rows) == len(points) == 200
    for row, point in zip(rows, points, strict=True):
        assert {name: str(x) for name, x in point.items()} == {
            name: row[name] for name in point
        }
        assert float(row["predicted"]) == pytest.approx(law.predicted(point), abs=6e-5)


@pytest.mark.parametrize(
    ("features", "rank", "decay", "writes"),
    [
        *((20, 40, 1.0, 1), (40, 20, 1.0, 1), (20, 20, 1.0, 1), (40, 40, 0.95, 1)),
        *((40, 40, 1.0, 3), (40, 40, 0.97, 2), (20, 20, 0.97, 2)),
    ],
)
def test_the_best_memory_of_random_directions_has_the_loss_of_the_law(
    features, rank, decay, writes
):
    """Fast weights along random directions have the loss of `law.predicted`."""
    S, generator = 40, torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    keys, values, last = law.draw_pairs(1000, S, writes)
    K, V = (
        torch.linalg.qr(torch.randn(S, n, generator=generator).double()).Q
        for n in (features, rank)
    )
    age = torch.arange(S * writes).flip(0).double()
    match = F.embedding(keys, K @ K.mT).mT * decay**age
    found = match @ F.one_hot(values, S).double() @ (V @ V.mT)
    wanted = F.one_hot(last, S).double()
    scale = (found * wanted).sum() / found.square().sum()
    loss = (scale * found - wanted).square().sum(-1).mean().item() / 2
    point = {"S": S, "map": "linear", "d_key": features, "rank": rank}
    point |= {"decay": decay, "writes": writes}
    # The formula ignores that a key may return with the same value by chance.
    assert loss == pytest.approx(law.predicted(point), abs=0.008)


# --- `regression` ---

D, N = 4, 6


@pytest.mark.parametrize("noise", regression.NOISES)
@pytest.mark.parametrize("rule", LAWS)
def test_the_layer_of_the_best_step_has_the_loss_of_its_solver(rule, noise):
    layer = Layer(rule, D)
    betas = [1.0] if not noise or rule == "sum" else [0.6, 0.7, 0.8]
    torch.manual_seed(1)
    pairs = draw_pairs(30_000, N, D, noise)
    found = []
    with torch.no_grad():
        layer.query.weight.copy_(torch.eye(D))
        layer.key.weight.copy_(torch.eye(D))
        if rule == "sum":
            layer.scale.fill_(1 / (1 + noise + (N - 1) / D))
        for beta in betas:
            layer.strength.copy_(torch.logit(torch.as_tensor(beta), 1e-6))
            found.append(error(layer, pairs).item())
    # The mean of 30,000 sequences has an error of about 1 %.
    assert min(found) == pytest.approx(LAWS[rule](N, D, noise), rel=0.05)


@pytest.mark.parametrize("noise", regression.NOISES)
def test_nothing_is_below_least_squares(noise):
    torch.manual_seed(2)
    pairs = draw_pairs(20_000, N, D, noise)
    best = regression.least_squares(*pairs[:3], noise)
    left = (best - pairs[3]).square().mean().item()
    assert left < min(LAWS[rule](N, D, noise) for rule in LAWS)
    assert left == pytest.approx(0, abs=1e-3) if not noise else left > 0.05
