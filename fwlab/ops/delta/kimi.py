r"""# Kimi Delta Attention, one step at a time

The gated delta rule has one decay for all fast weights of a head. Its successor in Kimi
Linear has one decay for every key channel: some channels keep their content for a long
time, others only for a moment. Here `k` and `q` are already features,
$\phi(k)$ and $\phi(q)$. Equation numbers are those of [Schlag et al.
2021](https://arxiv.org/abs/2102.11174), those with a letter are ours; the rule is that
of the [Kimi team 2025](https://arxiv.org/abs/2510.26692).

- `q`, `k`, `log_decay`: `[batch, time, heads, key]`, `v`: the same with `value`.
- `beta`: `[batch, time, heads]`.
- `W`: `[batch, heads, value, key]`.
"""

from typing import Unpack

import torch
from torch import Tensor

from fwlab.ops._operation import Keys, LogDecayPerKey, PerHead, Queries, Values
from fwlab.ops._rules import Inputs, RuleOptions, factor, rule
from fwlab.ops.delta import FORMS
from fwlab.ops.delta.delta import delta_step, read, steps


def fade(log_decay: Tensor, W: Tensor) -> Tensor:
    r"""Multiply each key channel, a column of $W$, by its decay:

    $$\tilde W_i = W_{i-1}\,
      \mathrm{diag}\big(e^{\mathrm{log\_decay}_i}\big) \tag{n2}$$

    - `log_decay`: `[..., key]`, `W`: `[..., value, key]`.
    """
    return W * log_decay.exp()[..., None, :]


def loop(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, W: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    r"""Decay every key channel, apply the delta rule, then read, at each step:

    $$W_i = \tilde W_i + \beta_i\,\big(v_i - \tilde W_i\,\phi(k_i)\big)
      \otimes \phi(k_i) \tag{n3}$$
    """
    y = []
    for q_t, k_t, v_t, b_t, l_t in steps(q, k, v, beta, log_decay):
        W = fade(l_t, W)  # (n2)
        W = delta_step(W, k_t, v_t, b_t)  # (n3)
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W


@rule(FORMS, loop, corrects=True)
def kimi_delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    beta: PerHead,
    log_decay: LogDecayPerKey,
    **options: Unpack[RuleOptions],
) -> Inputs:
    r"""Decay every key channel, replace the value of a key, then read.

    $\tilde W_t = W_{t-1}\, \mathrm{diag}(\alpha_t)$ with $\alpha_t =
    \exp(\text{log\_decay}_t)$ per key channel; then, as in the delta rule, $W_t =
    \tilde W_t + \beta_t (v_t - \tilde W_t k_t) \otimes k_t$ and $y_t = W_t q_t$.

    - `q`, `k`: `[batch, time, heads, key]`, as features; the paper divides both by
      their Euclidean norm. Grouped heads as for `sum_rule`.
    - `v`: `[batch, time, heads, value]`.
    - `beta`: `[batch, time, heads]`, write strength, usually in $[0, 1]$.
    - `log_decay`: `[batch, time, heads, key]`, at most 0: 0 keeps a channel, $-\infty$
      empties it.
    - `options`: as for `sum_rule`.
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    This is exact for any log decay up to 0: a chunk may mix strong and weak decays.

    The channel of this key decays to a half; the other channel does not decay.

        >>> k = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> half = torch.full((1, 2, 1), 0.5)
        >>> fade = torch.tensor([0.5, 1.0]).log().expand_as(k)
        >>> ops.kimi_delta_rule(k, k, v, half, fade).flatten()
        tensor([2.0000, 4.5000])

    Source: Kimi team 2025 (arXiv:2510.26692).
    """
    return Inputs(decay=factor(log_decay), strength=beta[..., None])
