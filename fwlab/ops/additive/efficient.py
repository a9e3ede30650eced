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

A short sequence without a state before it or after it is one chunk, and
nothing of it is computed again: without $W$, (c1) is $Y = P\, U$.
"""

from collections.abc import Callable
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from fwlab import feature_maps as features
from fwlab.feature_maps import denominator, divide, unit_range
from fwlab.ops.call import operators
from fwlab.ops.parts import autograd, chunks
from fwlab.ops.parts import decay as decays
from fwlab.ops.parts.one_step import one_step, usual


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
    #: What answers have been divided by; None = 1.
    total: Tensor | None = None
    #: What queries have been divided by; None = 1.
    power: Tensor | None = None

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
        """Compute decays, scores and queries, which need no state."""
        self.fade = decays.of(self.cut(self.decay, fill=1), self.early)
        self.P = self.fade.scores(self.R, self.K)
        self.solve()

    def mean(self, Y: Tensor) -> Tensor:
        r"""Divide answers by sums of $P$: Eq. 19 without a state.

        The length of a query cancels, so a sum that is out of the usual
        range is computed again with queries in `unit_range`.
        """
        self.total = self.P.sum(-1, keepdim=True)
        if not usual(self.total):
            self.power = features._power(self.R)
            self.R = self.R / self.power
            self.P = self.fade.scores(self.R, self.K)
            Y = self.read(None, self.strong(self.V))
            self.total = denominator(self.P.sum(-1, keepdim=True))
        self.Y = Y.div_(self.total)
        return self.Y

    @cached_property
    def old(self) -> Tensor:
        r"""The rows as they read the state before, $\gamma R$."""
        return self.fade.of_state(self.R)

    def solve(self) -> None:
        """Solve the system of the chunk, in a rule that corrects.

        The additive rule has none: each step writes its own value.
        """

    def cut(self, *parts: Tensor | None, fill: float = 0) -> Any:
        """The rows of these chunks, `[n * batch * heads, C, width]`.

        - `parts`: one input `[batch, time, heads, width]`, or two,
          whose rows then follow each other in each chunk; None = left
          out.
        - `fill`: the value of the rows past the end.
        - Returns None if every part is None.
        """
        present = [self.own(x) for x in parts if x is not None]
        return (
            chunks.split(present, *self.kind, fill) if present else None
        )

    def slots(self) -> list[tuple[dict[str, Any], str]]:
        """Where its tensors are: dictionaries and names."""
        return [
            (each, name)
            for each in (vars(self), vars(self.fade))
            for name, x in each.items()
            if isinstance(x, Tensor)
        ]

    def put(self, part: Tensor | None, whole: Tensor | None) -> None:
        """Write the gradient of these chunks into that of the sequence.

        - `part`: `[n * batch * heads, C, width]`, as `cut` returns it.
        - `whole`: `[batch, time, heads, width]`, changed in place.
          Nothing is written if either is None.
        """
        if whole is not None and part is not None:
            chunks.join(part, self.own(whole))

    def own(self, x: Tensor) -> Tensor:
        """The steps of this group; None = all of them."""
        return x if self.steps is None else x[:, self.steps]

    def strong(self, x: Tensor) -> Tensor:
        """Multiply each row by the strength of its step; None = 1."""
        return x if self.s is None else self.s * x

    def each(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Views of tensors, one chunk after the other."""
        return list(chunks.each(self.n, *tensors))

    def write(self, S: Tensor | None) -> Tensor:
        """Write chunk by chunk, from the state `S[0]`: fill in `S`.

        - Returns what is written, `U`.
        """
        U = self.strong(self.V)
        if S is not None:
            left = self.fade.at_end(self.K)
            torch.bmm(U.mT, left, out=S[1:].flatten(0, 1))
            for i, (before, after) in enumerate(pairwise(S.unbind())):
                self.fade.carry(before, after, i)  # (c2)
        return U

    def read(self, S: Tensor | None, U: Tensor) -> Tensor:
        """Compute what queries read (c1), but not the asking keys."""
        Y = None
        if S is not None:
            before = S[:-1].flatten(0, 1)
            Y = torch.bmm(self.answers(self.old), before.mT)
        return decays.plus(Y, self.answers(self.P), U)  # (c1)

    def answers(self, x: Tensor) -> Tensor:
        """The rows of the queries, without the asking keys."""
        return x[:, : self.C] if self.corrects else x

    def written(self, S: Tensor | None) -> Tensor:
        """What is written, apart from its strength: here the values.

        - `S`: the states before all chunks; None = there are none.
        """
        return self.V

    def write_backward(
        self, G: Tensor, dU: Tensor, D: Tensor | None
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
        if D is not None:
            torch.bmm(G.mT, self.old, out=D[:-1].flatten(0, 1))
            states = D.unbind()
            for i in reversed(range(self.n)):
                self.fade.carry(states[i + 1], states[i], i)  # (c6)
            left, after = self.fade.at_end(self.K), D[1:].flatten(0, 1)
            dU.baddbmm_(left, after.mT)  # (c5)
        return G, self.strong(dU)


def precision(x: Tensor) -> torch.dtype:
    """That of states and sums."""
    return torch.float32 if x.dtype.itemsize < 4 else x.dtype


def by_step(x: Tensor, like: Tensor) -> Tensor:
    """A view of `[batch * heads, time, d]`: heads after time."""
    return x.unflatten(0, (len(like), -1)).transpose(1, 2)


class Whole(torch.autograd.Function):
    r"""One chunk that holds all of a sequence, without states.

    All but the inputs is kept: there is nothing to compute again.

    - `mean`: divide what a query reads by the sum of its row of $P$
      (additive rules).
    - Other arguments as for `Memory`. Returns the answers to `q`.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None,
        strength: Tensor | None, ask: Tensor | None, mean: bool,
        Kind: type[Group],
    ) -> Tensor:  # fmt: skip
        """A group of one chunk."""
        dtype = precision(v)
        place = None, slice(0, 1)
        inputs = q, k, v, decay, strength, ask
        group = Kind(inputs, place, q.shape[1], dtype)
        group.prepare()
        Y = group.read(None, group.write(None))
        if mean:
            Y = group.mean(Y)
        y = by_step(Y, v).clone(memory_format=torch.contiguous_format)
        # Only what goes through these hands can be freed or moved.
        ctx.group, ctx.slots = group, group.slots()
        ctx.save_for_backward(*(x.pop(name) for x, name in ctx.slots))
        return y

    @staticmethod
    @autograd.backward_pass
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients, as views."""
        group = ctx.group
        for (x, name), tensor in zip(
            ctx.slots, ctx.saved_tensors, strict=True
        ):
            x[name] = tensor
        _, *parts = _backward(group, group.cut(dy), None, None)
        for x, name in group.slots():
            del x[name]
        # Only for the arguments that need one.
        made = [
            by_step(x, dy) if x is not None and needed else None
            for x, needed in zip(
                parts, ctx.needs_input_grad[:6], strict=True
            )
        ]
        return *made, None, None


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
        # Not a view: a row of the state may be changed in place.
        return y, asked, S[first].view_as(W).clone()

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
    group: Group, dY: Tensor, S: Tensor | None, dS: Tensor | None
) -> tuple[Tensor | None, ...]:
    r"""The gradients of a group, the one of the state before it first.

    With $dW'$ the gradient of the state after a chunk and the gradient
    $G$ of what the rows of $R$ read, $dP = G\, U^\top \odot \Gamma$ in
    the triangles of (c1):

    $$dR = \gamma\, G\, W + dP\, K \tag{c3}$$
    $$dK = dP^\top R + \Gamma_C\, U\, dW' \tag{c4}$$
    $$ds = \mathrm{rowsum}(E \odot dU) \tag{c7}$$

    - `S`: the states before all chunks; `dS`: the gradient of the
      state after the last one. None = there are no states.
    """
    fade, before, D, along = group.fade, None, None, None
    if S is not None and dS is not None:
        before, D = S.flatten(0, 1), S.new_empty(group.n + 1, *dS.shape)
        D[-1] = dS
    if group.total is not None:  # Eq. 19
        dY = dY / group.total
        along = (dY * group.Y).sum(-1, keepdim=True)
    dU = torch.bmm(group.answers(group.P).mT, dY)
    E = group.written(before)
    G, dV = group.write_backward(dY, dU, D)
    ds, U = None, group.strong(E)
    if group.s is not None:
        ds = dU.mul_(E).sum(-1, True)  # (c7)
    # Queries, keys and strengths of the chunk itself.
    if along is None:
        dP = torch.bmm(G, U.mT)
    else:
        dP = torch.baddbmm(along, G, U.mT, beta=-1)
    # What is not needed any more makes room.
    del dY, dU, E, group.V, group.P
    after, dR, dK, read, stored = (None,) * 5
    if before is not None and D is not None:
        del group.old
        after = D[1:].flatten(0, 1)
        read, stored = torch.bmm(G, before), torch.bmm(U, after)
        dR, dK = fade.of_state(read), fade.at_end(stored)
    # The gradients of scores and decays.
    del G, U
    dR, dK = fade.scores_backward(dP, dR, dK)  # (c3), (c4)
    dd = None
    if fade.forgets:
        if read is not None and stored is not None:
            read, stored = read.mul_(group.R), stored.mul_(group.K)
        dd = fade.gradient(before, after, read, stored)
    if group.power is not None:
        dR = features._saturated(dR / group.power)
    dQ, dK_bar = dR, None
    if dR.shape[1] > group.C:
        dQ, dK_bar = dR.split(group.C, 1)
    if group.by_key:
        dK += dK_bar
    dW = None if D is None else D[0]
    return dW, dQ, dK, dV, dd, ds, dK_bar


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


