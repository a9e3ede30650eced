"""Multi-head softmax attention, the baseline."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fwlab import arguments, ops
from fwlab.layers import heads as sizes
from fwlab.layers.causal import Causal
from fwlab.layers.heads import check_input, normed, run, shared_heads, split_heads
from fwlab.layers.positions import angles, turned
from fwlab.ops import softmax
from fwlab.ops.call import checks


class SoftmaxAttention(Causal):
    r"""Causal multi-head attention (Vaswani et al. 2017), without biases.

    - `d_model`: width of the input; a multiple of `heads`.
    - `heads`: number of heads.
    - `kv_heads`: number of heads of keys and values; None = `heads`.
      Fewer are grouped-query attention (Ainslie et al. 2023): each is
      shared by `heads / kv_heads` consecutive heads of queries.
    - `attention_dropout`: probability of dropout of the attention
      weights in training, from 0 to below 1. Above 0, training keeps
      `time` x `time` weights per head in memory.
    - Raises `ValueError` if `heads` does not divide `d_model`, or
      `kv_heads` does not divide `heads`, or for a value out of
      range, and `TypeError` for an argument of the wrong type.

    Options of today's models, all off:

    - `head_width`: width of a head; None = `d_model / heads`. With it, `d_model`
      need not be a multiple of `heads`.
    - `rope`: the share of a head's width that is turned by the position (rotary
      positions, Su et al. 2021), from 0 to 1. Scores then depend on the distance
      of two tokens, and there is no maximum length. Channels that are not turned
      compare tokens at any distance.
    - `rope_base`: the longest wavelength is nearly $2 \pi$ times this number.
    - `qk_norm`: divide queries and keys by their root mean square, and multiply
      them by trained weights, so that scores stay small: for each head ("head",
      as in Qwen3), or for all heads together ("all", as in Olmo 2).
    - `norm_eps`: is added to the mean square there, 0 or more.
    - `out_gate`: multiply what each head reads by $\sigma(W_g x)$, so that a head
      that finds nothing can say nothing (Qwen3-Next).

    Positions count real tokens, those that no `key_mask` hides.

    Its state, a `KeyValueCache`, grows with every token. Without gradients
    it is a view of up to twice as much memory, where the next tokens go.

        >>> SoftmaxAttention(d_model=8, heads=2).state_size(time=100)
        1600
    """

    one_token = "auto"
    skips = True

    # With fewer heads for keys and values than for queries, only their projections
    # shrink.
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
        self.kv_heads = shared_heads(layer, heads, kv_heads)
        self.kv_width = self.kv_heads * head_width
        arguments.dropout(layer, attention_dropout, "attention_dropout")
        self.attention_dropout = attention_dropout
        self.rope, self.rope_base = rope, rope_base
        self._turned = _turned_width(head_width, rope, rope_base)
        arguments.choice(layer, (None, "head", "all"), qk_norm=qk_norm)
        self.qk_norm = qk_norm
        arguments.epsilon(layer, norm_eps=norm_eps)
        arguments.flags(layer, out_gate=out_gate)

        width = heads * head_width
        self.to_q = nn.Linear(d_model, width, bias=False)
        self.to_k = nn.Linear(d_model, self.kv_width, bias=False)
        self.to_v = nn.Linear(d_model, self.kv_width, bias=False)
        self.to_out = nn.Linear(width, d_model, bias=False)
        self.q_norm: nn.RMSNorm | None = None
        self.k_norm: nn.RMSNorm | None = None
        if qk_norm is not None:
            self.q_norm, self.k_norm = (
                nn.RMSNorm(
                    [n, head_width] if qk_norm == "all" else head_width, norm_eps
                )
                for n in (heads, self.kv_heads)
            )
        # Last, so that no other initial value depends on the options.
        self.to_gate = nn.Linear(d_model, width, bias=False) if out_gate else None

    def state_size(self, time: int) -> int:
        """Number of scalars in the state of one sequence.

        - `time`: tokens so far.
        - Returns `2 * time * heads * head_width`, or the share of it that
          `kv_heads` has of `heads`.
        """
        return 2 * time * self.kv_width

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        parts: Any = self._modules
        to_q = parts["to_q"]
        check_input("SoftmaxAttention", "x", x, "batch d_model", self.d_model, to_q)
        if (self.training and self.attention_dropout) or not softmax.goes_on_from(
            state, x, self.kv_heads, self.head_width
        ):
            return super().step(x, state)
        q, k, v = (run(parts[name], x) for name in ("to_q", "to_k", "to_v"))
        if q.dtype != x.dtype:  # autocast
            return super().step(x, state)
        batch, width = x.shape[0], self.head_width
        if self._turned or self.q_norm is not None:
            q, k = (part.view(batch, 1, -1, width) for part in (q, k))
            q, k = self._prepared(q, k, None, state)
        q, k, v = (part.view(batch, -1, 1, width) for part in (q, k, v))
        y, state = softmax.step(q, k, v, state)
        return run(parts["to_out"], self._gated(y.reshape(batch, -1), x)), state

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        x = self._checked(x, key_mask, cu_seqlens)
        return self._mix(x, None, key_mask, implementation, return_state=False)[0]

    def prefill(
        self,
        x: Tensor,
        state: ops.KeyValueCache | None = None,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, ops.KeyValueCache]:
        x = self._checked(x, key_mask, cu_seqlens)
        return self._mix(x, state, key_mask, implementation, return_state=True)

    def _mix(
        self,
        x: Tensor,
        state: ops.KeyValueCache | None,
        key_mask: Tensor | None,
        implementation: str,
        return_state: bool,
    ) -> tuple[Tensor, Any]:
        """`prefill`, with the state after it or None."""
        q = split_heads(self.to_q(x), self.heads)
        k, v = (
            split_heads(project(x), self.kv_heads) for project in (self.to_k, self.to_v)
        )
        q, k = self._prepared(q, k, key_mask, state)
        found: Any = ops.softmax_attention(
            q,
            k,
            v,
            dropout=self.attention_dropout if self.training else 0.0,
            key_mask=key_mask,
            state=state,
            return_state=return_state,
            implementation=implementation,
        )
        y, after = found if return_state else (found, None)
        return self.to_out(self._gated(y.flatten(-2), x)), after

    def _prepared(
        self, q: Tensor, k: Tensor, key_mask: Tensor | None, state: Any
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys `[batch, time, heads, width]`, normalised and turned."""
        if self.q_norm is not None and self.k_norm is not None:
            kind = q.dtype
            q, k = normed(self.q_norm, q).to(kind), normed(self.k_norm, k).to(kind)
        if not self._turned:
            return q, k
        if key_mask is None:
            positions = torch.arange(q.shape[1], device=q.device)
        else:
            positions = key_mask.cumsum(1) - 1
        angle = angles(positions + _tokens(state), self._turned, self.rope_base)
        both = turned(torch.cat([q, k], 2), angle)
        q, k = both.split_with_sizes([q.shape[2], k.shape[2]], 2)
        return q, k

    def _gated(self, y: Tensor, x: Tensor) -> Tensor:
        """What the heads read, side by side, after the gate."""
        if self.to_gate is None:
            return y
        return y * torch.sigmoid(run(self.to_gate, x))


