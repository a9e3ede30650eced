r"""# The Attention Free Transformer, row by row

No queries meet keys here. Every step $t$ has one row of weights over
the steps that it may see, for each channel its own: a softmax over the
keys $K$ and a learned bias $w$ of position. The query only gates what
comes out. Equation numbers are those of
[Zhai et al. 2021](https://arxiv.org/abs/2105.14103).
"""

import torch
from torch import Tensor


def mean_of(k: Tensor, v: Tensor, w: Tensor | float) -> Tensor:
    r"""One row: the mean of the values it sees, weighed per channel:

    $$\frac{\sum_{t'} \exp(K_{t'} + w_{t,t'}) \odot V_{t'}}
           {\sum_{t'} \exp(K_{t'} + w_{t,t'})} \tag{2}$$

    The quotient is a softmax over $K + w$, which subtracts the largest
    exponent *of this row*: no key that the row does not see has a say.
    It is exact wherever $K + w$ is finite. A row that sees nothing is
    0.

    - `k`, `v`: `[batch, keys, channels]`; a key of $-\infty$ is not
      seen.
    - `w`: `[keys, 1]` or `[keys, channels]`.
    """
    if k.shape[1] == 0:
        return v.sum(1)
    exponent = k + w
    empty = (exponent == -torch.inf).all(1, keepdim=True)
    # An empty row becomes zeros, whose weights are then unseen.
    exponent = torch.where(empty, 0, exponent)
    weights = torch.softmax(exponent, dim=1)  # Eq. 3
    mean = (weights * v).sum(1)  # Eq. 2
    return torch.where(empty[:, 0], 0, mean)


def running_step(
    log_sum: Tensor, mean: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Take one more step into a mean without biases (Eq. 5):

    $$L_t = \log\big(e^{L_{t-1}} + e^{K_t}\big), \qquad
      m_t = e^{L_{t-1} - L_t}\, m_{t-1} + e^{K_t - L_t}\, V_t
      \tag{n1}$$

    The larger of the two is subtracted before any exponential: none
    can overflow, and one of the two terms is 1. Empty is
    $(-\infty, 0)$.

    - `log_sum`, `mean`, `k`, `v`: `[batch, channels]`.
    """
    top = torch.maximum(log_sum, k).detach()
    top = torch.where(top == -torch.inf, 0, top)
    old, new = (log_sum - top).exp(), (k - top).exp()
    empty = old + new == 0
    total = torch.where(empty, 1, old + new)
    log_sum = torch.where(empty, -torch.inf, top + total.log())
    return log_sum, (old * mean + new * v) / total  # (n1)


def simple(
    q: Tensor, k: Tensor, v: Tensor, log_sum: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""AFT-simple, causal: no bias, so one running mean is enough.

    $$Y_t = \sigma(Q_t) \odot \sum_{t' \le t}
      \big(\mathrm{softmax}(K) \odot V\big)_{t'} \tag{5}$$

    - `q`, `k`, `v`: `[batch, time, channels]`.
    - `log_sum`, `mean`: `[batch, channels]`, of the steps before.
    """
    y = []
    for q_t, k_t, v_t in zip(
        q.unbind(1), k.unbind(1), v.unbind(1), strict=True
    ):
        log_sum, mean = running_step(log_sum, mean, k_t, v_t)
        y.append(torch.sigmoid(q_t) * mean)  # Eq. 5
    return torch.stack(y, dim=1), log_sum, mean


def rows(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, last: int | None
) -> Tensor:
    r"""AFT-full, and with its $w$ every other form: the mean of each
    row (Eq. 2), gated by $\sigma(Q_t)$.

    - `q`: `[batch, queries, channels]`, `k`, `v`: the same with `keys`.
    - `w`: `[groups, queries, keys]`; neighbouring channels share one.
    - `last`: step $t$ sees the keys up to $t$ + `last`; None: all.
    """
    w = w.repeat_interleave(q.shape[-1] // len(w), 0)
    y = []
    for t, (q_t, w_t) in enumerate(
        zip(q.unbind(1), w.unbind(1), strict=True)
    ):
        end = k.shape[1] if last is None else t + last + 1
        m = mean_of(k[:, :end], v[:, :end], w_t.T[:end])
        y.append(torch.sigmoid(q_t) * m)  # Eq. 2
    return torch.stack(y, dim=1)


def window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Tensor,
    log_sum: Tensor,
    mean: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""AFT-local and AFT-conv: full rows with a special $w$.

    $$w_{t,t'} \leftarrow w_{t,t'} \text{ if } |t - t'| < s,
      \text{ else } 0 \tag{4}$$

    Outside the window a step still counts, with bias 0. AFT-conv
    (Eq. 6) has one $w$ per head that depends on $t - t'$ alone.

    - `q`: `[batch, time, channels]`. `k`, `v`: the same; causal, with
      the $s - 1$ steps before in front.
    - `band`: `[groups, time or 1, window]`; columns are the steps back,
      then, not causal, those ahead.
    - `log_sum`, `mean`: `[batch, channels]`, the running mean of all
      that is older, which acts as one more key; returned as it is for
      the next call.
    """
    time, width = q.shape[1], band.shape[-1]
    keys = torch.arange(k.shape[1], device=q.device)
    back = torch.arange(time, device=q.device)[:, None] - keys
    back = back + (width - 1 if causal else 0)
    column = (
        back
        if causal
        else torch.where(back < 0, width // 2 - back, back)
    )
    inside = (column >= 0) & (column < width)
    inside = inside if causal else inside & (back.abs() <= width // 2)
    column = column.clamp(0, width - 1).expand(len(band), -1, -1)
    band = band.expand(-1, time, -1)
    w = torch.where(inside, band.gather(-1, column), 0)  # Eq. 4
    w = torch.nn.functional.pad(w, (1, 0))
    y = rows(
        q,
        torch.cat([log_sum[:, None], k], 1),
        torch.cat([mean[:, None], v], 1),
        w,
        width if causal else None,
    )
    if causal:
        for k_t, v_t in zip(
            k[:, :time].unbind(1), v[:, :time].unbind(1), strict=True
        ):
            log_sum, mean = running_step(log_sum, mean, k_t, v_t)
    return y, log_sum, mean


def image(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    height: int,
    width: int,
) -> Tensor:
    r"""AFT-conv of an image (Eq. 6): full rows once more.

    $w$ of two pixels is the entry of the kernel at their offset from
    its middle, and 0 beyond its edge.

    - `q`, `k`, `v`: `[batch, height * width, channels]`.
    - `kernel`: `[heads, size, size]`.
    """
    half = kernel.shape[-1] // 2
    y, x = torch.meshgrid(
        torch.arange(height, device=q.device),
        torch.arange(width, device=q.device),
        indexing="ij",
    )
    offsets = []
    for place in (y.flatten(), x.flatten()):
        offsets.append(place - place[:, None] + half)
    inside = torch.stack([(o >= 0) & (o <= 2 * half) for o in offsets])
    down, right = (o.clamp(0, 2 * half) for o in offsets)
    w = torch.where(inside.all(0), kernel[:, down, right], 0)  # Eq. 6
    return rows(q, k, v, w, None)
