r"""# AFT-simple in linear memory

The running mean is a linear recurrence. In two levels it takes
$2\sqrt T$ operations on long vectors, and its backward pass is the same
recurrence from the end. AFT-local and AFT-conv use it too, for the
steps outside a window: a running mean acts as a single step with key
$L$ and value $m$.

$$\sum_{t' \in A} e^{K_{t'}} V_{t'} = e^{L} m, \qquad
  \sum_{t' \in A} e^{K_{t'}} = e^{L} \tag{e1}$$
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab.ops.call.operators import Operator, traced
from fwlab.ops.parts import autograd, chunks


def recur(
    g: Tensor, parts: list[Tensor], start: list[Tensor]
) -> Tensor:
    r"""$x_t = g_t\, x_{t-1} + u_t$, in two levels.

    About $\sqrt T$ segments are computed side by side, and then joined
    one after the other: $2\sqrt T$ operations on long vectors instead
    of $T$ on short ones. No $g$ is above 1. Products of them may
    underflow, but only where their terms are negligible.

    - `g`, each $u$ of `parts`: `[batch, time, channels]`.
    - `start`: $x_0$ of each part, `[batch, channels]`.
    - Returns `[parts, batch, time, channels]`.
    """
    batch, time, channels = g.shape
    length = max(math.isqrt(time), 1)
    n = chunks.count(time, length)

    def segments(x: Tensor, out: Tensor, fill: float) -> None:
        """Copy `x` so that step i of all segments is contiguous."""
        whole = x[:, : (n - 1) * length].unflatten(1, (n - 1, length))
        out[:, :, :-1] = whole.permute(2, 0, 1, 3)
        ragged = time - (n - 1) * length
        out[:ragged, :, -1] = x[:, (n - 1) * length :].transpose(0, 1)
        out[ragged:, :, -1] = fill

    G = g.new_empty(length, batch, n, channels)
    X = g.new_empty(length, len(parts), batch, n, channels)
    segments(g, G, 1)
    for part, u in enumerate(parts):
        segments(u, X[:, part], 0)
    fades, sums = G.unbind(0), X.unbind(0)
    for i in range(1, length):
        sums[i].addcmul_(fades[i], sums[i - 1])
        fades[i].mul_(fades[i - 1])
    before = torch.empty_like(X[0])
    before[:, :, 0] = torch.stack(start)
    joined = before.unbind(2)
    ends = zip(sums[-1].unbind(2), fades[-1].unbind(1), strict=True)
    for j, (end, fade) in zip(range(1, n), ends, strict=False):
        torch.addcmul(end, fade, joined[j - 1], out=joined[j])
    X.addcmul_(G[:, None], before)
    X = X.permute(1, 2, 3, 0, 4).flatten(2, 3)
    return X[:, :, :time]


def _forward(
    k: Tensor, v: Tensor, log_sum: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    r"""(n1) of the naive version for all steps at once.

    With $M_t$ the maximum of the keys so far, numerator and denominator
    in units of $e^{M_t}$ are linear recurrences:

    $$s_t = e^{M_{t-1} - M_t} s_{t-1} + e^{K_t - M_t}, \quad
      L_t = M_t + \log s_t \tag{e2}$$

    By (e1) the initial state acts as one more step.
    """
    top = torch.maximum(running_max(k), log_sum[:, None])
    fade = torch.empty_like(k)
    fade[:, :1] = _share(log_sum[:, None], top[:, :1])
    fade[:, 1:] = _share(top[:, :-1], top[:, 1:])
    new = _share(k, top)
    start = [torch.ones_like(mean), mean]
    s, total = recur(fade, [new, new * v], start)  # (e2)
    return top + s.log(), _quotient(total, s)


def _quotient(total: Tensor, s: Tensor) -> Tensor:
    """`total / s`, and 0 where `s` is 0, as then `total` is, too."""
    return total / s.clamp(min=torch.finfo(s.dtype).tiny)


def _backward(
    inputs: tuple[Tensor, ...],
    after: tuple[Tensor, Tensor],
    dL: Tensor,
    dm: Tensor,
) -> tuple[Tensor, ...]:
    r"""Step $t'$ has the weight $e^{K_{t'} - L_t}$ in row $t$. The
    sums of its gradients over all later rows are a recurrence that runs
    backward:

    $$a_t = dm_t + e^{L_t - L_{t+1}} a_{t+1}, \quad
      b_t = dL_t - m_t\, dm_t + e^{L_t - L_{t+1}} b_{t+1} \tag{e3}$$
    $$dV_t = e^{K_t - L_t} a_t, \qquad
      dK_t = e^{K_t - L_t} (V_t\, a_t + b_t) \tag{e4}$$

    The initial state gets its gradients as one more step.
    """
    k, v, log_sum, mean = inputs
    L, m = after
    fade = torch.ones_like(k)
    fade[:, 1:] = _share(L[:, :-1], L[:, 1:]).flip(1)
    none = torch.zeros_like(mean)
    parts = [dm.flip(1), (dL - m * dm).flip(1)]
    a, b = recur(fade, parts, [none, none]).flip(2)  # (e3)
    share = _share(k, L)
    first = _share(log_sum, L[:, 0])
    dmean = first * a[:, 0]
    dlog_sum = first * (mean * a[:, 0] + b[:, 0])
    return share * (v * a + b), share * a, dlog_sum, dmean  # (e4)


class _RunningMean(torch.autograd.Function):
    """`log_sum` and `mean` `[batch, time, channels]` of each step."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the running means; save them and the inputs."""
        after = _forward(*inputs)
        ctx.save_for_backward(*inputs, *after)
        return after

    @staticmethod
    @autograd.backward_pass
    def backward(
        ctx: Any, dL: Tensor, dm: Tensor
    ) -> tuple[Tensor, ...]:
        """Compute (e3) and (e4) from the inputs and running means."""
        *inputs, L, m = ctx.saved_tensors
        return _backward(tuple(inputs), (L, m), dL, dm)


