"""Define causal softmax attention, the baseline of all comparisons."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fwlab import arguments, ops
from fwlab.layers import heads as sizes
from fwlab.layers import one_token
from fwlab.layers.causal import Causal, check_input, with_state
from fwlab.layers.heads import normed, per_head, projections
from fwlab.layers.positions import angles, turned
from fwlab.ops import _operation as operation


class SoftmaxAttention(Causal):
    r"""Compute causal multi-head attention without biases (Vaswani et al. 2017).

    - `d_model`: width of the input; a multiple of `heads`.
    - `heads`: number of heads.
    - `kv_heads`: as for `FastWeightAttention`; fewer than `heads` are grouped-query
      attention (Ainslie et al. 2023).
    - `attention_dropout`: probability of dropout of the attention weights in training,
      from 0 to below 1. Above 0, training saves `time` x `time` weights per head.
    - Raises `ValueError` or `TypeError` for invalid arguments.

    Options of today's models, all off (see "Options of `SoftmaxAttention`" on the page of
    the layers):

    - `head_width`: width of a head, for any `d_model`; None = `d_model / heads`.
    - `rope`: the fraction of a head's width that is rotated by the position (rotary
      positions, Su et al. 2021), from 0 to 1. There is no maximum length.
    - `rope_base`: the longest wavelength is nearly $2 \pi$ times this number.
    - `qk_norm`: divide queries and keys by their root mean square, and multiply them by
      trained weights: for each head ("head"), or for all heads together ("all").
    - `norm_eps`: added to the mean square of `qk_norm`, 0 or more.
    - `out_gate`: multiply the output of each head by $\sigma(W_g x)$.

    Positions count only tokens that no `key_mask` hides. The state, a `KeyValueCache`,
    grows with every token. Without gradients it is a view of a buffer of up to twice
    its size, which has space for the next tokens.

        >>> SoftmaxAttention(d_model=8, heads=2).state_size(time=100)
        1600
    """

    one_token = "auto"
    skips = True

    def __init__(
        self,
        d_model: int,
        heads: int,
        kv_heads: int | None = None,
        attention_dropout: float = 0.0,
        *,
        head_width: int | None = None,
        rope: float = 0.0,
        rope_base: float = 10000.0,
        qk_norm: str | None = None,
        norm_eps: float = 1e-5,
        out_gate: bool = False,
    ):
        super().__init__()
        layer = "SoftmaxAttention"
        head_width = sizes.head_width(layer, d_model, heads, head_width)
        self.d_model, self.heads, self.head_width = d_model, heads, head_width
        self.kv_heads = sizes.shared_heads(layer, heads, kv_heads)
        self.kv_width = self.kv_heads * head_width
        arguments.dropout(layer, attention_dropout, "attention_dropout")
        self.attention_dropout = attention_dropout
        self.rope, self.rope_base = rope, rope_base
        arguments.numbers(layer, "from 0 to 1", lambda part: 0 <= part <= 1, rope=rope)
        wanted, fits = "above 0 and finite", lambda base: 0 < base < math.inf
        arguments.numbers(layer, wanted, fits, rope_base=rope_base)
        #: The number of channels that are rotated, two for each angle.
        self.turned = round(rope * head_width)
        is_even = math.isclose(self.turned, rope * head_width, rel_tol=1e-9)
        is_even = is_even and self.turned % 2 == 0
        wanted = f"rope times the width of a head, {head_width}, to be an even integer"
        arguments.require(layer, is_even, f"{wanted}, got {rope=}")
        arguments.choice(layer, (None, "head", "all"), qk_norm=qk_norm)
        self.qk_norm = qk_norm
        arguments.epsilon(layer, norm_eps=norm_eps)
        arguments.flags(layer, out_gate=out_gate)

        width = heads * head_width
        every = width, self.kv_width, self.kv_width
        self.to_q, self.to_k, self.to_v = projections(d_model, *every)
        self.to_out = nn.Linear(width, d_model, bias=False)
        self.q_norm: nn.RMSNorm | None = None
        self.k_norm: nn.RMSNorm | None = None
        if qk_norm is not None:
            q_size, k_size = (
                [n, head_width] if qk_norm == "all" else [head_width]
                for n in (heads, self.kv_heads)
            )
            self.q_norm = nn.RMSNorm(q_size, norm_eps)
            self.k_norm = nn.RMSNorm(k_size, norm_eps)
        # This layer comes last, so that no other initial value depends on the options.
        self.to_gate = nn.Linear(d_model, width, bias=False) if out_gate else None

    def state_size(self, time: int) -> int:  # type: ignore[override]
        return 2 * time * self.kv_width

    def _mix(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        """Project the input, attend to all keys so far, and project the outputs."""
        parts = self.to_q(x), self.to_k(x), self.to_v(x)
        q, k, v = per_head(*parts, width=self.head_width)
        q, k = self._with_positions(q, k, options["key_mask"], state)
        options["dropout"] = self.attention_dropout if self.training else 0.0
        y, state = with_state(ops.softmax_attention(q, k, v, state=state, **options))
        y = y.flatten(-2)
        if self.to_gate is not None:
            y = y * torch.sigmoid(self.to_gate(x))
        return self.to_out(y), state

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        check_input(self, x, "batch d_model", self.to_q)
        found = one_token.softmax_attention(self, x, state)
        return super().step(x, state) if found is None else found

    def _with_positions(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None, state: Any
    ) -> tuple[Tensor, Tensor]:
        """Normalise and rotate queries and keys `[batch, time, heads, width]`."""
        if self.q_norm is not None and self.k_norm is not None:
            kind = q.dtype
            q, k = normed(self.q_norm, q).to(kind), normed(self.k_norm, k).to(kind)
        if not self.turned:
            return q, k
        if key_mask is None:
            positions = torch.arange(q.shape[1], device=q.device)
        else:
            positions = key_mask.cumsum(1) - 1
        # Add the number of earlier real tokens, for all rows or for each row. The
        # operation raises an error later if this state is invalid.
        if isinstance(state, ops.KeyValueCache):
            past: Any = operation.time_of(state.k, 4)
            if state.mask is not None:
                past = state.mask.sum(1, keepdim=True)
            positions = positions + past
        angle = angles(positions, self.turned, self.rope_base)
        both = turned(torch.cat([q, k], 2), angle)
        q, k = both.split_with_sizes([q.shape[2], k.shape[2]], 2)
        return q, k
