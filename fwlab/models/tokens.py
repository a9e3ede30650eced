"""What every model checks of its tokens."""

import torch
from torch import Tensor


def check_tokens(model: str, argument: str, tokens: Tensor, vocab_size: int) -> None:
    """Hold tokens to `[batch, time]`, to integers, and to the vocabulary."""
    if tokens.dim() != 2:
        raise ValueError(
            f"{model}: {argument} have shape {list(tokens.shape)}, but [batch, time] "
            "was wanted"
        )
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise TypeError(
            f"{model}: {argument} have dtype {tokens.dtype}; int64 was wanted"
        )
    # On an accelerator the look would wait for the device.
    if tokens.device.type == "cpu" and tokens.numel():
        least, most = tokens.min().item(), tokens.max().item()
        if least < 0 or most >= vocab_size:
            raise ValueError(
                f"{model}: {argument} go from {least} to {most}, but "
                f"0 to {vocab_size - 1} was wanted"
            )
