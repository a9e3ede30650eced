r"""Split sequences into chunks, join chunks, and compute products of decays.

When step $i$ of a chunk reads, what step $j$ wrote has decayed by $\Gamma_{ij}$, and
the state before the chunk by $\gamma_i$:

$$\gamma_i = \prod_{m \le i} d_m, \qquad \Gamma_{ij} = \prod_{j < m \le i} d_m$$

They are computed without quotients and without differences of logarithms that may be
infinite: a decay of 0 is allowed, and exact.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

#: The number of steps per chunk, a power of two.
CHUNK = 32
#: Number of rows (steps of all heads) computed together: few enough for the caches of
#: a CPU, and enough to use all of another device.
ROWS = {"cpu": 3072}
ROWS_ELSEWHERE = 65536


def plan(x: Tensor) -> tuple[int, list[tuple[slice, int]]]:
    """Return the chunk size and, per group of chunks, its steps and number of chunks.

    - `x`: `[batch, time, heads, width]`.
    """
    batch, time, heads, _ = x.shape
    chunk = min(CHUNK, 1 << (time - 1).bit_length())
    rows = ROWS.get(x.device.type, ROWS_ELSEWHERE)
    length = max(rows // max(batch * heads * chunk, 1), 1) * chunk
    ends = ((i, min(i + length, time)) for i in range(0, time, length))
    return chunk, [(slice(a, b), -(-(b - a) // chunk)) for a, b in ends]


def cut(
    x: Tensor, steps: slice, chunk: int, dtype: torch.dtype, fill: float = 0
) -> Tensor:
    """Split steps of `[batch, time, heads, width]` into chunks `[n, C, width]`.

    The first dimension of the result is chunks x batch x heads. A short last chunk is
    padded: a key of 0 writes nothing, and a decay of 1 forgets nothing.
    """
    x = x.detach()[:, steps]
    if missing := -x.shape[1] % chunk:
        x = F.pad(x, (0, 0, 0, 0, 0, missing), value=fill)
    return x.unflatten(1, (-1, chunk)).permute(1, 0, 3, 2, 4).flatten(0, 2).to(dtype)


def join(x: Tensor, out: Tensor, steps: slice, chunk: int) -> None:
    """Copy chunks `[n, C, width]` to steps of a tensor: the inverse of `cut`."""
    out = out[:, steps]
    batch, time, heads, _ = out.shape
    x = x.unflatten(0, (-1, batch, heads)).permute(1, 0, 3, 2, 4)
    full = time // chunk
    if full:
        out[:, : full * chunk].unflatten(1, (full, chunk)).copy_(x[:, :full])
    if full * chunk < time:
        out[:, full * chunk :] = x[:, full, : time - full * chunk]


def fade(
    rows: list[Tensor], k: Tensor, decay: Tensor | None, early: bool = False
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor | None]:
    r"""Apply the decays within chunks to keys, queries and erase keys.

    - `rows`: the queries, and perhaps the erase keys, `[n, C, key]`. With `early`, the
      erase keys read before the decay of their own step.
    - `decay`: `[n, C, 1 or key]`; None = 1.
    - Returns the products of rows with the keys up to their own step, `[n, C, C]`; the
      rows that read the state before the chunk, $\gamma R$; the keys in the state after
      it, $\Gamma_C K$; and the decay of the state, $\gamma_C$ `[n, 1, 1 or key]`.
    """
    if decay is None:
        causal = k.new_ones(k.shape[1], k.shape[1]).tril()
        return [(row @ k.mT).mul_(causal) for row in rows], rows, k, None
    if decay.shape[-1] > 1 or early:
        return fade_channels(rows, k, decay, early)
    products: Any = DecayProducts.apply(decay)
    between, since_start = products[:, 1:, 1:], products[:, 1:, :1]
    until_end, kept = products[:, -1:, 1:].mT, products[:, -1:, :1]
    scores = [row @ k.mT * between for row in rows]
    return scores, [row * since_start for row in rows], k * until_end, kept


class DecayProducts(torch.autograd.Function):
    r"""Compute products of decays, $P_{ij} = d_{j+1} \cdots d_i$ and 0 for $i < j$.

    $P$ is `[n, C + 1, C + 1]`: row and column 0 are the state before the chunk. A decay
    of 0 is exact: its logarithm is clamped to a number with the exponential 0, and the
    gradient of $d_t$, $\sum_{ij} dP_{ij} P_{it} P_{t-1,j}$, has no division.
    """

    @staticmethod
    def forward(decay: Tensor) -> Tensor:
        wide = torch.float32 if decay.device.type == "mps" else torch.float64
        decay = decay.squeeze(-1)
        total = decay.to(wide).abs().log().clamp(min=-750).cumsum(-1)
        total = F.pad(total, (1, 0))
        products = (total[:, :, None] - total[:, None]).to(decay.dtype).exp().tril()
        if not decay.is_cpu or (decay < 0).any():  # 1 - beta may be negative.
            signs = torch.where(decay < 0, -1, 1).to(decay.dtype).cumprod(-1)
            signs = F.pad(signs, (1, 0), value=1)
            products *= signs[:, :, None] * signs[:, None]
        return products

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, products: Tensor) -> None:
        ctx.save_for_backward(products)

    @staticmethod
    def backward(ctx: Any, d_products: Tensor) -> Tensor:
        (products,) = ctx.saved_tensors
        met = (products.mT @ d_products)[:, 1:] * products[:, :-1]
        return met.sum(-1, keepdim=True)


def fade_channels(
    rows: list[Tensor], k: Tensor, decay: Tensor, early: bool
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """Apply decays per key channel, as `fade` does per head, by merging blocks.

    It starts with blocks of one step, `[n, C blocks, 1 step, key]`. Where two blocks
    are merged, the rows of the second, decayed since the border, read the keys of the
    first, decayed until the border.
    """

    def pairs(blocks: Tensor) -> Any:
        return blocks.unflatten(1, (-1, 2)).unbind(2)

    scores = [(row * k).sum(-1)[..., None, None] for row in rows]
    reads = [row if early and i else row * decay for i, row in enumerate(rows)]
    reads = [row[:, :, None] for row in reads]
    write, kept = k[:, :, None], decay[:, :, None]
    while kept.shape[1] > 1:
        (write_1, write_2), (kept_1, kept_2) = pairs(write), pairs(kept)
        for i, (read, score) in enumerate(zip(reads, scores, strict=True)):
            (read_1, read_2), (score_1, score_2) = pairs(read), pairs(score)
            above = F.pad(score_1, (0, score_1.shape[-1]))
            below = torch.cat([read_2 @ write_1.mT, score_2], -1)
            scores[i] = torch.cat([above, below], -2)
            reads[i] = torch.cat([read_1, read_2 * kept_1], -2)
        write = torch.cat([write_1 * kept_2, write_2], -2)
        kept = kept_1 * kept_2
    scores, reads = ([x[:, 0] for x in parts] for parts in (scores, reads))
    return scores, reads, write[:, 0], kept[:, 0]
