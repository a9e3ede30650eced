"""`FastWeightAttention.like` is the layer of transformers, weight for weight.

Their modules compute parts in float32. For float64 the module's own source is run
once more, with float64 in the place of float32.
"""

import importlib
import inspect
import sys
import types
from functools import cache, partial
from itertools import takewhile
from pathlib import Path

import pytest
import torch
from alike import error, refuses
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from fwlab.feature_maps import Identity
from fwlab.layers import FastWeightAttention
from fwlab.layers.fast_weight_attention import PRESETS

DynamicCache = pytest.importorskip("transformers").DynamicCache
WIDTH, TIME = 16, 20
LIMITS = {torch.float64: 1e-9, torch.float32: 2e-5}
dtypes = pytest.mark.parametrize("dtype", LIMITS, ids=["float64", "float32"])


BETA, DECAY = "gates.beta.projection", "gates.log_decay"


def renamed(weights, names):
    """Their weights by our names, and those of the convolution without its groups."""
    ours = {new: weights[old] for old, new in names.items()}
    return ours | {"conv.weight": weights["conv1d.weight"].squeeze(1)}


QWEN = {
    **{"A_log": f"{DECAY}.log_rate", "dt_bias": f"{DECAY}.bias"},
    **{"norm.weight": "out_norm.weight", "out_proj.weight": "to_out.weight"},
}


def qwen3_5(weights, config):
    names = {
        "in_proj_z.weight": "to_gate.weight",
        "in_proj_b.weight": f"{BETA}.weight",
        "in_proj_a.weight": f"{DECAY}.projection.weight",
    }
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    q, k, v = weights["in_proj_qkv.weight"].tensor_split([keys, 2 * keys])
    qkv = {"to_q.weight": q, "to_k.weight": k, "to_v.weight": v}
    return renamed(weights, QWEN | names) | qkv


def qwen3_next(weights, config):
    """The rows are joined, head of keys by head of keys."""
    heads, key = config.linear_num_key_heads, config.linear_key_head_dim
    parts = weights["in_proj_qkvz.weight"].unflatten(0, (heads, -1))
    values = (parts.shape[1] - 2 * key) // 2
    parts = parts.split([key, key, values, values], 1)
    halves = weights["in_proj_ba.weight"].unflatten(0, (heads, -1)).chunk(2, 1)
    names = [f"to_{name}.weight" for name in ("q", "k", "v", "gate")]
    names += [f"{BETA}.weight", f"{DECAY}.projection.weight"]
    rows = (part.flatten(0, 1) for part in (*parts, *halves))
    return renamed(weights, QWEN) | dict(zip(names, rows, strict=True))


def olmo_hybrid(weights, config):
    ours = {"q": "to_q", "k": "to_k", "v": "to_v", "g": "to_gate"}
    ours |= {"a": f"{DECAY}.projection", "b": BETA}
    names = {f"{old}_proj.weight": f"{new}.weight" for old, new in ours.items()}
    names |= {"o_norm.weight": "out_norm.weight", "o_proj.weight": "to_out.weight"}
    return renamed(
        weights, names | {"A_log": f"{DECAY}.log_rate", "dt_bias": f"{DECAY}.bias"}
    )


def kimi_linear(weights, config):
    names = {f"{name}_proj.weight": f"to_{name}.weight" for name in "qkv"}
    names |= {
        "b_proj.weight": f"{BETA}.weight",
        "forget_gate.f_a_proj.weight": f"{DECAY}.projection.0.weight",
        "forget_gate.f_b_proj.weight": f"{DECAY}.projection.1.weight",
        "g_a_proj.weight": "to_gate.0.weight",
        "g_b_proj.weight": "to_gate.1.weight",
        "o_norm.weight": "out_norm.weight",
        "o_proj.weight": "to_out.weight",
    }
    heads = config.linear_num_heads
    return renamed(weights, names) | {
        f"{DECAY}.log_rate": weights["forget_gate.A_log"].flatten(),
        f"{DECAY}.bias": weights["forget_gate.dt_bias"].unflatten(0, (heads, -1)),
    }


def grouped(keys, values, key, value):
    """Sizes of a configuration, in their words."""
    heads = {"linear_num_key_heads": keys, "linear_num_value_heads": values}
    return heads | {"linear_key_head_dim": key, "linear_value_head_dim": value}


