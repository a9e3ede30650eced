r"""# The implicit delta rule, one step at a time

The delta rule is one step of gradient descent on how well $W$ recalls the pair of this
step, and it overshoots if $\beta_t |k_t|^2$ is above 1. This rule solves the same
problem for the *new* weights:

$$W_i = \arg\min_W\; \|W - W_{i-1}\|^2
  + \beta_i\, \|v_i - W k_i\|^2$$

It is Longhorn ([Liu et al. 2024](https://arxiv.org/abs/2407.14207)), in signal
processing normalised least mean squares. Its step is never too large, whatever the
length of the key.

- `q`, `k`: `[batch, time, heads, key]`, `v`: the same with `value`.
- `W`: `[batch, heads, value, key]`.
- `beta`: `[batch, time, heads]`.
"""

from typing import Annotated, Unpack

import torch
from torch import Tensor

from fwlab.ops._operation import INFINITE, Keys, Queries, Range, Values
from fwlab.ops._rules import Inputs, RuleOptions, rule
from fwlab.ops.delta import WITH_KERNELS
from fwlab.ops.delta.delta import read, steps


def loop(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, W: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Apply a delta step with the optimal step size, then read, at each step:

    $$s_i = \frac{\beta_i}{1 + \beta_i\, |k_i|^2} \tag{n7}$$
    """
    y = []
    for q_t, k_t, v_t, b_t in steps(q, k, v, beta):
        s = b_t / (1 + b_t * (k_t * k_t).sum(-1))  # (n7)
        u = s[..., None] * (v_t - read(W, k_t))
        W = W + torch.einsum("...v,...k->...vk", u, k_t)  # Eq. 24
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W


def strength(k: Tensor, beta: Tensor) -> Tensor:
    """Return the optimal step size (Eq. n7), the write strength of the recurrence.

    - `k`: `[..., key]`, `beta`: `[...]`.
    """
    return beta / (1 + beta * k.square().sum(-1))


#: The range of `beta`: all numbers of at least 0.
POSITIVE = Range(0, INFINITE, "pass a weight, such as softplus(beta)")


@rule(WITH_KERNELS, loop, corrects=True)
def implicit_delta_rule(
    q: Queries,
    k: Keys,
    v: Values,
    beta: Annotated[Tensor, "batch time heads", POSITIVE],
    **options: Unpack[RuleOptions],
) -> Inputs:
    r"""Move the value of a key by the optimal step, then read (Longhorn).

    $W_t = W_{t-1} + \frac{\beta_t}{1 + \beta_t |k_t|^2} (v_t - W_{t-1} k_t) \otimes
    k_t$ and $y_t = W_t q_t$: the weights that minimise $\|W - W_{t-1}\|^2 + \beta_t
    \|v_t - W k_t\|^2$. The rule is stable for keys of any length.

    - `q`, `k`: `[batch, time, heads, key]`, as features. Grouped heads as for
      `sum_rule`.
    - `v`: `[batch, time, heads, value]`.
    - `beta`: `[batch, time, heads]`, at least 0: the weight of the error of this step
      against the change of the fast weights; it may exceed 1.
    - `options`: as for `sum_rule`.
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    With a key of length 1 and `beta` of 1, a step removes half of the error.

        >>> k = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> one = torch.ones(1, 2, 1)
        >>> ops.implicit_delta_rule(k, k, v, one).flatten()
        tensor([2., 5.])

    Source: Liu et al. 2024, Longhorn (arXiv:2407.14207).
    """
    return Inputs(strength=strength(k, beta)[..., None])
