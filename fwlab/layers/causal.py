"""Define `forward`, `prefill` and `step` of all causal layers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as for_all

from fwlab.feature_maps import needs_plain_formula
from fwlab.ops import _operation as operation


class Causal(nn.Module):
    """Define the interface of layers in which no token sees a later token.

    A subclass defines `_mix`. Any combination of `prefill` and `step` gives the same
    outputs as `forward` with the whole sequence.
    """

    #: True if `forward` and `prefill` support `cu_seqlens`.
    packs = False
    #: True if masked tokens of `prefill` have no effect on later calls,
    #: because no position, distance or window counts them.
    skips = False
    #: The implementation that computes a single token in `step`.
    one_token = "naive"
    #: The dimension names of an input.
    dims = "batch time d_model"
    #: The path of the linear layer whose dtype and device the inputs must have.
    first_layer = "to_q"
    d_model: int

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Compute the outputs of the layer for a whole sequence.

        - `x`: `[batch, time, d_model]`, also the shape of the output.
        - `key_mask`: `bool [batch, time]`, True = real token. Masked steps are skipped,
          and their output is 0.
        - `implementation`: as for the operations of `fwlab.ops`.
        - `cu_seqlens`: integers `[documents + 1]` from 0 to `time`, the borders of packed
          documents, which do not see each other. The batch size is then 1. Only layers
          with `packs` support it.
        - Returns the output; raises `ValueError` or `TypeError`, naming the argument.
        """
        options = {"key_mask": key_mask, "implementation": implementation}
        x = self._check(x, options, cu_seqlens)
        return self._mix(x, None, return_state=False, **options)[0]

    def prefill(
        self,
        x: Tensor,
        state: Any = None,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Compute the outputs for a part of a sequence, and the state after it.

        - `state`: the state from an earlier call; None = start of sequence. With
          `cu_seqlens`, it has one entry for each document.
        - `x`, `key_mask`, `implementation`, `cu_seqlens`: as in `forward`.
        - Returns `(y, state)`; raises as `forward`, and `ValueError` if the layer is not
          causal.
        """
        options = {"key_mask": key_mask, "implementation": implementation}
        x = self._check(x, options, cu_seqlens)
        return self._mix(x, state, return_state=True, **options)

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Compute the output for one token, and the state after it.

        - `x`: `[batch, d_model]`.
        - `state`: the state from an earlier call; None = start of sequence.
        - Returns `(y, state)`, `y` of shape `[batch, d_model]`.
        """
        check_input(self, x, "batch d_model", self.get_submodule(self.first_layer))
        options = {"key_mask": None, "implementation": self.one_token}
        y, state = self._mix(x.unsqueeze(1), state, return_state=True, **options)
        return y.squeeze(1), state

    def state_size(self, time: int = 0) -> int:
        """Count the scalars in the state of one sequence.

        - `time`: number of past tokens; has no effect if the size is constant.
        - Returns the count, over all heads and layers. `AFTConv2d` has no state, and
          raises `NotImplementedError`.
        """
        raise NotImplementedError

    def _mix(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        """Compute outputs and state; `x` is checked, and its masked tokens are 0.

        - `options`: the options of an operation: `return_state`, `key_mask`,
          `implementation` and, for layers with `packs`, perhaps `cu_seqlens`.
        - Returns `y` and the state after it, None if it was not requested.
        """
        raise NotImplementedError

    def _check(self, x: Tensor, options: dict[str, Any], cu_seqlens: Any) -> Tensor:
        """Check `x`, set its masked tokens to 0, and add `cu_seqlens` to `options`."""
        check_input(self, x, self.dims, self.get_submodule(self.first_layer))
        if cu_seqlens is not None:
            layer = type(self).__name__
            if not self.packs:
                raise ValueError(
                    f"{layer}: expected no cu_seqlens, since this layer cannot keep "
                    f"packed documents apart, got {type(cu_seqlens).__name__}"
                )
            operation.check_borders(layer, cu_seqlens, x)
        if self.packs:
            options["cu_seqlens"] = cu_seqlens
        if options["key_mask"] is not None:
            x = without_masked(self, x, self.dims, options["key_mask"])
        return x


def check_input(
    layer: Any, x: Tensor, dims: str, first: nn.Module, argument: str = "x"
) -> None:
    """Raise unless `x` has the dimensions, dtype and device that a layer expects.

    - `dims`: the names of the dimensions; the last one has the size `layer.d_model`.
    - `first`: a linear layer, whose device and dtype `x` must have. Under autocast, the
      dtype may differ. For a layer without such weights, for example a quantised layer,
      neither is checked.
    """
    text = f"{type(layer).__name__}: expected {argument}"
    if not isinstance(x, Tensor):
        raise TypeError(f"{text} to be a tensor, got {type(x).__name__}")
    if x.dim() != len(dims.split()) or x.shape[-1] != layer.d_model:
        *names, _ = dims.split()
        raise ValueError(
            f"{text} of shape [{', '.join(names)}, {layer.d_model}], got {list(x.shape)}"
        )
    weight = getattr(first, "weight", None)
    if not isinstance(weight, Tensor) or weight.dtype not in operation.DTYPES:
        return
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"{text} of dtype {weight.dtype}, the dtype of the layer's weights, got "
            f"{x.dtype}"
        )
    if x.device != weight.device:
        named = "the layer's weights"
        operation.check_device(type(layer).__name__, argument, x, weight, named)


def without_masked(layer: Any, x: Tensor, dims: str, key_mask: Tensor) -> Tensor:
    """Return `x` with its masked tokens, which may contain NaN, set to 0.

    Operations ignore the projections of masked tokens. But without this, the gradient of
    the projections' weights would be 0 times NaN.
    """
    sizes = dict(zip(dims.split()[:-1], x.shape, strict=False))
    operation.check_mask(type(layer).__name__, "key_mask", key_mask, x, **sizes)
    return torch.where(key_mask[..., None], x, 0)


def with_state(found: Any) -> tuple[Tensor, Any]:
    """Return `(y, state)` for the result of an operation, `y` or `(y, state)`."""
    return found if isinstance(found, tuple) else (found, None)


def is_plain(layer: Any) -> bool:
    """Return True for a linear layer or layer norm without a bias and without hooks."""
    return (
        type(layer) in (nn.Linear, nn.LayerNorm)
        and layer.bias is None
        and (type(layer.weight) in (nn.Parameter, Tensor) or needs_plain_formula())
        and not has_hooks(layer)
    )


def has_hooks(layer: nn.Module) -> Any:
    """Return True if a module has hooks or an overridden `forward`."""
    return (
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or for_all._global_forward_hooks
        or for_all._global_forward_pre_hooks
        or for_all._global_backward_hooks
        or for_all._global_backward_pre_hooks
        or "forward" in layer.__dict__
    )
