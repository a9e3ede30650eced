r"""# The sum rule and the gated rule, one step at a time

Drop the softmax from attention, and the growing list of keys and values
becomes one matrix $W$: a memory that adds up outer products. The gated
rule lets that memory fade. Here `k` and `q` are already features,
$\phi(k)$ and $\phi(q)$. Equation numbers are those of
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


def write(W: Tensor, k: Tensor, v: Tensor) -> Tensor:
    r"""Add one association to the fast weights:

    $$W_i = W_{i-1} + v_i \otimes \phi(k_i) \tag{17}$$

    - `W`: `[..., value, key]`, `k`: `[..., key]`, `v`: `[..., value]`.
    """
    return W + torch.einsum("...v,...k->...vk", v, k)


def read(W: Tensor, q: Tensor) -> Tensor:
    r"""Query the fast weights:

    $$y_i = W_i\, \phi(q_i) \tag{25}$$

    - `W`: `[..., value, key]`, `q`: `[..., key]`.
    """
    return torch.einsum("...vk,...k->...v", W, q)


def normalized_read(W: Tensor, z: Tensor, q: Tensor) -> Tensor:
    r"""Query the fast weights for a weighted mean of values:

    $$y_i = \frac{W_i\,\phi(q_i)}{z_i \cdot \phi(q_i)} \tag{19}$$

    - `W`: `[..., value, key]`, `z` and `q`: `[..., key]`.
    - Returns 0 where the denominator is 0.
    """
    return divide(read(W, q), (z * q).sum(-1, keepdim=True))


def fade(d: Tensor, W: Tensor) -> Tensor:
    """Multiply the whole memory of each head by its number.

    - `d`: `[batch, heads]`, `W`: `[batch, heads, ...]`.
    """
    return d.unflatten(-1, (-1, *[1] * (W.dim() - 2))) * W


def steps(*sequences: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Walk through `[batch, time, ...]` tensors, one step at a time.

    `unbind` cuts the time axis once. Indexing `k[:, t]` in a loop would
    make the backward pass quadratic in time: the gradient of each index
    is a tensor of zeros as large as all of `k`.
    """
    return zip(*(x.unbind(1) for x in sequences), strict=True)


def sum_rule(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor
) -> tuple[Tensor, Tensor]:
    """Linear attention without a normaliser: add, then read."""
    y = []
    for q_t, k_t, v_t in steps(q, k, v):
        W = write(W, k_t, v_t)  # Eq. 17
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W


def normalized_sum_rule(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Linear attention. The normaliser $z$ sums up the keys:

    $$z_i = z_{i-1} + \phi(k_i) \tag{18}$$
    """
    y = []
    for q_t, k_t, v_t in steps(q, k, v):
        W = write(W, k_t, v_t)  # Eq. 17
        z = z + k_t  # Eq. 18
        y.append(normalized_read(W, z, q_t))  # Eq. 19
    return torch.stack(y, dim=1), W, z


def decaying_sum_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, W: Tensor
) -> tuple[Tensor, Tensor]:
    r"""A sum that fades by a factor $d_i = e^{\mathrm{log\_decay}_i}$:

    $$W_i = d_i\, W_{i-1} + v_i \otimes \phi(k_i) \tag{n1}$$
    """
    y = []
    for q_t, k_t, v_t, l_t in steps(q, k, v, log_decay):
        W = write(fade(l_t.exp(), W), k_t, v_t)  # (n1)
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W


def decaying_normalized_sum_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    W: Tensor,
    z: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Keys fade with the values that were written with them:

    $$z_i = d_i\, z_{i-1} + \phi(k_i) \tag{n2}$$
    """
    y = []
    for q_t, k_t, v_t, l_t in steps(q, k, v, log_decay):
        W = write(fade(l_t.exp(), W), k_t, v_t)  # (n1)
        z = fade(l_t.exp(), z) + k_t  # (n2)
        y.append(normalized_read(W, z, q_t))  # Eq. 19
    return torch.stack(y, dim=1), W, z


def gated_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, W: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Make room for what is written:

    $$W_i = (1 - \beta_i)\, W_{i-1}
      + \beta_i\, v_i \otimes \phi(k_i) \tag{52}$$

    The whole memory pays for it, not only what the key held: that is
    the difference to the delta rule (appendix B).
    """
    y = []
    for q_t, k_t, v_t, b_t in steps(q, k, v, beta):
        W = write(fade(1 - b_t, W), k_t, fade(b_t, v_t))  # Eq. 52
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W


def normalized_gated_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, W: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Gated Random Feature Attention gates the normaliser, too:

    $$z_i = (1 - \beta_i)\, z_{i-1} + \beta_i\, \phi(k_i) \tag{n3}$$

    Peng et al. 2021 (Eq. 7) write $g = 1 - \beta$.
    """
    y = []
    for q_t, k_t, v_t, b_t in steps(q, k, v, beta):
        W = write(fade(1 - b_t, W), k_t, fade(b_t, v_t))  # Eq. 52
        z = fade(1 - b_t, z) + fade(b_t, k_t)  # (n3)
        y.append(normalized_read(W, z, q_t))  # Eq. 19
    return torch.stack(y, dim=1), W, z


def decaying_gated_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    W: Tensor,
) -> tuple[Tensor, Tensor]:
    """Both ways to forget: a decay of (n1), then Eq. 52."""
    y = []
    for q_t, k_t, v_t, b_t, l_t in steps(q, k, v, beta, log_decay):
        W = fade(l_t.exp(), W)  # (n1)
        W = write(fade(1 - b_t, W), k_t, fade(b_t, v_t))  # Eq. 52
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W


def decaying_normalized_gated_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    W: Tensor,
    z: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with a normaliser."""
    y = []
    for q_t, k_t, v_t, b_t, l_t in steps(q, k, v, beta, log_decay):
        # The normaliser forgets whatever the memory forgets.
        W = fade(l_t.exp(), W)  # (n1)
        z = fade(l_t.exp(), z)  # (n2)
        W = write(fade(1 - b_t, W), k_t, fade(b_t, v_t))  # Eq. 52
        z = fade(1 - b_t, z) + fade(b_t, k_t)  # (n3)
        y.append(normalized_read(W, z, q_t))  # Eq. 19
    return torch.stack(y, dim=1), W, z
