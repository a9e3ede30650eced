r"""# The delta rules in chunks

Every step of a delta rule reads the memory that the step before it has
just changed, so the steps cannot simply be summed. But inside a chunk
of $C$ steps the dependence is *linear*, and one triangular system
solves it. All delta rules are one recurrence:

$$W_i = d_i\, W_{i-1} + u_i \otimes \phi(k_i), \quad
  u_i = \beta_i\,\big(v_i - d_i\, W_{i-1}\,\phi(k_i)\big) \tag{d0}$$

Capital letters are the rows of one chunk stacked up: $Q$ and $K$ (the
features of queries and keys), $V$, $Y$, and $U$, what is really
written. $W$ is the state before the chunk, $W'$ the one after it;
$\gamma$ and $\Gamma$ are the products of decays of the additive rules.

What step $i$ retrieves comes from $W$ and from the steps $j < i$ of its
own chunk. Collect all $u$ on one side:

$$(I + A)\, U = \beta\, (V - \gamma K W^\top), \quad
  A = \beta\, \mathrm{stril}(K K^\top) \odot \Gamma \tag{d1}$$
$$Y = \gamma\, Q W^\top
  + \big(\mathrm{tril}(Q K^\top) \odot \Gamma\big)\, U \tag{d2}$$
$$W' = \gamma_C W + U^\top (\Gamma_C K) \tag{d3}$$

$\mathrm{stril}$ keeps what is below the diagonal. Given $U$, (d2) and
(d3) are (c1) and (c2). For one chunk that holds everything and $W = 0$,
this is the closed form of the whole sequence.
"""

import torch
from torch import Tensor

from fwlab.feature_maps import divide
from fwlab.ops.additive.chunked import carry, cut, decays, scores


def solve(A: Tensor, B: Tensor) -> Tensor:
    """$U$ of $(I + A) U = B$ by forward substitution.

    `A` is strictly lower triangular; the diagonal is taken to be 1.
    """
    return torch.linalg.solve_triangular(
        A, B, upper=False, unitriangular=True
    )


def correcting(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    strength: Tensor,
    W: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""(d0) for all steps of a chunk at once, chunk after chunk.

    - `decay`: `[batch, time, heads, 1 or key]`; None = 1.
    - `strength`: $\beta$, `[batch, time, heads, 1]`.
    """
    y = []
    for d, Q, K, V, b in cut(decay, q, k, v, strength):
        gamma, Gamma = decays(d)
        A = b * scores(K, K, Gamma).tril(-1)
        U = solve(A, b * (V - gamma * K @ W.mT))  # (d1)
        # With $U$ known, the rest is that of the additive rules.
        P = scores(Q, K, Gamma).tril()
        y.append(gamma * Q @ W.mT + P @ U)  # (d2)
        W = carry(W, U, K, d)  # (d3)
    return torch.cat(y, 2).transpose(1, 2), W


def normalized_correcting(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    strength: Tensor,
    W: Tensor,
    z: Tensor,
    ask: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Both readings are divided by what the same key reads in $z$.

    In (d1) the keys that retrieve, `ask`, are divided by
    $z_{i-1} \cdot \phi(k_i)$ (Eq. 27): a division of rows. In (d2) the
    answers are divided by $z_i \cdot \phi(q_i)$ (Eq. 28).
    """
    y = []
    for d, Q, K, V, R, b in cut(decay, q, k, v, ask, strength):
        gamma, Gamma = decays(d)
        # What the keys retrieve, and from it what is written.
        L, P = scores(R, K, Gamma).tril(-1), scores(Q, K, Gamma).tril()
        held = gamma * R @ z[..., None] + L.sum(-1, True)
        V_bar = divide(gamma * R @ W.mT, held)  # Eq. 27
        U = solve(b * divide(L, held), b * (V - V_bar))  # (d1)
        # What the queries read, and both states after the chunk.
        total = gamma * Q @ z[..., None] + P.sum(-1, True)
        y.append(divide(gamma * Q @ W.mT + P @ U, total))  # Eq. 28
        W = carry(W, U, K, d)  # (d3)
        z = carry(z[..., None, :], torch.ones_like(b), K, d)[..., 0, :]
    return torch.cat(y, 2).transpose(1, 2), W, z
