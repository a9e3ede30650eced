"""Compute one token without autograd, hooks or graphs: the fast path of `step`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import ops
from fwlab.layers.causal import has_hooks
from fwlab.ops import softmax
from fwlab.ops._rules import can_continue

Token = tuple[Tensor, Any]


def fast_weights(layer: Any, rule: Any, x: Tensor, state: Any) -> Token | None:
    """Compute a token `[batch, d_model]` of a `FastWeightAttention`, or return None."""
    batch = x.shape[0]
    other = isinstance(state, ops.ConvState) != (layer.conv is not None)
    # The fast path does not support shared denominators or more than two steps.
    shared = layer.kv_heads < layer.heads and (layer.normalize or layer.steps > 2)
    watched = torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type)
    if other or shared or watched or layer.has_running_scale:
        return None
    memory, before = (state, None) if layer.conv is None else state
    parts: Any = layer._modules  # Attribute access on a module is slow.
    made = [call(parts[name], x).unsqueeze(1) for name in ("to_q", "to_k", "to_v")]
    x = x.unsqueeze(1)
    if made[0].dtype != x.dtype or not batch:
        return None
    qk, v, inputs = layer._heads(*made, before)
    q, k = layer._split(layer._features(qk))
    gates = {
        name: gate(x, k) if has_hooks(gate) else gate.forward(x, k)
        for name, gate in parts["gates"]._modules.items()
    }
    found = step(rule.operation, q, k, v, gates, memory, layer.normalize)
    if found is None:
        return None
    y, memory = found
    y = y if layer.scale is None else layer.scale * y
    y = layer._norm_and_gate(y.to(x.dtype), x).view(batch, -1)
    state = memory if layer.conv is None else ops.ConvState(memory, inputs)
    return call(parts["to_out"], y), state


def step(
    operation: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Tensor],
    state: Any,
    normalize: bool,
) -> Token | None:
    """Compute a token `[batch, 1, heads, width]` of a rule, or return None."""
    dtype = v.dtype if v.itemsize > 2 else torch.float32
    if v.dtype != dtype or q.dtype != dtype:
        q, k, v = (part.to(dtype) for part in (q, k, v))
        gates = {name: gate.to(dtype) for name, gate in gates.items()}
    shape = (v.shape[0], *v.shape[-2:], k.shape[-1])
    if not can_continue(state, shape, v, normalize):
        return None
    return operation.one_token(state, normalize, q=q, k=k, v=v, **gates)


def softmax_attention(layer: Any, x: Tensor, state: Any) -> Token | None:
    """Compute a token `[batch, d_model]` of a `SoftmaxAttention`, or return None."""
    if not softmax.can_continue(state, x, layer.kv_heads, layer.head_width):
        return None
    parts, batch = layer._modules, x.shape[0]
    q, k, v = (call(parts[name], x) for name in ("to_q", "to_k", "to_v"))
    if q.dtype != x.dtype or (layer.training and layer.attention_dropout):
        return None
    if layer.turned or layer.q_norm is not None:
        q, k = (part.view(batch, 1, -1, layer.head_width) for part in (q, k))
        q, k = layer._with_positions(q, k, None, state)
    q, k, v = (part.view(batch, -1, 1, layer.head_width) for part in (q, k, v))
    y, state = softmax.step(q, k, v, state)
    y = y.reshape(batch, -1)
    if layer.to_gate is not None:
        y = y * torch.sigmoid(call(layer.to_gate, x))
    return call(parts["to_out"], y), state


def call(layer: Any, x: Tensor) -> Tensor:
    """Call a layer; without hooks, call its function directly, which is faster."""
    kind, weights = type(layer), layer._parameters
    plain = len(weights) == 2 and not has_hooks(layer)
    if plain and kind is nn.Linear:
        return F.linear(x, weights["weight"], weights["bias"])
    if plain and kind is nn.LayerNorm:
        shape, (weight, bias) = layer.normalized_shape, weights.values()
        return torch.layer_norm(x, shape, weight, bias, layer.eps)
    return layer(x)
