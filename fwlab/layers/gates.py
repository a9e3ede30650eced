r"""How a layer makes the gates of its rule from its input.

The record of a rule says of which kind each gate is. For each kind there is one
class here: it adds the parameters to the layer, and computes the gate.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fwlab.layers.heads import run
from fwlab.ops.call.rule import Rule


class _Kind:
    """What all kinds of gates have in common.

    - `shapes`: the dimensions that the kind can have, as in `Gate.dims`.
    - `per_step`: whether each step of a token has its own; where a rule has
      steps, "steps" is then one of its dimensions.
    - `adds`: the weights that it adds to the layer; no other gate may add them.
    - `bounded`: whether `beta_max` is its maximum.
    - `dims`: the dimensions of this gate.
    """

    shapes: tuple[str, ...] = ("heads",)
    per_step = False
    adds = ""
    bounded = False

    def __init__(self, dims: str):
        self.dims = dims

    @classmethod
    def shapes_in(cls, rule: Rule) -> list[str]:
        """Those of its shapes that it can have in this rule."""
        fits = bool(rule.steps)
        return [s for s in cls.shapes if not cls.per_step or ("steps" in s) == fits]

    def add(self, layer: Any) -> None:
        """Add its parameters to a layer, if it has any."""

    def of(self, layer: Any, x: Tensor, k: Tensor) -> Tensor:
        """The gate for the input and the features of the keys."""
        raise NotImplementedError


def as_precise(gate: Tensor, k: Tensor) -> Tensor:
    """Convert to the precision of the features, if that is higher.

    Where features need float64, what 1 - beta keeps does so, too.
    """
    if gate.dtype == k.dtype:  # as usual, and one operator less
        return gate
    return gate.to(torch.promote_types(gate.dtype, k.dtype))


class Beta(_Kind):
    r"""$\beta = \beta_{\max}\, \sigma(w \cdot x)$, one per head and step."""

    shapes = ("heads", "steps heads")
    per_step, adds, bounded = True, "to_beta", True

    def add(self, layer: Any) -> None:
        size = layer.value_heads * (layer.steps if "steps" in self.dims else 1)
        layer.to_beta = nn.Linear(layer.d_model, size, bias=False)

    def of(self, layer: Any, x: Tensor, k: Tensor) -> Tensor:
        beta = as_precise(run(layer.to_beta, x), k)
        if "steps" in self.dims:
            beta = beta.unflatten(-1, (layer.steps, -1))
        beta = torch.sigmoid(beta)  # Eq. 21
        return beta if layer.beta_max == 1 else layer.beta_max * beta


class Share(_Kind):
    r"""$\beta = \sigma(w \cdot x + b)$: the memory fades by what is written.

    Heads $1, 2, 3, \dots$ start to forget $1/2, 1/4, 1/8, \dots$ per step.
    """

    adds = "to_beta"

    def add(self, layer: Any) -> None:
        layer.to_beta = nn.Linear(layer.d_model, layer.value_heads, bias=False)
        heads = torch.arange(1, layer.value_heads + 1, dtype=torch.float32)
        layer.beta_bias = nn.Parameter(torch.logit(0.5**heads))

    def of(self, layer: Any, x: Tensor, k: Tensor) -> Tensor:
        return torch.sigmoid(as_precise(run(layer.to_beta, x), k) + layer.beta_bias)


class LogDecay(_Kind):
    r"""$\log \alpha = -e^A\, \mathrm{softplus}(w \cdot x + b)$.

    With the initial values of Yang et al. 2024: $e^A$ uniform in $[0, 16]$, and
    softplus of the bias log-uniform in $[0.001, 0.1]$. Per key channel, the
    projection is of low rank, as in Kimi Linear.
    """

    shapes = ("heads", "heads key")
    adds = "to_alpha"

    def project(self, layer: Any) -> tuple[int, ...]:
        """Add the projection; returns the shape of a step's decays."""
        heads, width = layer.value_heads, layer.head_width
        if self.dims == "heads":
            layer.to_alpha = nn.Linear(layer.d_model, heads, bias=False)
            return (heads,)
        shape = (heads, layer.state_shape[-1])
        layer.to_alpha = nn.Sequential(
            nn.Linear(layer.d_model, width, bias=False),
            nn.Linear(width, math.prod(shape), bias=False),
            nn.Unflatten(-1, shape),
        )
        return shape

    def add(self, layer: Any) -> None:
        shape = self.project(layer)
        rate = torch.empty(layer.value_heads)
        rate.uniform_(1e-3, 16)
        layer.log_rate = nn.Parameter(rate.log())
        step = torch.empty(shape).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        # The inverse of softplus.
        layer.alpha_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))

    def of(self, layer: Any, x: Tensor, k: Tensor) -> Tensor:
        alpha = run(layer.to_alpha, x)
        # In full precision, as in published layers.
        exact = torch.promote_types(alpha.dtype, torch.float32)
        pace = F.softplus(alpha.to(exact) + layer.alpha_bias)
        rate = layer.log_rate.to(exact).exp().neg()
        return pace * (rate if self.dims == "heads" else rate.unsqueeze(-1))


