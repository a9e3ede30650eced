"""Published families of models: their configurations and their names of weights.

Each function reads a configuration, and says of which parts `LanguageModel` has to be
made, and which of its weights is which published one.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fwlab.models.language_model import MIXERS, Mixer
from fwlab.models.latent_attention import LatentAttention

#: Where a layer of fast weights has the projection of its write strength, and its decay.
BETA, DECAY = "gates.beta.projection", "gates.log_decay"


class Configuration:
    """The values of a `config.json`.

    - `values`: the JSON object.
    - `path`: the file, for what an error says.
    """

    def __init__(self, values: dict[str, Any], path: Path):
        self.values, self.path = values, path

    def __getitem__(self, name: str) -> Any:
        if self.values.get(name) is None:
            raise ValueError(f"{self.path}: expected {name}, got none")
        return self.values[name]

    def get(self, name: str, usual: Any = None) -> Any:
        """A value, or the usual one if it is missing or null."""
        value = self.values.get(name)
        return usual if value is None else value

    def only(self, **supported: Any) -> None:
        """Raise `ValueError` unless each value is the supported one, or missing."""
        for name, value in supported.items():
            if self.get(name, value) != value:
                raise ValueError(
                    f"{self.path}: expected {name} to be {value!r}, the only one that "
                    f"fwlab has, got {self.values[name]!r}"
                )


class Piece(NamedTuple):
    """The same weights in both models: rows of matrices side by side.

    - `published`: names there.
    - `ours`: names in `LanguageModel`.
    - `heads`: number of heads; in the published weight, the rows of several of `ours`
      alternate, head by head.
    - `plus`: to add to what is published: some norms multiply by 1 + weight.
    - `form`: from the shape of our rows to that of the published ones.
    """

    published: tuple[str, ...]
    ours: tuple[str, ...]
    heads: int = 1
    plus: float = 0
    form: Callable[[Tensor], Tensor] = lambda rows: rows


class Family(NamedTuple):
    """What a checkpoint contains.

    - `model`: arguments of `LanguageModel`.
    - `pieces`: all its weights.
    - `ignored`: how the names of weights begin that are no part of the text model.
    - `renamed`: parts of names in files, and their counterparts in `pieces`.
    """

    model: dict[str, Any]
    pieces: list[Piece]
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()


def qwen3_5(c: Configuration) -> Family:
    """Qwen3.5; of a model that also sees, the part for text."""
    family = _qwen(c, _qkv_z_b_a)
    renamed = (("model.language_model.", "model."),)
    return family._replace(ignored=("model.visual.", "mtp."), renamed=renamed)


def qwen3_next(c: Configuration) -> Family:
    """Qwen3-Next, as far as its layers have no experts."""
    dense, every = c.get("mlp_only_layers", []), c.get("decoder_sparse_step", 1)
    sparse = [
        i
        for i in range(c["num_hidden_layers"])
        if c.get("num_experts", 0) and i not in dense and (i + 1) % every == 0
    ]
    _no_experts(c, sparse)
    return _qwen(c, _qkvz_ba)._replace(ignored=("mtp.",))


def olmo_hybrid(c: Configuration) -> Family:
    """Olmo Hybrid: norms after the parts of its attention layers."""
    c.only(hidden_act="silu", attention_bias=False)
    heads = c["num_attention_heads"]
    share, base = _rope(c, 1.0)
    softmax = {
        **{"heads": heads, "kv_heads": c.get("num_key_value_heads", heads)},
        **{"head_width": c.get("head_dim", c["hidden_size"] // heads)},
        **{"rope": share, "rope_base": base},
        **{"qk_norm": "all", "norm_eps": c["rms_norm_eps"]},
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
    types = _types(c)
    mixers = [
        MIXERS["softmax"]._replace(post_norm=True) if full else "gated-delta"
        for full in types
    ]
    pieces = _ends(c, "embed_tokens")
    for i, full in enumerate(types):
        norms = ("input_layernorm", "post_attention_layernorm")
        if full:
            norms = ("post_attention_layernorm", "post_feedforward_layernorm")
            all_heads = {"form": Tensor.flatten}
            pieces += _layer(i, "self_attn.", _SOFTMAX)
            for name in ("q_norm", "k_norm"):
                pieces += _layer(i, "self_attn.", {name: name}, **all_heads)
        else:
            pieces += _layer(i, "linear_attn.", _APART | {"g_proj": "to_gate"})
            pieces += _short_convolutions(i, "linear_attn.")
        pieces += _block(i, *norms)
    model = _stack(c, mixers, fast, softmax, c["rms_norm_eps"])
    renamed = (
        ("attention_layer_norm.", "input_layernorm."),
        ("feedforward_layer_norm.", "post_attention_layernorm."),
    )
    return Family(model, pieces, renamed=renamed)


def kimi_linear(c: Configuration) -> Family:
    """Kimi Linear, as far as its layers have no experts."""
    layers = c["num_hidden_layers"]
    usual = ["dense", *["sparse"] * (layers - 1)]
    kinds = c.get("mlp_layer_types", usual)
    _no_experts(c, [i for i, kind in enumerate(kinds) if kind != "dense"])
    c.only(hidden_act="silu", attention_bias=False, q_lora_rank=None)
    fast = {
        **{"like": "kimi", "heads": c["linear_num_heads"]},
        **{"head_width": c["linear_head_dim"], "norm_eps": c["rms_norm_eps"]},
        "conv_size": c["linear_conv_kernel_dim"],
    }
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    heads, latent = c["num_attention_heads"], [c[name] for name in sizes]
    types = _types(c)
    attention = Mixer(lambda s: LatentAttention(s.d_model, heads, *latent))
    pieces = _ends(c, "embed_tokens")
    for i, full in enumerate(types):
        pieces += _block(i, "input_layernorm", "post_attention_layernorm")
        if full:
            names = {"q_proj": "to_q", "kv_a_proj_with_mqa": "to_latent"}
            names |= {"kv_a_layernorm": "latent_norm", "kv_b_proj": "to_kv"}
            pieces += _layer(i, "self_attn.", names | {"o_proj": "to_out"})
        else:
            names = _SOFTMAX | {"b_proj": BETA, "o_norm": "out_norm"}
            for gate, ours in (("f", f"{DECAY}.projection"), ("g", "to_gate")):
                low_rank = {"a": f"{ours}.0", "b": f"{ours}.1"}
                names |= {f"{gate}_{part}_proj": at for part, at in low_rank.items()}
            pieces += _layer(i, "self_attn.", names)
            rate, bias = {"A_log": f"{DECAY}.log_rate"}, {"dt_bias": f"{DECAY}.bias"}
            pieces += _layer(i, "self_attn.", rate, form=lambda w: w.view(1, 1, -1, 1))
            pieces += _layer(i, "self_attn.", bias, form=Tensor.flatten)
            pieces += _short_convolutions(i, "self_attn.")
    mixers = [attention if full else "kimi-delta" for full in types]
    model = _stack(c, mixers, fast, {}, c["rms_norm_eps"])
    return Family(model, pieces, renamed=(("block_sparse_moe.", "mlp."),))


def delta_net(c: Configuration) -> Family:
    """DeltaNet of flash-linear-attention."""
    c.only(qk_norm="l2", qk_activation="silu", use_beta=True)
    heads, width = c["num_heads"], c["hidden_size"]
    keys = int(width * c.get("expand_k", 1.0)) // heads
    values = int(width * c.get("expand_v", 1.0)) // heads
    fast = {
        **{"like": "delta-net", "heads": heads, "head_width": keys},
        **{"expand_v": values / keys, "out_gate": bool(c.get("use_gate", False))},
    }
    return _flash_linear_attention(c, "delta", fast, _SOFTMAX | {"b_proj": BETA})


def gated_deltanet(c: Configuration) -> Family:
    """Gated DeltaNet of flash-linear-attention."""
    heads = c["num_heads"]
    fast = {
        **{"like": "gated-delta-net", "heads": heads, "head_width": c["head_dim"]},
        "value_heads": c.get("num_v_heads", heads),
        "expand_v": c.get("expand_v", 2.0),
        "out_gate": bool(c.get("use_gate", True)),
        "beta_max": 2 if c.get("allow_neg_eigval", False) else 1,
    }
    family = _flash_linear_attention(c, "gated-delta", fast, _APART)
    # Older versions had a weight that no computation used.
    unused = (f"model.layers.{i}.attn.D" for i in range(c["num_hidden_layers"]))
    return family._replace(ignored=tuple(unused))


#: The families by their `model_type`.
FAMILIES: dict[str, Callable[[Configuration], Family]] = {
    "qwen3_5": qwen3_5,
    "qwen3_5_text": qwen3_5,
    "qwen3_next": qwen3_next,
    "olmo_hybrid": olmo_hybrid,
    "kimi_linear": kimi_linear,
    "delta_net": delta_net,
    "gated_deltanet": gated_deltanet,
}

#: Published names of projections and gates in a layer, and ours.
_SOFTMAX = {f"{name}_proj": f"to_{name}" for name in "qkv"} | {"o_proj": "to_out"}
_GATES = {"A_log": f"{DECAY}.log_rate", "dt_bias": f"{DECAY}.bias"}
_APART = {
    **_SOFTMAX,
    **{"a_proj": f"{DECAY}.projection", "b_proj": BETA, "o_norm": "out_norm"},
    **_GATES,
}


def _qwen(c: Configuration, projections: Callable[[Configuration, int], list]):
    """What Qwen3-Next and Qwen3.5 share: all but the projections."""
    c.only(hidden_act="silu", attention_bias=False)
    eps, heads = c["rms_norm_eps"], c["num_attention_heads"]
    share, base = _rope(c, 0.25)
    softmax = {
        **{"heads": heads, "kv_heads": c["num_key_value_heads"]},
        **{"head_width": c["head_dim"], "rope": share, "rope_base": base},
        **{"qk_norm": "head", "norm_eps": eps, "out_gate": True},
    }
    width = c["linear_key_head_dim"]
    fast = {
        **{"like": "qwen3.5", "heads": c["linear_num_key_heads"], "head_width": width},
        "value_heads": c["linear_num_value_heads"],
        "expand_v": c["linear_value_head_dim"] / width,
        "conv_size": c["linear_conv_kernel_dim"],
        "norm_eps": eps,
    }
    types = _types(c)
    pieces = _ends(c, "embed_tokens", plus=1)
    for i, full in enumerate(types):
        pieces += _block(i, "input_layernorm", "post_attention_layernorm", plus=1)
        if full:
            gated = _names(i, "to_q", "to_gate")
            pieces.append(Piece(_there(i, "self_attn.q_proj"), gated, heads))
            kvo = {name: _SOFTMAX[name] for name in ("k_proj", "v_proj", "o_proj")}
            pieces += _layer(i, "self_attn.", kvo)
            norms = {"q_norm": "q_norm", "k_norm": "k_norm"}
            pieces += _layer(i, "self_attn.", norms, plus=1)
        else:
            names = {"norm": "out_norm", "out_proj": "to_out"}
            pieces += projections(c, i) + _layer(i, "linear_attn.", names | _GATES)
            conv = _there(i, "linear_attn.conv1d")
            pieces.append(Piece(conv, _names(i, "conv"), form=_grouped))
    mixers = ["softmax" if full else "gated-delta" for full in types]
    return Family(_stack(c, mixers, fast, softmax, eps), pieces)


def _qkv_z_b_a(c: Configuration, i: int) -> list[Piece]:
    """Projections of Qwen3.5."""
    qkv = Piece(_there(i, "linear_attn.in_proj_qkv"), _names(i, "to_q", "to_k", "to_v"))
    rest = {"z": "to_gate", "b": BETA, "a": f"{DECAY}.projection"}
    names = {f"in_proj_{name}": ours for name, ours in rest.items()}
    return [qkv, *_layer(i, "linear_attn.", names)]


def _qkvz_ba(c: Configuration, i: int) -> list[Piece]:
    """Projections of Qwen3-Next, joined for each head of keys."""
    heads = c["linear_num_key_heads"]
    four = _names(i, "to_q", "to_k", "to_v", "to_gate")
    two = _names(i, BETA, f"{DECAY}.projection")
    return [
        Piece(_there(i, "linear_attn.in_proj_qkvz"), four, heads),
        Piece(_there(i, "linear_attn.in_proj_ba"), two, heads),
    ]


def _flash_linear_attention(
    c: Configuration, mixer: str, fast: dict[str, Any], names: dict[str, str]
) -> Family:
    """A stack of one rule, some of its layers perhaps softmax attention."""
    c.only(hidden_act="swish", use_short_conv=True)
    eps, width = c.get("norm_eps", 1e-6), c["hidden_size"]
    fast = fast | {"conv_size": c.get("conv_size", 4), "norm_eps": eps}
    names = names | {"o_norm": "out_norm"}
    if fast["out_gate"]:
        names["g_proj"] = "to_gate"
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
    if d_ff is None:  # two thirds, up to a multiple of 256
        d_ff = -(-int(width * c.get("hidden_ratio", 4) * 2 / 3) // 256) * 256
    layers = range(c["num_hidden_layers"])
    pieces = _ends(c, "embeddings")
    for i in layers:
        pieces += _block(i, "attn_norm", "mlp_norm")
        pieces += _layer(i, "attn.", _SOFTMAX if i in full else names)
        if i not in full:
            pieces += _short_convolutions(i, "attn.")
    mixers = ["softmax" if i in full else mixer for i in layers]
    return Family(_stack(c, mixers, fast, softmax, eps, d_ff), pieces)


def _stack(
    c: Configuration,
    mixers: list[Any],
    fast: dict[str, Any],
    softmax: dict[str, Any],
    eps: float,
    d_ff: int | None = None,
) -> dict[str, Any]:
    """Arguments of `LanguageModel`."""
    kinds = {mixer if isinstance(mixer, str) else "softmax" for mixer in mixers}
    return {
        **{"vocab_size": c["vocab_size"], "mixer": mixers, "layers": len(mixers)},
        **{"heads": fast["heads"], "d_model": c["hidden_size"]},
        "d_ff": c["intermediate_size"] if d_ff is None else d_ff,
        "fast_weights": fast if kinds - {"softmax"} else None,
        "softmax": (softmax or None) if "softmax" in kinds else None,
        **{"norm": "rms", "norm_eps": eps, "mlp": "swiglu"},
        "tied": bool(c.get("tie_word_embeddings", False)),
    }


def _types(c: Configuration) -> list[bool]:
    """For each layer, whether it is softmax attention."""
    layers, every = c["num_hidden_layers"], c.get("full_attention_interval", 4)
    kinds = ("linear_attention", "full_attention")
    types = c.get("layer_types", [kinds[(i + 1) % every == 0] for i in range(layers)])
    if len(types) != layers or set(types) - {*kinds}:
        raise ValueError(
            f"{c.path}: expected layer_types to be {layers} of {' or '.join(kinds)}, "
            f"got {types}"
        )
    return [kind == "full_attention" for kind in types]


def _rope(c: Configuration, usual: float) -> tuple[float, float]:
    """The share of a head that is turned, and the base; with null as base, 0."""
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


def _no_experts(c: Configuration, sparse: Iterable[int]) -> None:
    """Raise `ValueError` for layers with experts."""
    if found := [*sparse]:
        raise ValueError(
            f"{c.path}: expected layers without experts, which fwlab does not have, "
            f"got {len(found)} layers with them"
        )


def _there(i: int, *names: str) -> tuple[str, ...]:
    """Published names in layer `i`."""
    return tuple(f"model.layers.{i}.{_weight(name)}" for name in names)


def _names(i: int, *names: str) -> tuple[str, ...]:
    """Our names in the mixer of layer `i`."""
    return tuple(f"blocks.{i}.mixer.{_weight(name)}" for name in names)


def _weight(name: str) -> str:
    bare = name.endswith(("A_log", "dt_bias", "log_rate", ".bias"))
    return name if bare else f"{name}.weight"


def _layer(i: int, folder: str, names: dict[str, str], **options: Any) -> list[Piece]:
    """Pieces of a mixer, each one published weight that is one of ours."""
    return [
        Piece(_there(i, folder + there), _names(i, ours), **options)
        for there, ours in names.items()
    ]


def _grouped(weight: Tensor) -> Tensor:
    """`[channels, size]` as `torch.nn.Conv1d` has it, with a group per channel."""
    return weight.unsqueeze(1)


def _short_convolutions(i: int, folder: str) -> list[Piece]:
    """Three convolutions that are one of ours."""
    three = _there(i, *(f"{folder}{name}_conv1d" for name in "qkv"))
    return [Piece(three, _names(i, "conv"), form=_grouped)]


def _block(i: int, mixer: str, mlp: str, plus: float = 0) -> list[Piece]:
    """The norms and the MLP of a block."""
    norms = {mixer: "norm_mixer", mlp: "norm_mlp"}
    parts = {"gate_proj": "gate", "up_proj": "expand", "down_proj": "contract"}
    names = [(there, ours, plus) for there, ours in norms.items()]
    names += [(f"mlp.{there}", ours, 0) for there, ours in parts.items()]
    return [
        Piece(_there(i, there), (f"blocks.{i}.{ours}.weight",), plus=more)
        for there, ours, more in names
    ]


def _ends(c: Configuration, embedding: str, plus: float = 0) -> list[Piece]:
    """What is before and after the layers."""
    pieces = [
        Piece((f"model.{embedding}.weight",), ("embedding.weight",)),
        Piece(("model.norm.weight",), ("norm.weight",), plus=plus),
    ]
    if not c.get("tie_word_embeddings", False):
        pieces.append(Piece(("lm_head.weight",), ("to_logits.weight",)))
    return pieces
