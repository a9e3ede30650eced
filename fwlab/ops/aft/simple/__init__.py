"""AFT-simple: a running mean of values, without a bias."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab.ops.aft.call import AFTCall, refuses
from fwlab.ops.aft.simple import efficient, naive
from fwlab.ops.call import launcher
from fwlab.ops.call.call import Operation

AFT_SIMPLE = Operation(
    name="aft_simple",
    folder="aft/simple",
    implementations={
        "naive": naive,
        "efficient": efficient,
        "triton": launcher.Kernel(
            "fwlab.ops.aft.simple.kernels",
            minimum=(7, 5),
            refuses=refuses,
        ),
    },
)


class RunningMean(NamedTuple):
    """The state of AFT-simple, per channel.

    - `log_sum`: `[batch, channels]`, the logarithm of the sum of the
      exponentials of all keys so far; `-inf` before the first key.
    - `mean`: `[batch, channels]`, the mean of their values; 0 before
      the first key.
    """

    log_sum: Tensor
    mean: Tensor


def aft_simple(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: RunningMean | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, RunningMean]:
    r"""AFT-simple: a running mean of values, weighted by keys (Eq. 5).

    $y_t = \sigma(q_t) \odot \sum_{t' \le t} e^{k_{t'}} v_{t'} \,/\,
    \sum_{t' \le t} e^{k_{t'}}$, for each channel on its own.

    - `q`, `k`, `v`: `[batch, time, channels]`.
    - `causal`: whether a step sees only past and present; False: a step
      sees all steps.
    - `key_mask`: `bool [batch, time]`, True = real token. No step
      sees a masked step, which returns 0.
    - `cu_seqlens`: borders of packed documents, as for `sum_rule`.
    - `state`: the `RunningMean` of an earlier call (only `causal`);
      None = empty. float32 for half-precision inputs.
    - `return_state`: return `(y, state)` instead of `y`.
    - `implementation`: "auto", "naive", "efficient", or on a GPU
      "triton" (only `causal`).
    - Returns `y` `[batch, time, channels]` in the dtype of `v`. A step
      that may see nothing returns 0.
    - Raises `ValueError` or `TypeError`, naming the argument.

    The result is exact for any finite `k`, up to the rounding of
    exponents: in float32 a key, or the logarithm of a sum, of size $x$
    has an error of up to $2^{-24} x$, so that several equal keys of
    $10^7$ may count as one. The sum of $|v|$ over time must be finite
    as well. The key of a later step changes no bit of an earlier
    output.

    With equal keys, half of the mean: $\sigma(0) = 1/2$.

        >>> q = k = torch.zeros(1, 2, 1)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1)
        >>> ops.aft_simple(q, k, v).flatten()
        tensor([2., 3.])

    Source: Zhai et al. 2021 (arXiv:2105.14103).
    """
    call = AFTCall(
        AFT_SIMPLE,
        q,
        k,
        v,
        causal,
        key_mask,
        implementation,
        cu_seqlens,
    )
    batch, channels = call.sizes["batch"], call.sizes["channels"]
    names = RunningMean._fields
    start = call.before(
        RunningMean,
        state,
        return_state,
        dict.fromkeys(names, (batch, channels)),
    )

    if call.hidden:
        return call.whole(
            start,
            return_state,
            implementation=implementation,
            causal=causal,
        )

    # Without causality there is nothing to stream, and no state.
    def in_both_directions(**inputs: Tensor) -> tuple[Tensor]:
        return (call.form.not_causal(**inputs),)

    def run() -> tuple[Tensor, Any]:
        inputs = {"q": call.q, "k": call.k, "v": call.v}
        compute = call.form.causal if causal else in_both_directions
        compute = call.by_document(compute, names, k=-torch.inf)
        if causal:
            y, *after = compute(**inputs, **start._asdict())
            return y, RunningMean(*after)
        (y,) = compute(**inputs)
        return y, None

    return call.run(run, start, return_state)