#: Where each module is, the sizes of its configuration, and of our layer.
CASES = {
    "qwen3.5": (
        ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet", qwen3_5),
        grouped(2, 2, 8, 8),
        ("qwen3.5", 2, {}),
    ),
    "qwen3.5-groups": (
        ("qwen3_5", "Qwen3_5TextConfig", "Qwen3_5GatedDeltaNet", qwen3_5),
        grouped(2, 6, 4, 6),
        ("qwen3.5", 2, {"head_width": 4, "value_heads": 6, "expand_v": 1.5}),
    ),
    "qwen3-next": (
        ("qwen3_next", "Qwen3NextConfig", "Qwen3NextGatedDeltaNet", qwen3_next),
        grouped(2, 4, 4, 4),
        ("qwen3.5", 2, {"head_width": 4, "value_heads": 4}),
    ),
    "olmo-hybrid": (
        ("olmo_hybrid", "OlmoHybridConfig", "OlmoHybridGatedDeltaNet", olmo_hybrid),
        grouped(3, 3, 4, 8),
        ("olmo-hybrid", 3, {"head_width": 4}),
    ),
    "kimi": (
        ("kimi_linear", "KimiLinearConfig", "KimiLinearDeltaAttention", kimi_linear),
        {"linear_num_heads": 3, "linear_head_dim": 6},
        ("kimi", 3, {"head_width": 6}),
    ),
}
cases = pytest.mark.parametrize("case", CASES)


@cache
def modeling(family, dtype):
    """The module of a family, or its source with float64 in place of float32."""
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    if dtype == torch.float32:
        return module
    source = inspect.getsource(module).replace("torch.float32", "torch.float64")
    twin = types.ModuleType(f"{module.__name__}_in_float64")
    twin.__package__, twin.__file__ = module.__package__, module.__file__
    sys.modules[twin.__name__] = twin
    source = source.replace(".float()", ".double()")
    exec(compile(source, module.__file__, "exec"), vars(twin))
    return twin


def both(case, dtype):
    """Their layer with random weights, ours with the same, an input, our names of
    their weights, and their configuration.
    """
    (family, config, layer, names), sizes, (preset, heads, options) = CASES[case]
    configuration = importlib.import_module(
        f"transformers.models.{family}.configuration_{family}"
    )
    config = getattr(configuration, config)(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        **sizes,
    )
    torch.manual_seed(0)
    theirs = getattr(modeling(family, dtype), layer)(config, 0).to(dtype)
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.normal_(0, 0.5)
    ours = FastWeightAttention.like(preset, WIDTH, heads, **options).to(dtype)
    ours.load_state_dict(names(theirs.state_dict(), config))
    x = torch.randn(2, TIME, WIDTH, dtype=dtype, requires_grad=True)
    return theirs, ours, x, partial(names, config=config), config


@cases
@dtypes
def test_outputs_and_gradients(case, dtype):
    """Those of every weight of theirs, through ours."""
    theirs, ours, x, names, _ = both(case, dtype)
    weights = dict(theirs.named_parameters())
    wanted, y = theirs(x), functional_call(ours, names(weights), (x,))
    assert y.dtype == dtype and error(y, wanted) < LIMITS[dtype]
    r = torch.randn_like(y)
    expected, gradients = (
        torch.autograd.grad((out * r).sum(), [x, *weights.values()])
        for out in (wanted, y)
    )
    for name, a, b in zip(["x", *weights], gradients, expected, strict=True):
        assert error(a, b) < LIMITS[dtype], name


def states(cache):
    """Fast weights and inputs of the convolution, in our orientation."""
    inputs = cache.get_conv_state(0)[..., -3:]
    return cache.get_recurrent_state(0).mT, inputs.mT


@cases
@dtypes
@torch.no_grad()
def test_state_after_pieces_and_steps(case, dtype):
    theirs, ours, x, _, config = both(case, dtype)
    cache, state = DynamicCache(config=config), None
    for start, stop in ((0, 9), (9, 16), (16, 17), (17, 18)):
        piece = x[:, start:stop]
        wanted = theirs(piece, cache=cache)
        if stop - start == 1:
            y, state = ours.step(piece[:, 0], state)
            y = y[:, None]
        else:
            y, state = ours.prefill(piece, state)
        for found, right in zip((y, *state), (wanted, *states(cache)), strict=True):
            assert error(found, right) < LIMITS[dtype]


