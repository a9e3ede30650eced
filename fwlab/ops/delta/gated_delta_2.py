r"""# The gated delta rule 2, one step at a time

In the delta rule one number per head says how much is removed and how much is written.
Gated DeltaNet 2 ([2026](https://arxiv.org/abs/2605.22791)) separates the two: a gate
per key channel *erases*, a gate per value channel *writes*. Equation numbers are those
of [Schlag et al. 2021](https://arxiv.org/abs/2102.11174), those with a letter are ours.

- `q`, `k`, `erase`, `log_decay`: `[batch, time, heads, key]`.
- `v`, `write`: `[batch, time, heads, value]`.
- `W`: `[batch, heads, value, key]`.
"""

from typing import Unpack

import torch
from torch import Tensor

from fwlab.ops._operation import Keys, LogDecayPerKey, Queries, Values
from fwlab.ops._rules import Inputs, RuleOptions, factor, rule
from fwlab.ops.delta import FORMS
from fwlab.ops.delta.delta import read, steps


def replace(W: Tensor, k: Tensor, v: Tensor, erase: Tensor, write: Tensor) -> Tensor:
    r"""Erase what the gated key retrieves, and write the gated value:

    $$W_i = \tilde W_i + \big(w_i \odot v_i
      - \tilde W_i\,(e_i \odot k_i)\big) \otimes k_i \tag{n5}$$

    - `W`: `[..., value, key]`, `k` and `erase`: `[..., key]`, `v` and `write`: `[...,
      value]`.
    """
    u = write * v - read(W, erase * k)
    return W + torch.einsum("...v,...k->...vk", u, k)


def loop(
    q: Tensor, k: Tensor, v: Tensor, erase: Tensor, write: Tensor,
    log_decay: Tensor, W: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decay every key channel, erase and write with gates, then read, at each step."""
    y = []
    for q_t, k_t, v_t, e_t, w_t, l_t in steps(q, k, v, erase, write, log_decay):
        W = W * l_t.exp()[..., None, :]
        W = replace(W, k_t, v_t, e_t, w_t)  # (n5)
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W


@rule(FORMS, loop, corrects=True)
def gated_delta_rule_2(
    q: Queries,
    k: Keys,
    v: Values,
    erase: Keys,
    write: Values,
    log_decay: LogDecayPerKey,
    **options: Unpack[RuleOptions],
) -> Inputs:
    r"""Decay, erase and write with one gate per channel, then read.

    $\tilde W_t = W_{t-1}\, \mathrm{diag}(e^{\text{log\_decay}_t})$, $W_t = \tilde W_t +
    \big(\text{write}_t \odot v_t
    - \tilde W_t (\text{erase}_t \odot k_t)\big) \otimes k_t$ and
    $y_t = W_t q_t$. With both gates equal to $\beta_t$ it is `kimi_delta_rule`.

    - `q`, `k`: `[batch, time, heads, key]`, as features; the paper divides both by
      their Euclidean norm. Grouped heads as for `sum_rule`.
    - `v`: `[batch, time, heads, value]`.
    - `erase`: `[batch, time, heads, key]`, usually in $[0, 1]$.
    - `write`: `[batch, time, heads, value]`, usually in $[0, 1]$.
    - `log_decay`: `[batch, time, heads, key]`, at most 0.
    - `options`: as for `sum_rule`.
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Without erasing, the second value is added.

        >>> k = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> none = torch.zeros_like(k)
        >>> y = ops.gated_delta_rule_2(
        ...     k, k, v, none, torch.ones_like(v), none
        ... )
        >>> y.flatten()
        tensor([ 4., 12.])

    Source: Gated DeltaNet 2, 2026 (arXiv:2605.22791).
    """
    return Inputs(decay=factor(log_decay), erase_key=erase * k, v=write * v)
