r"""# The correcting recurrence in chunks, with gradients by hand

In chunks, a rule that corrects is an additive rule that writes *errors*
in place of values. All that is left to do here is the triangular system
of (d1), for the errors $E = V - \bar V$ themselves; the rest is the
efficient version of the additive rules, with $U = \beta E$. With
$L = \mathrm{stril}(\bar K K^\top) \odot \Gamma$:

$$(I + L \beta)\, E = V - \gamma \bar K W^\top \tag{d4}$$

where $\beta$ scales columns. The rows $\bar K$, by which the memory is
queried, are the keys that ask: $R$ of (d0). With attention
normalisation, Eq. 27 divides what is retrieved by $z_{i-1} \cdot
\phi(k_i)$. That is to query with $\bar k_i = \phi(k_i) / (z_{i-1} \cdot
\phi(k_i))$, and to write with $\phi(k_i)$ as before.
"""

from typing import Any

import torch
from torch import Tensor

from fwlab.feature_maps import divide
from fwlab.ops.additive.efficient import Group, memory, operator
from fwlab.ops.call import operators


def inverse(A: Tensor) -> Tensor:
    r"""$(I + A)^{-1}$ for strictly lower triangular $A$.

    Forward substitution: stable, and exact about zeros of $\beta$.
    """
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    # `unitriangular` takes the diagonal to be 1, unseen.
    return torch.linalg.solve_triangular(
        A, eye, upper=False, unitriangular=True
    )


class Errors(Group):
    """Chunks whose steps write the errors of (d4)."""

    corrects = True

    def solve(self) -> None:
        """Invert the matrix of (d4), with and without the strength."""
        self.L, self.K_bar = self.P[:, self.C :], self.old[:, self.C :]
        s = self.s
        self.X = inverse(self.L if s is None else self.L * s.mT)
        self.bX = self.strong(self.X)

    def write(self, S: Tensor) -> Tensor:
        r"""Compute $U = \beta E$ and the states, chunk by chunk."""
        rest, U = self.V, torch.empty_like(self.V)
        parts = self.each(
            rest, self.K_bar, self.bX, U, self.fade.at_end(self.K)
        )
        for i, (rest_i, K_bar_i, bX_i, U_i, left_i) in enumerate(parts):
            rest_i.baddbmm_(K_bar_i, S[i].mT, alpha=-1)
            torch.bmm(bX_i, rest_i, out=U_i)  # (d4)
            torch.bmm(U_i.mT, left_i, out=S[i + 1])
            self.fade.carry(S[i], S[i + 1], i)  # (d3)
        return U

    def written(self, S: Tensor) -> Tensor:
        """Compute the errors $E$ of all chunks from their states."""
        rest = self.V.baddbmm_(self.K_bar, S.mT, alpha=-1)
        self.V = torch.bmm(self.X, rest)  # (d4)
        return self.V

    def write_backward(
        self, G: Tensor, dU: Tensor, D: Tensor
    ) -> tuple[Tensor, Tensor]:
        r"""With $X = (I + L \beta)^{-1}$, the gradient of the right
        side of (d4), and so that of $V$, solves the transposed system:

        $$dV = X^\top \big(\beta\, dU\big) \tag{d5}$$
        $$dW = \gamma_C\, dW' + dY^\top (\gamma Q)
           - dV^\top (\gamma \bar K) \tag{d6}$$

        (d5), (d6) and (c5) run backward from chunk to chunk. In (d4),
        what $\bar K$ reads is subtracted: its gradient is $-dV$. So
        with $G$ for $Q$ and $\bar K$

        $$G = \begin{pmatrix} dY \\ -dV \end{pmatrix} \tag{d8}$$

        the rest is that of the additive rules. $U$ is also read in
        (d4); only now is its gradient complete:

        $$dU \leftarrow dU - L^\top dV \tag{d7}$$
        """
        dV, left = torch.empty_like(dU), self.fade.at_end(self.K)
        own = self.old[:, : self.C]
        torch.bmm(G.mT, own, out=D[:-1].flatten(0, 1))
        parts = self.each(dU, left, dV, self.bX, self.K_bar)
        for i in reversed(range(self.n)):
            dU_i, left_i, dV_i, bX_i, K_bar_i = parts[i]
            dU_i.baddbmm_(left_i, D[i + 1].mT)  # (c5)
            torch.bmm(bX_i.mT, dU_i, out=dV_i)  # (d5)
            self.fade.carry(D[i + 1], D[i], i)
            D[i].baddbmm_(dV_i.mT, K_bar_i, alpha=-1)  # (d6)
        dU.baddbmm_(self.L.mT, dV, alpha=-1)  # (d7)
        del self.K_bar, self.L, self.X, self.bX  # makes room
        return torch.cat([G, -dV], 1), dV  # (d8)


class EarlyErrors(Errors):
    """Chunks whose errors are those of the memory before it fades."""

    early = True


Errors.operator = operator("correcting", Errors)
EarlyErrors.operator = operator("correcting_early", EarlyErrors)


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
    """Arguments and results of the chunked version.

    `early` needs a decay per key channel.
    """
    if z is not None:
        inputs = (q, k, v, decay, strength, W, z, ask)
        return normalized_correcting(*inputs)
    # Some rules ask the memory as it was before the decay.
    Kind = EarlyErrors if early else Errors
    y, _, W = memory(q, k, v, decay, strength, W, ask=ask, Kind=Kind)()
    return y, W


def normalized_correcting(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None,
    strength: Any, W: Tensor, z: Tensor, ask: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    r"""Compute the sums with $z$ first, then a rule without them.

    $z$ of Eq. 18 is a memory with one row, into which every key writes
    the value 1. Eq. 27 divides the key here, not the reading.
    """
    # A key divided by a tiny number would overflow in float32 where the
    # reading, a mean, does not: then all of it is computed in float64.
    single = W.dtype == torch.float32
    if single and operators.traced(k):  # the numbers are not known
        return _in_double(q, k, v, decay, strength, W, z, ask)
    one = k.new_ones(1, 1, 1, 1).expand(*k.shape[:3], 1)
    total, held, after = memory(
        q, k, one, decay, None, z[:, :, None], ask=ask
    )()
    least = torch.finfo(held.dtype).tiny ** 0.5
    if single and ((held != 0) & (held.abs() < least)).any():
        return _in_double(q, k, v, decay, strength, W, z, ask)
    # With divided keys, the rest is a delta rule without a normaliser.
    ask = divide(ask, held)  # an empty memory: query with 0, get 0
    y, _, W = memory(
        q, k, v, decay, strength, W, ask=ask, Kind=Errors
    )()
    return divide(y, total), W, after[:, :, 0]  # Eq. 28


def _in_double(*inputs: Tensor | None) -> Any:
    """Call `normalized_correcting` in float64; results in float32."""
    wide: Any = [x if x is None else x.double() for x in inputs]
    return tuple(x.float() for x in normalized_correcting(*wide))
