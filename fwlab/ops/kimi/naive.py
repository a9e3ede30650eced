r"""# Kimi Delta Attention, one step at a time

The gated delta rule fades the whole memory of a head by one number. Its
successor in Kimi Linear fades every key channel by a number of its own:
some channels keep what they hold for long, others only for a moment.
Here `k` and `q` are already features, $\phi(k)$ and $\phi(q)$. Equation
numbers are those of
[Schlag et al. 2021](https://arxiv.org/abs/2102.11174), those with a
letter are ours; the rule is that of the
[Kimi team 2025](https://arxiv.org/abs/2510.26692).

This file is the specification. Nothing else is computed with it.

- `q`, `k`, `log_decay`: `[batch, time, heads, key]`, `v`: the same with
  `value`.
- `beta`: `[batch, time, heads]`.
- `W`: `[batch, heads, value, key]`.
"""

import torch
from torch import Tensor


def fade(log_decay: Tensor, W: Tensor) -> Tensor:
    r"""Multiply each key channel, a column of $W$, by its decay:

    $$\tilde W_i = W_{i-1}\,
      \mathrm{diag}\big(e^{\mathrm{log\_decay}_i}\big) \tag{n1}$$

    - `log_decay`: `[..., key]`, `W`: `[..., value, key]`.
    """
    return W * log_decay.exp()[..., None, :]


def read(W: Tensor, q: Tensor) -> Tensor:
    r"""Query the fast weights:

    $$y_i = W_i\, \phi(q_i) \tag{25}$$

    - `W`: `[..., value, key]`, `q`: `[..., key]`.
    """
    return torch.einsum("...vk,...k->...v", W, q)


def correct(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    r"""The delta rule, on what is left of the memory:

    $$W_i = \tilde W_i + \beta_i\,\big(v_i - \tilde W_i\,\phi(k_i)\big)
      \otimes \phi(k_i) \tag{n2}$$

    - `W`: `[..., value, key]`, `k`: `[..., key]`, `v`: `[..., value]`,
      `beta`: `[...]`.
    """
    u = beta[..., None] * (v - read(W, k))
    return W + torch.einsum("...v,...k->...vk", u, k)


def kimi_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    W: Tensor,
) -> tuple[Tensor, Tensor]:
    """Fade, correct, then read."""
    y = []
    for q_t, k_t, v_t, b_t, l_t in zip(
        *(x.unbind(1) for x in (q, k, v, beta, log_decay)), strict=True
    ):
        W = fade(l_t, W)  # (n1)
        W = correct(W, k_t, v_t, b_t)  # (n2)
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W
