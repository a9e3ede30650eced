"""Test transformers models with fwlab's rules, and fwlab's models in transformers."""

import importlib
import sys

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from alike import error, refuses
from published import tiny
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainingArguments,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from fwlab import hf
from fwlab.models import MIXERS
from fwlab.training import Config, Trainer, load

#: The name of the cache in the outputs of transformers models.
CACHE = list(CausalLMOutputWithPast.__dataclass_fields__)[2]
#: Model families that `hf.patch` changes, and options of a model with two layers.
FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear")
TWO = {
    **{"num_hidden_layers": 2, "pad_token_id": 0},
    "layer_types": ["linear_attention", "full_attention"],
}


@pytest.fixture(autouse=True)
def theirs_again():
    yield
    hf.unpatch()


def module_of(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def tokens(*shape, seed=1):
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_patched_models_compute_the_same(family):
    """A patch does not change logits, gradients or 64 greedy tokens of a model.

    The model is created before the patch.
    """
    model, x = tiny(family, **TWO), tokens(2, 70)
    mask = torch.ones_like(x)
    mask[0, :5] = 0  # Pad row 0 on the left.

    def results():
        model.zero_grad()
        output = model(input_ids=x, attention_mask=mask, labels=x)
        output.loss.backward()
        gradients = {
            n: p.grad for n, p in model.named_parameters() if p.grad is not None
        }
        text = model.generate(
            x[:, :9], attention_mask=mask[:, :9], max_new_tokens=64, do_sample=False
        )
        return output.logits[mask.bool()].detach(), gradients, text

    logits, gradients, text = results()
    assert family in hf.patch()
    ours, ours_gradients, ours_text = results()
    assert error(ours, logits) < 1e-5
    assert ours_gradients.keys() == gradients.keys()
    # In float32, transformers computes gradients of decays less accurately.
    for name, gradient in gradients.items():
        assert (ours_gradients[name] - gradient).norm() <= 3e-4 * gradient.norm(), name
    both = [
        torch.cat([x.ravel() for x in g.values()]) for g in (ours_gradients, gradients)
    ]
    assert error(*both) < 1e-5
    assert text.shape == (2, 73) and torch.equal(ours_text, text)


@torch.no_grad()
def test_half_precision():
    """In bfloat16, a patch changes logits only by rounding errors."""
    model, x = tiny("qwen3_5", **TWO).bfloat16(), tokens(2, 70)
    wanted = model(x).logits
    hf.patch()
    found = model(x).logits
    assert found.dtype == torch.bfloat16
    assert error(found.float(), wanted.float()) < 5e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_do_not_see_each_other(family):
    """Logits of packed documents agree with those of separate calls."""
    hf.patch()
    model, x, lengths = tiny(family, **TWO), tokens(1, 40), [13, 27]
    borders = torch.tensor([0, 13, 40], dtype=torch.int32)
    packed = {
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        **{"cu_seq_lens_q": borders, "cu_seq_lens_k": borders},
        **{"max_length_q": 27, "max_length_k": 27},
    }
    with torch.no_grad():
        together = model(input_ids=x, use_cache=False, **packed).logits
        alone = [model(input_ids=part).logits for part in x.split(lengths, 1)]
    assert error(together, torch.cat(alone, 1)) < 1e-5


def functions():
    """Return the functions that transformers models currently call."""
    return [getattr(module, name) for module, name in hf._hooks()]


def test_unpatch_undoes_any_number_of_patches():
    before = functions()
    assert {*FAMILIES} <= {*hf.patch()} and hf.patch()
    assert all(f is not g for f, g in zip(functions(), before, strict=True))
    hf.unpatch()
    hf.unpatch()
    assert all(f is g for f, g in zip(functions(), before, strict=True))


class Bound(torch.nn.Module):
    """Bind a function as layers did before transformers 5.15."""

    def __init__(self):
        super().__init__()
        self.rule = module_of("qwen3_5").torch_chunk_gated_delta_rule

    def forward(self, x):
        return self.rule(x)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Qwen3_5GatedDeltaNet", Bound),
        ("torch_recurrent_gated_delta_rule", lambda query, key: None),
    ],
)
def test_unknown_hooks_are_refused(monkeypatch, name, value):
    before = functions()
    monkeypatch.setattr(module_of("qwen3_5"), name, value)
    hf._hooks.cache_clear()
    said = r"patch: expected models of qwen3_5 to call .* 5\.24, got transformers "
    with pytest.raises(RuntimeError, match=said):
        hf.patch()
    monkeypatch.undo()
    assert all(f is g for f, g in zip(functions(), before, strict=True))


