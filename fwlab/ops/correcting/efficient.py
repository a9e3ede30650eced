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

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fwlab.feature_maps import divide
from fwlab.ops.additive.efficient import (
    Group,
    empty,
    memory,
    operator,
    whole,
)
from fwlab.ops.call import operators
from fwlab.ops.correcting import chunked


def inverse(A: Tensor) -> Tensor:
    r"""$(I + A)^{-1}$ for strictly lower triangular $A$.

    Forward substitution: stable, and exact about zeros of $\beta$.
    """
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    # `unitriangular` takes the diagonal to be 1, unseen.
    return torch.linalg.solve_triangular(
        A, eye, upper=False, unitriangular=True
    )


def substitute(A: Tensor, B: Tensor) -> Tensor:
    """$(I + A)^{-1} B$. From the right, LAPACK copies nothing."""
    return torch.linalg.solve_triangular(
        A.mT, B.mT, upper=True, left=False, unitriangular=True
    ).mT


def substitute_back(A: Tensor, B: Tensor) -> Tensor:
    r"""$(I + A)^{-\top} B$."""
    return torch.linalg.solve_triangular(
        A, B.mT, upper=False, left=False, unitriangular=True
    ).mT


class Errors(Group):
    """Chunks whose steps write the errors of (d4)."""

    corrects = True

    def solve(self) -> None:
        """Compute the matrix of (d4), without its diagonal."""
        self.L, s = self.P[:, self.C :], self.s
        self.A = self.L if s is None else self.L * s.mT

    @cached_property
    def X(self) -> Tensor:
        """The inverse of the matrix of (d4)."""
        return inverse(self.A)

    @cached_property
    def read_away(self) -> tuple[Tensor, Tensor]:
        r"""$\beta X$ and $\beta X \gamma \bar K$."""
        bX = self.strong(self.X)
        return bX, torch.bmm(bX, self.old[:, self.C :])

    def write(self, S: Tensor | None) -> Tensor:
        r"""Compute $U = \beta E$ and the states, chunk by chunk.

        By (d4), $U = \beta X V - (\beta X \gamma \bar K)\, W^\top$:
        all but the last product needs no state.
        """
        if S is None:
            self.V = substitute(self.A, self.V)  # (d4)
            return self.strong(self.V)
        bX, B = self.read_away
        U, states = torch.bmm(bX, self.V), S.unbind()
        parts = self.each(U, B, self.fade.at_end(self.K))
        for i, (U_i, B_i, left_i) in enumerate(parts):
            U_i.baddbmm_(B_i, states[i].mT, alpha=-1)  # (d4)
            torch.bmm(U_i.mT, left_i, out=states[i + 1])
            self.fade.carry(states[i], states[i + 1], i)  # (d3)
        return U

    def written(self, S: Tensor | None) -> Tensor:
        """Compute the errors $E$ of all chunks from their states."""
        if S is not None:
            K_bar = self.old[:, self.C :]
            rest = torch.baddbmm(self.V, K_bar, S.mT, alpha=-1)
            self.V = torch.bmm(self.X, rest)  # (d4)
        return self.V

    def write_backward(
        self, G: Tensor, dU: Tensor, D: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        r"""With $X = (I + L \beta)^{-1}$, the gradient of the right
        side of (d4), and so that of $V$, solves the transposed system:

        $$dV = X^\top \big(\beta\, dU\big) \tag{d5}$$
        $$dW = \gamma_C\, dW' + dY^\top (\gamma Q)
           - dV^\top (\gamma \bar K) \tag{d6}$$

        (d5), (d6) and (c5) run backward from chunk to chunk; $dV^\top
        \gamma \bar K = dU^\top (\beta X \gamma \bar K)$. In (d4),
        what $\bar K$ reads is subtracted: its gradient is $-dV$. So
        with $G$ for $Q$ and $\bar K$

        $$G = \begin{pmatrix} dY \\ -dV \end{pmatrix} \tag{d8}$$

        the rest is that of the additive rules. $U$ is also read in
        (d4); only now is its gradient complete:

        $$dU \leftarrow dU - L^\top dV \tag{d7}$$
        """
        if D is None:
            dV = substitute_back(self.A, self.strong(dU))  # (d5)
        else:
            dV = self.carried_back(G, dU, D)
        dU.baddbmm_(self.L.mT, dV, alpha=-1)  # (d7)
        del self.L, self.A
        return torch.cat([G, -dV], 1), dV  # (d8)

    def carried_back(self, G: Tensor, dU: Tensor, D: Tensor) -> Tensor:
        """Complete $dU$ and the gradients of the states, last chunk
        first, by (c5) and (d6); return $dV$.
        """
        bX, B = self.read_away
        left, own = self.fade.at_end(self.K), self.old[:, : self.C]
        torch.bmm(G.mT, own, out=D[:-1].flatten(0, 1))
        parts, states = self.each(dU, left, B), D.unbind()
        for i in reversed(range(self.n)):
            dU_i, left_i, B_i = parts[i]
            dU_i.baddbmm_(left_i, states[i + 1].mT)  # (c5)
            self.fade.carry(states[i + 1], states[i], i)
            states[i].baddbmm_(dU_i.mT, B_i, alpha=-1)  # (d6)
        dV = torch.bmm(bX.mT, dU)  # (d5)
        del self.X, self.read_away  # makes room
        return dV


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
    W: Tensor | None,
    z: Tensor | None = None,
    ask: Tensor | None = None,
    early: bool = False,
) -> tuple[Tensor, ...]:
    """Arguments and results of the chunked version.

    `early` needs a decay per key channel. `W` = None: before the first
    step.
    """
    if W is None:
        y = whole(q, k, v, decay, strength, ask=ask, Kind=Errors)
        if y is not None:
            return (y,)
        W = empty(q, v)
    # A normaliser is computed first.
    if z is not None:
        return normalized_correcting(
            q, k, v, decay, strength, W, z, ask
        )
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
    single, traced = W.dtype == torch.float32, operators.traced(k)
    if single and traced:  # the numbers are not known
        return _in_double(q, k, v, decay, strength, W, z, ask)
    one = k.new_ones(1, 1, 1, 1).expand(*k.shape[:3], 1)
    total, held, after = memory(
        q, k, one, decay, None, z[:, :, None], ask=ask
    )()
    # In float64, the chunked version divides readings after all.
    least = torch.finfo(held.dtype).tiny ** (0.5 if single else 0.25)
    if not traced and ((held != 0) & (held.abs() < least)).any():
        other = _in_double if single else chunked.normalized_correcting
        return other(q, k, v, decay, strength, W, z, ask)
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
