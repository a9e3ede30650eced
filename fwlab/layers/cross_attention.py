r"""Attention to another sequence, or to all of the same one.

Without an order there is nothing to stream: the fast weights are written
once, by the whole source, and then only read.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import ops
from fwlab.feature_maps import FeatureMap, divide, unit_range
from fwlab.layers.heads import check_input, head_width, real_tokens, split_heads
from fwlab.ops import checks

State = ops.NormalizedState | ops.KeyValueCache


class CrossAttention(nn.Module):
    r"""Multi-head attention from `x` to a source, not causal.

    With a feature map it is linear attention (Katharopoulos et al. 2020):
    all source tokens write $W = \sum_j v_j \otimes \phi(k_j)$ and $z =
    \sum_j \phi(k_j)$, and every query reads $y = W\phi(q) \,/\,
    (z \cdot \phi(q))$. The memory is as large for a long source as for a
    short one. With softmax it is the sources' keys and values.

    - `d_model`: width of both sequences; a multiple of `heads`.
    - `heads`: number of independent memories.
    - `feature_map`: a `FeatureMap`; None = softmax attention.
    - Raises `ValueError` or `TypeError` for what does not fit.

    No projection has a bias. A query for which all of the source is
    masked gets 0.
    """

    def __init__(self, d_model: int, heads: int, feature_map: FeatureMap | None = None):
        super().__init__()
        width = head_width("CrossAttention", d_model, heads)
        if feature_map is not None and not isinstance(feature_map, FeatureMap):
            raise TypeError(
                "CrossAttention: feature_map must be a FeatureMap, such as ELU1(), "
                f"or None for softmax, not {feature_map!r}"
            )
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
        """Numbers in the memory of one source.

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
        """Write the source, and read it for every step of `x`.

        - `x`: `[batch, time, d_model]`.
        - `source`: `[batch, source, d_model]`; None = `x` itself.
        - `key_mask`: `bool [batch, source]`, True = real token.
        - Returns `[batch, time, d_model]`.
        - Raises `ValueError` or `TypeError`, naming the argument.
        """
        return self.read(x, self.write(x if source is None else source, key_mask))

    def write(self, source: Tensor, key_mask: Tensor | None = None) -> State:
        """The memory of a source.

        - `source`: `[batch, source, d_model]`.
        - `key_mask`: `bool [batch, source]`, True = real token; what
          stands in masked tokens may be anything.
        - Returns a `NormalizedState`, or for softmax a `KeyValueCache`.
        """
        dims = "batch source d_model"
        check_input("CrossAttention", "source", source, dims, self.to_k.weight)
        source = real_tokens("CrossAttention", source, dims, key_mask)
        k, v = (
            split_heads(project(source), self.heads)
            for project in (self.to_k, self.to_v)
        )
        if self.feature_map is None:
            return ops.KeyValueCache(k, v, key_mask)
        k, scale = self.feature_map.scaled(k)
        wide = torch.promote_types(k.dtype, torch.float32)
        # Autocast would push the sums below into half precision.
        with torch.autocast(k.device.type, enabled=False):
            k, v = k.to(wide), v.to(wide)
            if key_mask is not None:
                k = torch.where(key_mask[..., None, None], k, 0)
            if scale is not None and scale.shape[1]:
                # In units of the largest, which the quotient cancels.
                if key_mask is not None:
                    scale = scale.masked_fill(~key_mask[..., None], -torch.inf)
                top = scale.amax(1, keepdim=True)
                unit = torch.where(scale == top, 0, scale - top)
                k = k * unit.exp()[..., None].to(wide)
            W = torch.einsum("bjhv,bjhk->bhvk", v, k)
        return ops.NormalizedState(W, k.sum(1))

    def read(self, x: Tensor, state: State) -> Tensor:
        """Ask the memory of a source.

        - `x`: `[batch, time, d_model]`.
        - `state`: what `write` returned.
        - Returns `[batch, time, d_model]`.
        - Raises `ValueError` or `TypeError`, naming the argument.
        """
        check_input("CrossAttention", "x", x, "batch time d_model", self.to_q.weight)
        q = split_heads(self.to_q(x), self.heads)
        parts = self._checked(state, q)
        if self.feature_map is None:
            return self.to_out(_softmax(q, *parts).flatten(-2))
        W, z = parts
        q = unit_range(self.feature_map.scaled(q)[0])  # its length cancels
        with torch.autocast(q.device.type, enabled=False):
            y = torch.einsum("bhvk,bihk->bihv", W, q.to(W.dtype))
            total = torch.einsum("bhk,bihk->bih", z, q.to(W.dtype))
            y = divide(y, total[..., None]).to(q.dtype)
        return self.to_out(y.flatten(-2))

    def _checked(self, state: Any, q: Tensor) -> Any:
        """The state, held to what `write` returns for as many sequences."""
        layer, batch = "CrossAttention", q.shape[0]
        if self.state_shape is None:
            checks.state_kind(layer, state, ops.KeyValueCache)
            source, mask = checks.time_of(state[0], 4), state[2]
            shape, dtype = (batch, source, *q.shape[2:]), q.dtype
            shapes = {"k": shape, "v": shape}
            if mask is not None:
                checks.mask(layer, "state.mask", mask, q, batch=batch, source=source)
        else:
            checks.state_kind(layer, state, ops.NormalizedState)
            heads, _, key = self.state_shape
            dtype = torch.promote_types(q.dtype, torch.float32)
            shapes = {"W": (batch, *self.state_shape), "z": (batch, heads, key)}
        for (name, shape), part in zip(shapes.items(), state, strict=False):
            checks.state_part(layer, f"state.{name}", part, shape, dtype, q)
        return state


def _softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if k.shape[2] == 0:
        return torch.zeros_like(q).transpose(1, 2)
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    # Who may see nothing would be 0/0: it sees masked tokens, whose values
    # are 0.
    seen = mask | ~mask.any(1, keepdim=True)
    y = F.scaled_dot_product_attention(q, k, v, seen[:, None, None])
    return y.transpose(1, 2)
