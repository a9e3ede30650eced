r"""# The sum rule and the gated rule, one step at a time

Attention without the softmax is a memory that adds up outer products:
one matrix $W$ in place of a growing list of keys and values.
The gated rule lets that memory fade. Here `k` and `q` are already
features, $\phi(k)$ and $\phi(q)$. Equation numbers are those of
[Schlag et al. 2021](https://arxiv.org/abs/2102.11174).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fwlab.feature_maps import divide


def write(W: Tensor, k: Tensor, v: Tensor) -> Tensor:
    r"""Add one association to the fast weights:

    $$W_i = W_{i-1} + v_i \otimes \phi(k_i) \tag{17}$$

    - `W`: `[..., value, key]`, `k`: `[..., key]`, `v`: `[..., value]`.
    """
    return W + torch.einsum("...v,...k->...vk", v, k)


def read(W: Tensor, q: Tensor) -> Tensor:
    r"""Ask the fast weights for the value of a query:

    $$y_i = W_i\, \phi(q_i) \tag{25}$$

    - `W`: `[..., value, key]`, `q`: `[..., key]`.
    """
    return torch.einsum("...vk,...k->...v", W, q)


def steps(x: Tensor | None, time: int) -> Sequence[Tensor | None]:
    """`[batch, time, ...]` cut into its steps; no gate, no gates.

    `unbind` cuts the time axis once. Indexing `k[:, t]` in a loop would
    make the backward pass quadratic in time: the gradient of each index
    is a tensor of zeros as large as all of `k`.
    """
    return [None] * time if x is None else x.unbind(1)


def additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    strength: Tensor | None,
    W: Tensor,
    z: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""One recurrence for both rules. Fade, write, then read:

    $$W_i = d_i\, W_{i-1} + s_i\, v_i \otimes \phi(k_i) \tag{n1}$$

    With a normaliser $z$, which fades alike, the answer becomes a
    weighted mean of values:

    $$z_i = d_i\, z_{i-1} + s_i\, \phi(k_i) \tag{18}$$
    $$y_i = \frac{W_i\,\phi(q_i)}{z_i \cdot \phi(q_i)} \tag{19}$$

    - `q`, `k`: `[batch, time, heads, key]`, `v`: the same with `value`.
    - `decay`, `strength`: $d$ and $s$, `[batch, time, heads]`; None
      means 1, and turns (n1) and Eq. 18 into those of the paper.
    - `W`: `[batch, heads, value, key]`, `z`: `[batch, heads, key]` or
      None, which leaves the denominator away.
    """
    time, y = q.shape[1], []
    q, k, v = (x.to(W.dtype) for x in (q, k, v))
    for q_t, k_t, v_t, d_t, s_t in zip(
        *(steps(x, time) for x in (q, k, v, decay, strength)),
        strict=True,
    ):
        if d_t is not None:
            W = d_t[..., None, None] * W
            z = z if z is None else d_t[..., None] * z
        if s_t is not None:
            k_t = s_t[..., None] * k_t
        W = write(W, k_t, v_t)  # Eq. 17, (n1)
        y_t = read(W, q_t)  # Eq. 25
        if z is not None:
            z = z + k_t  # Eq. 18
            y_t = divide(y_t, (z * q_t).sum(-1, keepdim=True))  # Eq. 19
        y.append(y_t)
    return torch.stack(y, dim=1), W, z


def sum_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    W: Tensor,
    z: Tensor | None,
    recurrence: Callable = additive,
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Linear attention: nothing fades, and all is written in full.

    With `log_decay`, $d_i = e^{\mathrm{log\_decay}_i}$. `recurrence`
    is (n1) of this file, or its efficient form.
    """
    decay = None if log_decay is None else log_decay.to(W.dtype).exp()
    return recurrence(q, k, v, decay, None, W, z)


def gated_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    W: Tensor,
    z: Tensor | None,
    recurrence: Callable = additive,
) -> tuple[Tensor, Tensor, Tensor | None]:
    r"""Make room for what is written:

    $$W_i = (1 - \beta_i)\, W_{i-1}
      + \beta_i\, v_i \otimes \phi(k_i) \tag{52}$$

    The whole memory pays for it, not only what the key held: that is
    the difference to the delta rule (appendix B). Peng et al. 2021
    write $g = 1 - \beta$ and gate $z$ in the same way.
    """
    beta = beta.to(W.dtype)
    decay = 1 - beta  # Eq. 52
    if log_decay is not None:
        decay = decay * log_decay.to(W.dtype).exp()
    return recurrence(q, k, v, decay, beta, W, z)
