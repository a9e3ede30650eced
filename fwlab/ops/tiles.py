"""Blocks of numbers in the small memory of a GPU.

What the kernels of the fast weight rules have in common: a chunk of C
steps of one head is loaded as a block `[C, columns]`, and products of
blocks stay there. The arguments of all loads: `here`, the row of the
chunk's first step in a tensor `[batch, time, heads, width]`; `t`, the
places 0 to C - 1; `rest`, how many steps there are from `here` on.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rows(
    x, here, t, rest, heads, first,
    width: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """`[C, B]`: steps `t` of a head, columns from `first`; else 0."""
    column = first + tl.arange(0, B)
    inside = (t < rest)[:, None] & (column < width)[None, :]
    return tl.load(
        x + here * width + _places(t, heads, column, width),
        mask=inside,
        other=0.0,
    )


@triton.jit
def put_rows(
    x, value, here, t, rest, heads, first,
    width: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """The way back."""
    column = first + tl.arange(0, B)
    inside = (t < rest)[:, None] & (column < width)[None, :]
    where = x + here * width + _places(t, heads, column, width)
    tl.store(where, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _places(t, heads, column, width: tl.constexpr):
    return t[:, None] * (heads * width) + column[None, :]


@triton.jit
def numbers(x, here, t, rest, heads, empty):
    """`[C]`: one number per step; `empty` past the end."""
    if x is None:
        value = tl.full(t.shape, 1.0, tl.float32)
    else:
        where = x + here + t * heads
        value = tl.load(where, mask=t < rest, other=empty).to(
            tl.float32
        )
    return value


@triton.jit
def put_numbers(x, value, here, t, rest, heads):
    tl.store(x + here + t * heads, value, mask=t < rest)


@triton.jit
def features(
    x, total, here, t, rest, heads, first,
    K: tl.constexpr, B: tl.constexpr, NU: tl.constexpr,
):  # fmt: skip
    r"""`[C, B]` features: as they are, or DPFP made on the way in.

    With `NU` > 0, `x` holds keys of width $d = K / 2\nu$, and feature
    $c$ is a product of two entries of $r = \mathrm{ReLU}([x; -x])$
    (Eq. 37): only $d$ numbers are read in place of $2 d \nu$. `total`,
    if given, is what Eq. 29 divides by.
    """
    if NU == 0:
        phi = rows(x, here, t, rest, heads, first, K, B)
    else:
        D: tl.constexpr = K // (2 * NU)
        c = first + tl.arange(0, B)
        i, j = _pair(c, D)
        phi = _half(x, here, t, rest, heads, i, c < K, D)
        phi *= _half(x, here, t, rest, heads, j, c < K, D)
        if total is not None:
            s = numbers(total, here, t, rest, heads, 0.0)
            phi *= inverse_of(s)[:, None]
    return phi


@triton.jit
def _pair(c, D: tl.constexpr):
    i = c % (2 * D)
    return i, (i + c // (2 * D) + 1) % (2 * D)


@triton.jit
def _half(x, here, t, rest, heads, i, inside, D: tl.constexpr):
    """Entries `i` of `ReLU([x; -x])`."""
    inside = (t < rest)[:, None] & inside[None, :]
    r = tl.load(
        x + here * D + _places(t, heads, i % D, D),
        mask=inside,
        other=0.0,
    ).to(tl.float32)
    return tl.maximum(tl.where((i < D)[None, :], r, -r), 0.0)


@triton.jit
def features_backward(
    dphi, x, here, t, rest, heads, first,
    K: tl.constexpr, B: tl.constexpr, NU: tl.constexpr,
    BD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`[C, BD]`: the gradient of `x` through DPFP, of these features.

    Feature c belongs to the entries i and j of x. To bring it there is
    a product with a matrix of zeros and signs.
    """
    D: tl.constexpr = K // (2 * NU)
    c = first + tl.arange(0, B)
    column = tl.arange(0, BD)
    i, j = _pair(c, D)
    a = _half(x, here, t, rest, heads, i, c < K, D)
    b = _half(x, here, t, rest, heads, j, c < K, D)
    to_i = tl.where((i % D)[:, None] == column[None, :], 1.0, 0.0)
    to_j = tl.where((j % D)[:, None] == column[None, :], 1.0, 0.0)
    to_i = tl.where((i < D)[:, None], to_i, -to_i)
    to_j = tl.where((j < D)[:, None], to_j, -to_j)
    dx = tl.dot(
        tl.where(a > 0, dphi * b, 0.0), to_i, input_precision=PRECISION
    )
    return dx + tl.dot(
        tl.where(b > 0, dphi * a, 0.0), to_j, input_precision=PRECISION
    )


@triton.jit
def product(a, b, TYPE: tl.constexpr, PRECISION: tl.constexpr):
    """A matrix product of numbers of `TYPE`, summed in float32."""
    return tl.dot(a.to(TYPE), b.to(TYPE), input_precision=PRECISION)


@triton.jit
def fading(d, C: tl.constexpr):
    r"""$\Gamma$, `[C, C]`, with zeros above the diagonal."""
    i = tl.arange(0, C)
    one = tl.full([C, C], 1.0, tl.float32)
    below = i[:, None] > i[None, :]
    gamma = tl.cumprod(tl.where(below, one * d[:, None], 1.0), 0)
    return tl.where(i[:, None] >= i[None, :], gamma, 0.0)


@triton.jit
def seen(C: tl.constexpr):
    i = tl.arange(0, C)
    return tl.where(i[:, None] >= i[None, :], 1.0, 0.0)


@triton.jit
def last_row(x, C: tl.constexpr):
    i = tl.arange(0, C)
    return tl.sum(tl.where((i == C - 1)[:, None], x, 0.0), 0)


@triton.jit
def last(x, C: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, C) == C - 1, x, 0.0), 0)


@triton.jit
def inverse_of(x):
    """1 / x, and 0 for 0."""
    return tl.where(x == 0, 0.0, 1.0 / tl.where(x == 0, 1.0, x))


@triton.jit
def tile(
    first,
    left_of,
    V: tl.constexpr,
    K: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
):
    """Places in a state `[V, K]`, and which of them there are."""
    value, key = first + tl.arange(0, BV), left_of + tl.arange(0, BK)
    at = value[:, None] * K + key[None, :]
    return at, (value < V)[:, None] & (key < K)[None, :]


def power(width: int) -> int:
    """The least power of two that holds it, for a matrix product."""
    return max(triton.next_power_of_2(width), 16)


def precision(dtype: torch.dtype) -> str:
    """Of products of float32 numbers. Three products of their halves
    give float32's own precision; half-precision inputs need one.
    """
    return "tf32x3" if dtype == torch.float32 else "tf32"


def one_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Kernels multiply what is alike; mixed inputs become float32."""
    if len({x.dtype for x in tensors}) == 1:
        return tensors
    return tuple(x.float() for x in tensors)


def per_head(gate: Tensor | None) -> Tensor | None:
    """`[batch, time, heads, 1]` as the kernels count it."""
    return None if gate is None else gate[..., 0]


def contiguous(*tensors: Tensor | None) -> Any:
    """Rows next to each other, as the kernels count them."""
    return tuple(x if x is None else x.contiguous() for x in tensors)
