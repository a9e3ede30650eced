"""Let one network write the weights of another: the fast weight programmer of 1991."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fwlab import arguments, ops
from fwlab.layers.causal import Causal, with_state
from fwlab.layers.heads import head_width, per_head, projections


class FastWeightProgrammer(Causal):
    r"""Let one network write the weights of another network (Schmidhuber 1991).

    $a, b = W_a x, W_b x$ (Eq. 1) change the fast weights, which are applied to the
    input itself, split into heads: there is no query (`ops.fwp`). An output projection
    follows. No projection has a bias.

    - `d_model`: width of the input; a multiple of `heads`.
    - `heads`: number of independent fast networks.
    - `activation`: $\sigma$ of Eq. 2, elementwise; None = identity.
    - Raises `ValueError` if `heads` does not divide `d_model`, and `TypeError` for an
      argument of the wrong type.

    Its state is the fast weights, `[batch, heads, value, key]`.

        >>> FastWeightProgrammer(d_model=8, heads=2).state_size()
        32
    """

    packs = skips = True
    first_layer = "to_a"

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
        #: The shape of the fast weights of one sequence, `(heads, value, key)`.
        self.state_shape = (heads, width, width)
        self.to_a, self.to_b, self.to_out = projections(d_model, *[d_model] * 3)

    def state_size(self, time: int = 0) -> int:
        return self.heads * self.state_shape[1] * self.state_shape[2]

    def _mix(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        """Program the fast weights, and apply them to the input."""
        a, b, q = per_head(self.to_a(x), self.to_b(x), x, heads=self.heads)
        options |= {"activation": self.activation, "state": state}
        y, state = with_state(ops.fwp(a, b, q, **options))
        return self.to_out(y.flatten(-2)), state
