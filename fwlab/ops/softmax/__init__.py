"""Causal softmax attention, the baseline of every comparison."""

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab import arguments
from fwlab.feature_maps import needs_plain_formula
from fwlab.ops import _operation as operation
from fwlab.ops._operation import Keys, Queries, Values
from fwlab.ops.softmax import naive
from fwlab.ops.states import KeyValueCache


def _torch(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float = 1.0
) -> Tensor:
    """Call `F.scaled_dot_product_attention`, with grouped heads and any scale."""
    # With `is_causal`, PyTorch returns NaN unless the scale is above 0 in float32. A
    # change of sign is exact in any precision.
    if scale < 0:
        q, scale = -q, -scale
    if scale < torch.finfo(torch.float32).tiny:
        q, scale = q * scale, 1.0
    # Without masked keys, neither a complete sequence nor a single token needs a mask.
    rows, columns = visible.shape[-2:]
    mask: Tensor | None = visible
    causal = False
    if visible.dim() == 2 and rows == columns:
        mask, causal = None, True
    elif visible.dim() == 2 and rows == 1:
        mask = None
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def attention_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, dropout: float
) -> Tensor:
    """Compute softmax attention with dropout of the attention weights.

    Unlike PyTorch's own attention, it drops the same weights in all implementations.
    The weights are saved for the backward pass, so memory is quadratic.

    - `q`: `[batch, heads, queries, key]`, already scaled; `k`, `v`: `[batch, heads,
      keys, key or value]`.
    - `visible`: `bool`, broadcast to `[batch, heads, queries, keys]`; None = all.
    - `dropout`: the probability that a weight becomes 0. The others are divided by `1 -
      dropout`, so that the mean stays the same.
    """
    scores = q @ k.mT
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return F.dropout(torch.softmax(scores, -1), dropout) @ v


FORMS = {"naive": naive.softmax_attention, "efficient": _torch}


class SoftmaxOptions(TypedDict, total=False):
    """Declare the keyword options of `softmax_attention` and their types."""

    scale: float | Tensor | None
    dropout: float
    key_mask: Tensor | None
    state: KeyValueCache | None
    return_state: bool
    implementation: str


@operation.operation(
    FORMS,
    like="v",
    options=SoftmaxOptions,
    defaults={"scale": None, "dropout": 0.0, **operation.DEFAULTS},
    plain=("naive", "efficient"),
)
def softmax_attention(
    q: Queries, k: Keys, v: Values, **options: Unpack[SoftmaxOptions]
) -> tuple[Tensor, Any]:
    r"""Compute causal softmax attention over the past and present keys (Eq. 7).

    - `q`, `k`: `[batch, time, heads, key]`. `q` may have a multiple of these heads:
      consecutive heads then share one head of `k` and `v`.
    - `v`: `[batch, time, heads, value]`.
    - `scale`: multiplies `q`; None = $1/\sqrt{\text{key}}$, the usual choice (the
      equation omits it: `scale=1.0`).
    - `dropout`: the probability that an attention weight becomes 0, from 0 to below 1;
      the others are divided by `1 - dropout`. All implementations draw the same weights
      from PyTorch's generator, and need memory for `time` x `time` weights.
    - `key_mask`: `bool [batch, time]`, True = real token. Masked steps are hidden from
      all queries and return 0.
    - `state`: the `KeyValueCache` of an earlier call; None = empty.
    - `return_state`: return `(y, state)` instead of `y`.
    - `implementation`: "auto", "naive" or "efficient" (PyTorch's own
      `scaled_dot_product_attention`).
    - Returns `y` `[batch, time, heads, value]`, with the heads of `q`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    With equal keys, you read the mean of the values.

        >>> k = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> ops.softmax_attention(k, k, v).flatten()
        tensor([4., 6.])

    Source: Vaswani et al. 2017 (arXiv:1706.03762).
    """
    op, key_mask, state = "softmax_attention", options["key_mask"], options["state"]
    scale, dropout = options["scale"], options["dropout"]
    group = operation.queries_per_head(op, q.shape[2], k.shape[2])
    if scale is not None:
        operation.check_scale(op, scale)
    arguments.dropout(op, dropout)
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    name = options["implementation"]
    name = "efficient" if name == "auto" else name
    if dropout or not q.numel():
        name = "naive"
    time, real, after = k.shape[1], key_mask, None
    if state is not None:
        after = _append(op, state, k, v, key_mask)
        k, v, real = after
    elif options["return_state"]:  # A state shares no memory with the inputs.
        after = KeyValueCache(
            k.clone(), v.clone(), None if real is None else real.clone()
        )
    past = k.shape[1] - time
    everything: Any = {"dtype": torch.bool, "device": q.device}
    visible = torch.ones(time, past + time, **everything).tril(past)
    if real is not None:
        # A masked query still sees its own key, since a softmax over no keys is NaN.
        # Its output is replaced by 0 later.
        itself = torch.eye(time, past + time, **everything).roll(past, 1)
        visible = ((visible & real[:, None]) | itself)[:, None]
    if scale is None:
        scale = max(q.shape[3], 1) ** -0.5
    # PyTorch's own attention accumulates half-precision inputs in float32.
    kind = torch.promote_types(dtype, torch.float32) if name == "naive" else dtype
    q, k, v = (x.to(kind).transpose(1, 2) for x in (q, k, v))
    if name == "efficient" and not isinstance(scale, Tensor):
        y = _torch(q, k, v, visible, float(scale))
        return y.transpose(1, 2), after
    q = (q * scale).to(kind)
    if name == "efficient":
        y = _torch(q, k, v, visible)
        return y.transpose(1, 2), after
    k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
    if dropout:  # All implementations drop the same weights, as they share this code.
        y = attention_with_dropout(q, k, v, visible, dropout)
    else:
        y = naive.softmax_attention(q, k, v, visible)
    return y.to(dtype).transpose(1, 2), after


