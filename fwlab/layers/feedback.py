"""The Feedback Transformer: a whole stack around one memory."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fwlab import ops
from fwlab.layers.heads import check_input, head_width

#: Weights that each layer has for itself in either form.
_BLOCK = ("norm_mixer", "to_q", "to_out", "norm_mlp", "expand", "contract")


class FeedbackBlock(nn.Module):
    """What one layer has for itself; the stack computes with it."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.norm_mixer = nn.LayerNorm(d_model, bias=False)
        self.to_q = nn.Linear(d_model, d_model, bias=False)
        self.to_out = nn.Linear(d_model, d_model, bias=False)
        self.norm_mlp = nn.LayerNorm(d_model, bias=False)
        self.expand = nn.Linear(d_model, d_ff, bias=False)
        self.contract = nn.Linear(d_ff, d_model, bias=False)


class MemoryProjection(nn.Module):
    """Memories to keys and values."""

    def __init__(self, d_model: int, normalize: bool):
        super().__init__()
        norm = nn.LayerNorm(d_model, bias=False) if normalize else None
        self.norm_memory: nn.LayerNorm | None = norm
        self.to_k = nn.Linear(d_model, d_model, bias=False)
        self.to_v = nn.Linear(d_model, d_model, bias=False)


class FeedbackTransformer(nn.Module):
    r"""A stack whose layers all attend to the memories of past steps.

    The memory of a step is a learned mean of what all layers have made
    of it (`ops.feedback` has the equations), so that also the lowest
    layer sees the highest representation of the past. It replaces a
    stack of blocks, without embeddings and without a norm at the end.

    - `d_model`: width; a multiple of `heads`.
    - `heads`: heads per layer.
    - `layers`: number of layers, at least 1.
    - `d_ff`: width inside the MLPs; None = `4 * d_model`.
    - `shared`: one key and one value projection for all layers, in place
      of one per layer: the state is so many times smaller.
    - `normalize_memory`: a layer norm between a memory and its
      projections.
    - Raises `ValueError` or `TypeError` for sizes that do not fit.

    There is no longest sequence. Steps are computed one after the other,
    each in time proportional to the number of steps before it.

    **Parameters.** `blocks` has per layer `norm_mixer`, `to_q`, `to_out`,
    `norm_mlp`, `expand` and `contract`; `memory` has per layer, or once
    when `shared`, `norm_memory`, `to_k` and `to_v`. Once: `merge`, the
    logits of the mean, 0 at the start, and `positions`, which turns the
    sines and cosines of a distance into a key, such that its entries
    start with variance 1. No linear layer or norm has a bias. All of
    them get a gradient tensor from any sequence; what attention is made
    of gets zeros from a single step, which has nothing to attend to.

    The [official code](https://github.com/facebookresearch/transformer-sequential)
    normalises the memory with the layer's own first norm; here it has a
    norm of its own, in both forms. And it has a table of learned
    positions, as long as its memory.

    Source: Fan et al. 2020 (arXiv:2002.09402).
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        layers: int,
        d_ff: int | None = None,
        shared: bool = False,
        normalize_memory: bool = True,
    ):
        super().__init__()
        width = head_width("FeedbackTransformer", d_model, heads)
        d_ff = 4 * d_model if d_ff is None else d_ff
        for name, size in (("layers", layers), ("d_ff", d_ff)):
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(
                    f"FeedbackTransformer: {name} must be an integer, not {size!r}"
                )
            if size < 1:
                raise ValueError(
                    f"FeedbackTransformer: {name} must be at least 1, not {size}"
                )
        self.d_model, self.heads, self.layers = d_model, heads, layers
        self.shared = shared
        self.blocks: Any = nn.ModuleList(
            FeedbackBlock(d_model, d_ff) for _ in range(layers)
        )
        #: One for all layers when `shared`, otherwise one per layer.
        self.memory: Any = nn.ModuleList(
            MemoryProjection(d_model, normalize_memory)
            for _ in range(1 if shared else layers)
        )
        self.merge = nn.Parameter(torch.zeros(layers + 1))
        waves = (width + 1) // 2
        self.positions = nn.Parameter(torch.randn(width, 2 * waves) / waves**0.5)

    @classmethod
    def from_transformer(
        cls, source: Any, shared: bool = False, normalize_memory: bool = True
    ) -> "FeedbackTransformer":
        """Start from a trained parallel transformer.

        - `source`: its blocks, or a model that has them as `.blocks`: each
          with `norm_mixer`, `mixer` (`to_q`, `to_k`, `to_v`, `to_out`,
          `heads`), `norm_mlp`, `expand` and `contract`, as
          `layers.Block` with `SoftmaxAttention`; without biases.
        - `shared`, `normalize_memory`: as for the class.
        - Returns a new stack; the source keeps its own weights.
        - Raises `TypeError` or `ValueError` for a source that does not
          fit, saying what is missing.

        Every weight that has a counterpart is copied. The norm of the
        memory starts as the one that stood before the keys and values;
        the shared form takes means over layers of it and of both
        projections. No counterpart have `merge`, which starts as the
        plain mean, and `positions`, which start at 0, so that scores are
        those that were trained. Embeddings, a table of positions and the
        last norm belong to the model around the stack. What is computed
        is not the same, but close enough to go on from: a step sees
        other memories, and not itself.
        """
        blocks = getattr(source, "blocks", source)
        if not isinstance(blocks, Iterable):
            raise TypeError(
                "from_transformer: source must be a model with blocks, or its blocks, "
                f"not {type(source).__name__}"
            )
        blocks = list(blocks)
        parts = [_parts(block, number) for number, block in enumerate(blocks)]
        if not parts:
            raise ValueError("from_transformer: source has no blocks")
        heads = blocks[0].mixer.heads
        d_ff, d_model = parts[0]["expand"].shape
        like = parts[0]["expand"]
        stack = cls(d_model, heads, len(blocks), d_ff, shared, normalize_memory)
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
        """

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
        """Numbers in the state of one sequence.

        A key and a value per token, and per layer unless they are shared.

        - `time`: tokens so far.
        - Returns the count.
        """
        return 2 * len(self.memory) * self.d_model * time

    def forward(
        self, x: Tensor, key_mask: Tensor | None = None, implementation: str = "auto"
    ) -> Tensor:
        """The whole sequence, step by step.

        - `x`: `[batch, time, d_model]`.
        - `key_mask`: `bool [batch, time]`, True = real token. Masked steps
          are as if they were not there, and return 0.
        - `implementation`: as for the operations of `fwlab.ops`.
        - Returns `[batch, time, d_model]`.
        - Raises `ValueError` or `TypeError` for an `x` that does not fit.
        """
        return self._run(x, None, key_mask, implementation, return_state=False)

    def prefill(
        self,
        x: Tensor,
        state: ops.FeedbackState | None = None,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
    ) -> tuple[Tensor, ops.FeedbackState]:
        """A stretch of the sequence, and the memories after it.

        - `x`: `[batch, time, d_model]`.
        - `state`: the memories before it; None = none.
        - `key_mask`, `implementation`: as in `forward`.
        - Returns `(y, state)`, `y` being `[batch, time, d_model]`.
        """
        return self._run(x, state, key_mask, implementation, return_state=True)

    def step(
        self, x: Tensor, state: ops.FeedbackState | None = None
    ) -> tuple[Tensor, ops.FeedbackState]:
        """One token; time and memory grow with the number of past tokens.

        - `x`: `[batch, d_model]`.
        - `state`: the memories before it; None = none.
        - Returns `(y, state)`, `y` being `[batch, d_model]`.
        """
        self._check(x, "batch d_model")
        y, state = self.prefill(x[:, None], state, implementation="naive")
        return y[:, 0], state

    def _run(
        self,
        x: Tensor,
        state: ops.FeedbackState | None,
        key_mask: Tensor | None,
        implementation: str,
        return_state: bool,
    ) -> Any:
        self._check(x, "batch time d_model")
        return ops.feedback(
            x,
            self.weights(),
            heads=self.heads,
            key_mask=key_mask,
            state=state,
            return_state=return_state,
            implementation=implementation,
        )

    def _check(self, x: Tensor, dims: str) -> None:
        check_input("FeedbackTransformer", "x", x, dims, self.blocks[0].to_q.weight)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, heads={self.heads}, shared={self.shared}"


def _parts(block: Any, number: int) -> dict[str, Tensor]:
    """The weights of one block of a parallel transformer, by name."""
    found: dict[str, Tensor] = {}
    mixer: Any = getattr(block, "mixer", None)
    if not hasattr(mixer, "heads"):
        raise TypeError(
            f"from_transformer: block {number} has no mixer with heads, to_q, to_k, "
            "to_v and to_out"
        )
    for name in (*_BLOCK, "to_k", "to_v"):
        module: Any = getattr(mixer if name.startswith("to_") else block, name, None)
        if not isinstance(getattr(module, "weight", None), Tensor):
            raise TypeError(f"from_transformer: block {number} has no {name}.weight")
        if getattr(module, "bias", None) is not None:
            raise ValueError(
                f"from_transformer: {name} of block {number} has a bias, which has "
                "no counterpart here"
            )
        found[name] = module.weight
    return found


def _copy(name: str, module: Any, weight: Tensor) -> None:
    if module.weight.shape != weight.shape:
        raise ValueError(
            f"from_transformer: {name} has shape {list(weight.shape)}, but "
            f"{list(module.weight.shape)} was wanted"
        )
    module.weight.copy_(weight)
