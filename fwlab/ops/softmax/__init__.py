"""Causal softmax attention, the baseline of every comparison."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab.ops import checks, gpu
from fwlab.ops.softmax import naive
from fwlab.ops.state import KeyValueCache


def _torch(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    # A whole sequence without masked keys: torch need not look at a mask.
    causal = visible.dim() == 2 and visible.shape[0] == visible.shape[1]
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if causal else visible,
        is_causal=causal,
        scale=1.0,
    )


SOFTMAX_ATTENTION = {
    "naive": naive.softmax_attention,
    "efficient": _torch,
}


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    state: KeyValueCache | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, KeyValueCache]:
    r"""Causal softmax attention (Eq. 7).

    - `q`, `k`: `[batch, time, heads, key]`.
    - `v`: `[batch, time, heads, value]`.
    - `scale`: multiplies `q`; None = $1/\sqrt{\text{key}}$, as everybody
      does (the equation leaves it out: `scale=1.0`).
    - `key_mask`: `bool [batch, time]`, True = real token. Masked steps
      are seen by nobody and return 0.
    - `state`: the `KeyValueCache` of an earlier call; None = empty.
    - `return_state`: return `(y, state)` in place of `y`.
    - `implementation`: "auto", "naive" or "efficient" (PyTorch's own
      `scaled_dot_product_attention`).
    - Returns `y` `[batch, time, heads, value]`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Source: Vaswani et al. 2017 (arXiv:1706.03762).
    """
    op = "softmax_attention"
    sizes = checks.shapes(
        op,
        q=(q, "batch time heads key"),
        k=(k, "batch time heads key"),
        v=(v, "batch time heads value"),
    )
    checks.compute_dtype(op, q=q, k=k, v=v)
    wide = torch.promote_types(q.dtype, k.dtype)
    wide = torch.promote_types(wide, v.dtype)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    compute = gpu.choose(op, SOFTMAX_ATTENTION, implementation, q)
    batch, time = sizes["batch"], sizes["time"]
    if key_mask is not None:
        checks.mask(op, "key_mask", key_mask, q, batch=batch, time=time)
        q, k, v = (
            torch.where(key_mask[..., None, None], x, 0)
            for x in (q, k, v)
        )
    real = key_mask
    if state is not None:
        k, v, real = _append(op, state, k, v, key_mask)

    past = k.shape[1] - time
    visible = torch.ones(
        time, past + time, dtype=torch.bool, device=q.device
    ).tril(past)
    if real is not None:
        # A masked query still sees itself: its row is thrown away below,
        # and a row that sees nothing would be 0/0.
        itself = torch.eye(
            time, past + time, dtype=torch.bool, device=q.device
        ).roll(past, 1)
        visible = ((visible & real[:, None]) | itself)[:, None]
    q = q * (max(sizes["key"], 1) ** -0.5 if scale is None else scale)
    y = compute(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), visible
    ).transpose(1, 2)
    if key_mask is not None:
        y = torch.where(key_mask[..., None, None], y, 0)
    return (y, KeyValueCache(k, v, real)) if return_state else y


def _append(
    op: str,
    state: KeyValueCache,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    checks.state_kind(op, state, KeyValueCache)
    past_k, past_v, past_mask = state
    batch, time, heads, key = k.shape
    past = checks.steps(past_k, 4)
    checks.state_part(
        op, "state.k", past_k, [batch, past, heads, key], k.dtype, k
    )
    checks.state_part(
        op,
        "state.v",
        past_v,
        [batch, past, heads, v.shape[-1]],
        v.dtype,
        v,
    )
    if past_mask is not None:
        checks.mask(
            op, "state.mask", past_mask, k, batch=batch, past=past
        )
    real = None
    if key_mask is not None or past_mask is not None:
        real = torch.cat(
            [
                torch.ones(batch, n, dtype=torch.bool, device=k.device)
                if m is None
                else m
                for m, n in ((past_mask, past), (key_mask, time))
            ],
            dim=1,
        )
    return (
        torch.cat([past_k, k], dim=1),
        torch.cat([past_v, v], dim=1),
        real,
    )
