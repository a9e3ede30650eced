"""Cutting a model's width into heads."""

from torch import Tensor


def head_width(layer: str, d_model: int, heads: int) -> int:
    """`d_model / heads`, or `ValueError` where that is not a whole number."""
    if d_model < 1 or heads < 1 or d_model % heads:
        raise ValueError(
            f"{layer}: d_model must be a positive multiple of heads, "
            f"not d_model={d_model} with heads={heads}"
        )
    return d_model // heads


def check_input(layer: str, argument: str, x: Tensor, dims: str, d_model: int) -> None:
    """Hold `x` to `[..., d_model]` with as many dimensions as `dims` names."""
    if x.dim() != len(dims.split()) or x.shape[-1] != d_model:
        raise ValueError(
            f"{layer}: {argument} has shape {list(x.shape)}, but "
            f"[{', '.join(dims.split()[:-1])}, {d_model}] was wanted"
        )


def split_heads(x: Tensor, heads: int) -> Tensor:
    """`[batch, time, d_model]` to `[batch, time, heads, d_model / heads]`."""
    return x.unflatten(-1, (heads, -1))
