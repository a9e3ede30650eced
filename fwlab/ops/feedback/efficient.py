r"""# Feedback memory with a cache

The steps must be computed one after the other, but little of the work has to be inside
this loop. This version differs from the naive loop in three ways:

1. Each memory is projected *once*, when it is made. Its keys and values go into buffers
   that are as long as the sequence.
2. For the backward pass, a layer saves its input, the result of its attention and the
   cache: nothing per *pair* of steps. Everything else is recomputed, for all steps in
   one product.
3. The backward loop computes only what the next step needs. Gradients of older memories
   are collected for a block of steps and added in one product, and so are the gradients
   of all weights.

The scales of the norms, the factor $1/\sqrt{d_{\text{key}}}$ and $P$ are multiplied into
the adjacent matrices before the loop starts. Buffers begin with the dimensions layer and
time, so that one step of a layer is a contiguous `[batch, d]`, and all steps of a layer
are the rows of one matrix.

**Backward**, from the last step to the first, and from the top layer down. Let $p_{tj}$
be the attention weights of one head and layer, $dz_t$ the gradient of the attention's
result, and $u = P^\top q$. Then

$$da_{tj} = p_{tj}\,(dz_t \cdot v_j - dz_t \cdot z_t) \tag{g3}$$
$$dv_j = \sum_{t>j} p_{tj}\, dz_t, \qquad
  dk_j = \sum_{t>j} da_{tj}\, q_t \tag{g4}$$
$$dq_t = \sum_{j<t} da_{tj}\, k_j, \qquad
  du_t = \sum_{j<t} da_{tj}\, s(t - j) \tag{g5}$$

When the loop arrives at memory $j$, all later steps are done, so all terms of (g4) are
known. Terms of the same block are summed for each memory, and terms of later blocks in
one product per block.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab.ops._recurrence import Recurrence
from fwlab.ops.feedback.weights import EPS, FeedbackWeights

#: Steps per block of the backward pass; older memories get gradients once per block.
BLOCK = 32

#: From this number of steps on, transposed copies of the weights save time.
MANY = 8

#: The tensors of one layer or one step. They are unbound once before a loop, because
#: indexing calls an operator.
Rows = tuple[Tensor, ...]


class Stack(NamedTuple):
    r"""Hold the inputs of the stack; its weights include the scales of the layer norms.

    - `x`: `[batch, time, d]`.
    - `past`: `[2, groups, batch, heads, past, key]`, keys and values of earlier calls;
      `hidden`: `bool [batch * heads, 1, past]`, or None.
    - `alpha`: $\mathrm{softmax}(w)$.
    - `to_q`: `[layers, heads, key, d]`; `to_kv`: `[2 * groups * d, d]`.
    - `f_z`, `f_h`, `f_y`: factors of dropout, `[layers, time, batch, width]`, for what
      the attention adds to a state, for the result of GELU, and for what the MLP adds;
      None = 1.
    """

    x: Tensor
    past: Tensor
    hidden: Tensor | None
    alpha: Tensor
    to_q: Tensor
    positions: Tensor
    to_kv: Tensor
    to_out: Tensor
    expand: Tensor
    contract: Tensor
    f_z: Tensor | None
    f_h: Tensor | None
    f_y: Tensor | None


class Terms(NamedTuple):
    """Hold the recomputed activations and the gradients of every step.

    - `states`, `attended`: the saved tensors; `kv`: keys and values of all memories.
    - `normed`, `normed_mlp`, `m`: results of norms; `of_x`, `of_middle`, `of_m`: the
      tensors of their backward passes. Without a norm of the memory, `of_m` is None.
    - `h`: results of GELU; `waves`: $s$ of all distances, the largest first.
    - `vectors`: $q$ and $dz$ of (g4): `[2, layers, batch * heads, time, key]`.
    - `dx`, `d_middle`, `dh`, `d_qu`, `d_m`, `d_new`, `dkv`: the gradients of states,
      before and in the MLP, of queries with $u$, of memories, of their keys and values
      from later blocks, and of all keys and values. The loop fills them; the gradients
      of the weights are products with them.
    """

    states: Tensor
    attended: Tensor
    kv: Tensor
    normed: Tensor
    of_x: Rows
    normed_mlp: Tensor
    of_middle: Rows
    m: Tensor
    of_m: Any
    h: Tensor
    vectors: Tensor
    waves: Tensor
    dx: Tensor
    d_middle: Tensor
    dh: Tensor
    d_qu: Tensor
    d_m: Tensor
    d_new: Tensor
    dkv: Tensor


def forward(given: Any, keep: bool, normalize: bool) -> Any:
    """Compute all steps; return `y`, all keys and values, and the saved tensors.

    - `normalize`: True if memories have a layer norm.
    """
    x = Stack(*given)
    (batch, time, d), (layers, past) = x.x.shape, (len(x.to_q), x.past.shape[4])
    turned, kv, r = prepare(x)
    cache = kv.flatten(2, 3)
    states = kv.new_empty(layers + 1, time if keep else 1, batch, d)
    attended = kv.new_empty(layers, *states.shape[1:])
    y = kv.new_empty(batch, time, d)
    for t, (x_t, y_t) in enumerate(zip(x.x.unbind(1), y.unbind(1), strict=True)):
        now, n = t if keep else 0, past + t
        seen = [*zip(*cache[..., :n, :], strict=True)]
        attend_now = partial(attend, seen, r[-n - 1 : -1].T, x.hidden)
        states[0, now] = x_t
        new = step(
            x, turned, states[:, now], attended[:, now], t, normalize, attend_now
        )
        y_t.copy_(states[-1, now])
        kv[..., n, :] = new
    return (y, kv), ((states, attended) if keep else ())


def prepare(x: Stack) -> tuple[Any, Tensor, Tensor]:
    """Transpose the weights, and allocate keys and values for the forward loop.

    - Returns the transposed weights, of memories and of each layer; keys and values, with
      space for all steps; and the keys of all distances (Eq. f4).
    """
    turned = [x.to_kv, x.to_q.flatten(1, 2), x.to_out, x.expand, x.contract]
    turned = [W.mT for W in turned]
    if x.x.shape[1] > MANY:  # Contiguous weights make products up to twice as fast.
        turned = [W.contiguous() for W in turned]
    *sizes, past, key = x.past.shape
    kv = x.x.new_empty(*sizes, past + x.x.shape[1], key)
    kv[..., :past, :] = x.past
    r = make_waves(kv.shape[-2], x.positions) @ x.positions.T
    return (turned[0], [*zip(*turned[1:], strict=True)]), kv, r


def step(
    x: Stack, turned: tuple[Tensor, list[Rows]], states: Tensor, attended: Tensor, t: int,
    normalize: bool, attend: Callable[[int, Tensor, Tensor], None],
) -> Tensor:  # fmt: skip
    """Compute all layers of step `t`, from its input in `states[0]`.

    - `states`: `[layers + 1, batch, d]`; `attended`: `[layers, batch, d]`.
    - `attend(l, q, z)`: computes `z` of layer `l`.
    - Returns keys and values of the step's memory, `[2, groups, batch, heads, key]`.
    """
    to_kv, weights = turned
    layers = zip(states[:-1], states[1:], attended, weights, strict=True)
    for l, (x_l, above, z, (to_q, to_out, expand, contract)) in enumerate(layers):
        attend(l, torch.mm(norm(x_l)[0], to_q), z)
        x_l = add(x_l, z, to_out, x.f_z, l, t)  # Eq. f6
        h = F.gelu(torch.mm(norm(x_l)[0], expand))
        h = h if x.f_h is None else h * x.f_h[l, t]
        add(x_l, h, contract, x.f_y, l, t, out=above)  # Eq. f7
    m = torch.mv(states.flatten(1).T, x.alpha).view(x_l.shape)  # Eq. f1
    new = torch.mm(norm(m)[0] if normalize else m, to_kv)  # Eq. f2
    _, groups, batch, heads, _, key = x.past.shape
    return new.view(batch, 2, groups, heads, key).permute(1, 2, 0, 3, 4)


def attend(
    seen: list[Rows], r: Tensor, hidden: Tensor | None, l: int, q: Tensor, z: Tensor
) -> None:
    """Compute the attention of one step to earlier memories (Eqs. f4 and f5).

    - `seen`: keys and values by group, `[batch * heads, memories, key]`.
    - `r`: the keys of the distances, `[key, memories]`.
    - `q`, `z`: `[batch, d]`.
    """
    k, v = seen[l % len(seen)]
    if k.shape[1] == 0:
        z.zero_()  # The first step has no memories.
        return
    q = q.view(len(k), -1)
    a = torch.mm(q, r).unsqueeze(1)
    a.baddbmm_(q.unsqueeze(1), k.mT)  # Eq. f4
    p = torch.softmax(a, -1) if hidden is None else masked_softmax(a, hidden)
    torch.bmm(p, v, out=z.view(len(k), 1, -1))  # Eq. f5


def backward(
    given: Any, kept: Any, gradients: Any, needed: Any, normalize: bool
) -> Any:
    """Compute the gradients of all inputs, from the last block to the first."""
    x = Stack(*given)
    b = recompute(x, kept, gradients, normalize)
    past, (layers, time) = x.past.shape[4], b.attended.shape[:2]
    rows, key = b.vectors.shape[2::2]
    buffers = (
        *(b.dx[1:], b.dh, b.d_middle, b.dx[:-1]),
        b.attended.view(layers, time, rows, 1, key),
        b.vectors[1].transpose(1, 2).unsqueeze(3),
        *(b.d_qu.flatten(3), b.d_qu.view(layers, time, rows, -1)),
    )
    steps, norms = (
        [[*zip(*part, strict=True)] for part in zip(*parts, strict=True)]
        for parts in (buffers, (*b.of_middle, *b.of_x))
    )
    weights = [*zip(x.contract, x.expand, x.to_out, queries_and_u(x), strict=True)]
    # A row vector times a contiguous matrix is faster.
    keys, values = b.kv[0].flatten(1, 2), b.kv[1].flatten(1, 2).mT.contiguous()
    for start in reversed(range(0, time, BLOCK)):
        stop = min(start + BLOCK, time)
        pairs, old = attention_weights(x, b, start, stop), past + start
        later = b.dkv[..., old : past + stop, :]
        b.d_new[start:stop] = later.permute(4, 2, 0, 1, 3, 5)
        for t in reversed(range(start, stop)):
            n, i = past + t, t - start
            memory(x, b, t, pairs[:, :, :, i + 1 :, n])
            seen = [*zip(keys[:, :, :n], values[..., :n], strict=True)]
            row = [*zip(*pairs[..., i : i + 1, :n], strict=True)]
            waves = b.waves[-n - 1 : -1]
            for l in reversed(range(layers)):
                layer(
                    x, l, t, weights[l], steps[l][t], norms[l][t], seen[l % len(seen)],
                    row[l], waves, old if l == 0 else 0,
                )  # fmt: skip
        older(b, start, stop, *pairs)
    return finish(x, b)


def recompute(x: Stack, kept: Any, gradients: Any, normalize: bool) -> Terms:
    """Recompute the activations that were not saved, for all steps at once."""
    (states, attended, *_, kv), (dy, dkv) = kept, gradients
    layers, time, batch, d = attended.shape
    _, groups, _, heads, n, key = kv.shape
    flat = layers, time * batch, -1
    normed, of_x = norm(states[:-1])
    q = torch.bmm(normed.view(flat), x.to_q.flatten(1, 2).mT)
    q = q.view(layers, time, batch, heads, key)
    added = torch.bmm(attended.view(flat), x.to_out.mT).view(attended.shape)
    middle = states[:-1] + drop(added, x.f_z)
    normed_mlp, of_middle = norm(middle)
    h = torch.bmm(normed_mlp.view(flat), x.expand.mT).view(layers, time, batch, -1)
    dh = torch.ops.aten.gelu_backward(torch.ones_like(h), h)
    h, dh = drop(F.gelu(h), x.f_h), drop(dh, x.f_h)
    m, of_m = torch.mv(states.flatten(1).T, x.alpha).view(time, batch, d), None
    if normalize:
        m, of_m = norm(m)
    vectors = kv.new_empty(2, layers, batch, heads, time, key)
    vectors[0] = q.permute(0, 2, 3, 1, 4)
    dx = torch.zeros_like(states)
    if dy is not None:
        dx[-1] = dy.transpose(0, 1)
    dkv = torch.zeros_like(kv) if dkv is None else dkv
    features = x.positions.shape[1]
    return Terms(
        states, attended, kv, normed, of_x, normed_mlp, of_middle, m, of_m, h,
        vectors.flatten(2, 3), make_waves(n, x.positions), dx, torch.empty_like(middle),
        dh, kv.new_zeros(layers, time, batch, heads, key + features), torch.empty_like(m),
        kv.new_empty(time, batch, 2, groups, heads, key),
        dkv.clone(memory_format=torch.contiguous_format),
    )  # fmt: skip


def finish(x: Stack, b: Terms) -> tuple[Tensor | None, ...]:
    """Compute the gradients of a `Stack` from the gradients of all steps."""
    _, time, batch, d = b.attended.shape
    heads, key = x.to_q.shape[1:3]
    d_qu, dh, normed = (
        part.flatten(1, 2) for part in (b.d_qu.flatten(3), b.dh, b.normed)
    )
    dn = torch.mm(d_qu[0], queries_and_u(x)[0]).view(time, batch, d)
    b.dx[0] += norm_backward(dn, *(part[0] for part in b.of_x))
    d_to_qu = torch.bmm(d_qu.mT, normed).unflatten(1, (heads, -1))
    d_to_q, d_to_u = d_to_qu.tensor_split([key], 2)
    d_middle, d_mlp = drop(b.d_middle, x.f_z), drop(b.dx[1:], x.f_y)
    return (
        b.dx[0].transpose(0, 1),
        b.dkv[..., : x.past.shape[4], :],
        None,
        torch.mv(b.states.flatten(1), b.d_m.flatten()),
        d_to_q + torch.einsum("kf,lhfd->lhkd", x.positions, d_to_u),
        torch.einsum("lhkd,lhfd->kf", x.to_q, d_to_u),
        b.d_new.view(time * batch, -1).T @ b.m.flatten(0, 1),
        torch.bmm(d_middle.flatten(1, 2).mT, b.attended.flatten(1, 2)),
        torch.bmm(dh.mT, b.normed_mlp.flatten(1, 2)),
        torch.bmm(d_mlp.flatten(1, 2).mT, b.h.flatten(1, 2)),
        *[None] * 3,
    )


def drop(x: Tensor, factors: Tensor | None, *at: int) -> Tensor:
    """Multiply `x` by dropout factors; return `x` if `factors` is None."""
    return x if factors is None else x * factors[at]


def attention_weights(x: Stack, b: Terms, start: int, stop: int) -> Tensor:
    """Recompute the attention weights $p$ of a block; return zeros for $da$, then $p$.

    - Returns `[2, layers, batch * heads, steps, memories]`.
    """
    old, n, steps = x.past.shape[4] + start, x.past.shape[4] + stop, stop - start
    q, waves = b.vectors[0, :, :, start:stop], b.waves[-n - 1 :]
    pairs = q.new_zeros(2, *q.shape[:2], steps, n)
    r = waves @ x.positions.T
    hidden = q.new_ones(steps, n, dtype=torch.bool).triu(old)
    if x.hidden is not None:
        hidden = hidden | F.pad(x.hidden, (0, n - x.hidden.shape[2]))
    keys = b.kv[0].flatten(1, 2)
    for l, p in enumerate(pairs[1]):
        # Convert scores by distance, [rows, steps, n + 1], to scores by memory.
        a = by_memory(q[l] @ r.T, old)
        a = torch.baddbmm(a, q[l], keys[l % len(keys), :, :n].mT)  # Eq. f4
        p.copy_(masked_softmax(a, hidden))
    return pairs


def by_memory(x: Tensor, old: int) -> Tensor:
    """View a tensor indexed by query and distance as indexed by query and memory.

    - `x`: `[rows, steps, n + 1]`, by the distances n to 0. The first query is `old`
      steps behind the first memory, and each query one step further.
    - Returns `[rows, steps, n]`.
    """
    rows, steps, size = x.shape
    n = size - 1
    return x.as_strided((rows, steps, n), (steps * size, n, 1), n - old)


def memory(x: Stack, b: Terms, t: int, later: Tensor) -> None:
    """Compute state gradients from key and value gradients (through Eqs. f2 and f1).

    - `later`: the pairs of this memory with later steps of the block, `[2, layers, batch
      * heads, steps]`.
    """
    new, steps = b.d_new[t], later.shape[-1]
    if steps:
        pulled = torch.bmm(
            later.flatten(0, 2).unsqueeze(1).contiguous(),
            b.vectors.flatten(0, 2)[:, t + 1 : t + 1 + steps],
        )  # (g4)
        pulled = pulled.view(2, len(later[0]), len(new), -1, pulled.shape[-1])
        if pulled.shape[1] > new.shape[2]:  # All layers share a projection.
            pulled = pulled.sum(1, keepdim=True)
        new += pulled.permute(2, 0, 1, 3, 4)
    dm = torch.mm(new.view(len(new), -1), x.to_kv)
    if b.of_m is not None:
        dm = norm_backward(dm, *(part[t] for part in b.of_m))
    b.d_m[t] = dm
    b.dx[:, t].addcmul_(x.alpha.view(-1, 1, 1), dm)


def layer(
    x: Stack, l: int, t: int, weights: Rows, step: Rows, norms: Rows, seen: Rows,
    pairs: Rows, waves: Tensor, first: int,
) -> None:  # fmt: skip
    """Compute gradients through a layer (Eqs. f7 to f4), from its output to its input.

    The query of the lowest layer depends on $x$ alone, so no earlier step needs its
    gradient: (g3) is computed only for the keys of the block, from `first` on.

    - `weights`: matrices of this layer; `step`: the step's buffers for gradients;
      `norms`: tensors that its norms have saved.
    - `seen`: keys and values of earlier steps; `pairs`: $da$ and $p$; `waves`: $s$ of
      the distances.
    """
    contract, expand, to_out, to_qu = weights
    up, dh, below, dx, z, dz_t, d_qu, d_heads = step
    dh.mul_(torch.mm(drop(up, x.f_y, l, t), contract))
    dn = torch.mm(dh, expand)
    torch.add(up, norm_backward(dn, *norms[:3]), out=below)
    dx.add_(below)
    dz = torch.mm(drop(below, x.f_z, l, t), to_out).view(z.shape)
    dz_t.copy_(dz)

    (K, V), (da, p) = seen, pairs
    if first:
        V, da, p = V[..., first:], da[..., first:], p[..., first:]
    if V.shape[-1] == 0:
        return
    D = (dz * z).sum(-1, keepdim=True)
    dp = torch.baddbmm(D, dz, V, beta=-1)
    torch.mul(p, dp, out=da)  # (g3)
    if l == 0:
        return
    dq, du = torch.bmm(da, K).squeeze(1), torch.mm(da.squeeze(1), waves)  # (g5)
    torch.cat([dq, du], 1, out=d_heads)
    dn = torch.mm(d_qu, to_qu)
    dx.add_(norm_backward(dn, *norms[3:]))


def older(b: Terms, start: int, stop: int, da: Tensor, p: Tensor) -> None:
    """Add what a block of queries contributes to the gradients of older memories."""
    n, steps = p.shape[-1], slice(start, stop)
    old = n - (stop - start)
    K, V = b.kv.flatten(2, 3)
    q, dz = b.vectors[:, :, :, steps]
    # In the lowest layer, compute Eq. g3 for older keys, and then query gradients.
    z = b.attended[0, steps].view(stop - start, len(dz[0]), -1).transpose(0, 1)
    D = (dz[0] * z).sum(-1, keepdim=True)
    dp = torch.bmm(dz[0], V[0, :, :old].mT) - D
    da[0, ..., :old] = p[0, ..., :old] * dp  # (g3)
    by_distance = da.new_zeros(*da[0].shape[:2], n + 1)
    by_memory(by_distance, old).copy_(da[0])
    dq, du = torch.bmm(da[0], K[0, :, :n]), by_distance @ b.waves[-n - 1 :]  # (g5)
    d_qu = torch.cat([dq, du], -1).unflatten(0, b.d_qu.shape[2:4])
    b.d_qu[0, steps] = d_qu.permute(2, 0, 1, 3)
    for d_part, pairs, vectors in zip(b.dkv, (da, p), (q, dz), strict=True):
        d_part = d_part.flatten(1, 2)
        for l, x in enumerate(vectors):
            sums = d_part[l % len(d_part), :, :old]
            sums += torch.bmm(pairs[l, ..., :old].mT, x)  # (g4)


def norm(x: Tensor) -> tuple[Tensor, Rows]:
    """Return a layer norm without a scale, and the tensors that its gradient needs."""
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], None, None, EPS)
    return y, (x, mean, rstd)


def norm_backward(dy: Tensor, x: Tensor, *saved: Tensor) -> Tensor:
    """Compute the input gradient of `norm` from the tensors that `norm` returned."""
    return torch.ops.aten.native_layer_norm_backward(
        dy, x, x.shape[-1:], *saved, None, None, [True, False, False]
    )[0]


def add(
    x: Tensor, part: Tensor, W: Tensor, factors: Tensor | None, l: int, t: int,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute `x + factors * (part @ W)`; `factors=None` means factors of 1."""
    if factors is None:
        return torch.addmm(x, part, W, out=out)
    return torch.addcmul(x, factors[l, t], torch.mm(part, W), out=out)


