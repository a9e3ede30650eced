"""Models of transformers with fwlab's rules, and fwlab's models in transformers."""

import copy
import importlib
import sys

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from alike import refuses
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainingArguments,
)
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from fwlab import hf
from fwlab.models import MIXERS, LanguageModel
from fwlab.training import Config, Trainer, load

#: What all families share, in sizes that differ.
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
#: One key head for two value heads.
GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
QWEN = GATED_DELTA | {"head_dim": 16}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
KIMI = EXPERTS | {
    "num_local_experts": 4,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 2,
}
QWEN_EXPERTS = QWEN | EXPERTS
QWEN_EXPERTS |= {"num_experts": 4, "shared_expert_intermediate_size": 16}
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
#: What a cache is called in `generate` and in outputs.
CACHE = list(CausalLMOutputWithPast.__dataclass_fields__)[2]
#: The classes and sizes of each family.
FAMILIES = {
    "qwen3_next": ("Qwen3Next", "Config", QWEN_EXPERTS),
    "qwen3_5": ("Qwen3_5", "TextConfig", QWEN),
    "qwen3_5_moe": ("Qwen3_5Moe", "TextConfig", QWEN_EXPERTS),
    "olmo_hybrid": ("OlmoHybrid", "Config", GATED_DELTA),
    "kimi_linear": ("KimiLinear", "Config", KIMI),
}


@pytest.fixture(autouse=True)
def theirs_again():
    yield
    hf.unpatch()


def module_of(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}")


def tiny(family, seed=0):
    """A small random model of a family."""
    name, config, sizes = FAMILIES[family]
    config = getattr(
        importlib.import_module(f"transformers.models.{family}"), name + config
    )
    torch.manual_seed(seed)
    model = getattr(module_of(family), f"{name}ForCausalLM")
    return model(config(**SIZES | sizes)).eval()


def off(ours, theirs):
    """The norm of the error over the norm of theirs."""
    return ((ours - theirs).norm() / theirs.norm()).item()


def tokens(*shape, seed=1):
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_patched_models_compute_the_same(family):
    """Logits, gradients of a training step, and 64 greedy tokens, of a model that
    was made before the patch.
    """
    model, x = tiny(family), tokens(2, 70)
    mask = torch.ones_like(x)
    mask[0, :5] = 0  # padding on the left

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
    assert off(ours, logits) < 1e-5
    assert ours_gradients.keys() == gradients.keys()
    # In float32, theirs lose more digits of what reaches the decay.
    for name, gradient in gradients.items():
        assert (ours_gradients[name] - gradient).norm() <= 3e-4 * gradient.norm(), name
    both = [
        torch.cat([x.ravel() for x in g.values()]) for g in (ours_gradients, gradients)
    ]
    assert off(*both) < 1e-5
    assert text.shape == (2, 73) and torch.equal(ours_text, text)


FUNCTIONS = [
    pytest.param(module, name, id=f"{module.__name__.split('.')[-2]}-{name}")
    for module, name in hf._hooks()
    if name in hf.RULES
]


def arguments(name, time, dtype=torch.float32):
    """Arguments of one of their functions, by name; the last is a state."""
    kimi = hf.RULES[name] is hf.ops.kimi_delta_rule
    heads = 2 if kimi else 4
    # Before 5.23, a layer repeats keys before it calls the function.
    keys = 2 if VERSION >= (5, 23) else heads
    random = torch.Generator().manual_seed(time)

    def draw(*shape):
        return torch.randn(shape, generator=random).to(dtype)

    return {
        "query": draw(2, time, keys, 8),
        "key": draw(2, time, keys, 8),
        "value": draw(2, time, heads, 12),
        "g": -draw(2, time, heads, *[8] * kimi).exp(),
        "beta": draw(2, time, heads).sigmoid(),
        "initial_state": draw(2, heads, 8, 12).float(),
    }


OPTIONS = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}


