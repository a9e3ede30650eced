r"""Track the running maximum of the scale of features, as online softmax does.

Features with a scale (stabilised FAVOR+) are $\phi(k) = f\, e^{s}$. With $M_t$ the maximum
of $s$ up to step $t$, the state is divided by $e^{M_t}$: each step rescales it by the
decay $\log d_t = M_{t-1} - M_t$. No step depends on later steps, and the quotient of
the normaliser does not depend on the scale. The scale of a query cancels in it, too.
"""

from typing import Any

import torch
from torch import Tensor

from fwlab import ops
from fwlab.feature_maps import needs_plain_formula
from fwlab.ops import _operation as operation

#: A key with a feature below this, relative to its largest feature, needs float64.
LEAST = 1e-26


def apply(
    layer: Any, x: Tensor, qk: Tensor, v: Tensor, state: Any, **options: Any
) -> tuple[Tensor, Any]:
    """Apply the rule of a `FastWeightAttention` to features with a scale.

    The largest feature of a key is 1, but a query may read any feature. From the first
    key on that has features too small for float32, a CPU computes in float64.

    - `qk`: queries and keys of each head, before the feature map.
    - Returns the outputs of the heads, and a `ScaledState` or None.
    """
    memory: Any = None
    before: Any = None
    key_mask, dtype = options["key_mask"], v.dtype
    if state is not None:
        operation.check_state("FastWeightAttention", state, ops.ScaledState)
        memory, before = state
    if isinstance(before, Tensor) and before.dtype == torch.float64:
        qk, v = qk.double(), v.double()
    if qk.dtype == torch.float16 and qk.is_cpu:
        qk = qk.float()
    q, k = layer._split(qk)
    borders = options.get("cu_seqlens")
    q, k, fading, last, tiny = rescale(layer, q, k, before, key_mask, borders)
    inputs = (x, q, k, v, memory)
    if tiny is None:
        y, memory = layer._apply_rule(*inputs, fading=fading, **options)
        after = ops.ScaledState(memory, last) if options["return_state"] else None
        return y.to(dtype), after
    late = tiny.any(-1).cummax(1).values
    real = ~late if key_mask is None else key_mask & ~late
    given = options | {"fading": fading, "key_mask": real, "return_state": False}
    early, _ = layer._apply_rule(*inputs, **given)
    if isinstance(memory, ops.NormalizedState):
        memory = ops.NormalizedState(*(part.double() for part in memory))
    if state is not None:
        state = ops.ScaledState(memory, before.double())
    y, state = apply(layer, x, qk.double(), v.double(), state, **options)
    # Later inputs must not change earlier outputs by a single bit.
    return torch.where(late[..., None, None], y.to(dtype), early), state


def rescale(
    layer: Any, q: Tensor, k: Tensor, before: Any, key_mask: Any, cu_seqlens: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Compute features of queries and keys, relative to the running maximum scale.

    - `before`: `[batch, heads]`, the maximum of earlier calls; None = no earlier call.
    - Returns queries, keys, the log decay of the state at each step, the last maximum,
      and which keys have a feature below `LEAST`: None = no key, or unknown.
    """
    q = layer.feature_map.scaled(q)[0]
    k, scale = layer.feature_map.scaled(k)
    tiny = None
    readable = k.is_cpu and type(k) is Tensor and not needs_plain_formula()
    if k.dtype != torch.float64 and readable and k.numel():
        values = k.detach()
        tiny = values.amin(-1) < LEAST if values.amin().item() < LEAST else None
    if key_mask is not None:
        scale = scale.masked_fill(~key_mask[..., None], -torch.inf)
    sequences = scale.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (sequences, layer.value_heads)
    before = scale.new_full(shape, -torch.inf) if before is None else before
    part = ("FastWeightAttention", "state.log_scale", before)
    operation.check_part(*part, shape, scale.dtype, scale)
    earlier, now, last = running_maximum(scale, before, cu_seqlens)
    k = k * difference(scale, now).exp()[..., None].to(k.dtype)
    return q, k, difference(earlier, now), last, tiny


def running_maximum(
    scale: Tensor, before: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the running maximum before and after each step, and after all steps.

    - `scale`: `[batch, time, heads]`. `before`: `[batch or documents, heads]`.
    """
    pieces = [(before, scale)]
    if cu_seqlens is not None:
        layer, time = "FastWeightAttention", scale.shape[1]
        lengths = operation.document_lengths(layer, cu_seqlens, time)
        pieces = list(zip(before.split(1), scale.split(lengths, 1), strict=True))
    tops = [torch.cat([first[:, None], s], 1).cummax(1).values for first, s in pieces]
    earlier, now = (
        torch.cat([top[:, part] for top in tops], 1)
        for part in (slice(None, -1), slice(1, None))
    )
    return earlier, now, torch.cat([top[:, -1] for top in tops])


def difference(a: Tensor, b: Tensor) -> Tensor:
    """Return `a - b`, or 0 where `a` and `b` are the same infinity."""
    return torch.where(a == b, 0, a - b)
