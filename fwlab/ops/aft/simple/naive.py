r"""# AFT-simple, step by step

Without a position bias, every row weights the steps by their keys alone. Then a running
mean per channel is enough: each step enters it with the weight of its key, and the
query gates the result. Equation numbers are those of [Zhai et al.
2021](https://arxiv.org/abs/2105.14103).
"""

import torch
from torch import Tensor


def running_step(
    log_sum: Tensor, mean: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Add the value of one step to the running mean, weighted by its key.

    $$L_t = \log\big(e^{L_{t-1}} + e^{K_t}\big), \qquad
      m_t = e^{L_{t-1} - L_t}\, m_{t-1} + e^{K_t - L_t}\, V_t
      \tag{n1}$$

    The larger of the two exponents is subtracted first, so that no exponential
    overflows, and the larger one is 1. The empty mean is $(-\infty, 0)$.

    - `log_sum`, `mean`, `k`, `v`: `[batch, channels]`.
    """
    top = torch.maximum(log_sum, k).detach()
    top = torch.where(top == -torch.inf, 0, top)
    old, new = (log_sum - top).exp(), (k - top).exp()
    empty = old + new == 0
    total = torch.where(empty, 1, old + new)
    log_sum = torch.where(empty, -torch.inf, top + total.log())
    return log_sum, (old * mean + new * v) / total  # (n1)


def causal(
    q: Tensor, k: Tensor, v: Tensor, log_sum: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Compute causal AFT-simple; row $t$ sees the steps up to $t$.

    $$Y_t = \sigma(Q_t) \odot \sum_{t' \le t}
      \big(\mathrm{softmax}(K) \odot V\big)_{t'} \tag{5}$$

    - `q`, `k`, `v`: `[batch, time, channels]`.
    - `log_sum`, `mean`: `[batch, channels]`, the running mean of all earlier steps.
    """
    y = []
    for q_t, k_t, v_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
        log_sum, mean = running_step(log_sum, mean, k_t, v_t)
        y.append(torch.sigmoid(q_t) * mean)  # Eq. 5
    return torch.stack(y, dim=1), log_sum, mean


def not_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    r"""Compute AFT-simple without a causal mask: all queries gate the same mean.

    The mean is 0 if all keys of a sequence are $-\infty$.

    - `q`, `k`, `v`: `[batch, time, channels]`.
    """
    empty = (k == -torch.inf).all(1, keepdim=True)
    k = torch.where(empty, 0, k)  # This avoids inf - inf.
    mean = (torch.softmax(k, dim=1) * v).sum(1, keepdim=True)
    return torch.sigmoid(q) * torch.where(empty, 0, mean)  # Eq. 5
