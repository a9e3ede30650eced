r"""# The delta rule, one step at a time

The sum rule can only add: what is written twice under one key is read
back as a mixture. The delta rule first asks the memory what the key
already holds, and then writes the *difference*. The gated delta rule
lets the memory fade first. Here `k` and `q` are already features,
$\phi(k)$ and $\phi(q)$. Equation numbers are those of
[Schlag et al. 2021](https://arxiv.org/abs/2102.11174).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fwlab.feature_maps import divide, unit_range
from fwlab.ops.linear.naive import read, steps, write


def delta_step(W: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    r"""Move the value stored under a key towards a new one:

    $$\bar v_i = W_{i-1}\, \phi(k_i) \tag{20}$$
    $$W_i = W_{i-1}
      + \beta_i\, (v_i - \bar v_i) \otimes \phi(k_i) \tag{24}$$

    This is Eq. 23 (write the new value, remove the old one) with
    Eq. 22 put in, as derived in the paper's appendix A.1.

    - `W`: `[..., value, key]`, `k`: `[..., key]`, `v`: `[..., value]`.
    - `beta`: `[...]`, the write strength, from 0 (keep what is there)
      to 1 (replace it).
    """
    v_bar = read(W, k)  # Eq. 20
    return write(W, k, beta[..., None] * (v - v_bar))  # Eq. 24


def error_correcting(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    beta: Tensor,
    W: Tensor,
    z: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""One recurrence for both rules. Fade, correct, then read:

    $$W_i = d_i\, W_{i-1} + \beta_i\,
      (v_i - d_i\, W_{i-1}\,\phi(k_i)) \otimes \phi(k_i) \tag{n2}$$
    $$y_i = W_i\, \phi(q_i) \tag{25}$$

    With attention normalisation both readings are divided by what the
    same key reads in $z$, the sum of the keys written so far, which
    fades alike. An empty memory retrieves 0:

    $$z_i = d_i\, z_{i-1} + \phi(k_i) \tag{26}$$
    $$\bar v_i = \frac{W_{i-1}\,\phi(k_i)}
                      {z_{i-1} \cdot \phi(k_i)} \tag{27}$$
    $$y_i = \frac{W_i\,\phi(q_i)}{z_i \cdot \phi(q_i)} \tag{28}$$

    - `q`, `k`: `[batch, time, heads, key]`, `v`: the same with `value`,
      `beta`: `[batch, time, heads]`.
    - `decay`: $d$, `[batch, time, heads]`; None means 1, and turns (n2)
      into Eq. 24, and Eq. 26 into that of the paper.
    - `W`: `[batch, heads, value, key]`, `z`: `[batch, heads, key]` or
      None, which leaves the denominators away.
    """
    time, y = q.shape[1], []
    q, k, v, beta = (x.to(W.dtype) for x in (q, k, v, beta))
    for q_t, k_t, v_t, d_t, beta_t in zip(
        *(steps(x, time) for x in (q, k, v, decay, beta)), strict=True
    ):
        if d_t is not None:
            W = d_t[..., None, None] * W
            z = z if z is None else d_t[..., None] * z
        if z is None:
            W = delta_step(W, k_t, v_t, beta_t)  # Eq. 24, (n2)
            y_t = read(W, q_t)  # Eq. 25
        else:
            ask = unit_range(k_t)  # its length cancels in Eq. 27
            overlap = (z * ask).sum(-1, keepdim=True)
            v_bar = divide(read(W, ask), overlap)  # Eq. 27
            W = write(W, k_t, beta_t[..., None] * (v_t - v_bar))
            z = z + k_t  # Eq. 26
            overlap = (z * q_t).sum(-1, keepdim=True)
            y_t = divide(read(W, q_t), overlap)  # Eq. 28
        y.append(y_t)
    return torch.stack(y, dim=1), W, z


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    W: Tensor,
    z: Tensor | None,
    recurrence: Callable = error_correcting,
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Nothing fades; with `log_decay`, the gated delta rule.

    There $d_i = e^{\mathrm{log\_decay}_i}$ (Yang et al. 2024, who call
    it $\alpha$). `recurrence` is (n2) of this file, or its efficient
    form.
    """
    decay = None if log_decay is None else log_decay.to(W.dtype).exp()
    return recurrence(q, k, v, decay, beta, W, z)
