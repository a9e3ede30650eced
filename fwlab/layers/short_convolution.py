r"""Convolve each channel with its previous inputs, so that keys see earlier tokens."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab.ops import _operation as operation


class ShortConvolution(nn.Module):
    r"""Convolve each channel over its last `size` real inputs, then apply SiLU.

    $$x'_t = \mathrm{SiLU}\Big(\sum_{j=0}^{n-1} c_j \odot x_{t-j}\Big)$$

    with $x_t = 0$ before the first token, and $\mathrm{SiLU}(x) = x\, \sigma(x)$. The
    weights $c_j$ are the columns of `weight`, $c_0$ the last one; initial values as for
    `torch.nn.Conv1d` with one channel per group, uniform in $\pm 1/\sqrt{n}$.

    - `channels`: width of the input.
    - `size`: $n$, the number of inputs that an output sees.
    """

    def __init__(self, channels: int, size: int):
        super().__init__()
        self.channels, self.size = channels, size
        bound = size**-0.5
        self.weight = nn.Parameter(torch.empty(channels, size).uniform_(-bound, bound))

    def forward(
        self,
        x: Tensor,
        before: Tensor | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Convolve a part of a sequence, and skip masked tokens.

        - `x`: `[batch, time, channels]`.
        - `before`: `[batch, size - 1, channels]`, the inputs of the last real tokens, in
          float32 for half precision; None = 0. With `cu_seqlens`, one for each document.
        - `key_mask`, `cu_seqlens`: as for the layer.
        - Returns the output, undefined at masked tokens, and the inputs of the last
          real tokens, as `before`.
        """
        layer = "FastWeightAttention"  # Error messages name this layer.
        dtype = operation.precision(layer, {"x": x})
        (batch, time, channels), past = x.shape, self.size - 1
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        shape = (sequences, past, channels)
        if before is None:
            before = x.new_zeros(shape, dtype=dtype)
        operation.check_part(layer, "state.inputs", before, shape, dtype, x)
        if time == 0:
            return x, before
        before = before.to(x.dtype)
        if key_mask is None and cu_seqlens is None:
            seen = torch.cat([before, x], 1)
            # The inputs are copied, as a view would keep the whole sequence in memory.
            return F.silu(self.convolve(seen)), seen[:, time:].to(dtype, copy=True)
        # The real tokens of a sequence follow its earlier inputs without gaps. Masked
        # tokens are moved behind all real tokens.
        earlier, token, last = places(time, past, key_mask, cu_seqlens, x)
        size = time + past * (sequences // batch) + 1
        seen = x.new_zeros(batch, size, channels)
        seen = seen.scatter(1, _along(earlier, x), before.view(batch, -1, channels))
        seen = seen.scatter(1, _along(token, x), x)
        y = self.convolve(seen).gather(1, _along(token - past, x))
        return F.silu(y), seen.gather(1, _along(last, x)).view(shape).to(dtype)

    def convolve(self, x: Tensor) -> Tensor:
        """Convolve `x` `[batch, time, channels]` along time, without padding."""
        if x.shape[1] == self.size:  # A single token needs only a sum.
            return (x * self.weight.mT).sum(1, keepdim=True)
        x, w = x.mT, self.weight[:, None]
        # On a CPU, `conv2d` does not transpose the channels. It is slow in float64, and
        # its gradient is slow in half precision.
        quick = x.dtype != torch.float64 and not torch.is_grad_enabled()
        if x.is_cpu and (quick or x.dtype == torch.float32):
            x, w = x.unsqueeze(2), w.unsqueeze(2)
            return F.conv2d(x, w, groups=self.channels).squeeze(2).mT
        return F.conv1d(x, w, groups=self.channels).mT

    def extra_repr(self) -> str:
        return f"{self.channels}, {self.size}"


def places(
    time: int, past: int, key_mask: Tensor | None, cu_seqlens: Tensor | None, x: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the buffer indices of earlier inputs, of tokens, and of the last inputs.

    Each result is `[batch, indices]`. A sequence begins with `past` earlier inputs.
    """
    real = x.new_ones(x.shape[:2], dtype=torch.bool) if key_mask is None else key_mask
    count = F.pad(real.cumsum(1), (1, 0))
    each = torch.arange(past, device=x.device)
    start, end, document = count[:, :1], count[:, -1:], torch.zeros_like(count[:, 1:])
    if cu_seqlens is not None:
        borders = cu_seqlens.clamp(0, time)  # The operation raises for invalid values.
        start, end = count[:, borders[:-1]], count[:, borders[1:]]
        steps = torch.arange(time, device=x.device)
        document = torch.bucketize(steps, borders[1:].contiguous(), right=True)
        document = document.clamp(max=borders.shape[0] - 2)
    shift = past * torch.arange(start.shape[1], device=x.device)
    earlier, last = (((at + shift)[..., None] + each).flatten(1) for at in (start, end))
    token = count[:, 1:] - 1 + past * (document + 1)
    behind = time + past * start.shape[1]
    return earlier, torch.where(real, token, behind), last


def _along(place: Tensor, x: Tensor) -> Tensor:
    """Expand indices `[batch, steps]` to all channels of `x`."""
    # `take_along_dim` would fix the sizes of an exported program.
    return place[..., None].expand(-1, -1, x.shape[2])
