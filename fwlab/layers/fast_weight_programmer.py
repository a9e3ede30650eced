r"""The fast weight programmer of 1991 as a layer."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fwlab import arguments, ops
from fwlab.layers.causal import Causal
from fwlab.layers.heads import head_width, split_heads


class FastWeightProgrammer(Causal):
    r"""One network writes the weights of another (Schmidhuber 1991).

    $a, b = W_a x, W_b x$ (Eq. 1); the outer product $a \otimes b$
    changes the fast weights $W$, and the output is $W x$ (Eqs. 2 and 3),
    followed by an output projection. There is no query: the fast network
    takes the input itself, split into heads. No projection has a bias.

    - `d_model`: width of the input; a multiple of `heads`.
    - `heads`: number of independent fast networks.
    - `activation`: $\sigma$ of Eq. 2, elementwise; None = identity.
    - Raises `ValueError` if `heads` does not divide `d_model`, and
      `TypeError` for an argument of the wrong type.

    All three methods are causal, and any mixture of `prefill` and `step`
    computes the same as one `forward` over the whole sequence. The state
    is the fast weights, `[batch, heads, value, key]`.

        >>> FastWeightProgrammer(d_model=8, heads=2).state_size()
        32
    """

    packs = skips = True

    # The slow network has two outputs: $a$ is written under $b$. The input $x$ itself
    # is the query, so there is no third projection.
    def __init__(
        self,
        d_model: int,
        heads: int = 1,
        activation: Callable[[Tensor], Tensor] | None = torch.tanh,
    ):
        super().__init__()
        width = head_width("FastWeightProgrammer", d_model, heads)
        arguments.function("FastWeightProgrammer", activation=activation)
        self.d_model, self.heads, self.activation = d_model, heads, activation
        #: `[heads, value, key]`, the shape of the fast weights of one sequence.
        self.state_shape = (heads, width, width)
        self.to_a = nn.Linear(d_model, d_model, bias=False)
        self.to_b = nn.Linear(d_model, d_model, bias=False)
        self.to_out = nn.Linear(d_model, d_model, bias=False)

    def _first(self) -> nn.Module:
        return self.to_a

    def state_size(self, time: int = 0) -> int:
        """Number of scalars in the state of one sequence of any length.

        - `time`: tokens so far; has no effect.
        - Returns the total over all heads.
        """
        heads, value, key = self.state_shape
        return heads * value * key

    def prefill(
        self,
        x: Tensor,
        state: Tensor | None = None,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        x = self._checked(x, key_mask, cu_seqlens)
        a, b, x = (
            split_heads(part, self.heads) for part in (self.to_a(x), self.to_b(x), x)
        )
        y, state = ops.fwp(
            a,
            b,
            x,
            self.activation,
            key_mask=key_mask,
            cu_seqlens=cu_seqlens,
            state=state,
            return_state=True,
            implementation=implementation,
        )
        return self.to_out(y.flatten(-2)), state
