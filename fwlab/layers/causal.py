"""Give all causal layers one `forward`, `prefill` and `step`."""

from typing import Any

import torch
from torch import Tensor, nn

from fwlab.ops import _operation as operation


class Causal(nn.Module):
    """Mix tokens so that none sees a later one.

    A layer defines `_mix`. Any mixture of `prefill` and `step` gives what `forward`
    gives for the whole sequence.
    """

    #: Whether `forward` and `prefill` take `cu_seqlens`.
    packs = False
    #: Whether later calls go on as if masked tokens of `prefill` had not been there:
    #: no position, distance or window counts them.
    skips = False
    #: The implementation for a single token.
    one_token = "naive"
    #: The dimensions of an input.
    dims = "batch time d_model"
    #: Where the linear layer is whose weights have the dtype and device of inputs.
    first_layer = "to_q"
    d_model: int

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Process a whole sequence.

        - `x`: `[batch, time, d_model]`.
        - `key_mask`: `bool [batch, time]`, True = real token. Masked steps are skipped,
          and their output is 0.
        - `implementation`: as for the operations of `fwlab.ops`.
        - `cu_seqlens`: integers `[documents + 1]` from 0 to `time`, the borders of packed
          documents: none of them sees another one. The batch is then 1. Only layers with
          `packs` take it.
        - Returns `[batch, time, d_model]`.
        - Raises `ValueError` or `TypeError`, naming the argument.
        """
        x, options = self._check(x, key_mask, implementation, cu_seqlens)
        return self._mix(x, None, return_state=False, **options)[0]

    def prefill(
        self,
        x: Tensor,
        state: Any = None,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Process part of a sequence, and return the state after it.

        - `state`: what an earlier call returned; None = start of sequence.
        - `x`, `key_mask`, `implementation`, `cu_seqlens`: as in `forward`. With
          `cu_seqlens`, a state has one entry for each document.
        - Returns `(y, state)`, `y` of shape `[batch, time, d_model]`.
        - Raises `ValueError` or `TypeError`, naming the argument; `ValueError` if the
          layer is not causal.
        """
        x, options = self._check(x, key_mask, implementation, cu_seqlens)
        return self._mix(x, state, return_state=True, **options)

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Process one token.

        - `x`: `[batch, d_model]`.
        - `state`: what an earlier call returned; None = start of sequence.
        - Returns `(y, state)`, `y` of shape `[batch, d_model]`.
        """
        first = self.get_submodule(self.first_layer)
        layer, dims = type(self).__name__, "batch d_model"
        check_input(layer, "x", x, dims, self.d_model, first)
        options = {"key_mask": None, "implementation": self.one_token}
        y, state = self._mix(x.unsqueeze(1), state, return_state=True, **options)
        return y.squeeze(1), state

    def state_size(self, time: int = 0) -> int:
        """Count the scalars in the state of one sequence.

        - `time`: tokens so far; without effect where the state has a constant size.
        - Returns the count, over all heads and layers. `AFTConv2d` has no state, and
          raises `NotImplementedError`.
        """
        raise NotImplementedError

    def _mix(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        """Mix tokens that are checked; masked ones are 0.

        - `options`: `return_state`, `key_mask`, `implementation` and, for layers with
          `packs`, perhaps `cu_seqlens`: what an operation takes.
        - Returns `y` and the state after it, None if it was not asked for.
        """
        raise NotImplementedError

    def _check(
        self,
        x: Tensor,
        key_mask: Tensor | None,
        implementation: str,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return `x` with 0 in masked tokens, which may hold NaN, and other options."""
        layer, first = type(self).__name__, self.get_submodule(self.first_layer)
        check_input(layer, "x", x, self.dims, self.d_model, first)
        options = {"key_mask": key_mask, "implementation": implementation}
        if self.packs:
            options["cu_seqlens"] = cu_seqlens
        if cu_seqlens is not None:
            if not self.packs:
                raise ValueError(
                    f"{layer}: expected no cu_seqlens, since this layer cannot keep "
                    "packed documents apart"
                )
            operation.check_borders(layer, cu_seqlens, x)
        if key_mask is not None:
            x = without_masked(layer, x, self.dims, key_mask)
        return x, options


def check_input(
    layer: str, argument: str, x: Tensor, dims: str, d_model: int, first: nn.Module
) -> None:
    """Check the dimensions of `x`, and that it fits the weights of the `first` layer.

    - `dims`: the names of its dimensions; the last one has size `d_model`.
    - `first`: a linear layer, whose device and dtype `x` should have. Autocast may change
      the dtype, and a layer without such weights, such as a quantised one, decides for
      itself.
    """
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{layer}: expected {argument} to be a tensor, got {type(x).__name__}"
        )
    if x.dim() != len(dims.split()) or x.shape[-1] != d_model:
        raise ValueError(
            f"{layer}: expected {argument} of shape "
            f"[{', '.join(dims.split()[:-1])}, {d_model}], got {list(x.shape)}"
        )
    weight = getattr(first, "weight", None)
    if not isinstance(weight, Tensor) or weight.dtype not in operation.DTYPES:
        return
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"{layer}: expected {argument} of dtype {weight.dtype}, the dtype of "
            f"the layer's weights, got {x.dtype}"
        )
    if x.device != weight.device:
        operation.check_device(layer, argument, x, weight, "the layer's weights")


def without_masked(layer: str, x: Tensor, dims: str, key_mask: Tensor) -> Tensor:
    """Return `x` with masked tokens set to 0; they may contain anything, even NaN.

    Operations ignore the projections of masked tokens. But without this, the gradient of
    the projections' weights would be 0 times NaN.
    """
    sizes = dict(zip(dims.split()[:-1], x.shape, strict=False))
    operation.check_mask(layer, "key_mask", key_mask, x, **sizes)
    return torch.where(key_mask[..., None], x, 0)


def with_state(found: Any) -> tuple[Tensor, Any]:
    """Return `(y, state)` for either result of an operation; the state may be None."""
    return found if isinstance(found, tuple) else (found, None)