def empty(q: Tensor, v: Tensor) -> Tensor:
    """A state before the first step, `[batch, heads, value, key]`."""
    shape = q.shape[0], q.shape[2], v.shape[3], q.shape[3]
    return v.new_zeros(shape, dtype=precision(v))


def whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    strength: Tensor | None,
    *,
    ask: Tensor | None = None,
    mean: bool = False,
    Kind: type[Group] = Group,
) -> Tensor | None:
    """The answers to `q` without a state; None if it is too long."""
    channels = decay is not None and decay.shape[-1] > 1
    if operators.traced(q) or channels or q.shape[1] > chunks.WHOLE:
        return None
    return Whole.apply(q, k, v, decay, strength, ask, mean, Kind)


def additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    strength: Tensor | None,
    W: Tensor | None,
    z: Tensor | None = None,
    mean: bool = False,
) -> tuple[Tensor, ...]:
    """Arguments and results of the chunked version.

    `W` = None: before the first step. Then `mean` says whether there is
    a normaliser.
    """
    if W is None:
        y = whole(q, k, v, decay, strength, mean=mean)
        if y is not None:
            return (y,)
        W = empty(q, v)
        # A query's length does not change a mean.
        if mean:
            q, z = unit_range(q), W[..., 0, :]
    # The usual case, and a single step with a normaliser.
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
