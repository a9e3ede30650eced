"""The parameters of the feedback stack."""

from typing import NamedTuple

from torch import Tensor

#: Added to the variance, as in `torch.nn.LayerNorm`.
EPS = 1e-5


class FeedbackWeights(NamedTuple):
    r"""The weights of a whole stack, layer by layer.

    There are $L$ layers; `d` is the width of the model, and `key` is
    `d` / heads. `groups` is $L$ if each layer has its own projection of
    the memory (the original form), and 1 if all layers share one.

    - `merge`: `[L + 1]`, $w$ of Eq. f1.
    - `norm_mixer`: `[L, d]`, scale of the norm before the attention.
    - `to_q`, `to_out`: `[L, d, d]`, $W_Q$ and $W_O$.
    - `to_k`, `to_v`: `[groups, d, d]`, $W_K$ and $W_V$.
    - `positions`: `[key, features]`, $P$ of Eq. f4, with an even number
      of features; all heads and layers share it.
    - `norm_mlp`: `[L, d]`, scale of the norm before the MLP.
    - `expand`: `[L, d_ff, d]`, `contract`: `[L, d, d_ff]`.
    - `norm_memory`: `[groups, d]`, scale of the norm of the memory;
      None = no norm.
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