@cases
@dtypes
@torch.no_grad()
def test_padding(case, dtype):
    """On the right, their state goes on through the padding: ours does not."""
    theirs, ours, x, _, config = both(case, dtype)
    for mask in (torch.arange(TIME) >= 7, torch.arange(TIME) < 13):
        mask = torch.stack([mask, torch.ones_like(mask)])
        cache = DynamicCache(config=config)
        wanted = theirs(x, cache=cache, attention_mask=mask)
        y, state = ours.prefill(x, None, mask)
        assert error(y[mask], wanted[mask]) < LIMITS[dtype]
        if not mask[0, 0]:
            for found, right in zip(state, states(cache), strict=True):
                assert error(found, right) < LIMITS[dtype]


def published(layer, x):
    """DeltaNet and GatedDeltaNet of flash-linear-attention, from their source."""
    heads, time = layer.heads, x.shape[1]
    projected = [project(x).mT for project in (layer.to_q, layer.to_k, layer.to_v)]
    kernels = layer.conv.weight.split([part.shape[1] for part in projected])
    q, k, v = (
        F.silu(F.conv1d(F.pad(part, (3, 0)), w[:, None], groups=len(w)))
        .unflatten(1, (heads, -1))
        .permute(3, 0, 1, 2)
        for part, w in zip(projected, kernels, strict=True)
    )
    q, k = (
        part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k)
    )
    beta, decay = (
        layer.gates.beta.projection(x).sigmoid(),
        torch.ones(len(x), time, heads, dtype=x.dtype),
    )
    if layer.rule == "gated_delta":
        decay = layer.gates.log_decay(x, x).exp()
    W, y = x.new_zeros(len(x), heads, k.shape[-1], v.shape[-1]), []
    for t in range(time):
        W = W * decay[:, t, :, None, None]
        error = beta[:, t, :, None] * (v[t] - torch.einsum("bhkv,bhk->bhv", W, k[t]))
        W = W + torch.einsum("bhk,bhv->bhkv", k[t], error)
        y.append(torch.einsum("bhkv,bhk->bhv", W, q[t] * q.shape[-1] ** -0.5))
    y = torch.stack(y, 1)
    y = y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.out_norm.weight
    y = y.flatten(2)
    return layer.to_out(y * F.silu(layer.to_gate(x)) if layer.to_gate else y)


@pytest.mark.parametrize("name", ["delta-net", "gated-delta-net"])
def test_layers_of_flash_linear_attention(name):
    torch.manual_seed(0)
    layer = FastWeightAttention.like(name, WIDTH, 2, head_width=6).double()
    for weight in layer.parameters():
        nn.init.normal_(weight, 0, 0.5)
    x = torch.randn(2, TIME, WIDTH, dtype=torch.float64)
    assert error(layer(x), published(layer, x)) < 1e-12


PAGE = Path(__file__).parents[1] / "docs" / "api" / "layers.md"


def test_the_page_has_the_presets():
    """Its table: a row for each option that a preset sets."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [
        [c.strip(" `") for c in line.split("|")[1:-1]] for line in lines if "|" in line
    ]
    first = next(i for i, row in enumerate(rows) if row[0] == "option")
    names, usual = rows[first][1:], inspect.signature(FastWeightAttention).parameters
    rows = takewhile(lambda row: row[0] in usual, rows[first + 2 :])
    table = {option: values for option, *values in rows}
    assert names == list(PRESETS)
    assert set(table) == {o for preset in PRESETS.values() for o in preset}
    for option, values in table.items():
        for name, said in zip(names, values, strict=True):
            value = PRESETS[name].get(option, usual[option].default)
            assert said == ("–" if value is False else str(value)), (name, option)


def test_options_win_over_presets():
    layer = FastWeightAttention.like("qwen3.5", 8, 2, conv_size=0, out_gate=False)
    assert layer.conv is layer.to_gate is None and layer.scale == 0.5
    assert isinstance(layer.feature_map, Identity)
    refuses(
        lambda: FastWeightAttention.like("qwen", 8, 2),
        "^FastWeightAttention.like: expected name to be one of 'delta-net', .*got 'qwen'$",
    )
