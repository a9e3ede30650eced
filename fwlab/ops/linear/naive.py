r"""# The sum rule, one step at a time

Attention without the softmax is a memory that adds up outer products:
one matrix $W$ in place of a growing list of keys and values.
Here `k` and `q` are already features, $\phi(k)$ and $\phi(q)$.
Equation numbers are those of
[Schlag et al. 2021](https://arxiv.org/abs/2102.11174).
"""

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
    r"""Ask the fast weights for the value of a query:

    $$y_i = W_i\, \phi(q_i) \tag{25}$$

    - `W`: `[..., value, key]`, `q`: `[..., key]`.
    """
    return torch.einsum("...vk,...k->...v", W, q)


def sum_rule(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, z: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Write, then read, for every time step.

    With a normaliser $z$ the answer becomes a weighted mean of values:

    $$z_i = z_{i-1} + \phi(k_i) \tag{18}$$
    $$y_i = \frac{W_i\,\phi(q_i)}{z_i \cdot \phi(q_i)} \tag{19}$$

    - `q`, `k`: `[batch, time, heads, key]`, `v`: the same with `value`.
    - `W`: `[batch, heads, value, key]`, `z`: `[batch, heads, key]` or
      None, which leaves the denominator away.
    """
    q, k, v = (x.to(W.dtype) for x in (q, k, v))
    y = []
    # `unbind` cuts the time axis once. Indexing `k[:, t]` in the loop
    # would make the backward pass quadratic in time: the gradient of
    # each index is a tensor of zeros as large as all of `k`.
    for q_t, k_t, v_t in zip(
        q.unbind(1), k.unbind(1), v.unbind(1), strict=True
    ):
        W = write(W, k_t, v_t)  # Eq. 17
        y_t = read(W, q_t)
        if z is not None:
            z = z + k_t  # Eq. 18
            y_t = divide(y_t, (z * q_t).sum(-1, keepdim=True))  # Eq. 19
        y.append(y_t)
    return torch.stack(y, dim=1), W, z
