"""Multi-head softmax attention, the baseline."""

from typing import Any

from torch import Tensor, nn

from fwlab import arguments, ops
from fwlab.layers.causal import Causal
from fwlab.layers.heads import (
    check_input,
    head_width,
    run,
    shared_heads,
    split_heads,
)
from fwlab.ops import softmax


class SoftmaxAttention(Causal):
    """Causal multi-head attention (Vaswani et al. 2017), without biases.

    - `d_model`: width of the input; a multiple of `heads`.
    - `heads`: number of heads.
    - `kv_heads`: number of heads of keys and values; None = `heads`.
      Fewer are grouped-query attention (Ainslie et al. 2023): each is
      shared by `heads / kv_heads` consecutive heads of queries.
    - `attention_dropout`: probability of dropout of the attention
      weights in training, from 0 to below 1. Above 0, training keeps
      `time` x `time` weights per head in memory.
    - Raises `ValueError` if `heads` does not divide `d_model`, or
      `kv_heads` does not divide `heads`, or for a probability out of
      range, and `TypeError` for an argument of the wrong type.

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
    ):
        super().__init__()
        width = head_width("SoftmaxAttention", d_model, heads)
        self.d_model, self.heads = d_model, heads
        self.kv_heads = shared_heads("SoftmaxAttention", heads, kv_heads)
        self.kv_width = self.kv_heads * width
        arguments.dropout("SoftmaxAttention", attention_dropout, "attention_dropout")
        self.attention_dropout = attention_dropout
        self.to_q = nn.Linear(d_model, d_model, bias=False)
        self.to_k = nn.Linear(d_model, self.kv_width, bias=False)
        self.to_v = nn.Linear(d_model, self.kv_width, bias=False)
        self.to_out = nn.Linear(d_model, d_model, bias=False)

    def state_size(self, time: int) -> int:
        """Number of scalars in the state of one sequence.

        - `time`: tokens so far.
        - Returns `2 * time * d_model`, or the share of it that `kv_heads`
          has of `heads`.
        """
        return 2 * time * self.kv_width

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        parts: Any = self._modules
        like = parts["to_q"].weight
        check_input("SoftmaxAttention", "x", x, "batch d_model", like)
        width = self.d_model // self.heads
        if (self.training and self.attention_dropout) or not softmax.goes_on_from(
            state, x, self.kv_heads, width
        ):
            return super().step(x, state)
        q, k, v = (run(parts[name], x) for name in ("to_q", "to_k", "to_v"))
        if q.dtype != x.dtype:  # autocast
            return super().step(x, state)
        batch = x.shape[0]
        q = q.view(batch, self.heads, 1, width)
        k, v = (part.view(batch, self.kv_heads, 1, width) for part in (k, v))
        y, state = softmax.step(q, k, v, state)
        return run(parts["to_out"], y.reshape(batch, -1)), state

    def prefill(
        self,
        x: Tensor,
        state: ops.KeyValueCache | None = None,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, ops.KeyValueCache]:
        x = self._checked(x, key_mask, cu_seqlens)
        q = split_heads(self.to_q(x), self.heads)
        k, v = (
            split_heads(project(x), self.kv_heads) for project in (self.to_k, self.to_v)
        )
        y, state = ops.softmax_attention(
            q,
            k,
            v,
            dropout=self.attention_dropout if self.training else 0.0,
            key_mask=key_mask,
            state=state,
            return_state=True,
            implementation=implementation,
        )
        return self.to_out(y.flatten(-2)), state
