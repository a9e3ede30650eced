r"""Define Transformer-XL: softmax attention to a memory of past segments.

The baseline of the fast weight papers for long texts: its segment memory
keeps the most recent tokens, and drops the oldest.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import arguments
from fwlab.layers.block import Block
from fwlab.layers.causal import Causal, is_plain
from fwlab.layers.heads import head_width, per_head, projections
from fwlab.layers.positions import sinusoids
from fwlab.ops import _operation as operation


class SegmentState(NamedTuple):
    """Hold the state of one layer, its past keys and values.

    - `memory`: `[batch, up to memory, heads, 2 * width]`, of the tokens
      before the segment.
    - `segment`: `[batch, up to segment, heads, 2 * width]`, of the segment so far.
    - `mask`: `bool [batch, memory and segment]`, True = real token; None
      as long as every token was real.
    """

    memory: Tensor
    segment: Tensor
    mask: Tensor | None


def shift_rows(scores: Tensor) -> Tensor:
    r"""Shift scores whose columns are distances, so that columns become key positions.

    Of $L$ rows, row $i$ moves left by $L - 1 - i$. To move all rows at
    once, add a column of zeros on the left and reshape to rows of another
    length (appendix B of the paper).

    - `scores`: `[..., L, K]`, column $c$ = the distance $K - 1 - c$.
    - Returns the same shape, column $j$ = key $j$, where the query of row $i$ is at
      position $K - L + i$. The scores of later keys are not valid.
    """
    L, K = scores.shape[-2:]
    wide = F.pad(scores, (1, 0)).flatten(-2)
    return wide[..., L:].unflatten(-1, (L, K))


class RelativeAttention(Causal):
    r"""Compute attention to a segment and to the segment memory before it.

    With $q_i = W_q x_i$ per head of width $d$, key $j$ gets the score

    $$\big(q_i^\top W_{k,E}\, x_j + q_i^\top W_{k,R} R_{i-j}
       + u^\top W_{k,E}\, x_j + v^\top W_{k,R} R_{i-j}\big) / \sqrt d$$

    with sinusoidal encodings $R$ of distances and trained biases $u$ (content) and $v$
    (position), which start at 0. Values do not depend on the position. Arguments and
    methods are the same as in `TransformerXL`, for one layer without norms.
    """

    codes: Tensor

    def __init__(
        self,
        d_model: int,
        heads: int,
        memory: int = 64,
        segment: int = 64,
        attention_dropout: float = 0.0,
    ):
        super().__init__()
        width = head_width("TransformerXL", d_model, heads)
        arguments.integers("TransformerXL", 0, memory=memory)
        arguments.integers("TransformerXL", 1, segment=segment)
        arguments.dropout("TransformerXL", attention_dropout, "attention_dropout")
        self.attention_dropout = attention_dropout
        self.d_model, self.heads = d_model, heads
        self.memory, self.segment = memory, segment
        self.to_q, self.to_k, self.to_v, self.to_r, self.to_out = projections(
            d_model, *[d_model] * 5
        )
        self.content_bias = nn.Parameter(torch.zeros(heads, width))
        self.position_bias = nn.Parameter(torch.zeros(heads, width))
        # The codes encode all distances within a segment and its segment memory. They
        # follow from the sizes, so they are not saved.
        codes = sinusoids(torch.arange(memory + segment), d_model)
        self.register_buffer("codes", codes, persistent=False)

    def state_size(self, time: int | None = None) -> int:
        if time is None:
            return 2 * self.d_model * (self.memory + self.segment)
        done = (time - 1) % self.segment + 1 if time else 0
        return 2 * self.d_model * (min(time - done, self.memory) + done)

    def _mix(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        """Compute attention to the segment and the segment memory of each token."""
        layer, key_mask, forms = "TransformerXL", options["key_mask"], ("auto", "naive")
        arguments.choice(layer, forms, implementation=options["implementation"])
        batch, time, _ = x.shape
        (q,) = per_head(self.to_q(x), heads=self.heads)
        new = self._keys_and_values(x)
        memory, segment, mask = self._start(state, new)
        # The indices are the start of the segment, the first new token, and the end.
        begin = start = memory.shape[1]
        past = start + segment.shape[1]
        end = past + time
        seen = later = torch.cat([memory, segment, new], 1)
        if torch.is_grad_enabled() and end - start > self.segment:
            # Later segments see the same keys and values, with gradients that flow to
            # the projections, but not to the tokens.
            again = self._keys_and_values(x.detach())
            later = torch.cat([memory, segment.detach(), again], 1)
        if key_mask is not None or mask is not None:
            both = ((mask, past), (key_mask, time))
            mask = torch.cat(
                [x.new_ones(batch, n).bool() if m is None else m for m, n in both], 1
            )
        y, first = [], 0
        for begin in range(start, end, self.segment):
            first, stop = max(begin - self.memory, 0), min(begin + self.segment, end)
            if stop > past:
                visible = torch.cat([later[:, first:begin], seen[:, begin:stop]], 1)
                queries = q[:, max(begin - past, 0) : stop - past]
                real = None if mask is None else mask[:, first:stop]
                y.append(self._attend(queries, visible, real))
        out = self.to_out(torch.cat(y, 1).flatten(-2)) if y else x * 0
        if key_mask is not None:
            out = torch.where(key_mask[..., None], out, 0)
        # The state is copied, because a view would keep the whole sequence in memory.
        after = later[:, first:begin].clone(), seen[:, begin:].clone()
        return out, SegmentState(*after, None if mask is None else mask[:, first:])

    def _start(self, state: Any, new: Tensor) -> SegmentState:
        """Check the state of an earlier call, or make an empty state for None."""
        if state is None:
            return SegmentState(new[:, :0], new[:, :0], None)
        given = "TransformerXL", state, SegmentState
        operation.check_state(*given)
        batch, _, *widths = new.shape
        memory = min(operation.time_of(state[0], 4), self.memory)
        segment = min(operation.time_of(state[1], 4), self.segment)
        shapes = [(batch, time, *widths) for time in (memory, segment)]
        shapes.append((batch, memory + segment))
        return operation.check_parts(*given, shapes, new, new.dtype)

    def _keys_and_values(self, x: Tensor) -> Tensor:
        """Project `x` to keys and values in one tensor, `[..., heads, 2 * width]`."""
        return torch.cat([*per_head(self.to_k(x), self.to_v(x), heads=self.heads)], -1)

    def _attend(self, q: Tensor, keys_values: Tensor, real: Tensor | None) -> Tensor:
        """Compute attention from each of the last steps to all keys up to that step."""
        time, count = q.shape[1], keys_values.shape[1]
        k, v = keys_values.chunk(2, -1)
        scores = torch.einsum("bihd,bjhd->bhij", q + self.content_bias, k)
        scores = scores + shift_rows(self._by_distance(q + self.position_bias, count))
        visible = scores.new_ones(time, count).bool().tril(count - time)
        if real is not None:
            # A masked query still sees itself, so that no softmax is empty.
            itself = visible & ~visible.tril(count - time - 1)
            visible = ((visible & real[:, None]) | itself)[:, None]
        scores = scores * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        weights = F.dropout(weights, self.attention_dropout, self.training)
        return torch.einsum("bhij,bjhd->bihd", weights, v)

    def _by_distance(self, q: Tensor, count: int) -> Tensor:
        """Compute position scores `[batch, heads, time, count]`, farthest key first."""
        codes = self.codes[:count].flip(0)
        if q.shape[1] > 1 or not is_plain(self.to_r):
            (r,) = per_head(self.to_r(codes), heads=self.heads)
            return torch.einsum("bihd,jhd->bhij", q, r)
        # For one query, it is cheaper to project the query than all codes.
        W: Any = self.to_r.weight
        W = W.unflatten(0, (self.heads, -1))
        return torch.einsum("bihd,hdm->bhim", q, W) @ codes.to(q.dtype).T


class TransformerXL(Causal):
    r"""Stack attention layers with segment memory (Dai et al. 2019).

    The sequence is split into segments. A token sees its own segment up to itself and,
    in every layer, the `memory` tokens before the segment. A stack of $n$ layers thus
    reaches back up to $n \cdot$ `memory` tokens. **No gradient flows from a segment
    into the representations of tokens before it**; it flows into the projections of
    their keys and values, as in the paper, unless an earlier call made them.

    - `d_model`: width of input and output; a multiple of `heads`.
    - `heads`, `layers`: heads per layer and number of layers, at least 1.
    - `memory`: tokens of segment memory, 0 or more.
    - `segment`: tokens per segment, at least 1.
    - `d_ff`, `dropout`: as for `Block`.
    - `attention_dropout`: as for `SoftmaxAttention`.
    - Raises `ValueError` or `TypeError` for invalid sizes.

    Blocks are pre-norm, each with a `RelativeAttention` and its own biases $u$ and $v$.
    There is no final norm, and no maximum sequence length. The state, a list with a
    `SegmentState` per layer, knows where its segment began. Time and memory of `step`
    stop growing once the segment memory is full.

        >>> stack = TransformerXL(8, heads=2, layers=3, memory=4, segment=2)
        >>> stack.state_size(time=5), stack.state_size(time=100)
        (240, 288)

    Source: arXiv:1901.02860, section 3 and appendix B.
    """

    first_layer = "blocks.0.expand"

    def __init__(
        self,
        d_model: int,
        heads: int,
        layers: int,
        d_ff: int | None = None,
        memory: int = 64,
        segment: int = 64,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ):
        super().__init__()
        arguments.integers("TransformerXL", 1, layers=layers)
        self.d_model = d_model
        sizes = d_model, heads, memory, segment, attention_dropout
        self.blocks: Any = nn.ModuleList(
            Block(RelativeAttention(*sizes), d_model, d_ff, dropout)
            for _ in range(layers)
        )

    def state_size(self, time: int | None = None) -> int:
        """Count the scalars in the state of one sequence, over all layers.

        - `time`: tokens so far; None = the maximum over all lengths,
          `2 * layers * d_model * (memory + segment)`.
        - Returns the count: a key and a value per layer and token.
        """
        return sum(block.mixer.state_size(time) for block in self.blocks)

    def _mix(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        """Apply all blocks to `x`, each with its own part of the state."""
        layers, return_state = len(self.blocks), options.pop("return_state")
        if not return_state:
            for block in self.blocks:
                x = block(x, **options)
            return x, None
        state = [None] * layers if state is None else state
        layer, is_list = "TransformerXL", isinstance(state, list | tuple)
        wanted = f"state to be a list of {layers} SegmentStates, one per layer, got "
        wanted += str(len(state)) if is_list else type(state).__name__
        arguments.require(layer, is_list, wanted, TypeError)
        arguments.require(layer, len(state) == layers, wanted)
        after: list[SegmentState] = []
        for block, part in zip(self.blocks, state, strict=True):
            x, part = block.prefill(x, part, **options)
            after.append(part)
        return x, after
