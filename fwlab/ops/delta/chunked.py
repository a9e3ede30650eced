r"""# The delta recurrence in chunks

Every step of a delta rule reads the state that the previous step has just changed, so
the steps cannot simply be summed. But inside a chunk of $C$ steps the dependence is
*linear*, and one triangular system solves it. All these rules are one recurrence:

$$\tilde W_i = W_{i-1}\,\mathrm{diag}(d_i), \quad
  u_i = \beta_i\,\big(v_i - \tilde W_i\, r_i\big), \quad
  W_i = \tilde W_i + u_i \otimes k_i \tag{d0}$$

The key $k$ writes, and the key $r$ erases: the same key in the delta rules, another key
in related rules. The decay $d$ is one number per head or one per key channel; $\beta$
may be 1.

Capital letters are the rows of one chunk stacked up: $Q$ and $K$ (the features of
queries and keys), $V$, $Y$, and $U$, what is really written. $W$ is the state before
the chunk, $W'$ the state after it; $\gamma$ and $\Gamma$ are the products of decays of
the linear recurrence.

What step $i$ retrieves comes from $W$ and from the steps $j < i$ of its own chunk.
Collect all $u$ on one side:

$$(I + A)\, U = \beta\, (V - \gamma R W^\top), \quad
  A = \beta\, \mathrm{stril}(R K^\top) \odot \Gamma \tag{d1}$$
$$Y = \gamma\, Q W^\top
  + \big(\mathrm{tril}(Q K^\top) \odot \Gamma\big)\, U \tag{d2}$$
$$W' = \gamma_C W + U^\top (\Gamma_C K) \tag{d3}$$

$\mathrm{stril}$ keeps what is below the diagonal. Given $U$, (d2) and (d3) are (c1) and
(c2). For one chunk that holds everything and $W = 0$, this is the closed form of the
whole sequence.
"""

from typing import Any

import torch
from torch import Tensor

from fwlab.feature_maps import divide
from fwlab.ops._rules import Inputs
from fwlab.ops.linear.chunked import carry, cut, decays, scores


def solve(A: Tensor, B: Tensor) -> Tensor:
    """Solve $(I + A) U = B$ for $U$ by forward substitution.

    `A` is strictly lower triangular; the diagonal is taken to be 1.
    """
    return torch.linalg.solve_triangular(A, B, upper=False, unitriangular=True)


def delta(x: Inputs, W: Tensor, z: Tensor | None, alone: bool) -> Any:
    """Compute the delta recurrence (Eq. d0), all steps of a chunk at once."""
    if z is not None:
        return normalized_delta(x, W, z)
    # Chunks depend on each other only through the state.
    y = []
    for d, Q, K, V, b, R in cut(
        W.dtype, x.decay, x.q, x.k, x.v, x.strength, x.erase_key
    ):
        gamma, Gamma = asking = decays(d)
        b, R = 1 if b is None else b, K if R is None else R
        if x.early and d is not None:
            asking = before(gamma), before(Gamma)
        A = b * scores(R, K, asking[1]).tril(-1)
        U = solve(A, b * (V - asking[0] * R @ W.mT))  # (d1)
        # Given $U$, outputs and states are computed as in the linear recurrence.
        P = scores(Q, K, Gamma).tril()
        y.append(gamma * Q @ W.mT + P @ U)  # (d2)
        W = carry(W, U, K, d)  # (d3)
    return torch.cat(y, 2).transpose(1, 2), W, None


def before(x: Tensor) -> Tensor:
    """Shift products of decays by one step, so that they exclude the latest decay."""
    one = torch.ones_like(x[:, :, :1])
    return torch.cat([one, x[:, :, :-1]], 2)


def normalized_delta(x: Inputs, W: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    r"""Compute the delta recurrence with the normaliser $z$, chunk by chunk.

    In (d1) each row of retrieved values is divided by $z_{i-1} \cdot \phi(k_i)$ (Eq.
    27). In (d2) each output is divided by $z_i \cdot \phi(q_i)$ (Eq. 28).
    """
    y = []
    for d, Q, K, V, R, b in cut(
        W.dtype, x.decay, x.q, x.k, x.v, x.erase_key, x.strength
    ):
        gamma, Gamma = decays(d)
        # Compute the values that the keys retrieve, and from them the rows of U.
        L = scores(R, K, Gamma).tril(-1)
        P = scores(Q, K, Gamma).tril()
        held = gamma * R @ z[..., None] + L.sum(-1, True)
        V_bar = divide(gamma * R @ W.mT, held)  # Eq. 27
        U = solve(b * divide(L, held), b * (V - V_bar))  # (d1)
        # Compute the outputs of the chunk, and the states $W$ and $z$ after it.
        total = gamma * Q @ z[..., None] + P.sum(-1, True)
        y.append(divide(gamma * Q @ W.mT + P @ U, total))  # Eq. 28
        W = carry(W, U, K, d)  # (d3)
        z = carry(z[..., None, :], torch.ones_like(b), K, d)[..., 0, :]
    return torch.cat(y, 2).transpose(1, 2), W, z
