"""The delta rule on DPFP features, which its kernels make themselves."""

from dataclasses import replace

from torch import Tensor

from fwlab import arguments
from fwlab.feature_maps import DPFP, sum_normalize
from fwlab.ops.correcting.rules.delta import DELTA_RULE

DPFP_DELTA_RULE = replace(
    DELTA_RULE,
    name="dpfp_delta_rule",
    # Without "fla", which does not make these features.
    implementations={
        name: form
        for name, form in DELTA_RULE.implementations.items()
        if name != "fla"
    },
    mixer=None,
    benchmarks=(),
)


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
      for `sum_rule`.
    - `v`: `[batch, time, heads, value]`.
    - `beta`: `[batch, time, heads]`, write strength in $[0, 1]$.
    - `nu`: the number of shifts of `DPFP`, at least 1.
    - `key_mask`, `cu_seqlens`, `return_state`: as for `sum_rule`.
    - `implementation`: "auto", "naive", "chunked", "efficient" or
      "triton".
    - `state`: `W` `[batch, heads, value, 2 * d * nu]`, or None.
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Queries and keys are not features yet.

        >>> k = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> one = torch.ones(1, 2, 1)
        >>> ops.dpfp_delta_rule(k, k + 1, v, one).shape
        torch.Size([1, 2, 1, 1])

    Source: Schlag, Irie, Schmidhuber 2021 (arXiv:2102.11174).
    """
    arguments.integers("dpfp_delta_rule", 1, nu=nu)
    phi = DPFP(nu)
    return DPFP_DELTA_RULE(
        q, k, v, {"beta": beta},
        key_mask=key_mask, cu_seqlens=cu_seqlens, state=state,
        return_state=return_state, implementation=implementation,
        features=lambda x: sum_normalize(phi(x)),
        wider=2 * phi.nu,
        nu=phi.nu,
    )  # fmt: skip