def _turned_width(head_width: int, rope: float, rope_base: float) -> int:
    """The number of channels that are turned; raises unless they form pairs."""
    layer = "SoftmaxAttention"
    for name, value in (("rope", rope), ("rope_base", rope_base)):
        if not arguments.number(value):
            raise TypeError(f"{layer}: expected {name} to be a number, got {value!r}")
    if not 0 <= rope <= 1:
        raise ValueError(f"{layer}: expected rope from 0 to 1, got {rope!r}")
    if not 0 < rope_base < math.inf:
        raise ValueError(
            f"{layer}: expected rope_base to be above 0 and finite, got {rope_base!r}"
        )
    wide = round(rope * head_width)
    if wide % 2 or not math.isclose(wide, rope * head_width, rel_tol=1e-9):
        raise ValueError(
            f"{layer}: expected rope times the width of a head, {head_width}, to be "
            f"an even integer, got rope={rope!r}"
        )
    return wide


def _tokens(state: Any) -> Any:
    """How many real tokens a state holds: a number, or `[batch, 1]`.

    The operation refuses later what is no state, and says so better.
    """
    if not isinstance(state, ops.KeyValueCache):
        return 0
    if state.mask is None:
        return checks.time_of(state.k, 4)
    return state.mask.sum(1, keepdim=True)
