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

What fades does so by products of decays: $\gamma_i$ is the part of $W$
that is left at step $i$, $\Gamma_{ij}$ that of what step $j$ wrote,
and $\Gamma_C$ is the last row of $\Gamma$.

By (n2) every step adds $u_i \otimes \phi(k_i)$, so the retrieved values
of Eq. 20 are those of $W$ plus those written earlier in the chunk.
Collect all $u$ on one side:

$$(I + A)\, U = \beta\, (V - \gamma K W^\top), \quad
  A = \beta\, \mathrm{stril}(K K^\top) \odot \Gamma \tag{d1}$$
$$Y = \gamma\, Q W^\top
  + \big(\mathrm{tril}(Q K^\top) \odot \Gamma\big)\, U \tag{d2}$$
$$W' = \gamma_C W + U^\top (\Gamma_C K) \tag{d3}$$

where $\beta$, $\gamma$ and $\Gamma_C$ scale rows. For the delta rule
all decays are 1, and nothing is spent on them. For one chunk that holds
everything and $W = 0$, this is the closed form of the whole sequence.
"""

from typing import Any

import torch
from torch import Tensor

from fwlab.feature_maps import divide, unit_range
from fwlab.ops import chunks
from fwlab.ops.decay import Decay
from fwlab.ops.delta import naive
from fwlab.ops.linear.efficient import overlap


def inverse(A: Tensor) -> Tensor:
    r"""$(I + A)^{-1}$ for strictly lower triangular $A$.

    Forward substitution: stable, and exact about zeros of $\beta$.
    """
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    # `unitriangular` takes the diagonal to be 1, unseen.
    return torch.linalg.solve_triangular(
        A, eye, upper=False, unitriangular=True
    )


class _ErrorCorrecting(torch.autograd.Function):
    r"""(d1) to (d3) forward, and their gradients by hand.

    With attention normalisation, Eq. 27 divides what is retrieved by
    $z_{i-1} \cdot \phi(k_i)$. That is to *ask* with the key
    $a_i = \phi(k_i) / (z_{i-1} \cdot \phi(k_i))$ and to write with
    $\phi(k_i)$ as before: in (d1) the first $K$ of each product becomes
    the keys that ask. The plain rule asks with the key itself.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        beta: Tensor,
        ask: Tensor | None,
        W: Tensor,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        time, chunk = q.shape[1], chunks.LENGTH
        y = v.new_empty(v.shape, dtype=W.dtype)
        state = W.flatten(0, 1).clone()
        n = chunks.count(time, chunk)
        states = state.new_empty(n if keep else 0, *state.shape)
        for steps, places in chunks.groups(q, chunk):
            Q, K, V, b = (
                chunks.split(x[:, steps], chunk, W.dtype)
                for x in (q, k, v, beta[..., None])
            )
            fade = Decay(decay, steps, chunk, W.dtype)
            eK = b * _asking(K, ask, steps)
            X = inverse(fade.seen(torch.bmm(eK, K.mT), -1))
            eK, last = fade.of_state(eK), fade.at_end(K)
            rest, U = V.mul_(b), torch.empty_like(V)
            n = places.stop - places.start
            S = states[places]
            if not keep:
                S = state.new_empty(n, *state.shape)
            for i, (S_i, (X_i, eK_i, last_i, rest_i, U_i)) in enumerate(
                zip(
                    S,
                    chunks.each(n, X, eK, last, rest, U),
                    strict=True,
                )
            ):
                S_i.copy_(state)
                rest_i.baddbmm_(eK_i, state.mT, alpha=-1)
                torch.bmm(X_i, rest_i, out=U_i)  # (d1)
                fade.carry(state, i).baddbmm_(U_i.mT, last_i)  # (d3)
            P = fade.seen(torch.bmm(Q, K.mT), 0)
            Y = torch.bmm(fade.of_state(Q), S.flatten(0, 1).mT)
            chunks.join(Y.baddbmm_(P, U), y[:, steps])  # (d2)
        # Inputs and one state per chunk: nothing else is kept.
        ctx.save_for_backward(q, k, v, decay, beta, ask, states)
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        return y, state.view_as(W)

    @staticmethod
    @chunks.backward_pass
    def backward(
        ctx: Any, dy: Tensor | None, dW: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        r"""$U$ is computed again from the kept states. With
        $X = (I + A)^{-1}$ and
        $P = \mathrm{tril}(Q K^\top) \odot \Gamma$, the gradient of
        (d1)'s right-hand side is $Z$, by the transposed system:

        $$Z = X^\top \big(P^\top dY
           + \Gamma_C K\, dW'^\top\big) \tag{d4}$$
        $$dW = \gamma_C\, dW' + dY^\top (\gamma Q)
           - (\beta Z)^\top (\gamma K) \tag{d5}$$

        (d4) and (d5) run backward from chunk to chunk. The rest is
        local; $R = \mathrm{tril}(dY\, U^\top) \odot \Gamma$ comes from
        (d2) and $N = \beta\,\mathrm{stril}(Z\, U^\top) \odot \Gamma$
        from $A$:

        $$dQ = \gamma\, dY\, W + R K \tag{d6}$$
        $$dK = R^\top Q - (N + N^\top) K + \Gamma_C U\, dW'
           - \gamma \beta Z W \tag{d7}$$
        $$dV = \beta Z, \qquad
          d\beta = \mathrm{rowsum}\big(Z \odot (V - \bar V)\big)
          \tag{d8}$$
        """
        q, k, v, decay, beta, ask, states = ctx.saved_tensors
        chunk = ctx.chunk
        batch, _, heads, _ = q.shape
        if dy is None:
            dy = states.new_zeros(v.shape)
        if dW is None:
            dW = states.new_zeros(
                batch, heads, v.shape[-1], k.shape[-1]
            )
        dS = dW.flatten(0, 1).clone()
        dq, dk, dv, dd, dbeta, dask = map(
            chunks.room, (q, k, v, decay, beta, ask)
        )
        for steps, places in reversed(chunks.groups(q, chunk)):
            Q, K, V, dY, b = (
                chunks.split(x[:, steps], chunk, states.dtype)
                for x in (q, k, v, dy, beta[..., None])
            )
            n = places.stop - places.start
            S = states[places].flatten(0, 1)
            fade = Decay(decay, steps, chunk, states.dtype)
            asked = _asking(K, ask, steps)
            asked_S = fade.of_state(asked)
            AK = torch.bmm(asked, K.mT)
            L = fade.seen(AK if dd is None else AK.clone(), -1)
            X = inverse(b * L)
            rest = V.baddbmm_(asked_S, S.mT, alpha=-1)
            U = torch.bmm(X, b * rest)  # (d1)
            QK = torch.bmm(Q, K.mT)
            P = fade.seen(QK if dd is None else QK.clone(), 0)
            dU, Z = torch.bmm(P.mT, dY), torch.empty_like(V)
            own = torch.bmm(dY.mT, fade.of_state(Q))
            after, last, eK = (
                torch.empty_like(S),
                fade.at_end(K),
                b * asked_S,
            )
            parts = chunks.each(n, X, eK, last, dU, Z, own, after)
            for i, (
                X_i,
                eK_i,
                last_i,
                dU_i,
                Z_i,
                own_i,
                after_i,
            ) in reversed([*enumerate(parts)]):
                after_i.copy_(dS)
                dU_i.baddbmm_(last_i, dS.mT)
                torch.bmm(X_i.mT, dU_i, out=Z_i)  # (d4)
                fade.carry(dS, i).add_(own_i)
                dS.baddbmm_(Z_i.mT, eK_i, alpha=-1)  # (d5)
            dV = b * Z  # (d8)
            YU, ZU = torch.bmm(dY, U.mT), torch.bmm(Z, U.mT)
            read, stored = torch.bmm(dY, S), torch.bmm(U, after)
            # V - V_bar is the rest less what the chunk itself wrote,
            # L U; and rowsum(Z . L U) = rowsum(Z U' . L) is cheaper.
            dB = (Z * rest).sum(-1, True) - (ZU * L).sum(-1, True)
            if dd is not None:
                # Both readers: the query, and the key that asks.
                M = (YU * QK).tril_(-1).sub_((b * ZU * AK).tril_(-1))
                dD = fade.gradient(
                    M,
                    S,
                    after,
                    (read * Q - torch.bmm(dV, S) * asked).sum(-1),
                    (stored * K).sum(-1),
                )
                chunks.join(dD, dd[:, steps, :, None])
            R, N = fade.seen(YU, 0), fade.seen(ZU, -1)
            N *= b
            dQ = fade.of_state(read).baddbmm_(R, K)  # (d6)
            dK = fade.at_end(stored).baddbmm_(R.mT, Q)  # (d7)
            dK.baddbmm_(N.mT, asked, alpha=-1)
            # The rest of (d7) belongs to the key that asked.
            asking = dK if dask is None else torch.zeros_like(dK)
            asking.baddbmm_(N, K, alpha=-1)
            asking.baddbmm_(fade.of_state(dV), S, alpha=-1)
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
        return dq, dk, dv, dd, dbeta, dask, dS, None


def _asking(K: Tensor, ask: Tensor | None, steps: slice) -> Tensor:
    """The keys that retrieve, for the chunks of `K`."""
    if ask is None:
        return K
    return chunks.split(ask[:, steps], K.shape[1], K.dtype)


def error_correcting(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor,
    W: Tensor,
    z: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Arguments and results of the naive version.

    With attention normalisation the sums with $z$ are sum rules.
    """
    keep = chunks.will_go_back(q, k, v, decay, beta, W, z)
    given = (q, k, v, decay, beta)
    if z is None:
        y, W = _ErrorCorrecting.apply(*given, None, W, keep)
        return y, W, None
    ask = unit_range(k)  # its length cancels in Eq. 27
    held, _ = overlap(ask, k, decay, None, z, -1)
    # Near the end of its range, dividing by z . k first would overflow
    # where the reading itself, a mean, does not.
    least = torch.finfo(held.dtype).tiny ** 0.5
    if ((held != 0) & (held.abs() < least)).any():
        return naive.error_correcting(*given, W, z)
    read, z = overlap(q, k, decay, None, z)
    ask = divide(ask, held)  # an empty memory: ask nothing, get 0
    y, W = _ErrorCorrecting.apply(*given, ask, W, keep)
    return divide(y, read), W, z  # Eq. 28
