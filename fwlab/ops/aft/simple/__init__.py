"""AFT-simple: a running mean of values, without a bias."""

import math
from functools import partial
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from fwlab.ops import _operation as operation
from fwlab.ops import _triton
from fwlab.ops._operation import Kernel, Options, Steps
from fwlab.ops.aft.limits import why_not
from fwlab.ops.aft.simple import efficient, naive


def load() -> Any:
    """Import the Triton kernels, and return the function that launches them."""
    _triton.imported("fwlab.ops.aft.simple.kernels")
    from fwlab.ops.aft.simple import kernels

    return kernels.causal


FORMS = {
    "naive": naive.causal,
    "efficient": efficient.causal,
    "triton": Kernel(load, why_not),
}


class RunningMean(NamedTuple):
    """Hold the state of AFT-simple, a log sum and a mean per channel.

    - `log_sum`: `[batch, channels]`, the logarithm of the sum of the exponentials of
      all keys so far; `-inf` before the first key.
    - `mean`: `[batch, channels]`, the mean of their values; 0 before the first key.
    """

    log_sum: Tensor
    mean: Tensor


@operation.operation(FORMS, like="v", fills={"k": -math.inf})
def aft_simple(
    q: Steps,
    k: Steps,
    v: Steps,
    *,
    causal: bool = True,
    cu_seqlens: Tensor | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Any]:
    r"""Compute AFT-simple: gated running means of values, weighted by keys (Eq. 5).

    $y_t = \sigma(q_t) \odot \sum_{t' \le t} e^{k_{t'}} v_{t'} \,/\, \sum_{t' \le t}
    e^{k_{t'}}$, separately for each channel.

    - `q`, `k`, `v`: `[batch, time, channels]`.
    - `causal`: True = a step sees only past and present steps; False = all steps.
    - `key_mask`: `bool [batch, time]`, True = real token. No step sees a masked step,
      which returns 0.
    - `cu_seqlens`: borders of packed documents, as for `sum_rule`. They are computed
      one after another; in a graph side by side, each as a row of a batch in which all
      others are masked.
    - `state`: the `RunningMean` of an earlier call (only `causal`); None = empty.
      float32 for half-precision inputs.
    - `return_state`: return `(y, state)` instead of `y`.
    - `implementation`: "auto", "naive", "efficient", or on a GPU "triton" (only
      `causal`).
    - Returns `y` `[batch, time, channels]` in the dtype of `v`. A step that may see
      nothing returns 0.
    - Raises `ValueError` or `TypeError`, naming the argument.

    The result is exact for any finite `k`, up to the rounding of exponents: in float32
    a key, or the logarithm of a sum, of size $x$ has an error of up to $2^{-24} x$, so
    that several equal keys of $10^7$ may count as one. The sum of $|v|$ over time must
    be finite as well. The key of a later step changes no bit of an earlier output.

    With equal keys and queries of 0, outputs are half of the mean: $\sigma(0) = 1/2$.

        >>> q = k = torch.zeros(1, 2, 1)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1)
        >>> ops.aft_simple(q, k, v).flatten()
        tensor([2., 3.])

    Source: Zhai et al. 2021 (arXiv:2105.14103).
    """
    state, form = options["state"], options["implementation"]
    if cu_seqlens is not None:
        steps = {"q": q, "k": k, "v": v}
        document = partial(aft_simple, causal=causal, implementation=form)
        return operation.map_documents(
            "aft_simple", document, cu_seqlens, steps, state, causal
        )
    dtype = torch.promote_types(v.dtype, torch.float32)
    if not causal:  # A single softmax over time is efficient.
        if form == "triton":
            raise ValueError(
                "aft_simple: implementation 'triton' cannot run here: there is no kernel "
                "for causal=False; 'efficient' can"
            )
        q, k, v = (x.to(dtype) for x in (q, k, v))
        return naive.not_causal(q, k, v), None
    shape = v.shape[0], v.shape[2]
    if state is None:
        state = tuple(operation.unseen(v, shape))
    state = operation.check_parts("aft_simple", state, RunningMean, [shape, shape], v)
    if not v.numel():
        return operation.empty(v, q, k), state
    compute, q, k, v = operation.prepare("aft_simple", FORMS, form, q, k, v)
    y, *after = compute(q, k, v, *state)
    return y, RunningMean(*after)
