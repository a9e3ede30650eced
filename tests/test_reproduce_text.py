"""Test the experiments on text, such as language-model, length and state-size."""

from dataclasses import replace
from hashlib import sha256
from importlib import import_module
from math import log
from statistics import fmean

import length
import pytest
import rates
import replacing
import text
import torch
from frame import texts_of
from torch.nn import functional as F

from fwlab.feature_maps import ELU1, sum_normalize
from fwlab.layers import SoftmaxAttention
from fwlab.models import MIXERS, LanguageModel
from fwlab.training import Config, Trainer
from fwlab.training.batches import in_rows

language_model, state_size = map(import_module, ("language-model", "state-size"))
TEXT = "to be, or not to be, that is the question. " * 40
SMALL = Config(
    **{"layers": 1, "heads": 2, "d_model": 16, "block": 8, "batch": 3, "device": "cpu"},
    **{"steps": 3, "warmup": 1, "eval_every": 100},
)


def small(mixer="delta", **changes):
    return text.Run(replace(SMALL, **changes), MIXERS.get(mixer, mixer), TEXT)


def test_without_carried_state_it_is_the_training_of_fwlab_train():
    own, usual = small(), Trainer(replace(SMALL, mixer="delta"), TEXT)
    assert [p.loss for p in own.run()] == [p.loss for p in usual.run()]
    assert own.curve == usual.curve


def test_a_run_says_what_it_has_read_and_learned():
    found, again = (text.train(small(steps=50, carry=True)) for _ in "ab")
    assert found.pop("tokens_per_second") > 0 and again.pop("tokens_per_second") > 0
    assert found == again
    losses = [p.loss for p in small(steps=50, carry=True).run()]
    assert [step for step, _ in found["curve"]] == [*range(3, 50, 3)]
    assert found["curve"][1][1] == pytest.approx(fmean(losses[3:6]), abs=1e-4)
    assert found["bits"] == pytest.approx(found["loss"] / log(2), abs=1e-4)
    digest = sha256(TEXT.encode()).hexdigest()[:12]
    assert (found["corpus_name"], found["corpus_sha256"]) == ("another text", digest)
    read = texts_of([found | {"corpus": "x"}, found | {"corpus": "x"}, {}])
    assert read == {"x": [f"another text, SHA-256 {digest}…"]}


@pytest.mark.parametrize("mixer", ["delta", "sum"])
def test_loss_and_norm_by_position(mixer):
    run = small(mixer, carry=True)
    run.eval_rows = 2
    found = state_size.by_position(run)
    tokens = in_rows(run.val_tokens, 2)
    logits, (_, W) = run.model.prefill(tokens[:, :64])
    losses = {
        end: F.cross_entropy(logits[:, at:end].mT, tokens[:, at + 1 : end + 1]).item()
        for at, end in ((0, 8), (8, 16), (16, 32), (32, 64))
    }
    assert found["last_loss"] == pytest.approx(losses[64], abs=1e-4)
    assert found["lowest_at"] == min(losses, key=losses.__getitem__)
    # The sum rule divides its output by a sum of keys, so W's norm is not recorded.
    norm = W.norm(dim=(2, 3)).mean().item() if mixer == "delta" else None
    assert found["last_norm"] == (norm and pytest.approx(norm, abs=1e-4))


def test_memory_is_cut_at_evaluation():
    """Evaluation with less memory equals a smaller model with the trained weights."""
    options = {"lr": 0.03, "min_lr": 0.03, "steps": 30, "carry": True}
    run, other = (small(state_size.mixer({"memory": n}), **options) for n in (8, 2))
    run.eval_rows = other.eval_rows = 2
    text.train(run)
    other.model.load_state_dict(run.model.state_dict())
    whole = state_size.by_memory(run, 8)
    assert whole == text.finite(run.evaluate())
    assert state_size.by_memory(run, 2) == text.finite(other.evaluate()) != whole


@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_a_state_is_stale_if_weights_have_changed(lr, monkeypatch):
    monkeypatch.setattr(state_size, "AHEAD", 16)  # The carried memory has more tokens.
    run = small(lr=lr, min_lr=lr, steps=5, carry=True)
    text.train(run)
    found = state_size.by_state(run)
    past = found["carried"]
    equal = pytest.approx(found["own_loss"], abs=1e-4)
    assert past == 5 * SMALL.block and (found["stale_loss"] == equal) is (lr == 0)
    rows = in_rows(run.train_tokens, SMALL.batch).long()
    logits = run.model(rows[:, : past + 16])[:, past:]
    assert F.cross_entropy(logits.mT, rows[:, past + 1 : past + 17]).item() == equal


