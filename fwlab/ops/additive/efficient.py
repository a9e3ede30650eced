r"""# Fast weights in chunks, with gradients by hand

The equations are those of the chunked version. What autograd would keep
for the backward pass (all products of all chunks) is computed again
instead: only the inputs are kept, and one state per chunk.

One function serves two recurrences. The additive rules write values,
$E = V$; the delta rules write *errors* in their place, which solve a
triangular system (`ops/correcting`). With the strength $s$ (the delta
rule's $\beta$), what is written is $U = s E$:

$$Y = \gamma\, Q W^\top + P\, U, \quad
  P = \mathrm{tril}(Q K^\top) \odot \Gamma \tag{c1}$$
$$W' = \gamma_C W + U^\top (\Gamma_C K) \tag{c2}$$

Some rules read twice in a step. The delta rules use their keys to query
the memory as it was *before* the write. These rows $\bar K$ are below
$Q$ in one matrix $R$, and $\mathrm{stril}(\bar K K^\top) \odot \Gamma$
is below in $P$: products with both cost one call.

All chunks are computed together but for what (c2) carries from one to
the next. `fade` knows all about decays and costs nothing where there
are none.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from fwlab.feature_maps import divide, unit_range
from fwlab.ops.call import operators
from fwlab.ops.parts import autograd, chunks
from fwlab.ops.parts import decay as decays


class Group:
    """Some chunks of the inputs, each `[n * batch * heads, C, width]`.

    As many as fit into the caches together: see `chunks.groups`. This
    class writes values. States are `[n + 1, batch * heads, value,
    key]`: one before each chunk, and the last one.
    """

    #: Whether errors are written, in place of values; and whether they
    #: are those of the memory before it fades.
    corrects, early = False, False
    #: What takes the place of `Memory` where a call is only traced.
    operator: ClassVar[operators.Operator]

    def __init__(
        self, inputs: Any, place: Any, chunk: int, dtype: torch.dtype
    ):
        """Cut `inputs`, the first six of `Memory.forward`, at `place`,
        an item of `chunks.groups`.
        """
        (self.steps, self.places), self.kind = place, (chunk, dtype)
        self.n, self.C = self.places.stop - self.places.start, chunk
        q, k, v, self.decay, strength, ask = inputs
        # The delta rules query by key, unless told otherwise.
        self.by_key = self.corrects and ask is None
        self.R = self.cut(q, k if self.by_key else ask)
        self.K = self.R[:, chunk:] if self.by_key else self.cut(k)
        self.V, self.s = self.cut(v), self.cut(strength)

    def prepare(self) -> None:
        """What needs no state."""
        self.fade = decays.of(self.cut(self.decay, fill=1), self.early)
        #: $P$ and, as they read the state before, the rows: $\gamma R$.
        self.P = self.fade.scores(self.R, self.K)
        self.old = self.fade.of_state(self.R)
        self.solve()

    def solve(self) -> None:
        """A rule that corrects has a system; this one has none."""

    def cut(self, *parts: Tensor | None, fill: float = 0) -> Any:
        """These chunks of an input; of two, one below the other."""
        present = [x[:, self.steps] for x in parts if x is not None]
        return (
            chunks.split(present, *self.kind, fill) if present else None
        )

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

    def write(self, S: Tensor) -> Tensor:
        """Write chunk by chunk, from the state `S[0]`: fill in `S`.

        - Returns what is written, `U`.
        """
        U, left = self.strong(self.V), self.fade.at_end(self.K)
        torch.bmm(U.mT, left, out=S[1:].flatten(0, 1))
        for i in range(self.n):
            self.fade.carry(S[i], S[i + 1], i)  # (c2)
        return U

    def read(self, S: Tensor, U: Tensor) -> Tensor:
        """(c1) for the rows that have an answer."""
        rows = self.C if self.corrects else None
        Y = torch.bmm(self.old[:, :rows], S[:-1].flatten(0, 1).mT)
        return Y.baddbmm_(self.P[:, :rows], U)  # (c1)

    def written(self, S: Tensor) -> Tensor:
        """`E`, from the states `S` before all chunks."""
        return self.V

    def write_backward(
        self, G: Tensor, dU: Tensor, D: Tensor
    ) -> tuple[Tensor, Tensor]:
        r"""From the last chunk to the first, as (c2) runs forward:

        $$dU = P^\top dY + \Gamma_C K\, dW'^\top \tag{c5}$$
        $$dW = \gamma_C\, dW' + G^\top (\gamma R) \tag{c6}$$

        - `G`: the gradient of what the rows of $R$ read, here $dY$.
        - `dU`: its first term; the second one is added in place.
        - `D`: $dW'$ of chunk `i` is `D[i + 1]`; all but the last are
          filled in.
        - Returns `G` for all rows, and $dV$.
        """
        torch.bmm(G.mT, self.old, out=D[:-1].flatten(0, 1))
        for i in reversed(range(self.n)):
            self.fade.carry(D[i + 1], D[i], i)  # (c6)
        left, after = self.fade.at_end(self.K), D[1:].flatten(0, 1)
        dU.baddbmm_(left, after.mT)  # (c5)
        return G, self.strong(dU)


class Memory(torch.autograd.Function):
    r"""(c1) and (c2) forward, and their gradients.

    - `decay`: `[batch, time, heads, 1 or key]`, `strength`:
      `[batch, time, heads, 1]`; None = 1.
    - `ask`: rows that read before the write. A delta rule finds its
      errors with them, and None = `k`.
    - `Kind`: the class of the groups.
    - `keep`: a backward pass may follow.
    - Returns the answers to `q`, those to `ask` (of additive rules;
      else None), and the last state.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None,
        strength: Tensor | None, ask: Tensor | None, W: Tensor,
        keep: bool, Kind: type[Group],
    ) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
        """Groups of chunks from the first to the last."""
        inputs = q, k, v, decay, strength, ask
        chunk = min(chunks.length(decay), q.shape[1])
        # A delta rule keeps to itself what its keys have read.
        y = v.new_empty(v.shape, dtype=W.dtype)
        two = ask is not None and not Kind.corrects
        asked = torch.empty_like(y) if two else None
        # The states are kept only if a backward pass may follow.
        groups = chunks.groups(q, chunk)
        n = groups[-1 if keep else 0][1].stop
        S = W.new_empty(n + 1, *W.flatten(0, 1).shape)
        S[0], first = W.flatten(0, 1), 0
        # One group after the other, all chunks of a group together.
        for place in groups:
            group = Kind(inputs, place, chunk, W.dtype)
            group.prepare()
            own = S[first : first + group.n + 1]
            Y = group.read(own, group.write(own))
            group.put(Y[:, :chunk], y)
            group.put(Y[:, chunk:], asked)
            if keep:
                first += group.n
            else:
                S[0] = own[-1]
        # Inputs and one state per chunk: nothing else is kept.
        ctx.save_for_backward(*inputs, S if keep else None)
        ctx.options = keep, Kind
        ctx.set_materialize_grads(False)
        return y, asked, S[first].clone().view_as(W)

    @staticmethod
    @autograd.backward_pass
    def backward(
        ctx: Any,
        dy: Tensor | None,
        d_asked: Tensor | None,
        dW: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Groups of chunks from the last to the first."""
        *inputs, S = ctx.saved_tensors
        _, k, v, decay, _, ask = inputs
        _, Kind = ctx.options
        chunk = min(chunks.length(decay), k.shape[1])
        # Some of the outputs may have no gradient.
        if dy is None:
            dy = S.new_zeros(v.shape)
        if d_asked is None and ask is not None and not Kind.corrects:
            d_asked = torch.zeros_like(dy)
        dS = S.new_zeros(S.shape[1:])
        if dW is not None:
            dS += dW.flatten(0, 1)
        # `dS` moves from the end of a group to its beginning.
        gradients = [autograd.room(x) for x in inputs]
        for place in reversed(chunks.groups(k, chunk)):
            group = Kind(inputs, place, chunk, S.dtype)
            group.prepare()
            dS, *parts = _backward(
                group, group.cut(dy, d_asked), S[place[1]], dS
            )
            for part, whole in zip(parts, gradients, strict=True):
                group.put(part, whole)
        shape = k.shape[0], k.shape[2], *dS.shape[1:]
        # A copy: a view would keep the states of a whole group.
        return *gradients, dS.clone().view(shape), None, None


def shapes(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None,
    strength: Tensor | None, ask: Tensor | None, W: Tensor, keep: bool,
    Kind: type[Group],
) -> tuple[Any, Any]:  # fmt: skip
    """What `Memory` returns and what it saves, without data."""
    y, S = v.new_empty(v.shape, dtype=W.dtype), None
    if keep:
        n = chunks.count(q.shape[1], chunks.length(decay))
        S = W.new_empty(n + 1, *W.flatten(0, 1).shape)
    two = ask is not None and not Kind.corrects
    asked = torch.empty_like(y) if two else None
    results = y, asked, torch.empty_like(W)
    return results, (q, k, v, decay, strength, ask, S)


def operator(name: str, Kind: type[Group]) -> operators.Operator:
    """`Memory` of a class of groups, where a call is only traced."""
    schema = (
        "Tensor q, Tensor k, Tensor v, Tensor? decay, "
        "Tensor? strength, Tensor? ask, Tensor W, bool keep"
    )
    return operators.Operator(
        name, Memory, schema, 3, Kind, shapes=shapes
    )


Group.operator = operator("additive", Group)


def _backward(
    group: Group, dY: Tensor, S: Tensor, dS: Tensor
) -> tuple[Tensor | None, ...]:
    r"""The gradients of a group, the one of the state before it first.

    With $dW'$ the gradient of the state after a chunk and the gradient
    $G$ of what the rows of $R$ read, $dP = G\, U^\top \odot \Gamma$ in
    the triangles of (c1):

    $$dR = \gamma\, G\, W + dP\, K \tag{c3}$$
    $$dK = dP^\top R + \Gamma_C\, U\, dW' \tag{c4}$$
    $$ds = \mathrm{rowsum}(E \odot dU) \tag{c7}$$

    - `S`: the states before all chunks; `dS`: the gradient of the
      state after the last one.
    """
    fade, before = group.fade, S.flatten(0, 1)
    D = S.new_empty(group.n + 1, *dS.shape)
    D[-1] = dS
    dU = torch.bmm(group.P[:, : dY.shape[1]].mT, dY)
    E = group.written(before)
    G, dV = group.write_backward(dY, dU, D)
    ds, U = None, group.strong(E)
    if group.s is not None:
        ds = dU.mul_(E).sum(-1, True)  # (c7)
    # What is not needed any more makes room.
    del dY, dU, E, group.V, group.P, group.old
    # Queries, keys and strengths of the chunk itself.
    after, dP = D[1:].flatten(0, 1), torch.bmm(G, U.mT)
    read, stored = torch.bmm(G, before), torch.bmm(U, after)
    del G, U
    dR, dK = fade.of_state(read), fade.at_end(stored)
    fade.scores_backward(dP, dR, dK)  # (c3), (c4)
    dd = None
    if fade.forgets:
        met, kept = read.mul_(group.R), stored.mul_(group.K)
        dd = fade.gradient(before, after, met, kept)
    dQ, dK_bar = dR.split([group.C, dR.shape[1] - group.C], 1)
    if group.by_key:
        dK += dK_bar
    return D[0], dQ, dK, dV, dd, ds, dK_bar


def one_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    strength: Tensor | None = None,
    ask: Tensor | None = None,
    *,
    W: Tensor,
    z: Tensor | None = None,
    corrects: bool = False,
    early: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(c0) or (d0) as products of matrices with single rows.

    For a single step nothing is gained from chunks.

    - `q`: perhaps several consecutive heads for each one of `k`.
    - `corrects`, `early`: as in `Group`.
    - Returns what `Memory` does; with `z`, means and the next `z` in
      place of what `ask` reads.
    """
    batch, heads, more = *W.shape[:2], None
    rows: Any = [
        x if x is None else x.reshape(batch * heads, -1, x.shape[-1])
        for x in (q, k, v, decay, strength, ask)
    ]
    if not q.dtype == k.dtype == v.dtype == W.dtype:
        rows = [x if x is None else x.to(W.dtype) for x in rows]
    q, k, v, d, s, a = rows
    old = W.flatten(0, 1)
    S = old if d is None else d * old
    # The delta rules write the error.
    if corrects:
        read = (old if early else S).mT
        v = v - torch.bmm(k if a is None else a, read)
    elif a is not None:
        more = torch.bmm(a, S.mT).view(batch, 1, heads, -1)
    u = v if s is None else s * v
    # A state is large: there is room for one new one.
    S = torch.addcmul(S, u.mT, k, out=None if d is None else S)
    y = torch.bmm(q, S.mT)
    if z is not None:
        z = z.reshape(batch * heads, 1, -1)
        z = z if d is None else d * z
        z = z + k if s is None else torch.addcmul(z, s, k)
        total = torch.bmm(q, z.mT)
        if _usual(total):
            y = y / total  # Eq. 19
        else:
            q = unit_range(q)
            y = divide(torch.bmm(q, S.mT), torch.bmm(q, z.mT))
        more = z.view(batch, heads, -1)
    return y.view(batch, 1, -1, y.shape[-1]), more, S.view_as(W)


def _usual(total: Tensor) -> bool:
    """Whether it is known that quotients need no care."""
    if not total.is_cpu or operators.traced(total):
        return False
    least, most = total.aminmax()
    return least.item() > 1e-6 and most.item() < 1e9


def memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    strength: Tensor | None,
    W: Tensor,
    *,
    ask: Tensor | None = None,
    Kind: type[Group] = Group,
) -> Callable[[], tuple[Tensor, Any, Tensor]]:
    """`Memory`, or one step without chunks if none will go back.

    - Returns a function without arguments.
    """
    inputs = (q, k, v, decay, strength, ask, W)
    keep = autograd.will_go_back(*inputs)
    # A text is generated step by step.
    if q.shape[1] == 1 and not keep:
        return partial(
            one_step,
            *inputs[:6],
            W=W,
            corrects=Kind.corrects,
            early=Kind.early,
        )
    run = Kind.operator if operators.traced(q) else Memory.apply
    return partial(run, *inputs, keep, Kind)


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
        y, _, W = memory(q, k, v, decay, strength, W)()
        return y, W
    if q.shape[1] == 1 and not autograd.will_go_back(
        q, k, v, decay, strength, W, z
    ):
        y, after, W = one_step(q, k, v, decay, strength, W=W, z=z)
        assert after is not None
        return y, W, after
    # $z$ is one more row of $W$, into which every key writes 1.
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    W = torch.cat([W, z[:, :, None]], -2)
    y, _, W = memory(q, k, v, decay, strength, W)()
    y = divide(y[..., :-1], y[..., -1:])  # Eq. 19
    return y, W[..., :-1, :].clone(), W[..., -1, :].clone()
