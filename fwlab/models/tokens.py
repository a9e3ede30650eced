"""Check the tokens that a model gets, and compute logits with its embedding."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fwlab import arguments
from fwlab.feature_maps import needs_plain_formula
from fwlab.ops import _operation as operation


def check_tokens(
    model: str,
    tokens: Tensor,
    vocab_size: int,
    key_mask: Tensor | None = None,
    argument: str = "tokens",
) -> Tensor:
    """Check that tokens are integers `[batch, time]` in the vocabulary.

    Masked tokens may be any number, and are 0 in the result.
    """
    operation.check_dense(model, argument, tokens)
    if tokens.dim() != 2:
        raise ValueError(
            f"{model}: expected {argument} of shape [batch, time], "
            f"got {list(tokens.shape)}"
        )
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise TypeError(
            f"{model}: expected {argument} of dtype torch.int64, got {tokens.dtype}"
        )
    if key_mask is not None:
        batch, time = tokens.shape
        operation.check_mask(
            model, "key_mask", key_mask, tokens, batch=batch, time=time
        )
        tokens = tokens.where(key_mask, 0)
    # On an accelerator, this check would wait for the device.
    # A call that is traced or transformed has no values.
    if not needs_plain_formula() and tokens.device.type == "cpu" and tokens.numel():
        minimum, maximum = (x.item() for x in tokens.aminmax())
        if minimum < 0 or maximum >= vocab_size:
            raise ValueError(
                f"{model}: expected {argument} from 0 to {vocab_size - 1}, "
                f"got {minimum} to {maximum}"
            )
    return tokens


def check_range(least: int, most: float, **values: int | None) -> None:
    """Check that arguments of `generate` are integers in a range, or None."""
    for name, value in values.items():
        if value is not None:
            arguments.integers("generate", None, **{name: value})
            bound = (
                f"at least {least}" if most == math.inf else f"from {least} to {most:,}"
            )
            wanted = f"{name} to be {bound}, got {value}"
            arguments.require("generate", least <= value <= most, wanted)


def tied_logits(x: Tensor, embedding: Any, vocab_size: int) -> Tensor:
    """Compute logits with an embedding, `[..., d_model]` to `[..., vocab_size]`.

    An embedding with an adapter, for example, is called as a module.
    """
    if type(embedding) is nn.Embedding:
        return x @ embedding.weight.T
    return x @ embedding(torch.arange(vocab_size, device=x.device)).T
