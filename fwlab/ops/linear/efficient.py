r"""# The sum rule in chunks

The loop of the naive version does little work per step and keeps one
$W$ per step for the backward pass. Cut the sequence into chunks of $C$
steps. Inside a chunk everything is a matrix product; from chunk to
chunk only one state is carried, and only that one is kept.

Capital letters are the rows of one chunk stacked up: $Q$ and $K$ (the
features of queries and keys), $V$ and $Y$. $W$ is the state before the
chunk and $W'$ the one after it. $\mathrm{tril}$ keeps the lower
triangle with its diagonal: step $i$ sees the steps $j \le i$.

$$Y = Q W^\top + \mathrm{tril}(Q K^\top)\, V \tag{c1}$$
$$W' = W + V^\top K \tag{c2}$$

(c1) is Eq. 25 with the sum of Eq. 17 split at the start of the chunk.
"""

from typing import Any

import torch
from torch import Tensor

from fwlab.feature_maps import divide
from fwlab.ops import chunks

CHUNK = 32


class _SumRule(torch.autograd.Function):
    r"""(c1) and (c2) forward, and their gradients by hand.

    `diagonal=-1` reads *before* the write of the same step.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        W: Tensor,
        diagonal: int,
        chunk: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        time = q.shape[1]
        y = v.new_empty(v.shape, dtype=W.dtype)
        state = W.flatten(0, 1).clone()
        n = chunks.count(time, chunk)
        states = state.new_empty(n if keep else 0, *state.shape)
        for steps, places in chunks.groups(q, chunk):
            Q, K, V = (
                chunks.split(x[:, steps], chunk, W.dtype)
                for x in (q, k, v)
            )
            count = places.stop - places.start
            added = torch.bmm(V.mT, K).unflatten(0, (count, -1))
            S = states[places] if keep else torch.empty_like(added)
            for S_i, added_i in zip(S, added, strict=True):
                S_i.copy_(state)
                state += added_i  # (c2)
            P = torch.bmm(Q, K.mT).tril_(diagonal)
            Y = torch.bmm(Q, S.flatten(0, 1).mT).baddbmm_(P, V)  # (c1)
            chunks.join(Y, y[:, steps])
        # Inputs and one state per chunk: nothing else is kept.
        ctx.save_for_backward(q, k, v, states)
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
        $R = \mathrm{tril}(dY\, V^\top)$:

        $$dQ = dY\, W + R K \tag{c3}$$
        $$dK = R^\top Q + V\, dW' \tag{c4}$$
        $$dV = \mathrm{tril}(Q K^\top)^\top dY + K\, dW'^\top
          \tag{c5}$$
        $$dW = dW' + dY^\top Q \tag{c6}$$

        (c6) runs backward from chunk to chunk, as (c2) runs forward.
        """
        q, k, v, states = ctx.saved_tensors
        diagonal, chunk = ctx.diagonal, ctx.chunk
        batch, _, heads, _ = q.shape
        if dy is None:
            dy = states.new_zeros(v.shape)
        if dW is None:
            dW = states.new_zeros(
                batch, heads, v.shape[-1], k.shape[-1]
            )
        dS = dW.flatten(0, 1).clone()
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        for steps, places in reversed(chunks.groups(q, chunk)):
            Q, K, V, dY = (
                chunks.split(x[:, steps], chunk, states.dtype)
                for x in (q, k, v, dy)
            )
            S = states[places]
            added = torch.bmm(dY.mT, Q).view_as(S)
            after = torch.empty_like(S)
            for i in reversed(range(len(S))):
                after[i] = dS
                dS += added[i]  # (c6)
            S, after = S.flatten(0, 1), after.flatten(0, 1)
            P = torch.bmm(Q, K.mT).tril_(diagonal)
            R = torch.bmm(dY, V.mT).tril_(diagonal)
            dQ = torch.bmm(dY, S).baddbmm_(R, K)  # (c3)
            dK = torch.bmm(V, after).baddbmm_(R.mT, Q)  # (c4)
            dV = torch.bmm(K, after.mT).baddbmm_(P.mT, dY)  # (c5)
            for part, whole in ((dQ, dq), (dK, dk), (dV, dv)):
                chunks.join(part, whole[:, steps])
        dS = dS.view(batch, heads, *dS.shape[1:])
        return dq, dk, dv, dS, None, None, None


def additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    W: Tensor,
    diagonal: int = 0,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    r"""Readings and final state of Eq. 17."""
    keep = chunks.will_go_back(q, k, v, W)
    return _SumRule.apply(q, k, v, W, diagonal, chunk, keep)


def overlap(
    q: Tensor, k: Tensor, z: Tensor, diagonal: int, chunk: int
) -> tuple[Tensor, Tensor]:
    r"""The denominators $z_i \cdot \phi(q_i)$ of Eq. 19, and the final
    $z$.

    $z$ of Eq. 18 is a memory of its own, with one row, into which every
    key writes the value 1.
    """
    one = k.new_ones(1, 1, 1, 1).expand(*k.shape[:3], 1)
    total, z = additive(q, k, one, z[:, :, None], diagonal, chunk)
    return total, z[:, :, 0]


def sum_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    W: Tensor,
    z: Tensor | None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Arguments and results of the naive version; `chunk` is $C$."""
    y, W = additive(q, k, v, W, chunk=chunk)
    if z is not None:
        total, z = overlap(q, k, z, 0, chunk)
        y = divide(y, total)  # Eq. 19
    return y, W, z
