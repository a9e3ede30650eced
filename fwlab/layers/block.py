"""The block of which models are built: a mixer and an MLP."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import arguments
from fwlab.layers.causal import Causal
from fwlab.layers.heads import check_input, run


class Block(Causal):
    """Mix over time, then over channels, each after its own norm.

    - `mixer`: a layer with `forward`, `prefill`, `step` and `state_size`
      that keeps the shape `[batch, time, d_model]`.
    - `d_model`: width of the input.
    - `d_ff`: width inside the MLP; None = `4 * d_model`.
    - `dropout`: probability of dropout in training, from 0 to below 1: of
      what the mixer and the MLP add to their input, and inside the MLP
      after the activation. Dropout of attention weights is the mixer's:
      see `SoftmaxAttention`. Fast weights and AFT compute none.
    - Raises `ValueError` for a size below 1 or a probability out of range,
      and `TypeError` for an argument of the wrong type.

    No norm and no linear layer has a bias. A block has the methods of its mixer, and
    the mixer's state is its state. The input and output of a masked step are 0.

        >>> mixer = SoftmaxAttention(d_model=8, heads=2)
        >>> Block(mixer, d_model=8)(torch.randn(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    # Two norms: each part of a pre-norm block has one before it.
    def __init__(
        self,
        mixer: nn.Module,
        d_model: int,
        d_ff: int | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        if not isinstance(mixer, nn.Module):
            raise TypeError(f"Block: expected mixer to be a layer, got {mixer!r}")
        arguments.integers("Block", 1, d_model=d_model)
        d_ff = 4 * d_model if d_ff is None else d_ff
        arguments.integers("Block", 1, d_ff=d_ff)
        arguments.dropout("Block", dropout)
        self.norm_mixer = nn.LayerNorm(d_model, bias=False)
        self.mixer: Any = mixer
        self.norm_mlp = nn.LayerNorm(d_model, bias=False)
        self.expand = nn.Linear(d_model, d_ff, bias=False)
        self.contract = nn.Linear(d_ff, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    @property
    def max_len(self) -> int | None:
        """Maximum sequence length, if the mixer has a position table."""
        return getattr(self.mixer, "max_len", None)

    # The dtype and device that inputs are compared with.
    def _like(self) -> Tensor:
        return self.expand.weight

    def state_size(self, time: int = 0) -> int:
        """Number of scalars in the state of one sequence: the mixer's.

        - `time`: tokens so far.
        - Returns the count.
        """
        return self.mixer.state_size(time)

    @property
    def packs(self) -> bool:  # type: ignore[override]
        """Whether the mixer takes `cu_seqlens`."""
        return getattr(self.mixer, "packs", False)

    @property
    def skips(self) -> bool:  # type: ignore[override]
        """Whether the mixer skips masked tokens."""
        return getattr(self.mixer, "skips", False)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        x = self._checked(x, key_mask, cu_seqlens)
        packed = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
        y = self.mixer(self.norm_mixer(x), key_mask, implementation, **packed)
        return self._mlp(x + self.dropout(y))

    def prefill(
        self,
        x: Tensor,
        state: Any = None,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        x = self._checked(x, key_mask, cu_seqlens)
        packed = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
        y, state = self.mixer.prefill(
            self.norm_mixer(x), state, key_mask, implementation, **packed
        )
        return self._mlp(x + self.dropout(y)), state

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        parts: Any = self._modules  # attributes of a module are looked up slowly
        check_input("Block", "x", x, "batch d_model", parts["expand"].weight)
        y, state = parts["mixer"].step(run(parts["norm_mixer"], x), state)
        x = x + self._dropped(y)
        h = self._dropped(F.gelu(run(parts["expand"], run(parts["norm_mlp"], x))))
        return x + self._dropped(run(parts["contract"], h)), state

    # The second half of the block, one token at a time.
    def _mlp(self, x: Tensor) -> Tensor:
        h = self._dropped(F.gelu(self.expand(self.norm_mlp(x))))
        return x + self._dropped(self.contract(h))

    # A module that does nothing takes longer than to add two tokens.
    def _dropped(self, x: Tensor) -> Tensor:
        drop: Any = self._modules["dropout"]
        return drop(x) if drop.p else x
