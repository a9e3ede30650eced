"""Experiments that train language models: `language-model`, `ablation`,
`state-size`, `length`.
"""

from dataclasses import replace
from hashlib import sha256
from math import log
from statistics import fmean

import pytest
import torch
from torch.nn import functional as F

from fwlab.data import corpus
from fwlab.experiments import (
    ablation,
    language_model,
    length,
    state_size,
    text,
    verdict,
)
from fwlab.experiments.fit import learning_curve
from fwlab.models import MIXERS, LanguageModel
from fwlab.training import Config, Trainer
from fwlab.training.batches import in_rows

TEXT = "to be, or not to be, that is the question. " * 40
SMALL = Config(
    layers=1,
    heads=2,
    d_model=16,
    block=8,
    batch=3,
    steps=3,
    warmup=1,
    eval_every=100,
    device="cpu",
)


def small(mixer: str = "delta", **options) -> text.Run:
    return text.Run(SMALL, MIXERS[mixer], TEXT, **options)


def test_without_carried_state_it_is_the_training_of_fwlab_train():
    own, usual = small(), Trainer(replace(SMALL, mixer="delta"), TEXT)
    assert [p.loss for p in own.run()] == [p.loss for p in usual.run()]
    assert own.curve == usual.curve


def test_the_same_seed_gives_the_same_result():
    results = [text.train(small(carry=True)) for _ in "ab"]
    for each in results:
        assert each.pop("tokens_per_second") > 0
    assert results[0] == results[1]
    assert results[0]["bits"] == pytest.approx(results[0]["loss"] / log(2), abs=1e-4)


def test_a_point_says_what_it_has_read_and_learned():
    run = text.Run(replace(SMALL, steps=50), MIXERS["delta"], TEXT)
    trained = [p.loss for p in run.run()]
    point = text.train(text.Run(replace(SMALL, steps=50), MIXERS["delta"], TEXT))
    digest = sha256(TEXT.encode()).hexdigest()[:12]
    assert (point["corpus_name"], point["corpus_sha256"]) == ("another text", digest)
    halves = learning_curve([2.0, 4.0, 1.0, 0.0, 9.0], 40)
    assert halves == [[2, 3.0], [4, 0.5]]  # 20 parts of two steps; it ended early
    curve = point["curve"]
    assert [step for step, _ in curve] == [*range(3, 50, 3)]
    assert curve[1][1] == pytest.approx(fmean(trained[3:6]), abs=1e-4)
    assert text.setup(run.config)["steps"] == 50


def test_without_a_network_the_text_has_another_name(monkeypatch):
    monkeypatch.setattr(text, "corpus", lambda _: corpus("python"))
    digest = sha256(text.load.__wrapped__("any").encode()).hexdigest()[:12]
    said = "Python's standard library, the first 300,000 characters"
    assert text.TEXTS[digest] == said


def test_carried_windows_follow_one_another():
    """Until the text ends; then it begins again, with an empty state."""
    run = small(carry=True)
    rows = in_rows(run.train_tokens, 3)
    windows, logits = (rows.shape[1] - 1) // 8, []
    for step in range(windows + 1):
        run.step = step
        batch, start = run._batch(), step % windows * 8
        assert torch.equal(batch.inputs, rows[:, start : start + 8])
        assert torch.equal(batch.targets, rows[:, start + 1 : start + 9])
        assert batch.begins == (start == 0)
        with torch.no_grad():
            state = None if batch.begins else run.states[0]
            logits.append(run.model.prefill(batch.inputs, state)[0])
        run._backward()
    whole = run.model(rows[:, :16])
    assert torch.allclose(torch.cat(logits[:2], 1), whole, atol=1e-5)
    past, W = run.states[0]
    assert past == 8 and not W.requires_grad


@pytest.mark.parametrize("mixer", ["delta", "transformer-xl"])
def test_carried_validation_is_that_of_one_long_sequence(mixer):
    run = text.Run(SMALL, MIXERS[mixer], TEXT * 10, carry=True)
    assert len(run.val_tokens) > 1500  # longer than the parts it is read in
    tokens = run.val_tokens[None]
    logits = run.model(tokens[:, :-1])
    whole = F.cross_entropy(logits[0], tokens[0, 1:]).item()
    assert run.evaluate() == pytest.approx(whole, rel=1e-5)
    run.eval_rows = 2
    halves = []
    for row in in_rows(run.val_tokens, 2):
        halves.append(F.cross_entropy(run.model(row[None, :-1])[0], row[1:]).item())
    assert run.evaluate() == pytest.approx(sum(halves) / 2, rel=1e-5)


