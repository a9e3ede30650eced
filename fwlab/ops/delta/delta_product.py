r"""# DeltaProduct, one step at a time

A delta rule changes its memory in one direction per token. DeltaProduct ([Siems et al.
2025](https://arxiv.org/abs/2502.10297)) takes several steps before it reads, each with
its own key, value and strength. With strengths up to 2, two steps can rotate the
content of a head, which one step cannot. Equation numbers are those of [Schlag et al.
2021](https://arxiv.org/abs/2102.11174), those with a letter are ours.

- `q`: `[batch, time, heads, key]`.
- `k`: `[batch, time, steps, heads, key]`, `v`: the same with `value`, `beta`: `[batch,
  time, steps, heads]`.
- `W`: `[batch, heads, value, key]`.
"""

from typing import Annotated, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab.ops._operation import LogDecay, Queries
from fwlab.ops._rules import Inputs, RuleOptions, factor, rule
from fwlab.ops.delta import WITH_KERNELS
from fwlab.ops.delta.delta import delta_step, read, steps


def product_step(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    r"""Apply several steps of the delta rule to the fast weights, one after another:

    $$W_{i,j} = W_{i,j-1} + \beta_{i,j}\,
      (v_{i,j} - W_{i,j-1}\, k_{i,j}) \otimes k_{i,j} \tag{n4}$$

    - `W`: `[batch, heads, value, key]`, `k`: `[batch, steps, heads, key]`, `v`: the
      same with `value`, `beta`: `[batch, steps, heads]`.
    """
    for k_j, v_j, b_j in steps(k, v, beta):
        W = delta_step(W, k_j, v_j, b_j)  # (n4)
    return W


def loop(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, W: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply several steps of the delta rule, then read, at each token."""
    y = []
    for q_t, k_t, v_t, b_t in steps(q, k, v, beta):
        W = product_step(W, k_t, v_t, b_t)
        y.append(read(W, q_t))  # Eq. 25
    return torch.stack(y, dim=1), W


def spread(x: Tensor, zeros: tuple[int, int]) -> Tensor:
    """Insert steps of zeros before and after each token of `[batch, time, ...]`."""
    rest = [0, 0] * (x.dim() - 2)
    return F.pad(x.unsqueeze(2), (*rest, *zeros)).flatten(1, 2)


@rule(WITH_KERNELS, loop, corrects=True)
def delta_product(
    q: Queries,
    k: Annotated[Tensor, "batch time steps heads key"],
    v: Annotated[Tensor, "batch time steps heads value"],
    beta: Annotated[Tensor, "batch time steps heads"],
    log_decay: LogDecay | None = None,
    **options: Unpack[RuleOptions],
) -> Inputs:
    r"""Apply several steps of the delta rule per token, then read.

    $W_{t,0} = e^{\text{log\_decay}_t} W_{t-1}$, then for each step
    $W_{t,j} = W_{t,j-1} + \beta_{t,j} (v_{t,j} - W_{t,j-1} k_{t,j})
    \otimes k_{t,j}$; $W_t$ is the last of them, and $y_t = W_t q_t$.

    - `q`: `[batch, time, heads, key]`, as features; the paper divides queries and keys
      by their Euclidean norm. Grouped heads as for `sum_rule`.
    - `k`: `[batch, time, steps, heads, key]`.
    - `v`: `[batch, time, steps, heads, value]`.
    - `beta`: `[batch, time, steps, heads]`, in $[0, 2]$ for keys of length 1: with 2 a
      step reflects what the key holds.
    - `log_decay`: `[batch, time, heads]`, at most 0; None = no decay.
    - `options`: as for `sum_rule`.
    - Returns `y` `[batch, time, heads, value]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Both values are written in the steps of one token.

        >>> k = torch.tensor([1.0, 0.0]).expand(1, 2, 1, 2)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> k, v, one = k[:, None], v[:, None], torch.ones(1, 1, 2, 1)
        >>> ops.delta_product(k[:, :, 0], k, v, one).flatten()
        tensor([8.])

    Source: Siems et al. 2025 (arXiv:2502.10297).
    """
    # Steps form one long sequence, with the decay first and the query last in a token.
    after, before = (k.shape[2] - 1, 0), (0, k.shape[2] - 1)
    return Inputs(
        decay=None if log_decay is None else factor(spread(log_decay, before)),
        strength=beta.flatten(1, 2)[..., None],
        q=spread(q, after),
        k=k.flatten(1, 2),
        v=v.flatten(1, 2),
    )
