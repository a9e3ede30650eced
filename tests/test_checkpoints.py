"""Test that `models.load` loads published checkpoints of other libraries.

Models of transformers are tiny and random, and saved by transformers. They compute
parts in float32; for float64 the module's own source is executed once more, with
float64 in place of float32. Models of flash-linear-attention are compared with plain
functions of their tensors.
"""

import inspect
import json
import re
import sys
import types
from functools import cache
from pathlib import Path

import pytest
import torch
from alike import error, random, refuses
from published import VOCABULARY, tiny, write_tokenizer
from safetensors.torch import load_file, save_file
from terminal import fwlab
from torch.nn import functional as F

from fwlab import ops
from fwlab.feature_maps import Identity
from fwlab.layers import FastWeightAttention
from fwlab.models import LanguageModel, families, load

#: Model families that load, each in two variants.
CASES = ("qwen3_5", "qwen3_5-sees", "olmo_hybrid", "olmo_hybrid-bare")
SHARDED = {"qwen3_5-sees", "olmo_hybrid"}
cases = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that makes and saves a random transformers model."""

    @cache
    def make(case):
        theirs = tiny(case, noise=0.15)
        folder = tmp_path_factory.mktemp(case)
        size = {"max_shard_size": "40KB"} if case in SHARDED else {}
        theirs.save_pretrained(folder, **size)
        assert (folder / "model.safetensors.index.json").exists() == bool(size)
        return theirs, folder

    return make


def prompt(batch=2, time=23):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (batch, time), generator=generator)


def in_double(module):
    """Execute a transformers module's source with float64 in place of float32."""
    source = inspect.getsource(module).replace(".float()", ".double()")
    source = source.replace("torch.float32", "torch.float64")
    source = source.replace("torch.float)", "torch.float64)")
    twin = types.ModuleType(f"{module.__name__}_in_float64")
    twin.__package__, twin.__file__ = module.__package__, module.__file__
    sys.modules[twin.__name__] = twin
    exec(compile(source, module.__file__, "exec"), vars(twin))
    return twin


@cases
@torch.no_grad()
def test_logits(made, case):
    theirs, folder = made(case)
    ours = load(folder)
    assert isinstance(ours, LanguageModel) and not ours.training
    assert error(ours(prompt()), theirs(prompt()).logits) < 1e-5


@pytest.mark.parametrize("case", sorted({*CASES} - {"qwen3_5-sees"}))
def test_logits_and_all_gradients_in_double(made, case, tmp_path):
    """In float64, logits and all weight gradients agree with transformers."""
    (single, folder), dtype = made(case), torch.float64
    twin = in_double(sys.modules[type(single).__module__])
    theirs = getattr(twin, type(single).__name__)(single.config).double().eval()
    theirs.load_state_dict(single.state_dict())
    ours = load(folder, dtype)
    found, wanted = ours(prompt()), theirs(prompt()).logits
    assert wanted.dtype == dtype and error(found, wanted) < 1e-9
    r = torch.randn(
        found.shape, dtype=dtype, generator=torch.Generator().manual_seed(2)
    )
    (found * r).sum().backward()
    (wanted * r).sum().backward()
    gradients = {
        name: torch.zeros_like(x) if x.grad is None else x.grad
        for name, x in theirs.named_parameters()
    }
    theirs.save_pretrained(tmp_path, state_dict=gradients)
    wanted = dict(load(tmp_path, dtype).named_parameters())
    for name, weight in ours.named_parameters():
        # Loading adds 1 to the weights of norms that multiply by 1 + weight.
        one = int("qwen" in case and "norm" in name and "out_norm" not in name)
        assert error(weight.grad, wanted[name] - one) < 1e-9, name