def make_waves(n: int, positions: Tensor) -> Tensor:
    """Return sinusoids $s$ (Eq. f3) of the distances n to 0, with float64 angles."""
    device = positions.device
    if device.type == "mps":  # This device has no float64.
        device = torch.device("cpu")
    exact: Any = {"dtype": torch.float64, "device": device}
    half = positions.shape[1] // 2
    frequencies = 10.0 ** (-4 * torch.arange(half, **exact) / half)
    angle = torch.outer(torch.arange(n, -1, -1, **exact), frequencies)
    return torch.cat([angle.sin(), angle.cos()], -1).to(positions)


def queries_and_u(x: Stack) -> Tensor:
    """Return the weights of $q$ and $u$, `[layers, heads * (key + features), d]`."""
    to_u = torch.einsum("kf,lhkd->lhfd", x.positions, x.to_q)
    return torch.cat([x.to_q, to_u], dim=2).flatten(1, 2)


def masked_softmax(a: Tensor, hidden: Tensor) -> Tensor:
    """Compute the softmax over visible keys, or zeros if all keys are hidden."""
    past = hidden.shape[-1]
    a[..., :past].masked_fill_(hidden, torch.finfo(a.dtype).min)
    a = torch.softmax(a, -1)
    a[..., :past].masked_fill_(hidden, 0)
    return a


