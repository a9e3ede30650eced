r"""Means that stay right however far a memory fades.

With a decay, both sides of $W q / (z \cdot q)$ fade together. Before their quotient
loses any digit in float32, both have left its range: after a decay of $e^{-103}$, it is
0/0. But the quotient is the same in any unit. So step $t$ has its memory in units of
$e^{m_t}$: its decay is then $e^{l_t + m_{t-1} - m_t}$ and its key $k_t e^{-m_t}$, in
every implementation. The results do not depend on the units, so these need no gradient.
"""

from collections.abc import Callable
from math import log
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab.feature_maps import finite_gradient
from fwlab.ops.call.operators import traced
from fwlab.transforms import transformed

#: Sizes of a memory that need no unit, as a logarithm.
PLAIN = (-6.0, 6.0)
#: A smaller memory needs one even if it never fades.
SMALL = 1e-13


def known(x: Tensor) -> bool:
    """Whether the numbers of a call may decide how it is computed.

    A GPU would have to be waited for; `torch.func` cannot branch.
    """
    return x.device.type == "cpu" and not transformed() and not traced(x)


def scaled(
    inputs: Callable[..., dict[str, Any]], corrects: bool, x: dict[str, Any]
) -> tuple[dict[str, Any], Tensor | None]:
    """Keep the memory of a normalised rule in range, whatever it forgets.

    - `inputs`, `corrects`: those of the `Rule`.
    - `x`: the arguments of the rule and its state, by name.
    - Returns the arguments with the memory in units, perhaps with a `log_decay`
      more, and the unit after the last step, `[batch, heads, 1]`; None = no
      step needs a unit.
    """
    k, z, log_decay = x["k"], x["z"], x.get("log_decay")
    wide = torch.float32 if k.device.type == "mps" else torch.float64
    with torch.no_grad():
        own = None if log_decay is None else torch.zeros_like(log_decay)
        parts = inputs(**x | {"log_decay": own})
        fades, strength = parts.get("decay"), parts.get("strength")
        size = _size(k).to(wide).log()
        if strength is not None and not corrects:
            size = size + strength[..., 0].abs().to(wide).log()
        m = _units(size, _size(z)[:, None].to(wide).log(), log_decay, fades)
    if known(k) and not m.any():
        return x, None
    limits, kept = torch.finfo(z.dtype), m[:, :-1] - m[:, 1:]
    if log_decay is not None:
        kept = log_decay + kept
    # An empty one may be given any unit. Gradients of what it could have held are
    # multiplied by this, and by another unit.
    kept = kept.clamp(max=log(limits.max) / 2)
    start = m[:, 0].to(z.dtype).neg().exp().clamp(max=limits.max)[..., None]
    # A unit may be beyond all numbers where a key in its unit is not: its root is
    # none. What is not written needs no unit; only its gradient has one.
    most = torch.where(size == -torch.inf, 0.75, 1.9) * log(limits.max)
    root = (m[:, 1:].neg().minimum(most) / 2).exp().to(z.dtype)[..., None]
    # A key in the unit of a very weak write is huge, so the write takes a part of
    # it. The memory fades by 1 - beta, which is 1 before and after.
    beta = x.get("beta")
    if beta is not None and strength is not None and not corrects:
        weak = beta.abs() < limits.tiny**0.8
        beta = finite_gradient(beta)
        beta = torch.where(weak, beta * limits.tiny**-0.4, beta)
        root = torch.where(weak[..., None], root * limits.tiny**0.2, root)
    # Float16 may not hold a key in its unit.
    k = finite_gradient(k.to(z.dtype) if k.dtype == torch.float16 else k)
    # A state that has faded too far stays there: what is written
    # later hides it anyway.
    end = m[:, -1].clamp(min=0.8 * log(limits.tiny)).exp()
    in_units = {
        "k": (k * root * root).to(k.dtype),
        "W": start[..., None] * x["W"],
        "z": start * z,
        "log_decay": kept.to(z.dtype),
    }
    if beta is not None:
        in_units["beta"] = beta
    return x | in_units, end.to(z.dtype)[..., None]


def needed(k: Tensor, z: Tensor | None, cu_seqlens: Tensor | None) -> bool:
    """Whether a memory that does not fade is so small that it needs a unit.

    It never becomes smaller than its first key.

    - `k`: `[batch, time, heads, key]`; `z`: that of the state, or None.
    - `cu_seqlens`: where documents begin: each has a first key.
    """
    if not known(k) or not k.numel():
        return False
    k = k.detach()
    first = torch.linalg.vector_norm(k[:, 0], torch.inf, -1)
    if cu_seqlens is None and first.amin().item() >= SMALL:  # the usual case
        return False
    size = _size(k)
    if cu_seqlens is None:
        if z is not None and z.shape == k[:, 0].shape:
            size = torch.cat([_size(z)[:, None].to(size.dtype), size], 1)
        size = size.cummax(1).values
    return bool(((size > 0) & (size < SMALL)).any())


def _size(x: Tensor) -> Tensor:
    """The largest absolute value of each vector, `[..., width]` to `[...]`."""
    return x.amax(-1).maximum(-x.amin(-1))


def _units(
    size: Tensor, start: Tensor, log_decay: Tensor | None, fades: Tensor | None
) -> Tensor:
    r"""The units $m_t$.

    $M_t$ is the logarithm of the largest part of $z_t$: a key, faded since it was
    written. Within `PLAIN`, $m_t = 0$, and nothing changes by one bit; beyond, $m_t$
    follows $M_t$ at this distance. It never falls by more than a step fades, so no
    decay becomes more than 1, unless the memory is empty: that needs no unit.

    - `size`: `[batch, time, heads]`, of what is written, as a logarithm.
    - `start`: `[batch, 1, heads]`, that of the state; minus infinity = it is empty.
    - `log_decay`, `fades`: what a step keeps, as a logarithm and as a
      factor `[batch, time, heads, 1]`; None = all.
    - Returns `[batch, 1 + time, heads]`.
    """
    # Without infinities: their differences are not numbers.
    left: Any = 0
    if log_decay is not None:
        left = log_decay.clamp(min=-1e9)
    if fades is not None:
        left = left + fades[..., 0].abs().log().clamp(min=-1e9)
    # Along the last dimension, where a GPU scans in parallel.
    left = F.pad(left.mT.cumsum(-1, dtype=size.dtype), (1, 0))
    M = torch.cat([start, size], 1).mT - left
    M = (M.cummax(-1).values + left).mT
    return torch.where(M < -5e8, 0, M - M.clamp(*PLAIN))