def test_the_layer_of_kimi_linear():
    """With equal weights, output and gradients agree with the layer of Kimi Linear."""
    from transformers.models.kimi_linear import KimiLinearConfig, modeling_kimi_linear

    sizes = {"hidden_size": 32, "linear_num_heads": 2, "linear_head_dim": 8}
    config = KimiLinearConfig(**sizes)
    torch.manual_seed(0)
    theirs = in_double(modeling_kimi_linear).KimiLinearDeltaAttention(config, 0)
    ours = FastWeightAttention.like("kimi", 32, 2, head_width=8).double()
    names = {
        "to_q.weight to_k.weight to_v.weight": "q_proj k_proj v_proj",
        "conv.weight": "conv1d",
        "gates.beta.projection.weight": "b_proj",
        "gates.log_decay.projection.0.weight": "f_a_proj",
        "gates.log_decay.projection.1.weight": "f_b_proj",
        "gates.log_decay.log_rate": "A_log",
        "gates.log_decay.bias": "dt_bias",
        "out_norm.weight": "o_norm",
        "to_gate.0.weight to_gate.1.weight": "g_a_proj g_b_proj",
        "to_out.weight": "o_proj",
    }
    pairs = [
        (a, b)
        for k, v in names.items()
        for a, b in zip(k.split(), v.split(), strict=True)
    ]
    found = {
        name.removesuffix(".weight").split(".")[-1]: x
        for name, x in theirs.double().named_parameters()
    }
    weights = dict(ours.named_parameters())
    assert weights.keys() == dict(pairs).keys() and {*found} == {b for _, b in pairs}
    with torch.no_grad():
        for name, there in pairs:
            found[there].copy_(random(*found[there].shape, seed=len(name), scale=0.3))
            weights[name].copy_(found[there].view_as(weights[name]))
    x, r = random(2, 23, 32), random(2, 23, 32, seed=1)
    y, wanted = ours(x), theirs(x)
    assert error(y, wanted) < 1e-10
    (y * r).sum().backward()
    (wanted * r).sum().backward()
    for name, there in pairs:
        wanted = found[there].grad.view_as(weights[name])
        assert error(weights[name].grad, wanted) < 1e-9, name


@cases
@torch.no_grad()
def test_greedy_text(made, case):
    """Greedy text agrees with transformers in one call, in steps, and with padding."""
    theirs, folder = made(case)
    ours, text = load(folder), prompt(1)
    wanted = theirs.generate(text, max_new_tokens=64, do_sample=False)
    assert torch.equal(ours.generate(text, 64, temperature=0), wanted)
    assert len(set(wanted[0, 23:].tolist())) > 3  # The text is not one repeated token.

    _, state = ours.prefill(text[:, :5])
    logits, state = ours.prefill(text[:, 5:], state, last=True)
    new = []
    for _ in range(64):
        new.append(logits.argmax(-1))
        logits, state = ours.step(new[-1], state)
    assert torch.equal(torch.stack(new, 1), wanted[:, 23:])

    batch = torch.cat([prompt(1, 31), F.pad(text, (8, 0))])
    real = torch.arange(31) >= torch.tensor([[0], [8]])
    both = ours.generate(batch, 64, temperature=0, key_mask=real)
    assert torch.equal(both[1, 31:], wanted[0, 23:])