@pytest.mark.parametrize("time", [1, 70])
@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_functions_return_what_theirs_do(module, name, time):
    """Of every copy: outputs and states, in their layout, and gradients."""
    theirs, x = getattr(module, name), arguments(name, time)
    hf.patch()
    ours = getattr(module, name)
    assert ours is not theirs
    with torch.no_grad():
        for options in (OPTIONS, {"output_final_state": False}):
            pairs = zip(ours(**x, **options), theirs(**x, **options), strict=True)
            for mine, wanted in pairs:
                assert (mine is None) == (wanted is None)
                assert mine is None or (mine - wanted).norm() < 2e-5 * wanted.norm()
    gradients = []
    for function in (ours, theirs):
        leaves = {n: part.clone().requires_grad_() for n, part in x.items()}
        y, W = function(**leaves, **OPTIONS)
        ((y * y.detach().cos()).sum() + (W * W.detach().cos()).sum()).backward()
        gradients.append([part.grad for part in leaves.values()])
    for mine, wanted in zip(*gradients, strict=True):
        assert (mine - wanted).norm() < 2e-5 * wanted.norm()


def test_half_precision():
    """Like theirs: computed in float32, the outputs rounded, the state not."""
    module, name = hf._hooks()[0]
    theirs, x = getattr(module, name), arguments(name, 70, torch.bfloat16)
    hf.patch()
    (y, W), (wanted, state) = (
        f(**x, **OPTIONS) for f in (getattr(module, name), theirs)
    )
    assert y.dtype == torch.bfloat16 and W.dtype == torch.float32
    assert off(y.float(), wanted.float()) < 1e-3 and off(W, state) < 2e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_do_not_see_each_other(family):
    """transformers alone refuses them, or mixes them in Kimi's rule."""
    hf.patch()
    model, x, lengths = tiny(family), tokens(1, 40), [13, 27]
    borders = torch.tensor([0, 13, 40], dtype=torch.int32)
    packed = {
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        **{"cu_seq_lens_q": borders, "cu_seq_lens_k": borders},
        **{"max_length_q": 27, "max_length_k": 27},
    }
    with torch.no_grad():
        together = model(input_ids=x, use_cache=False, **packed).logits
        alone = [model(input_ids=part).logits for part in x.split(lengths, 1)]
    assert off(together, torch.cat(alone, 1)) < 1e-5


def functions():
    """What the model files of transformers call now."""
    return [getattr(module, name) for module, name in hf._hooks()]


def test_unpatch_undoes_any_number_of_patches():
    before = functions()
    assert {*FAMILIES} <= {*hf.patch()} and hf.patch()
    assert all(f is not g for f, g in zip(functions(), before, strict=True))
    hf.unpatch()
    hf.unpatch()
    assert all(f is g for f, g in zip(functions(), before, strict=True))


class Bound(torch.nn.Module):
    """The form of a layer before transformers 5.15."""

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


# Models of fwlab


def wrapped(mixer="gated-delta", **options):
    sizes = {"layers": 2, "heads": 2, "d_model": 16, "max_len": 40}
    torch.manual_seed(0)
    config = hf.FwlabConfig(vocab_size=20, mixer=mixer, **sizes | options)
    model = hf.FwlabForCausalLM(config).eval().double()
    with torch.no_grad():  # so that texts differ
        model.language_model.embedding.weight *= 30
    return model


PROMPT = tokens(2, 5) % 20


@pytest.mark.parametrize("mixer", MIXERS)
def test_generate(mixer):
    """Greedily as `LanguageModel.generate`; beams as without a cache."""
    model = wrapped(mixer)
    given = {"max_new_tokens": 10, "do_sample": False}
    text = model.generate(PROMPT, **given)
    assert torch.equal(text, model.language_model.generate(PROMPT, 10, temperature=0))
    beams = [model.generate(PROMPT, num_beams=3, use_cache=u, **given) for u in (1, 0)]
    assert torch.equal(*beams)


@pytest.mark.parametrize("mixer", ["delta", "softmax", "transformer-xl", "hybrid"])
def test_padding_is_not_seen(mixer):
    """Prompts of unequal length, with beams: as each alone."""
    model = wrapped(["gated-delta", "softmax"] if mixer == "hybrid" else mixer)
    mask = torch.ones_like(PROMPT)
    mask[0, :2] = 0
    given = {"max_new_tokens": 8, "num_beams": 2, "do_sample": False}
    both = model.generate(PROMPT, attention_mask=mask, **given)
    for row, start in ((0, 2), (1, 0)):
        alone = model.generate(PROMPT[[row], start:], **given)
        assert torch.equal(both[[row], start:], alone)
    logits = model(PROMPT, attention_mask=mask).logits[:1, 2:]
    assert off(logits, model(PROMPT[:1, 2:]).logits) < 1e-10


