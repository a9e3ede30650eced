r"""# Comba, one step at a time

The delta rule erases and writes with one key. Comba ([Hu et al.
2025](https://arxiv.org/abs/2506.02475)) erases with the key times a factor: a head with
a small factor removes less of what it holds. Equation numbers are those of [Schlag et
al. 2021](https://arxiv.org/abs/2102.11174).

- `q`, `k`: `[batch, time, heads, key]`, `v`: the same with `value`.
- `W`: `[batch, heads, value, key]`.
- `beta`, `log_decay`, `ask`: `[batch, time, heads]`.
"""

from typing import Unpack

import torch
from torch import Tensor

from fwlab.ops._operation import Keys, LogDecay, PerHead, Queries, Values
from fwlab.ops._rules import Inputs, RuleOptions, factor, rule
from fwlab.ops.delta import FORMS
from fwlab.ops.delta.delta import correct, read, steps


def loop(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor,
    ask: Tensor, W: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""Decay, correct the value that a scaled key retrieves, and read, at each step:

    $$\bar v_i = d_i\, W_{i-1}\,(c_i\, k_i) \tag{n6}$$
    """
    y = []
    for q_t, k_t, v_t, b_t, l_t, c_t in steps(q, k, v, beta, log_decay, ask):
        W = l_t.exp()[..., None, None] * W
        v_bar = read(W, c_t[..., None] * k_t)  # (n6)
        W = correct(W, k_t, v_t, v_bar, b_t)  # Eq. 24
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W


@rule(FORMS, loop, corrects=True)
def comba_rule(
    q: Queries,
    k: Keys,
    v: Values,
    beta: PerHead,
    log_decay: LogDecay,
    ask: PerHead,
    **options: Unpack[RuleOptions],
) -> Inputs:
    r"""Decay the fast weights, replace what a scaled key retrieves, then read (Comba).

    With $\alpha_t = \exp(\text{log\_decay}_t)$ and $\tilde W_t = \alpha_t W_{t-1}$:
    $W_t = \tilde W_t + \beta_t (v_t - \text{ask}_t\, \tilde W_t k_t) \otimes k_t$ and
    $y_t = W_t q_t$.

    - `q`, `k`: `[batch, time, heads, key]`, as features; the paper divides both by
      their Euclidean norm. Grouped heads as for `sum_rule`.
    - `v`: `[batch, time, heads, value]`.
    - `beta`: `[batch, time, heads]`, write strength, usually in $[0, 1]$.
    - `log_decay`: `[batch, time, heads]`, at most 0.
    - `ask`: `[batch, time, heads]`, the factor of the key that erases; 1 gives
      `gated_delta_rule`. (The paper's layer trains one per head, and subtracts a part
      of that key from the query.)
    - `options`: as for `sum_rule`.
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    A factor of one half removes half of what the key holds.

        >>> k = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> half = torch.full((1, 2, 1), 0.5)
        >>> one, none = torch.ones(1, 2, 1), torch.zeros(1, 2, 1)
        >>> ops.comba_rule(k, k, v, one, none, half).flatten()
        tensor([ 4., 10.])

    Source: Hu et al. 2025 (arXiv:2506.02475).
    """
    return Inputs(factor(log_decay), beta[..., None], erase_key=ask[..., None] * k)
