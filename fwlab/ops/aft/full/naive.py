r"""# AFT-full, row by row

AFT compares no query with a key. Row $t$ has a weight for each step that it may see,
and a different one for each channel: a softmax over the keys $K$ plus a learned bias
$w$ of the two positions. The query only gates the result. Equation numbers are those of
[Zhai et al. 2021](https://arxiv.org/abs/2105.14103).
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def mean_of(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    r"""Return the weighted mean of the values that one row sees.

    $$\frac{\sum_{t'} \exp(K_{t'} + w_{t,t'}) \odot V_{t'}}
           {\sum_{t'} \exp(K_{t'} + w_{t,t'})} \tag{2}$$

    The quotient is a softmax over $K + w$, which subtracts the maximum of $K + w$ *in
    this row*: a key that the row does not see has no influence. It is exact wherever $K
    + w$ is finite. A row that sees nothing is 0.

    - `k`, `v`: `[batch, keys, channels]`; a key of $-\infty$ is not seen.
    - `w`: `[keys, 1 or channels]`.
    """
    exponent = k + w
    empty = (exponent == -torch.inf).all(1, keepdim=True)
    exponent = torch.where(empty, 0, exponent)  # This avoids inf - inf.
    weights = torch.softmax(exponent, dim=1)  # Eq. 3
    mean = (weights * v).sum(1)  # Eq. 2
    return torch.where(empty[:, 0], 0, mean)


def gated_means(q: Tensor, k: Tensor, v: Tensor, w: Iterable[Tensor]) -> Tensor:
    """Compute AFT row by row: gate the mean of the values that each row sees.

    - `q`: `[batch, time, channels]`, `k`, `v`: the same with all keys.
    - `w`: the biases of each row, `[keys, 1 or channels]`, for the keys that it sees.
    """
    y = []
    for q_t, w_t in zip(q.unbind(1), w, strict=True):
        seen = len(w_t)
        m = mean_of(k[:, :seen], v[:, :seen], w_t)
        y.append(torch.sigmoid(q_t) * m)  # Eq. 2
    return torch.stack(y, dim=1)


def aft_full(q: Tensor, k: Tensor, v: Tensor, w: Tensor, causal: bool) -> Tensor:
    r"""Compute AFT-full; row $t$ sees all steps or, if `causal`, the steps up to $t$.

    - `q`: `[batch, time, channels]`.
    - `k`, `v`: `[batch, past + time, channels]`, first the steps of earlier calls.
    - `w`: `[time, past + time]`.
    """
    past = k.shape[1] - q.shape[1]
    rows = [w_t[: past + t + 1] if causal else w_t for t, w_t in enumerate(w)]
    return gated_means(q, k, v, (w_t[:, None] for w_t in rows))