#: Methods of a cache, an argument, and the rows that it then has of three.
ROWS = [
    ("reorder_cache", torch.tensor([2, 1, 1]), [2, 1, 1]),
    ("batch_select_indices", torch.tensor([1]), [1]),
    ("batch_select_indices", torch.tensor([True, False, True]), [0, 2]),
    ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
]


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_cache_goes_on_from_other_rows(mixer, padding):
    """As beams do: what was never chosen is dropped, and others are doubled."""
    model, x = wrapped(mixer), tokens(3, 6) % 20
    mask = torch.ones_like(x)
    mask[1, :padding] = 0
    every = hf.FwlabCache()
    model(x, attention_mask=mask, cache=every)
    assert every.batch_size == 3
    for method, argument, rows in ROWS:
        caches = [copy.copy(every), hf.FwlabCache()]
        getattr(caches[0], method)(argument)
        model(x[rows], attention_mask=mask[rows], cache=caches[1])
        assert [cache.batch_size for cache in caches] == [len(rows)] * 2
        token = torch.arange(len(rows))[:, None]
        ours, wanted = (model(token, cache=cache).logits for cache in caches)
        assert off(ours, wanted) < 1e-10


@pytest.mark.parametrize("mixer", MIXERS)
def test_saved_and_loaded(mixer, tmp_path):
    model = wrapped(mixer).float()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is hf.FwlabForCausalLM and not again.training
    weights = model.state_dict()
    assert all(torch.equal(x, weights[name]) for name, x in again.state_dict().items())
    assert off(again(PROMPT).logits, model(PROMPT).logits) < 2e-5


#: What `Cache` says of a cache without layers is true of a `FwlabCache`, too.
TRUE = {"get_max_cache_shape", "get_query_offset", "is_compileable", "is_dummy"}
TRUE |= {"is_sliding", "max_batch_size", "max_cache_len"}


def test_no_method_of_a_cache_does_nothing():
    """Each works or is refused: theirs go through layers, of which there are none."""
    theirs = {name for name in dir(Cache) if not name.startswith("_")}
    assert theirs - vars(hf.FwlabCache).keys() <= TRUE
    model, cache = wrapped(), hf.FwlabCache()
    for time in (0, 5, 7):
        assert bool(cache) == cache.is_initialized == (time > 0)
        assert cache.has_previous_state() == (time > 0)
        assert cache.get_seq_length() == cache.get_query_offset() == time
        assert cache.get_mask_sizes(3, 0) == (time + 3, 0)
        assert (cache.batch_size, len(cache)) == ((2, 2) if time else (-1, 0))
        model(PROMPT if time == 0 else PROMPT[:, :2], cache=cache)
    assert not cache.is_croppable and not cache.is_recording_past(0)
    x = torch.zeros(2, 1, 3, 4)
    for call in (
        lambda: cache.update(x, x, 0),
        lambda: cache.update_conv_state(x, 0),
        lambda: cache.get_recurrent_state(0),
        lambda: cache.offload(0),
        lambda: cache.activate_past_recording(),
        lambda: cache.early_initialization(2, 1, 4, x.dtype, x.device),
    ):
        refuses(call, "FwlabCache: the state is that of a Lan", NotImplementedError)


def test_sampling_with_a_cache():
    model = wrapped("softmax")
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        given = {"max_new_tokens": 10, "do_sample": True, "top_k": 0}
        texts.append(model.generate(PROMPT, use_cache=use_cache, **given))
    assert torch.equal(*texts)


def test_generate_goes_on_from_a_cache():
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
    with pytest.raises(NotImplementedError, match="tokens cannot be removed"):
        first[CACHE].crop(-1)


def test_both_names_of_a_cache():
    """The older one is not one of the arguments that only the loss takes."""
    model, token = wrapped(), tokens(2, 1) % 20
    wanted = model(torch.cat([PROMPT, token], 1)).logits[:, -1:]
    for name in ("cache", "past_key_values"):
        cache = model(PROMPT, use_cache=True)[CACHE]
        assert off(model(token, **{name: cache}).logits, wanted) < 1e-10


