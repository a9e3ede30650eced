"""Splitting a model's width into heads, and checking inputs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as for_all

from fwlab import arguments
from fwlab.ops.call import checks
from fwlab.transforms import traced


def head_width(layer: str, d_model: int, heads: int, width: int | None = None) -> int:
    """`width`, or for None `d_model / heads`.

    Raises `ValueError` if that is not a positive integer.
    """
    if width is not None:
        arguments.integers(layer, 1, d_model=d_model, heads=heads, head_width=width)
        return width
    arguments.integers(layer, None, d_model=d_model, heads=heads)
    if d_model < 1 or heads < 1 or d_model % heads:
        raise ValueError(
            f"{layer}: expected d_model to be a positive multiple of heads, "
            f"got d_model={d_model} and heads={heads}"
        )
    return d_model // heads


def shared_heads(layer: str, heads: int, kv_heads: int | None) -> int:
    """The number of heads of keys and values; None = as many as `heads`.

    Raises `ValueError` if they do not divide `heads`.
    """
    if kv_heads is None:
        return heads
    if isinstance(kv_heads, bool) or not isinstance(kv_heads, int):
        raise TypeError(
            f"{layer}: expected kv_heads to be an integer or None, got {kv_heads!r}"
        )
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"{layer}: expected heads to be a positive multiple of kv_heads, "
            f"got heads={heads} and kv_heads={kv_heads}"
        )
    return kv_heads


def check_input(
    layer: str, argument: str, x: Tensor, dims: str, d_model: int, first: nn.Module
) -> None:
    """Check that `x` has the dimensions `dims`, the last one of size
    `d_model`, and the device and dtype of the weights of the layer's `first`
    linear layer. Autocast may change the dtype, and a linear layer without such
    weights, such as a quantised one, decides for itself.
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
    weight = weights_of(first)
    if weight is None:
        return
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"{layer}: expected {argument} of dtype {weight.dtype}, the dtype of "
            f"the layer's weights, got {x.dtype}"
        )
    checks.same_device(layer, argument, x, "the layer's weights", weight)


def weights_of(module: nn.Module) -> Tensor | None:
    """The weights of a module, if they are there and not quantised."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None
    return weight if weight.itemsize > 1 else None


def real_tokens(layer: str, x: Tensor, dims: str, key_mask: Tensor | None) -> Tensor:
    """`x` with masked tokens set to 0; they may contain anything, even NaN.

    The operations ignore the projections of masked tokens. But without
    this, the gradient of the projections' weights would be 0 times NaN.
    """
    if key_mask is None:
        return x
    sizes = dict(zip(dims.split()[:-1], x.shape, strict=False))
    checks.mask(layer, "key_mask", key_mask, x, **sizes)
    return torch.where(key_mask[..., None], x, 0)


def run(layer: Any, x: Tensor) -> Tensor:
    """`layer(x)`, for a token: PyTorch's path through a module takes longer.

    That path is left out only for a plain layer that nothing watches.
    """
    if watched(layer):
        return layer(x)
    kind, weights = type(layer), layer._parameters
    if kind is nn.Linear and len(weights) == 2:
        return F.linear(x, weights["weight"], weights["bias"])
    if kind is nn.LayerNorm and len(weights) == 2:
        shape, (weight, bias) = layer.normalized_shape, weights.values()
        return torch.layer_norm(x, shape, weight, bias, layer.eps)
    return layer(x)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """`norm(x)` in the precision of its weights: under autocast `x` has half of it."""
    weight = weights_of(norm)
    return norm(x if weight is None else x.to(weight.dtype))


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`[batch, time, d_model]` to `[batch, time, heads, d_model / heads]`."""
    return x.unflatten(-1, (heads, -1))


def project(x: Tensor, *layers: nn.Module) -> Tensor:
    """What linear layers make of `x`, side by side, in one product.

    Layers that are not plain any more (adapted, quantised, hooked) are called.
    """
    if not all(plain(layer) for layer in layers):
        return torch.cat([layer(x) for layer in layers], -1)
    weights: list = [layer.weight for layer in layers]
    return F.linear(x, torch.cat(weights))


def plain(layer: Any) -> bool:
    """Whether a linear layer or a norm is its weight, and nothing watches it.

    Then its weight can be used without a call.
    """
    return (
        type(layer) in (nn.Linear, nn.LayerNorm)
        and layer.bias is None
        and (traced() or type(layer.weight) in (nn.Parameter, Tensor))
        and not watched(layer)
    )


def watched(layer: nn.Module) -> Any:
    """Whether hooks want to know of its calls, or its `forward` is another one."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks
    hooks = hooks or layer._backward_hooks or layer._backward_pre_hooks
    hooks = hooks or for_all._global_forward_hooks or for_all._global_forward_pre_hooks
    hooks = (
        hooks or for_all._global_backward_hooks or for_all._global_backward_pre_hooks
    )
    return hooks or "forward" in layer.__dict__
