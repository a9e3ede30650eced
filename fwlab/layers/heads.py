"""Cutting a model's width into heads."""

import torch
from torch import Tensor

from fwlab.ops import checks


def head_width(layer: str, d_model: int, heads: int) -> int:
    """`d_model / heads`, or `ValueError` where that is not a whole number."""
    for name, size in (("d_model", d_model), ("heads", heads)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{layer}: {name} must be an integer, not {size!r}")
    if d_model < 1 or heads < 1 or d_model % heads:
        raise ValueError(
            f"{layer}: d_model must be a positive multiple of heads, "
            f"not d_model={d_model} with heads={heads}"
        )
    return d_model // heads


def check_input(
    layer: str, argument: str, x: Tensor, dims: str, weight: Tensor
) -> None:
    """Hold `x` to `[..., d_model]` with as many dimensions as `dims` names,
    and to the device and dtype of the layer's weights (autocast may change
    the dtype).
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{layer}: {argument} must be a tensor, not {type(x).__name__}")
    d_model = weight.shape[-1]
    if x.dim() != len(dims.split()) or x.shape[-1] != d_model:
        raise ValueError(
            f"{layer}: {argument} has shape {list(x.shape)}, but "
            f"[{', '.join(dims.split()[:-1])}, {d_model}] was wanted"
        )
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"{layer}: {argument} has dtype {x.dtype}, but the layer's weights "
            f"have {weight.dtype}"
        )
    checks.same_device(layer, argument, x, "the layer's weights", weight)


def real_tokens(layer: str, x: Tensor, dims: str, key_mask: Tensor | None) -> Tensor:
    """`x` with 0 in masked tokens, where anything may stand, also NaN.

    The operations ignore what a projection makes of those, but its weights
    would get their gradient of 0 times NaN.
    """
    if key_mask is None:
        return x
    sizes = dict(zip(dims.split()[:-1], x.shape, strict=False))
    checks.mask(layer, "key_mask", key_mask, x, **sizes)
    return torch.where(key_mask[..., None], x, 0)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`[batch, time, d_model]` to `[batch, time, heads, d_model / heads]`."""
    return x.unflatten(-1, (heads, -1))
