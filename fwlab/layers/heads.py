"""Check sizes of layers, and what may be done with their modules."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as for_all

from fwlab import arguments
from fwlab.feature_maps import needs_plain_formula


def head_width(layer: str, d_model: int, heads: int, width: int | None = None) -> int:
    """Return `width`, or for None `d_model / heads`, which has to be an integer."""
    if width is not None:
        arguments.integers(layer, 1, d_model=d_model, heads=heads, head_width=width)
        return width
    arguments.integers(layer, None, d_model=d_model, heads=heads)
    text = "d_model to be a positive multiple of heads, got "
    text += f"d_model={d_model} and heads={heads}"
    fits = d_model > 0 and heads > 0 and d_model % heads == 0
    require(layer, ValueError, {text: fits})
    return d_model // heads


def shared_heads(layer: str, heads: int, kv_heads: int | None) -> int:
    """Return the number of heads of keys and values, a divisor of `heads`."""
    if kv_heads is None:
        return heads
    number = isinstance(kv_heads, int) and not isinstance(kv_heads, bool)
    text = f"kv_heads to be an integer or None, got {kv_heads!r}"
    require(layer, TypeError, {text: number})
    text = "heads to be a positive multiple of kv_heads, got "
    text += f"heads={heads} and kv_heads={kv_heads}"
    require(layer, ValueError, {text: kv_heads > 0 and heads % kv_heads == 0})
    return kv_heads


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """Call a norm in the precision of its weights: under autocast `x` has half of it."""
    weight = getattr(norm, "weight", None)
    return norm(x.to(weight.dtype) if isinstance(weight, Tensor) else x)


def plain(layer: Any) -> bool:
    """Return True if a linear layer or a norm is its weight, and nothing watches it.

    Then its weight can be used without a call.
    """
    return (
        type(layer) in (nn.Linear, nn.LayerNorm)
        and layer.bias is None
        and (type(layer.weight) in (nn.Parameter, Tensor) or needs_plain_formula())
        and not has_hooks(layer)
    )


def has_hooks(layer: nn.Module) -> Any:
    """Return True if hooks take part in its calls, or its `forward` is another one."""
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


def called_module(blocks: Iterable[nn.Module], eps: float) -> str | None:
    """Name a module of blocks that is not just its weight, or a norm with another `eps`.

    It may be adapted, quantised, or have hooks.
    """
    for block in blocks:
        if has_hooks(block):
            return f"a hook on {type(block).__name__}"
        for name, module in block.named_children():
            if not plain(module) or getattr(module, "eps", eps) != eps:
                return f"{name} of type {type(module).__name__}"
    return None


def require(layer: str, error: type[Exception], conditions: dict[str, Any]) -> None:
    """Raise an error for the first condition that does not hold.

    - `conditions`: by what was expected and what came, in words.
    """
    for text, holds in conditions.items():
        if not holds:
            raise error(f"{layer}: expected {text}")
