r"""Compute the gates of a rule from the input of a layer, with one module per gate.

A gate is called with the input `x` `[batch, time, d_model]` and the features of the keys,
and returns `[batch, time, heads, ...]`. It contains its projection, so that an
adapter can replace the projection. Its constructor takes the layer, which has
`d_model`, `value_heads`, `head_width`, `steps`, `beta_max` and `state_shape`.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Beta(nn.Module):
    r"""Compute $\beta = \beta_{\max}\, \sigma(w \cdot x)$ for each head (Eq. 21)."""

    def __init__(self, layer: Any):
        super().__init__()
        size = layer.steps * layer.value_heads
        self.projection = nn.Linear(layer.d_model, size, bias=False)
        self.steps, self.beta_max = layer.steps, layer.beta_max

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        beta = self.projection(x)
        if beta.dtype != k.dtype:
            beta = as_precise(beta, k)
        if k.dim() == 5:  # The shape is [batch, time, steps, heads, key].
            beta = beta.unflatten(-1, (self.steps, -1))
        beta = torch.sigmoid(beta)
        return beta if self.beta_max == 1 else self.beta_max * beta


class Share(nn.Module):
    r"""Compute the gate $\beta = \sigma(w \cdot x + b)$ of the gated rule, per head.

    Heads $1, 2, 3, \dots$ initially forget $1/2, 1/4, 1/8, \dots$ per step.
    """

    def __init__(self, layer: Any):
        super().__init__()
        self.projection = nn.Linear(layer.d_model, layer.value_heads, bias=False)
        heads = torch.arange(1, layer.value_heads + 1, dtype=torch.float32)
        self.bias = nn.Parameter(torch.logit(0.5**heads))

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return torch.sigmoid(as_precise(self.projection(x), k) + self.bias)


def as_precise(gate: Tensor, k: Tensor) -> Tensor:
    """Convert a gate to the dtype of the features `k`, if its precision is higher.

    Where features need float64, the factor 1 - beta needs float64, too.
    """
    return gate.to(torch.promote_types(gate.dtype, k.dtype))


class LogDecay(nn.Module):
    r"""Compute the log decay $-e^A\, \mathrm{softplus}(w \cdot x + b)$ per head.

    With `per_channel`, per key channel, from a low-rank projection. Initially (Yang et
    al. 2024) $e^A$ is uniform up to 16, softplus(b) log-uniform in $[0.001, 0.1]$.
    """

    def __init__(self, layer: Any, per_channel: bool = False):
        super().__init__()
        heads, *_, key = layer.state_shape
        if per_channel:
            self.projection: nn.Module = low_rank(layer, heads * key)
        else:
            self.projection = nn.Linear(layer.d_model, heads, bias=False)
        self.log_rate = nn.Parameter(torch.empty(heads).uniform_(1e-3, 16).log())
        step = torch.empty((heads, key) if per_channel else heads)
        step = step.uniform_(math.log(1e-3), math.log(1e-1)).exp()
        # The initial bias is the inverse of softplus at `step`.
        self.bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        alpha = self.projection(x)
        # The decay is computed in full precision, as in published layers.
        dtype = torch.promote_types(alpha.dtype, torch.float32)
        rate = -self.log_rate.to(dtype).exp()
        if self.bias.dim() == 2:
            alpha, rate = alpha.unflatten(-1, self.bias.shape), rate.unsqueeze(-1)
        return F.softplus(alpha.to(dtype) + self.bias) * rate


class BoundedDecay(nn.Module):
    r"""Compute the log decay of RWKV-7, $-e^{-1/2}\, \sigma(w \cdot x + b)$.

    A step thus keeps at least 0.545 of a channel (Peng et al. 2025).
    """

    def __init__(self, layer: Any):
        super().__init__()
        shape = (layer.value_heads, layer.state_shape[-1])
        self.projection = low_rank(layer, math.prod(shape))
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        alpha = self.projection(x).unflatten(-1, self.bias.shape)
        return -math.exp(-0.5) * torch.sigmoid(alpha + self.bias)


def low_rank(layer: Any, size: int) -> nn.Sequential:
    """Make a low-rank projection (rank = width of a head), as in Kimi Linear."""
    return nn.Sequential(
        nn.Linear(layer.d_model, layer.head_width, bias=False),
        nn.Linear(layer.head_width, size, bias=False),
    )


class Write(nn.Module):
    r"""Compute the write gate $w = \sigma(W x)$, one number per value channel."""

    #: The index of the number of channels in `state_shape`: 1 = value, 2 = key.
    part = 1

    def __init__(self, layer: Any):
        super().__init__()
        self.channels, self.beta_max = layer.state_shape[self.part], layer.beta_max
        size = layer.value_heads * self.channels
        self.projection = nn.Linear(layer.d_model, size, bias=False)

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return torch.sigmoid(self.projection(x).unflatten(-1, (-1, self.channels)))


class Erase(Write):
    r"""Compute the erase gate $e = \beta_{\max}\, \sigma(W x)$ per key channel."""

    part = 2

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return self.beta_max * super().forward(x, k)


class Rate(Write):
    r"""Compute $b = \hat\kappa \odot \sigma(W x)$ of RWKV-7, the scaled erase key."""

    part = 2

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return k * super().forward(x, k)


class Removed(nn.Module):
    r"""Compute $a = -\hat\kappa$ of RWKV-7, the negated removal key."""

    def __init__(self, layer: Any):
        super().__init__()

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return -k


class Ask(nn.Module):
    r"""Compute Comba's factor $\sigma(c)$ of erase keys, one trained $c$ per head."""

    def __init__(self, layer: Any):
        super().__init__()
        self.logit = nn.Parameter(torch.ones(layer.value_heads))

    def forward(self, x: Tensor, k: Tensor) -> Tensor:
        return torch.sigmoid(self.logit).expand(*x.shape[:2], -1)
