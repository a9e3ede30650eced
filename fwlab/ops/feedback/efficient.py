r"""# Feedback memory with a cache

The steps must be computed one after the other, but little of the work has to be inside
this loop. This version differs from the naive loop in three ways:

1. Each memory is projected *once*, when it is made. Its keys and values go into buffers
   that are as long as the sequence.
2. For the backward pass, a layer saves its input, the result of its attention and the
   cache: nothing per *pair* of steps. Everything else is computed again, for all steps
   in one product.
3. The backward loop computes only what the next step needs. Gradients of older memories
   are collected for a block of steps and added in one product, and so are the gradients
   of all weights.

**Positions without shifts.** In a block of queries each row has its own distances. But
the sine and cosine of a difference are sums of products, so that $s(t - j)$ is a linear
map of $s(j)$, and the score of Eq. f4 becomes an ordinary product with a table of
*absolute* positions:

$$q \cdot P s(t - j) = u \cdot s(t - j) = (R_t u) \cdot s(j),
  \qquad u = P^\top q \tag{g1}$$
$$R_t \begin{bmatrix} a \\ b \end{bmatrix} = \begin{bmatrix}
  b \sin\omega t - a \cos\omega t \\
  a \sin\omega t + b \cos\omega t \end{bmatrix} \tag{g2}$$

where the halves $a$ and $b$ of $u$ belong to the sines and cosines. $R_t$ is symmetric
and its own inverse: $R_t R_t = I$.

**Weights.** The scales of the norms, the factor $1/\sqrt{d_{\text{key}}}$ and $P$ are
multiplied into the adjacent matrices before the loop starts.

**Dropout.** Its factors multiply what the attention adds to a state, the result of
GELU, and what the MLP adds. Both passes get the same ones.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fwlab.ops._recurrence import Recurrence
from fwlab.ops.feedback.weights import EPS, FeedbackWeights

#: Steps whose gradients for older memories are collected.
BLOCK = 32

#: Steps from which transposing the weights pays.
MANY = 8

#: What belongs to one layer or step: see `_each`.
Rows = tuple[Tensor, ...]


def rotate(u: Tensor, table: Tensor) -> Tensor:
    r"""$R_t u$ of (g2) for every step $t$; its own inverse.

    - `u`: `[..., time, features]`, `table`: $s(t)$, `[time, features]`.
    """
    (a, b), (sin, cos) = u.chunk(2, -1), table.chunk(2, -1)
    return torch.cat([b * sin - a * cos, a * sin + b * cos], -1)  # (g2)


def _norm(x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return a layer norm without a scale, and what its backward pass needs."""
    y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], None, None, EPS)
    return y, (x, mean, rstd)


def _norm_backward(dy: Tensor, x: Tensor, *saved: Tensor) -> Tensor:
    """Return the gradient of `x`, from what `_norm` returned."""
    return torch.ops.aten.native_layer_norm_backward(
        dy, x, x.shape[-1:], *saved, None, None, [True, False, False]
    )[0]