def test_packed_documents():
    model, x, lengths = wrapped(), tokens(1, 13) % 20, [5, 8]
    borders = torch.tensor([0, 5, 13], dtype=torch.int32)
    packed = {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": 8}
    together = model(x, labels=x, **packed)
    alone = [model(part).logits for part in x.split(lengths, 1)]
    assert off(together.logits, torch.cat(alone, 1)) < 1e-10
    with pytest.raises(ValueError, match="cu_seq_lens_q without a cache, got both"):
        model(x, use_cache=True, **packed)


def test_loss_is_that_of_the_next_token():
    model = wrapped()
    labels = PROMPT.clone()
    labels[0, 3] = -100
    output = model(PROMPT, labels=labels)
    logits = output.logits[:, :-1].flatten(0, 1).float()
    wanted = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
    assert torch.allclose(output.loss, wanted) and CACHE not in output


def test_a_trained_model_is_wrapped():
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "layers": 1, "heads": 2, "d_model": 8}
    trained = LanguageModel(**sizes)
    model = hf.FwlabForCausalLM(hf.FwlabConfig(**sizes), trained)
    assert model.language_model is trained
    assert torch.equal(model(PROMPT).logits, trained(PROMPT))


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


def test_mixers_need_names():
    with pytest.raises(TypeError, match="FwlabConfig: expected mixer to be a name"):
        hf.FwlabConfig(mixer=MIXERS["delta"])


@pytest.mark.parametrize("name", ["layerz", "n_layer", "use_cache", "temperature"])
def test_no_argument_of_a_configuration_does_nothing(name):
    refuses(lambda: hf.FwlabConfig(**{name: 2}), f"arguments of .*, got {name}")


def test_names_of_a_configuration():
    config = hf.FwlabConfig(hidden_size=8, tie_word_embeddings=False, pad_token_id=3)
    assert (config.d_model, config.tied, config.pad_token_id) == (8, False, 3)
    refuses(lambda: hf.FwlabConfig(d_model=8, hidden_size=16), "got both")


def test_a_configuration_keeps_what_others_add(tmp_path):
    """`Trainer` and other programs write to it."""
    config = hf.FwlabConfig(vocab_size=9, layers=2)
    config.use_cache, config.note = False, "mine"
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert again | {"_name_or_path": ""} == config.to_dict()
    again, unused = hf.FwlabConfig.from_pretrained(
        tmp_path, layers=3, padding_side="left", return_unused_kwargs=True
    )
    assert (again.layers, unused) == (3, {"padding_side": "left"})


def test_only_the_logits_that_are_asked_for():
    model = wrapped()
    every = model(PROMPT, labels=PROMPT)
    for keep, use_cache in ((1, True), (1, False), (2, True)):
        last = model(PROMPT, logits_to_keep=keep, use_cache=use_cache).logits
        assert last.shape[1] == keep and off(last, every.logits[:, -keep:]) < 1e-10
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
    assert off(model(PROMPT).logits[..., :20], before) < 1e-6
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
def test_gradient_checkpointing():
    """The same gradients from less memory."""
    model = wrapped().train()

    def step():
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.append(x.numel()) or x, lambda x: x
        ):
            loss = model(PROMPT, labels=PROMPT).loss
        model.zero_grad()
        loss.backward()
        return sum(sizes), model.language_model.embedding.weight.grad

    kept, gradient = step()
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    less, same = step()
    assert less < kept / 2 and off(same, gradient) < 1e-10
    model.gradient_checkpointing_disable()
    assert step()[0] == kept
    enable = model.gradient_checkpointing_enable
    refuses(lambda: enable({"use_reentrant": True}), "'use_reentrant': False} or none")
    refuses(lambda: model._set_gradient_checkpointing(every_n_layers=2), "every layer")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trainer_with_label_smoothing(tmp_path):
    """It is that of the next token, for which the class is known by its name."""
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
    assert off(last, output.logits) < 1e-10
    alone = model(PROMPT[:1, padding:], output_hidden_states=True).hidden_states
    for ours, wanted in zip(output.hidden_states, alone, strict=True):
        assert off(ours[:1, padding:], wanted) < 1e-10
    x = model.get_input_embeddings()(PROMPT[1:])
    x = x + model.language_model.positions(torch.arange(5))
    assert off(output.hidden_states[0][1:], x) < 1e-10
    first, second = model.language_model.blocks
    assert off(output.hidden_states[1][1:], first(x)) < 1e-10
    wanted = model.language_model.norm(second(first(x)))
    assert off(output.hidden_states[2][1:], wanted) < 1e-10
    model.config.output_hidden_states = True
    assert len(model(PROMPT).hidden_states) == 3
    refuses(lambda: model(PROMPT, use_cache=True), "output_hidden_states without a cac")
    refuses(
        lambda: wrapped("feedback")(PROMPT, output_hidden_states=True),
        "expected output_hidden_states with a mixer of blocks",
    )


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