def _append(
    op: str, state: Any, k: Tensor, v: Tensor, key_mask: Tensor | None
) -> KeyValueCache:
    """Append keys, values and their mask to a `KeyValueCache`, after checking it."""
    (batch, time, heads, key), past = k.shape, operation.time_of(state, 4)
    width = v.shape[-1]
    shapes = (batch, past, heads, key), (batch, past, heads, width), (batch, past)
    past_k, past_v, past_mask = operation.check_parts(
        op, state, KeyValueCache, shapes, k, k.dtype
    )
    real = None
    if key_mask is not None or past_mask is not None:
        masks = (past_mask, past), (key_mask, time)
        every: Any = {"dtype": torch.bool, "device": k.device}
        parts = [torch.ones(batch, n, **every) if m is None else m for m, n in masks]
        real = torch.cat(parts, dim=1)
    if time and is_plain_inference(k, v, past_k, past_v):
        return _written(state, k.transpose(1, 2), v.transpose(1, 2), real)
    k, v = torch.cat([past_k, k], dim=1), torch.cat([past_v, v], dim=1)
    return KeyValueCache(k, v, real)


class _Buffer:
    """Hold keys and values in a buffer with free space for later steps.

    A state is a view of the first part of the buffer. Only the state that ends where
    the free space begins may append to it, so no older state sees the new steps.
    """

    def __init__(self, k: Tensor, v: Tensor):
        self.k, self.v, self.used = k, v, 0


class _BufferedCache(KeyValueCache):
    """Hold a `KeyValueCache` with a buffer to append to; its copies have no buffer."""

    buffer: _Buffer | None = None

    def __reduce__(self) -> Any:
        return KeyValueCache, tuple(self)


def _written(
    state: KeyValueCache, k: Tensor, v: Tensor, mask: Tensor | None
) -> KeyValueCache:
    """Append keys and values `[batch, heads, time, width]` to the buffer of a state."""
    past = state[0].shape[1]
    end, buffer = past + k.shape[2], getattr(state, "buffer", None)
    if (
        buffer is None
        or buffer.used != past
        or end > buffer.k.shape[2]
        or (buffer.k.is_inference() and not torch.is_inference_mode_enabled())
    ):
        # The size doubles, so that each entry is copied about once on average.
        new = [x.new_empty(*x.shape[:2], 2 * end, x.shape[3]) for x in (k, v)]
        for x, old in zip(new, state[:2], strict=True):
            x[:, :, :past] = old.transpose(1, 2)
        buffer = _Buffer(new[0], new[1])
    # `data` hides this write from autograd, since no older state can read the memory.
    buffer.k.data[:, :, past:end], buffer.v.data[:, :, past:end] = k, v
    buffer.used = end
    seen = [x[:, :, :end].transpose(1, 2) for x in (buffer.k, buffer.v)]
    after = _BufferedCache(seen[0], seen[1], mask)
    after.buffer = buffer
    return after


def is_plain_inference(*tensors: Any) -> bool:
    """Return True if no gradients, traced graphs or functorch transforms are active."""
    if torch.is_grad_enabled() or needs_plain_formula():
        return False
    return all(type(x) is Tensor and not x.is_meta for x in tensors)


def can_continue(state: Any, x: Tensor, heads: int, width: int) -> bool:
    """Return True if the fast path `step` supports this state and this input."""
    if not isinstance(state, KeyValueCache) or not is_plain_inference(x):
        return False
    like: Any = {"dtype": x.dtype, "device": x.device}
    shape = x.shape[0], operation.time_of(state, 4), heads, width
    return all(operation.is_like(part, shape, **like) for part in state[:2]) and (
        state.mask is None
        or operation.is_like(state.mask, shape[:2], **like | {"dtype": torch.bool})
    )


def step(
    q: Tensor, k: Tensor, v: Tensor, state: KeyValueCache
) -> tuple[Tensor, KeyValueCache]:
    """Compute softmax attention for one token, without gradients and without checks.

    - `q`, `k`, `v`: `[batch, heads, 1, width]`.
    - `state`: a state for which `can_continue` returns True.
    """
    mask = state.mask
    if mask is not None:
        mask = F.pad(mask, (0, 1), value=True)
    state = _written(state, k, v, mask)
    y = F.scaled_dot_product_attention(
        q,
        state.k.transpose(1, 2),
        state.v.transpose(1, 2),
        attn_mask=None if mask is None else mask[:, None, None],
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return y, state
