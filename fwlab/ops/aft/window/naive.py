r"""# AFT-local and AFT-conv, row by row

Both are AFT-full with a special bias: $w$ inside a window, and 0 outside.

$$w_{t,t'} \leftarrow w_{t,t'} \text{ if } |t - t'| < s,
  \text{ else } 0 \tag{4}$$

A step outside the window still counts, by its key alone. In AFT-conv (Eq. 6) there is
one $w$ per head, and it depends only on $t - t'$. Equation numbers are those of [Zhai
et al. 2021](https://arxiv.org/abs/2105.14103).
"""

import torch
from torch import Tensor

from fwlab.ops.aft.full.naive import gated_means, mean_of


def biases(w: Tensor, at: Tensor, channels: int) -> Tensor:
    r"""Return the biases $w_{t,t'}$ of one row $t$, for all keys and channels.

    - `w`: `[groups, columns]`, one column per distance; each group of neighbouring
      channels shares a row of it.
    - `at`: `bool [keys, columns]`, True if a key is at this distance. A key outside the
      window has no column.
    - Returns `[keys, channels]`.
    """
    w = torch.where(at, w[:, None], 0).sum(-1)  # Eq. 4
    return w.T.repeat_interleave(channels // len(w), 1)


def causal(
    q: Tensor, k: Tensor, v: Tensor, band: Tensor, log_sum: Tensor, mean: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    r"""Compute causal AFT-local or AFT-conv; row $t$ sees the steps up to $t$.

    - `q`: `[batch, time, channels]`.
    - `k`, `v`: `[batch, s - 1 + time, channels]`, beginning with the $s - 1$ steps
      before this call.
    - `band`: `[groups, time or 1, s]`; column $j$ is $j$ steps back.
    - `log_sum`, `mean`: `[batch, channels]`, the running mean of all older steps. It
      acts as one more key, outside of every window.
    - Returns `y`, and the running mean of all steps that the next call will count as
      older.
    """
    time, channels, s = q.shape[1], q.shape[2], band.shape[-1]
    k = torch.cat([log_sum[:, None], k], 1)
    v = torch.cat([mean[:, None], v], 1)
    steps = torch.arange(-s, time, device=q.device)
    back = torch.arange(s, device=q.device)
    rows = (
        biases(w_t, t - steps[: s + t + 1, None] == back, channels)
        for t, w_t in enumerate(band.expand(-1, time, -1).unbind(1))
    )
    y = gated_means(q, k, v, rows)
    older, values = k[:, : time + 1], v[:, : time + 1]
    empty = (older == -torch.inf).all(1)
    total = torch.logsumexp(torch.where(empty[:, None], 0, older), 1)
    log_sum = torch.where(empty, -torch.inf, total)
    return y, log_sum, mean_of(older, values, torch.zeros_like(older[0]))


def not_causal(q: Tensor, k: Tensor, v: Tensor, band: Tensor) -> Tensor:
    r"""Compute AFT-local or AFT-conv without a causal mask; rows see all steps.

    - `q`, `k`, `v`: `[batch, time, channels]`.
    - `band`: `[groups, time or 1, 2 * s - 1]`; column $j < s$ is $j$ steps back, and
      the other columns are 1, 2, … steps ahead.
    """
    time, channels, s = q.shape[1], q.shape[2], band.shape[-1] // 2 + 1
    steps = torch.arange(time, device=q.device)
    back = torch.cat([torch.arange(s), -torch.arange(1, s)])
    back = back.to(q.device)
    rows = (
        biases(w_t, t - steps[:, None] == back, channels)
        for t, w_t in enumerate(band.expand(-1, time, -1).unbind(1))
    )
    return gated_means(q, k, v, rows)


def image(
    q: Tensor, k: Tensor, v: Tensor, kernel: Tensor, height: int, width: int,
) -> Tensor:  # fmt: skip
    r"""Compute AFT-conv of an image; every pixel sees all pixels.

    $w$ of two pixels is the entry of the kernel at their offset from its middle, and 0
    beyond its edge (Eq. 6).

    - `q`, `k`, `v`: `[batch, height * width, channels]`.
    - `kernel`: `[heads, size, size]`.
    """
    channels, half = q.shape[2], kernel.shape[-1] // 2
    pixels = torch.cartesian_prod(torch.arange(height), torch.arange(width)).to(
        q.device
    )
    side = torch.arange(-half, half + 1)
    offsets = torch.cartesian_prod(side, side).to(q.device)
    rows = (
        biases(
            kernel.flatten(1), ((pixels - pixel)[:, None] == offsets).all(-1), channels
        )
        for pixel in pixels
    )
    return gated_means(q, k, v, rows)
