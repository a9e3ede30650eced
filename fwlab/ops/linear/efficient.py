r"""# The sum rule and the gated rule in chunks

The loop of the naive version does little work per step and keeps one
$W$ per step for the backward pass. Cut the sequence into chunks of $C$
steps. Inside a chunk everything is a matrix product; from chunk to
chunk only one state is carried, and only that one is kept.

Capital letters are the rows of one chunk stacked up: $Q$ and $K$ (the
features of queries and keys), $V$, $Y$, and $U = s V$, what is really
written. $W$ is the state before the chunk and $W'$ the one after it.
$\mathrm{tril}$ keeps the lower triangle with its diagonal: step $i$
sees the steps $j \le i$. What fades does so by products of decays:
$\gamma_i$ is the part of $W$ that is left at step $i$, $\Gamma_{ij}$
that of what step $j$ wrote, and $\Gamma_C$ is the last row of $\Gamma$.

$$Y = \gamma\, Q W^\top
  + \big(\mathrm{tril}(Q K^\top) \odot \Gamma\big)\, U \tag{c1}$$
$$W' = \gamma_C W + U^\top (\Gamma_C K) \tag{c2}$$

where $s$, $\gamma$ and $\Gamma_C$ scale rows. (c1) is Eq. 25 with the
sum of (n1) split at the start of the chunk. For the sum rule all decays
and strengths are 1, and nothing is spent on them.
"""

from typing import Any

import torch
from torch import Tensor

from fwlab.feature_maps import divide
from fwlab.ops import chunks
from fwlab.ops.decay import Decay


