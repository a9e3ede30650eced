"""Kimi Delta Attention: the gated delta rule, channel by channel."""

from torch import Tensor

from fwlab.feature_maps import Identity
from fwlab.ops import fla
from fwlab.ops.delta import chunked, efficient
from fwlab.ops.kimi import naive
from fwlab.ops.operation import Variants
from fwlab.ops.rule import Rule, factor
from fwlab.ops.traced import operator

KIMI_DELTA_RULE = Rule(
    name="kimi_delta_rule",
    folder="kimi",
    implementations={
        "naive": Variants(naive.kimi_delta_rule),
        "chunked": chunked.error_correcting,
        "efficient": efficient.error_correcting,
        "fla": fla.CORRECTING,
    },
    gates={"beta": "heads", "log_decay": "heads key"},
    factors=lambda beta, log_decay: (
        factor(log_decay),
        beta[..., None],
    ),
    corrects=True,
    normalizes=False,
    mixer="kimi-delta",
    feature_map=Identity,
    key_norm="l2",
    benchmarks=((1024, 64),),
)


@operator
def kimi_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    state: Tensor | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Fade every key channel, then replace what a key holds, then read.

    $\tilde W_t = W_{t-1}\, \mathrm{diag}(\alpha_t)$ with
    $\alpha_t = \exp(\text{log\_decay}_t)$ per key channel; then, as in
    the delta rule,
    $W_t = \tilde W_t + \beta_t (v_t - \tilde W_t k_t) \otimes k_t$ and
    $y_t = W_t q_t$.

    - `q`, `k`: `[batch, time, heads, key]`, as features; the paper
      divides both by their Euclidean norm. Grouped heads as for
      `delta_rule`.
    - `v`: `[batch, time, heads, value]`.
    - `beta`: `[batch, time, heads]`, write strength, usually in
      $[0, 1]$.
    - `log_decay`: `[batch, time, heads, key]`, at most 0: 0 keeps a
      channel, $-\infty$ empties it.
    - `scale`: a factor of `q`; None = 1.
    - `key_mask`: `bool [batch, time]`, True = real token. Masked steps
      leave the state untouched and return 0.
    - `cu_seqlens`: borders of packed documents, as for `delta_rule`.
    - `state`: the tensor `W` `[batch, heads, value, key]` that an
      earlier call returned; None = zeros. float32 for half-precision
      inputs.
    - `return_state`: return `(y, state)` instead of `y`.
    - `implementation`: "auto", "naive", "chunked", "efficient" or
      "fla".
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Exact for any log decay up to 0: strong and weak ones may be mixed
    within a chunk.

    Source: Kimi team 2025 (arXiv:2510.26692).
    """
    return KIMI_DELTA_RULE(
        q,
        k,
        v,
        {"beta": beta, "log_decay": log_decay},
        scale=scale,
        key_mask=key_mask,
        cu_seqlens=cu_seqlens,
        state=state,
        return_state=return_state,
        implementation=implementation,
    )
