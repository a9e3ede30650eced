r"""# The delta rule, one step at a time

The sum rule can only add: two values written under one key are read
back as a mixture. The delta rule first looks up what the key already
holds, and then writes the *difference*. Its gated relatives let the
memory fade first. Here `k` and `q` are already features, $\phi(k)$ and
$\phi(q)$. Equation numbers are those of
[Schlag et al. 2021](https://arxiv.org/abs/2102.11174).

This file is the specification: one loop for each rule and each of its
variants, in float32 at least. Nothing else is computed with it.

- `q`, `k`: `[batch, time, heads, key]`, `v`: the same with `value`.
- `beta`, `log_decay`: `[batch, time, heads]`.
- `W`: `[batch, heads, value, key]`, `z`: `[batch, heads, key]`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fwlab.feature_maps import divide


def read(W: Tensor, q: Tensor) -> Tensor:
    r"""Query the fast weights:

    $$y_i = W_i\, \phi(q_i) \tag{25}$$

    - `W`: `[..., value, key]`, `q`: `[..., key]`.
    """
    return torch.einsum("...vk,...k->...v", W, q)


def correct(
    W: Tensor, k: Tensor, v: Tensor, v_bar: Tensor, beta: Tensor
) -> Tensor:
    r"""Write the new value, remove the old one:

    $$W_i = W_{i-1} + \beta_i\,
      (v_i - \bar v_i) \otimes \phi(k_i) \tag{24}$$

    This is Eq. 23 with Eq. 22 put in, as derived in the paper's
    appendix A.1.

    - `W`: `[..., value, key]`, `k`: `[..., key]`, `v` and `v_bar`:
      `[..., value]`.
    - `beta`: `[...]`, the write strength, from 0 (keep what is there)
      to 1 (replace it).
    """
    u = beta[..., None] * (v - v_bar)
    return W + torch.einsum("...v,...k->...vk", u, k)


def delta_step(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    r"""Move the value stored under a key towards a new one:

    $$\bar v_i = W_{i-1}\, \phi(k_i) \tag{20}$$

    - `W`: `[..., value, key]`, `k`: `[..., key]`, `v`: `[..., value]`,
      `beta`: `[...]`.
    """
    v_bar = read(W, k)  # Eq. 20
    return correct(W, k, v, v_bar, beta)  # Eq. 24


def normalized_read(W: Tensor, z: Tensor, q: Tensor) -> Tensor:
    r"""A reading, divided by what the same key reads in $z$:

    $$\bar v_i = \frac{W_{i-1}\,\phi(k_i)}
                      {z_{i-1} \cdot \phi(k_i)} \tag{27}$$
    $$y_i = \frac{W_i\,\phi(q_i)}{z_i \cdot \phi(q_i)} \tag{28}$$

    - `W`: `[..., value, key]`, `z` and `q`: `[..., key]`.
    - Returns 0 where the denominator is 0: an empty memory holds 0.
    """
    return divide(read(W, q), (z * q).sum(-1, keepdim=True))


def steps(*sequences: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Walk through `[batch, time, ...]` tensors, one step at a time."""
    return zip(*(x.unbind(1) for x in sequences), strict=True)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, W: Tensor
) -> tuple[Tensor, Tensor]:
    """Correct, then read."""
    y = []
    for q_t, k_t, v_t, b_t in steps(q, k, v, beta):
        W = delta_step(W, k_t, v_t, b_t)  # Eqs. 20, 24
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W


def normalized_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ask: Tensor,
    beta: Tensor,
    W: Tensor,
    z: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Both readings are means; $z$ sums up the keys:

    $$z_i = z_{i-1} + \phi(k_i) \tag{26}$$

    - `ask`: the keys of Eq. 27, like `k`. Their length cancels there,
      so they come with one that neither overflows nor underflows.
    """
    y = []
    for q_t, k_t, v_t, a_t, b_t in steps(q, k, v, ask, beta):
        v_bar = normalized_read(W, z, a_t)  # Eq. 27
        W = correct(W, k_t, v_t, v_bar, b_t)  # Eq. 24
        z = z + k_t  # Eq. 26
        y.append(normalized_read(W, z, q_t))  # Eq. 28
    return torch.stack(y, dim=1), W, z


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    W: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""Fade by $d_i = e^{\mathrm{log\_decay}_i}$ first, then correct:

    $$W_i = d_i\, W_{i-1} + \beta_i\, \big(v_i - d_i\, W_{i-1}\,
      \phi(k_i)\big) \otimes \phi(k_i) \tag{n1}$$

    This is Gated DeltaNet (Yang et al. 2024), who write $\alpha$ for
    the decay.
    """
    y = []
    for q_t, k_t, v_t, b_t, l_t in steps(q, k, v, beta, log_decay):
        W = l_t.exp()[..., None, None] * W
        W = delta_step(W, k_t, v_t, b_t)  # (n1)
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W


def normalized_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ask: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    W: Tensor,
    z: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fade the memory and its normaliser first."""
    y = []
    for q_t, k_t, v_t, a_t, b_t, l_t in steps(
        q, k, v, ask, beta, log_decay
    ):
        W = l_t.exp()[..., None, None] * W
        z = l_t.exp()[..., None] * z
        # From here on as without a decay.
        v_bar = normalized_read(W, z, a_t)  # Eq. 27
        W = correct(W, k_t, v_t, v_bar, b_t)  # Eq. 24
        z = z + k_t  # Eq. 26
        y.append(normalized_read(W, z, q_t))  # Eq. 28
    return torch.stack(y, dim=1), W, z
