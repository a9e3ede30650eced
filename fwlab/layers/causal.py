"""What all causal layers share: one sequence, or one token, by `prefill`."""

from typing import Any

from torch import Tensor, nn

from fwlab.layers.heads import check_input


class Causal(nn.Module):
    """A causal layer that defines `prefill`.

    Any mixture of `prefill` and `step` gives what `forward` gives for the
    whole sequence.
    """

    #: Whether `forward` and `prefill` take `cu_seqlens`.
    packs = False
    #: The implementation for a single token.
    one_token = "naive"
    to_q: nn.Linear

    def _like(self) -> Tensor:
        """A weight `[..., d_model]`: inputs have its device and dtype."""
        return self.to_q.weight

    def prefill(
        self,
        x: Tensor,
        state: Any = None,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
    ) -> tuple[Tensor, Any]:
        """Process part of a sequence, and return the state after it.

        - `x`: `[batch, time, d_model]`.
        - `state`: what an earlier call returned; None = start of sequence.
        - `key_mask`, `implementation`: as in `forward`.
        - Returns `(y, state)`, `y` of shape `[batch, time, d_model]`.
        """
        raise NotImplementedError

    def forward(
        self, x: Tensor, key_mask: Tensor | None = None, implementation: str = "auto"
    ) -> Tensor:
        """Process a whole sequence in parallel.

        - `x`: `[batch, time, d_model]`.
        - `key_mask`: `bool [batch, time]`, True = real token.
        - `implementation`: as for the operations of `fwlab.ops`.
        - Returns `[batch, time, d_model]`.
        - Raises `ValueError` or `TypeError` for an invalid `x`.
        """
        return self.prefill(x, None, key_mask, implementation)[0]

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Process one token.

        - `x`: `[batch, d_model]`.
        - `state`: what an earlier call returned; None = start of sequence.
        - Returns `(y, state)`, `y` of shape `[batch, d_model]`.
        """
        check_input(type(self).__name__, "x", x, "batch d_model", self._like())
        y, state = self.prefill(x[:, None], state, implementation=self.one_token)
        return y[:, 0], state


class Packing(Causal):
    """A causal layer that can keep packed documents apart."""

    packs = True

    def prefill(
        self,
        x: Tensor,
        state: Any = None,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Process part of a sequence, and return the state after it.

        - `x`: `[batch, time, d_model]`.
        - `state`: what an earlier call returned; None = start of sequence.
          With `cu_seqlens` it has one entry for each document.
        - `key_mask`, `implementation`, `cu_seqlens`: as in `forward`.
        - Returns `(y, state)`, `y` of shape `[batch, time, d_model]`.
        """
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Process a whole sequence in parallel.

        - `x`: `[batch, time, d_model]`.
        - `key_mask`: `bool [batch, time]`, True = real token.
        - `implementation`: as for the operations of `fwlab.ops`.
        - `cu_seqlens`: integers `[documents + 1]` from 0 to `time`, the
          borders of packed documents: none of them sees another one. The
          batch is then 1.
        - Returns `[batch, time, d_model]`.
        - Raises `ValueError` or `TypeError` for an invalid `x` or
          `cu_seqlens`.
        """
        return self.prefill(x, None, key_mask, implementation, cu_seqlens)[0]
