"""Define the Feedback Transformer, whose layers attend to one feedback memory."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from fwlab import arguments, ops
from fwlab.layers.causal import Causal, has_hooks, is_plain
from fwlab.layers.heads import head_width, projections
from fwlab.ops._recurrence import has_autocast
from fwlab.ops.feedback import memories
from fwlab.ops.feedback.weights import EPS

#: The weights that each layer has separately, even if projections are shared.
_BLOCK = ("norm_mixer", "to_q", "to_out", "norm_mlp", "expand", "contract")


class FeedbackBlock(nn.Module):
    """Compute one layer of a Feedback Transformer for one step."""

    # There are no projections to keys and values, which `MemoryProjection` computes.
    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.norm_mixer = nn.LayerNorm(d_model, bias=False)
        self.to_q, self.to_out = projections(d_model, d_model, d_model)
        self.norm_mlp = nn.LayerNorm(d_model, bias=False)
        self.expand = nn.Linear(d_model, d_ff, bias=False)
        self.contract = nn.Linear(d_ff, d_model, bias=False)

    def forward(
        self, x: Tensor, k: Tensor, v: Tensor, positions: Tensor, dropout: nn.Module
    ) -> Tensor:
        """Compute a step `[batch, d_model]`; `k`, `v`: `[batch, past, heads, key]`."""
        q = self.to_q(self.norm_mixer(x)).unflatten(-1, (k.shape[2], -1))
        z = ops.feedback_attention(q.to(k.dtype), k, v, positions.to(k.dtype))
        x = x + dropout(self.to_out(z.to(q.dtype).flatten(1)))  # Eq. f6
        h = dropout(F.gelu(self.expand(self.norm_mlp(x))))
        return x + dropout(self.contract(h))  # Eq. f7


class MemoryProjection(nn.Module):
    """Project feedback memories to keys and values."""

    # A memory is a mean of states without a norm, so it may be normalised here.
    def __init__(self, d_model: int, normalize: bool):
        super().__init__()
        norm = nn.LayerNorm(d_model, bias=False) if normalize else None
        self.norm_memory: nn.LayerNorm | None = norm
        self.to_k, self.to_v = projections(d_model, d_model, d_model)

    def forward(self, m: Tensor) -> tuple[Tensor, Tensor]:
        m = m if self.norm_memory is None else self.norm_memory(m)
        return self.to_k(m), self.to_v(m)  # Eq. f2


class FeedbackTransformer(Causal):
    r"""Stack layers that all attend to the feedback memories of past steps.

    The feedback memory of a step is a learned weighted mean of its representations in all
    layers (`ops.feedback` has the equations), so that even the lowest layer sees the
    highest representation of the past. It replaces a stack of blocks, without a final
    norm.

    - `d_model`: width; a multiple of `heads`.
    - `heads`, `layers`: heads per layer and number of layers, at least 1.
    - `d_ff`: width inside the MLPs; None = `4 * d_model`.
    - `shared`: one key and one value projection for all layers, not one per layer: the
      state is smaller by a factor of `layers`.
    - `normalize_memory`: a layer norm between a memory and its projections.
    - `dropout`: probability of dropout in training, from 0 to below 1, as in `Block`.
      There is no dropout of attention weights, and none in the GPU kernels.
    - Raises `ValueError` or `TypeError` for invalid sizes.

    There is no maximum sequence length. Steps are computed one after another, each in
    time proportional to the number of earlier steps.

    **Parameters.** Each layer has `norm_mixer`, `to_q`, `to_out`, `norm_mlp`, `expand` and
    `contract` in `blocks`. Each layer, or the whole stack if `shared`, has `norm_memory`,
    `to_k` and `to_v` in `memory`. The stack has `merge`, the logits of the mean, which
    start at 0, and `positions`, which turns the sines and cosines of a distance into a key
    whose entries start with variance 1. No linear layer or norm has a bias.

    The [official code](https://github.com/facebookresearch/transformer-sequential)
    normalises the memory with the layer's own first norm, and has a table of learned
    positions, as long as its memory.

        >>> FeedbackTransformer(d_model=8, heads=2, layers=3).state_size(time=10)
        480

    Source: Fan et al. 2020 (arXiv:2002.09402).
    """

    skips = True
    first_layer = "blocks.0.to_q"

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
        layer = "FeedbackTransformer"
        arguments.dropout(layer, dropout)
        width = head_width(layer, d_model, heads)
        d_ff = 4 * d_model if d_ff is None else d_ff
        arguments.integers(layer, 1, layers=layers, d_ff=d_ff)
        arguments.flags(layer, shared=shared, normalize_memory=normalize_memory)
        self.d_model, self.heads, self.layers = d_model, heads, layers
        self.shared = shared
        self.dropout = nn.Dropout(dropout)
        self.blocks: Any = nn.ModuleList(
            FeedbackBlock(d_model, d_ff) for _ in range(layers)
        )
        #: One projection for all layers if `shared`, otherwise one per layer.
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
        """Make a stack from the weights of a trained parallel transformer.

        - `source`: its blocks, or a model that has them as `.blocks`: `layers.Block`s with
          `SoftmaxAttention`, or others with the same parameters, and no biases.
        - `shared`, `normalize_memory`, `dropout`: as for the class.
        - Returns a new stack; the source keeps its own weights.
        - Raises `TypeError` or `ValueError` for an invalid source, saying what is missing.

        Every weight that has a counterpart is copied. The norm of the memory is a copy of
        the norm before the keys and values; the shared form averages this norm and both
        projections over layers. Two parameters have no counterpart: `merge`, which starts
        as the plain mean, and `positions`, which starts at 0, so that scores stay as they
        were trained. The new stack does not compute the same function, but is a good
        starting point: a step sees other memories, and not itself.
        """
        blocks, op = getattr(source, "blocks", source), "from_transformer"
        wanted = "source to be a model with blocks, or its blocks, got "
        wanted += type(source).__name__
        arguments.require(op, isinstance(blocks, Iterable), wanted, TypeError)
        blocks = list(blocks)
        arguments.require(op, blocks, "at least one block, got none")
        parts = [weights_of(block, number) for number, block in enumerate(blocks)]
        like = parts[0]["expand"]
        sizes = like.shape[1], blocks[0].mixer.heads, len(blocks), like.shape[0]
        stack = cls(*sizes, shared, normalize_memory, dropout).to(like)
        with torch.no_grad():
            stack.positions.zero_()
            for place, weight in stack.named_parameters():
                if place in ("merge", "positions"):
                    continue
                group, number, name, _ = place.split(".")
                name = "norm_mixer" if name == "norm_memory" else name
                found = parts[int(number)][name]
                if shared and group == "memory":
                    found = torch.stack([part[name] for part in parts]).mean(0)
                shape = [*weight.shape]  # The blocks of a source may differ in shape.
                wanted = f"{place} of shape {shape}, got {[*found.shape]}"
                arguments.require(op, [*found.shape] == shape, wanted)
                weight.copy_(found)
        return stack

    def weights(self) -> ops.FeedbackWeights:
        """Stack the weights of all layers into a tuple for `ops.feedback`.

        - Returns a `FeedbackWeights`, through which gradients flow back to the parameters.
        - Raises `ValueError` for a module that has to be called, such as one with an
          adapter.
        """
        if called := called_module([*self.blocks, *self.memory]):
            raise ValueError(
                "FeedbackTransformer: expected plain linear layers and norms, whose "
                f"weights say all, got {called}; call the stack itself with "
                "implementation='auto' or 'naive', or merge the adapter first"
            )
        weights: dict[str, Any] = {"norm_memory": None}
        for modules in (self.blocks, self.memory):
            for name in dict(modules[0].named_children()):
                parts = [getattr(module, name).weight for module in modules]
                weights[name] = torch.stack(parts)
        both = {"merge": self.merge, "positions": self.positions}
        return ops.FeedbackWeights(**both, **weights)

    def state_size(self, time: int) -> int:  # type: ignore[override]
        return 2 * len(self.memory) * self.d_model * time

    def _mix(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        """Compute the stack by `ops.feedback`, or by calling its modules."""
        key_mask, implementation = options["key_mask"], options["implementation"]
        # For one token, stacking the weights takes longer than calling the modules,
        # which requires full precision and no masks.
        one = x.shape[1] == 1 and implementation == "naive" and not has_autocast(x)
        one = one and x.itemsize >= 4 and getattr(state, "mask", None) is None
        calls = implementation in ("auto", "naive")
        if one or (calls and called_module([*self.blocks, *self.memory])):
            return self._by_calls(x, state, key_mask)
        weights, factors = self.weights(), None
        if self.training and self.dropout.p:
            d_ff, d_model = weights.expand.shape[1:]
            count = 2 * d_model + d_ff
            factors = self.dropout(x.new_ones(*x.shape[:2], self.layers, count))
        options |= {"heads": self.heads, "factors": factors, "state": state}
        found = ops.feedback(x, weights, **options)
        return found if options["return_state"] else (found, None)

    def _by_calls(self, x: Tensor, state: Any, key_mask: Any) -> tuple[Tensor, Any]:
        """Compute `ops.feedback` step by step, calling the modules of the stack."""
        k, v, mask = memories(x, state, len(self.memory), self.heads)
        if key_mask is None and mask is None:
            y, k, v = self._steps(x, k, v)
            return y, ops.FeedbackState(k, v, None)
        # Sequences differ in the number of memories, so each is computed separately.
        every = x.new_ones(len(x), x.shape[1] + k.shape[1], dtype=torch.bool)
        key_mask = every[:, : x.shape[1]] if key_mask is None else key_mask
        mask = every[:, x.shape[1] :] if mask is None else mask
        y, rows = torch.zeros_like(x), []
        for i, (real, past) in enumerate(zip(key_mask, mask, strict=True)):
            row = slice(i, i + 1)
            y_i, k_i, v_i = self._steps(x[row, real], k[row, past], v[row, past])
            y[row, real] = y_i
            rows.append((k_i[0], v_i[0], every.new_ones(len(k_i[0]))))
        k, v, mask = (
            pad_sequence([*part], batch_first=True, padding_side="left")
            for part in zip(*rows, strict=True)
        )
        return y, ops.FeedbackState(k, v, None if mask.all() else mask)

    def _steps(self, x: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the stack step by step, calling its modules; return `y`, `k`, `v`."""
        y, share = [], torch.softmax(self.merge, 0)
        for x_t in x.unbind(1):
            states = [x_t]
            for l, block in enumerate(self.blocks):
                g = 0 if self.shared else l
                x_l, memories = states[-1], (k[:, :, g], v[:, :, g])
                states.append(block(x_l, *memories, self.positions, self.dropout))
            m = torch.einsum("l,lbd->bd", share, torch.stack(states))  # Eq. f1
            new: Any = [torch.stack(memory(m)) for memory in self.memory]
            new = torch.stack(new, 2).unflatten(-1, (self.heads, -1))[:, :, None]
            k, v = torch.cat([k, new[0]], 1), torch.cat([v, new[1]], 1)
            y.append(states[-1])
        return (torch.stack(y, 1) if y else x), k, v


def called_module(blocks: Iterable[nn.Module]) -> str | None:
    """Describe a module that must be called, or return None if weights are enough.

    Modules with adapters, quantised weights, hooks or another `eps` must be called.
    """
    for block in blocks:
        if has_hooks(block):
            return f"a hook on {type(block).__name__}"
        for name, module in block.named_children():
            if not is_plain(module) or getattr(module, "eps", EPS) != EPS:
                return f"{name} of type {type(module).__name__}"
    return None


def weights_of(block: Any, number: int) -> dict[str, Tensor]:
    """Return the weights of one block of a parallel transformer, by name."""
    op, where = "from_transformer", f"block {number}"
    has_heads = hasattr(getattr(block, "mixer", None), "heads")
    wanted = f"{where} to have a mixer with heads, to_q, to_k, to_v and to_out"
    arguments.require(op, has_heads, wanted, TypeError)
    found = dict(block.named_parameters(remove_duplicate=False))
    weights = {}
    for name in (*_BLOCK, "to_k", "to_v"):
        place = ("mixer." if name.startswith("to_") else "") + f"{name}.weight"
        wanted = f"{where} to have {place}"
        arguments.require(op, place in found, wanted, TypeError)
        weights[name] = found.pop(place)
    wanted = f"{where} without {', '.join(found)}, which has no counterpart here"
    arguments.require(op, not found, wanted)
    return weights
