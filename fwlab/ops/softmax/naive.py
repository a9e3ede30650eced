r"""# Softmax attention

The baseline. Keys and values are stored instead of being summed into one matrix, and
every query is compared with all keys. Equation numbers are those of [Schlag et al.
2021](https://arxiv.org/abs/2102.11174).
"""

import torch
from torch import Tensor


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    r"""Compare queries with keys, and return weighted means of the values:

    $$y_i = V_i\, \mathrm{softmax}\big(K_i^\top q_i\big) \tag{7}$$

    The columns of $K_i$ and $V_i$ are the keys and values of the steps up to $i$ (Eqs.
    5 and 6).

    - `q`: `[batch, heads, queries, key]`, `k`, `v`: `[batch, heads, keys, key or
      value]`.
    - `visible`: `bool`, broadcast to `[batch, heads, queries, keys]`.
    """
    scores = (q @ k.mT).masked_fill(~visible, -torch.inf)
    return torch.softmax(scores, -1) @ v  # Eq. 7
