r"""# Fast weights in chunks, with gradients by hand

The equations are those of the chunked version. What autograd would keep
for the backward pass (all products of all chunks) is computed again
instead: only the inputs are kept, and one state per chunk.

One function serves two recurrences. The additive rules write values;
the delta rules write *errors* $E = V - \bar V$ in their place, which
solve a triangular system (`fwlab/ops/delta`). With the strength $s$
(the delta rule's $\beta$), what is written is $U = s E$, and $E = V$
for the additive rules:

$$Y = \gamma\, Q W^\top
  + \big(\mathrm{tril}(Q K^\top) \odot \Gamma\big)\, U \tag{c1}$$
$$W' = \gamma_C W + U^\top (\Gamma_C K) \tag{c2}$$

All chunks are computed together but for what (c2) carries from one to
the next. `P` is $\mathrm{tril}(Q K^\top) \odot \Gamma$; `fade` knows
all about decays and costs nothing where there are none.
"""

from typing import Any

import torch
from torch import Tensor

from fwlab.feature_maps import divide
from fwlab.ops import autograd, chunks
from fwlab.ops import decay as decays


class Group:
    """Some chunks of the inputs, each `[n * batch * heads, C, width]`.

    As many as fit into the caches together: see `chunks.groups`.
    """

    def __init__(
        self, inputs: Any, place: Any, chunk: int, dtype: torch.dtype
    ):
        (self.steps, self.places), self.kind = place, (chunk, dtype)
        self.n = self.places.stop - self.places.start
        q, k, v, decay, strength, ask = inputs
        self.Q, self.K, self.V, self.s = map(
            self.cut, (q, k, v, strength)
        )
        # The keys that retrieve, in a delta rule.
        self.A = self.K if ask is None else self.cut(ask)
        self.fade = decays.of(decay, self.steps, *self.kind)

    def cut(self, x: Tensor | None) -> Any:
        """These chunks of an input; None stays None."""
        if x is None:
            return None
        return chunks.split(x[:, self.steps], *self.kind)

    def put(self, part: Tensor | None, whole: Tensor | None) -> None:
        """The reverse of `cut`, for what has a gradient."""
        if whole is not None and part is not None:
            chunks.join(part, whole[:, self.steps])

    def strong(self, x: Tensor) -> Tensor:
        """Rows times their strength."""
        return x if self.s is None else self.s * x

    def each(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Views of tensors, one chunk after the other."""
        return list(chunks.each(self.n, *tensors))


class Values:
    """What an additive rule writes: the values, $E = V$."""

    #: Whether it is the difference to what the memory holds.
    corrects = False

    def __init__(self, group: Group):
        self.group, self.E = group, group.V

    def forward(self, state: Tensor, S: Tensor) -> None:
        """Move `state` past all chunks; `S` gets the states before."""
        fade = self.group.fade
        left = fade.at_end(self.group.K)
        added = torch.bmm(self.group.strong(self.E).mT, left)
        for i, (S_i, added_i) in enumerate(self.group.each(S, added)):
            S_i.copy_(state)
            fade.carry(state, i).add_(added_i)  # (c2)

    def restore(self, S: Tensor) -> None:
        """Compute `E` again from the states."""

    def backward(
        self, dU: Tensor, own: Tensor, after: Tensor, dS: Tensor
    ) -> Tensor:
        r"""From the last chunk to the first, as (c2) runs forward:

        $$dW = \gamma_C\, dW' + dY^\top (\gamma Q) \tag{c6}$$
        $$dU = P^\top dY + \Gamma_C K\, dW'^\top \tag{c5}$$

        - `dU` and `own` come with the products that hold $dY$; what
          (c5) adds is added in place.
        - `after` gets $dW'$ of each chunk, `dS` is moved past them.
        - Returns $dV = s\, dU$.
        """
        group = self.group
        parts = group.each(after, own)
        for i in reversed(range(group.n)):
            after_i, own_i = parts[i]
            after_i.copy_(dS)
            group.fade.carry(dS, i).add_(own_i)  # (c6)
        dU.baddbmm_(group.fade.at_end(group.K), after.mT)  # (c5)
        return group.strong(dU)

    def asked(
        self, dV: Tensor, dK: Tensor, ds: Tensor | None, S: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients through the keys that retrieve: here, nobody does.

        Adds to `dK` and `ds`. Returns the gradient of `ask`, if that
        was given, and that of each product with the state, if any.
        """
        return None, None


class Memory(torch.autograd.Function):
    r"""(c1) and (c2) forward, and their gradients.

    - `decay`: `[batch, time, heads, 1 or key]`, `strength`:
      `[batch, time, heads, 1]`; None = 1.
    - `ask`: keys that retrieve, in place of `k`; None = `k`.
    - `written`: the class that knows what is written, such as `Values`.
    - `diagonal`: 0; -1 reads *before* the write of the same step.
    - `keep`: a backward pass may follow.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        strength: Tensor | None,
        ask: Tensor | None,
        W: Tensor,
        written: type[Values],
        diagonal: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        """Groups of chunks from the first to the last."""
        inputs = q, k, v, decay, strength, ask
        chunk = chunks.length(decay)
        # The states are kept only if a backward pass may follow.
        y = v.new_empty(v.shape, dtype=W.dtype)
        state = W.flatten(0, 1).clone()
        n = chunks.count(q.shape[1], chunk) if keep else 0
        states = state.new_empty(n, *state.shape)
        # One group after the other, all chunks of a group together.
        for place in chunks.groups(q, chunk):
            group = Group(inputs, place, chunk, W.dtype)
            S = states[place[1]]
            if not keep:
                S = state.new_empty(group.n, *state.shape)
            S = S.flatten(0, 1)
            E = written(group)
            E.forward(state, S)
            P = group.fade.scores(group.Q, group.K, diagonal).P
            Y = torch.bmm(group.fade.of_state(group.Q), S.mT)
            group.put(Y.baddbmm_(P, group.strong(E.E)), y)  # (c1)
        # Inputs and one state per chunk: nothing else is kept.
        ctx.save_for_backward(*inputs, states)
        ctx.options = written, diagonal, chunk
        ctx.set_materialize_grads(False)
        return y, state.view_as(W)

    @staticmethod
    @autograd.backward_pass
    def backward(
        ctx: Any, dy: Tensor | None, dW: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Groups of chunks from the last to the first."""
        *inputs, states = ctx.saved_tensors
        written, diagonal, chunk = ctx.options
        _, k, v, *_ = inputs
        # One of the two outputs may have no gradient.
        if dy is None:
            dy = states.new_zeros(v.shape)
        dS = states.new_zeros(states.shape[1:])
        if dW is not None:
            dS += dW.flatten(0, 1)
        # `dS` moves from the end of a group to its beginning.
        gradients = [autograd.room(x) for x in inputs]
        for place in reversed(chunks.groups(k, chunk)):
            group = Group(inputs, place, chunk, states.dtype)
            S = states[place[1]].flatten(0, 1)
            parts = _backward(group, written, diagonal, dy, S, dS)
            for part, whole in zip(parts, gradients, strict=True):
                group.put(part, whole)
        shape = k.shape[0], k.shape[2], *dS.shape[1:]
        return *gradients, dS.view(shape), None, None, None


def _backward(
    group: Group,
    written: type[Values],
    diagonal: int,
    dy: Tensor,
    S: Tensor,
    dS: Tensor,
) -> tuple[Tensor | None, ...]:
    r"""The gradients of a group; `dS` is moved to its beginning.

    With $dW'$ the gradient of the state after a chunk and
    $R = \mathrm{tril}(dY\, U^\top) \odot \Gamma$:

    $$dQ = \gamma\, dY\, W + R K \tag{c3}$$
    $$dK = R^\top Q + \Gamma_C\, U\, dW' \tag{c4}$$
    $$ds = \mathrm{rowsum}(E \odot dU) \tag{c7}$$

    A delta rule has more of them, through the keys that retrieve.
    """
    Q, K, fade, dY = group.Q, group.K, group.fade, group.cut(dy)
    E = written(group)
    E.restore(S)
    scores = fade.scores(Q, K, diagonal)
    dU, after = torch.bmm(scores.P.mT, dY), torch.empty_like(S)
    own = torch.bmm(dY.mT, fade.of_state(Q))
    dV = E.backward(dU, own, after, dS)
    # Queries, keys and strengths of the chunk itself.
    U = group.strong(E.E)
    read, stored = torch.bmm(dY, S), torch.bmm(U, after)
    dQ, dK = fade.of_state(read), fade.at_end(stored)
    scores.backward(torch.bmm(dY, U.mT), dQ, dK)  # (c3), (c4)
    ds = None if group.s is None else (E.E * dU).sum(-1, True)  # (c7)
    dA, asked = E.asked(dV, dK, ds, S)
    dd = None
    if fade.forgets:
        read = read * Q if asked is None else read * Q - asked
        dd = fade.gradient(S, after, read, stored * K)
    return dQ, dK, dV, dd, ds, dA


def one_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    strength: Tensor | None,
    ask: Tensor | None,
    W: Tensor,
    corrects: bool,
    diagonal: int,
) -> tuple[Tensor, Tensor]:
    """(c0) or (d0) as products of matrices with single rows.

    For a single step nothing is gained from chunks.
    """
    n, dtype, S = W.shape[0] * W.shape[1], W.dtype, W.flatten(0, 1)
    # One row of each head, `[batch * heads, 1, width]`.
    rows: Any = [
        x if x is None else x.to(dtype).reshape(n, 1, -1)
        for x in (q, k, v, decay, strength, ask)
    ]
    q, k, v, d, s, a = rows
    S = S if d is None else d * S
    # The delta rules write the error.
    if corrects:
        v = torch.baddbmm(v, k if a is None else a, S.mT, alpha=-1)
    u = v if s is None else s * v
    after = torch.addcmul(S, u.mT, k)
    y = torch.bmm(q, (after if diagonal == 0 else S).mT)
    return y.view(*W.shape[:2], 1, -1).transpose(1, 2), after.view_as(W)


def remember(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    strength: Tensor | None,
    W: Tensor,
    *,
    ask: Tensor | None = None,
    written: type[Values] = Values,
    diagonal: int = 0,
) -> tuple[Tensor, Tensor]:
    """`Memory`, or one step without chunks if none will go back."""
    given = (q, k, v, decay, strength, ask, W)
    keep = autograd.will_go_back(*given)
    # A text is generated step by step.
    if q.shape[1] == 1 and not keep:
        return one_step(*given, written.corrects, diagonal)
    return Memory.apply(*given, written, diagonal, keep)


def additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    strength: Tensor | None,
    W: Tensor,
    z: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Arguments and results of the chunked version."""
    if z is None:
        return remember(q, k, v, decay, strength, W)
    # $z$ is one more row of $W$, into which every key writes 1.
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    W = torch.cat([W, z[:, :, None]], -2)
    y, W = remember(q, k, v, decay, strength, W)
    y = divide(y[..., :-1], y[..., -1:])  # Eq. 19
    return y, W[..., :-1, :].contiguous(), W[..., -1, :].contiguous()
