"""Make projections without a bias, and split their outputs into heads."""

from collections.abc import Iterator

from torch import Tensor, nn

from fwlab.arguments import integers, require


def head_width(layer: str, d_model: int, heads: int, width: int | None = None) -> int:
    """Return the width of a head: `width`, or `d_model / heads` if `width` is None."""
    if width is not None:
        integers(layer, 1, d_model=d_model, heads=heads, head_width=width)
        return width
    integers(layer, 1, d_model=d_model, heads=heads)
    wanted = f"d_model to be a multiple of heads, got {d_model=} and {heads=}"
    require(layer, d_model % heads == 0, wanted)
    return d_model // heads


def shared_heads(layer: str, heads: int, kv_heads: int | None) -> int:
    """Return the number of heads of keys and values, which must divide `heads`."""
    if kv_heads is None:
        return heads
    integers(layer, 1, kv_heads=kv_heads)
    wanted = f"heads to be a multiple of kv_heads, got {heads=} and {kv_heads=}"
    require(layer, heads % kv_heads == 0, wanted)
    return kv_heads


def projections(d_model: int, *widths: int) -> Iterator[nn.Linear]:
    """Make a linear layer without a bias from `d_model` to each of `widths`."""
    return (nn.Linear(d_model, width, bias=False) for width in widths)


def per_head(*parts: Tensor, heads: int = -1, width: int = -1) -> Iterator[Tensor]:
    """Split the channels of each tensor into heads, `[..., heads, width]`."""
    return (part.unflatten(-1, (heads, width)) for part in parts)


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply a norm to `x`, converted to the dtype of the norm's weights."""
    weight = getattr(norm, "weight", None)
    return norm(x.to(weight.dtype) if isinstance(weight, Tensor) else x)
