r"""# The sum rule and the gated rule in chunks

The loop of the naive version does little work per step. Split the sequence into chunks
of $C$ steps instead. Inside a chunk everything is a matrix product; from chunk to chunk
only one state is carried.

Both rules are one recurrence, with a decay $d$ and a strength $s$ that are 1 for the
sum rule:

$$W_i = d_i\, W_{i-1} + s_i\, v_i \otimes \phi(k_i) \tag{c0}$$

Capital letters are the rows of one chunk stacked up: $Q$ and $K$ (the features of
queries and keys), $V$, $Y$, and $U = s V$, what is really written. $W$ is the state
before the chunk, and $W'$ the state after it. $\mathrm{tril}$ keeps the lower triangle
with its diagonal: step $i$ sees the steps $j \le i$.

This version leaves the backward pass to autograd. The efficient version computes the
same two equations, with their gradients by hand.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fwlab.feature_maps import divide
from fwlab.ops._chunks import CHUNK
from fwlab.ops._rules import Inputs


def cut(dtype: torch.dtype, *sequences: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Iterate over the chunks of `[batch, time, heads, d]` tensors.

    Chunks are `[batch, heads, C, d]`; the last may be shorter. None, a gate that a rule
    does not have, stays None.

    `split` splits time once. The gradient of each slice of `x[:, i:j]` would be a
    tensor of zeros as large as `x`.
    """
    cuts = [
        None if x is None else x.transpose(1, 2).to(dtype).split(CHUNK, 2)
        for x in sequences
    ]
    n = max(len(x) for x in cuts if x is not None)
    return zip(*([None] * n if x is None else x for x in cuts), strict=True)


def decays(d: Tensor | None) -> tuple[Any, Any]:
    r"""Compute the products of the decays in a chunk, for the state and for each write:

    $$\gamma_i = \prod_{m \le i} d_m, \qquad
      \Gamma_{ij} = \prod_{j < m \le i} d_m$$

    No quotient and no difference of logarithms is computed: a decay of 0 is allowed.

    - `d`: `[..., C, 1]`, or `[..., C, key]` for a decay per key channel; None = no
      decay.
    - Returns `gamma` like `d` and `Gamma` `[..., C, C, 1 or key]`, or two ones. `Gamma`
      is 1 above the diagonal.
    """
    if d is None:
        return 1, 1
    ones = torch.ones(d.shape[-2], d.shape[-2], device=d.device)
    later = ones.triu(1).bool()[..., None]
    factors = torch.where(later, d.unsqueeze(-3), 1)  # The shape is [..., j, m, key].
    return d.cumprod(-2), factors.cumprod(-2).transpose(-3, -2)


def scores(Q: Tensor, K: Tensor, Gamma: Any) -> Tensor:
    r"""Multiply queries by keys of a chunk, with decays: $Q K^\top \odot \Gamma$.

    With a decay per key channel, $\Gamma$ is inside the product: $\sum_c Q_{ic} K_{jc}
    \Gamma_{ijc}$.
    """
    if isinstance(Gamma, int):
        return Q @ K.mT
    if Gamma.shape[-1] == 1:
        return Q @ K.mT * Gamma[..., 0]
    return torch.einsum("...ik,...jk,...ijk->...ij", Q, K, Gamma)


def carry(W: Tensor, U: Tensor, K: Tensor, d: Any) -> Tensor:
    r"""Compute the state after a chunk:

    $$W' = \gamma_C W + U^\top (\Gamma_C K) \tag{c2}$$

    $\Gamma_C$ is the last row of $\Gamma$: it scales the rows of $K$.
    """
    gamma, Gamma = decays(d)
    if d is not None:
        W, K = gamma[..., -1:, :] * W, Gamma[..., -1, :, :] * K
    return W + U.mT @ K  # (c2)


def linear(x: Inputs, W: Tensor, z: Tensor | None, alone: bool) -> Any:
    r"""Compute the linear recurrence (Eq. c0), all steps of a chunk at once:

    $$Y = \gamma\, Q W^\top
      + \big(\mathrm{tril}(Q K^\top) \odot \Gamma\big)\, U \tag{c1}$$

    The normaliser $z$ of Eq. 18 is one more row of $W$, into which every key writes the
    value 1.
    """
    v = x.v
    if z is not None:
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        W = torch.cat([W, z.unsqueeze(-2)], -2)
    # Chunks depend on each other only through the state.
    y = []
    for d, Q, K, V, s in cut(W.dtype, x.decay, x.q, x.k, v, x.strength):
        gamma, Gamma = decays(d)
        U = V if s is None else s * V
        P = scores(Q, K, Gamma).tril()
        y.append(gamma * Q @ W.mT + P @ U)  # (c1)
        W = carry(W, U, K, d)  # (c2)
    Y = torch.cat(y, 2).transpose(1, 2)
    if z is None:
        return Y, W, None
    Y = divide(Y[..., :-1], Y[..., -1:])  # Eq. 19
    return Y, W[..., :-1, :].clone(), W[..., -1, :].clone()
