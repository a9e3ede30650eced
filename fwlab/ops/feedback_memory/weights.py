"""What the feedback stack is made of."""

from typing import NamedTuple

from torch import Tensor

#: Added to the variance, as in `torch.nn.LayerNorm`.
EPS = 1e-5


class FeedbackWeights(NamedTuple):
    r"""The trained weights of a whole stack, layer by layer.

    With $L$ layers, `d` the width of the model and `key` = `d` / heads.
    `groups` is $L$ where each layer projects the memory for itself (the
    original form), and 1 where all layers share one projection.

    - `merge`: `[L + 1]`, $w$ of Eq. f1.
    - `norm_mixer`: `[L, d]`, scale of the norm before the attention.
    - `to_q`, `to_out`: `[L, d, d]`, $W_Q$ and $W_O$.
    - `to_k`, `to_v`: `[groups, d, d]`, $W_K$ and $W_V$.
    - `positions`: `[key, features]`, $P$ of Eq. f3, an even number of
      features; all heads and layers share it.
    - `norm_mlp`: `[L, d]`, scale of the norm before the MLP.
    - `expand`: `[L, d_ff, d]`, `contract`: `[L, d, d_ff]`.
    - `norm_memory`: `[groups, d]`, scale of the norm of the memory;
      None leaves the memory as it is.
    """

    merge: Tensor
    norm_mixer: Tensor
    to_q: Tensor
    to_k: Tensor
    to_v: Tensor
    positions: Tensor
    to_out: Tensor
    norm_mlp: Tensor
    expand: Tensor
    contract: Tensor
    norm_memory: Tensor | None = None
