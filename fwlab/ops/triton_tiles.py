"""Load, store and multiply tiles of matrices in Triton kernels.

The kernels of all fast weight rules share this code: a program loads a chunk of C
steps of one head as a tile `[C, columns]`, and products of tiles stay in registers. All
loads take `origin`, the row of the chunk's first step in a tensor `[batch, time, heads,
width]`; `t`, the indices 0 to C - 1 of its steps; and `remaining`, the number of steps
from `origin` to the end of the sequence.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def this_chunk(time, heads, programs, C: tl.constexpr):
    """Return the index and first row of a program's chunk, and the remaining steps.

    - `programs`: the number of heads of all sequences.
    """
    index = tl.program_id(0).to(tl.int64)
    program, n = index % programs, index // programs
    start = program // heads * time * heads + program % heads
    return index, start + n * C * heads, (time - n * C).to(tl.int32)


@triton.jit
def rows(
    x, origin, t, remaining, heads, first, width: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Load steps `t` of a head as a tile `[C, B]`, from column `first` on.

    Entries outside of the tensor are 0.
    """
    column = first + tl.arange(0, B)
    inside = (t < remaining)[:, None] & (column < width)[None, :]
    return tl.load(
        x + origin * width + _offsets(t, heads, column, width), mask=inside, other=0.0
    )


