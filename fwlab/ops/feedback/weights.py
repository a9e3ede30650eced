"""Name the parameters of the feedback stack."""

from typing import Annotated, NamedTuple

from torch import Tensor

#: The epsilon that layer norms add to the variance, as in `torch.nn.LayerNorm`.
EPS = 1e-5


class FeedbackWeights(NamedTuple):
    r"""Hold the weights of all layers of a Feedback Transformer.

    There are $L$ layers; `d` is the width of the model, and `key` is `d` / heads.
    `groups` is $L$ if each layer has its own projection of the memory (the original
    form), and 1 if all layers share one.

    - `merge`: `[L + 1]`, $w$ of Eq. f1.
    - `norm_mixer`: `[L, d]`, scale of the norm before the attention.
    - `to_q`, `to_out`: `[L, d, d]`, $W_Q$ and $W_O$.
    - `to_k`, `to_v`: `[groups, d, d]`, $W_K$ and $W_V$.
    - `positions`: `[key, features]`, $P$ of Eq. f4, with an even number of features;
      all heads and layers share it.
    - `norm_mlp`: `[L, d]`, scale of the norm before the MLP.
    - `expand`: `[L, d_ff, d]`, `contract`: `[L, d, d_ff]`.
    - `norm_memory`: `[groups, d]`, scale of the norm of the memory; None = no norm.
    """

    merge: Annotated[Tensor, "states"]
    norm_mixer: Annotated[Tensor, "layers d"]
    to_q: Annotated[Tensor, "layers d d"]
    to_k: Annotated[Tensor, "groups d d"]
    to_v: Annotated[Tensor, "groups d d"]
    positions: Annotated[Tensor, "key features"]
    to_out: Annotated[Tensor, "layers d d"]
    norm_mlp: Annotated[Tensor, "layers d"]
    expand: Annotated[Tensor, "layers d_ff d"]
    contract: Annotated[Tensor, "layers d d_ff"]
    norm_memory: Annotated[Tensor, "groups d"] | None = None
