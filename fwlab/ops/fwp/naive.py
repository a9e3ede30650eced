r"""# The fast weight programmer of 1991, one step at a time

One network, with slow weights, writes the weights of another network, which change with
every input. Later models have the same two parts: an outer product to write, and a
matrix product to read. This model reads with its input; it has no query. The model is
that of Schmidhuber 1991; equation numbers are those of [Schlag et al.
2021](https://arxiv.org/abs/2102.11174).
"""

from collections.abc import Callable

import torch
from torch import Tensor


def program(W: Tensor, a: Tensor, b: Tensor, activation: Callable) -> Tensor:
    r"""Add an outer product to the fast weights, then apply the activation:

    $$W_i = \sigma\big(W_{i-1} + a_i \otimes b_i\big) \tag{2}$$

    A $\sigma$ such as tanh bounds every weight, and lets older associations decay.

    - `W`: `[..., value, key]`, `a`: `[..., value]`, `b`: `[..., key]`.
    """
    return activation(W + torch.einsum("...v,...k->...vk", a, b))


def apply(W: Tensor, x: Tensor) -> Tensor:
    r"""Apply the fast network, a single linear layer, to an input:

    $$y_i = W_i\, x_i \tag{3}$$

    - `W`: `[..., value, key]`, `x`: `[..., key]`.
    """
    return torch.einsum("...vk,...k->...v", W, x)


def fwp(
    a: Tensor, b: Tensor, x: Tensor, W: Tensor, activation: Callable
) -> tuple[Tensor, Tensor]:
    """Compute the fast weight programmer: at each step, write, then read.

    - `a`: `[batch, time, heads, value]`, `b`, `x`: the same with `key`; the layer makes
      `a` and `b` from its input (Eq. 1).
    - `W`: `[batch, heads, value, key]`, the initial state.
    """
    y = []
    for a_t, b_t, x_t in zip(a.unbind(1), b.unbind(1), x.unbind(1), strict=True):
        W = program(W, a_t, b_t, activation)  # Eq. 2
        y.append(apply(W, x_t))  # Eq. 3
    return torch.stack(y, dim=1), W
