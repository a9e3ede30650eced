r"""How a layer makes the gates of its rule from its input.

The record of a rule names its gates. For each name there is one class here: it
adds the parameters to the layer, and computes the gate. A rule may have its own
version of a gate.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab.ops.call.rule import Rule


class Beta:
    r"""$\beta = \beta_{\max}\, \sigma(w \cdot x)$, one per head and step.

    Where the whole memory fades by it, heads $1, 2, 3, \dots$ start to forget
    $1/2, 1/4, 1/8, \dots$ per step.
    """

    @staticmethod
    def add(layer: Any, rule: Rule) -> None:
        """Add its parameters."""
        heads = layer.kv_heads
        layer.to_beta = nn.Linear(layer.d_model, layer.steps * heads, bias=False)
        if not rule.corrects:
            share = 0.5 ** torch.arange(1, heads + 1, dtype=torch.float32)
            layer.beta_bias = nn.Parameter(torch.logit(share))

    @staticmethod
    def of(layer: Any, rule: Rule, x: Tensor, k: Tensor) -> Tensor:
        """`[batch, time, heads]`, perhaps with steps before heads."""
        beta = layer.to_beta(x)
        if not rule.corrects:
            beta = beta + layer.beta_bias
        if rule.steps:
            beta = beta.unflatten(-1, (layer.steps, -1))
        return layer.beta_max * torch.sigmoid(beta)  # Eq. 21


class LogDecay:
    r"""$\log \alpha = -e^A\, \mathrm{softplus}(w \cdot x + b)$.

    With the initial values of Yang et al. 2024: $e^A$ uniform in $[0, 16]$, and
    softplus of the bias log-uniform in $[0.001, 0.1]$. Per key channel, the
    projection is of low rank, as in Kimi Linear.
    """

    @staticmethod
    def project(layer: Any, rule: Rule) -> tuple[int, ...]:
        """Add the projection; returns the shape of a step's decays."""
        heads, width = layer.kv_heads, layer.d_model // layer.heads
        if "key" not in rule.gates["log_decay"].dims:
            layer.to_alpha = nn.Linear(layer.d_model, heads, bias=False)
            return (heads,)
        shape = (heads, layer.state_shape[-1])
        layer.to_alpha = nn.Sequential(
            nn.Linear(layer.d_model, width, bias=False),
            nn.Linear(width, math.prod(shape), bias=False),
            nn.Unflatten(-1, shape),
        )
        return shape

    @classmethod
    def add(cls, layer: Any, rule: Rule) -> None:
        """Add its parameters."""
        shape = cls.project(layer, rule)
        rate = torch.empty(layer.kv_heads)
        rate.uniform_(1e-3, 16)
        layer.log_rate = nn.Parameter(rate.log())
        step = torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        # The inverse of softplus.
        layer.alpha_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))

    @staticmethod
    def of(layer: Any, rule: Rule, x: Tensor, k: Tensor) -> Tensor:
        """`[batch, time, heads]`, or with a decay per key channel."""
        pace = F.softplus(layer.to_alpha(x) + layer.alpha_bias)
        rate = layer.log_rate.exp()
        return -rate.view(-1, *[1] * (pace.dim() - 3)) * pace


class BoundedDecay(LogDecay):
    r"""$\log \alpha = -e^{-1/2}\, \sigma(w \cdot x + b)$ per key channel.

    RWKV-7 thus keeps at least 0.545 of a channel (Peng et al. 2025).
    """

    @classmethod
    def add(cls, layer: Any, rule: Rule) -> None:
        """Add its parameters."""
        layer.alpha_bias = nn.Parameter(torch.zeros(cls.project(layer, rule)))

    @staticmethod
    def of(layer: Any, rule: Rule, x: Tensor, k: Tensor) -> Tensor:
        """`[batch, time, heads, key]`."""
        pace = torch.sigmoid(layer.to_alpha(x) + layer.alpha_bias)
        return -math.exp(-0.5) * pace


class _PerChannel:
    r"""$\sigma(W x)$, one number per head and channel."""

    name, dim = "erase", -1

    @classmethod
    def add(cls, layer: Any, rule: Rule) -> None:
        """Add its parameters."""
        size = layer.kv_heads * layer.state_shape[cls.dim]
        setattr(layer, f"to_{cls.name}", nn.Linear(layer.d_model, size, bias=False))

    @classmethod
    def of(cls, layer: Any, rule: Rule, x: Tensor, k: Tensor) -> Tensor:
        """`[batch, time, heads, channels]`."""
        gate = getattr(layer, f"to_{cls.name}")(x)
        return torch.sigmoid(gate.unflatten(-1, (layer.kv_heads, -1)))


class Erase(_PerChannel):
    r"""$e = \beta_{\max}\, \sigma(W x)$, one number per key channel."""

    @classmethod
    def of(cls, layer: Any, rule: Rule, x: Tensor, k: Tensor) -> Tensor:
        """`[batch, time, heads, key]`."""
        return layer.beta_max * super().of(layer, rule, x, k)


class Write(_PerChannel):
    r"""$w = \sigma(W x)$, one number per value channel."""

    name, dim = "write", 1


class Ask:
    r"""$\sigma(c)$, one trained number per head (Comba, Hu et al. 2025)."""

    @staticmethod
    def add(layer: Any, rule: Rule) -> None:
        """Add its parameter."""
        layer.ask = nn.Parameter(torch.ones(layer.kv_heads))

    @staticmethod
    def of(layer: Any, rule: Rule, x: Tensor, k: Tensor) -> Tensor:
        """`[batch, time, heads]`."""
        return torch.sigmoid(layer.ask).expand(*x.shape[:2], -1)


class Removed:
    r"""$a = -\hat\kappa$ of RWKV-7: the key whose value is removed."""

    @staticmethod
    def add(layer: Any, rule: Rule) -> None:
        """It has no parameters."""

    @staticmethod
    def of(layer: Any, rule: Rule, x: Tensor, k: Tensor) -> Tensor:
        """`[batch, time, heads, key]`."""
        return -k


class Rate(_PerChannel):
    r"""$b = \hat\kappa \odot \sigma(W x)$ of RWKV-7: where it is removed."""

    name = "rate"

    @classmethod
    def of(cls, layer: Any, rule: Rule, x: Tensor, k: Tensor) -> Tensor:
        """`[batch, time, heads, key]`."""
        return k * super().of(layer, rule, x, k)


#: How a layer makes each gate, by its name.
GATES: dict[str, Any] = {
    "beta": Beta,
    "log_decay": LogDecay,
    "erase": Erase,
    "write": Write,
    "ask": Ask,
    "a": Removed,
    "b": Rate,
}
#: Where a rule has its own version of a gate.
OWN: dict[tuple[str, str], Any] = {("rwkv7_rule", "log_decay"): BoundedDecay}


def of(rule: Rule) -> dict[str, Any]:
    """The gates that a layer with this rule makes, by name.

    Raises `ValueError` for a gate that no layer makes.
    """
    if unknown := [name for name in rule.required if name not in GATES]:
        raise ValueError(
            f"FastWeightAttention: expected the gates of {rule.name} to be among "
            f"{', '.join(GATES)}, got {unknown[0]!r}; add how a layer makes it to "
            "fwlab/layers/gates.py"
        )
    return {name: OWN.get((rule.name, name), GATES[name]) for name in rule.required}
