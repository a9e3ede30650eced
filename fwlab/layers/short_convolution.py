r"""A short causal convolution: every channel sees its last few inputs.

Fast weights find a value by its key, not by its place. A convolution in
front of them makes keys of neighbouring tokens, such as "what came after
this one", which one token alone cannot say.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab.layers.heads import watched
from fwlab.ops.call import checks, packed


class ShortConvolution(nn.Module):
    r"""A causal convolution per channel, then SiLU.

    $$x'_t = \mathrm{SiLU}\Big(\sum_{j=0}^{n-1} c_j \odot x_{t-j}\Big)$$

    with $x_t = 0$ before the first token, and $\mathrm{SiLU}(x) = x\, \sigma(x)$. The
    weights $c_j$ are the columns of `weight`, $c_0$ the last one; initial values as for
    `torch.nn.Conv1d`, uniform in $\pm 1/\sqrt{n}$.

    - `channels`: width of the input.
    - `size`: $n$, the number of inputs that an output sees.
    """

    # The initial range of `torch.nn.Conv1d` with one channel per group.
    def __init__(self, channels: int, size: int):
        super().__init__()
        self.channels, self.size = channels, size
        bound = size**-0.5
        self.weight = nn.Parameter(torch.empty(channels, size).uniform_(-bound, bound))

    def forward(
        self,
        x: Tensor,
        before: Tensor | None,
        key_mask: Tensor | None,
        lengths: list[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Convolve part of a sequence.

        A masked token is skipped, as if it were not there: outputs after
        it see the real tokens before it.

        - `x`: `[batch, time, channels]`.
        - `before`: `[batch, size - 1, channels]`, the inputs of the last
          real tokens, in float32 for half precision; None = 0.
        - `key_mask`: `bool [batch, time]`, True = real token.
        - `lengths`: those of packed documents, which do not see each
          other. `before` then has one entry for each.
        - Returns the output, anything at masked tokens, and the inputs
          of the last real tokens, as `before`.
        """
        layer = "FastWeightAttention"  # the one that has convolutions
        dtype = checks.compute_dtype(layer, x=x)
        batch, time, _ = x.shape
        sequences = batch if lengths is None else len(lengths)
        shape = (sequences, self.size - 1, self.channels)
        if before is None:
            before = x.new_zeros(shape, dtype=dtype)
        checks.state_part(layer, "state.inputs", before, shape, dtype, x)
        if time == 0:
            return x, before
        if lengths is not None:
            if key_mask is None:  # now rows are padded
                key_mask = x.new_ones((batch, time), dtype=torch.bool)
            run = packed.by_document(self.forward, lengths, ("before",), {})
            y, before = run(x=x, before=before, key_mask=key_mask)
            return y, before
        if key_mask is not None:  # real tokens first, in their order
            order = (~key_mask).int().argsort(dim=1, stable=True)
            x = _taken(x, order)
        x = torch.cat([before.to(x.dtype), x], 1)
        y = self._sums(x)
        if key_mask is None:
            # A copy: a view would keep the whole sequence in memory.
            return F.silu(y), x[:, time:].to(dtype, copy=True)
        last = torch.arange(self.size - 1, device=x.device)
        last = key_mask.sum(1, keepdim=True) + last
        y = _taken(y, order.argsort(1))
        return F.silu(y), _taken(x, last).to(dtype)

    def _sums(self, x: Tensor) -> Tensor:
        """The sum over the last `size` inputs, wherever there are that many."""
        x, w = x.mT, self.weight[:, None]
        # On a CPU, the convolution of images need not move the channels. It has no
        # fast form in float64, and no fast gradient in half precision.
        quick = x.dtype != torch.float64 and not torch.is_grad_enabled()
        if x.is_cpu and (quick or x.dtype == torch.float32):
            x, w = x.unsqueeze(2), w.unsqueeze(2)
            return F.conv2d(x, w, groups=self.channels).squeeze(2).mT
        return F.conv1d(x, w, groups=self.channels).mT

    def step(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """The same for one token `[batch, channels]`, without checks."""
        seen = torch.cat([before, x.unsqueeze(1).to(before.dtype)], 1)
        y = (seen * self.weight.mT).sum(1)
        return F.silu(y).to(x.dtype), seen[:, 1:]

    def extra_repr(self) -> str:
        return f"{self.channels}, {self.size}"


def can_step(conv: Any, before: Any, batch: int, like: Tensor) -> bool:
    """Whether `step` can continue from these inputs, `like` a state.

    A convolution that something wraps or watches is called.
    """
    if type(conv) is not ShortConvolution or watched(conv):
        return False
    return checks.fits(before, (batch, conv.size - 1, conv.channels), like)


def _taken(x: Tensor, order: Tensor) -> Tensor:
    """Steps of `[batch, time, channels]` in the order `[batch, steps]`."""
    # Not `take_along_dim`, which fixes the sizes of an exported program.
    return x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))
