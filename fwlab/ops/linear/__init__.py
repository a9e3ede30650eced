"""The sum rule and the gated rule: fast weights that add."""

from typing import Any

from torch import Tensor

from fwlab.feature_maps import ELU1
from fwlab.ops import fla, gpu
from fwlab.ops.linear import chunked, efficient, naive
from fwlab.ops.operation import Variants
from fwlab.ops.rule import Rule, factor
from fwlab.ops.state import NormalizedState
from fwlab.ops.traced import operator


def too_wide(
    capability: tuple[int, int],
    key: int = 0,
    value: int = 0,
    full: bool = False,
    **_: Any,
) -> str | None:
    """Why widths do not fit on a multiprocessor; None = they do."""
    maximum = 256 if full else 512
    if key > maximum or value > maximum:
        kind = "float32" if full else "half precision"
        return (
            f"the kernels take widths up to {maximum} in {kind}, "
            f"got {key} and {value}"
        )
    return None


RECURRENCE: dict[str, Any] = {
    "chunked": chunked.additive,
    "efficient": efficient.additive,
    "fla": fla.ADDITIVE,
    "triton": gpu.Kernel(
        "fwlab.ops.linear.kernels", "additive", refuses=too_wide
    ),
}
SUM_RULE = Rule(
    name="sum_rule",
    folder="linear",
    implementations={
        "naive": Variants(
            naive.sum_rule,
            naive.normalized_sum_rule,
            naive.decaying_sum_rule,
            naive.decaying_normalized_sum_rule,
        ),
        **RECURRENCE,
    },
    gates={"log_decay": "heads"},
    optional=("log_decay",),
    factors=lambda log_decay=None: (factor(log_decay), None),
    mixer="sum",
    benchmarks=((1024, 64), (4096, 64), (2048, 32)),
    feature_map=ELU1,
    normalize=True,
)
GATED_RULE = Rule(
    name="gated_rule",
    folder="linear",
    implementations={
        "naive": Variants(
            naive.gated_rule,
            naive.normalized_gated_rule,
            naive.decaying_gated_rule,
            naive.decaying_normalized_gated_rule,
        ),
        **RECURRENCE,
        "fla": fla.GATED,
    },
    gates={"beta": "heads", "log_decay": "heads"},
    optional=("log_decay",),
    factors=lambda beta, log_decay=None: _decay_and_strength(
        beta, log_decay
    ),
    mixer="gated",
    benchmarks=((1024, 64),),
    feature_map=ELU1,
    normalize=True,
)


def _decay_and_strength(
    beta: Tensor, log_decay: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Decay and strength of Eq. 52."""
    beta, decay = beta[..., None], factor(log_decay)
    return (1 - beta if decay is None else (1 - beta) * decay), beta


@operator
def sum_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    normalize: bool = True,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | NormalizedState | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, Tensor | NormalizedState]:
    r"""Linear attention: write each pair, then read (Eqs. 17-19).

    $W_t = W_{t-1} + v_t \otimes k_t$, $z_t = z_{t-1} + k_t$, and
    $y_t = W_t q_t \,/\, (z_t \cdot q_t)$. Keys and queries are
    features: first apply a map of `fwlab.feature_maps`.

    - `q`, `k`: `[batch, time, heads, key]`. `q` may have a multiple of
      these heads: consecutive ones then read one memory (grouped
      heads), and `y` has the heads of `q`, the state those of `k`.
    - `v`: `[batch, time, heads, value]`.
    - `log_decay`: `[batch, time, heads]`, at most 0: $W_{t-1}$ and
      $z_{t-1}$ are multiplied by its exponential first; None = no
      decay. (Features scaled by a running maximum need a decay.) The
      mean is right however far they fade since the last write. What a
      later write exceeds by $e^{80}$ counts as forgotten.
    - `normalize`: divide by $z_t \cdot q_t$; without it
      $y_t = W_t q_t$. Where the denominator is 0 the result is 0.
    - `scale`: a factor of `q`; None = 1.
    - `key_mask`: `bool [batch, time]`, True = real token. Masked steps
      leave the state untouched and return 0.
    - `cu_seqlens`: integers `[documents + 1]` from 0 to `time`: where
      documents that are packed one after another begin and end. The
      batch is then 1, and every document has a state of its own:
      `state` has `documents` in place of `batch`. The values are read
      on the host, which waits for a GPU unless the tensor is on the
      CPU.
    - `state`: the state that an earlier call returned; None = zeros. The
      tensor `W` `[batch, heads, value, key]`, or with `normalize` a
      `NormalizedState(W, z)`; float32 for half-precision inputs.
    - `return_state`: return `(y, state)` instead of `y`.
    - `implementation`: "auto", "naive", "chunked", "efficient", "fla"
      or "triton".
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Source: Katharopoulos et al. 2020 (arXiv:2006.16236); equation
    numbers from Schlag et al. 2021 (arXiv:2102.11174).
    """
    return SUM_RULE(
        q,
        k,
        v,
        {"log_decay": log_decay},
        normalize=normalize,
        scale=scale,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        state=state,
        return_state=return_state,
        implementation=implementation,
    )


@operator
def gated_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    log_decay: Tensor | None = None,
    normalize: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | NormalizedState | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, Tensor | NormalizedState]:
    r"""Decay all fast weights, then write a pair (Eq. 52).

    $W_t = (1 - \beta_t) W_{t-1} + \beta_t\, v_t \otimes k_t$, and
    $y_t = W_t q_t$. With `normalize` it is gated Random Feature
    Attention: $z_t = (1 - \beta_t) z_{t-1} + \beta_t k_t$ and
    $y_t = W_t q_t \,/\, (z_t \cdot q_t)$.

    - `q`, `k`: `[batch, time, heads, key]`, as features; grouped heads
      as for `sum_rule`.
    - `v`: `[batch, time, heads, value]`.
    - `beta`: `[batch, time, heads]`, usually in $[0, 1]$: 0 keeps the
      fast weights, 1 replaces all of them with this pair.
    - `log_decay`, `normalize`, `scale`, `key_mask`, `cu_seqlens`,
      `state`, `return_state`: as for `sum_rule`.
    - `implementation`: as for `sum_rule`, but "auto" never takes "fla":
      it computes with $\log(1 - \beta_t)$, so the gradient of `beta`
      loses digits close to 1, and is not complete where `beta` is 1.
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Source: Peng et al. 2021 (arXiv:2103.02143), Eq. 7, who write
    $g = 1 - \beta$; without normaliser Schlag et al. 2021
    (arXiv:2102.11174), Eq. 52.
    """
    return GATED_RULE(
        q,
        k,
        v,
        {"beta": beta, "log_decay": log_decay},
        normalize=normalize,
        scale=scale,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        state=state,
        return_state=return_state,
        implementation=implementation,
    )
