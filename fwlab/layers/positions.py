"""Encodings of positions and distances, without trained parameters."""

import math

import torch
from torch import Tensor


def sinusoids(positions: Tensor, d_model: int) -> Tensor:
    r"""Sines and cosines of many wavelengths (Vaswani et al. 2017).

    $[\sin p\,\omega; \cos p\,\omega]$ with $\omega_i = 10000^{-2i/d}$,
    computed in float64, so that there is no maximum position.

    - `positions`: the positions $p$, `[...]`.
    - Returns `[..., d_model]` in PyTorch's default dtype.
    """
    i = torch.arange(0, d_model, 2, dtype=torch.float64, device=positions.device)
    omega = torch.exp(i * (-math.log(10000.0) / d_model))
    angle = positions.double()[..., None] * omega
    waves = torch.cat([angle.sin(), angle.cos()], -1)[..., :d_model]
    return waves.to(torch.get_default_dtype())