# --- Models of fwlab ---


def wrapped(mixer="gated-delta", **options):
    sizes = {"layers": 2, "heads": 2, "d_model": 16, "max_len": 40}
    torch.manual_seed(0)
    config = hf.FwlabConfig(vocab_size=20, mixer=mixer, **sizes | options)
    model = hf.FwlabForCausalLM(config).eval().double()
    with torch.no_grad():  # With small weights, all texts are equal.
        model.language_model.embedding.weight *= 30
    return model


PROMPT = tokens(2, 5) % 20


@pytest.mark.parametrize("mixer", MIXERS)
def test_saved_and_loaded(mixer, tmp_path):
    model = wrapped(mixer).float()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is hf.FwlabForCausalLM and not again.training
    weights = model.state_dict()
    assert all(torch.equal(x, weights[name]) for name, x in again.state_dict().items())
    assert error(again(PROMPT).logits, model(PROMPT).logits) < 2e-5


def test_loss_is_that_of_the_next_token():
    model = wrapped()
    labels = PROMPT.clone()
    labels[0, 3] = -100
    output = model(PROMPT, labels=labels)
    logits = output.logits[:, :-1].flatten(0, 1).float()
    wanted = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
    assert torch.allclose(output.loss, wanted) and CACHE not in output


def test_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "fwlab.hf")
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = r'fwlab.hf needs the package transformers: pip install "fwlab\[hf\]"$'
    with pytest.raises(ModuleNotFoundError, match=said):
        importlib.import_module("fwlab.hf")


@pytest.mark.parametrize("tokens", ["characters", "words"])
def test_a_run_of_fwlab_train(tmp_path, tokens):
    text = "the quick brown fox\njumps over the lazy dog\n" * 80
    sizes = {"layers": 2, "heads": 2, "d_model": 16, "block": 32, "batch": 2}
    config = Config(mixer="gated-delta,softmax", tokens=tokens, **sizes)
    Trainer(config, text).save(tmp_path / "run")
    model, tokenizer = hf.from_run(tmp_path / "run")
    run = load(tmp_path / "run")
    prompt = "the lazy fox\njumps"
    x = tokenizer(prompt, return_tensors="pt").input_ids
    assert torch.equal(x[0], run.vocabulary.encode(prompt))
    assert tokenizer.decode(x[0]).replace(" <eos> ", "\n") == prompt
    assert torch.equal(model(x).logits, run.model(x))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "folder")
    again = AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert again(prompt).input_ids == x[0].tolist()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert model.config.mixer == "gated-delta,softmax"


def test_only_the_logits_that_are_asked_for():
    model = wrapped()
    every = model(PROMPT, labels=PROMPT)
    for keep, use_cache in ((1, True), (1, False), (2, True)):
        last = model(PROMPT, logits_to_keep=keep, use_cache=use_cache).logits
        assert last.shape[1] == keep and error(last, every.logits[:, -keep:]) < 1e-10
        some = model(PROMPT, labels=PROMPT, logits_to_keep=keep, use_cache=use_cache)
        assert some.logits.shape[1] == keep and torch.allclose(some.loss, every.loss)
    places = torch.tensor([3, 0])
    some = model(PROMPT, logits_to_keep=places).logits
    assert torch.equal(some, every.logits[:, places])


