r"""# RWKV-7, one step at a time

RWKV-7 ([Peng et al. 2025](https://arxiv.org/abs/2503.14456)) removes with one pair of
vectors and writes with another: the memory is multiplied by a diagonal matrix plus a
matrix of rank one. In the delta rule these are the identity and $-\beta\, k \otimes k$.
Equation numbers are those of [Schlag et al. 2021](https://arxiv.org/abs/2102.11174),
those with a letter are ours. The paper writes vectors as rows: its $v^\top k$ is our $v
\otimes k$.

- `q`, `k`, `a`, `b`, `log_decay`: `[batch, time, heads, key]`.
- `v`: `[batch, time, heads, value]`.
- `W`: `[batch, heads, value, key]`.
"""

from typing import Unpack

import torch
from torch import Tensor

from fwlab.ops._operation import Keys, LogDecayPerKey, Queries, Values
from fwlab.ops._rules import Inputs, RuleOptions, factor, in_turn, rule
from fwlab.ops.delta import FORMS
from fwlab.ops.delta.delta import read, steps


def transition(W: Tensor, a: Tensor, b: Tensor, log_decay: Tensor) -> Tensor:
    r"""Multiply the fast weights by a diagonal matrix plus a matrix of rank one:

    $$\hat W_i = W_{i-1}\,\big(\mathrm{diag}(e^{\mathrm{log\_decay}_i})
      + a_i\, b_i^\top\big) \tag{n8}$$

    - `W`: `[..., value, key]`; `a`, `b`, `log_decay`: `[..., key]`.
    """
    moved = torch.einsum("...v,...k->...vk", read(W, a), b)
    return W * log_decay.exp()[..., None, :] + moved


def loop(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, log_decay: Tensor, W: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Apply the transition, add a key-value pair, then read, at each step."""
    y = []
    for q_t, k_t, v_t, a_t, b_t, l_t in steps(q, k, v, a, b, log_decay):
        W = transition(W, a_t, b_t, l_t)  # (n8)
        W = W + torch.einsum("...v,...k->...vk", v_t, k_t)  # Eq. 17
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W


@rule(FORMS, loop, corrects=True)
def rwkv7_rule(
    q: Queries,
    k: Keys,
    v: Values,
    a: Keys,
    b: Keys,
    log_decay: LogDecayPerKey,
    **options: Unpack[RuleOptions],
) -> Inputs:
    r"""Decay key channels, add a rank-one term and key-value pair, then read (RWKV-7).

    $W_t = W_{t-1} \big(\mathrm{diag}(e^{\text{log\_decay}_t}) + a_t b_t^\top\big) + v_t
    \otimes k_t$ and $y_t = W_t q_t$.

    - `q`, `k`: `[batch, time, heads, key]`. Grouped heads as for `sum_rule`.
    - `v`: `[batch, time, heads, value]`.
    - `a`, `b`: `[batch, time, heads, key]`; the paper has $a = -\hat\kappa$ of length
      1, and $b = \hat\kappa$ times a rate from 0 to 1 per channel.
    - `log_decay`: `[batch, time, heads, key]`, at most 0; the paper keeps it above
      $-0.61$. The rule is exact for any, $-\infty$ included.
    - `options`: as for `sum_rule`.
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    With $a = -b$, the value of the key $b$ is removed before the pair is added.

        >>> k = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> none = torch.zeros_like(k)
        >>> ops.rwkv7_rule(k, k, v, -k, k, none).flatten()
        tensor([4., 8.])

    Source: Peng et al. 2025 (arXiv:2503.14456).
    """
    # Each token takes two steps: a delta step with `a`, `b` towards 0, then the pair.
    # `a` reads before the decay; otherwise it would have to be divided by the decay.
    none = torch.zeros_like(a)
    return Inputs(
        decay=factor(in_turn(log_decay, none)),
        erase_key=in_turn(-a, none),
        q=in_turn(torch.zeros_like(q), q),
        k=in_turn(b, k),
        v=in_turn(torch.zeros_like(v), v),
        early=True,
    )
