r"""# The gated delta rule, one step at a time

The delta rule removes only what a key holds: all other content stays forever. In Gated
DeltaNet ([Yang et al. 2024](https://arxiv.org/abs/2412.06464)), all fast weights of a
head first decay. Equation numbers are those of [Schlag et al.
2021](https://arxiv.org/abs/2102.11174), those with a letter are ours.

- `q`, `k`: `[batch, time, heads, key]`, `v`: the same with `value`.
- `beta`, `log_decay`: `[batch, time, heads]`.
- `W`: `[batch, heads, value, key]`, `z`: `[batch, heads, key]`.
"""

from typing import Unpack

import torch
from torch import Tensor

from fwlab.ops._operation import Keys, LogDecay, PerHead, Queries, Values
from fwlab.ops._rules import Inputs, RuleOptions, factor, rule
from fwlab.ops.delta import WITH_KERNELS
from fwlab.ops.delta.delta import correct, delta_step, normalized_read, read, steps


def loop(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, W: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""Decay by $d_i = e^{\mathrm{log\_decay}_i}$, then apply the delta rule and read:

    $$W_i = d_i\, W_{i-1} + \beta_i\, \big(v_i - d_i\, W_{i-1}\,
      \phi(k_i)\big) \otimes \phi(k_i) \tag{n1}$$

    This is Gated DeltaNet (Yang et al. 2024), who write $\alpha$ for the decay.
    """
    y = []
    for q_t, k_t, v_t, b_t, l_t in steps(q, k, v, beta, log_decay):
        W = l_t.exp()[..., None, None] * W
        W = delta_step(W, k_t, v_t, b_t)  # (n1)
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W


def normalized_loop(
    q: Tensor, k: Tensor, v: Tensor, ask: Tensor, beta: Tensor,
    log_decay: Tensor, W: Tensor, z: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gated delta rule with a normaliser, which decays like $W$."""
    y = []
    for q_t, k_t, v_t, a_t, b_t, l_t in steps(q, k, v, ask, beta, log_decay):
        W = l_t.exp()[..., None, None] * W
        z = l_t.exp()[..., None] * z
        # The remaining lines are the same as without a decay.
        v_bar = normalized_read(W, z, a_t)  # Eq. 27
        W = correct(W, k_t, v_t, v_bar, b_t)  # Eq. 24
        z = z + k_t  # Eq. 26
        y.append(normalized_read(W, z, q_t))  # Eq. 28
    return torch.stack(y, dim=1), W, z


@rule(WITH_KERNELS, loop, normalized_loop, corrects=True)
def gated_delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    beta: PerHead,
    log_decay: LogDecay,
    *,
    normalize: bool = False,
    **options: Unpack[RuleOptions],
) -> Inputs:
    r"""Decay the fast weights, replace the value of a key, then read.

    With $\alpha_t = \exp(\text{log\_decay}_t)$ the fast weights first become $\tilde
    W_t = \alpha_t W_{t-1}$; then, as in the delta rule, $W_t = \tilde W_t + \beta_t
    (v_t - \tilde W_t k_t) \otimes k_t$ and $y_t = W_t q_t$.

    - `q`, `k`: `[batch, time, heads, key]`, as features; the paper divides both by
      their Euclidean norm. Grouped heads as for `sum_rule`.
    - `v`: `[batch, time, heads, value]`.
    - `beta`: `[batch, time, heads]`, write strength, usually in $[0, 1]$.
    - `log_decay`: `[batch, time, heads]`, at most 0: 0 keeps the fast weights,
      $-\infty$ erases them.
    - `normalize`: divide values read with $k$ and $q$ by $z \cdot k$ and $z \cdot q$
      (Eqs. 26-28, with the same decay for $z$ as for $W$). On a CPU a single decay of any
      strength keeps what a key retrieves: only a `log_decay` of $-\infty$ empties the
      memory. Elsewhere, and in graphs, one below -80 may do so in float32, too.
    - `options`: as for `sum_rule`.
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    The fast weights decay to a half, then half of the error is written.

        >>> k = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> half = torch.full((1, 2, 1), 0.5)
        >>> ops.gated_delta_rule(k, k, v, half, half.log()).flatten()
        tensor([2.0000, 4.5000])

    Source: Yang, Kautz, Hatamizadeh 2024 (arXiv:2412.06464).
    """
    return Inputs(decay=factor(log_decay), strength=beta[..., None])
