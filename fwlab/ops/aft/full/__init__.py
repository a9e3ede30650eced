"""AFT-full: a bias for every pair of positions."""

import math
from typing import Annotated, Any, NamedTuple, Unpack

import torch
from torch import Tensor

from fwlab.ops import _operation as operation
from fwlab.ops import _triton
from fwlab.ops._operation import Kernel, Options, Steps
from fwlab.ops.aft.full import efficient, naive
from fwlab.ops.aft.limits import why_not


def load() -> Any:
    """Import the Triton kernels, and return the function that launches them."""
    _triton.imported("fwlab.ops.aft.full.kernels")
    from fwlab.ops.aft.full.kernels import aft_full

    return aft_full


#: The implementations of AFT-full. On an H200, the last one that can run is fastest.
FORMS = {
    "naive": naive.aft_full,
    "efficient": efficient.aft_full,
    "triton": Kernel(load, why_not),
}


class KeysAndValues(NamedTuple):
    """Hold the state of AFT-full, which grows with every step.

    - `k`, `v`: `[batch, past, channels]`; a masked key is `-inf`.
    """

    k: Tensor
    v: Tensor


@operation.operation(FORMS, like="v", fills={"k": -math.inf})
def aft_full(
    q: Steps,
    k: Steps,
    v: Steps,
    bias: Annotated[Tensor, "time keys"],
    *,
    causal: bool = True,
    **options: Unpack[Options],
) -> tuple[Tensor, Any]:
    r"""Compute AFT-full: gated means of values with a bias for each pair (Eq. 2).

    $y_t = \sigma(q_t) \odot \sum_{t'} e^{k_{t'} + w_{t,t'}} v_{t'} \,/\, \sum_{t'}
    e^{k_{t'} + w_{t,t'}}$.

    - `q`, `k`, `v`: `[batch, time, channels]`.
    - `bias`: $w$, `[time, past + time]`; rows are the steps of this call, columns are
      the past keys (in the state) and the new ones.
    - `causal`, `key_mask`, `return_state`, `implementation`: as for `aft_simple`, but
      "triton" takes both kinds of `causal`. A masked step still has its row and column.
    - `state`: the `KeysAndValues` of an earlier call (only `causal`).
    - Returns `y` `[batch, time, channels]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    The result is exact, as for `aft_simple`, wherever $k + w$ is finite in the
    precision of the computation: float32 for half-precision inputs. Where this sum
    overflows, the result is undefined. With a key and a bias of 3e38 in float32,
    "naive" and "efficient" return NaN, and "triton" may return a number.

    With a bias of $\log 3$ on the step itself, the weights are 1 and 3.

        >>> q = k = torch.zeros(1, 2, 1)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1)
        >>> bias = torch.tensor([[3.0, 1.0], [1.0, 3.0]]).log()
        >>> ops.aft_full(q, k, v, bias).flatten()
        tensor([2.0000, 3.5000])

    Source: Zhai et al. 2021 (arXiv:2105.14103).
    """
    op, state, form = "aft_full", options["state"], options["implementation"]
    (batch, time, channels), past = v.shape, 0
    if state is not None:
        past = operation.time_of(state, 3)
        before = batch, past, channels
        state = operation.check_parts(op, state, KeysAndValues, [before] * 2, v)
    if bias.shape[1] != past + time:
        raise ValueError(
            f"{op}: expected bias of shape [{time}, {past + time}] "
            f"([time, past + time]), got {[*bias.shape]}"
        )
    compute, q, *keys, w = operation.prepare(op, FORMS, form, q, k, v, bias)
    if state is not None or options["return_state"]:  # `cat` copies the state.
        parts = zip(state or (k[:, :0], v[:, :0]), keys, strict=True)
        keys = [torch.cat(part, 1) for part in parts]
    dtype = torch.promote_types(v.dtype, torch.float32)
    after = KeysAndValues(*(x.to(dtype) for x in keys))
    if not v.numel():
        return operation.empty(v, q, k, bias), after
    return compute(q, *keys, w.to(dtype), causal), after
