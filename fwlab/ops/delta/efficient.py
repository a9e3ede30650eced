r"""# The delta rule in chunks

Every step of the delta rule reads the memory that the step before it
has just changed, so the steps cannot simply be summed. But inside a
chunk of $C$ steps the dependence is *linear*, and one triangular system
solves it.

Capital letters are the rows of one chunk stacked up: $Q$ and $K$ (the
features of queries and keys), $V$, $Y$, and $U$, whose rows are what is
really written, $u_i = \beta_i\,(v_i - \bar v_i)$. $W$ is the state
before the chunk and $W'$ the one after it; $\mathrm{tril}$ keeps the
lower triangle, $\mathrm{stril}$ the part of it below the diagonal.

By Eq. 24 every step adds $u_i \otimes \phi(k_i)$, so the retrieved
values of Eq. 20 are those of $W$ plus those written earlier in the
chunk. Collect all $u$ on one side:

$$(I + A)\, U = \beta V - \beta K W^\top, \qquad
  A = \mathrm{stril}(\beta K K^\top) \tag{d1}$$
$$Y = Q W^\top + \mathrm{tril}(Q K^\top)\, U \tag{d2}$$
$$W' = W + U^\top K \tag{d3}$$

where $\beta$ stands for $\mathrm{diag}(\beta)$. For one chunk that
holds everything and $W = 0$, this is the closed form of the whole
sequence.
"""

from typing import Any

import torch
from torch import Tensor

from fwlab.feature_maps import divide, unit_range
from fwlab.ops import chunks
from fwlab.ops.linear.efficient import overlap

CHUNK = 32


def inverse(A: Tensor) -> Tensor:
    r"""$(I + A)^{-1}$ for strictly lower triangular $A$.

    Forward substitution: stable, and exact about zeros of $\beta$.
    """
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    # `unitriangular` takes the diagonal to be 1, unseen.
    return torch.linalg.solve_triangular(
        A, eye, upper=False, unitriangular=True
    )


