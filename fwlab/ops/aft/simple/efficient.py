r"""# AFT-simple in linear memory

The running mean is a linear recurrence. In two levels it takes $2\sqrt T$ operations on
long vectors, and its backward pass is the same recurrence from the end. AFT-local and
AFT-conv use it too, for the steps outside a window: a running mean acts as a single
step with key $L$ and value $m$.

$$\sum_{t' \in A} e^{K_{t'}} V_{t'} = e^{L} m, \qquad
  \sum_{t' \in A} e^{K_{t'}} = e^{L} \tag{e1}$$
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from fwlab.ops._recurrence import Recurrence


def causal(
    q: Tensor, k: Tensor, v: Tensor, log_sum: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute causal AFT-simple, with the arguments of the naive version."""
    y, log_sum, mean = _scan((k, v, log_sum, mean, q))
    return y, log_sum, mean


def before_each(
    k: Tensor, v: Tensor, log_sum: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the running mean before each step, and after the last step.

    - Returns `log_sum` and `mean`, `[batch, time + 1, channels]`.
    """
    L, m = _scan((k, v, log_sum, mean, None))
    return torch.cat([log_sum[:, None], L], 1), torch.cat([mean[:, None], m], 1)


def _forward(x: Any, keep: bool) -> Any:
    """Return outputs (Eq. 5) and final state or, without `q`, all running means."""
    k, v, log_sum, mean, q = x
    time = k.shape[1]
    top, _, _, s, total, _ = _sums(k, v, log_sum, mean)
    m = total.div_(_positive(s))
    L = top if q is None else top[-1, :, -1]
    L = L + (s if q is None else s[-1, :, -1]).log()
    if q is None:
        return (_join(L, time), _join(m, time)), ()
    ends = L, m[-1, :, -1].clone()
    return (torch.sigmoid(q).mul_(_join(m, time)), *ends), ()  # Eq. 5


def _sums(k: Tensor, v: Tensor, log_sum: Tensor, mean: Tensor) -> list[Tensor]:
    r"""Compute the sums of the running means (Eq. n1) for all steps at once.

    Let $M_t$ be the running maximum of the keys. Divided by $e^{M_t}$, numerator and
    denominator are linear recurrences:

    $$s_t = e^{M_{t-1} - M_t} s_{t-1} + e^{K_t - M_t}, \quad
      L_t = M_t + \log s_t \tag{e2}$$

    By (e1) the initial state acts as one more step.

    - Returns $M$, the factor of the previous sums, the weight of the step, $s$, the
      weighted sum of the values, and the values, all in segments as from `_cut`.
    """
    K, V = _cut(k, -math.inf), _cut(v, 0)
    M = K.clone()
    steps = M.unbind()
    for before, now in itertools.pairwise(steps):
        torch.maximum(before, now, out=now)
    start = torch.cat([log_sum[:, None], M[-1, :, :-1]], 1).cummax(1)[0]
    torch.maximum(M, start, out=M)
    base = M.clamp(min=torch.finfo(M.dtype).min)  # This avoids inf - inf.
    fade = torch.cat([start[None], M[:-1]]).sub_(base).exp_()
    new = K.sub_(base).exp_()
    sums = new.new_empty(len(new), 2, *new.shape[1:])
    sums[:, 0] = new
    torch.mul(new, V, out=sums[:, 1])
    _recur(fade.clone(), sums, torch.stack([torch.ones_like(mean), mean]))
    return [M, fade, new, *sums.unbind(1), V]


def _recur(fade: Tensor, sums: Tensor, start: Tensor | None, order: int = 1) -> None:
    r"""Compute $x_t = g_t\, x_{t-1} + u_t$ in two levels, in place.

    About $\sqrt T$ segments are computed side by side, and then joined one after
    another: $2\sqrt T$ operations on long vectors instead of $T$ on short vectors. No
    $g$ is above 1. Products of $g$ underflow only where their terms are negligible.

    - `fade`: $g$, `[steps, batch, segments, channels]`; becomes its products.
    - `sums`: $u$, `[steps, parts, batch, segments, channels]`; becomes $x$.
    - `start`: $x_0$ of each part, `[parts, batch, channels]`; None = 0.
    - `order`: -1 = from the last step to the first.
    """
    g, x = fade.unbind()[::order], sums.unbind()[::order]
    for i in range(1, len(x)):
        x[i].addcmul_(g[i], x[i - 1])
        g[i].mul_(g[i - 1])
    before = torch.empty_like(x[0])
    joined = before.unbind(2)[::order]
    joined[0].zero_() if start is None else joined[0].copy_(start)
    ends = zip(x[-1].unbind(2)[::order], g[-1].unbind(1)[::order], strict=True)
    for (end, kept), old, now in zip(ends, joined, joined[1:], strict=False):
        torch.addcmul(end, kept, old, out=now)
    sums.addcmul_(fade[:, None], before)


def _backward(x: Any, kept: Any, gradients: Any, needed: Any) -> Any:
    r"""Recompute the running means, and return the gradients of all inputs.

    Step $t'$ has the weight $e^{K_{t'} - L_t}$ in row $t$. The sums of its gradients
    over all later rows are a recurrence that runs backward. Multiplied by $e^{M_t}$,

    $$a_t = \frac{dm_t}{s_t} + e^{M_t - M_{t+1}} a_{t+1}, \quad
      b_t = \frac{m_t\, dm_t - dL_t}{s_t} + e^{M_t - M_{t+1}} b_{t+1} \tag{e3}$$
    $$dV_t = e^{K_t - M_t} a_t, \qquad
      dK_t = e^{K_t - M_t} (V_t\, a_t - b_t) \tag{e4}$$

    The initial state gets its gradients as one more step.
    """
    k, v, log_sum, mean, q = x
    time, dq = k.shape[1], None
    _, fade, new, s, total, V = _sums(k, v, log_sum, mean)
    inverse = s.reciprocal().masked_fill_(s == 0, 0)
    m = total.mul_(inverse)
    if q is None:
        dL, dm = (None if d is None else _cut(d, 0) for d in gradients)
        dm = torch.zeros_like(m) if dm is None else dm
    else:
        dy, dL_end, dm_end = gradients
        dm, dL = torch.zeros_like(m), None
        if dy is not None:
            gate = torch.sigmoid(q)
            dy = dy * gate
            dm = _cut(dy, 0)
            dq = (1 - gate).mul_(dy).mul_(_join(m, time))
        if dm_end is not None:
            dm[-1, :, -1] += dm_end
        if dL_end is not None:
            dL = torch.zeros_like(m)
            dL[-1, :, -1] = dL_end
    slopes = dm.new_empty(len(m), 2, *m.shape[1:])
    torch.mul(dm, inverse, out=slopes[:, 0])
    torch.mul(slopes[:, 0], m, out=slopes[:, 1])
    if dL is not None:
        slopes[:, 1] -= dL * inverse
    later = torch.cat([fade[1:], fade.roll(-1, 2)[:1]])  # Use the factor of step t + 1.
    _recur(later, slopes, None, -1)  # (e3)
    a, b = slopes.unbind(1)
    first = fade[0, :, 0]
    dmean = first * a[0, :, 0]
    dlog_sum = mean * dmean - first * b[0, :, 0]
    dv = a.mul_(new)
    dk = b.mul_(new).neg_().addcmul_(dv, V)  # (e4)
    return _join(dk, time), _join(dv, time), dlog_sum, dmean, dq


def _shapes(x: Any, keep: bool) -> Any:
    """Return empty tensors with the shapes of the results of the forward pass."""
    k, v, log_sum, mean, q = x
    return [
        torch.empty_like(part) for part in ([k, v] if q is None else [q, log_sum, mean])
    ], ()


_scan = Recurrence(
    "aft_running_mean",
    "Tensor k, Tensor v, Tensor log_sum, Tensor mean, Tensor? q",
    "",
    _forward,
    _backward,
    _shapes,
)


def _cut(x: Tensor, fill: float) -> Tensor:
    r"""Split `x` into about $\sqrt T$ segments, `[steps, batch, segments, channels]`.

    Step i of all segments is contiguous; the last segment is padded with `fill`.
    """
    batch, time, channels = x.shape
    length = max(math.isqrt(time), 1)
    n = -(-time // length)
    out = x.new_empty(length, batch, n, channels)
    whole, ragged = (n - 1) * length, time - (n - 1) * length
    out[:, :, :-1] = x[:, :whole].unflatten(1, (n - 1, length)).permute(2, 0, 1, 3)
    out[:ragged, :, -1] = x[:, whole:].transpose(0, 1)
    out[ragged:, :, -1] = fill
    return out


def _join(x: Tensor, time: int) -> Tensor:
    """Concatenate segments to `[batch, time, channels]`, the inverse of `_cut`."""
    x = x.permute(1, 2, 0, 3)
    return x.clone(memory_format=torch.contiguous_format).flatten(1, 2)[:, :time]


def _positive(s: Tensor) -> Tensor:
    """Replace sums of 0, where no key is seen yet, by 1."""
    return s.masked_fill(s == 0, 1)
