r"""# The gated rule, one step at a time

A memory that only adds eventually fills up. The gated rule forgets: with every write,
all fast weights decay. Equation numbers are those of [Schlag et al.
2021](https://arxiv.org/abs/2102.11174); the rule is that of [Peng et al.
2021](https://arxiv.org/abs/2103.02143).

- `q`, `k`: `[batch, time, heads, key]`, `v`: the same with `value`.
- `beta`: `[batch, time, heads]`.
- `W`: `[batch, heads, value, key]`, `z`: `[batch, heads, key]`.
"""

from typing import Unpack

import torch
from torch import Tensor

from fwlab.ops._operation import Keys, LogDecay, PerHead, Queries, Values
from fwlab.ops._rules import Inputs, RuleOptions, factor, rule
from fwlab.ops.linear import FORMS
from fwlab.ops.linear.sum import normalized_read, read, steps, write


def loop(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, W: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Decay the fast weights by $1 - \beta$, add a pair, then read, at each step:

    $$W_i = (1 - \beta_i)\, W_{i-1}
      + \beta_i\, v_i \otimes \phi(k_i) \tag{52}$$

    All fast weights decay, not only what the key holds: this is the difference to the
    delta rule (appendix B).
    """
    y = []
    for q_t, k_t, v_t, b_t in steps(q, k, v, beta):
        b_t = b_t[..., None]
        W = write((1 - b_t[..., None]) * W, k_t, b_t * v_t)  # Eq. 52
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W


def normalized_loop(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, W: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Compute the gated rule with a normaliser, as Random Feature Attention does:

    $$z_i = (1 - \beta_i)\, z_{i-1} + \beta_i\, \phi(k_i) \tag{n3}$$

    Peng et al. 2021 (Eq. 7) write $g = 1 - \beta$.
    """
    y = []
    for q_t, k_t, v_t, b_t in steps(q, k, v, beta):
        b_t = b_t[..., None]
        W = write((1 - b_t[..., None]) * W, k_t, b_t * v_t)  # Eq. 52
        z = (1 - b_t) * z + b_t * k_t  # (n3)
        y.append(normalized_read(W, z, q_t))  # Eq. 19
    return torch.stack(y, dim=1), W, z


@rule(FORMS, loop, normalized_loop)
def gated_rule(
    q: Queries,
    k: Keys,
    v: Values,
    beta: PerHead,
    *,
    log_decay: LogDecay | None = None,
    normalize: bool = False,
    **options: Unpack[RuleOptions],
) -> Inputs:
    r"""Decay the fast weights, then write a key-value pair (Eq. 52).

    $W_t = (1 - \beta_t) W_{t-1} + \beta_t\, v_t \otimes k_t$, and $y_t = W_t q_t$. With
    `normalize` it is gated Random Feature Attention: $z_t = (1 - \beta_t) z_{t-1} +
    \beta_t k_t$ and $y_t = W_t q_t \,/\, (z_t \cdot q_t)$.

    - `q`, `k`: `[batch, time, heads, key]`, as features; grouped heads as for
      `sum_rule`.
    - `v`: `[batch, time, heads, value]`.
    - `beta`: `[batch, time, heads]`, usually in $[0, 1]$: 0 keeps the fast weights, 1
      replaces all of them with this pair.
    - `log_decay`, `normalize`, `options`: as for `sum_rule`.
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Two values are written under one key.

        >>> k = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> half = torch.full((1, 2, 1), 0.5)
        >>> ops.gated_rule(k, k, v, half).flatten()
        tensor([2., 5.])

    Source: Peng et al. 2021 (arXiv:2103.02143), Eq. 7, who write $g = 1 - \beta$;
    without normaliser Schlag et al. 2021 (arXiv:2102.11174), Eq. 52.
    """
    kept, fading = 1 - beta[..., None], factor(log_decay)
    return Inputs(kept if fading is None else kept * fading, beta[..., None])