class _DeltaRule(torch.autograd.Function):
    r"""(d1) to (d3) forward, and their gradients by hand.

    With attention normalisation, Eq. 27 divides what is retrieved by
    $z_{i-1} \cdot \phi(k_i)$. That is to *ask* with the key
    $a_i = \phi(k_i) / (z_{i-1} \cdot \phi(k_i))$ and to write with
    $\phi(k_i)$ as before: $\beta K$ becomes $\beta\,\mathrm{ask}$ in
    (d1). The plain rule asks with the key itself.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        ask: Tensor | None,
        W: Tensor,
        chunk: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        time = q.shape[1]
        y = v.new_empty(v.shape, dtype=W.dtype)
        state = W.flatten(0, 1).clone()
        n = chunks.count(time, chunk)
        states = state.new_empty(n if keep else 0, *state.shape)
        for steps, places in chunks.groups(q, chunk):
            Q, K, V, b = (
                chunks.split(x[:, steps], chunk, W.dtype)
                for x in (q, k, v, beta[..., None])
            )
            eK = b * _asking(K, ask, steps)
            X = inverse(torch.bmm(eK, K.mT).tril_(-1))
            rest, U = V.mul_(b), torch.empty_like(V)
            n = places.stop - places.start
            S = states[places]
            if not keep:
                S = state.new_empty(n, *state.shape)
            for S_i, (X_i, eK_i, K_i, rest_i, U_i) in zip(
                S, chunks.each(n, X, eK, K, rest, U), strict=True
            ):
                S_i.copy_(state)
                rest_i.baddbmm_(eK_i, state.mT, alpha=-1)
                torch.bmm(X_i, rest_i, out=U_i)  # (d1)
                state.baddbmm_(U_i.mT, K_i)  # (d3)
            P = torch.bmm(Q, K.mT).tril_()
            Y = torch.bmm(Q, S.flatten(0, 1).mT).baddbmm_(P, U)  # (d2)
            chunks.join(Y, y[:, steps])
        # Inputs and one state per chunk: nothing else is kept.
        ctx.save_for_backward(q, k, v, beta, ask, states)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return y, state.view_as(W)

    @staticmethod
    @chunks.backward_pass
    def backward(
        ctx: Any, dy: Tensor | None, dW: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        r"""$U$ is computed again from the kept states. With
        $X = (I + A)^{-1}$, the gradient of (d1)'s right-hand side is
        $Z$, by the transposed system:

        $$Z = X^\top \big(\mathrm{tril}(Q K^\top)^\top dY
           + K\, dW'^\top\big) \tag{d4}$$
        $$dW = dW' + dY^\top Q - (\beta Z)^\top K \tag{d5}$$

        (d4) and (d5) run backward from chunk to chunk. The rest is
        local; $R = \mathrm{tril}(dY\, U^\top)$ comes from (d2) and
        $G = -\beta\,\mathrm{stril}(Z\, U^\top)$ from $A$:

        $$dQ = dY\, W + R K \tag{d6}$$
        $$dK = R^\top Q + (G + G^\top) K + U\, dW' - \beta Z W
           \tag{d7}$$
        $$dV = \beta Z, \qquad
          d\beta = \mathrm{rowsum}\big(Z \odot (V - \bar V)\big)
          \tag{d8}$$
        """
        q, k, v, beta, ask, states = ctx.saved_tensors
        chunk = ctx.chunk
        batch, _, heads, _ = q.shape
        if dy is None:
            dy = states.new_zeros(v.shape)
        if dW is None:
            dW = states.new_zeros(
                batch, heads, v.shape[-1], k.shape[-1]
            )
        dS = dW.flatten(0, 1).clone()
        dq, dk, dv, dbeta = (
            x.new_empty(x.shape) for x in (q, k, v, beta)
        )
        dask = None if ask is None else ask.new_empty(ask.shape)
        for steps, places in reversed(chunks.groups(q, chunk)):
            Q, K, V, dY, b = (
                chunks.split(x[:, steps], chunk, states.dtype)
                for x in (q, k, v, dy, beta[..., None])
            )
            n = places.stop - places.start
            S = states[places].flatten(0, 1)
            asked = _asking(K, ask, steps)
            eK = b * asked
            L = torch.bmm(asked, K.mT).tril_(-1)
            X = inverse(b * L)
            rest = V.baddbmm_(asked, S.mT, alpha=-1)
            U = torch.bmm(X, b * rest)  # (d1)
            P = torch.bmm(Q, K.mT).tril_()
            dU, Z = torch.bmm(P.mT, dY), torch.empty_like(V)
            own, after = torch.bmm(dY.mT, Q), torch.empty_like(S)
            for X_i, eK_i, K_i, dU_i, Z_i, own_i, after_i in reversed(
                [*chunks.each(n, X, eK, K, dU, Z, own, after)]
            ):
                after_i.copy_(dS)
                dU_i.baddbmm_(K_i, dS.mT)
                torch.bmm(X_i.mT, dU_i, out=Z_i)  # (d4)
                dS.add_(own_i).baddbmm_(Z_i.mT, eK_i, alpha=-1)  # (d5)
            R = torch.bmm(dY, U.mT).tril_()
            N = torch.bmm(Z, U.mT).tril_(-1)
            # V - V_bar is the rest less what the chunk itself wrote,
            # L U; and rowsum(Z . L U) = rowsum(N . L) is cheaper.
            dB = (Z * rest).sum(-1, True) - (N * L).sum(-1, True)
            dV = b * Z  # (d8)
            N *= b  # -G
            dQ = torch.bmm(dY, S).baddbmm_(R, K)  # (d6)
            dK = torch.bmm(U, after).baddbmm_(R.mT, Q)  # (d7)
            dK.baddbmm_(N.mT, asked, alpha=-1)
            # The rest of (d7) belongs to the key that asked.
            asking = dK if dask is None else torch.zeros_like(dK)
            asking.baddbmm_(N, K, alpha=-1).baddbmm_(dV, S, alpha=-1)
            if dask is not None:
                chunks.join(asking, dask[:, steps])
            for part, whole in (
                (dQ, dq),
                (dK, dk),
                (dV, dv),
                (dB, dbeta[..., None]),
            ):
                chunks.join(part, whole[:, steps])
        dS = dS.view(batch, heads, *dS.shape[1:])
        return dq, dk, dv, dbeta, dask, dS, None, None


def _asking(K: Tensor, ask: Tensor | None, steps: slice) -> Tensor:
    """The keys that retrieve, for the chunks of `K`."""
    if ask is None:
        return K
    return chunks.split(ask[:, steps], K.shape[1], K.dtype)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    W: Tensor,
    z: Tensor | None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Arguments and results of the naive version; `chunk` is $C$.

    With attention normalisation the sums with $z$ are sum rules.
    """
    keep = chunks.will_go_back(q, k, v, beta, W, z)
    if z is None:
        y, W = _DeltaRule.apply(q, k, v, beta, None, W, chunk, keep)
        return y, W, None
    ask = unit_range(k)  # its length cancels in Eq. 27
    held, _ = overlap(ask, k, z, -1, chunk)
    read, z = overlap(q, k, z, 0, chunk)
    ask = divide(ask, held)  # an empty memory: ask nothing, get 0
    y, W = _DeltaRule.apply(q, k, v, beta, ask, W, chunk, keep)
    return divide(y, read), W, z  # Eq. 28
