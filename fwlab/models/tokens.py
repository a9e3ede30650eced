"""Checks of the tokens that a model gets, and logits of those that it returns."""

from typing import Any

import torch
from torch import Tensor, nn

from fwlab.feature_maps import needs_plain_formula
from fwlab.ops import _operation as operation


def check_tokens(model: str, argument: str, tokens: Tensor, vocab_size: int) -> None:
    """Check that tokens are integers `[batch, time]` in the vocabulary."""
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
    # On an accelerator this check would wait for the device. A call that is
    # traced or transformed has no values.
    if not needs_plain_formula() and tokens.device.type == "cpu" and tokens.numel():
        minimum, maximum = (x.item() for x in tokens.aminmax())
        if minimum < 0 or maximum >= vocab_size:
            raise ValueError(
                f"{model}: expected {argument} from 0 to {vocab_size - 1}, "
                f"got {minimum} to {maximum}"
            )


def tied_logits(x: Tensor, embedding: Any, vocab_size: int) -> Tensor:
    """Logits by the vectors of all tokens: `[..., d_model]` to `[..., vocab_size]`.

    An embedding that is more than its weight, such as one with an adapter, is called.
    """
    if type(embedding) is nn.Embedding:
        return x @ embedding.weight.T
    return x @ embedding(torch.arange(vocab_size, device=x.device)).T