@pytest.mark.parametrize("mixer", ["delta", "sum"])
def test_loss_and_norm_by_position(mixer):
    run = text.Run(SMALL, MIXERS[mixer], TEXT, carry=True, rows=2)
    rows = state_size.by_position(run)
    assert [end for end, _, _ in rows] == [8, 16, 32, 64]
    tokens = in_rows(run.val_tokens, 2)
    logits, (_, W) = run.model.prefill(tokens[:, :64])
    loss = F.cross_entropy(logits[:, 32:].flatten(0, 1), tokens[:, 33:65].flatten())
    assert rows[-1][1] == pytest.approx(loss.item(), abs=1e-4)
    if mixer == "delta":
        norm = W.pow(2).sum((2, 3)).sqrt().mean().item()
        assert rows[-1][2] == pytest.approx(norm, abs=1e-4)
    else:  # what it reads is divided by a sum of keys
        assert rows[-1][2] is None
    summary = state_size.summary([[8, 3.0, 1.5], [16, 2.0, None], [32, None, 4.5]])
    assert [summary["first_norm"], summary["last_norm"]] == [1.5, 4.5]
    assert [summary["lowest_loss"], summary["lowest_at"], summary["last_loss"]] == [
        2.0,
        16,
        None,
    ]


def test_windows_start_with_an_empty_state():
    carried, plain = small(carry=True), small()
    assert carried.evaluate(carry=False) == plain.evaluate() != carried.evaluate()


def test_what_is_saved_for_the_backward_pass():
    """In proportion to the batch: the weights do not count."""
    one, other = (
        text.Run(replace(SMALL, batch=batch), MIXERS["delta"], TEXT).saved_mib()
        for batch in (32, 64)
    )
    assert other == pytest.approx(2 * one, rel=0.05) and one > 0.1


def test_maps_have_equal_numbers_of_features():
    widths = {name: make(16).width(16) for name, make in text.MAPS.items()}
    narrow = {"linear", "favor-half", "identity"}
    assert widths == {name: 16 if name in narrow else 32 for name in text.MAPS}


@pytest.mark.parametrize(
    ("rule", "name"),
    [("sum", "linear"), ("delta", "dpfp"), ("gated-delta", "identity")],
)
def test_the_usual_map_is_that_of_the_mixer(rule, name):
    tokens = torch.arange(20).view(2, 10)
    logits = []
    for mixer in (rule, text.fast_weights(rule, name)):
        torch.manual_seed(1)
        logits.append(LanguageModel(20, mixer, 1, 2, 16)(tokens))
    assert torch.equal(*logits)


def test_all_models_have_the_same_number_of_parameters():
    every = language_model.points(False)
    points = language_model.as_usual(every)
    points += language_model.longer(every, language_model.CONVOLUTION)
    points += [p for p in state_size.points(False) if p["memory"] == 8]
    models = language_model.model, state_size.model
    counts = {}
    for point in points:
        if point["seed"] == 1 and point.get("map", "")[:4] not in ("favo", "dpfp"):
            config, mixer = models["memory" in point](point)
            sizes = config.layers, config.heads, config.d_model, config.block
            with torch.device("meta"):
                model = LanguageModel(65, mixer, *sizes, config.d_ff)
            counts[str(point)] = model.num_parameters()
    assert len(counts) == 11  # 10 of language-model, and one of state-size
    assert max(counts.values()) < 1.02 * min(counts.values()), counts


def test_published_savings():
    """From perplexities 37.1 and 34.1: 3.6136 to 3.5293 nats, 2.3 %."""
    assert language_model.published_saving("linear") == pytest.approx(2.33, abs=0.01)


def as_published(points: list[dict]) -> list[dict]:
    """With the losses of the papers, and seeds that are close together."""
    known = {
        **language_model.PUBLISHED,
        language_model.ROTARY: 33.0,
        language_model.XL: 30.0,
        ("delta", "identity"): 33.0,
    }
    for p in points:
        if "mixer" in p:
            perplexity = known.get((p["mixer"], p["map"]), 32.0)
        else:
            perplexity = ablation.PUBLISHED[p["positions"], p["normalize"]][0]
        p["loss"] = log(perplexity) + 1e-5 * p["seed"]
    return points


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize(
    ("module", "orders", "known"),
    [
        (language_model, 21, "33.0, 38.0 (Table 5)"),
        (ablation, 6, "28.1, 29.7 (Table 3)"),
    ],
)
def test_every_ordering_of_the_tables_is_a_claim(module, orders, known, quick):
    """Also in the quick version: 10 and 10 pairs and a gain; 6 pairs."""
    points = as_published(module.points(quick))
    claims = [c for c in module.claims(points) if c.published]
    nanogpt = [c for c in claims if "nanoGPT" in c.text]
    assert len(nanogpt) == (module is language_model and not quick)
    assert all(c.found.startswith("3.497 ") for c in nanogpt)  # of softmax alone
    claims = [c for c in claims if c not in nanogpt]
    assert len(claims) == orders and verdict(claims) == "reproduced"
    assert all("Table" in c.published and c.protocol for c in claims)
    assert all(("FAVOR" in c.text) is ("drawn once" in c.protocol) for c in claims)
    assert known in {c.published for c in claims}
    for p in points:
        p["loss"] = 1 / p["loss"]
    again = [c for c in module.claims(points) if c.published and "gains" not in c.text]
    assert verdict(again) == "not"