@pytest.mark.parametrize("tied", [True, False])
def test_resized_embeddings(tied, tmp_path):
    model = wrapped(tied=tied).float()
    before = model(PROMPT).logits
    model.resize_token_embeddings(23, mean_resizing=False)
    assert error(model(PROMPT).logits[..., :20], before) < 1e-6
    assert len(model.get_output_embeddings().weight) == model.config.vocab_size == 23
    assert (model.get_input_embeddings() is model.get_output_embeddings()) == tied
    x = torch.tensor([[22, 1, 21]])
    assert model(x, labels=x).logits.shape[-1] == 23
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(x).logits, model(x).logits)
    layer = torch.nn.Linear(16, 23, bias=False)
    if tied:
        refuses(lambda: model.set_output_embeddings(layer), "expected tied=False")
    else:
        model.set_output_embeddings(layer)
        assert model.get_output_embeddings() is layer
        assert not torch.equal(again(x).logits, model(x).logits)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trainer_with_label_smoothing(tmp_path):
    """The transformers Trainer computes the smoothed loss of the next tokens."""
    model = wrapped().float()
    arguments = TrainingArguments(
        str(tmp_path),
        label_smoothing_factor=0.1,
        gradient_checkpointing=True,
        max_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = [{"input_ids": x, "labels": x} for x in PROMPT]
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    loss = trainer.compute_loss(model, {"input_ids": PROMPT, "labels": PROMPT})
    logits, following = model(PROMPT).logits[:, :-1], PROMPT[:, 1:]
    wanted = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), following.flatten(), label_smoothing=0.1
    )
    assert torch.allclose(loss, wanted)
    before = model.language_model.embedding.weight.clone()
    trainer.train()
    assert model.language_model.checkpointing
    assert not torch.equal(model.language_model.embedding.weight, before)


@pytest.mark.parametrize("padding", [0, 2])
def test_hidden_states(padding):
    model = wrapped(["gated-delta", "softmax"], tied=False)
    mask = torch.ones_like(PROMPT)
    mask[0, :padding] = 0
    output = model(PROMPT, attention_mask=mask, output_hidden_states=True)
    assert [x.shape for x in output.hidden_states] == [(2, 5, 16)] * 3
    last = model.get_output_embeddings()(output.hidden_states[-1])
    assert error(last, output.logits) < 1e-10
    alone = model(PROMPT[:1, padding:], output_hidden_states=True).hidden_states
    for ours, wanted in zip(output.hidden_states, alone, strict=True):
        assert error(ours[:1, padding:], wanted) < 1e-10
    x = model.get_input_embeddings()(PROMPT[1:])
    x = x + model.language_model.positions(torch.arange(5))
    assert error(output.hidden_states[0][1:], x) < 1e-10
    first, second = model.language_model.blocks
    assert error(output.hidden_states[1][1:], first(x)) < 1e-10
    wanted = model.language_model.norm(second(first(x)))
    assert error(output.hidden_states[2][1:], wanted) < 1e-10
    model.config.output_hidden_states = True
    first = model(PROMPT[:, :3], attention_mask=mask[:, :3], use_cache=True)
    second = model(PROMPT[:, 3:], attention_mask=mask, cache=first[CACHE])
    pieces = zip(first.hidden_states, second.hidden_states, strict=True)
    for (a, b), wanted in zip(pieces, output.hidden_states, strict=True):
        assert error(torch.cat([a, b], 1), wanted) < 1e-10


def test_positions_are_those_that_the_model_counts():
    model, mask = wrapped("gated-delta,aft-simple"), torch.ones_like(PROMPT)
    mask[0, :2] = 0
    counted = mask.cumsum(1) - 1
    wanted = model(PROMPT, attention_mask=mask, use_cache=True)
    given = model(PROMPT, attention_mask=mask, position_ids=counted.clamp(min=0))
    assert torch.equal(given.logits, wanted.logits)
    cache, token = wanted[CACHE], PROMPT[:, :1]
    model(token, cache=cache, position_ids=torch.tensor([[3], [5]]))
    for call in (
        lambda: model(token, cache=cache, position_ids=torch.tensor([[4], [5]])),
        lambda: model(PROMPT, position_ids=torch.arange(1, 6)[None]),
        lambda: model(PROMPT, position_ids=torch.arange(6)[None]),
        lambda: model(PROMPT[:1], position_ids=torch.tensor([[0, 1, 1, 2, 0]])),
    ):
        refuses(call, "position_ids that count the real tokens")


@pytest.mark.parametrize("mixer", MIXERS)
def test_generate(mixer):
    """Greedy text agrees with `LanguageModel.generate`; caching changes no beams."""
    model = wrapped(mixer)
    given = {"max_new_tokens": 10, "do_sample": False}
    text = model.generate(PROMPT, **given)
    assert torch.equal(text, model.language_model.generate(PROMPT, 10, temperature=0))
    beams = [model.generate(PROMPT, num_beams=3, use_cache=u, **given) for u in (1, 0)]
    assert torch.equal(*beams)


