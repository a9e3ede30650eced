r"""Attend by a softmax to a memory of past segments: Transformer-XL.

The baseline of the fast weight papers for long texts: its segment memory
keeps the most recent tokens, and drops the oldest.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import arguments
from fwlab.layers.block import Block
from fwlab.layers.causal import Causal
from fwlab.layers.heads import head_width, plain
from fwlab.layers.positions import sinusoids
from fwlab.ops import _operation as operation


class SegmentState(NamedTuple):
    """Hold the state of one layer: keys and values, concatenated.

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
    r"""Turn columns of distances into columns of key positions.

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
    r"""Attend to a segment and to the segment memory before it.

    With $q_i = W_q x_i$ per head of width $d$, key $j$ gets the score

    $$\big(q_i^\top W_{k,E}\, x_j + q_i^\top W_{k,R} R_{i-j}
       + u^\top W_{k,E}\, x_j + v^\top W_{k,R} R_{i-j}\big) / \sqrt d$$

    with sinusoidal encodings $R$ of distances and trained biases $u$ (content) and $v$
    (position), which start at 0. Values do not depend on the position. Arguments and
    methods are those of `TransformerXL`, for one layer without norms.
    """

    codes: Tensor

    # Encodings of all distances that can occur: memory and segment together. They
    # follow from the sizes, so they are not saved.
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
        self.to_q = nn.Linear(d_model, d_model, bias=False)
        self.to_k = nn.Linear(d_model, d_model, bias=False)
        self.to_v = nn.Linear(d_model, d_model, bias=False)
        self.to_r = nn.Linear(d_model, d_model, bias=False)
        self.to_out = nn.Linear(d_model, d_model, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(heads, width))
        self.position_bias = nn.Parameter(torch.zeros(heads, width))
        codes = sinusoids(torch.arange(memory + segment), d_model)
        self.register_buffer("codes", codes, persistent=False)

    def state_size(self, time: int | None = None) -> int:
        """Count the scalars in the state of one sequence.

        - `time`: tokens so far; None = the maximum over all lengths.
        """
        if time is None:
            return 2 * self.d_model * (self.memory + self.segment)
        done = (time - 1) % self.segment + 1 if time else 0
        return 2 * self.d_model * (min(time - done, self.memory) + done)

    def _mix(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        """Attend segment by segment, each to itself and to the memory before it."""
        key_mask, names = options["key_mask"], ("auto", "naive")
        arguments.choice(
            "TransformerXL", names, implementation=options["implementation"]
        )
        batch, time, _ = x.shape
        q, new = self._per_head(self.to_q(x)), self._keys_and_values(x)
        empty = new[:, :0]
        if state is None:
            state = SegmentState(empty, empty, None)
        self._check_state(state, new)
        memory, segment, mask = state
        # What a later segment sees of a token: the same keys and values,
        # with gradients to the projections but not to the token itself.
        stopped, later = segment.detach(), new
        if torch.is_grad_enabled() and segment.shape[1] + time > self.segment:
            later = self._keys_and_values(x.detach())
        if key_mask is not None or mask is not None:
            past = memory.shape[1] + segment.shape[1]
            parts = ((mask, past), (key_mask, time))
            mask = torch.cat(
                [x.new_ones(batch, n).bool() if m is None else m for m, n in parts], 1
            )
        y, start = [], 0
        while start < time:
            if segment.shape[1] == self.segment:
                memory = torch.cat([memory, stopped], 1)
                memory = memory[:, max(memory.shape[1] - self.memory, 0) :]
                segment = stopped = empty
            stop = min(start + self.segment - segment.shape[1], time)
            segment = torch.cat([segment, new[:, start:stop]], 1)
            stopped = torch.cat([stopped, later[:, start:stop]], 1)
            visible = torch.cat([memory, segment], 1)
            real = None
            if mask is not None:
                end = mask.shape[1] - time + stop
                real = mask[:, end - visible.shape[1] : end]
            y.append(self._attend(q[:, start:stop], visible, real))
            start = stop
        if mask is not None:
            mask = mask[:, mask.shape[1] - memory.shape[1] - segment.shape[1] :]
        out = self.to_out(torch.cat(y, 1).flatten(-2)) if y else x * 0
        if key_mask is not None:
            out = torch.where(key_mask[..., None], out, 0)
        return out, SegmentState(memory, segment, mask)

    def _check_state(self, state: SegmentState, like: Tensor) -> None:
        """Check that a state has sizes that are possible for this layer."""
        layer, (batch, _, *widths) = "TransformerXL", like.shape
        operation.check_state(layer, state, SegmentState)
        memory, segment, mask = state
        for name, part, maximum in (
            ("state.memory", memory, self.memory),
            ("state.segment", segment, self.segment),
        ):
            shape = (batch, min(operation.time_of(part, 4), maximum), *widths)
            operation.check_part(layer, name, part, shape, like.dtype, like)
        if mask is not None:
            past = memory.shape[1] + segment.shape[1]
            operation.check_mask(
                layer, "state.mask", mask, like, batch=batch, past=past
            )

    def _per_head(self, x: Tensor) -> Tensor:
        """Split `[..., d_model]` into `[..., heads, width]`."""
        return x.unflatten(-1, (self.heads, -1))

    def _keys_and_values(self, x: Tensor) -> Tensor:
        """Make both in one tensor, since memory, segment and mask treat them alike."""
        return torch.cat(
            [self._per_head(self.to_k(x)), self._per_head(self.to_v(x))], -1
        )

    def _attend(self, q: Tensor, keys_values: Tensor, real: Tensor | None) -> Tensor:
        """Let the last steps attend to all: `[batch, time, heads, width]`."""
        time, count = q.shape[1], keys_values.shape[1]
        k, v = keys_values.chunk(2, -1)
        scores = torch.einsum("bihd,bjhd->bhij", q + self.content_bias, k)
        scores = scores + shift_rows(self._by_distance(q + self.position_bias, count))
        visible = scores.new_ones(time, count).bool().tril(count - time)
        if real is not None:
            # A masked query still sees itself, so that no row is empty.
            itself = visible & ~visible.tril(count - time - 1)
            visible = ((visible & real[:, None]) | itself)[:, None]
        scores = scores * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        weights = F.dropout(weights, self.attention_dropout, self.training)
        return torch.einsum("bhij,bjhd->bihd", weights, v)

    def _by_distance(self, q: Tensor, count: int) -> Tensor:
        """Compute scores by decreasing distance: `[batch, heads, time, count]`."""
        codes = self.codes[:count].flip(0)
        if q.shape[1] > 1 or not plain(self.to_r):
            r = self._per_head(self.to_r(codes))
            return torch.einsum("bihd,jhd->bhij", q, r)
        # For one query it is cheaper to project the query than the codes.
        W: Any = self.to_r.weight
        W = W.unflatten(0, (self.heads, -1))
        return torch.einsum("bihd,hdm->bhim", q, W) @ codes.to(q.dtype).T


class TransformerXL(Causal):
    r"""Stack attention layers with segment memory (Dai et al. 2019).

    The sequence is split into segments. A token sees its own segment up to itself and,
    in every layer, the `memory` tokens before the segment. A stack of $n$ layers thus
    reaches back up to $n \cdot$ `memory` tokens. **No gradient flows from a segment
    into the representations of tokens before it**; it flows into the projections of
    their keys and values, as in the paper. (For a token of an earlier call of `prefill`
    or `step`, the keys and values are constants to later segments.)

    - `d_model`: width of input and output; a multiple of `heads`.
    - `heads`, `layers`: heads per layer and number of layers, at least 1.
    - `d_ff`: width inside the MLPs; None = `4 * d_model`.
    - `memory`: tokens of segment memory, 0 or more.
    - `segment`: tokens per segment, at least 1.
    - `dropout`: as for `Block`.
    - `attention_dropout`: probability of dropout of the attention
      weights in training, from 0 to below 1.
    - Raises `ValueError` or `TypeError` for invalid sizes.

    Blocks are pre-norm, each with a `RelativeAttention` and its own biases $u$ and $v$.
    There is no final norm, and no maximum sequence length. Any mixture of `prefill` and
    `step` computes the same as one `forward` over the whole sequence: the state, a list
    with a `SegmentState` per layer, knows where its segment began. Time and memory of
    `step` stop growing once the segment memory is full.

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
        self.blocks: Any = nn.ModuleList(
            Block(
                RelativeAttention(d_model, heads, memory, segment, attention_dropout),
                d_model,
                d_ff,
                dropout,
            )
            for _ in range(layers)
        )

    def state_size(self, time: int | None = None) -> int:
        """Count the scalars in the state of one sequence, over all layers.

        Two vectors, key and value, per layer and token.

        - `time`: tokens so far; None = the maximum over all lengths,
          `2 * layers * d_model * (memory + segment)`.
        - Returns the count.
        """
        return sum(block.mixer.state_size(time) for block in self.blocks)

    def _mix(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        """Pass through the blocks, each with its own part of the state."""
        layers, return_state = len(self.blocks), options.pop("return_state")
        if not return_state:
            for block in self.blocks:
                x = block(x, **options)
            return x, None
        if state is None:
            state = [None] * layers
        if not isinstance(state, list | tuple):
            raise TypeError(
                "TransformerXL: expected state to be a list with a SegmentState per "
                f"layer, got {type(state).__name__}"
            )
        if len(state) != layers:
            raise ValueError(
                f"TransformerXL: expected state with {layers} parts, one per layer, "
                f"got {len(state)}"
            )
        after: list[SegmentState] = []
        for block, part in zip(self.blocks, state, strict=True):
            x, part = block.prefill(x, part, **options)
            after.append(part)
        return x, after