class BoundedDecay(LogDecay):
    r"""$\log \alpha = -e^{-1/2}\, \sigma(w \cdot x + b)$.

    RWKV-7 thus keeps at least 0.545 of a channel (Peng et al. 2025).
    """

    def add(self, layer: Any) -> None:
        layer.alpha_bias = nn.Parameter(torch.zeros(self.project(layer)))

    def of(self, layer: Any, x: Tensor, k: Tensor) -> Tensor:
        pace = torch.sigmoid(run(layer.to_alpha, x) + layer.alpha_bias)
        return -math.exp(-0.5) * pace


class _PerChannel(_Kind):
    r"""$\sigma(W x)$, one number per head and channel."""

    shapes = ("heads key",)

    def add(self, layer: Any) -> None:
        channels = layer.state_shape[-1 if self.dims == "heads key" else 1]
        size = layer.value_heads * channels
        setattr(layer, self.adds, nn.Linear(layer.d_model, size, bias=False))

    def of(self, layer: Any, x: Tensor, k: Tensor) -> Tensor:
        gate = getattr(layer, self.adds)(x)
        return torch.sigmoid(gate.unflatten(-1, (layer.value_heads, -1)))


class Erase(_PerChannel):
    r"""$e = \beta_{\max}\, \sigma(W x)$, one number per key channel."""

    adds, bounded = "to_erase", True

    def of(self, layer: Any, x: Tensor, k: Tensor) -> Tensor:
        return layer.beta_max * super().of(layer, x, k)


class Write(_PerChannel):
    r"""$w = \sigma(W x)$, one number per value channel."""

    adds, shapes = "to_write", ("heads value",)


class Ask(_Kind):
    r"""$\sigma(c)$, one trained number per head (Comba, Hu et al. 2025)."""

    adds = "ask"

    def add(self, layer: Any) -> None:
        layer.ask = nn.Parameter(torch.ones(layer.value_heads))

    def of(self, layer: Any, x: Tensor, k: Tensor) -> Tensor:
        return torch.sigmoid(layer.ask).expand(*x.shape[:2], -1)


class Removed(_Kind):
    r"""$a = -\hat\kappa$ of RWKV-7: the key whose value is removed."""

    shapes = ("heads key",)
    per_step = True

    def of(self, layer: Any, x: Tensor, k: Tensor) -> Tensor:
        return -k


class Rate(_PerChannel):
    r"""$b = \hat\kappa \odot \sigma(W x)$ of RWKV-7: where it is removed."""

    per_step, adds = True, "to_rate"

    def of(self, layer: Any, x: Tensor, k: Tensor) -> Tensor:
        return k * super().of(layer, x, k)


#: How a layer makes a gate, by the gate's kind.
KINDS: dict[str, type[_Kind]] = {
    "beta": Beta,
    "share": Share,
    "log_decay": LogDecay,
    "bounded_decay": BoundedDecay,
    "erase": Erase,
    "write": Write,
    "ask": Ask,
    "removed": Removed,
    "rate": Rate,
}


def of(rule: Rule) -> dict[str, _Kind]:
    """The gates that a layer with this rule makes, by name.

    Raises `ValueError` for a kind or a shape that no layer makes in such a rule,
    and for two gates that would share their weights.
    """
    made: dict[str, _Kind] = {}
    makers = {kind: make for kind, make in KINDS.items() if make.shapes_in(rule)}
    for name in rule.required:
        gate = rule.gates[name]
        kind = gate.kind or name
        message = f"FastWeightAttention: expected {name} of {rule.name}"
        if kind not in makers:
            raise ValueError(
                f"{message} to be a gate of kind {', '.join(makers)}, got {kind!r}; "
                "add how a layer makes it to fwlab/layers/gates.py"
            )
        make, message = makers[kind], f"{message}, a gate of kind {kind!r}"
        shapes = make.shapes_in(rule)
        if gate.dims not in shapes:
            raise ValueError(
                f"{message} in a rule {'with' if rule.steps else 'without'} steps, to "
                f"have the dimensions {' or '.join(map(repr, shapes))}, "
                f"got {gate.dims!r}"
            )
        for other, before in made.items():
            if make.adds and make.adds == before.adds:
                raise ValueError(
                    f"{message}, to have weights of its own, got {make.adds}, "
                    f"which {other} has already"
                )
        made[name] = make(gate.dims)
    return made