@pytest.mark.parametrize("mixer", ["delta", "softmax", ["gated-delta", "softmax"]])
def test_padding_is_not_seen(mixer):
    """Padding of a prompt does not change the beams."""
    model, mask = wrapped(mixer), torch.ones_like(PROMPT)
    mask[0, :2] = 0
    given = {"max_new_tokens": 8, "num_beams": 2, "do_sample": False}
    both = model.generate(PROMPT, attention_mask=mask, **given)
    for row, start in ((0, 2), (1, 0)):
        alone = model.generate(PROMPT[[row], start:], **given)
        assert torch.equal(both[[row], start:], alone)


def test_a_cache_goes_on():
    """A cache continues a text under two names, and `reset` empties a cache."""
    model = wrapped()
    given = {"do_sample": False, "return_dict_in_generate": True}
    first = model.generate(PROMPT, max_new_tokens=4, **given)
    cache = {CACHE: first[CACHE]}
    more = model.generate(first.sequences, max_new_tokens=4, **cache, **given)
    at_once = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    assert torch.equal(more.sequences, at_once)
    assert first[CACHE].get_seq_length() == at_once.shape[1] - 1
    first[CACHE].reset()
    again = model.generate(PROMPT, max_new_tokens=8, do_sample=False, **cache)
    assert torch.equal(again, at_once)
    token = PROMPT[:, :1]
    wanted = model(torch.cat([PROMPT, token], 1)).logits[:, -1:]
    for name in ("cache", "past_key_values"):
        cache = model(PROMPT, use_cache=True)[CACHE]
        assert error(model(token, **{name: cache}).logits, wanted) < 1e-10


def test_packed_documents():
    """Models accept packed documents as borders, or as positions that restart at 0."""
    model, x, lengths = wrapped(), tokens(1, 13) % 20, [5, 1, 7]
    borders = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 8}
    wanted = torch.cat([model(part).logits for part in x.split(lengths, 1)], 1)
    for given in (packed, {"position_ids": positions}):
        assert error(model(x, **given).logits, wanted) < 1e-10
    assert error(model(x, position_ids=positions, **packed).logits, wanted) < 1e-10
    refuses(lambda: model(x, use_cache=True, **packed), "cu_seq_lens_q without a cache")
    for wrong in (positions + 1, positions.flip(1), positions.clamp(max=2)):
        call = lambda wrong=wrong: model(x, position_ids=wrong)  # noqa: E731
        refuses(call, "position_ids that count")


def test_a_configuration(tmp_path):
    """`FwlabConfig` accepts both names of a size, and stores unknown entries."""
    config = hf.FwlabConfig(hidden_size=8, tie_word_embeddings=False, pad_token_id=3)
    assert (config.d_model, config.tied, config.pad_token_id) == (8, False, 3)
    config.note = "mine"
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert again | {"_name_or_path": ""} == config.to_dict()
    again, unused = hf.FwlabConfig.from_pretrained(
        tmp_path, layers=3, padding_side="left", return_unused_kwargs=True
    )
    assert (again.layers, unused) == (3, {"padding_side": "left"})
    for given, said in (
        ({"layerz": 2}, "arguments of LanguageModel .*, got layerz"),
        ({"temperature": 2}, "arguments of .*, got temperature"),
        ({"mixer": MIXERS["delta"]}, "FwlabConfig: expected mixer to be a name"),
    ):
        refuses(lambda given=given: hf.FwlabConfig(**given), said)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"output_atentions": True}, "arguments of forward, .* got output_atentions"),
        ({"output_attentions": True}, "has no attention weights to return, got output_a"),
        ({"inputs_embeds": torch.zeros(2, 5, 16)}, "which takes no inputs_embeds"),
        ({"past_key_values": transformers.DynamicCache()}, "FwlabCache.*DynamicCache"),
        ({"attention_mask": torch.ones(2, 1, 5, 5)}, r"\[2, 5\], got \[2, 1, 5, 5"),
        ({"cu_seq_lens_k": torch.tensor([0, 2, 5])}, "arguments of forward, .* got cu_seq_lens_k"),
    ],
)  # fmt: skip
def test_no_argument_of_a_model_does_nothing(given, said):
    refuses(lambda: wrapped()(**{"input_ids": PROMPT} | given), said)
