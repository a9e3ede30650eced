r"""Attend to another sequence, or to a whole sequence itself.

It is not causal, so there is nothing to stream: the whole source writes
the fast weights once, and after that they are only read.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import arguments, ops
from fwlab.feature_maps import FeatureMap, divide, unit_range
from fwlab.layers.causal import check_input, without_masked
from fwlab.layers.heads import head_width
from fwlab.ops import _operation as operation
from fwlab.ops.softmax import attention_with_dropout

State = ops.NormalizedState | ops.KeyValueCache


class CrossAttention(nn.Module):
    r"""Multi-head attention from `x` to a source, not causal.

    With a feature map this is linear attention (Katharopoulos et al. 2020): all source
    tokens write $W = \sum_j v_j \otimes \phi(k_j)$ and $z = \sum_j \phi(k_j)$, and
    every query reads $y = W\phi(q) \,/\, (z \cdot \phi(q))$. The size of the state does
    not depend on the length of the source. With softmax, the state is the keys and
    values of the source.

    - `d_model`: width of both sequences; a multiple of `heads`.
    - `heads`: number of heads, each with a state of its own.
    - `feature_map`: a `FeatureMap`; None = softmax attention.
    - `attention_dropout`: probability of dropout of the attention weights in training,
      from 0 to below 1; softmax only, because linear attention computes no attention
      weights. Above 0, training keeps `time` x `source` weights per head in memory.
    - Raises `ValueError` or `TypeError` for invalid arguments.

    No projection has a bias. If the whole source is masked, the output is 0.

        >>> layer = CrossAttention(d_model=8, heads=2)
        >>> layer(torch.randn(1, 3, 8), source=torch.randn(1, 5, 8)).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        feature_map: FeatureMap | None = None,
        attention_dropout: float = 0.0,
    ):
        super().__init__()
        width = head_width("CrossAttention", d_model, heads)
        if feature_map is not None and not isinstance(feature_map, FeatureMap):
            raise TypeError(
                "CrossAttention: expected feature_map to be a FeatureMap, such as "
                f"ELU1(), or None for softmax, got {feature_map!r}"
            )
        arguments.dropout("CrossAttention", attention_dropout, "attention_dropout")
        if attention_dropout and feature_map is not None:
            raise ValueError(
                "CrossAttention: expected attention_dropout=0 with a feature map, "
                f"which has no attention weights, got {attention_dropout}"
            )
        self.attention_dropout = attention_dropout
        self.d_model, self.heads = d_model, heads
        self.feature_map = feature_map
        #: `[heads, value, key]`, the shape of the fast weights of one source.
        self.state_shape = (
            None if feature_map is None else (heads, width, feature_map.width(width))
        )
        self.to_q = nn.Linear(d_model, d_model, bias=False)
        self.to_k = nn.Linear(d_model, d_model, bias=False)
        self.to_v = nn.Linear(d_model, d_model, bias=False)
        self.to_out = nn.Linear(d_model, d_model, bias=False)

    def state_size(self, time: int) -> int:
        """Count the scalars in the state of one source.

        - `time`: tokens of the source.
        - Returns the count; with a feature map it does not grow.
        """
        if self.state_shape is None:
            return 2 * time * self.d_model
        heads, value, key = self.state_shape
        return heads * (value * key + key)

    def forward(
        self, x: Tensor, source: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        """Write the source, then read it with a query per step of `x`.

        - `x`: `[batch, time, d_model]`.
        - `source`: `[batch, source, d_model]`; None = `x` itself.
        - `key_mask`: `bool [batch, source]`, True = real token.
        - Returns `[batch, time, d_model]`.
        - Raises `ValueError` or `TypeError`, naming the argument.
        """
        return self.read(x, self.write(x if source is None else source, key_mask))

    def write(self, source: Tensor, key_mask: Tensor | None = None) -> State:
        """Write a source into a new state.

        - `source`: `[batch, source, d_model]`.
        - `key_mask`: `bool [batch, source]`, True = real token; masked
          tokens may contain anything.
        - Returns a `NormalizedState`, or for softmax a `KeyValueCache`.
        """
        dims = "batch source d_model"
        check_input("CrossAttention", "source", source, dims, self.d_model, self.to_k)
        if key_mask is not None:
            source = without_masked("CrossAttention", source, dims, key_mask)
        k, v = (
            to(source).unflatten(-1, (self.heads, -1)) for to in (self.to_k, self.to_v)
        )
        if self.feature_map is None:
            return ops.KeyValueCache(k, v, key_mask)
        k, scale = self.feature_map.scaled(k)
        wide = torch.promote_types(k.dtype, torch.float32)
        # Under autocast the sums below would be in half precision.
        with torch.autocast(k.device.type, enabled=False):
            k, v = k.to(wide), v.to(wide)
            if key_mask is not None:
                k = torch.where(key_mask[..., None, None], k, 0)
            if scale is not None and scale.shape[1]:
                # Relative to the largest, which cancels in the quotient.
                if key_mask is not None:
                    scale = scale.masked_fill(~key_mask[..., None], -torch.inf)
                top = scale.amax(1, keepdim=True)
                unit = torch.where(scale == top, 0, scale - top)
                k = k * unit.exp()[..., None].to(wide)
            W = torch.einsum("bjhv,bjhk->bhvk", v, k)
        return ops.NormalizedState(W, k.sum(1))

    def read(self, x: Tensor, state: State) -> Tensor:
        """Read the state of a source with queries.

        - `x`: `[batch, time, d_model]`, from which the queries are made.
        - `state`: what `write` returned.
        - Returns `[batch, time, d_model]`.
        - Raises `ValueError` or `TypeError`, naming the argument.
        """
        dims = "batch time d_model"
        check_input("CrossAttention", "x", x, dims, self.d_model, self.to_q)
        q = self.to_q(x).unflatten(-1, (self.heads, -1))
        parts = self._checked(state, q)
        if self.feature_map is None:
            dropout = self.attention_dropout if self.training else 0.0
            k, v, mask = parts
            return self.to_out(_softmax(q, k, v, mask, dropout).flatten(-2))
        W, z = parts
        q = unit_range(self.feature_map.scaled(q)[0])  # its length cancels
        with torch.autocast(q.device.type, enabled=False):
            y = torch.einsum("bhvk,bihk->bihv", W, q.to(W.dtype))
            total = torch.einsum("bhk,bihk->bih", z, q.to(W.dtype))
            y = divide(y, total[..., None]).to(q.dtype)
        return self.to_out(y.flatten(-2))

    def _checked(self, state: Any, q: Tensor) -> Any:
        """Check that a state is as `write` returns it for this batch."""
        layer, batch = "CrossAttention", q.shape[0]
        if self.state_shape is None:
            operation.check_state(layer, state, ops.KeyValueCache)
            source, mask = operation.time_of(state[0], 4), state[2]
            shape, dtype = (batch, source, *q.shape[2:]), q.dtype
            shapes = {"k": shape, "v": shape}
            if mask is not None:
                operation.check_mask(
                    layer, "state.mask", mask, q, batch=batch, source=source
                )
        else:
            operation.check_state(layer, state, ops.NormalizedState)
            heads, _, key = self.state_shape
            dtype = torch.promote_types(q.dtype, torch.float32)
            shapes = {"W": (batch, *self.state_shape), "z": (batch, heads, key)}
        for (name, shape), part in zip(shapes.items(), state, strict=False):
            operation.check_part(layer, f"state.{name}", part, shape, dtype, q)
        return state


# PyTorch's own attention, which has heads before time.
def _softmax(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float
) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if k.shape[2] == 0:
        return torch.zeros_like(q).transpose(1, 2)
    visible = None
    if mask is not None:
        # A row that may see nothing would be 0/0: it sees the masked
        # tokens, whose values are 0.
        visible = (mask | ~mask.any(1, keepdim=True))[:, None, None]
    if dropout:
        q = q * q.shape[-1] ** -0.5
        y = attention_with_dropout(q, k, v, visible, dropout)
    else:
        y = F.scaled_dot_product_attention(q, k, v, visible)
    return y.transpose(1, 2)