class _Simple(torch.autograd.Function):
    """Eq. 5 and the final state.

    Only the inputs are kept: the backward pass computes the running
    means again.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the outputs and the state, the last running mean."""
        L, m = _forward(*inputs)
        ctx.save_for_backward(q, *inputs)
        ctx.set_materialize_grads(False)
        ends = L[:, -1].clone(), m[:, -1].clone()
        return torch.sigmoid(q).mul_(m), *ends  # Eq. 5

    @staticmethod
    @autograd.backward_pass
    def backward(
        ctx: Any,
        dy: Tensor | None,
        dL_end: Tensor | None,
        dm_end: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Go back through the gate, then through the running means."""
        q, *inputs = ctx.saved_tensors
        after = _forward(*inputs)
        gate, dL = torch.sigmoid(q), torch.zeros_like(q)
        dm = torch.zeros_like(q) if dy is None else dy * gate
        dq = dm * after[1] * (1 - gate)
        if dm_end is not None:
            dm[:, -1] += dm_end
        if dL_end is not None:
            dL[:, -1] = dL_end
        return dq, *_backward(tuple(inputs), after, dL, dm)


def _shapes(
    q: Tensor, k: Tensor, v: Tensor, log_sum: Tensor, mean: Tensor
) -> tuple[Any, Any]:
    """What `_Simple` returns and what it saves, without data."""
    inputs = q, k, v, log_sum, mean
    return [torch.empty_like(x) for x in (q, log_sum, mean)], inputs


_operator = Operator(
    "aft_simple",
    _Simple,
    "Tensor q, Tensor k, Tensor v, Tensor log_sum, Tensor mean",
    3,
    shapes=_shapes,
)


class _Means(torch.autograd.Function):
    r"""(e1) for pieces of `steps` of the first `time` steps.

    With $p = e^{K - L}$, $dV = p\, dm$ and
    $dK = p\, \big(dL + (V - m)\, dm\big)$: (e4) for a single row.
    """

    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, steps: int, time: int
    ) -> tuple[Tensor, Tensor]:
        """Subtract the largest key of each piece, then sum."""
        ctx.steps, ctx.time = steps, time
        keys = _pieces(k, steps, time, -math.inf)
        top = keys.amax(2, keepdim=True)
        new = _share(keys, top)
        s = new.sum(2)
        total = new.mul_(_pieces(v, steps, time)).sum(2)
        L, m = top[:, :, 0] + s.log(), _quotient(total, s)
        ctx.save_for_backward(k, v, L, m)
        return L, m

    @staticmethod
    @autograd.backward_pass
    def backward(
        ctx: Any, dL: Tensor, dm: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The share of each step is computed again."""
        k, v, L, m = ctx.saved_tensors
        keys = _pieces(k, ctx.steps, ctx.time, -math.inf)
        values = _pieces(v, ctx.steps, ctx.time)
        share = _share(keys, L[:, :, None])
        # With the steps that the last piece lacks, if any.
        size = len(k), max(k.shape[1], L.shape[1] * ctx.steps)
        gradients = k.new_zeros(2, *size, k.shape[2])
        dk, dv = (
            _pieces(x, ctx.steps, L.shape[1] * ctx.steps)
            for x in gradients
        )
        torch.mul(share, dm[:, :, None], out=dv)
        torch.mul(share, (dL - m * dm)[:, :, None], out=dk)
        dk.addcmul_(dv, values)  # (e4)
        dk, dv = gradients[:, :, : k.shape[1]]
        return dk, dv, None, None


def _pieces(
    x: Tensor, steps: int, time: int, fill: float = 0
) -> Tensor:
    """The first `time` steps, `[batch, pieces, steps, channels]`."""
    x, missing = x[:, :time], -time % steps
    if missing:
        x = F.pad(x, (0, 0, 0, missing), value=fill)
    return x.unflatten(1, (-1, steps))


def means(
    k: Tensor, v: Tensor, steps: int, time: int
) -> tuple[Tensor, Tensor]:
    """(e1) for every `steps` steps: each piece acts as a single one.

    - `k`, `v`: `[batch, keys, channels]`, of which the first `time`
      count. The last piece may be short.
    - Returns `log_sum` and `mean`, `[batch, pieces, channels]`.
    """
    return _Means.apply(k, v, steps, time)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """`exp(part - whole)`; 0 where both are `-inf`."""
    whole = whole.clamp(min=torch.finfo(whole.dtype).min)
    return (part - whole).exp_()


def running_max(x: Tensor) -> Tensor:
    """The maximum of all steps so far.

    Each round doubles the steps covered; `torch.cummax` is far slower.
    """
    x, covered = x.clone(), 1
    while covered < x.shape[1]:
        x[:, covered:] = torch.maximum(x[:, covered:], x[:, :-covered])
        covered *= 2
    return x


def causal(
    q: Tensor, k: Tensor, v: Tensor, log_sum: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Row $t$ sees past and present; called as the naive version."""
    run = _operator if traced(q) else _Simple.apply
    return run(q, k, v, log_sum, mean)


def not_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every row sees all steps, so one softmax over time is enough.

    Autograd keeps one weight per step and channel.
    """
    empty = (k == -torch.inf).all(1, keepdim=True)
    weights = torch.softmax(torch.where(empty, 0, k), dim=1)
    mean = torch.where(empty[:, 0], 0, (weights * v).sum(1))
    return torch.sigmoid(q) * mean[:, None]  # Eq. 5


def before_each(
    k: Tensor, v: Tensor, log_sum: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """The running mean before each step, and after the last step.

    - Returns `log_sum` and `mean`, `[batch, time + 1, channels]`.
    """
    L, m = _RunningMean.apply(k, v, log_sum, mean)
    return (
        torch.cat([log_sum[:, None], L], 1),
        torch.cat([mean[:, None], m], 1),
    )
