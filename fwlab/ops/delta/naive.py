r"""# The delta rule, one step at a time

The sum rule can only add: what is written twice under one key is read
back as a mixture. The delta rule first asks the memory what the key
already holds, and then writes the *difference*. Here `k` and `q` are
already features, $\phi(k)$ and $\phi(q)$. Equation numbers are those of
[Schlag et al. 2021](https://arxiv.org/abs/2102.11174).
"""

import torch
from torch import Tensor

from fwlab.feature_maps import divide, unit_range
from fwlab.ops.linear.naive import read, write


def delta_step(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    r"""Move the value stored under a key towards a new one:

    $$\bar v_i = W_{i-1}\, \phi(k_i) \tag{20}$$
    $$W_i = W_{i-1}
      + \beta_i\, (v_i - \bar v_i) \otimes \phi(k_i) \tag{24}$$

    This is Eq. 23 (write the new value, remove the old one) with
    Eq. 22 put in, as derived in the paper's appendix A.1.

    - `W`: `[..., value, key]`, `k`: `[..., key]`, `v`: `[..., value]`.
    - `beta`: `[...]`, the write strength, from 0 (keep what is there)
      to 1 (replace it).
    """
    v_bar = read(W, k)  # Eq. 20
    return write(W, k, beta[..., None] * (v - v_bar))  # Eq. 24


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    W: Tensor,
    z: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Correct, then read, for every time step:

    $$y_i = W_i\, \phi(q_i) \tag{25}$$

    With attention normalisation both readings are divided by the sum
    of the keys written so far. An empty memory retrieves 0:

    $$z_i = z_{i-1} + \phi(k_i) \tag{26}$$
    $$\bar v_i = \frac{W_{i-1}\,\phi(k_i)}
                      {z_{i-1} \cdot \phi(k_i)} \tag{27}$$
    $$y_i = \frac{W_i\,\phi(q_i)}{z_i \cdot \phi(q_i)} \tag{28}$$

    - `q`, `k`: `[batch, time, heads, key]`, `v`: the same with `value`,
      `beta`: `[batch, time, heads]`.
    - `W`: `[batch, heads, value, key]`, `z`: `[batch, heads, key]` or
      None, which leaves the denominators away.
    """
    q, k, v, beta = (x.to(W.dtype) for x in (q, k, v, beta))
    y = []
    for q_t, k_t, v_t, beta_t in zip(
        q.unbind(1),
        k.unbind(1),
        v.unbind(1),
        beta.unbind(1),
        strict=True,
    ):
        if z is None:
            W = delta_step(W, k_t, v_t, beta_t)  # Eq. 24
            y_t = read(W, q_t)  # Eq. 25
        else:
            ask = unit_range(k_t)  # its length cancels in Eq. 27
            overlap = (z * ask).sum(-1, keepdim=True)
            v_bar = divide(read(W, ask), overlap)  # Eq. 27
            W = write(W, k_t, beta_t[..., None] * (v_t - v_bar))
            z = z + k_t  # Eq. 26
            overlap = (z * q_t).sum(-1, keepdim=True)
            y_t = divide(read(W, q_t), overlap)  # Eq. 28
        y.append(y_t)
    return torch.stack(y, dim=1), W, z