def test_positions_that_begin_again_are_documents():
    """As a collator without borders gives them."""
    model, x, lengths = wrapped(), tokens(1, 13) % 20, [5, 1, 7]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    together = model(x, position_ids=positions).logits
    alone = [model(part).logits for part in x.split(lengths, 1)]
    assert off(together, torch.cat(alone, 1)) < 1e-10
    borders = torch.tensor([0, 5, 6, 13], dtype=torch.int32)
    both = model(x, position_ids=positions, cu_seq_lens_q=borders).logits
    assert torch.equal(both, together)
    for call in (
        lambda: model(x, position_ids=positions, cu_seq_lens_q=borders[[0, 2, 3]]),
        lambda: model(x, position_ids=torch.arange(13)[None], cu_seq_lens_q=borders),
    ):
        refuses(call, "position_ids that count the real tokens")


BORDERS = torch.tensor([0, 2, 5])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"output_atentions": True}, "arguments of forward, got output_atentions"),
        ({"output_attentions": True}, "output_attentions cannot work"),
        ({"inputs_embeds": torch.zeros(2, 5, 16)}, "inputs_embeds cannot work"),
        ({"input_ids": None}, "expected input_ids, got none"),
        ({"past_key_values": transformers.DynamicCache()}, "FwlabCache.*DynamicCache"),
        (
            {"attention_mask": torch.ones(2, 1, 5, 5)},
            r"shape \[2, 5\], got \[2, 1, 5, 5",
        ),
        ({"attention_mask": torch.ones(1, 5)}, r"shape \[2, 5\], got \[1, 5"),
        ({"logits_to_keep": -1}, "logits_to_keep to be 0 or more, or places, got -1"),
        ({"cu_seq_lens_k": BORDERS}, "expected cu_seq_lens_q, .* only cu_seq_lens_k"),
        (
            {"cu_seq_lens_q": BORDERS, "cu_seq_lens_k": BORDERS[:1]},
            "cu_seq_lens_k to be equal to cu_seq_lens_q",
        ),
        (
            {"cache": hf.FwlabCache(), "past_key_values": hf.FwlabCache()},
            "cache or past_key_values, which are two names of the same, got both",
        ),
    ],
)
def test_no_argument_of_a_model_does_nothing(given, said):
    refuses(lambda: wrapped()(**{"input_ids": PROMPT} | given), said)


def test_a_pipeline(tmp_path):
    """With a pad token that is added, as the page says."""
    text = "the quick brown fox\njumps over the lazy dog\n" * 80
    sizes = {"layers": 1, "heads": 2, "d_model": 16, "block": 32, "batch": 2}
    Trainer(Config(**sizes), text).save(tmp_path / "run")
    model, tokenizer = hf.from_run(tmp_path / "run")
    with torch.no_grad():
        model.language_model.embedding.weight *= 30
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.padding_side = "left"
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    prompts = ["the fox", "a lazy dog"]
    given = {"max_new_tokens": 5, "do_sample": False}
    pipeline = transformers.pipeline("text-generation", model, tokenizer=tokenizer)
    both = pipeline(prompts, batch_size=2, return_full_text=False, **given)
    for prompt, [answer] in zip(prompts, both, strict=True):
        x = tokenizer(prompt, return_tensors="pt").input_ids
        alone = model.generate(x, **given)[0, x.shape[1] :]
        assert answer["generated_text"] == tokenizer.decode(alone)
