r"""# Both recurrences in chunks, with gradients by hand

The linear rules add, the delta rules replace what a key $r$ (`erase_key`) retrieves:

$$\text{linear:} \quad W_t = W_{t-1}\,\mathrm{diag}(d_t) + s_t\, v_t k_t^\top$$
$$\text{delta:} \quad W_t = W_{t-1}\,\mathrm{diag}(d_t)
  + s_t\,(v_t - W_{t-1}\,\mathrm{diag}(d_t)\, r_t)\, k_t^\top$$

These are (c0) and (d0) of the chunked version; both read $y_t = W_t q_t$. Stack the
vectors of a chunk of $C$ steps as rows. All that its steps write (the rows of $U$), the
state that it leaves ($W'$) and all that its queries read ($Y$) are *affine* in the
state $W$ before it:

$$U = \text{update} + \text{erase}\, W^\top \tag{e1}$$
$$W' = W\, \mathrm{diag}(\text{kept}) + U^\top\, \text{write} \tag{e2}$$
$$Y = \text{read}\, W^\top + \text{scores}\, U \tag{e3}$$

`summarize` computes these six terms, which need no state, for many chunks at once.
`scan` then carries the state from chunk to chunk. The inputs and one state per chunk
are saved. The backward pass recomputes the terms, runs the same `scan` from the last
chunk to the first with `erase` and `write` exchanged, and leaves the rest to autograd.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab.feature_maps import divide, unit_range
from fwlab.ops._chunks import CHUNK, cut, fade, join, plan
from fwlab.ops._recurrence import (
    Recurrence,
    Results,
    differentiate,
    is_traced,
    needs_backward,
    sum_dtype,
)
from fwlab.ops._rules import Inputs

#: The maximum length of a sequence without states that is computed as one chunk.
ONE_CHUNK = 80
#: Up to this many steps are computed one by one, if no gradients are needed.
FEW = 2


def linear(x: Inputs, W: Tensor, z: Tensor | None, alone: bool) -> Any:
    """Compute the linear recurrence (Eq. c0) in chunks, with a custom backward pass."""
    if z is None:
        y, W = compute(x, W, alone, corrects=False)
        return y, W, None
    if not is_traced(x.q) and x.q.shape[1] <= ONE_CHUNK:  # Graphs support all lengths.
        if alone and not has_channel_decay(x):
            return one_chunk(x, corrects=False, normalize=True), W, z
        if is_a_token(x, W):
            return take_steps(x, W, z, corrects=False)
    # Compute $z$ as one more row of $W$, into which every key writes 1.
    values = torch.cat([x.v, torch.ones_like(x.v[..., :1])], -1)
    x = Inputs(x.decay, x.strength, x.erase_key, x.q, x.k, values, x.early)
    W = torch.cat([W, z[:, :, None]], -2)
    y, W = compute(x, W, alone, corrects=False)
    y = divide(y[..., :-1], y[..., -1:])  # Eq. 19
    return y, W[..., :-1, :].clone(), W[..., -1, :].clone()


def delta(x: Inputs, W: Tensor, z: Tensor | None, alone: bool) -> Any:
    """Compute the delta recurrence (Eq. d0) in chunks, with a custom backward pass."""
    if z is None:
        y, W = compute(x, W, alone, corrects=True)
        return y, W, None
    # The sum $z$ of the keys is a linear recurrence whose values are the keys.
    one = torch.ones_like(x.k[..., :1])
    keys = Inputs(q=one, k=one, v=x.k, decay=x.decay)
    sums, last = compute(keys, z[..., None], alone, corrects=False)  # Eq. 26
    before = torch.cat([z[:, None], sums[:, :-1]], 1)
    assert x.erase_key is not None
    held = (before * x.erase_key).sum(-1, keepdim=True)
    held = held if x.decay is None else x.decay * held
    # Eq. 27 divides the retrieved value, which is the same as dividing the key.
    erase_key = divide(x.erase_key, held)
    x = Inputs(x.decay, x.strength, erase_key, x.q, x.k, x.v, x.early)
    y, W = compute(x, W, alone, corrects=True)
    total = (sums * x.q).sum(-1, keepdim=True)
    return divide(y, total), W, last[..., 0]  # Eq. 28


def compute(x: Inputs, W: Tensor, alone: bool, corrects: bool) -> Any:
    """Compute a recurrence by single steps, as one chunk, or in several chunks."""
    if not is_traced(x.q) and x.q.shape[1] <= ONE_CHUNK:  # Graphs support all lengths.
        if alone and not has_channel_decay(x):
            return one_chunk(x, corrects), W
        if is_a_token(x, W):
            y, W, _ = take_steps(x, W, None, corrects)
            return y, W
    inputs = x.q, x.k, x.v, x.decay, x.strength, x.erase_key
    return chunks((*inputs, None if alone else W), corrects, x.early)


def is_a_token(x: Inputs, W: Tensor) -> bool:
    """Return True if a call has few steps and needs no backward pass."""
    tensors = x.q, x.k, x.v, x.decay, x.strength, x.erase_key, W
    return x.q.shape[1] <= FEW and not needs_backward(*tensors)


def has_channel_decay(x: Inputs) -> bool:
    """Return True if decays are per key channel or erase keys read before decays."""
    return x.early or (x.decay is not None and x.decay.shape[-1] > 1)


def take_steps(
    x: Inputs, W: Tensor, z: Tensor | None, corrects: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute a few steps one by one, as in text generation."""
    if x.q.shape[1] == 1:
        return take_step(x, W, z, corrects)
    y = []
    for t in range(x.q.shape[1]):
        parts: Any = [p[:, t : t + 1] if isinstance(p, Tensor) else p for p in x]
        y_t, W, z = take_step(Inputs(*parts), W, z, corrects)
        y.append(y_t)
    return torch.cat(y, 1), W, z


