"""What all causal layers share: one sequence, or one token, by `prefill`."""

from typing import Any

from torch import Tensor, nn

from fwlab.layers.heads import check_input, real_tokens


class Causal(nn.Module):
    """A causal layer that defines `prefill`.

    Any mixture of `prefill` and `step` gives what `forward` gives for the
    whole sequence. Methods that override these are documented here.
    """

    #: Whether `forward` and `prefill` take `cu_seqlens`.
    packs = False
    #: Whether later calls go on as if masked tokens of `prefill` had not been there:
    #: no position, distance or window counts them.
    skips = False
    #: The implementation for a single token.
    one_token = "naive"
    d_model: int
    to_q: nn.Module

    def _first(self) -> nn.Module:
        """A linear layer: inputs have the device and dtype of its weights."""
        return self.to_q

    def _checked(
        self,
        x: Tensor,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        dims: str = "batch time d_model",
    ) -> Tensor:
        """An input after its checks, with masked tokens set to 0."""
        layer = type(self).__name__
        if cu_seqlens is not None and not self.packs:
            raise ValueError(
                f"{layer}: expected no cu_seqlens, since this layer cannot keep "
                "packed documents apart"
            )
        check_input(layer, "x", x, dims, self.d_model, self._first())
        return real_tokens(layer, x, dims, key_mask)

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
        - `key_mask`, `implementation`, `cu_seqlens`: as in `forward`. With
          `cu_seqlens`, a state has one entry for each document.
        - Returns `(y, state)`, `y` of shape `[batch, time, d_model]`.
        - Raises `ValueError` or `TypeError`, naming the argument;
          `ValueError` if the layer is not causal.
        """
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Process a whole sequence.

        - `x`: `[batch, time, d_model]`.
        - `key_mask`: `bool [batch, time]`, True = real token. Masked steps
          are skipped, and their output is 0.
        - `implementation`: as for the operations of `fwlab.ops`.
        - `cu_seqlens`: integers `[documents + 1]` from 0 to `time`, the
          borders of packed documents: none of them sees another one. The
          batch is then 1. Only layers with `packs` take it.
        - Returns `[batch, time, d_model]`.
        - Raises `ValueError` or `TypeError`, naming the argument.
        """
        return self.prefill(x, None, key_mask, implementation, cu_seqlens)[0]

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Process one token.

        - `x`: `[batch, d_model]`.
        - `state`: what an earlier call returned; None = start of sequence.
        - Returns `(y, state)`, `y` of shape `[batch, d_model]`.
        """
        layer = type(self).__name__
        check_input(layer, "x", x, "batch d_model", self.d_model, self._first())
        y, state = self.prefill(x[:, None], state, implementation=self.one_token)
        return y[:, 0], state
