"""Published checkpoints: `models.load` gives the model that wrote them.

Those of transformers are tiny random models, saved by it. Those of
flash-linear-attention are compared with a plain loop over their tensors.
"""

import json
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from alike import error, refuses
from safetensors.torch import load_file, save_file
from terminal import fwlab
from torch.nn import functional as F

from fwlab.models import LanguageModel, families, load

transformers = pytest.importorskip("transformers")
VOCABULARY = 61
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
#: Two keys, four values: each key head has two.
LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 6, "linear_value_head_dim": 8},
}
QWEN = SIZES | LINEAR | {"head_dim": 8}
SEEING = {
    **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2},
    **{"out_hidden_size": 32, "num_position_embeddings": 4},
}
OLMO = SIZES | LINEAR | {"linear_num_value_heads": 2}
KIMI = SIZES | {
    **{"linear_num_heads": 2, "linear_head_dim": 8, "num_key_value_heads": 4},
    **{"kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8},
    **{"v_head_dim": 6, "mlp_layer_types": ["dense"] * 4},
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
BARE = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
#: Family, model and configuration of transformers, and its values.
CASES = {
    "qwen3.5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", QWEN),
    "qwen3.5-sees": (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        {"text_config": QWEN, "vision_config": SEEING, "tie_word_embeddings": True},
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        QWEN | {"mlp_only_layers": [0, 1, 2, 3]},
    ),
    "olmo-hybrid": ("OlmoHybridForCausalLM", "OlmoHybridConfig", OLMO | BARE),
    "olmo-hybrid-rope": ("OlmoHybridForCausalLM", "OlmoHybridConfig", OLMO),
    "kimi": ("KimiLinearForCausalLM", "KimiLinearConfig", KIMI),
}
SHARDED = {"qwen3.5-sees", "qwen3-next", "olmo-hybrid-rope"}
cases = pytest.mark.parametrize("case", CASES)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(case)`: their model with random weights, and a folder where it is."""

    @cache
    def make(case):
        model, config, values = CASES[case]
        torch.manual_seed(0)
        theirs = getattr(transformers, model)(getattr(transformers, config)(**values))
        with torch.no_grad():
            for weight in theirs.parameters():
                weight.add_(
                    torch.randn_like(weight) * (0.15 if weight.dim() > 1 else 0.3)
                )
        folder = tmp_path_factory.mktemp(case)
        size = {"max_shard_size": "40KB"} if case in SHARDED else {}
        theirs.save_pretrained(folder, **size)
        assert (folder / "model.safetensors.index.json").exists() == bool(size)
        return theirs.eval(), folder

    return make


def prompt(batch=2, time=23):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (batch, time), generator=generator)


@cases
@torch.no_grad()
def test_logits(made, case):
    theirs, folder = made(case)
    ours = load(folder)
    assert isinstance(ours, LanguageModel) and not ours.training
    assert error(ours(prompt()), theirs(prompt()).logits) < 1e-5


@cases
@torch.no_grad()
def test_greedy_text(made, case):
    """At once, after a prompt in pieces, and beside a longer prompt."""
    theirs, folder = made(case)
    ours, text = load(folder), prompt(1)
    wanted = theirs.generate(text, max_new_tokens=64, do_sample=False)
    assert torch.equal(ours.generate(text, 64, temperature=0), wanted)
    assert len(set(wanted[0, 23:].tolist())) > 3  # no trivial loop

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
    """Tensors by the names of flash-linear-attention, with random values."""
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
            add(f"{at}attn.D", heads)  # theirs had it once, and did not use it
    add("model.norm.weight", width, mean=1)
    add("lm_head.weight", VOCABULARY, width)
    return weights


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def fla_logits(w, config, tokens):
    """Their model, in plain loops."""
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
    decay = torch.ones_like(beta)
    if "attn.A_log" in w:
        beta = 2 * beta if config["allow_neg_eigval"] else beta
        pace = F.softplus(x @ w["attn.a_proj.weight"].T + w["attn.dt_bias"])
        decay = (-w["attn.A_log"].exp() * pace).exp()
    S, read = x.new_zeros(len(x), heads, k.shape[-1], v.shape[-1]), []
    for t in range(x.shape[1]):
        S = S * decay[:, t, :, None, None]
        new = v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t])
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * new)
        read.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * q.shape[-1] ** -0.5)
    y = rms(torch.stack(read, 1), w["attn.o_norm.weight"], config["norm_eps"])
    y = y.flatten(2)
    if "attn.g_proj.weight" in w:
        y = y * F.silu(x @ w["attn.g_proj.weight"].T)
    return y @ w["attn.o_proj.weight"].T


def fla_attention(w, config, x):
    """Grouped queries, and all channels of a head turned."""
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
    scores = turned(q) @ turned(k).mT / width**0.5
    scores = scores.masked_fill(torch.ones(time, time).triu(1).bool(), -torch.inf)
    y = scores.softmax(-1) @ v
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
    """Logits; and what is said greedily is what theirs finds most likely."""
    config = FLA_CASES[case]
    weights = fla_weights(config)
    ours = load(saved(tmp_path, config, weights))
    _, state = ours.prefill(prompt()[:, :5])
    logits, state = ours.prefill(prompt()[:, 5:], state, last=True)
    text = [prompt()]
    for _ in range(64):
        text.append(logits.argmax(-1)[:, None])
        logits, state = ours.step(text[-1][:, 0], state)
    text = torch.cat(text, 1)
    wanted = fla_logits(weights, config, text)
    assert error(ours(text), wanted) < 1e-5
    assert torch.equal(wanted[:, 22:-1].argmax(-1), text[:, 23:])


def test_weights_stay_in_the_file(made):
    """Three matrices of one tensor are views of it, not copies."""
    _, folder = made("qwen3.5")
    mixer = load(folder).blocks[0].mixer
    first = mixer.to_q.weight.untyped_storage().data_ptr()
    assert mixer.to_k.weight.untyped_storage().data_ptr() == first
    assert all(weight.requires_grad for weight in mixer.parameters())


@torch.no_grad()
def test_dtypes(made):
    theirs, folder = made("qwen3.5")
    half = load(folder, torch.bfloat16)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    wanted = theirs(prompt()).logits
    found = half(prompt())
    assert found.dtype == torch.bfloat16 and error(found, wanted) < 0.1
    for dtype in (torch.int8, "bfloat16"):
        refuses(lambda dtype=dtype: load(folder, dtype), "^load: expected dtype")


def test_half_precision_stays_as_it_is(made, tmp_path):
    _, folder = made("qwen3.5")
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    half = {name: weight.bfloat16() for name, weight in weights.items()}
    half["model.layers.0.linear_attn.A_log"] = weights[
        "model.layers.0.linear_attn.A_log"
    ]
    model = load(saved(tmp_path, config, half))
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


SHARDS = "model.safetensors.index.json"


def changed(**values):
    """A change of config.json."""

    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def weights_changed(change):
    """A change of the tensors of the first shard."""

    def apply(folder):
        path = sorted(folder.glob("*.safetensors"))[0]
        weights = load_file(path)
        change(weights)
        save_file(weights, path)

    return apply


def narrowed(weights):
    weights[NORM] = weights[NORM][:5].clone()


def quantised(weights):
    weights[NORM] = weights[NORM].to(torch.int8)


def exchanged(weights):
    weights["model.layers.9.surprise"] = weights.pop(NORM)


def first_shard(folder):
    return sorted(folder.glob("*.safetensors"))[0]


def cut(folder):
    path = first_shard(folder)
    path.write_bytes(path.read_bytes()[:-10])


def without(name):
    return lambda folder: (folder / name).unlink()


def written(name, text):
    return lambda folder: (folder / name).write_text(text)


NORM = "model.layers.0.input_layernorm.weight"
BAD = {
    "no config": (without("config.json"), r"config\.json, got no such file"),
    "no JSON": (written("config.json", "{"), r"config\.json is damaged: no JSON"),
    "a list": (written("config.json", "[]"), r"config\.json: expected model_type"),
    "model_type": (
        changed(model_type="llama"),
        r"config\.json: expected model_type to be one of qwen3_5, .*got 'llama'",
    ),
    "a model_type that is no text": (
        changed(model_type=["qwen3_next"]),
        r"config\.json: expected model_type to be one of qwen3_5, ",
    ),
    "a text model that is none": (
        changed(text_config=3),
        r"config\.json: expected text_config to be an object, got 3",
    ),
    "a text for a number": (
        changed(num_hidden_layers="4"),
        r"config\.json is damaged: 'str' object",
    ),
    "a width of 0": (
        changed(linear_key_head_dim=0),
        r"config\.json is damaged: division by zero",
    ),
    "a list for values": (
        changed(rope_parameters=[1]),
        r"config\.json is damaged: 'list' object",
    ),
    "no width": (
        changed(hidden_size=None),
        r"config\.json: expected hidden_size, got none",
    ),
    "a bad size": (
        changed(linear_num_value_heads=3),
        r"config\.json is not supported: .*value_heads",
    ),
    "activation": (
        changed(hidden_act="gelu"),
        r"config\.json: expected hidden_act to be 'silu', .*got 'gelu'",
    ),
    "positions": (
        changed(rope_parameters={"rope_type": "yarn"}),
        r"config\.json: expected rope_type to be 'default', .*got 'yarn'",
    ),
    "layer types": (
        changed(layer_types=["full_attention"]),
        r"config\.json: expected layer_types to be 4 of",
    ),
    "experts": (
        changed(mlp_only_layers=[0, 2]),
        r"config\.json: expected layers without experts, .*got 2 layers",
    ),
    "quantised": (
        changed(quantization_config={"bits": 4}),
        r"config\.json: expected weights that are not quantised",
    ),
    "quantised weights": (
        weights_changed(quantised),
        rf"model-.*safetensors: .*not quantised .*got {NORM} in I8",
    ),
    "a missing shard": (
        lambda folder: first_shard(folder).unlink(),
        r"weights .*/model-00001-of-.*safetensors, got no such file",
    ),
    "a cut shard": (cut, r"model-00001-of-.*safetensors is damaged or cut"),
    "no index": (without(SHARDS), r"weights .*/model.safetensors, got no such file"),
    "an index without files": (written(SHARDS, "{}"), r"index\.json is damaged"),
    "an index that leads away": (
        written(SHARDS, '{"weight_map": {"a": "../a.safetensors"}}'),
        r"index\.json is damaged",
    ),
    "a wrong shape": (
        weights_changed(narrowed),
        rf"model-.*safetensors: expected {NORM} of shape \[32\], got \[5\]",
    ),
    "names": (
        weights_changed(exchanged),
        rf"index\.json: .*got {NORM} missing, and model.layers.9.surprise superfluous",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(made, tmp_path, case):
    change, message = BAD[case]
    _, folder = made("qwen3-next")
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    # The test of names finds its tensor in the first shard.
    assert NORM in load_file(first_shard(copy))
    change(copy)
    refuses(lambda: load(copy), message, (ValueError, OSError))


def test_kimi_is_refused(made, tmp_path):
    _, folder = made("kimi")
    shutil.copytree(folder, tmp_path / "model")
    changed(kv_lora_rank=-1)(tmp_path / "model")
    refuses(lambda: load(tmp_path / "model"), r"config\.json is not supported: .*-1")
    changed(kv_lora_rank=12)(tmp_path / "model")
    changed(mlp_layer_types=None)(tmp_path / "model")
    refuses(lambda: load(tmp_path / "model"), r"config\.json: .*without experts.*got 3")


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
    """A small model and the tokenizer of its vocabulary, in one folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY)}
    coder = Tokenizer(models.WordLevel(words, unk_token="w0"))
    coder.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = FLA_CASES["delta_net"] | {"eos_token_id": None}
    folder = saved(tmp_path / "model", config, fla_weights(config))
    coder.save(str(folder / "tokenizer.json"))
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
    # A token that ends a text.
    end = int(said[9][1:])
    (spoken / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    code, out, _ = fwlab(*command, "--temperature", "0")
    assert out.split() == said[: said.index(said[9], 5)]


def test_generate_refuses(spoken):
    def refused(*options):
        code, _, err = fwlab("generate", str(spoken), *options)
        assert code == 2 and err.count("\n") == 1
        return err

    assert "expected --prompt" in refused()
    assert "at least one token" in refused("--prompt", "")
    asked = ("--prompt", "w1")
    assert "temperature to be 0 or more" in refused(*asked, "--temperature", "-1")
    ends = spoken / "generation_config.json"
    for wrong in ("</s>", [[1]], 0.5):
        ends.write_text(json.dumps({"eos_token_id": wrong}))
        message = "generation_config.json: expected eos_token_id to be a token or"
        assert message in refused(*asked)
    ends.unlink()
    path = spoken / "tokenizer.json"
    text = path.read_text()
    path.write_text(
        text.replace('"w60": 60', '"w60": 61').replace('"w60":60', '"w60":61')
    )
    message = "tokenizer.json: expected a tokenizer of at most the 61 tokens"
    assert message in refused(*asked)
    path.write_text(text[:50])
    assert "tokenizer.json is damaged" in refused(*asked)
    path.unlink()
    assert "tokenizer.json, got no such file" in refused(*asked)
    (spoken / "config.json").unlink()
    assert "config.json, got no such file" in refused(*asked)


def test_the_page_says_what_loads():
    """Families whose published models have experts do not; `hf.patch` takes them."""
    from fwlab import hf

    page = (Path(__file__).parents[1] / "docs" / "published.md").read_text("utf-8")
    rows = re.findall(r"^\| (yes|no) \| [^|(]*\(([^)]*)\) \|", page, re.M)
    said = {
        kind: answer for answer, kinds in rows for kind in kinds[1:-1].split("`, `")
    }
    loads = {
        kind: "no" if "_no_experts" in family.__code__.co_names else "yes"
        for kind, family in families.FAMILIES.items()
    }
    assert said == loads | {"qwen3_5_moe": "no"}
    assert {kind for kind, answer in said.items() if answer == "no"} <= {*hf.FAMILIES}