def take_step(
    x: Inputs, W: Tensor, z: Tensor | None, corrects: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute a single step without chunks; heads of `q` may share a state."""
    before, dtype = W.flatten(0, 1), W.dtype
    count = before.shape[0]

    def row(part: Tensor) -> Tensor:
        """Return an input as `[batch * heads, rows, width]`, in the dtype of `W`."""
        part = part.reshape(count, -1, part.shape[-1])
        return part if part.dtype == dtype else part.to(dtype)

    q, k, v = row(x.q), row(x.k), row(x.v)
    decay = None if x.decay is None else row(x.decay)
    S = before if decay is None else before * decay
    if corrects:
        r = k if x.erase_key is None else row(x.erase_key)
        v = v - torch.bmm(r, (before if x.early else S).mT)
    if x.strength is not None:
        k = row(x.strength) * k
    # A state is large, so only one new tensor is allocated.
    S = torch.addcmul(S, v.mT, k, out=None if decay is None else S)
    y = torch.bmm(q, S.mT)
    if z is not None:
        sums = z.reshape(count, 1, -1)
        sums = (sums if decay is None else sums * decay) + k  # Eq. 18
        total = torch.bmm(q, sums.mT)
        if is_usual(total):
            y = y / total  # Eq. 19
        else:
            q = unit_range(q)
            y = divide(torch.bmm(q, S.mT), torch.bmm(q, sums.mT))
        z = sums.view(z.shape)
    return y.view(W.shape[0], 1, -1, y.shape[-1]), S.view(W.shape), z


def is_usual(total: Tensor) -> bool:
    """Return True if all denominators are in a safe range; False on a GPU."""
    if not total.is_cpu or not total.numel():
        return False
    least, most = total.aminmax()
    return least.item() > 1e-6 and most.item() < 1e9


def one_chunk(x: Inputs, corrects: bool, normalize: bool = False) -> Tensor:
    """Compute a sequence without states as one chunk: $Y$ is the scores times $U$.

    - `normalize`: divide $Y$ by the sums of the scores.
    """
    dtype = sum_dtype(x.v)
    rows: Any = [
        None if part is None else part.transpose(1, 2).flatten(0, 1).to(dtype)
        for part in (x.q, x.k, x.v, x.decay, x.strength, x.erase_key)
    ]
    q, k, v, decay, strength, erase_key = rows
    rows = [q, k if erase_key is None else erase_key] if corrects else [q]
    (scores, *A), *_ = fade(rows, k if strength is None else strength * k, decay)
    y = scores @ (solve(A[0], v) if corrects else v)
    if normalize:
        y = divide(y, scores.sum(-1, True))  # Eq. 19
    return y.unflatten(0, (len(x.v), -1)).transpose(1, 2)


class Terms(NamedTuple):
    """Hold the terms of n chunks' states and outputs (Eqs. e1-e3) without any state."""

    update: Tensor  # The shape is [n, C, value].
    erase: Tensor | None  # The shape is [n, C, key]; None in the linear recurrence.
    write: Tensor  # The shape is [n, C, key].
    read: Tensor  # The shape is [n, C, key].
    scores: Tensor  # The shape is [n, C, C].
    kept: Tensor | None  # The shape is [n, 1, 1 or key]; None without a decay.


def summarize(
    q: Tensor, k: Tensor, v: Tensor, decay: Any, strength: Any, erase_key: Any,
    corrects: bool, early: bool,
) -> Terms:  # fmt: skip
    r"""Compute the terms of states and outputs (Eqs. e1-e3) for chunks `[n, C, width]`.

    What a step erases depends on what earlier steps have written. All steps together
    solve a triangular system, with $A = \mathrm{stril}(R K^\top) \odot \Gamma$:

    $$(I + A)\, U = V - \gamma R\, W^\top \tag{e4}$$

    The strength multiplies the key: $s\, u k^\top = u\, (s k)^\top$.
    """
    rows = [q, k if erase_key is None else erase_key] if corrects else [q]
    k = k if strength is None else strength * k
    scores, reads, write, kept = fade(rows, k, decay, early)
    if not corrects:
        return Terms(v, None, write, reads[0], scores[0], kept)
    A = scores[1]
    solution = solve(A, torch.eye(A.shape[-1], dtype=A.dtype, device=A.device))
    return Terms(solution @ v, -solution @ reads[1], write, reads[0], scores[0], kept)


def solve(A: Tensor, B: Tensor) -> Tensor:
    """Solve $(I + A) X = B$, reading only the strictly lower triangle of $A$."""
    # PyTorch copies less if it solves $X^T (I + A)^T = B^T$.
    return torch.linalg.solve_triangular(
        A.mT, B.mT, upper=True, left=False, unitriangular=True
    ).mT


def scan(
    states: Any, kept: Any, update: Any, erase: Any, write: Any, *, empty: bool
) -> None:
    """Compute the states of all chunks in order and in place (Eqs. e1 and e2).

    All arguments are lists with an item per chunk; `states` also has the initial state.
    For the backward pass, reverse the lists, and exchange `erase` and `write`. If both
    are None, `update` is complete, and the states already contain its writes.

    - `empty`: True if all states except the first are uninitialised.
    """
    for i, (before, after) in enumerate(pairwise(states)):
        if erase is not None:
            update[i].baddbmm_(erase[i], before.mT)  # (e1)
            after.baddbmm_(update[i].mT, write[i], beta=0 if empty else 1)  # (e2)
        if kept is None:
            after.add_(before)
        else:
            after.addcmul_(before, kept[i])


def per_chunk(n: int, *terms: Tensor | None) -> list[Any]:
    """Split each term into a list with an item per chunk; None stays None."""
    return [None if x is None else x.unflatten(0, (n, -1)).unbind() for x in terms]


NAMES = "q", "k", "v", "decay", "strength", "erase_key"


def pieces(inputs: Any, steps: slice, chunk: int, dtype: torch.dtype) -> dict[str, Any]:
    """Split the inputs of a recurrence into chunks, by name; None stays None."""
    return {
        name: None if x is None else cut(x, steps, chunk, dtype, float(name == "decay"))
        for name, x in zip(NAMES, inputs, strict=True)
    }


def forward(x: Any, keep: bool, corrects: bool, early: bool) -> Results:
    """Compute the outputs and the final state, one group of chunks after another."""
    *inputs, W = x
    (k, v), (C, groups) = inputs[1:3], plan(inputs[2])
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    shape = v.shape[0], v.shape[2], v.shape[3], k.shape[3]
    y = v.new_empty(v.shape, dtype=dtype)
    # The states are saved only if a backward pass may follow.
    n = sum(n for _, n in groups[: None if keep else 1])
    states = y.new_empty(n + 1, shape[0] * shape[1], *shape[2:])
    states[0], first = 0 if W is None else W.flatten(0, 1), 0
    for steps, n in groups:
        cuts = pieces(inputs, steps, C, dtype)
        terms = summarize(**cuts, corrects=corrects, early=early)
        own = states[first : first + n + 1]
        if not corrects:
            torch.bmm(terms.update.mT, terms.write, out=own[1:].flatten(0, 1))
        lists = per_chunk(n, terms.kept, terms.update, terms.erase, terms.write)
        scan(own.unbind(), *lists, empty=True)
        # Queries do not depend on each other, so all chunks are read at once.
        Y = torch.bmm(terms.read, own[:-1].flatten(0, 1).mT)
        join(Y.baddbmm_(terms.scores, terms.update), y, steps, C)  # (e3)
        if keep:
            first += n
        else:
            states[0] = own[-1]
    return (y, states[first].clone().view(shape)), (states,) if keep else ()


def backward(
    x: Any, kept: Any, gradients: Any, needed: Any, corrects: bool, early: bool
) -> Any:
    """Compute the gradients of the inputs, from the last chunks to the first."""
    *inputs, W = x
    (states,), (dy, dW) = kept, gradients
    C, groups = plan(inputs[2])
    dy = states.new_zeros(inputs[2].shape) if dy is None else dy
    d_state = torch.zeros_like(states[0]) if dW is None else dW.flatten(0, 1)
    made = {
        name: torch.empty_like(part)
        for name, part, need in zip(NAMES, inputs, needed, strict=False)
        if need
    }
    # A group of chunks ends where the next group begins, which is already computed.
    end = len(states) - 1
    for steps, n in reversed(groups):
        dY = cut(dy, steps, C, states.dtype)
        before, end = states[end - n : end].flatten(0, 1), end - n
        cuts = pieces(inputs, steps, C, states.dtype)

        def present(leaves: Any, cuts: Any = cuts) -> dict[str, Tensor]:
            """Recompute the terms of chunks from `leaves` and `cuts`; omit None."""
            terms = summarize(**{**cuts, **leaves}, corrects=corrects, early=early)
            return {name: x for name, x in terms._asdict().items() if x is not None}

        # Autograd records the terms; `go_back` later backpropagates their gradients.
        found, go_back = differentiate(present, {m: cuts[m] for m in made or ["v"]})
        terms = Terms(**{"erase": None, "kept": None, **found})  # type: ignore[arg-type]
        # Compute the gradients of U and the states, from the last chunk to the first.
        dU = torch.bmm(terms.scores.mT, dY)
        d_states = states.new_empty(n + 1, *d_state.shape)
        d_states[-1] = d_state
        torch.bmm(dY.mT, terms.read, out=d_states[:-1].flatten(0, 1))
        write = terms.write if corrects else None
        lists = (d_states.unbind(), *per_chunk(n, terms.kept, dU, write, terms.erase))
        scan(*(x if x is None else x[::-1] for x in lists), empty=False)
        d_state, after = d_states[0], d_states[1:].flatten(0, 1)
        if not corrects:
            dU.baddbmm_(terms.write, after.mT)
        # Compute the gradients of the terms by Eqs. e1 to e3, and the rest by autograd.
        U, d_terms = terms.update, {"update": dU}
        if terms.erase is not None:
            U = torch.baddbmm(U, terms.erase, before.mT)
            d_terms["erase"] = torch.bmm(dU, before)
        d_terms["write"] = torch.bmm(U, after)
        d_terms["read"] = torch.bmm(dY, before)
        d_terms["scores"] = torch.bmm(dY, U.mT)
        if terms.kept is not None:
            d_terms["kept"] = (before * after).sum_to_size(terms.kept.shape)
        pulled = go_back(d_terms)
        for name, gradient in made.items():
            join(pulled[name], gradient, steps, C)
    dW = None if W is None else d_state.clone().view(W.shape)
    return *(made.get(name) for name in NAMES), dW


def shapes(x: Any, keep: bool, corrects: bool, early: bool) -> Any:
    """Return empty tensors with the shapes of the results of `forward`."""
    (_, k, v), dtype = x[:3], sum_dtype(x[2])
    shape = v.shape[0], v.shape[2], v.shape[3], k.shape[3]
    y = [v.new_empty(size, dtype=dtype) for size in (v.shape, shape)]
    n = -(-v.shape[1] // CHUNK)  # A short sequence is one chunk.
    return y, [y[1].new_empty(n + 1, shape[0] * shape[1], *shape[2:])] if keep else []


chunks = Recurrence(
    "chunks",
    "Tensor q, Tensor k, Tensor v, Tensor? decay, Tensor? strength, "
    "Tensor? erase_key, Tensor? W",
    "bool corrects, bool early",
    forward,
    backward,
    shapes,
)