def fla_weights(config):
    """Sample random model weights with the names of flash-linear-attention."""
    generator = torch.Generator().manual_seed(0)
    width, heads, weights = config["hidden_size"], config["num_heads"], {}

    def add(name, *shape, mean=0.0):
        weights[name] = mean + 0.3 * torch.randn(shape, generator=generator)

    key = config.get("head_dim", width // heads) * heads
    values = round(key * config["expand_v"])
    add("model.embeddings.weight", VOCABULARY, width)
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        full = config["attn"] and i in config["attn"]["layers"]
        for name in ("attn_norm", "mlp_norm"):
            add(f"{at}{name}.weight", width, mean=1)
        rows = {"q": width if full else key, "k": 16 if full else key}
        for name, size in {**rows, "v": 16 if full else values}.items():
            add(f"{at}attn.{name}_proj.weight", size, width)
            if not full:
                add(f"{at}attn.{name}_conv1d.weight", size, 1, 4)
        add(f"{at}attn.o_proj.weight", width, width if full else values)
        for name in ("gate", "up"):
            add(f"{at}mlp.{name}_proj.weight", 256, width)
        add(f"{at}mlp.down_proj.weight", width, 256)
        if full:
            continue
        add(f"{at}attn.b_proj.weight", heads, width)
        add(f"{at}attn.o_norm.weight", values // heads, mean=1)
        if config["use_gate"]:
            add(f"{at}attn.g_proj.weight", values, width)
        if config["model_type"] == "gated_deltanet":
            add(f"{at}attn.a_proj.weight", heads, width)
            add(f"{at}attn.A_log", heads)
            add(f"{at}attn.dt_bias", heads)
            add(f"{at}attn.D", heads)  # Old checkpoints have this unused weight.
    add("model.norm.weight", width, mean=1)
    add("lm_head.weight", VOCABULARY, width)
    return weights


def rms(x, weight, eps):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def fla_logits(w, config, tokens):
    """Compute the logits of a flash-linear-attention model with plain functions."""
    eps, x = config["norm_eps"], w["model.embeddings.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = {
            name.removeprefix(f"model.layers.{i}."): part for name, part in w.items()
        }
        h = rms(x, layer["attn_norm.weight"], eps)
        full = config["attn"] and i in config["attn"]["layers"]
        x = x + (fla_attention if full else fla_rule)(layer, config, h)
        h = rms(x, layer["mlp_norm.weight"], eps)
        gate, up = (h @ layer[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    return rms(x, w["model.norm.weight"], eps) @ w["lm_head.weight"].T


def fla_rule(w, config, x):
    heads, made = config["num_heads"], {}
    for name in "qkv":
        y = (x @ w[f"attn.{name}_proj.weight"].T).mT
        kernel = w[f"attn.{name}_conv1d.weight"]
        y = F.silu(F.conv1d(F.pad(y, (3, 0)), kernel, groups=len(kernel))).mT
        made[name] = y.unflatten(-1, (heads, -1))
    q, k, v = made.values()
    q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
    beta = (x @ w["attn.b_proj.weight"].T).sigmoid()
    log_decay = torch.zeros_like(beta)
    if "attn.A_log" in w:
        beta = 2 * beta if config["allow_neg_eigval"] else beta
        pace = F.softplus(x @ w["attn.a_proj.weight"].T + w["attn.dt_bias"])
        log_decay = -w["attn.A_log"].exp() * pace
    q = q * q.shape[-1] ** -0.5
    y = ops.gated_delta_rule(q, k, v, beta, log_decay, implementation="naive")
    y = rms(y, w["attn.o_norm.weight"], config["norm_eps"]).flatten(2)
    if "attn.g_proj.weight" in w:
        y = y * F.silu(x @ w["attn.g_proj.weight"].T)
    return y @ w["attn.o_proj.weight"].T


def fla_attention(w, config, x):
    """Compute softmax attention with grouped queries, and RoPE on all channels."""
    heads, time = config["attn"]["num_heads"], x.shape[1]
    width = x.shape[-1] // heads
    q, k, v = (
        (x @ w[f"attn.{n}_proj.weight"].T).unflatten(-1, (-1, width)).transpose(1, 2)
        for n in "qkv"
    )
    i = torch.arange(width // 2, dtype=torch.float64)
    angle = torch.arange(time)[:, None] * config["attn"]["rope_theta"] ** (
        -2 * i / width
    )
    turn = torch.polar(torch.ones_like(angle), angle)

    def turned(y):
        a, b = y.double().chunk(2, -1)
        z = torch.complex(a, b) * turn
        return torch.cat([z.real, z.imag], -1).to(x.dtype)

    k, v = (y.repeat_interleave(heads // k.shape[1], 1) for y in (k, v))
    y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True)
    return y.transpose(1, 2).flatten(2) @ w["attn.o_proj.weight"].T


FLA = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3}
FLA |= {"num_heads": 2, "norm_eps": 1e-5, "attn": None, "eos_token_id": 2}
GATED = {"model_type": "gated_deltanet", "head_dim": 12, "expand_v": 2}
GATED |= {"use_gate": True, "allow_neg_eigval": False}
ATTENTION = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "rope_theta": 1e4}
FLA_CASES = {
    "delta_net": FLA | {"model_type": "delta_net", "expand_v": 1, "use_gate": False},
    "delta_net-gate": FLA
    | {"model_type": "delta_net", "expand_v": 0.5, "use_gate": True},
    "gated_deltanet": FLA | GATED,
    "gated_deltanet-hybrid": FLA
    | GATED
    | {"attn": ATTENTION, "allow_neg_eigval": True, "use_gate": False},
}


def saved(folder, config, weights):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("case", FLA_CASES)
@torch.no_grad()
def test_models_of_flash_linear_attention(tmp_path, case):
    """Logits and greedy tokens agree with a model of flash-linear-attention."""
    config = FLA_CASES[case]
    weights = fla_weights(config)
    ours = load(saved(tmp_path, config, weights), torch.float64)
    weights = {name: weight.double() for name, weight in weights.items()}
    _, state = ours.prefill(prompt()[:, :5])
    logits, state = ours.prefill(prompt()[:, 5:], state, last=True)
    text = [prompt()]
    for _ in range(64):
        text.append(logits.argmax(-1)[:, None])
        logits, state = ours.step(text[-1][:, 0], state)
    text = torch.cat(text, 1)
    wanted = fla_logits(weights, config, text)
    assert error(ours(text), wanted) < 1e-9
    assert torch.equal(wanted[:, 22:-1].argmax(-1), text[:, 23:])


def test_weights_stay_in_the_file(made):
    """Loaded weights are views, so projections that the file merges share memory."""
    _, folder = made("qwen3_5")
    mixer = load(folder).blocks[0].mixer
    first = mixer.to_q.weight.untyped_storage().data_ptr()
    assert mixer.to_k.weight.untyped_storage().data_ptr() == first
    assert all(weight.requires_grad for weight in mixer.parameters())


@torch.no_grad()
def test_dtypes(made, tmp_path):
    """A loaded model has the dtype of the file, or the dtype that is requested."""
    theirs, folder = made("qwen3_5")
    half = load(folder, torch.bfloat16)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    found = half(prompt())
    assert found.dtype == torch.bfloat16
    assert error(found, theirs(prompt()).logits) < 0.1
    for dtype in (torch.int8, "bfloat16"):
        refuses(lambda dtype=dtype: load(folder, dtype), "^load: expected dtype")
    weights = load_file(folder / "model.safetensors")
    config, kept = json.loads((folder / "config.json").read_text()), "linear_attn.A_log"
    some = {n: x if kept in n else x.bfloat16() for n, x in weights.items()}
    model = load(saved(tmp_path, config, some))
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


SHARDS = "model.safetensors.index.json"
NORM = "model.layers.0.input_layernorm.weight"


def changed(**values):
    """Return a function that sets values in the config.json of a folder."""

    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def first_shard(folder):
    return sorted(folder.glob("*.safetensors"))[0]


def norm_changed(change, name=NORM):
    """Return a function that changes or renames the tensor `NORM` in a folder."""

    def apply(folder):
        for path in folder.glob("*.safetensors"):
            if NORM in (weights := load_file(path)):
                weights[name] = change(weights.pop(NORM))
                save_file(weights, path)

    return apply


def cut(folder):
    first_shard(folder).write_bytes(first_shard(folder).read_bytes()[:-10])


def written(name, text):
    return lambda folder: (folder / name).write_text(text)


#: Changes of a model folder, and the error message that `load` raises.
BAD = [
    (lambda folder: (folder / "config.json").unlink(), "config.json, got no such file"),
    (written("config.json", "{"), "config.json is damaged: no JSON"),
    (written("config.json", "[]"), "config.json: expected model_type"),
    (changed(model_type="llama"), "model_type to be one of qwen3_5, .*got 'llama'"),
    (changed(text_config=3), "config.json: expected text_config to be an object, got 3"),
    (changed(num_hidden_layers="4"), "config.json is damaged: 'str' object"),
    (changed(linear_key_head_dim=0), "config.json is damaged: division by zero"),
    (changed(hidden_size=None), "config.json: expected hidden_size, got none"),
    (changed(linear_num_value_heads=3), "config.json is not supported: .*value_heads"),
    (changed(hidden_act="gelu"), "expected hidden_act to be 'silu', .*got 'gelu'"),
    (changed(rope_parameters={"rope_type": "yarn"}), "rope_type to be 'default', .*'yarn'"),
    (changed(layer_types=["full_attention"]), "expected layer_types to be 4 of"),
    (changed(model_type="qwen3_next"), "got 'qwen3_next': for a model with experts, see fwlab.hf.patch"),
    (changed(quantization_config={"bits": 4}), "config.json: .* are not quantised"),
    (norm_changed(lambda x: x.to(torch.int8)), rf"safetensors: .*not quantised .*got {NORM} in torch.int8"),
    (lambda folder: first_shard(folder).unlink(), "weights .*00001-of-.*, got no such file"),
    (cut, "model-00001-of-.*safetensors is damaged or cut"),
    (lambda folder: (folder / SHARDS).unlink(), "weights .*/model.safetensors, got no such file"),
    (written(SHARDS, "{}"), "index.json is damaged"),
    (written(SHARDS, '{"weight_map": {"a": "../a.safetensors"}}'), "index.json is damaged"),
    (norm_changed(lambda x: x[:5].clone()), rf"index.json: expected {NORM} of shape \[32\], got \[5\]"),
    (norm_changed(lambda x: x, "model.surprise"), rf"index.json: .*got {NORM} missing, and model.surprise superfluous"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_folders(made, tmp_path, change, message):
    made("qwen3_5")[0].save_pretrained(tmp_path, max_shard_size="40KB")
    change(tmp_path)
    refuses(lambda: load(tmp_path), message, (ValueError, OSError))


def test_what_is_no_folder(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "none", tmp_path / "file", ""):
        refuses(lambda path=path: load(path), "folder with a model", FileNotFoundError)

    import huggingface_hub

    def offline(name, allow_patterns):
        assert "*.py" not in allow_patterns
        raise OSError(f"no way to {name}\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    refuses(
        lambda: load("Owner/Name"), "^Owner/Name .*downloaded: no way to Owner/Name$"
    )


@pytest.fixture
def spoken(tmp_path):
    """Save a small model and the tokenizer of its vocabulary in one folder."""
    config = FLA_CASES["delta_net"] | {"eos_token_id": None}
    folder = saved(tmp_path / "model", config, fla_weights(config))
    write_tokenizer(folder, [f"w{i}" for i in range(VOCABULARY)])
    return folder


def test_generate(spoken):
    model, tokens = load(spoken), torch.tensor([[3, 1, 4, 1, 5]])
    said = [f"w{i}" for i in model.generate(tokens, 12, temperature=0)[0].tolist()]
    command = ("generate", str(spoken), "--prompt", "w3 w1 w4 w1 w5", "--length", "12")
    code, out, err = fwlab(*command, "--temperature", "0")
    assert (code, out, err) == (0, " ".join(said) + "\n", "")
    drawn = model.generate(tokens, 12, 0.8, 9, seed=5)[0].tolist()
    code, out, _ = fwlab(*command, "--top-k", "9", "--seed", "5")
    assert out.split() == [f"w{i}" for i in drawn]
    code, out, _ = fwlab(*command, "--dtype", "bfloat16", "--temperature", "0")
    assert code == 0 and len(out.split()) == 17
    # Generation stops at a token that ends a text.
    end = int(said[9][1:])
    (spoken / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    code, out, _ = fwlab(*command, "--temperature", "0")
    assert out.split() == said[: said.index(said[9], 5)]


def test_generate_refuses(spoken):
    def refused(said, *options):
        code, _, err = fwlab("generate", str(spoken), *options)
        assert code == 2 and err.count("\n") == 1 and said in err, err

    refused("expected --prompt")
    refused("at least one token", "--prompt", "")
    asked = ("--prompt", "w1")
    ends, path = spoken / "generation_config.json", spoken / "tokenizer.json"
    for wrong in ("</s>", [[1]], 0.5):
        ends.write_text(json.dumps({"eos_token_id": wrong}))
        refused(f"{ends.name}: expected eos_token_id to be a token or", *asked)
    ends.unlink()
    write_tokenizer(spoken, [f"w{i}" for i in range(VOCABULARY + 1)])
    said = "tokenizer.json: expected a tokenizer of at most the 61 tokens"
    refused(said, *asked)
    path.write_text(path.read_text()[:50])
    refused("tokenizer.json is damaged", *asked)
    path.unlink()
    refused("tokenizer.json, got no such file", *asked)


def test_the_page_says_what_loads():
    """docs/published.md lists all families that load; `hf` patches other families."""
    from fwlab import hf

    page = (Path(__file__).parents[1] / "docs" / "published.md").read_text("utf-8")
    rows = re.findall(r"^\| [^|(]*\(`([^)]*)`\) \|", page, re.M)
    kinds = {kind for each in rows for kind in each.split("`, `")}
    assert kinds - {"model_type"} == {*families.FAMILIES}
    assert {*families.EXPERTS} <= {*hf.FAMILIES}


def test_options_win_over_presets():
    layer = FastWeightAttention.like("qwen3.5", 8, 2, conv_size=0, out_gate=False)
    assert layer.conv is layer.to_gate is None and layer.scale == 0.5
    assert isinstance(layer.feature_map, Identity)
    refuses(
        lambda: FastWeightAttention.like("qwen", 8, 2),
        "^FastWeightAttention.like: expected name to be one of 'delta-net', .*got 'qwen'$",
    )