def test_windows_of_every_length_have_the_same_characters(monkeypatch):
    learned = {"softmax", "aft-simple", "aft-full", "aft-local"}  # Length is limited.
    assert MIXERS.keys() - {*length.NAMES} == learned
    monkeypatch.setattr(length, "LENGTHS", (8, 16, 32))
    monkeypatch.setattr(length, "READ", 64)
    for name in length.NAMES:
        run = small(length.mixer({"mixer": name}), d_model=8)
        found = length.by_length(run)
        count = (len(run.val_tokens) - 1) // 32 * 32
        inputs, wanted = (run.val_tokens[at : at + count].long() for at in (0, 1))
        for size in (8, 32):
            logits = torch.cat([run.model(x[None])[0] for x in inputs.split(size)])
            loss = F.cross_entropy(logits, wanted).item()
            assert found[f"loss_{size}"] == pytest.approx(loss, abs=1e-4)


def test_what_is_saved_for_the_backward_pass():
    """Memory saved for the backward pass is proportional to the batch size."""
    one, two = (small(d_model=64, batch=n).saved_mib() for n in (8, 16))
    assert two == pytest.approx(2 * one, rel=0.05) and one > 0.1


@pytest.mark.parametrize("rule", ["sum", "delta", "gated", "gated-delta"])
def test_the_usual_map_is_that_of_the_mixer(rule):
    tokens, logits = torch.arange(20).view(2, 10), []
    for mixer in (rule, text.fast_weights(rule, language_model.USUAL[rule])):
        torch.manual_seed(1)
        logits.append(LanguageModel(20, mixer, 1, 2, 16)(tokens))
    assert torch.equal(*logits)


def test_a_rate_is_chosen_by_one_half_and_scored_by_the_other():
    run = small(steps=1)
    text.train(run)
    chosen_by, loss = rates.halves(run).values()
    assert (chosen_by + loss) / 2 == pytest.approx(run.evaluate(), abs=0.01)


def adding(**options):
    return replacing.Adding(8, 2, ELU1(), "delta", key_norm="sum", **options)


@torch.no_grad()
def test_own_layers_go_on_from_any_state():
    x, alone = (
        torch.randn(2, 9, 8),
        text.ConvolutionAlone(8, 2, rule="sum", conv_size=4),
    )
    for layer in (text.ConvolvedAttention(8, 2), alone, adding(conv_size=4)):
        y, state = layer.prefill(x[:, :5])
        parts = [y]
        for t in range(5, 9):
            y, state = layer.step(x[:, t], state)
            parts.append(y[:, None])
        assert torch.allclose(torch.cat(parts, 1), layer(x), atol=1e-6)


@torch.no_grad()
def test_attention_without_its_convolution_is_rotary_attention():
    layer, x = text.ConvolvedAttention(16, 2), torch.randn(2, 9, 16)
    layer.conv.forward = lambda x, before: (x, before)
    plain = SoftmaxAttention(16, 2, rope=1.0)
    plain.load_state_dict(layer.state_dict(), strict=False)
    assert torch.allclose(layer(x), plain(x), atol=1e-6)


@torch.no_grad()
def test_the_control_without_a_memory_sees_four_tokens():
    layer = text.ConvolutionAlone(8, 2, rule="sum", conv_size=4)
    x = torch.randn(2, 12, 8)
    other = x.clone()
    other[:, 5] += 1
    differs = (layer(other) != layer(x)).any(-1).any(0)
    assert differs.nonzero().flatten().tolist() == [5, 6, 7, 8]


@torch.no_grad()
def test_adding_is_the_sum_of_what_delta_writes_into_an_empty_memory():
    layer, x = adding().double(), torch.randn(3, 7, 8).double()
    q, k, v = (
        to(x).unflatten(-1, (2, 4)) for to in (layer.to_q, layer.to_k, layer.to_v)
    )
    q, k = (sum_normalize(ELU1()(part)) for part in (q, k))
    W = torch.einsum("bth,bthv,bthk->bthvk", layer.gates.beta(x, k), v, k).cumsum(1)
    wanted = layer.to_out(torch.einsum("bthvk,bthk->bthv", W, q).flatten(-2))
    assert torch.allclose(layer(x), wanted, atol=1e-12)