class Forward:
    r"""Compute Eqs. f1 to f7, without gradients.

    Buffers begin with the dimensions layer and time, so that one step of a layer is a
    contiguous `[batch, d]`, and all steps of a layer are the rows of one matrix.
    """

    lse: Tensor | None = None

    def __init__(
        self, x: Tensor, past: Tensor, hidden: Tensor | None,
        alpha: Tensor, to_q: Tensor, positions: Tensor, to_kv: Tensor,
        to_out: Tensor, expand: Tensor, contract: Tensor,
        factors: Tensor | None, normalize: bool, keep: bool,
    ):  # fmt: skip
        r"""
        - `x`: `[batch, time, d]`.
        - `past`: `[2, groups, batch, heads, past, key]`, keys and values of earlier
          calls; `hidden`: `bool [batch * heads, 1, past]`.
        - `alpha`: $\mathrm{softmax}(w)$.
        - `to_q`: `[layers, heads, key, d]`.
        - `to_kv`: `[2 * groups * d, d]`.
        - `factors`: `[layers, time, batch, 2 * d + d_ff]`; None = 1.
        - `normalize`: whether a memory is normalised.
        - `keep`: whether a backward pass may follow.
        """
        _, groups, batch, heads, self.past, key = past.shape
        rows, n = batch * heads, self.past + x.shape[1]
        self.x, self.layers, self.normalize = x, len(to_out), normalize
        self.keep, self.alpha = keep, alpha
        d, d_ff = contract.shape[1:]
        self.factors = None if factors is None else factors.split([d, d_ff, d], -1)
        turned = [W.mT for W in (to_kv, to_q.flatten(1, 2), to_out, expand, contract)]
        if x.shape[1] > MANY:  # products take up to half the time
            turned = [W.contiguous() for W in turned]
        self.to_kv, *parts = turned
        self.weights = _each(*parts)
        self.group_of = range(groups) if groups > 1 else [0] * len(to_q)
        self.kv_split = x.new_empty(2, groups, batch, heads, n, key)
        self.kv_split[..., : self.past, :] = past
        self.kv = self.kv_split.view(2, groups, rows, n, key)
        back = _table(range(n, 0, -1), positions)
        self.r = back @ positions.T  # Eq. f4
        self.hidden = hidden

    def run(self) -> Tensor:
        """Compute all steps; returns `y`."""
        batch, time, d = self.x.shape
        kept = time if self.keep else 1
        self.states = self.x.new_empty(self.layers + 1, kept, batch, d)
        self.attended = self.x.new_empty(self.layers, kept, batch, d)
        y = self.x.new_empty(batch, time, d)
        steps = _each(self.x.transpose(0, 1), y.transpose(0, 1))
        for t, (x_t, y_t) in enumerate(steps):
            index, n = t if self.keep else 0, self.past + t
            seen = _each(*self.kv[..., :n, :])
            self.states[0, index] = x_t
            new = self.step(index, t, seen, self.r[len(self.r) - n :].T)
            y_t.copy_(self.states[-1, index])
            self.kv_split[..., n, :] = new
        return y

    def step(self, index: int, t: int, seen: Sequence[Rows], r: Tensor) -> Tensor:
        """Compute all layers, for the input of step `t` in `states[0, index]`.

        - `seen`: keys and values before it, by group; `r`: the keys of their distances,
          `[key, memories]`.

        Returns keys and values of the memory of this step, `[2, groups, batch, heads,
        key]`.
        """
        states = self.states[:, index]
        layers = _each(states[:-1], states[1:], self.attended[:, index])
        for l, (x_l, above, z) in enumerate(layers):
            to_q, to_out, expand, contract = self.weights[l]
            q = torch.mm(_norm(x_l)[0], to_q)
            self.attend(l, q, z, seen, r)
            f_z = f_h = f_y = None
            if self.factors is not None:
                f_z, f_h, f_y = (f[l, t] for f in self.factors)
            x_l = _add(x_l, z, to_out, f_z)  # Eq. f6
            h = torch.mm(_norm(x_l)[0], expand)
            h = torch.nn.functional.gelu(h)
            h = h if f_h is None else h * f_h
            _add(x_l, h, contract, f_y, out=above)  # Eq. f7
        m = torch.mv(states.flatten(1).T, self.alpha)  # Eq. f1
        m = m.view(x_l.shape)
        m = _norm(m)[0] if self.normalize else m
        new = torch.mm(m, self.to_kv)  # Eq. f2
        _, groups, batch, heads, _, key = self.kv_split.shape
        new = new.view(batch, 2, groups, heads, key)
        return new.permute(1, 2, 0, 3, 4)

    def attend(
        self, l: int, q: Tensor, z: Tensor, seen: Sequence[Rows], r: Tensor
    ) -> None:
        """Compute Eqs. f4 and f5; `q` and `z`: `[batch, d]`."""
        K, V = seen[self.group_of[l]]
        if K.shape[1] == 0:
            z.zero_()  # nothing to attend to
            return
        q = q.view(len(K), -1)
        a = torch.mm(q, r).unsqueeze(1)
        a.baddbmm_(q.unsqueeze(1), K.mT)  # Eq. f4
        a = _softmax(a, self.hidden)
        torch.bmm(a, V, out=z.view(len(K), 1, -1))  # Eq. f5


