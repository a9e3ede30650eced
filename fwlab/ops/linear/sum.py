r"""# The sum rule, one step at a time

Drop the softmax from attention, and the growing list of keys and values becomes one
matrix $W$: a memory that adds up outer products. Here `k` and `q` are already features,
$\phi(k)$ and $\phi(q)$. Equation numbers are those of [Schlag et al.
2021](https://arxiv.org/abs/2102.11174).

The loops are the specification, in float32 at least. Nothing else is computed with
them. With a decay $d_i = e^{\mathrm{log\_decay}_i}$, a memory fades before each step:

$$W_i = d_i\, W_{i-1} + v_i \otimes \phi(k_i), \qquad
  z_i = d_i\, z_{i-1} + \phi(k_i)$$

- `q`, `k`: `[batch, time, heads, key]`, `v`: the same with `value`.
- `W`: `[batch, heads, value, key]`, `z`: `[batch, heads, key]`.
"""

from collections.abc import Iterator
from typing import Unpack

import torch
from torch import Tensor

from fwlab.feature_maps import divide
from fwlab.ops._operation import Keys, LogDecayPerHeadOrKey, Queries, Values
from fwlab.ops._rules import Inputs, RuleOptions, factor, rule
from fwlab.ops.linear import FORMS


def write(W: Tensor, k: Tensor, v: Tensor) -> Tensor:
    r"""Add the outer product of a value and a key to the fast weights:

    $$W_i = W_{i-1} + v_i \otimes \phi(k_i) \tag{17}$$

    - `W`: `[..., value, key]`, `k`: `[..., key]`, `v`: `[..., value]`.
    """
    return W + torch.einsum("...v,...k->...vk", v, k)


def read(W: Tensor, q: Tensor) -> Tensor:
    r"""Multiply the fast weights by a query:

    $$y_i = W_i\, \phi(q_i) \tag{25}$$

    - `W`: `[..., value, key]`, `q`: `[..., key]`.
    """
    return torch.einsum("...vk,...k->...v", W, q)


def normalized_read(W: Tensor, z: Tensor, q: Tensor) -> Tensor:
    r"""Multiply the fast weights by a query, and divide by the normaliser:

    $$y_i = \frac{W_i\,\phi(q_i)}{z_i \cdot \phi(q_i)} \tag{19}$$

    - `W`: `[..., value, key]`, `z` and `q`: `[..., key]`.
    - Returns 0 where the denominator is 0.
    """
    return divide(read(W, q), (z * q).sum(-1, keepdim=True))


def steps(*sequences: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Iterate over the steps of `[batch, time, ...]` tensors.

    `unbind` splits time once. Indexing `k[:, t]` in a loop would make the
    backward pass quadratic in time: the gradient of each index is a tensor of zeros as
    large as all of `k`.
    """
    return zip(*(x.unbind(1) for x in sequences), strict=True)


def loop(q: Tensor, k: Tensor, v: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    """Compute linear attention without a normaliser: write, then read, at each step."""
    y = []
    for q_t, k_t, v_t in steps(q, k, v):
        W = write(W, k_t, v_t)  # Eq. 17
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W


def normalized_loop(
    q: Tensor, k: Tensor, v: Tensor, W: Tensor, z: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Compute linear attention with the normaliser $z$, the sum of the keys:

    $$z_i = z_{i-1} + \phi(k_i) \tag{18}$$
    """
    y = []
    for q_t, k_t, v_t in steps(q, k, v):
        W = write(W, k_t, v_t)  # Eq. 17
        z = z + k_t  # Eq. 18
        y.append(normalized_read(W, z, q_t))  # Eq. 19
    return torch.stack(y, dim=1), W, z


@rule(FORMS, loop, normalized_loop)
def sum_rule(
    q: Queries,
    k: Keys,
    v: Values,
    *,
    log_decay: LogDecayPerHeadOrKey | None = None,
    normalize: bool = True,
    **options: Unpack[RuleOptions],
) -> Inputs:
    r"""Compute linear attention: write each pair, then read (Eqs. 17-19).

    $W_t = W_{t-1} + v_t \otimes k_t$, $z_t = z_{t-1} + k_t$, and $y_t = W_t q_t \,/\,
    (z_t \cdot q_t)$. Keys and queries are features: first apply a map of
    `fwlab.feature_maps`.

    - `q`, `k`: `[batch, time, heads, key]`. `q` may have a multiple of these heads:
      consecutive heads then share one state (grouped heads). `y` has the heads of `q`,
      and the state has the heads of `k`.
    - `v`: `[batch, time, heads, value]`.
    - `log_decay`: `[batch, time, heads]`, at most 0 (on a CPU, values above 0 raise an
      error): $W_{t-1}$ and $z_{t-1}$ are first multiplied by its exponential; None = no
      decay. `[batch, time, heads, key]` is a decay per key channel (gated linear
      attention). (Features scaled by a running maximum need a decay.) In float32, fast
      weights that have decayed by more than $e^{-80}$ since the last write may be read
      as 0.
    - `normalize`: divide by $z_t \cdot q_t$; without it $y_t = W_t q_t$. Where the
      denominator is 0 the result is 0.
    - `scale`: a factor of `q`; None = 1.
    - `key_mask`: `bool [batch, time]`, True = real token. Masked steps leave the state
      untouched and return 0.
    - `cu_seqlens`: integers `[documents + 1]` from 0 to `time`, the borders of packed
      documents, one after another. The batch size is then 1, and every document has its
      own state: `state` has `documents` in place of `batch`. With states, documents are
      computed one after another, which reads these values.
    - `state`: the state that an earlier call returned; None = zeros. The tensor `W`
      `[batch, heads, value, key]`, or with `normalize` a `NormalizedState(W, z)`;
      float32 for half-precision inputs.
    - `return_state`: return `(y, state)` instead of `y`.
    - `implementation`: "auto", "naive", "chunked", "efficient" or "triton".
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Two values are written under one key; the second output is their mean.

        >>> k = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> ops.sum_rule(k, k, v).flatten()
        tensor([4., 6.])

    Source: Katharopoulos et al. 2020 (arXiv:2006.16236); equation numbers from Schlag
    et al. 2021 (arXiv:2102.11174).
    """
    return Inputs(decay=factor(log_decay))
