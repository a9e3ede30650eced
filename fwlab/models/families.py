"""Describe published families of models: configurations and names of weights.

Each function reads a configuration, and returns the arguments of `LanguageModel`, and
the published names of its weights.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fwlab.models.language_model import MIXERS, Mixer

#: Names of the projection to beta and of the decay in a fast weight layer.
BETA, DECAY = "gates.beta.projection", "gates.log_decay"
#: Names of weights in a layer, published and ours. Spaces separate several names.
SOFTMAX = {f"{name}_proj": f"to_{name}" for name in "qkv"} | {"o_proj": "to_out"}
GATES = {"A_log": f"{DECAY}.log_rate", "dt_bias": f"{DECAY}.bias"}
DELTA = SOFTMAX | {"q_conv1d k_conv1d v_conv1d": "conv"}
DELTA |= {"b_proj": BETA, "o_norm": "out_norm"}
GATED_DELTA = DELTA | GATES | {"a_proj": f"{DECAY}.projection"}
QK_NORM = {"q_norm": "q_norm", "k_norm": "k_norm"}
MLP = {"gate_proj": "gate", "up_proj": "expand", "down_proj": "contract"}


class Configuration:
    """Hold the values of a `config.json`.

    - `values`: the JSON object.
    - `path`: the file, for error messages.
    """

    def __init__(self, values: dict[str, Any], path: Path):
        self.values, self.path = values, path

    def __getitem__(self, name: str) -> Any:
        if self.values.get(name) is None:
            raise ValueError(f"{self.path}: expected {name}, got none")
        return self.values[name]

    def get(self, name: str, usual: Any = None) -> Any:
        """Return a value, or `usual` if the value is missing or null."""
        value = self.values.get(name)
        return usual if value is None else value

    def only(self, **supported: Any) -> None:
        """Raise `ValueError` if a value is given but is not the supported value."""
        for name, value in supported.items():
            if self.get(name, value) != value:
                raise ValueError(
                    f"{self.path}: expected {name} to be {value!r}, the only one that "
                    f"fwlab has, got {self.values[name]!r}"
                )


class Piece(NamedTuple):
    """Map published names of weights to names in `LanguageModel`.

    - `published`: published names.
    - `ours`: names in `LanguageModel`.
    - `heads`: number of heads; in the published weight, the rows of several of `ours`
      alternate, head by head.
    """

    published: tuple[str, ...]
    ours: tuple[str, ...]
    heads: int = 1


class Family(NamedTuple):
    """Describe a checkpoint: arguments of `LanguageModel`, and names of the weights.

    - `model`: arguments of `LanguageModel`.
    - `pieces`: names of all weights.
    - `plus`: added to the weights of all norms except output norms, for models that
      multiply by 1 + weight.
    - `ignored`: prefixes of the names of weights that are not part of the text model.
    - `renamed`: parts of names in files, and their counterparts in `pieces`.
    """

    model: dict[str, Any]
    pieces: list[Piece]
    plus: float = 0
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()


class Layer(NamedTuple):
    """Describe a kind of layer of a family: its `mixer` and the names of its weights.

    - `folder`: prefix of the published mixer in its layer.
    - `names`: published names of the mixer's weights, and our names.
    - `norms`: published names of the norms of mixer and MLP.
    - `heads`: as for `Piece`.
    """

    mixer: Mixer
    folder: str
    names: dict[str, str]
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    heads: int = 1


def qwen3_5(c: Configuration) -> Family:
    """Describe Qwen3.5, or the text part of a Qwen3.5 model that also reads images."""
    c.only(hidden_act="silu", attention_bias=False)
    eps, width = c["rms_norm_eps"], c["linear_key_head_dim"]
    share, base = _rope(c, 0.25)
    softmax = {
        **{"heads": c["num_attention_heads"], "kv_heads": c["num_key_value_heads"]},
        **{"head_width": c["head_dim"], "rope": share, "rope_base": base},
        **{"qk_norm": "head", "norm_eps": eps, "out_gate": True},
    }
    fast = {
        **{"like": "qwen3.5", "heads": c["linear_num_key_heads"], "head_width": width},
        "value_heads": c["linear_num_value_heads"],
        "expand_v": c["linear_value_head_dim"] / width,
        "conv_size": c["linear_conv_kernel_dim"],
        "norm_eps": eps,
    }
    names = SOFTMAX | QK_NORM | {"q_proj": "to_q to_gate"}
    attention = Layer(MIXERS["softmax"], "self_attn", names, heads=softmax["heads"])
    names = GATES | {"in_proj_qkv": "to_q to_k to_v", "in_proj_z": "to_gate"}
    names |= {"in_proj_b": BETA, "in_proj_a": f"{DECAY}.projection"}
    names |= {"conv1d": "conv", "norm": "out_norm", "out_proj": "to_out"}
    delta = Layer(MIXERS["gated-delta"], "linear_attn", names)
    family = _family(c, _hybrid(c, delta, attention), fast, softmax, eps)
    renamed = (("model.language_model.", "model."),)
    return family._replace(plus=1, ignored=("model.visual.", "mtp."), renamed=renamed)


def olmo_hybrid(c: Configuration) -> Family:
    """Describe Olmo Hybrid, whose attention layers have norms after mixer and MLP."""
    c.only(hidden_act="silu", attention_bias=False)
    eps, heads = c["rms_norm_eps"], c["num_attention_heads"]
    share, base = _rope(c, 1.0)
    softmax = {
        **{"heads": heads, "kv_heads": c.get("num_key_value_heads", heads)},
        **{"head_width": c.get("head_dim", c["hidden_size"] // heads)},
        **{"rope": share, "rope_base": base, "qk_norm": "all", "norm_eps": eps},
    }
    keys = c.get("linear_num_key_heads", heads)
    width = c.get("linear_key_head_dim", int(0.75 * c["hidden_size"] / keys))
    fast = {
        **{"like": "olmo-hybrid", "heads": keys, "head_width": width},
        "value_heads": c.get("linear_num_value_heads", heads),
        "expand_v": c.get("linear_value_head_dim", 2 * width) / width,
        "conv_size": c.get("linear_conv_kernel_dim", 4),
        "beta_max": 2 if c.get("linear_allow_neg_eigval", True) else 1,
        "norm_eps": 1e-5,
    }
    post, names = MIXERS["softmax"]._replace(post_norm=True), SOFTMAX | QK_NORM
    after = ("post_attention_layernorm", "post_feedforward_layernorm")
    attention = Layer(post, "self_attn", names, after)
    names = GATED_DELTA | {"g_proj": "to_gate"}
    delta = Layer(MIXERS["gated-delta"], "linear_attn", names)
    renamed = (
        ("attention_layer_norm.", "input_layernorm."),
        ("feedforward_layer_norm.", "post_attention_layernorm."),
    )
    layers = _hybrid(c, delta, attention)
    return _family(c, layers, fast, softmax, eps)._replace(renamed=renamed)


def delta_net(c: Configuration) -> Family:
    """Describe DeltaNet of flash-linear-attention."""
    c.only(qk_norm="l2", qk_activation="silu", use_beta=True)
    heads, width = c["num_heads"], c["hidden_size"]
    keys = int(width * c.get("expand_k", 1.0)) // heads
    values = int(width * c.get("expand_v", 1.0)) // heads
    fast = {
        **{"like": "delta-net", "heads": heads, "head_width": keys},
        **{"expand_v": values / keys, "out_gate": bool(c.get("use_gate", False))},
    }
    return _flash_linear_attention(c, Layer(MIXERS["delta"], "attn", DELTA), fast)


def gated_deltanet(c: Configuration) -> Family:
    """Describe Gated DeltaNet of flash-linear-attention."""
    heads = c["num_heads"]
    fast = {
        **{"like": "gated-delta-net", "heads": heads, "head_width": c["head_dim"]},
        "value_heads": c.get("num_v_heads", heads),
        "expand_v": c.get("expand_v", 2.0),
        "out_gate": bool(c.get("use_gate", True)),
        "beta_max": 2 if c.get("allow_neg_eigval", False) else 1,
    }
    layer = Layer(MIXERS["gated-delta"], "attn", GATED_DELTA)
    # Older versions had a weight that no computation used.
    unused = (f"model.layers.{i}.attn.D" for i in range(c["num_hidden_layers"]))
    return _flash_linear_attention(c, layer, fast)._replace(ignored=tuple(unused))


def _flash_linear_attention(
    c: Configuration, layer: Layer, fast: dict[str, Any]
) -> Family:
    """Describe a stack with one rule, in which some layers may be softmax attention."""
    c.only(hidden_act="swish", use_short_conv=True)
    eps, width = c.get("norm_eps", 1e-6), c["hidden_size"]
    fast = fast | {"conv_size": c.get("conv_size", 4), "norm_eps": eps}
    gate = {"g_proj": "to_gate"} if fast["out_gate"] else {}
    layer = layer._replace(names=layer.names | gate, norms=("attn_norm", "mlp_norm"))
    attention = Configuration(c.get("attn", {}), c.path)
    attention.only(window_size=None, qkv_bias=False, qk_norm=False)
    full, softmax = attention.get("layers", []), {}
    if full:
        heads = attention["num_heads"]
        softmax = {
            **{"heads": heads, "head_width": width // heads, "rope": 1.0},
            "kv_heads": attention.get("num_kv_heads", heads),
            "rope_base": attention.get("rope_theta", 10000.0),
        }
    d_ff = c.get("intermediate_size")
    if d_ff is None:  # Round two thirds up to a multiple of 256.
        d_ff = -(-int(width * c.get("hidden_ratio", 4) * 2 / 3) // 256) * 256
    other = layer._replace(mixer=MIXERS["softmax"], names=SOFTMAX)
    layers = [other if i in full else layer for i in range(c["num_hidden_layers"])]
    return _family(c, layers, fast, softmax, eps, d_ff, "embeddings")


#: The families by their `model_type`.
FAMILIES: dict[str, Callable[[Configuration], Family]] = {
    "qwen3_5": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "olmo_hybrid": olmo_hybrid,
    "delta_net": delta_net,
    "gated_deltanet": gated_deltanet,
}
#: Families whose published models have experts, which fwlab does not have.
EXPERTS = ("qwen3_next", "qwen3_5_moe", "kimi_linear")


def _family(
    c: Configuration,
    layers: list[Layer],
    fast: dict[str, Any],
    softmax: dict[str, Any],
    eps: float,
    d_ff: int | None = None,
    embedding: str = "embed_tokens",
) -> Family:
    """Collect the arguments of `LanguageModel`, and map the names of its weights."""
    mixers = [layer.mixer for layer in layers]
    tied = bool(c.get("tie_word_embeddings", False))
    takes = {mixer.takes for mixer in mixers}
    model = {
        **{"vocab_size": c["vocab_size"], "mixer": mixers, "layers": len(layers)},
        **{"heads": fast["heads"], "d_model": c["hidden_size"], "tied": tied},
        "d_ff": c["intermediate_size"] if d_ff is None else d_ff,
        "fast_weights": fast if "fast_weights" in takes else None,
        "softmax": softmax if "softmax" in takes else None,
        **{"norm": "rms", "norm_eps": eps, "mlp": "swiglu"},
    }
    pieces = _pieces("model.", "", {embedding: "embedding", "norm": "norm"})
    pieces += [] if tied else _pieces("", "", {"lm_head": "to_logits"})
    for i, layer in enumerate(layers):
        there, here = f"model.layers.{i}.", f"blocks.{i}."
        norms = dict(zip(layer.norms, ("norm_mixer", "norm_mlp"), strict=True))
        pieces += _pieces(there, here, norms) + _pieces(f"{there}mlp.", here, MLP)
        folders = (f"{there}{layer.folder}.", f"{here}mixer.")
        pieces += _pieces(*folders, layer.names, layer.heads)
    return Family(model, pieces)


def _pieces(
    there: str, here: str, names: dict[str, str], heads: int = 1
) -> list[Piece]:
    """Pair published names of weights with fwlab's names, and add a prefix to each."""

    def full(before: str, names: str) -> tuple[str, ...]:
        bare = ("A_log", "dt_bias", "log_rate", ".bias")
        return tuple(
            before + name + ".weight" * (not name.endswith(bare))
            for name in names.split()
        )

    return [
        Piece(full(there, published), full(here, ours), heads if " " in ours else 1)
        for published, ours in names.items()
    ]


