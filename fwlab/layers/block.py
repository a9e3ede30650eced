"""Define the block of a model: a sequence layer (mixer) and an MLP."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fwlab import arguments
from fwlab.layers.causal import Causal, check_input
from fwlab.layers.one_token import call

#: The names of the norms and of the MLPs of a block.
NORMS, MLPS = ("layer", "rms"), ("gelu", "swiglu")


class Block(Causal):
    r"""Apply a sequence layer (mixer) and an MLP, each with a norm and a residual sum.

    - `mixer`: a layer with `forward`, `prefill`, `step` and `state_size`
      that keeps the shape `[batch, time, d_model]`.
    - `d_model`: width of the input.
    - `d_ff`: width inside the MLP; None = `4 * d_model`, and two thirds of that
      for "swiglu", which then has as many weights.
    - `dropout`: probability of dropout in training, from 0 to below 1, for the outputs
      of the mixer and the MLP, and inside the MLP after the activation. The mixer may
      also drop attention weights.
    - `norm`: "layer", or "rms", which does not subtract the mean (Zhang and Sennrich 2019).
    - `mlp`: "gelu", or "swiglu" (Shazeer 2020): $W_2 (\mathrm{SiLU}(W_g x) \odot W_1
      x)$, where $W_g$ is `gate`.
    - `norm_eps`: is added to the variance or mean square in the norms, 0 or more.
    - `post_norm`: normalise the outputs of the mixer and the MLP before they are
      added, instead of their inputs (Olmo 2).
    - Raises `ValueError` for a size below 1 or a value out of range,
      and `TypeError` for an argument of the wrong type.

    No norm and no linear layer has a bias. A block has the methods of its mixer, and
    the mixer's state is its state. The input and output of a masked step are 0.

        >>> mixer = SoftmaxAttention(d_model=8, heads=2)
        >>> Block(mixer, d_model=8)(torch.randn(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    first_layer = "expand"

    def __init__(
        self,
        mixer: nn.Module,
        d_model: int,
        d_ff: int | None = None,
        dropout: float = 0.0,
        *,
        norm: str = "layer",
        mlp: str = "gelu",
        norm_eps: float = 1e-5,
        post_norm: bool = False,
    ):
        super().__init__()
        if not isinstance(mixer, nn.Module):
            raise TypeError(f"Block: expected mixer to be a layer, got {mixer!r}")
        arguments.integers("Block", 1, d_model=d_model)
        arguments.choice("Block", NORMS, norm=norm)
        arguments.choice("Block", MLPS, mlp=mlp)
        arguments.epsilon("Block", norm_eps=norm_eps)
        arguments.flags("Block", post_norm=post_norm)
        d_ff = usual_d_ff(d_model, mlp) if d_ff is None else d_ff
        arguments.integers("Block", 1, d_ff=d_ff)
        arguments.dropout("Block", dropout)
        self.d_model, self.post_norm = d_model, post_norm
        self.norm_mixer = new_norm(norm, d_model, norm_eps)
        self.mixer: Any = mixer
        self.norm_mlp = new_norm(norm, d_model, norm_eps)
        self.expand = nn.Linear(d_model, d_ff, bias=False)
        self.contract = nn.Linear(d_ff, d_model, bias=False)
        self.gate = nn.Linear(d_model, d_ff, bias=False) if mlp == "swiglu" else None
        self.dropout = nn.Dropout(dropout)

    @property
    def max_len(self) -> int | None:
        """Return the maximum sequence length of the mixer; None = no maximum."""
        return getattr(self.mixer, "max_len", None)

    @property
    def packs(self) -> bool:  # type: ignore[override]
        """Return True if the mixer takes `cu_seqlens`."""
        return getattr(self.mixer, "packs", False)

    @property
    def skips(self) -> bool:  # type: ignore[override]
        """Return True if the mixer skips masked tokens."""
        return getattr(self.mixer, "skips", False)

    def state_size(self, time: int = 0) -> int:
        return self.mixer.state_size(time)

    def _mix(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        """Apply the mixer to the sequence, then the MLP to each token."""
        return_state = options.pop("return_state")
        # These are passed by position, as a user's mixer may have other names.
        given = options.pop("key_mask"), options.pop("implementation")
        if options.get("cu_seqlens") is None:
            options.pop("cu_seqlens", None)  # Not every mixer takes this argument.
        h = x if self.post_norm else call(self.norm_mixer, x)
        if return_state:
            y, state = self.mixer.prefill(h, state, *given, **options)
        else:
            y = self.mixer(h, *given, **options)
        return self._mix_channels(self._add(x, y, self.norm_mixer)), state

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        check_input(self, x, "batch d_model", self.expand)
        h = x if self.post_norm else call(self.norm_mixer, x)
        y, state = self.mixer.step(h, state)
        return self._mix_channels(self._add(x, y, self.norm_mixer)), state

    def _mix_channels(self, x: Tensor) -> Tensor:
        """Add the output of the MLP to its input."""
        h = x if self.post_norm else call(self.norm_mlp, x)
        if self.gate is None:
            wide = F.gelu(call(self.expand, h))
        else:
            wide = F.silu(call(self.gate, h)) * call(self.expand, h)
        return self._add(x, call(self.contract, self._drop(wide)), self.norm_mlp)

    def _add(self, x: Tensor, y: Tensor, norm: nn.Module) -> Tensor:
        """Add the output `y` of the mixer or the MLP to its input `x`, with dropout."""
        return x + self._drop(call(norm, y) if self.post_norm else y)

    def _drop(self, x: Tensor) -> Tensor:
        """Apply dropout; skip the module if its probability is 0, which saves time."""
        return self.dropout(x) if self.dropout.p else x


def new_norm(norm: str, d_model: int, eps: float) -> nn.Module:
    """Make a layer norm or an RMS norm, without a bias."""
    if norm == "layer":
        return nn.LayerNorm(d_model, eps, bias=False)
    return nn.RMSNorm(d_model, eps)


def usual_d_ff(d_model: int, mlp: str) -> int:
    """Return the hidden width of an MLP that has `8 * d_model**2` weights."""
    return 4 * d_model if mlp == "gelu" else round(8 * d_model / 3)
