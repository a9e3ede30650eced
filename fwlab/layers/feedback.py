"""Stack layers around one feedback memory: the Feedback Transformer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from fwlab import arguments, ops
from fwlab.layers.causal import Causal
from fwlab.layers.heads import called_module, head_width, require
from fwlab.ops import _operation as operation
from fwlab.ops._recurrence import has_autocast
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
        q = self.to_q(self.norm_mixer(x)).unflatten(-1, (k.shape[2], -1))
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
    r"""Stack layers that all attend to the memories of past steps.

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
    first_layer = "blocks.0.to_q"

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
        means = {
            name: torch.stack([part[name] for part in parts]).mean(0)
            for name in ("norm_mixer", "to_k", "to_v")
        }
        weights = {
            f"blocks.{i}.{n}": part[n] for i, part in enumerate(parts) for n in _BLOCK
        }
        for i, part in enumerate([means] if shared else parts):
            weights |= {f"memory.{i}.{name}": part[name] for name in ("to_k", "to_v")}
            if normalize_memory:
                weights[f"memory.{i}.norm_memory"] = part["norm_mixer"]
        for name, weight in weights.items():
            # Sizes can differ if the source is not uniform.
            shape = list(stack.get_parameter(f"{name}.weight").shape)
            text = f"{name} of shape {shape}, got {list(weight.shape)}"
            require("from_transformer", ValueError, {text: list(weight.shape) == shape})
        start = {"merge": stack.merge, "positions": torch.zeros_like(stack.positions)}
        named = {f"{name}.weight": weight for name, weight in weights.items()}
        stack.load_state_dict(start | named)
        return stack

    def weights(self) -> ops.FeedbackWeights:
        """Stack the weights of all layers, as `ops.feedback` takes them.

        - Returns a `FeedbackWeights`, through which gradients flow back to the parameters.
        - Raises `ValueError` for a module that has to be called, such as one with an
          adapter.
        """
        if called := self._called_module():
            raise ValueError(
                "FeedbackTransformer: expected plain linear layers and norms, whose "
                f"weights say all, got {called}; call the stack itself, or merge the "
                "adapter first"
            )
        return self._stacked_weights()

    def _stacked_weights(self) -> ops.FeedbackWeights:
        """Stack the weights of plain modules, one tensor for all layers."""

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
        """Compute the whole stack: a step needs all layers of the one before."""
        key_mask, implementation = options["key_mask"], options["implementation"]
        # For one token it costs more to check and to stack all weights.
        if x.shape[1] == 1 and implementation == "naive" and self._is_plain(x, state):
            return self._by_calls(x, state, key_mask)
        if called := self._called_module():
            if implementation not in ("auto", "naive"):
                raise ValueError(
                    "FeedbackTransformer: expected implementation='auto' or 'naive', "
                    f"since there is {called}, which only a call step by step takes "
                    f"into account, got {implementation!r}"
                )
            return self._by_calls(x, state, key_mask)
        weights, factors = self._stacked_weights(), None
        if self.training and self.dropout.p:
            d_ff, d_model = weights.expand.shape[1:]
            count = 2 * d_model + d_ff
            factors = self.dropout(x.new_ones(*x.shape[:2], self.layers, count))
        options |= {"heads": self.heads, "factors": factors, "state": state}
        found = ops.feedback(x, weights, **options)
        return found if options["return_state"] else (found, None)

    def _is_plain(self, x: Tensor, state: Any) -> bool:
        """Return True if modules compute in the precision of the operation, unmasked."""
        mask = state.mask if isinstance(state, ops.FeedbackState) else None
        return mask is None and x.itemsize >= 4 and not has_autocast(x)

    def _called_module(self) -> str | None:
        """Name a module that is not just its weight: adapted, quantised, or with hooks."""
        return called_module([*self.blocks, *self.memory], EPS)

    def _by_calls(
        self, x: Tensor, state: ops.FeedbackState | None, key_mask: Tensor | None
    ) -> tuple[Tensor, ops.FeedbackState]:
        """Compute what `ops.feedback` does step by step, where modules are called."""
        k, v, mask = self._memories(x, state)
        if key_mask is None and mask is None:
            y, k, v = self._steps(x, k, v)
            return y, ops.FeedbackState(k, v, None)
        # Rows differ in their number of memories.
        y, rows, every = torch.zeros_like(x), [], slice(None)
        for i in range(len(x)):
            past = every if mask is None else mask[i]
            real = every if key_mask is None else key_mask[i]
            row = slice(i, i + 1)
            y_i, k_i, v_i = self._steps(x[row, real], k[row, past], v[row, past])
            y[i, real] = y_i[0]
            rows.append((k_i[0], v_i[0], torch.ones(len(k_i[0]), dtype=torch.bool)))
        k, v, mask = (
            pad_sequence([*part], batch_first=True, padding_side="left")
            for part in zip(*rows, strict=True)
        )
        return y, ops.FeedbackState(k, v, None if mask.all() else mask.to(x.device))

    def _memories(self, x: Tensor, state: Any) -> ops.FeedbackState:
        """Return a state after its checks, or an empty one."""
        layer, past = type(self).__name__, 0
        if state is not None:
            operation.check_state(layer, state, ops.FeedbackState)
            past = operation.time_of(state[0], 5)
        shape = (len(x), past, len(self.memory), self.heads, self.d_model // self.heads)
        dtype = torch.promote_types(x.dtype, torch.float32)
        if state is None:
            state = (x.new_zeros(shape, dtype=dtype),) * 2 + (None,)
        k, v, mask = state
        for name, part in (("state.k", k), ("state.v", v)):
            operation.check_part(layer, name, part, shape, dtype, x)
        if mask is not None:
            operation.check_mask(layer, "state.mask", mask, x, batch=len(x), past=past)
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
            new_k, new_v = (
                torch.stack(new, 2).unflatten(-1, (self.heads, -1)).unsqueeze(2)
            )
            k, v = torch.cat([k, new_k], 1), torch.cat([v, new_v], 1)
            y.append(states[-1])
        return (torch.stack(y, 1) if y else x), k, v


def _parts(block: Any, number: int) -> dict[str, Tensor]:
    """Return the weights of one block of a parallel transformer, by name."""
    weights: dict[str, Tensor] = {}
    mixer, where = getattr(block, "mixer", None), f"block {number}"
    text = f"{where} to have a mixer with heads, to_q, to_k, to_v and to_out"
    require("from_transformer", TypeError, {text: hasattr(mixer, "heads")})
    for name in (*_BLOCK, "to_k", "to_v"):
        module: Any = getattr(mixer if name.startswith("to_") else block, name, None)
        found = isinstance(getattr(module, "weight", None), Tensor)
        require(
            "from_transformer", TypeError, {f"{where} to have {name}.weight": found}
        )
        bare = getattr(module, "bias", None) is None
        text = f"{name} of {where} without a bias, got one; it has no counterpart here"
        require("from_transformer", ValueError, {text: bare})
        weights[name] = module.weight
    known = {id(weight) for weight in weights.values()}
    for name, weight in block.named_parameters():
        text = f"{where} without {name}, which has no counterpart here"
        require("from_transformer", ValueError, {text: id(weight) in known})
    return weights
