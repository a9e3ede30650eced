"""Encode positions and distances, without trained parameters."""

import math

import torch
from torch import Tensor


def angles(positions: Tensor, width: int, base: float = 10000.0) -> Tensor:
    r"""Return the angles $p\,\omega_i$ of positions $p$, with $\omega_i = b^{-2i/d}$.

    - `positions`: the positions $p$, `[...]`.
    - `width`: $d$, the number of channels, two for each angle.
    - `base`: $b$; the longest wavelength is nearly $2 \pi b$.
    - Returns `float64 [..., width / 2]` (rounded up), so that there is no maximum
      position.
    """
    i = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device)
    omega = torch.exp(i * (-math.log(base) / width))
    return positions.double()[..., None] * omega


def sinusoids(positions: Tensor, d_model: int) -> Tensor:
    r"""Return sinusoidal encodings of positions (Vaswani et al. 2017).

    $[\sin p\,\omega; \cos p\,\omega]$ with the `angles` $p\,\omega$.

    - `positions`: the positions $p$, `[...]`.
    - Returns `[..., d_model]` in PyTorch's default dtype.
    """
    angle = angles(positions, d_model)
    waves = torch.cat([angle.sin(), angle.cos()], -1)[..., :d_model]
    return waves.to(torch.get_default_dtype())


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate pairs of channels by angles: rotary positions (Su et al. 2021).

    Channel $i$ of the first half of the rotated channels forms a pair with channel $i$
    of the second half, as in the models of transformers.

    - `x`: `[..., time, heads, width]`.
    - `angle`: `[..., time, pairs]`; channels after the first `2 * pairs` stay.
    - Returns a tensor of the shape and dtype of `x`.
    """
    pairs = angle.shape[-1]
    cos, sin = (wave.to(x.dtype).unsqueeze(-2) for wave in (angle.cos(), angle.sin()))
    a, b, rest = x.split_with_sizes([pairs, pairs, x.shape[-1] - 2 * pairs], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
