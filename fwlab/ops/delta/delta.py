r"""# The delta rule, one step at a time

The sum rule can only add: two values written under one key are read back as a mixture.
The delta rule first looks up what the key already holds, and then writes the
*difference*. Here `k` and `q` are already features, $\phi(k)$ and $\phi(q)$. Equation
numbers are those of [Schlag et al. 2021](https://arxiv.org/abs/2102.11174).

The loops are the specification, in float32 at least. Nothing else is computed with
them: for a chunk of steps, Eq. 24 is (d1) and (d3) of the chunked version.

- `q`, `k`: `[batch, time, heads, key]`, `v`: the same with `value`.
- `beta`: `[batch, time, heads]`.
- `W`: `[batch, heads, value, key]`, `z`: `[batch, heads, key]`.
"""

from typing import Unpack

import torch
from torch import Tensor

from fwlab.feature_maps import divide
from fwlab.ops._operation import Keys, PerHead, Queries, Values
from fwlab.ops._rules import Inputs, RuleOptions, rule
from fwlab.ops.delta import WITH_KERNELS
from fwlab.ops.linear.sum import read, steps


def correct(W: Tensor, k: Tensor, v: Tensor, v_bar: Tensor, beta: Tensor) -> Tensor:
    r"""Replace the old value of a key by a new value:

    $$W_i = W_{i-1} + \beta_i\,
      (v_i - \bar v_i) \otimes \phi(k_i) \tag{24}$$

    This is Eq. 23 with Eq. 22 inserted, as in the paper's appendix A.1.

    - `W`: `[..., value, key]`, `k`: `[..., key]`, `v` and `v_bar`: `[..., value]`.
    - `beta`: `[...]`, the write strength, from 0 (keep) to 1 (replace).
    """
    u = beta[..., None] * (v - v_bar)
    return W + torch.einsum("...v,...k->...vk", u, k)


def delta_step(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    r"""Retrieve the old value of a key, and move it towards a new value:

    $$\bar v_i = W_{i-1}\, \phi(k_i) \tag{20}$$

    - `W`: `[..., value, key]`, `k`: `[..., key]`, `v`: `[..., value]`, `beta`: `[...]`.
    """
    v_bar = read(W, k)  # Eq. 20
    return correct(W, k, v, v_bar, beta)  # Eq. 24


def normalized_read(W: Tensor, z: Tensor, q: Tensor) -> Tensor:
    r"""Multiply the fast weights by a key or query, and divide by the normaliser:

    $$\bar v_i = \frac{W_{i-1}\,\phi(k_i)}
                      {z_{i-1} \cdot \phi(k_i)} \tag{27}$$
    $$y_i = \frac{W_i\,\phi(q_i)}{z_i \cdot \phi(q_i)} \tag{28}$$

    - `W`: `[..., value, key]`, `z` and `q`: `[..., key]`.
    - Returns 0 where the denominator is 0: an empty memory holds 0.
    """
    return divide(read(W, q), (z * q).sum(-1, keepdim=True))


def loop(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, W: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the delta rule: correct the fast weights, then read, at each step."""
    y = []
    for q_t, k_t, v_t, b_t in steps(q, k, v, beta):
        W = delta_step(W, k_t, v_t, b_t)  # This corrects `W` (Eqs. 20 and 24).
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W


def normalized_loop(
    q: Tensor, k: Tensor, v: Tensor, ask: Tensor, beta: Tensor, W: Tensor, z: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    r"""Compute the delta rule with the normaliser $z$, the sum of the keys:

    $$z_i = z_{i-1} + \phi(k_i) \tag{26}$$

    - `ask`: the keys of Eq. 27, where their length cancels: `k`, scaled to a range that
      neither overflows nor underflows.
    """
    y = []
    for q_t, k_t, v_t, a_t, b_t in steps(q, k, v, ask, beta):
        v_bar = normalized_read(W, z, a_t)  # Eq. 27
        W = correct(W, k_t, v_t, v_bar, b_t)  # Eq. 24
        z = z + k_t  # Eq. 26
        y.append(normalized_read(W, z, q_t))  # Eq. 28
    return torch.stack(y, dim=1), W, z


@rule(WITH_KERNELS, loop, normalized_loop, corrects=True)
def delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    beta: PerHead,
    *,
    normalize: bool = False,
    **options: Unpack[RuleOptions],
) -> Inputs:
    r"""Replace the value of a key, then read (Eqs. 20-25).

    $\bar v_t = W_{t-1} k_t$, $W_t = W_{t-1} + \beta_t (v_t - \bar v_t) \otimes k_t$,
    $y_t = W_t q_t$. Keys and queries are features: first apply a map and a
    normalisation of `fwlab.feature_maps`. The recurrence is stable while $\beta_t
    |k_t|^2 \le 2$. For `beta` in $[0, 1]$ and features that are not negative, either
    normalisation ensures this. Where it diverges and overflows, a chunked
    implementation loses the finite outputs of that chunk, too. "naive" keeps them.

    - `q`, `k`: `[batch, time, heads, key]`; grouped heads as for `sum_rule`.
    - `v`: `[batch, time, heads, value]`.
    - `beta`: `[batch, time, heads]`, write strength, usually in $[0, 1]$: 0 keeps the
      old value of the key, 1 replaces it.
    - `normalize`: divide values read with $k$ and $q$ by $z \cdot k$ and $z \cdot q$
      (Eqs. 26-28); the result is 0 where a denominator is 0.
    - `options`: as for `sum_rule`.
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Two values are written under one key; the second value replaces the first.

        >>> k = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> ops.delta_rule(k, k, v, torch.ones(1, 2, 1)).flatten()
        tensor([4., 8.])

    Source: Schlag, Irie, Schmidhuber 2021 (arXiv:2102.11174), section 4.2 and appendix
    A.1.
    """
    return Inputs(strength=beta[..., None])
