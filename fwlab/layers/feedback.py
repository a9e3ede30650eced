"""The Feedback Transformer: a whole stack around one feedback memory."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from fwlab import arguments, ops
from fwlab.layers.causal import Causal
from fwlab.layers.heads import head_width, plain, split_heads, watched
from fwlab.ops.call import checks
from fwlab.ops.feedback.weights import EPS

#: Weights that every layer has of its own, in both forms.
_BLOCK = ("norm_mixer", "to_q", "to_out", "norm_mlp", "expand", "contract")


class FeedbackBlock(nn.Module):
    """Compute one layer of a step; the stack may use its weights instead."""

    # No projections to keys and values: those of all layers come from the memory.
    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.norm_mixer = nn.LayerNorm(d_model, bias=False)
        self.to_q = nn.Linear(d_model, d_model, bias=False)
        self.to_out = nn.Linear(d_model, d_model, bias=False)
        self.norm_mlp = nn.LayerNorm(d_model, bias=False)
        self.expand = nn.Linear(d_model, d_ff, bias=False)
        self.contract = nn.Linear(d_ff, d_model, bias=False)

    def forward(
        self, x: Tensor, k: Tensor, v: Tensor, positions: Tensor, dropout: nn.Module
    ) -> Tensor:
        """`x`: `[batch, d_model]`, `k`, `v`: `[batch, past, heads, key]`."""
        q = split_heads(self.to_q(self.norm_mixer(x)), k.shape[2])
        z = ops.feedback_attention(q.to(k.dtype), k, v, positions.to(k.dtype))
        x = x + dropout(self.to_out(z.to(q.dtype).flatten(1)))  # Eq. f6
        h = dropout(F.gelu(self.expand(self.norm_mlp(x))))
        return x + dropout(self.contract(h))  # Eq. f7


class MemoryProjection(nn.Module):
    """Project feedback memories to keys and values."""

    # A memory is a mean of states before any norm, so it may get one here.
    def __init__(self, d_model: int, normalize: bool):
        super().__init__()
        norm = nn.LayerNorm(d_model, bias=False) if normalize else None
        self.norm_memory: nn.LayerNorm | None = norm
        self.to_k = nn.Linear(d_model, d_model, bias=False)
        self.to_v = nn.Linear(d_model, d_model, bias=False)

    def forward(self, m: Tensor) -> tuple[Tensor, Tensor]:
        if self.norm_memory is not None:
            m = self.norm_memory(m)
        return self.to_k(m), self.to_v(m)  # Eq. f2


class FeedbackTransformer(Causal):
    r"""A stack whose layers all attend to the memories of past steps.

    The feedback memory of a step is a learned weighted mean of the representations of
    that step in all layers (`ops.feedback` has the equations), so that even the lowest
    layer sees the highest representation of the past. This replaces a stack of blocks,
    without embeddings and without a final norm.

    - `d_model`: width; a multiple of `heads`.
    - `heads`: heads per layer.
    - `layers`: number of layers, at least 1.
    - `d_ff`: width inside the MLPs; None = `4 * d_model`.
    - `shared`: one key and one value projection for all layers, instead
      of one per layer: the state is smaller by a factor of `layers`.
    - `normalize_memory`: a layer norm between a memory and its projections.
    - `dropout`: probability of dropout in training, from 0 to below 1, as in `Block`:
      of what the attention and the MLP of each layer add to their input, and inside the
      MLP. There is no dropout of attention weights, and none in the GPU kernels.
    - Raises `ValueError` or `TypeError` for invalid sizes.

    There is no maximum sequence length. Steps are computed one after the
    other, each in time proportional to the number of steps before it.

    **Parameters.** Each layer has `norm_mixer`, `to_q`, `to_out`, `norm_mlp`, `expand`
    and `contract` in `blocks`. Each layer, or the whole stack if `shared`, has
    `norm_memory`, `to_k` and `to_v` in `memory`. The stack has `merge`, the logits of
    the mean, which start at 0, and `positions`, which turns the sines and cosines of a
    distance into a key whose entries start with variance 1. No linear layer or norm has
    a bias. Every parameter gets a gradient from any sequence; for a single step, which
    has nothing to attend to, the gradients of the attention parameters are zero.

    The [official code](https://github.com/facebookresearch/transformer-sequential)
    normalises the memory with the layer's own first norm; here the memory
    has a norm of its own, in both forms. The official code also has a
    table of learned positions, as long as its memory.

        >>> FeedbackTransformer(d_model=8, heads=2, layers=3).state_size(time=10)
        480

    Source: Fan et al. 2020 (arXiv:2002.09402).
    """

    skips = True

    # At the start every state has the same share in a memory: the logits in `merge` are
    # 0. The entries of `positions` are scaled by their number, so that position keys
    # start with variance 1.
    def __init__(
        self,
        d_model: int,
        heads: int,
        layers: int,
        d_ff: int | None = None,
        shared: bool = False,
        normalize_memory: bool = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        arguments.dropout("FeedbackTransformer", dropout)
        width = head_width("FeedbackTransformer", d_model, heads)
        d_ff = 4 * d_model if d_ff is None else d_ff
        arguments.integers("FeedbackTransformer", 1, layers=layers, d_ff=d_ff)
        either = {"shared": shared, "normalize_memory": normalize_memory}
        arguments.flags("FeedbackTransformer", **either)
        self.d_model, self.heads, self.layers = d_model, heads, layers
        self.shared = shared
        self.dropout = nn.Dropout(dropout)
        self.blocks: Any = nn.ModuleList(
            FeedbackBlock(d_model, d_ff) for _ in range(layers)
        )
        #: One for all layers if `shared`, otherwise one per layer.
        self.memory: Any = nn.ModuleList(
            MemoryProjection(d_model, normalize_memory)
            for _ in range(1 if shared else layers)
        )
        self.merge = nn.Parameter(torch.zeros(layers + 1))
        waves = (width + 1) // 2
        self.positions = nn.Parameter(torch.randn(width, 2 * waves) / waves**0.5)

    @classmethod
    def from_transformer(
        cls,
        source: Any,
        shared: bool = False,
        normalize_memory: bool = True,
        dropout: float = 0.0,
    ) -> "FeedbackTransformer":
        """Start from a trained parallel transformer.

        - `source`: its blocks, or a model that has them as `.blocks`.
          Each has `norm_mixer`, `mixer` (with `to_q`, `to_k`, `to_v`,
          `to_out` and `heads`), `norm_mlp`, `expand` and `contract`, as
          `layers.Block` with `SoftmaxAttention`, and no biases.
        - `shared`, `normalize_memory`, `dropout`: as for the class.
        - Returns a new stack; the source keeps its own weights.
        - Raises `TypeError` or `ValueError` for an invalid source, saying
          what is missing.

        Every weight that has a counterpart is copied. The norm of the memory is a copy
        of the norm before the keys and values; the shared form averages this norm and
        both projections over layers. Two parameters have no counterpart: `merge`, which
        starts as the plain mean, and `positions`, which starts at 0, so that scores
        stay as they were trained. Embeddings, a position table and the final norm
        belong to the model around the stack. The new stack does not compute the same
        function, but is a good starting point: a step sees other memories, and not
        itself.
        """
        blocks = getattr(source, "blocks", source)
        if not isinstance(blocks, Iterable):
            raise TypeError(
                "from_transformer: expected source to be a model with blocks, or its "
                f"blocks, got {type(source).__name__}"
            )
        blocks = list(blocks)
        parts = [_parts(block, number) for number, block in enumerate(blocks)]
        if not parts:
            raise ValueError("from_transformer: expected at least one block, got none")
        heads = blocks[0].mixer.heads
        d_ff, d_model = parts[0]["expand"].shape
        like = parts[0]["expand"]
        options = (shared, normalize_memory, dropout)
        stack = cls(d_model, heads, len(blocks), d_ff, *options)
        stack = stack.to(device=like.device, dtype=like.dtype)
        with torch.no_grad():
            stack.positions.zero_()
            for block, part in zip(stack.blocks, parts, strict=True):
                for name in _BLOCK:
                    _copy(name, getattr(block, name), part[name])
            means = {
                name: torch.stack([part[name] for part in parts]).mean(0)
                for name in ("norm_mixer", "to_k", "to_v")
            }
            origins = [means] if shared else parts
            for memory, part in zip(stack.memory, origins, strict=True):
                _copy("to_k", memory.to_k, part["to_k"])
                _copy("to_v", memory.to_v, part["to_v"])
                if memory.norm_memory is not None:
                    _copy("norm_mixer", memory.norm_memory, part["norm_mixer"])
        return stack

    def weights(self) -> ops.FeedbackWeights:
        """The weights of all layers, as `ops.feedback` takes them.

        - Returns a `FeedbackWeights`, through which gradients flow back
          to the parameters.
        - Raises `ValueError` for a module that has to be called, such as one with an
          adapter.
        """
        if called := self._called():
            raise ValueError(
                "FeedbackTransformer: expected plain linear layers and norms, whose "
                f"weights say all, got {called}; call the stack itself, or merge the "
                "adapter first"
            )

        # One tensor for all layers: the operation loops over it.
        def stacked(modules: Any, name: str) -> Tensor:
            return torch.stack([getattr(m, name).weight for m in modules])

        normalized = self.memory[0].norm_memory is not None
        return ops.FeedbackWeights(
            merge=self.merge,
            positions=self.positions,
            norm_memory=stacked(self.memory, "norm_memory") if normalized else None,
            **{name: stacked(self.blocks, name) for name in _BLOCK},
            **{name: stacked(self.memory, name) for name in ("to_k", "to_v")},
        )

    def state_size(self, time: int) -> int:
        """Number of scalars in the state of one sequence.

        A key and a value per token; without `shared`, per layer, too.

        - `time`: tokens so far.
        - Returns the count.
        """
        return 2 * len(self.memory) * self.d_model * time

    def _first(self) -> nn.Module:
        return self.blocks[0].to_q

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        x = self._checked(x, key_mask, cu_seqlens)
        return self._run(x, None, key_mask, implementation, return_state=False)

    def prefill(
        self,
        x: Tensor,
        state: ops.FeedbackState | None = None,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, ops.FeedbackState]:
        x = self._checked(x, key_mask, cu_seqlens)
        return self._run(x, state, key_mask, implementation, return_state=True)

    # The whole stack is one operation: a step needs all layers of the one before.
    def _run(
        self,
        x: Tensor,
        state: ops.FeedbackState | None,
        key_mask: Tensor | None,
        implementation: str,
        return_state: bool,
    ) -> Any:
        if called := self._called():
            if implementation not in ("auto", "naive"):
                raise ValueError(
                    "FeedbackTransformer: expected implementation='auto' or 'naive', "
                    f"since there is {called}, which only a call step by step takes "
                    f"into account, got {implementation!r}"
                )
            y, state = self._by_calls(x, state, key_mask)
            return (y, state) if return_state else y
        weights, factors = self.weights(), None
        if self.training and self.dropout.p:
            d_ff, d_model = weights.expand.shape[1:]
            count = 2 * d_model + d_ff
            ones = x.new_ones(*x.shape[:2], self.layers, count)
            factors = self.dropout(ones)
        return ops.feedback(
            x,
            weights,
            heads=self.heads,
            factors=factors,
            key_mask=key_mask,
            state=state,
            return_state=return_state,
            implementation=implementation,
        )

    def _called(self) -> str | None:
        """A module that is not just its weight: adapted, quantised, or with hooks."""
        for block in (*self.blocks, *self.memory):
            if watched(block):
                return f"a hook on {type(block).__name__}"
            for name, module in block.named_children():
                if not plain(module) or getattr(module, "eps", EPS) != EPS:
                    return f"{name} of type {type(module).__name__}"
        return None

    def _by_calls(
        self, x: Tensor, state: ops.FeedbackState | None, key_mask: Tensor | None
    ) -> tuple[Tensor, ops.FeedbackState]:
        """What `ops.feedback` computes, step by step, where modules are called."""
        k, v, mask = self._memories(x, state)
        if key_mask is None and mask is None:
            y, k, v = self._steps(x, k, v)
            return y, ops.FeedbackState(k, v, None)
        # Rows differ in their number of memories.
        y, rows, all_of = torch.zeros_like(x), [], slice(None)
        for i in range(len(x)):
            past = all_of if mask is None else mask[i]
            real = all_of if key_mask is None else key_mask[i]
            steps = self._steps(
                x[i : i + 1, real], k[i : i + 1, past], v[i : i + 1, past]
            )
            y[i, real], *memories = (part[0] for part in steps)
            rows.append((*memories, torch.ones_like(memories[0][:, 0, 0, 0]).bool()))
        k, v, mask = (
            pad_sequence([*part], batch_first=True, padding_side="left")
            for part in zip(*rows, strict=True)
        )
        return y, ops.FeedbackState(k, v, None if mask.all() else mask)

    def _memories(self, x: Tensor, state: Any) -> ops.FeedbackState:
        """A state after its checks, or none."""
        layer, past = type(self).__name__, 0
        if state is not None:
            checks.state_kind(layer, state, ops.FeedbackState)
            past = checks.time_of(state[0], 5)
        shape = (len(x), past, len(self.memory), self.heads, self.d_model // self.heads)
        dtype = torch.promote_types(x.dtype, torch.float32)
        if state is None:
            state = (x.new_zeros(shape, dtype=dtype),) * 2 + (None,)
        k, v, mask = state
        for name, part in (("state.k", k), ("state.v", v)):
            checks.state_part(layer, name, part, shape, dtype, x)
        if mask is not None:
            checks.mask(layer, "state.mask", mask, x, batch=len(x), past=past)
        return ops.FeedbackState(k, v, mask)

    def _steps(self, x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute every layer of a step, then its memory, step by step."""
        y, share = [], torch.softmax(self.merge, 0)
        for x_t in x.unbind(1):
            states = [x_t]
            for l, block in enumerate(self.blocks):
                g = 0 if self.shared else l
                x_l, memories = states[-1], (k[:, :, g], v[:, :, g])
                states.append(block(x_l, *memories, self.positions, self.dropout))
            m = torch.einsum("l,lbd->bd", share, torch.stack(states))  # Eq. f1
            new = [torch.stack(memory(m)) for memory in self.memory]
            new_k, new_v = split_heads(torch.stack(new, 2), self.heads).unsqueeze(2)
            k, v = torch.cat([k, new_k], 1), torch.cat([v, new_v], 1)
            y.append(states[-1])
        return (torch.stack(y, 1) if y else x), k, v

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, heads={self.heads}, shared={self.shared}"


def _parts(block: Any, number: int) -> dict[str, Tensor]:
    """The weights of one block of a parallel transformer, by name."""
    weights: dict[str, Tensor] = {}
    mixer: Any = getattr(block, "mixer", None)
    if not hasattr(mixer, "heads"):
        raise TypeError(
            f"from_transformer: expected block {number} to have a mixer with heads, "
            "to_q, to_k, to_v and to_out"
        )
    for name in (*_BLOCK, "to_k", "to_v"):
        module: Any = getattr(mixer if name.startswith("to_") else block, name, None)
        if not isinstance(getattr(module, "weight", None), Tensor):
            raise TypeError(
                f"from_transformer: expected block {number} to have {name}.weight"
            )
        if getattr(module, "bias", None) is not None:
            raise ValueError(
                f"from_transformer: expected {name} of block {number} without a bias, "
                "got one; it has no counterpart here"
            )
        weights[name] = module.weight
    known = {id(weight) for weight in weights.values()}
    for name, weight in (
        block.named_parameters() if isinstance(block, nn.Module) else ()
    ):
        if id(weight) not in known:
            raise ValueError(
                f"from_transformer: expected block {number} without {name}, which has "
                "no counterpart here"
            )
    return weights


# Sizes can differ if the source is not uniform: the error names the weight.
def _copy(name: str, module: Any, weight: Tensor) -> None:
    if module.weight.shape != weight.shape:
        raise ValueError(
            f"from_transformer: expected {name} of shape {list(module.weight.shape)}, "
            f"got {list(weight.shape)}"
        )
    module.weight.copy_(weight)
