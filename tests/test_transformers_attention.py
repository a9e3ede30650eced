"""Softmax attention with the options of today's models is that of transformers."""

import contextlib
import importlib
from typing import NamedTuple

import pytest
import torch
from alike import random
from torch import Tensor

from fwlab.layers import Block, SoftmaxAttention
from fwlab.layers.positions import angles

transformers = pytest.importorskip("transformers")
WIDTH, TIME = 24, 20


@contextlib.contextmanager
def in_double():
    """Their modules compute parts in float32, whatever they get: now in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for name in ("float", "float32"):
            patch.setattr(torch, name, torch.float64)
        yield


class Pair(NamedTuple):
    """The same layer twice, with the same weights.

    - `copied`: their weights, as ours are made of them.
    - `waves`: the cosines and sines that theirs takes, `[1, time, channels]`.
    """

    theirs: torch.nn.Module
    ours: SoftmaxAttention
    copied: dict[str, Tensor]
    waves: tuple[Tensor, Tensor] | None


def pair(kind: str, dtype=torch.float64) -> Pair:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": WIDTH,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "intermediate_size": 20,
    }
    share, base = 0.5, 1e4
    if kind == "qwen3.5":
        from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

        rope = {"rope_type": "default", "rope_theta": base}
        config = modeling.Qwen3_5TextConfig(
            **sizes,
            head_dim=8,
            rope_parameters={**rope, "partial_rotary_factor": share},
        )
        theirs = modeling.Qwen3_5Attention(config, 0)
        options = {"head_width": 8, "rope": share, "qk_norm": "head", "out_gate": True}
    else:
        from transformers.models.olmo_hybrid import modeling_olmo_hybrid as modeling

        config = modeling.OlmoHybridConfig(**sizes)
        theirs = modeling.OlmoHybridAttention(config, 0)
        share = 1.0 if kind == "olmo-rope" else 0.0
        options = {"rope": share, "qk_norm": "all"}
    config._attn_implementation = "sdpa"  # of torch, in the precision of its inputs
    theirs = theirs.to(dtype).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3)
    ours = SoftmaxAttention(WIDTH, 4, 2, norm_eps=config.rms_norm_eps, **options)
    ours = ours.to(dtype)
    copied = translated(kind, dict(theirs.named_parameters()), ours)
    ours.load_state_dict(copied)
    waves = None
    if share:
        angle = angles(torch.arange(TIME), round(share * ours.head_width), base)[None]
        angle = torch.cat([angle, angle], -1)
        waves = angle.cos().to(dtype), angle.sin().to(dtype)
    return Pair(theirs, ours, copied, waves)


def translated(kind: str, named: dict, ours: SoftmaxAttention) -> dict[str, Tensor]:
    """Our names for their weights, or for the gradients of these."""
    made = {
        f"to_{name}.weight": named[f"{there}_proj.weight"]
        for name, there in (("k", "k"), ("v", "v"), ("out", "o"))
    }
    if kind == "qwen3.5":
        # Query and gate of a head are side by side.
        both = named["q_proj.weight"].unflatten(0, (ours.heads, 2, -1))
        made["to_q.weight"], made["to_gate.weight"] = (
            both[:, i].flatten(0, 1) for i in (0, 1)
        )
    else:
        made["to_q.weight"] = named["q_proj.weight"]
    for name in ("q_norm.weight", "k_norm.weight"):
        norm = named[name].view(getattr(ours, name[:6]).weight.shape)
        # Qwen's norms multiply by 1 + weight.
        made[name] = norm + 1 if kind == "qwen3.5" else norm
    return {name: part.detach() for name, part in made.items()}


def run(p: Pair, x: Tensor, start: int = 0, **options) -> Tensor:
    waves = p.waves and tuple(w[:, start : start + x.shape[1]] for w in p.waves)
    options.setdefault("attention_mask", None)
    with in_double() if x.dtype == torch.float64 else contextlib.nullcontext():
        return p.theirs(x, position_embeddings=waves, **options)[0]


KINDS = pytest.mark.parametrize("kind", ["qwen3.5", "olmo", "olmo-rope"])
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@KINDS
def test_outputs_and_gradients(kind):
    p, x, r = pair(kind), random(2, TIME, WIDTH), random(2, TIME, WIDTH)
    found = []
    for run_it, parameters in (
        (lambda x: run(p, x), p.theirs.named_parameters()),
        (p.ours, p.ours.named_parameters()),
    ):
        x = x.detach().requires_grad_()
        y = run_it(x)
        (y * r).sum().backward()
        found.append((y, x.grad, {name: w.grad for name, w in parameters}))
    (y, dx, dw), (our_y, our_dx, our_dw) = found
    torch.testing.assert_close(our_y, y, **CLOSE)
    torch.testing.assert_close(our_dx, dx, **CLOSE)
    if kind == "qwen3.5":  # the 1 of 1 + weight has no gradient
        dw = {n: g - 1 if n.endswith("norm.weight") else g for n, g in dw.items()}
    torch.testing.assert_close(our_dw, translated(kind, dw, p.ours), **CLOSE)


@KINDS
def test_as_it_is_in_float32(kind):
    p, x = pair(kind, torch.float32), random(2, TIME, WIDTH).float()
    y = run(p, x)
    assert (p.ours(x) - y).norm() / y.norm() < 2e-5


@KINDS
def test_the_cache_after_prefill_and_after_steps(kind):
    p, x = pair(kind), random(2, TIME, WIDTH)
    cache, state = transformers.DynamicCache(), None
    with torch.no_grad():
        for start, stop in ((0, 7), (7, 16), *((t, t + 1) for t in range(16, TIME))):
            mask = torch.ones(stop, stop, dtype=torch.bool).tril()[None, None, start:]
            part = x[:, start:stop]
            wanted = run(p, part, start, cache=cache, attention_mask=mask)
            if stop - start == 1:
                y, state = p.ours.step(part[:, 0], state)
                y = y[:, None]
            else:
                y, state = p.ours.prefill(part, state)
            torch.testing.assert_close(y, wanted, **CLOSE)
            theirs = cache.layers[0].keys, cache.layers[0].values
            for ours, other in zip(state[:2], theirs, strict=True):
                torch.testing.assert_close(ours.transpose(1, 2), other, **CLOSE)


@KINDS
def test_padding_on_the_left(kind):
    """They turn by places, we by real tokens: what counts is the distance."""
    p, x = pair(kind), random(2, TIME, WIDTH)
    real = torch.arange(TIME) >= torch.tensor([[6], [0]])
    mask = torch.ones(TIME, TIME, dtype=torch.bool).tril() & real[:, None, None]
    mask = mask | torch.eye(TIME, dtype=torch.bool)  # so that no row is empty
    wanted = run(p, x, attention_mask=mask)
    y = p.ours(x, key_mask=real)
    torch.testing.assert_close(y[real], wanted[real], **CLOSE)
    assert (y[~real] == 0).all()
    alone = p.ours(x[:1, 6:])
    torch.testing.assert_close(y[:1, 6:], alone, **CLOSE)


@pytest.mark.parametrize("kind", ["qwen3.5", "olmo-rope"])
def test_the_block_around_it(kind):
    """RMSNorm before or after each part, and SwiGLU."""
    p, x = pair(kind), random(2, TIME, WIDTH)
    config = p.theirs.config
    modeling = importlib.import_module(type(p.theirs).__module__)
    if kind == "qwen3.5":
        theirs = modeling.Qwen3_5DecoderLayer(config, 3)
        norms = theirs.input_layernorm, theirs.post_attention_layernorm
    else:
        theirs = modeling.OlmoHybridAttentionDecoderLayer(config, 3)
        norms = theirs.post_attention_layernorm, theirs.post_feedforward_layernorm
    theirs.double()
    theirs.self_attn = p.theirs
    after = kind != "qwen3.5"
    form = {"norm": "rms", "mlp": "swiglu", "norm_eps": config.rms_norm_eps}
    ours = Block(p.ours, WIDTH, config.intermediate_size, post_norm=after, **form)
    ours.double()
    with torch.no_grad():
        for norm, own in zip(norms, (ours.norm_mixer, ours.norm_mlp), strict=True):
            norm.weight.normal_()
            own.weight.copy_(norm.weight if after else norm.weight + 1)
    for name, own in (
        ("gate", ours.gate),
        ("up", ours.expand),
        ("down", ours.contract),
    ):
        own.load_state_dict(getattr(theirs.mlp, f"{name}_proj").state_dict())
    with in_double():
        wanted = theirs(x, position_embeddings=p.waves)
    torch.testing.assert_close(ours(x), wanted, **CLOSE)


def test_angles_are_theirs():
    from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

    config = modeling.Qwen3_5TextConfig(hidden_size=64, num_attention_heads=2)
    rotary = modeling.Qwen3_5TextRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), torch.arange(TIME)[None])
    width, base = round(0.25 * config.head_dim), config.rope_parameters["rope_theta"]
    angle = angles(torch.arange(TIME), width, base).float()
    for theirs, ours in ((cos, angle.cos()), (sin, angle.sin())):
        torch.testing.assert_close(theirs[0], torch.cat([ours, ours], -1))
