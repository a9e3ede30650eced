r"""Define attention to another sequence, or to itself without a causal mask.

The layer is not causal, so it does not stream: the whole source writes
the fast weights once, and then queries only read them.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import arguments, ops
from fwlab.feature_maps import FeatureMap, divide, unit_range
from fwlab.layers.causal import check_input, without_masked
from fwlab.layers.heads import head_width, per_head, projections
from fwlab.ops import _operation as operation
from fwlab.ops.softmax import attention_with_dropout

State = ops.NormalizedState | ops.KeyValueCache


class CrossAttention(nn.Module):
    r"""Compute multi-head attention from `x` to a source, without a causal mask.

    With a feature map this is linear attention (Katharopoulos et al. 2020): all source
    tokens write $W = \sum_j v_j \otimes \phi(k_j)$ and $z = \sum_j \phi(k_j)$, and
    every query reads $y = W\phi(q) \,/\, (z \cdot \phi(q))$. The size of the state does
    not depend on the length of the source. With softmax, the state is the keys and
    values of the source.

    - `d_model`: width of both sequences; a multiple of `heads`.
    - `heads`: number of heads, each with a separate state.
    - `feature_map`: a `FeatureMap`; None = softmax attention.
    - `attention_dropout`: as for `SoftmaxAttention`; linear attention has no attention
      weights to drop.
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
        layer = "CrossAttention"
        width = head_width(layer, d_model, heads)
        wanted = (
            f"feature_map to be a FeatureMap or None (softmax), got {feature_map!r}"
        )
        is_map = isinstance(feature_map, FeatureMap | None)
        arguments.require(layer, is_map, wanted, TypeError)
        arguments.dropout(layer, attention_dropout, "attention_dropout")
        fits = feature_map is None or not attention_dropout
        wanted = "attention_dropout=0 with a feature map: there are no such weights"
        arguments.require(layer, fits, f"{wanted}, got {attention_dropout}")
        self.d_model, self.heads = d_model, heads
        self.attention_dropout = attention_dropout
        self.feature_map: Any = feature_map
        #: The shape of the fast weights of one source, `(heads, value, key)`.
        self.state_shape: Any = None
        if feature_map is not None:
            self.state_shape = (heads, width, feature_map.width(width))
        sizes = [d_model] * 4
        self.to_q, self.to_k, self.to_v, self.to_out = projections(d_model, *sizes)

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
        """Write the source to a state, then read the state with one query per step.

        - `x`: `[batch, time, d_model]`, also the shape of the output.
        - `source`: `[batch, source, d_model]`; None = `x` itself.
        - `key_mask`: `bool [batch, source]`, True = real token; others may be NaN.
        - Returns the output; raises `ValueError` or `TypeError`, naming the argument.
        """
        return self.read(x, self.write(x if source is None else source, key_mask))

    def write(self, source: Tensor, key_mask: Tensor | None = None) -> State:
        """Write the keys and values of a source to a new state.

        - `source`, `key_mask`: as in `forward`.
        - Returns a `NormalizedState`, or for softmax a `KeyValueCache`.
        """
        dims = "batch source d_model"
        check_input(self, source, dims, self.to_k, "source")
        if key_mask is not None:
            source = without_masked(self, source, dims, key_mask)
        k, v = per_head(self.to_k(source), self.to_v(source), heads=self.heads)
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
                # Scales are relative to their maximum, which cancels in the quotient.
                if key_mask is not None:
                    scale = scale.masked_fill(~key_mask[..., None], -torch.inf)
                top = scale.amax(1, keepdim=True)
                unit = torch.where(scale == top, 0, scale - top)
                k = k * unit.exp()[..., None].to(wide)
            W = torch.einsum("bjhv,bjhk->bhvk", v, k)
        return ops.NormalizedState(W, k.sum(1))

    def read(self, x: Tensor, state: State) -> Tensor:
        """Compute the outputs for `x` from the state of a source.

        - `x`: as in `forward`.
        - `state`: the state that `write` returned.
        - Returns the output; raises as `forward`.
        """
        check_input(self, x, "batch time d_model", self.to_q)
        (q,) = per_head(self.to_q(x), heads=self.heads)
        read = self._softmax if self.feature_map is None else self._linear
        return self.to_out(read(q, state).flatten(-2))

    def _linear(self, q: Tensor, state: Any) -> Tensor:
        """Compute linear attention to the fast weights of a source."""
        batch, phi, (heads, value, key) = q.shape[0], self.feature_map, self.state_shape
        shapes = (batch, heads, value, key), (batch, heads, key)
        kind = ops.NormalizedState
        W, z = operation.check_parts("CrossAttention", state, kind, shapes, q)
        q = unit_range(phi.scaled(q)[0])  # The scale of a query cancels.
        with torch.autocast(q.device.type, enabled=False):
            y = torch.einsum("bhvk,bihk->bihv", W, q.to(W.dtype))
            total = torch.einsum("bhk,bihk->bih", z, q.to(W.dtype))
            return divide(y, total[..., None]).to(q.dtype)

    def _softmax(self, q: Tensor, state: Any) -> Tensor:
        """Compute softmax attention to the keys and values of a source."""
        layer, batch = "CrossAttention", q.shape[0]
        kind = ops.KeyValueCache
        operation.check_state(layer, state, kind)
        shape = (batch, operation.time_of(state[0], 4), *q.shape[2:])
        shapes = (shape, shape, shape[:2])
        k, v, mask = operation.check_parts(layer, state, kind, shapes, q, q.dtype)
        if k.shape[1] == 0:
            return torch.zeros_like(q)
        visible = None
        if mask is not None:
            # If all tokens are masked, a query sees all of them, as a softmax over no
            # keys is NaN. Their values are 0.
            visible = (mask | ~mask.any(1, keepdim=True))[:, None, None]
        # PyTorch's attention function expects heads before time.
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if self.training and self.attention_dropout:
            q, dropout = q * q.shape[-1] ** -0.5, self.attention_dropout
            y = attention_with_dropout(q, k, v, visible, dropout)
        else:
            y = F.scaled_dot_product_attention(q, k, v, visible)
        return y.transpose(1, 2)