@triton.jit
def put_rows(
    x, value, origin, t, remaining, heads, first, width: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Store a tile `[C, B]` at the addresses that `rows` loads."""
    column = first + tl.arange(0, B)
    inside = (t < remaining)[:, None] & (column < width)[None, :]
    where = x + origin * width + _offsets(t, heads, column, width)
    tl.store(where, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _offsets(t, heads, column, width: tl.constexpr):
    """Return the offsets of columns of the steps `t`, relative to `origin`."""
    return t[:, None] * (heads * width) + column[None, :]


@triton.jit
def scalars(x, origin, t, remaining, heads, empty):
    """Load one scalar per step, `[C]`, with the value `empty` past the end.

    Without a tensor, all scalars are 1.
    """
    if x is None:
        value = tl.full(t.shape, 1.0, tl.float32)
    else:
        where = x + origin + t * heads
        value = tl.load(where, mask=t < remaining, other=empty).to(tl.float32)
    return value


@triton.jit
def put_scalars(x, value, origin, t, remaining, heads):
    """Store one scalar per step, `[C]`, at the addresses that `scalars` loads."""
    tl.store(x + origin + t * heads, value, mask=t < remaining)


@triton.jit
def product(a, b, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply matrices in `TYPE`, with sums in float32."""
    return tl.dot(a.to(TYPE), b.to(TYPE), input_precision=PRECISION)


@triton.jit
def row_products(a, b, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    """Compute the dot products of the rows of `a` and `b` in `TYPE`, `[M, N]`.

    Wide rows are split into pieces of 64 columns, one for each warp: in one product,
    every warp would load all of both factors.
    """
    M: tl.constexpr = a.shape[0]
    N: tl.constexpr = b.shape[0]
    K: tl.constexpr = a.shape[1]
    if K <= 128:
        out = product(a, tl.trans(b), TYPE, PRECISION)
    else:
        a = tl.reshape(a.to(TYPE), [M, K // 64, 64])
        b = tl.reshape(b.to(TYPE), [N, K // 64, 64])
        out = tl.dot(
            tl.permute(a, (1, 0, 2)),
            tl.permute(b, (1, 2, 0)),
            input_precision=PRECISION,
        )
        out = tl.sum(out, 0)
    return out


@triton.jit
def split(x):
    r"""Split $x = f\, 2^p$ exactly, with $|f|$ from 1 to 2 and an integer $p$.

    0 becomes $2^{-1000}$, which underflows to 0 in any product.
    """
    bits = x.to(tl.int32, bitcast=True)
    p = (bits >> 23) & 255
    none = p == 0  # A subnormal number counts as 0.
    f = (bits & -0x7F800001) | 0x3F800000
    f = tl.where(none, 1.0, f.to(tl.float32, bitcast=True))
    return f, tl.where(none, -1000, p - 127)


@triton.jit
def put_decays(
    decay, gammas, products, index, origin, t, remaining, heads, C: tl.constexpr,
):  # fmt: skip
    r"""Compute and store the products of decays of a chunk; return $\Gamma$.

    $\Gamma_{ij} = \gamma_i / \gamma_j$ is a quotient of numbers $f\, 2^p$ with integer
    exponents: a decay may be 0, and a strong decay does not make later decays less
    precise. All other kernels load $\Gamma$, since recomputing it takes longer.
    """
    d = scalars(decay, origin, t, remaining, heads, 1.0)
    f, p = split(d)
    f, more = split(tl.cumprod(f, 0))
    p = (tl.cumsum(p, 0) + more).to(tl.float32)
    gamma = f * tl.exp2(p)
    put_scalars(gammas, gamma, origin, t, remaining, heads)
    causal = t[:, None] >= t[None, :]
    G = tl.where(causal, p[:, None] - p[None, :], -1000.0)
    G = f[:, None] * (1.0 / f)[None, :] * tl.exp2(G)
    at = products + index * C * C + t[:, None] * C + t[None, :]
    tl.store(at, G.to(products.dtype.element_ty))
    return G


@triton.jit
def decays(
    gammas, products, index, origin, t, remaining, heads, C: tl.constexpr,
):  # fmt: skip
    r"""Load decay products: $\gamma$, $\Gamma$, the last row of $\Gamma$, $\gamma_C$.

    The shapes are `[C]` and `[C, C]`. Without `gammas` and `products`, no step decays.
    """
    # Past the end of the sequence, the product does not change.
    inside = tl.minimum(t, remaining - 1)
    gamma = scalars(gammas, origin, inside, remaining, heads, 1.0)
    if products is None:
        G, fade = causal_mask(C), tl.full([C], 1.0, tl.float32)
        last = 1.0
    else:
        first = products + index * C * C
        at = t[:, None] * C + t[None, :]
        G = tl.load(first + at).to(tl.float32)
        fade = tl.load(first + (C - 1) * C + t).to(tl.float32)
        end = tl.minimum(C, remaining).to(tl.int64) - 1
        last = tl.load(gammas + origin + end * heads).to(tl.float32)
    return gamma, G, fade, last


@triton.jit
def causal_mask(C: tl.constexpr):
    """Return a causal mask `[C, C]`: 1 on and below the diagonal, and 0 above."""
    i = tl.arange(0, C)
    return tl.where(i[:, None] >= i[None, :], 1.0, 0.0)


@triton.jit
def reciprocal(x):
    """Return 1 / x, or 0 where x is 0."""
    return tl.where(x == 0, 0.0, 1.0 / tl.where(x == 0, 1.0, x))


@triton.jit
def state_tile(
    first, first_key, V: tl.constexpr, K: tl.constexpr,
    BV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return the offsets of a tile in a state `[V, K]`, and a mask of valid entries.

    The tile begins at row `first` and column `first_key`.
    """
    value, key = first + tl.arange(0, BV), first_key + tl.arange(0, BK)
    at = value[:, None] * K + key[None, :]
    return at, (value < V)[:, None] & (key < K)[None, :]


def count(length: int, size: int) -> int:
    """Return the number of tiles of `size` entries that cover `length` entries."""
    return -(-length // size)


def padded_width(width: int) -> int:
    """Round `width` up to a power of two, at least 16.

    Triton's matrix product needs such a width.
    """
    return max(1 << (int(width) - 1).bit_length(), 16)


def precision(dtype: torch.dtype) -> str:
    """Return the `input_precision` of Triton's matrix product for a dtype.

    For float32, the sum of three products in TF32 has the precision of float32. For
    half precision, one product is enough.
    """
    return "tf32x3" if dtype == torch.float32 else "tf32"


def one_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert tensors to float32, unless all have the same dtype.

    Both factors of a product in a kernel have the same dtype.
    """
    if len({x.dtype for x in tensors}) == 1:
        return tensors
    return tuple(x.float() for x in tensors)


def per_head(gate: Tensor | None) -> Tensor | None:
    """Squeeze a gate `[batch, time, heads, 1]` to `[batch, time, heads]`."""
    return None if gate is None else gate.squeeze(-1)


def contiguous(*tensors: Tensor | None) -> Any:
    """Make all tensors contiguous, as the kernels require; None stays None."""
    return tuple(x if x is None else x.contiguous() for x in tensors)
