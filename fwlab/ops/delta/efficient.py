r"""# The delta rules in chunks, with gradients by hand

In chunks, a delta rule is an additive rule that writes *errors* in
place of values. All that is left to do here is the triangular system of
(d1), for the errors $E = V - \bar V$ themselves; the rest is the
efficient version of the additive rules, with $U = \beta E$. With
$L = \mathrm{stril}(K K^\top) \odot \Gamma$:

$$(I + L \beta)\, E = V - \gamma K W^\top \tag{d4}$$

where $\beta$ scales columns. With attention normalisation, Eq. 27
divides what is retrieved by $z_{i-1} \cdot \phi(k_i)$. That is to
retrieve with the key $a_i = \phi(k_i) / (z_{i-1} \cdot \phi(k_i))$ and
to write with $\phi(k_i)$ as before: in (d4) and in $L$ the first $K$
becomes $A$, the keys that retrieve.
"""

from typing import Any

import torch
from torch import Tensor

from fwlab.feature_maps import divide
from fwlab.ops.delta import chunked
from fwlab.ops.linear.efficient import Group, Values, remember


def inverse(A: Tensor) -> Tensor:
    r"""$(I + A)^{-1}$ for strictly lower triangular $A$.

    Forward substitution: stable, and exact about zeros of $\beta$.
    """
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    # `unitriangular` takes the diagonal to be 1, unseen.
    return torch.linalg.solve_triangular(
        A, eye, upper=False, unitriangular=True
    )


class Errors(Values):
    """What a delta rule writes: the errors of (d4)."""

    corrects = True

    def __init__(self, group: Group):
        """The matrix of (d4) and its inverse: they need no state."""
        self.group = group
        self.scores = group.fade.scores(group.A, group.K, -1)
        self.X = inverse(self.scores.P * group.s.mT)
        self.asked_state = group.fade.of_state(group.A)

    def forward(self, state: Tensor, S: Tensor) -> None:
        """(d4) for one chunk after the other, and the state past it."""
        group, rest = self.group, self.group.V
        left = group.s * group.fade.at_end(group.K)
        self.E = torch.empty_like(rest)
        parts = group.each(
            S, self.X, self.asked_state, rest, self.E, left
        )
        for i, part in enumerate(parts):
            S_i, X_i, asked_i, rest_i, E_i, left_i = part
            S_i.copy_(state)
            rest_i.baddbmm_(asked_i, state.mT, alpha=-1)
            torch.bmm(X_i, rest_i, out=E_i)  # (d4)
            group.fade.carry(state, i).baddbmm_(E_i.mT, left_i)  # (d3)

    def restore(self, S: Tensor) -> None:
        """(d4) for all chunks together: their states are known."""
        rest = torch.baddbmm(
            self.group.V, self.asked_state, S.mT, alpha=-1
        )
        self.E = torch.bmm(self.X, rest)  # (d4)

    def backward(
        self, dU: Tensor, own: Tensor, after: Tensor, dS: Tensor
    ) -> Tensor:
        r"""With $X = (I + L \beta)^{-1}$, the gradient of the right
        side of (d4), and so that of $V$, solves the transposed system:

        $$dV = X^\top \big(\beta\, dU\big) \tag{d5}$$
        $$dW = \gamma_C\, dW' + dY^\top (\gamma Q)
           - dV^\top (\gamma K) \tag{d6}$$

        (d5), (d6) and (c5) run backward from chunk to chunk.
        """
        group, dV = self.group, torch.empty_like(dU)
        left, bX = group.fade.at_end(group.K), group.s * self.X
        parts = group.each(
            after, own, dU, left, dV, bX, self.asked_state
        )
        for i in reversed(range(group.n)):
            after_i, own_i, dU_i, left_i, dV_i, bX_i, asked_i = parts[i]
            after_i.copy_(dS)
            dU_i.baddbmm_(left_i, dS.mT)  # (c5)
            torch.bmm(bX_i.mT, dU_i, out=dV_i)  # (d5)
            group.fade.carry(dS, i).add_(own_i)
            dS.baddbmm_(dV_i.mT, asked_i, alpha=-1)  # (d6)
        return dV

    def asked(
        self, dV: Tensor, dK: Tensor, ds: Tensor | None, S: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        r"""In (d4), $L$ and $K W^\top$ are subtracted:

        $$dL = -\,dV\, U^\top, \qquad
          d\beta = \mathrm{rowsum}(E \odot dU)
            - \mathrm{colsum}(L \odot dV\, E^\top) \tag{d7}$$
        $$dA = (dL \odot \Gamma)\, K - \gamma\, dV\, W \tag{d8}$$

        The second $K$ of $L$ gets $(dL \odot \Gamma)^\top A$. Without
        `ask`, $A$ is $K$, and all of it goes there.
        """
        group = self.group
        VE = torch.bmm(dV, self.E.mT)
        assert ds is not None
        ds -= (self.scores.P * VE).sum(-2, True).mT  # (d7)
        dL = VE.mul_(-group.s.mT)
        separate = group.A is not group.K
        dA = torch.zeros_like(dK) if separate else dK
        self.scores.backward(dL, dA, dK)
        met = torch.bmm(dV, S)
        dA -= group.fade.of_state(met)  # (d8)
        return (dA if separate else None), met.mul_(group.A)


def error_correcting(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    strength: Tensor,
    W: Tensor,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of the chunked version."""
    return remember(q, k, v, decay, strength, W, written=Errors)


def overlap(
    q: Tensor,
    k: Tensor,
    decay: Tensor | None,
    z: Tensor,
    diagonal: int = 0,
) -> tuple[Tensor, Tensor]:
    r"""The denominators $z_i \cdot \phi(q_i)$ of Eq. 19, and the final
    $z$.

    $z$ of Eq. 18 is a memory of its own, with one row, into which every
    key writes the value 1.
    """
    one = k.new_ones(1, 1, 1, 1).expand(*k.shape[:3], 1)
    total, z = remember(
        q, k, one, decay, None, z[:, :, None], diagonal=diagonal
    )
    return total, z[:, :, 0]


def normalized_error_correcting(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    strength: Tensor,
    W: Tensor,
    z: Tensor,
    ask: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""The sums with $z$ are sum rules of their own.

    Eq. 27 divides the key here, not the reading.
    """
    held, _ = overlap(ask, k, decay, z, -1)
    # A key divided by a tiny number would overflow where the reading,
    # a mean, does not: then the chunked version computes all of it in
    # float64.
    least = torch.finfo(held.dtype).tiny ** 0.5
    if ((held != 0) & (held.abs() < least)).any():
        given = (q, k, v, decay, strength, W, z, ask)
        wide: Any = [x if x is None else x.double() for x in given]
        outputs = chunked.normalized_error_correcting(*wide)
        y, W, z = (x.to(W.dtype) for x in outputs)
        return y, W, z
    # With divided keys, the rest is a delta rule without a normaliser.
    total, z = overlap(q, k, decay, z)
    ask = divide(ask, held)  # an empty memory: ask nothing, get 0
    y, W = remember(
        q, k, v, decay, strength, W, ask=ask, written=Errors
    )
    return divide(y, total), W, z  # Eq. 28
