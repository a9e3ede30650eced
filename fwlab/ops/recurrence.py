"""The frame around every fast-weight recurrence.

A rule brings its ways to compute it, each a function
`(q, k, v, *gates, W=W, z=z) -> (y, W, z)`. Here its arguments are checked,
masked and given a state, and the right function is called.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fwlab.feature_maps import unit_range
from fwlab.ops import checks, chunks, gpu
from fwlab.ops.state import NormalizedState

State = Tensor | NormalizedState


@torch.compiler.disable
def run(
    op: str,
    table: dict[str, Callable],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Tensor | None],
    *,
    normalize: bool,
    scale: float | None,
    key_mask: Tensor | None,
    state: State | None,
    return_state: bool,
    implementation: str,
    optional: tuple[str, ...] = (),
    wider: int = 1,
    options: dict[str, Any] | None = None,
) -> Tensor | tuple[Tensor, State]:
    """Arguments of a rule, and what only some rules have.

    - `optional`: gates that may be None; they come last.
    - `wider`: how many times wider the memory is than the keys, where
      the rule makes features of them itself.
    - `options`: handed to the function that computes.
    """
    given: dict[str, Any] = {
        name: gate
        for name, gate in gates.items()
        if gate is not None or name not in optional
    }
    sizes = checks.shapes(
        op,
        q=(q, "batch time heads key"),
        k=(k, "batch time heads key"),
        v=(v, "batch time heads value"),
        **{
            name: (gate, "batch time heads")
            for name, gate in given.items()
        },
    )
    dtype = checks.compute_dtype(op, q=q, k=k, v=v, **given)
    sizes["key"] *= wider
    compute = gpu.choose(
        op, table, implementation, q, k, v, normalize=normalize, **sizes
    )
    W, z = _unpack(op, state, normalize, sizes, dtype, q)
    if scale is not None and not isinstance(
        scale, int | float | Tensor
    ):
        raise TypeError(f"{op}: scale must be a number, not {scale!r}")
    if key_mask is not None:
        batch, time = sizes["batch"], sizes["time"]
        checks.mask(op, "key_mask", key_mask, q, batch=batch, time=time)

    with chunks.full_precision(q):
        if key_mask is not None:
            # A zero key with strength zero writes nothing, a zero query
            # reads nothing, and with a log decay of zero nothing fades.
            # `where`, not a product: what stands in a masked step may
            # be anything, also NaN.
            q, k, v = (
                torch.where(key_mask[..., None, None], x, 0)
                for x in (q, k, v)
            )
            given = {
                name: torch.where(key_mask[..., None], g, 0)
                for name, g in given.items()
            }
        if scale is not None:
            q = q * scale
        if normalize:
            q = unit_range(q)  # its length cancels in the quotient
        if q.shape[1] == 0:  # empty, and still a function of its inputs
            y = v * sum(
                x.sum().to(v.dtype) for x in (q, k, *given.values())
            )
        else:
            y, W, z = compute(
                q, k, v, *given.values(), W=W, z=z, **(options or {})
            )
    y = y.to(v.dtype)
    if not return_state:
        return y
    return y, (W if z is None else NormalizedState(W, z))


def _unpack(
    op: str,
    state: State | None,
    normalize: bool,
    sizes: dict,
    dtype: torch.dtype,
    like: Tensor,
) -> tuple[Tensor, Tensor | None]:
    per_head = [sizes["batch"], sizes["heads"]]
    W_shape, z_shape = (
        [*per_head, sizes["value"], sizes["key"]],
        [*per_head, sizes["key"]],
    )
    if state is None:
        W = torch.zeros(W_shape, dtype=dtype, device=like.device)
        z = (
            torch.zeros(z_shape, dtype=dtype, device=like.device)
            if normalize
            else None
        )
        return W, z
    if not normalize:
        if isinstance(state, NormalizedState):
            raise TypeError(
                f"{op}: state carries a normaliser z, but normalize=False was asked for"
            )
        checks.state_part(op, "state", state, W_shape, dtype, like)
        return state, None
    if not (isinstance(state, tuple) and len(state) == 2):
        raise TypeError(
            f"{op}: state must be a NormalizedState (W, z) with normalize=True, "
            f"not {type(state).__name__}"
        )
    checks.state_part(op, "state.W", state[0], W_shape, dtype, like)
    checks.state_part(op, "state.z", state[1], z_shape, dtype, like)
    return state[0], state[1]