class Backward:
    r"""Go from the last step to the first, and from the top layer down.

    Let $p_{tj}$ be the attention weights of one head and layer, and $dz_t$ the gradient
    of the attention's result. Then

    $$da_{tj} = p_{tj}\,(dz_t \cdot v_j - dz_t \cdot z_t) \tag{g3}$$
    $$dv_j = \sum_{t>j} p_{tj}\, dz_t, \qquad
      dk_j = \sum_{t>j} da_{tj}\, q_t \tag{g4}$$
    $$dq_t = \sum_{j<t} da_{tj}\, k_j, \qquad
      du_t = \sum_{j<t} da_{tj}\, s(t - j) \tag{g5}$$

    When the loop arrives at memory $j$, all later steps are done, so all terms of (g4)
    are known. Those of the same block are summed for each memory, those of later blocks
    in one product per block.
    """

    m_norm: tuple[Tensor, Tensor, Tensor] | None

    def __init__(self, x: Any, kept: Any, gradients: Any, needed: Any, normalize: bool):
        """Recompute what was not saved, for all steps at once."""
        (_, _, hidden, alpha, to_q, positions, to_kv, to_out, expand, contract,
         factors) = x  # fmt: skip
        states, attended, *lse, kv = kept
        self.lse: Any = lse[0] if lse else None  # kernels have one
        dy, dkv = gradients
        self.states, self.attended, self.kv = states, attended, kv
        self.to_kv, self.to_out = to_kv, to_out
        self.expand, self.contract = expand, contract
        self.to_q, self.positions = to_q, positions
        self.alpha = alpha.view(-1, 1, 1)
        layers, time, batch, d = attended.shape
        _, groups, rows, n, key = kv.shape
        heads = rows // batch
        self.hidden = hidden
        self.past, self.split = n - time, (batch, heads)
        self.to_past = needed[1]
        self.group_of = range(layers) if groups > 1 else [0] * layers
        self.flat = (layers, time * batch, -1)

        x = states[:-1]
        self.to_qu = _with_positions(to_q, positions)
        self.normed, self.x_norm = _norm(x)
        q = torch.bmm(self.normed.view(self.flat), to_q.flatten(1, 2).mT)
        q = q.view(layers, time, batch, heads, key)
        d_ff = contract.shape[2]
        self.factors = None if factors is None else factors.split([d, d_ff, d], -1)
        added = (attended.view(self.flat), to_out.mT)
        if self.factors is None:
            middle = torch.baddbmm(x.reshape(self.flat), *added)
            middle = middle.view(attended.shape)
        else:
            middle = torch.bmm(*added).view(attended.shape)
            middle = torch.addcmul(x, self.factors[0], middle)
        self.normed_mlp, self.middle_norm = _norm(middle)
        h = torch.bmm(self.normed_mlp.view(self.flat), expand.mT)
        self.h = torch.nn.functional.gelu(h)
        m = torch.mv(states.flatten(1).T, alpha).view(time, batch, d)
        self.m, self.m_norm = m, None
        if normalize:
            self.m, self.m_norm = _norm(m)
        self.table = _table(range(n), positions)
        self.back = _table(range(n, 0, -1), positions)

        # The vectors of (g4), q and dz, side by side.
        vectors = kv.new_empty(2, layers, batch, heads, time, key)
        self.q, self.dz = vectors.view(2, layers, rows, time, key)
        vectors[0] = q.permute(0, 2, 3, 1, 4)
        self.vectors = vectors.flatten(0, 3)

        # The gradients of every step. At the end, the gradients of the weights are
        # products with them.
        self.dx = torch.zeros_like(states)
        if dy is not None:
            self.dx[-1] = dy.transpose(0, 1)
        self.d_middle = torch.empty_like(middle)
        self.dh = _gelu_slope_(h).view(layers, time, batch, -1)
        if self.factors is not None:
            self.h *= self.factors[1].reshape(self.h.shape)
            self.dh *= self.factors[1]
        self.d_qu = q.new_zeros(*q.shape[:-1], key + positions.shape[1])
        self.d_m = torch.empty_like(m)
        self.d_new = m.new_empty(time, batch, 2, groups, heads, key)
        self.dkv = (
            torch.zeros_like(kv)
            if dkv is None
            else dkv.clone(memory_format=torch.contiguous_format)
        )
        self.dkv_split = self.dkv.unflatten(2, self.split)

    def run(self) -> tuple[Tensor | None, ...]:
        """Run the loop, and then compute the gradients that no step needs."""
        self.loop()
        _, time, batch, d = self.attended.shape
        flat = self.flat
        dn = torch.mm(self.d_qu[0].view(flat[1:]), self.to_qu[0])
        self.dx[0] += _norm_backward(
            dn.view(time, batch, d), *(p[0] for p in self.x_norm)
        )
        d_to_qu = torch.bmm(self.d_qu.view(flat).mT, self.normed.view(flat))
        d_to_qu = d_to_qu.view(*self.to_q.shape[:2], -1, d)
        key = self.to_q.shape[2]
        d_to_q, d_to_u = d_to_qu.tensor_split([key], 2)
        d_to_kv = self.d_new.view(flat[1:]).T @ self.m.view(flat[1:])
        return (
            self.dx[0].transpose(0, 1),
            self.dkv_split[..., : self.past, :],
            None,
            torch.mv(self.states.flatten(1), self.d_m.flatten()),
            d_to_q + torch.einsum("kf,lhfd->lhkd", self.positions, d_to_u),
            torch.einsum("lhkd,lhfd->kf", self.to_q, d_to_u),
            d_to_kv,
            torch.bmm(
                self.dropped(0, self.d_middle).reshape(flat).mT,
                self.attended.view(flat),
            ),
            torch.bmm(self.dh.view(flat).mT, self.normed_mlp.view(flat)),
            torch.bmm(self.dropped(2, self.dx[1:]).reshape(flat).mT, self.h),
            None,
        )

    def dropped(self, which: int, dx: Tensor, *at: int) -> Tensor:
        """Multiply a gradient by the factors of dropout, if there are any."""
        if self.factors is None:
            return dx
        return dx * self.factors[which][at]

    def loop(self) -> None:
        """Go through blocks of steps, the last one first."""
        layers, time = self.attended.shape[:2]
        weights = _each(self.contract, self.expand, self.to_out, self.to_qu)
        rows, key = self.q.shape[1::2]
        by_head = (layers, time, rows, 1, key)
        rooms = (
            self.dx[1:], self.dh, self.d_middle, self.dx[:-1],
            self.attended.view(by_head),
            self.dz.transpose(1, 2).unsqueeze(3),
            self.d_qu.flatten(3),
            self.d_qu.view(layers, time, rows, -1),
        )  # fmt: skip
        steps = [_each(*room) for room in _each(*rooms)]
        norms = [_each(*part) for part in _each(*self.middle_norm, *self.x_norm)]
        # A row times them is faster this way.
        keys, values = self.kv[0], self.kv[1].mT.contiguous()
        for start in reversed(range(0, time, BLOCK)):
            stop = min(start + BLOCK, time)
            pairs = self.attention_weights(start, stop)
            old = self.past + start
            later = self.dkv_split[..., old : self.past + stop, :]
            self.d_new[start:stop] = later.permute(4, 2, 0, 1, 3, 5)
            for t in reversed(range(start, stop)):
                n, i = self.past + t, t - start
                self.memory(t, pairs[:, :, :, i + 1 :, n])
                seen = _each(keys[:, :, :n], values[..., :n])
                row = _each(*pairs[..., i : i + 1, :n])
                back = self.back[len(self.back) - n :]
                for l in reversed(range(layers)):
                    self.layer(
                        l, t, weights[l], steps[l][t], norms[l][t],
                        seen[self.group_of[l]], row[l], back,
                        old if l == 0 else 0,
                    )  # fmt: skip
            self.older(start, stop, *pairs)

    def attention_weights(self, start: int, stop: int) -> Tensor:
        """Return zeros for $da$, and the weights $p$ of a block of queries.

        - Returns `[2, layers, batch * heads, steps, memories]`.
        """
        old, n = self.past + start, self.past + stop
        shape = (2, *self.q.shape[:2], stop - start, n)
        pairs = self.kv.new_zeros(shape)
        q, p = self.q[:, :, start:stop], pairs[1]
        u = rotate(q @ self.positions, self.table[old:n])
        torch.matmul(u, self.table[:n].T, out=p)  # (g1)
        for l, group in enumerate(self.group_of):
            K = self.kv[0, group, :, :n]
            p[l].baddbmm_(q[l], K.mT)  # Eq. f4
            p[l] = _causal_softmax(p[l], old, self.hidden)
        return pairs

    def memory(self, t: int, later: Tensor) -> None:
        """Go back through Eqs. f2 and f1, from keys and values to states.

        - `later`: the pairs of this memory with later steps of the block, `[2, layers,
          batch * heads, steps]`.
        """
        layers, new, steps = len(self.q), self.d_new[t], later.shape[-1]
        if steps:
            pulled = torch.bmm(
                later.flatten(0, 2).unsqueeze(1).contiguous(),
                self.vectors[:, t + 1 : t + 1 + steps],
            )  # (g4)
            pulled = pulled.view(2, layers, *self.split, -1)
            if layers > new.shape[2]:  # all layers share a projection
                pulled = pulled.sum(1, keepdim=True)
            new += pulled.permute(2, 0, 1, 3, 4)
        dm = torch.mm(new.view(len(new), -1), self.to_kv)
        if self.m_norm is not None:
            dm = _norm_backward(dm, *(p[t] for p in self.m_norm))
        self.d_m[t] = dm
        self.dx[:, t].addcmul_(self.alpha, dm)

    def layer(
        self, l: int, t: int, weights: Rows, step: Rows, norms: Rows,
        seen: Rows, pairs: Rows, back: Tensor, first: int,
    ) -> None:  # fmt: skip
        """Go back through Eqs. f7 to f4, from a state to the one below.

        The query of the lowest layer depends on $x$ alone, so no earlier step needs its
        gradient: (g3) is computed only for the keys of the block, from `first` on.

        - `weights`, `step`, `norms`: what belongs to this layer, and to this step: room
          for gradients, and what norms have saved.
        - `seen`: keys and values before it; `pairs`: $da$ and $p$; `back`: the
          positions of their distances.
        """
        contract, expand, to_out, to_qu = weights
        up, dh, below, dx, z, dz_t, d_qu, d_heads = step
        dh.mul_(torch.mm(self.dropped(2, up, l, t), contract))
        dn = torch.mm(dh, expand)
        torch.add(up, _norm_backward(dn, *norms[:3]), out=below)
        dx.add_(below)
        dz = torch.mm(self.dropped(0, below, l, t), to_out)
        dz = dz.view(z.shape)
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
        dq = torch.bmm(da, K).squeeze(1)
        du = torch.mm(da.squeeze(1), back)  # (g5)
        torch.cat([dq, du], 1, out=d_heads)
        dn = torch.mm(d_qu, to_qu)
        dx.add_(_norm_backward(dn, *norms[3:]))

    def older(self, start: int, stop: int, da: Tensor, p: Tensor) -> None:
        """Add the gradients of a block for the memories before it."""
        old, n = self.past + start, self.past + stop
        steps, (rows, key) = slice(start, stop), self.q.shape[1::2]
        # The lowest layer: (g3) for older keys, and its queries.
        dz, (K, V) = self.dz[0, :, steps], self.kv[:, 0]
        z = self.attended[0, steps].view(-1, rows, key).transpose(0, 1)
        D = (dz * z).sum(-1, keepdim=True)
        dp = torch.bmm(dz, V[:, :old].mT) - D
        da[0, ..., :old] = p[0, ..., :old] * dp  # (g3)
        dq, du = torch.bmm(da[0], K[:, :n]), da[0] @ self.table[:n]
        du = rotate(du, self.table[old:n])  # (g5)
        d_qu = torch.cat([dq, du], -1).unflatten(0, self.split)
        self.d_qu[0, steps] = d_qu.permute(2, 0, 1, 3)
        for l, group in enumerate(self.group_of):
            for d_part, pairs, vectors in (
                (self.dkv[0], da[l], self.q[l]),
                (self.dkv[1], p[l], self.dz[l]),
            ):
                d_part[group, :, :old] += torch.bmm(
                    pairs[..., :old].mT, vectors[:, steps]
                )  # (g4)


