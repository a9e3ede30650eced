r"""# The correcting recurrence in chunks

Every step of a delta rule reads the memory that the step before it has
just changed, so the steps cannot simply be summed. But inside a chunk
of $C$ steps the dependence is *linear*, and one triangular system
solves it. All these rules are one recurrence:

$$\tilde W_i = W_{i-1}\,\mathrm{diag}(d_i), \quad
  u_i = \beta_i\,\big(v_i - \tilde W_i\, r_i\big), \quad
  W_i = \tilde W_i + u_i \otimes k_i \tag{d0}$$

The key $k$ writes, and the key $r$ asks: the same key in the delta
rules, another one in their relatives. The decay $d$ is one number per
head or one per key channel; $\beta$ may be 1.

Capital letters are the rows of one chunk stacked up: $Q$ and $K$ (the
features of queries and keys), $V$, $Y$, and $U$, what is really
written. $W$ is the state before the chunk, $W'$ the one after it;
$\gamma$ and $\Gamma$ are the products of decays of the additive rules.

What step $i$ retrieves comes from $W$ and from the steps $j < i$ of its
own chunk. Collect all $u$ on one side:

$$(I + A)\, U = \beta\, (V - \gamma R W^\top), \quad
  A = \beta\, \mathrm{stril}(R K^\top) \odot \Gamma \tag{d1}$$
$$Y = \gamma\, Q W^\top
  + \big(\mathrm{tril}(Q K^\top) \odot \Gamma\big)\, U \tag{d2}$$
$$W' = \gamma_C W + U^\top (\Gamma_C K) \tag{d3}$$

$\mathrm{stril}$ keeps what is below the diagonal. Given $U$, (d2) and
(d3) are (c1) and (c2). For one chunk that holds everything and $W = 0$,
this is the closed form of the whole sequence.
"""

from typing import Any

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
    strength: Tensor | None,
    W: Tensor,
    z: Tensor | None = None,
    ask: Tensor | None = None,
    early: bool = False,
) -> tuple[Tensor, ...]:
    r"""(d0) for all steps of a chunk at once, chunk after chunk.

    - `decay`: `[batch, time, heads, 1 or key]`; None = 1.
    - `strength`: $\beta$, `[batch, time, heads, 1]`; None = 1.
    - `ask`: $r$, like `k`; None = `k`.
    - `early`: ask $W_{i-1}$, before it fades, in place of $\tilde W_i$.
    - `z`: the normaliser; None = no denominators.
    """
    if z is not None:
        inputs = (q, k, v, decay, strength, W, z, ask)
        return normalized_correcting(*inputs)
    # Only the state goes from chunk to chunk.
    y = []
    for d, Q, K, V, b, R in cut(decay, q, k, v, strength, ask):
        gamma, Gamma = asking = decays(d)
        b, R = 1 if b is None else b, K if R is None else R
        if early and d is not None:
            asking = before(gamma), before(Gamma)
        A = b * scores(R, K, asking[1]).tril(-1)
        U = solve(A, b * (V - asking[0] * R @ W.mT))  # (d1)
        # With $U$ known, the rest is that of the additive rules.
        P = scores(Q, K, Gamma).tril()
        y.append(gamma * Q @ W.mT + P @ U)  # (d2)
        W = carry(W, U, K, d)  # (d3)
    return torch.cat(y, 2).transpose(1, 2), W


def before(x: Tensor) -> Tensor:
    """The products of decays up to the step before, from 1 on."""
    one = torch.ones_like(x[:, :, :1])
    return torch.cat([one, x[:, :, :-1]], 2)


def normalized_correcting(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None,
    strength: Any, W: Tensor, z: Tensor, ask: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    r"""Both readings are divided by what the same key reads in $z$.

    In (d1) the keys that retrieve, `ask`, are divided by
    $z_{i-1} \cdot \phi(k_i)$ (Eq. 27): a division of rows, in which the
    decay of step $i$ cancels. In (d2) the answers are divided by
    $z_i \cdot \phi(q_i)$ (Eq. 28).
    """
    y = []
    for d, Q, K, V, R, b in cut(decay, q, k, v, ask, strength):
        gamma, Gamma = asking = decays(d)
        if d is not None:
            asking = before(gamma), before(Gamma)
        # What the keys retrieve, and from it what is written.
        L, P = (
            scores(R, K, asking[1]).tril(-1),
            scores(Q, K, Gamma).tril(),
        )
        held = asking[0] * R @ z[..., None] + L.sum(-1, True)
        V_bar = divide(asking[0] * R @ W.mT, held)  # Eq. 27
        U = solve(b * divide(L, held), b * (V - V_bar))  # (d1)
        # What the queries read, and both states after the chunk.
        total = gamma * Q @ z[..., None] + P.sum(-1, True)
        y.append(divide(gamma * Q @ W.mT + P @ U, total))  # Eq. 28
        W = carry(W, U, K, d)  # (d3)
        z = carry(z[..., None, :], torch.ones_like(b), K, d)[..., 0, :]
    return torch.cat(y, 2).transpose(1, 2), W, z
