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

from fwlab.ops.call.operators import traced
from fwlab.transforms import transformed

#: Sizes of a memory that need no unit, as a logarithm.
PLAIN = (-6.0, 6.0)


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
    most = torch.finfo(k.dtype).max
    with torch.no_grad():
        own = None if log_decay is None else torch.zeros_like(log_decay)
        parts = inputs(**x | {"log_decay": own})
        fades, strength = parts.get("decay"), parts.get("strength")
        size = _size(k)
        if strength is not None and not corrects:
            # In a unit of a weaker write, its key is out of range.
            s = strength[..., 0].abs()
            size = size * s.clamp(min=most**-0.75).where(s > 0, 0)
        m = _units(size, _size(z)[:, None], log_decay, fades)
    if known(k) and not m.any():
        return x, None
    limits, kept = torch.finfo(z.dtype), m[:, :-1] - m[:, 1:]
    if log_decay is not None:
        kept = log_decay + kept
    # An empty one may be given a unit that is beyond all numbers.
    kept = kept.clamp(max=0.9 * log(limits.max))
    units = m.to(z.dtype).neg().exp()[..., None]
    start = units[:, 0].clamp(max=limits.max)
    # Float16 may not hold a unit. What is not written needs none; only
    # its gradient has one, and could be beyond all numbers.
    inner = z.dtype if k.dtype == torch.float16 else k.dtype
    each = units[:, 1:].clamp(max=torch.finfo(inner).max).to(inner)
    few, none = each.clamp(max=most**0.75), (size == 0)[..., None]
    each = torch.where(none, few, each)
    # A state that has faded too far stays there: what is written
    # later hides it anyway.
    end = m[:, -1].clamp(min=0.8 * log(limits.tiny)).exp()
    in_units = {
        "k": (k * each).to(k.dtype),
        "W": start[..., None] * x["W"],
        "z": start * z,
        "log_decay": kept.to(z.dtype),
    }
    return x | in_units, end.to(z.dtype)[..., None]


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

    - `size`: `[batch, time, heads]`, of what is written.
    - `start`: `[batch, 1, heads]`, that of the state; 0 = it is empty.
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
    wide = torch.float32 if size.device.type == "mps" else torch.float64
    # Along the last dimension, where a GPU scans in parallel.
    left = F.pad(left.mT.cumsum(-1, dtype=wide), (1, 0))
    M = torch.cat([start, size], 1).mT.log() - left
    M = (M.cummax(-1).values + left).mT
    return torch.where(M < -5e8, 0, M - M.clamp(*PLAIN))
