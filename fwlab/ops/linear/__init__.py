"""The sum rule: fast weights that only ever add (linear attention)."""

from torch import Tensor

from fwlab.ops import recurrence
from fwlab.ops.linear import efficient, naive
from fwlab.ops.state import NormalizedState

SUM_RULE = {"naive": naive.sum_rule, "efficient": efficient.sum_rule}


def sum_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    normalize: bool = True,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    state: Tensor | NormalizedState | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, Tensor | NormalizedState]:
    r"""Linear attention: write every pair, then read (Eqs. 17-19).

    $W_t = W_{t-1} + v_t \otimes k_t$, $z_t = z_{t-1} + k_t$, and
    $y_t = W_t q_t \,/\, (z_t \cdot q_t)$. Keys and queries come as
    features: apply a map of `fwlab.feature_maps` first.

    - `q`, `k`: `[batch, time, heads, key]`.
    - `v`: `[batch, time, heads, value]`.
    - `normalize`: divide by $z_t \cdot q_t$; without it
      $y_t = W_t q_t$. Where the denominator is 0 the result is 0.
    - `scale`: multiplies `q` when given.
    - `key_mask`: `bool [batch, time]`, True = real token. Masked steps
      leave the state untouched and return 0.
    - `state`: what an earlier call returned; None = empty memory. The
      tensor `W` `[batch, heads, value, key]`, or with `normalize` a
      `NormalizedState(W, z)`; float32 for half-precision inputs.
    - `return_state`: return `(y, state)` in place of `y`.
    - `implementation`: "auto", "naive" or "efficient".
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Source: Katharopoulos et al. 2020 (arXiv:2006.16236); equation
    numbers from Schlag et al. 2021 (arXiv:2102.11174).
    """
    return recurrence.run(
        "sum_rule",
        SUM_RULE,
        q,
        k,
        v,
        {},
        normalize=normalize,
        scale=scale,
        key_mask=key_mask,
        state=state,
        return_state=return_state,
        implementation=implementation,
    )
