"""The delta rules: fast weights that correct what they retrieve."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from fwlab.feature_maps import DPFP, Identity, sum_normalize
from fwlab.ops import fla, gpu
from fwlab.ops.delta import chunked, efficient, naive
from fwlab.ops.linear import too_wide
from fwlab.ops.operation import Variants
from fwlab.ops.rule import Rule, factor
from fwlab.ops.state import NormalizedState
from fwlab.ops.traced import operator


# What the kernels of chunks and of steps cannot compute, in words.
def _refuses(
    capability: tuple[int, int],
    normalize: bool = False,
    **widths: Any,
) -> str | None:
    if normalize:
        return "there is no kernel for normalize=True"
    return too_wide(capability, **widths)


RECURRENCE: dict[str, Any] = {
    "chunked": Variants(
        chunked.error_correcting, chunked.normalized_error_correcting
    ),
    "efficient": Variants(
        efficient.error_correcting,
        efficient.normalized_error_correcting,
    ),
    "fla": fla.CORRECTING,
    # Both kinds of kernels are behind one function, which chooses by
    # length.
    "triton": gpu.Kernel(
        "fwlab.ops.delta.kernels",
        "error_correcting",
        minimum=(7, 5),
        refuses=_refuses,
    ),
}
LOOPS = Variants(naive.delta_rule, naive.normalized_delta_rule)
DELTA_RULE = Rule(
    name="delta_rule",
    folder="delta",
    implementations={
        "naive": LOOPS,
        **RECURRENCE,
    },
    gates={"beta": "heads"},
    factors=lambda beta: (None, beta[..., None]),
    corrects=True,
    mixer="delta",
    benchmarks=((1024, 64), (4096, 64)),
    feature_map=DPFP,
    key_norm="sum",
)
DPFP_DELTA_RULE = replace(
    DELTA_RULE,
    name="dpfp_delta_rule",
    # Without "fla", which does not make these features.
    implementations={
        name: entry
        for name, entry in DELTA_RULE.implementations.items()
        if name != "fla"
    },
    mixer=None,
    benchmarks=(),
)
GATED_DELTA_RULE = Rule(
    name="gated_delta_rule",
    folder="delta",
    implementations={
        "naive": Variants(
            naive.gated_delta_rule, naive.normalized_gated_delta_rule
        ),
        **RECURRENCE,
    },
    gates={"beta": "heads", "log_decay": "heads"},
    factors=lambda beta, log_decay: (
        factor(log_decay),
        beta[..., None],
    ),
    corrects=True,
    mixer="gated-delta",
    benchmarks=((1024, 64),),
    feature_map=Identity,
    key_norm="l2",
)


@operator
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    normalize: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | NormalizedState | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, Tensor | NormalizedState]:
    r"""Replace the value of a key, then read (Eqs. 20-25).

    $\bar v_t = W_{t-1} k_t$,
    $W_t = W_{t-1} + \beta_t (v_t - \bar v_t) \otimes k_t$,
    $y_t = W_t q_t$. Keys and queries are features: first apply a map
    and a normalisation of `fwlab.feature_maps`. The recurrence is
    stable while $\beta_t |k_t|^2 \le 2$. For `beta` in $[0, 1]$ and
    features that are not negative, either normalisation ensures this.
    Where it diverges and overflows, a chunked implementation loses the
    whole chunk: up to 63 outputs before the overflow are not finite,
    either. "naive" keeps them.

    - `q`, `k`: `[batch, time, heads, key]`. `q` may have a multiple of
      these heads: consecutive ones then read one memory (grouped
      heads), and `y` has the heads of `q`, the state those of `k`.
    - `v`: `[batch, time, heads, value]`.
    - `beta`: `[batch, time, heads]`, write strength, usually in
      $[0, 1]$: 0 keeps the old value of the key, 1 replaces it.
    - `normalize`: divide what is read with $k$ and $q$ by $z \cdot k$
      and $z \cdot q$ (Eqs. 26-28); the result is 0 where a denominator
      is 0.
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

    Source: Schlag, Irie, Schmidhuber 2021 (arXiv:2102.11174), section
    4.2 and appendix A.1.
    """
    return DELTA_RULE(
        q,
        k,
        v,
        {"beta": beta},
        normalize=normalize,
        scale=scale,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        state=state,
        return_state=return_state,
        implementation=implementation,
    )


@operator
def dpfp_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    nu: int = 1,
    *,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The delta rule on DPFP features divided by their sum.

    The same as `delta_rule` for `sum_normalize(DPFP(nu)(q))` and
    `sum_normalize(DPFP(nu)(k))` (Eqs. 37 and 29). On a GPU the kernels
    make the features: they load the $d$ scalars of a key from HBM, not
    its $2 d \nu$ features.

    - `q`, `k`: `[batch, time, heads, d]`, any values; grouped heads as
      for `delta_rule`.
    - `v`: `[batch, time, heads, value]`.
    - `beta`: `[batch, time, heads]`, write strength in $[0, 1]$.
    - `nu`: the number of shifts of `DPFP`, at least 1.
    - `key_mask`, `cu_seqlens`, `return_state`: as for `delta_rule`.
    - `implementation`: "auto", "naive", "chunked", "efficient" or
      "triton".
    - `state`: `W` `[batch, heads, value, 2 * d * nu]`, or None.
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Source: Schlag, Irie, Schmidhuber 2021 (arXiv:2102.11174).
    """
    phi = DPFP(nu)
    return DPFP_DELTA_RULE(
        q,
        k,
        v,
        {"beta": beta},
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        state=state,
        return_state=return_state,
        implementation=implementation,
        features=lambda x: sum_normalize(phi(x)),
        wider=2 * phi.nu,
        nu=phi.nu,
    )


@operator
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    normalize: bool = False,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | NormalizedState | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, Tensor | NormalizedState]:
    r"""Decay, then replace the value of a key, then read.

    With $\alpha_t = \exp(\text{log\_decay}_t)$ the fast weights first
    become $\tilde W_t = \alpha_t W_{t-1}$; then, as in the delta rule,
    $W_t = \tilde W_t + \beta_t (v_t - \tilde W_t k_t) \otimes k_t$ and
    $y_t = W_t q_t$.

    - `q`, `k`: `[batch, time, heads, key]`, as features; the paper
      divides both by their Euclidean norm. Grouped heads as for
      `delta_rule`.
    - `v`: `[batch, time, heads, value]`.
    - `beta`: `[batch, time, heads]`, write strength, usually in
      $[0, 1]$.
    - `log_decay`: `[batch, time, heads]`, at most 0: 0 keeps the fast
      weights, $-\infty$ erases them.
    - `normalize`: divide what is read with $k$ and $q$ by $z \cdot k$
      and $z \cdot q$ (Eqs. 26-28, with the same decay for $z$ as for
      $W$). $y$ is right however far both fade; but a memory that has
      faded by more than $e^{-80}$ since the last write counts as empty
      for what the next key retrieves.
    - `scale`, `key_mask`, `cu_seqlens`, `state`, `return_state`,
      `implementation`: as for `delta_rule`.
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Source: Yang, Kautz, Hatamizadeh 2024 (arXiv:2412.06464).
    """
    return GATED_DELTA_RULE(
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
