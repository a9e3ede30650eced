r"""# The delta rules on a GPU

In chunks, a delta rule is a linear rule that writes *errors* instead of values, and
uses the kernels of the sum rule. What remains is the triangular system of the chunked
version, with $L = \mathrm{stril}(K K^\top) \odot \Gamma$:

$$(I + L \beta)\, E = V - \gamma K W^\top \tag{d4}$$

Its matrix does not depend on $W$, so the inverses $X$ of all chunks are computed side
by side, before any kernel loops over time.

Backward, the gradient of the right side of (d4), which is also the gradient of $V$,
solves the transposed system. What $K$ retrieves is subtracted, so it has the gradient
$-dV$, and its rows are appended to those of the queries:

$$dV = X^\top (\beta\, dU) \tag{d5}$$
$$dW = \gamma_C\, dW' + G^\top (\gamma Q) - dV^\top (\gamma K) \tag{d6}$$
$$dU \leftarrow dU - L^\top dV \tag{d7}$$
$$G \leftarrow \begin{pmatrix} G \\ -dV \end{pmatrix} \tag{d8}$$
"""

import triton
import triton.language as tl
from torch import Tensor

from fwlab.ops import _triton
from fwlab.ops._rules import Inputs
from fwlab.ops.linear.kernels import Form, recurrence
from fwlab.ops.triton_tiles import (
    causal_mask,
    count,
    one_precision,
    padded_width,
    per_head,
    precision,
    put_decays,
    row_products,
    rows,
    scalars,
    this_chunk,
)


@triton.jit
def joined(X, A, size: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """Merge pairs of inverted diagonal blocks of `size` rows (Eq. k1)."""
    i = tl.arange(0, C)
    pair = (i // (2 * size))[:, None] == (i // (2 * size))[None, :]
    same = (i // size)[:, None] == (i // size)[None, :]
    off = tl.where(pair & ~same, A, 0.0)
    off = tl.dot(off, X, input_precision=PRECISION)
    return X - tl.dot(X, off, input_precision=PRECISION)


@triton.jit
def inverse(A, C: tl.constexpr, PRECISION: tl.constexpr):
    r"""Invert $I + A$, for a strictly lower triangular $A$, `[C, C]`.

    The inverse of a block of size 2 is $I - A$. Neighbouring blocks are then merged,
    until there is one block:

    $$\begin{pmatrix} B_1 & \\ A_{21} & B_2 \end{pmatrix}^{-1} =
      \begin{pmatrix} X_1 & \\ -X_2 A_{21} X_1 & X_2 \end{pmatrix}
      \tag{k1}$$

    No power of $A$ is ever formed. So this is as stable as substitution, while a
    product of powers is not. Up to size 16, each warp merges separate blocks.
    """
    N: tl.constexpr = C // 16
    j = tl.arange(0, 16)
    b = tl.arange(0, N)
    diagonal = (b[:, None] == b[None, :])[:, None, :, None]
    D = tl.sum(tl.where(diagonal, tl.reshape(A, [N, 16, N, 16]), 0.0), 2)
    pair = (j // 2)[:, None] == (j // 2)[None, :]
    X = tl.where(j[:, None] == j[None, :], 1.0, tl.where(pair, -D, 0.0))
    X = joined(X, D, 2, 16, PRECISION)
    X = joined(X, D, 4, 16, PRECISION)
    X = joined(X, D, 8, 16, PRECISION)
    X = tl.reshape(tl.where(diagonal, X[:, :, None, :], 0.0), [C, C])
    if C > 16:
        X = joined(X, A, 16, C, PRECISION)
    if C > 32:
        X = joined(X, A, 32, C, PRECISION)
    return X


@triton.jit(do_not_specialize=["time", "heads", "programs"])
def prepare(
    k, decay, gammas, products, beta, X, time, heads, programs, K: tl.constexpr,
    BK: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the inverse of the triangular matrix of one chunk (Eq. d4).

    The kernel loads k and stores X: b (K + C) bytes per step and head. Operations: 2 C
    K, and 8 C^2 for the inverse of a chunk of 64.
    """
    TYPE: tl.constexpr = k.dtype.element_ty
    index, origin, remaining = this_chunk(time, heads, programs, C)
    t = tl.arange(0, C)
    key = rows(k, origin, t, remaining, heads, 0, K, BK)
    A = row_products(key, key, TYPE, PRECISION)
    G = causal_mask(C)
    if decay is not None:
        G = put_decays(
            decay, gammas, products, index, origin, t, remaining, heads,
            C,
        )  # fmt: skip
    A = tl.where(t[:, None] > t[None, :], A * G, 0.0)
    A *= scalars(beta, origin, t, remaining, heads, 0.0)[None, :]
    x = inverse(A, C, PRECISION)
    at = X + index * C * C + t[:, None] * C + t[None, :]
    tl.store(at, x.to(TYPE))


def solve(
    k: Tensor, decay: Tensor | None, gammas: Tensor | None,
    products: Tensor | None, beta: Tensor, form: Form,
) -> Tensor:  # fmt: skip
    """Return all chunks' inverses (Eq. d4), `[chunks * batch * heads, C, C]`."""
    batch, time, heads, K = k.shape
    programs = batch * heads
    n = count(time, form.C) * programs
    X = k.new_empty(n, form.C, form.C)
    _triton.launch(
        prepare, (n,),
        *(k, decay, gammas, products, beta, X),
        *(time, heads, programs), K=K, BK=padded_width(K), C=form.C,
        PRECISION=precision(k.dtype),
        warps=1 if K <= 128 and form.C < 64 else 4,
    )  # fmt: skip
    return X


_delta = recurrence("delta_kernels", solve)


def delta(x: Inputs, W: Tensor, z: None, alone: bool) -> tuple[Tensor, Tensor, None]:
    """Launch the kernels; return `y` and the final state `W`.

    - `alone`: `W` is empty, and the caller does not use the final state.
    """
    gates = per_head(x.decay), per_head(x.strength)
    inputs = (*one_precision(x.q, x.k, x.v), *gates, None if alone else W, z)
    y, W = _delta(inputs)
    return y, W, None