class _Additive(torch.autograd.Function):
    r"""(c1) and (c2) forward, and their gradients by hand.

    `diagonal=-1` reads *before* the write of the same step.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        strength: Tensor | None,
        W: Tensor,
        diagonal: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        time, chunk = q.shape[1], chunks.LENGTH
        y = v.new_empty(v.shape, dtype=W.dtype)
        state = W.flatten(0, 1).clone()
        n = chunks.count(time, chunk)
        states = state.new_empty(n if keep else 0, *state.shape)
        for steps, places in chunks.groups(q, chunk):
            Q, K, V = (
                chunks.split(x[:, steps], chunk, W.dtype)
                for x in (q, k, v)
            )
            U = _written(V, strength, steps)
            fade = Decay(decay, steps, chunk, W.dtype)
            count = places.stop - places.start
            added = torch.bmm(U.mT, fade.at_end(K))
            added = added.unflatten(0, (count, -1))
            S = states[places] if keep else torch.empty_like(added)
            for i, (S_i, added_i) in enumerate(
                zip(S, added, strict=True)
            ):
                S_i.copy_(state)
                fade.carry(state, i).add_(added_i)  # (c2)
            P = fade.seen(torch.bmm(Q, K.mT), diagonal)
            Y = torch.bmm(fade.of_state(Q), S.flatten(0, 1).mT)
            chunks.join(Y.baddbmm_(P, U), y[:, steps])  # (c1)
        # Inputs and one state per chunk: nothing else is kept.
        ctx.save_for_backward(q, k, v, decay, strength, states)
        ctx.diagonal, ctx.chunk = diagonal, chunk
        ctx.set_materialize_grads(False)
        return y, state.view_as(W)

    @staticmethod
    @chunks.backward_pass
    def backward(
        ctx: Any, dy: Tensor | None, dW: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        r"""Let $dY$ be the gradient of $Y$ and $dW'$ that of the
        state after the chunk. From (c1) and (c2), with
        $P = \mathrm{tril}(Q K^\top) \odot \Gamma$ and
        $R = \mathrm{tril}(dY\, U^\top) \odot \Gamma$:

        $$dQ = \gamma\, dY\, W + R K \tag{c3}$$
        $$dK = R^\top Q + \Gamma_C\, U\, dW' \tag{c4}$$
        $$dU = P^\top dY + \Gamma_C K\, dW'^\top \tag{c5}$$
        $$dW = \gamma_C\, dW' + dY^\top (\gamma Q) \tag{c6}$$

        (c6) runs backward from chunk to chunk, as (c2) runs forward.
        Then $dV = s\, dU$ and $ds = \mathrm{rowsum}(V \odot dU)$.
        """
        q, k, v, decay, strength, states = ctx.saved_tensors
        diagonal, chunk = ctx.diagonal, ctx.chunk
        batch, _, heads, _ = q.shape
        if dy is None:
            dy = states.new_zeros(v.shape)
        if dW is None:
            dW = states.new_zeros(
                batch, heads, v.shape[-1], k.shape[-1]
            )
        dS = dW.flatten(0, 1).clone()
        dq, dk, dv, dd, ds = map(
            chunks.room, (q, k, v, decay, strength)
        )
        for steps, places in reversed(chunks.groups(q, chunk)):
            Q, K, V, dY = (
                chunks.split(x[:, steps], chunk, states.dtype)
                for x in (q, k, v, dy)
            )
            U = _written(V, strength, steps)
            fade = Decay(decay, steps, chunk, states.dtype)
            S = states[places]
            added = torch.bmm(dY.mT, fade.of_state(Q)).view_as(S)
            after = torch.empty_like(S)
            for i in reversed(range(len(S))):
                after[i] = dS
                fade.carry(dS, i).add_(added[i])  # (c6)
            S, after = S.flatten(0, 1), after.flatten(0, 1)
            QK, YU = torch.bmm(Q, K.mT), torch.bmm(dY, U.mT)
            M = None if dd is None else (QK * YU).tril_(-1)
            P, R = fade.seen(QK, diagonal), fade.seen(YU, diagonal)
            read = torch.bmm(dY, S)
            dU = torch.bmm(fade.at_end(K), after.mT)
            dU.baddbmm_(P.mT, dY)  # (c5)
            stored = torch.bmm(U, after)
            if M is not None:
                dD = fade.gradient(
                    M,
                    S,
                    after,
                    (read * Q).sum(-1),
                    (stored * K).sum(-1),
                )
                chunks.join(dD, dd[:, steps, :, None])
            dQ = fade.of_state(read).baddbmm_(R, K)  # (c3)
            dK = fade.at_end(stored).baddbmm_(R.mT, Q)  # (c4)
            if ds is not None:
                dB = (V * dU).sum(-1, True)
                chunks.join(dB, ds[:, steps, :, None])
                dU = _written(dU, strength, steps)
            for part, whole in ((dQ, dq), (dK, dk), (dU, dv)):
                chunks.join(part, whole[:, steps])
        dS = dS.view(batch, heads, *dS.shape[1:])
        return dq, dk, dv, dd, ds, dS, None, None


def _written(
    V: Tensor, strength: Tensor | None, steps: slice
) -> Tensor:
    """$s V$ for the chunks of `V`."""
    if strength is None:
        return V
    cut = strength[:, steps, :, None]
    return V * chunks.split(cut, V.shape[1], V.dtype)


def _memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    strength: Tensor | None,
    W: Tensor,
    diagonal: int,
) -> tuple[Tensor, Tensor]:
    given = (q, k, v, decay, strength, W)
    keep = chunks.will_go_back(*given)
    return _Additive.apply(*given, diagonal, keep)


def overlap(
    q: Tensor,
    k: Tensor,
    decay: Tensor | None,
    strength: Tensor | None,
    z: Tensor,
    diagonal: int = 0,
) -> tuple[Tensor, Tensor]:
    r"""The denominators $z_i \cdot \phi(q_i)$ of Eq. 19, and the final
    $z$.

    $z$ of Eq. 18 is a memory of its own, with one row, into which every
    key writes the value 1.
    """
    one = k.new_ones(1, 1, 1, 1).expand(*k.shape[:3], 1)
    total, z = _memory(
        q, k, one, decay, strength, z[:, :, None], diagonal
    )
    return total, z[:, :, 0]


def additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    strength: Tensor | None,
    W: Tensor,
    z: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Arguments and results of the naive version."""
    y, W = _memory(q, k, v, decay, strength, W, 0)
    if z is not None:
        total, z = overlap(q, k, decay, strength, z)
        y = divide(y, total)  # Eq. 19
    return y, W, z