def shapes(given: Any, keep: bool, normalize: bool, lse: bool = False) -> Any:
    """Return empty tensors shaped like the results of `forward`, and `lse` if asked."""
    x = Stack(*given)
    (batch, time, d), (layers, heads) = x.x.shape, x.to_q.shape[:2]
    *sizes, past, key = x.past.shape
    y = [torch.empty_like(x.x), x.x.new_empty(*sizes, past + time, key)]
    kept: list[Any] = [(layers + 1, time, batch, d), (layers, time, batch, d)]
    kept += [(layers, batch * heads, time)] * lse
    return y, [x.x.new_empty(size) for size in kept] if keep else []


ARGUMENTS = (
    "Tensor x, Tensor past, Tensor? hidden, Tensor alpha, Tensor to_q, "
    "Tensor positions, Tensor to_kv, Tensor to_out, Tensor expand, Tensor contract, "
    "Tensor? f_z, Tensor? f_h, Tensor? f_y"
)
loops = Recurrence(
    "feedback", ARGUMENTS, "bool normalize", forward, backward, shapes, reads=(1,)
)


def feedback(
    x: Tensor,
    weights: FeedbackWeights,
    heads: int,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    factors: Tensor | None = None,
    *,
    recurrence: Recurrence = loops,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the stack with cached keys and values; return `y`, keys and values.

    - `factors`: `[batch, time, layers, 2 * d + d_ff]`; None = no dropout.
    """
    w, (d, d_ff) = weights, weights.contract.shape[1:]
    # Scales of norms and 1 / sqrt(key) are multiplied into the matrices.
    to_q = w.to_q * w.norm_mixer[:, None] / (d // heads) ** 0.5
    to_kv = torch.stack([w.to_k, w.to_v])
    if w.norm_memory is not None:
        to_kv = to_kv * w.norm_memory[:, None]
    drops: Any = [None] * 3
    if factors is not None:
        drops = factors.permute(2, 1, 0, 3).split([d, d_ff, d], -1)
    inputs = Stack(
        x,
        torch.stack([k, v]).permute(0, 3, 1, 4, 2, 5),
        None if mask is None else ~mask.repeat_interleave(heads, 0)[:, None],
        torch.softmax(w.merge, dim=0),
        to_q.unflatten(1, (heads, -1)),
        w.positions,
        to_kv.flatten(0, 2),
        w.to_out,
        w.expand * w.norm_mlp[:, None],
        w.contract,
        *drops,
    )
    y, kv = recurrence(inputs, w.norm_memory is not None)
    return y, *kv.permute(0, 2, 4, 1, 3, 5)