def _hybrid(c: Configuration, delta: Layer, attention: Layer) -> list[Layer]:
    """List the layers of a hybrid stack of delta rule and attention layers."""
    layers, every = c["num_hidden_layers"], c.get("full_attention_interval", 4)
    kinds = {"linear_attention": delta, "full_attention": attention}
    usual = [[*kinds][(i + 1) % every == 0] for i in range(layers)]
    types = c.get("layer_types", usual)
    if len(types) != layers or {*types} - {*kinds}:
        raise ValueError(
            f"{c.path}: expected layer_types to be {layers} of {' or '.join(kinds)}, "
            f"got {types}"
        )
    return [kinds[kind] for kind in types]


def _rope(c: Configuration, usual: float) -> tuple[float, float]:
    """Return the share of a head that is rotated, and the base of rotary positions."""
    found: dict[str, Any] = c.get("rope_parameters", c.get("rope_scaling", {}))
    kind = found.get("rope_type", found.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"{c.path}: expected rope_type to be 'default', the only one that fwlab "
            f"has, got {kind!r}"
        )
    base = found.get("rope_theta", c.values.get("rope_theta", 10000.0))
    if base is None:
        return 0.0, 10000.0
    share = found.get("partial_rotary_factor", c.get("partial_rotary_factor", usual))
    return share, base