def _add(
    x: Tensor,
    part: Tensor,
    W: Tensor,
    factors: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """`x + factors * (part @ W)`; None = 1."""
    if factors is None:
        return torch.addmm(x, part, W, out=out)
    return torch.addcmul(x, factors, torch.mm(part, W), out=out)


def _table(steps: range, positions: Tensor) -> Tensor:
    """$s$ of Eq. f3, its angles in float64 on any device."""
    n, device = positions.shape[1] // 2, positions.device
    if device.type == "mps":  # has no float64
        device = torch.device("cpu")
    exact: Any = {"dtype": torch.float64, "device": device}
    i = torch.arange(n, **exact)
    t = torch.arange(steps.start, steps.stop, steps.step, **exact)
    angle = torch.outer(t, 10.0 ** (-4 * i / n))
    return torch.cat([angle.sin(), angle.cos()], -1).to(positions)


def _with_positions(to_q: Tensor, positions: Tensor) -> Tensor:
    """Return one matrix per layer, for the queries and the $u$ of (g1).

    Returns `[layers, heads * (key + features), d]`.
    """
    to_u = torch.einsum("kf,lhkd->lhfd", positions, to_q)  # (g1)
    return torch.cat([to_q, to_u], dim=2).flatten(1, 2)


def _each(*parts: Tensor) -> list[tuple[Tensor, ...]]:
    """Unbind all parts along their first dimension, and zip them.

    This is done once, because every index is a call of an operator.
    """
    return [*zip(*(part.unbind() for part in parts), strict=True)]


def _gelu_slope_(h: Tensor) -> Tensor:
    """Compute the derivative of GELU, in place."""
    return torch.ops.aten.gelu_backward.grad_input(torch.ones_like(h), h, grad_input=h)


def _softmax(a: Tensor, hidden: Tensor | None) -> Tensor:
    """Take the softmax over the keys that are not hidden; 0 if all are."""
    if hidden is None:
        return torch.softmax(a, -1)
    past = hidden.shape[-1]
    a[..., :past].masked_fill_(hidden, torch.finfo(a.dtype).min)
    a = torch.softmax(a, -1)
    a[..., :past].masked_fill_(hidden, 0)
    return a


def _causal_softmax(a: Tensor, old: int, hidden: Tensor | None) -> Tensor:
    """`_softmax` for a block whose first query sees `old` keys."""
    steps = a.shape[1]
    later = a.new_ones(steps, steps, dtype=torch.bool).triu()
    a[..., old:].masked_fill_(later, torch.finfo(a.dtype).min)
    a = _softmax(a, hidden)
    a[..., old:].masked_fill_(later, 0)
    return a


def _shapes(x: Any, keep: bool, normalize: bool, lse: bool) -> Any:
    """Return empty tensors as the forward loop does."""
    (batch, time, d), layers = x[0].shape, x[7].shape[0]
    _, groups, _, heads, past, key = x[1].shape
    rows = batch * heads
    sizes: list[Any] = [(layers + 1, time, batch, d), (layers, time, batch, d)]
    sizes += [(layers, rows, time)] * lse
    kv = x[0].new_empty(2, groups, rows, past + time, key)
    kept = [x[0].new_empty(size) for size in sizes] if keep else []
    return [torch.empty_like(x[0]), kv], kept


def recurrence(name: str, forward: Any, backward: Any, lse: bool) -> Recurrence:
    """Join both loops.

    - `forward`, `backward`: classes such as `Forward` and `Backward`.
    - `lse`: whether the forward loop keeps logarithms of sums.
    """

    def run(x: Any, keep: bool, normalize: bool) -> Any:
        """Return the results of the forward loop, and what the backward loop needs."""
        loop = forward(*x, normalize, keep)
        y = loop.run()
        kept = loop.states, loop.attended, *[loop.lse] * lse
        return (y, loop.kv), (kept if keep else ())

    return Recurrence(
        name,
        "Tensor x, Tensor past, Tensor? hidden, Tensor alpha, Tensor to_q, "
        "Tensor positions, Tensor to_kv, Tensor to_out, Tensor expand, "
        "Tensor contract, Tensor? factors",
        "bool normalize",
        run,
        lambda *given: backward(*given).run(),
        lambda x, keep, normalize: _shapes(x, keep, normalize, lse),
        reads=(1,),
    )


_recurrence = recurrence("feedback", Forward, Backward, lse=False)


def feedback(
    x: Tensor,
    weights: FeedbackWeights,
    heads: int,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    factors: Tensor | None = None,
    recurrence: Recurrence = _recurrence,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the naive version does, with dropout.

    - `factors`: `[batch, time, layers, 2 * d + d_ff]`; None = 1.
    """
    w, d = weights, weights.to_q.shape[-1]
    # Scales of norms and 1 / sqrt(key) go into the matrices.
    to_q = w.to_q * w.norm_mixer[:, None] / (d // heads) ** 0.5
    to_kv = torch.stack([w.to_k, w.to_v])
    if w.norm_memory is not None:
        to_kv = to_kv * w.norm_memory[:, None]
    inputs = (
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
        None if factors is None else factors.permute(2, 1, 0, 3),
    )
    y, kv = recurrence(inputs, w.norm_memory is not None)
    kv = kv.unflatten(2, (-1, heads)).permute(0, 2, 4, 1, 3, 5)
    return y, kv[0], kv[1]