def test_rotary_positions_take_the_place_of_the_table():
    sizes = 20, language_model.ROTARY_SOFTMAX, 1, 2, 16
    model = LanguageModel(*sizes)
    assert model.positions is None and model.blocks[0].mixer.rope == 1
    assert (
        model.num_parameters()
        == LanguageModel(20, "softmax", 1, 2, 16).num_parameters()
    )
    tokens = torch.tensor([[3, 5, 7], [5, 3, 7]])
    logits = model(tokens)[:, -1]
    assert not torch.allclose(*logits, atol=1e-6)  # it knows their order


@torch.no_grad()
def test_the_control_without_a_memory_sees_four_tokens():
    """In each layer, by whatever method it reads them."""
    torch.manual_seed(1)
    layer = language_model.ConvolutionAlone(8, 2, rule="sum", conv_size=4)
    x = torch.randn(2, 12, 8)
    other = x.clone()
    other[:, 5] += 1
    y = layer(x)
    differs = (layer(other) != y).any(-1).any(0)
    assert differs.nonzero().flatten().tolist() == [5, 6, 7, 8]
    start, state = layer.prefill(x[:, :7])
    assert state[0].numel() == layer.state_size(7)
    assert torch.allclose(start, y[:, :7])
    for t in range(7, 12):
        y_t, state = layer.step(x[:, t], state)
        assert torch.allclose(y_t, y[:, t], atol=1e-6)


def test_tuned_takes_the_best_learning_rate_of_each_mixer():
    points = [
        {"mixer": mixer, "lr": lr, "loss": loss}
        for mixer, losses in {"a": (2.0, 1.0), "b": (1.5, None)}.items()
        for lr, loss in zip((0.1, 0.2), losses, strict=True)
    ]
    assert language_model.tuned(points) == [points[1], points[2]]
    # With one rate, a mixer has no best one.
    assert language_model.tuned(points[1:]) == [points[2]]


def test_the_question_why_names_the_best_of_the_others():
    points = language_model.points(False)
    for p in points:
        last = (
            2
            if p["mixer"] == "sum"
            else {"gated": 1.0, "delta": 1.2}.get(p["mixer"], 1.5)
        )
        p["loss"] = last + p["lr"] + 1e-3 * p["seed"]
    *_, fourth = claims = language_model.claims(points)
    assert fourth.text.startswith("best of two rates") and not fourth.published
    assert fourth.found.endswith("(gated)") and fourth.verdict == "does not"
    left = [p for p in points if p["mixer"] != "fwp"]
    assert language_model.claims(left)[-1].verdict == "not run"
    assert len(claims) == len(language_model.claims(left))


@torch.no_grad()
def test_the_sum_rule_grows_and_the_delta_rule_does_not():
    """Why the sum rule needs attention normalisation on a long text."""
    growth = {}
    for rule in ("sum", "delta"):
        torch.manual_seed(0)
        mixer = text.fast_weights(rule, "identity", normalize=False)
        model = LanguageModel(10, mixer, 1, 2, 16)
        tokens = torch.randint(10, (1, 8000))
        norms = [model.prefill(tokens[:, :n])[1][1].norm() for n in (2000, 8000)]
        growth[rule] = float(norms[1] / norms[0])
    assert growth["sum"] > 3.5 and growth["delta"] < 2


def test_windows_of_every_length_have_the_same_characters(monkeypatch):
    points = length.points(True)
    for p in points:
        p |= {f"loss_{n}": p["seed"] for n in length.LENGTHS}
        p["loss_1024"] += 0.1 if p["mixer"] == "sum" else -0.1
    found = {c.text.split(":")[0]: c for c in length.claims(points)}
    assert MIXERS.keys() - {*length.NAMES} == {
        *("softmax", "aft-simple", "aft-full", "aft-local"),  # learn every place
    }
    assert {n for n, c in found.items() if c.verdict == "does not"} == {"sum"}
    assert len(found) == 6 and found["delta"].found == "-0.100 [-0.100, -0.100]"
    assert found["delta"].apart and found["delta"].verdict == "holds"
    monkeypatch.setattr(length, "LENGTHS", (8, 16, 32))
    monkeypatch.setattr(length, "READ", 64)
    for name in length.NAMES:
        mixer = (MIXERS | length.OWN)[name]
        run = text.Run(replace(SMALL, d_model=8), mixer, TEXT)
        found = length.by_length(run)
        count = (len(run.val_tokens) - 1) // 32 * 32
        assert count >= 128
        for size in (8, 32):
            ends = [
                F.cross_entropy(run.model(x[None])[0], y, reduction="sum").item()
                for x, y in zip(
                    run.val_tokens[:count].long().split(size),
                    run.val_tokens[1 : count + 1].long().split(size),
                    strict=True,
                )
            ]
            assert found[f"loss_{size}"] == pytest.approx(sum(ends) / count, abs=1e-4)
