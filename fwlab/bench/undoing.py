r"""Measure how far back the updates of the delta rule can be undone.

A backward pass needs the fast weights of every step. Appendix F of Schlag et al.
2021 keeps only the last ones, and undoes one update
after the other. This module measures the error of the fast weights then.

- `W`: `[value, key]`; `k`: `[key]`, already features; `v`: `[value]`.
- `beta`: a scalar.
"""

from math import isfinite

import torch
from torch import Tensor

from fwlab.feature_maps import DPFP, KEY_NORMS

#: For each method, the source of the increments, and the decay per step.
METHODS = {
    "stored": ("stored", 1.0),
    "inverted": ("inverted", 1.0),
    "decay": ("stored", 0.99),
}


def recovered(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    r"""Return the increment that an update added, given the fast weights after it.

    $W_t k = (1 - \beta |k|^2)\, W_{t-1} k + \beta |k|^2\, v$, so
    $\beta (v - W_{t-1} k) = \beta (v - W_t k) / (1 - \beta |k|^2)$.

    - Returns `[value]`; not finite if $\beta |k|^2 = 1$, since the update has then
      erased the old value.
    """
    return beta * (v - W @ k) / (1 - beta * (k @ k))


@torch.no_grad()
def undoing_error(
    method: str,
    dtype: str = "float32",
    key_norm: str = "l2",
    length: int = 1024,
    d_key: int = 16,
    seed: int = 1,
) -> float | None:
    r"""Return the largest error while `length` random delta rule updates are undone.

    Keys are DPFP features of normal vectors, values are normal, and strengths are
    sigmoids of normal numbers.

        >>> undoing_error("stored", length=64) < 1e-6
        True
        >>> undoing_error("inverted", length=256) > 1
        True

    - `method`: "stored" subtracts increments that the forward pass has kept, "inverted"
      solves for them, and "decay" is "stored" with a decay of 0.99 per step, by which
      undoing divides.
    - `dtype`: dtype of all tensors: "float64", "float32" or "bfloat16".
    - `key_norm`: "l2" or "sum", the norm by which features are divided.
    - `length`, `d_key`: number of steps, width of keys and values, both at least 1.
    - `seed`: seed of the random numbers.
    - Returns the largest error of $W$ at any step, relative to the largest $W$
      (Frobenius norms), with three digits; None = it overflows.
    """
    find, decay = METHODS[method]
    chance = torch.Generator().manual_seed(seed)
    sizes = ((length, d_key), (length, d_key), (length,))
    k, v, beta = (torch.randn(*size, generator=chance).double() for size in sizes)
    k, beta = KEY_NORMS[key_norm](DPFP(nu=1)(k)), torch.sigmoid(beta)
    steps = [*zip(*(x.to(getattr(torch, dtype)) for x in (k, v, beta)), strict=True)]
    W = k.new_zeros(d_key, k.shape[1], dtype=steps[0][0].dtype)
    before, increments = [], []
    for k_t, v_t, beta_t in steps:
        before.append(W)
        W = decay * W
        increments.append(beta_t * (v_t - W @ k_t))  # Eq. 20
        W = W + torch.outer(increments[-1], k_t)  # Eq. 24
    errors = []
    for t in reversed(range(length)):
        k_t, v_t, beta_t = steps[t]
        increment = increments[t]
        if find == "inverted":
            increment = recovered(W, k_t, v_t, beta_t)
        W = (W - torch.outer(increment, k_t)) / decay
        errors.append((W - before[t]).double().norm())
    largest = torch.stack([each.double().norm() for each in before]).max()
    error = (torch.stack(errors).max() / largest).item()
    return float(f"{error:.3g}") if isfinite(error) else None
