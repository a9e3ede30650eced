"""AFT-full: a bias for every pair of positions."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab.ops.aft.call import AFTCall, refuses
from fwlab.ops.aft.full import efficient, naive
from fwlab.ops.call import checks, launcher
from fwlab.ops.call.call import Operation

#: "auto" takes the last one. The efficient form uses the products of
#: the GPU's library; the kernel keeps less for the backward pass.
AFT_FULL = Operation(
    name="aft_full",
    folder="aft/full",
    implementations={
        "naive": naive,
        "triton": launcher.Kernel(
            "fwlab.ops.aft.full.kernels",
            minimum=(7, 5),
            refuses=partial(refuses, only_causal=False),
        ),
        "efficient": efficient,
    },
)


class KeysAndValues(NamedTuple):
    """The growing state of AFT-full.

    - `k`, `v`: `[batch, past, channels]`; a masked key is `-inf`.
    """

    k: Tensor
    v: Tensor


def aft_full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    *,
    causal: bool = True,
    key_mask: Tensor | None = None,
    state: KeysAndValues | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, KeysAndValues]:
    r"""AFT-full: every pair of positions has a bias (Eq. 2).

    $y_t = \sigma(q_t) \odot \sum_{t'} e^{k_{t'} + w_{t,t'}} v_{t'} \,/\,
    \sum_{t'} e^{k_{t'} + w_{t,t'}}$.

    - `q`, `k`, `v`: `[batch, time, channels]`.
    - `bias`: $w$, `[time, past + time]`; rows are the steps of this
      call, columns are the past keys (in the state) and the new ones.
    - `causal`, `key_mask`, `return_state`, `implementation`: as for
      `aft_simple`, but "triton" takes both kinds of `causal`. A masked
      step still has its row and column.
    - `state`: the `KeysAndValues` of an earlier call (only `causal`).
    - Returns `y` `[batch, time, channels]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    The result is exact, as for `aft_simple`, wherever $k + w$ is finite
    in the precision of the computation: float32 for half-precision
    inputs. Where this sum overflows, the result is undefined. With a
    key and a bias of 3e38 in float32, "naive" and "efficient" return
    NaN, and "triton" may return a number.

    A bias of $\log 3$ on its own step: weights 1 and 3.

        >>> q = k = torch.zeros(1, 2, 1)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1)
        >>> bias = torch.tensor([[3.0, 1.0], [1.0, 3.0]]).log()
        >>> ops.aft_full(q, k, v, bias).flatten()
        tensor([2.0000, 3.5000])

    Source: Zhai et al. 2021 (arXiv:2105.14103).
    """
    call = AFTCall(
        AFT_FULL, q, k, v, causal, key_mask, implementation, bias=bias
    )
    batch, time, channels = call.q.shape
    past = 0
    if state is not None:
        checks.state_kind(call.name, state, KeysAndValues)
        past = checks.time_of(state[0], 3)
    start = call.before(
        KeysAndValues,
        state,
        return_state,
        {"k": (batch, past, channels), "v": (batch, past, channels)},
    )
    call.shape("bias", bias, [time, past + time], "time, past + time")

    # Queries of this call, keys and values of all calls.
    def run() -> tuple[Tensor, Any]:
        after = KeysAndValues(call.k, call.v)
        if past or return_state:  # not the tensors of the caller
            after = KeysAndValues(
                torch.cat([start.k, call.k], 1),
                torch.cat([start.v, call.v], 1),
            )
        rows = call.form.causal if causal else call.form.not_causal
        y = rows(call.q, *after, bias.to(call.dtype))
        return y, KeysAndValues(*(x.to(call.dtype) for x in after))

    return call.run(run, start, return_state)
