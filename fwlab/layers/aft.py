r"""The Attention Free Transformer as layers (Zhai et al. 2021).

$Q, K, V = X W^Q, X W^K, X W^V$, then one of the operations, which apply
the gate $\sigma(Q)$ themselves, then an output projection. No projection
has a bias. The layers differ in the position bias $w$.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fwlab import arguments, ops
from fwlab.feature_maps import l2_normalize
from fwlab.layers.causal import Causal
from fwlab.layers.heads import head_width, split_heads
from fwlab.ops.call import checks


class PositionedState(NamedTuple):
    """The state of a layer whose biases depend on the position.

    - `position`: number of tokens so far.
    - `memory`: the state of the operation.
    """

    position: int
    memory: ops.WindowState


class _AFT(Causal):
    """The base class of all forms; `_mix` is the operation."""

    # Only projections: the gate is in the operation, and biases are in the forms.
    def __init__(self, d_model: int, causal: bool):
        super().__init__()
        head_width(type(self).__name__, d_model, 1)
        arguments.flags(type(self).__name__, causal=causal)
        self.d_model, self.causal = d_model, causal
        self.to_q = nn.Linear(d_model, d_model, bias=False)
        self.to_k = nn.Linear(d_model, d_model, bias=False)
        self.to_v = nn.Linear(d_model, d_model, bias=False)
        self.to_out = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        q, k, v = self._project(x, key_mask, cu_seqlens)
        options = self._options(key_mask, implementation, cu_seqlens)
        return self.to_out(self._mix(q, k, v, 0, causal=self.causal, **options))

    def prefill(
        self,
        x: Tensor,
        state: Any = None,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        if not self.causal:
            raise ValueError(
                f"{type(self).__name__}: prefill and step need causal=True; for a "
                "whole sequence, call the layer itself"
            )
        q, k, v = self._project(x, key_mask, cu_seqlens)
        past, memory = self._unpack(state)
        options = self._options(key_mask, implementation, cu_seqlens)
        options |= {"causal": True, "state": memory, "return_state": True}
        y, memory = self._mix(q, k, v, past, **options)
        return self.to_out(y), self._pack(past + x.shape[1], memory)

    def state_size(self, time: int = 0) -> int:
        """Number of scalars in the state of one sequence.

        - `time`: tokens so far.
        - Returns the count. `AFTConv2d`, which has no state, raises
          `NotImplementedError`.
        """
        raise NotImplementedError

    # $Q$, $K$ and $V$ of real tokens; a masked token counts as 0.
    def _project(self, x: Tensor, *checked: Any) -> tuple[Tensor, Tensor, Tensor]:
        x = self._checked(x, *checked)
        return self.to_q(x), self.to_k(x), self.to_v(x)

    # What all operations take; only some know packed documents.
    def _options(
        self, key_mask: Tensor | None, implementation: str, cu_seqlens: Tensor | None
    ) -> dict[str, Any]:
        options = {"key_mask": key_mask, "implementation": implementation}
        return options | ({"cu_seqlens": cu_seqlens} if self.packs else {})

    # The operation of a form, for `past` tokens before these.
    def _mix(self, q: Tensor, k: Tensor, v: Tensor, past: int, **options: Any) -> Any:
        raise NotImplementedError

    # The number of tokens so far, and the state of the operation. A form without a
    # position bias does not count tokens.
    def _unpack(self, state: Any) -> tuple[Any, Any]:
        return 0, state

    # The inverse of `_unpack`.
    def _pack(self, position: int, memory: Any) -> Any:
        return memory


class AFTSimple(_AFT):
    """AFT without position bias (Eq. 5): a running mean per channel.

    - `d_model`: width of the input.
    - `causal`: see past and present; False = all tokens, `forward` only.
    - Raises `ValueError` or `TypeError` for an invalid size.

    Its state is a `RunningMean`, two scalars per channel. Apart from
    causality, it does not depend on the order of the tokens.

        >>> AFTSimple(d_model=8)(torch.randn(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    packs = skips = True

    def __init__(self, d_model: int, causal: bool = True):
        super().__init__(d_model, causal)

    def state_size(self, time: int = 0) -> int:
        return 2 * self.d_model

    # Eq. 5 has no bias, so the position has no effect.
    def _mix(self, q: Tensor, k: Tensor, v: Tensor, past: int, **options: Any) -> Any:
        return ops.aft_simple(q, k, v, **options)


class _Positioned(_AFT):
    """Biases from tables of `max_len` positions."""

    # $u$ and $v$ of Eq. 7 start small but not at 0: if both were 0, neither would get a
    # gradient.
    def __init__(self, d_model: int, causal: bool, max_len: int, factor: int | None):
        super().__init__(d_model, causal)
        factors = {} if factor is None else {"factor": factor}
        arguments.integers(type(self).__name__, 1, max_len=max_len, **factors)
        self.max_len, self.factor = max_len, factor
        if factor is not None:
            self.bias_u = nn.Parameter(0.1 * torch.randn(max_len, factor))
            self.bias_v = nn.Parameter(0.1 * torch.randn(max_len, factor))

    def position_tables(self) -> list[nn.Parameter]:
        """The parameters that grow with `max_len`.

        - Returns one or two tables of biases.
        """
        named = dict(self.named_parameters(recurse=False))
        return list(named.values())

    # Past the end of the table there is no bias to take.
    def _end(self, past: int, time: int) -> int:
        end = past + time
        if end > self.max_len:
            raise ValueError(
                f"{type(self).__name__}: expected at most max_len={self.max_len} "
                f"tokens, the length of the bias table, got {end}"
            )
        return end


class AFTFull(_Positioned):
    r"""AFT with a bias for every pair of positions (Eq. 2).

    - `d_model`: width of the input.
    - `max_len`: maximum sequence length; beyond it, `ValueError`.
    - `factor`: $d'$ of the factorised bias $w_{t,t'} = u_t \cdot v_{t'}$ (Eq. 7) with
      $2 \cdot \text{max\_len} \cdot d'$ parameters, which start normal with standard
      deviation 0.1; None = a table of `max_len` by `max_len`, which starts at 0.
    - `causal`: see past and present; False = all tokens, `forward` only.
    - Raises `ValueError` or `TypeError` for invalid sizes.

    Its state, `KeysAndValues`, grows with every token.

        >>> AFTFull(d_model=8, max_len=100).state_size(time=50)
        800
    """

    # A whole table can start at 0, where its gradient is not 0.
    def __init__(
        self, d_model: int, max_len: int, factor: int | None = None, causal: bool = True
    ):
        super().__init__(d_model, causal, max_len, factor)
        if factor is None:
            self.bias = nn.Parameter(torch.zeros(max_len, max_len))

    def state_size(self, time: int) -> int:  # type: ignore[override]
        return 2 * time * self.d_model

    # Its state has every past key, and so their number.
    def _unpack(self, state: Any) -> tuple[Any, Any]:
        if state is None:
            return 0, None
        checks.state_kind("AFTFull", state, ops.KeysAndValues)
        return checks.time_of(state[0], 3), state

    # Of the biases of Eq. 2: rows for these queries, columns for all keys so far.
    def _mix(self, q: Tensor, k: Tensor, v: Tensor, past: int, **options: Any) -> Any:
        end = self._end(past, q.shape[1])
        if self.factor is None:
            bias = self.bias[past:end, :end]
        else:
            bias = self.bias_u[past:end] @ self.bias_v[:end].T  # Eq. 7
        return ops.aft_full(q, k, v, bias, **options)


class AFTLocal(_Positioned):
    r"""AFT with biases within a window (Eq. 4).

    - `d_model`: width of the input.
    - `max_len`: maximum sequence length; beyond it, `ValueError`.
    - `window`: $s$; a token has biases for itself and the $s - 1$ tokens before it (not
      causal: and after it). All other tokens contribute with bias 0.
    - `factor`: $d'$ of the factorised bias (Eq. 7), as in `AFTFull`;
      None = a band of `max_len` by `window`, which starts at 0.
    - `causal`: see past and present; False = all tokens, `forward` only.
    - Raises `ValueError` or `TypeError` for invalid sizes.

    Its state, a `PositionedState`, has constant size.

        >>> AFTLocal(d_model=8, max_len=100, window=4).state_size()
        64
    """

    # A causal band has no columns for later tokens.
    def __init__(
        self,
        d_model: int,
        max_len: int,
        window: int = 32,
        factor: int | None = None,
        causal: bool = True,
    ):
        super().__init__(d_model, causal, max_len, factor)
        arguments.integers("AFTLocal", 1, window=window)
        self.window = window
        if factor is None:
            columns = window if causal else 2 * window - 1
            self.band = nn.Parameter(torch.zeros(max_len, columns))

    def state_size(self, time: int = 0) -> int:
        return 2 * self.window * self.d_model

    # A window does not know how many tokens came before it, so the state counts them.
    def _unpack(self, state: Any) -> tuple[Any, Any]:
        if state is None:
            return 0, None
        checks.state_kind("AFTLocal", state, PositionedState)
        position, memory = state
        if not isinstance(position, int | torch.SymInt):
            kind = type(position).__name__
            raise TypeError(
                f"AFTLocal: expected state.position to be an integer, got {kind}"
            )
        return position, memory

    def _pack(self, position: int, memory: Any) -> Any:
        return PositionedState(position, memory)

    # Rows of the band for these queries: each token has its own biases (Eq. 4).
    def _mix(self, q: Tensor, k: Tensor, v: Tensor, past: int, **options: Any) -> Any:
        end = self._end(past, q.shape[1])
        if self.factor is None:
            band = self.band[past:end]
        else:
            band = self._factorised(past, end)
        return ops.aft_local(q, k, v, band, **options)

    def _factorised(self, past: int, end: int) -> Tensor:
        r"""Rows `past` to `end` of the band of $u_t \cdot v_{t'}$."""
        reach = self.window - 1
        ahead = 0 if self.causal else reach
        # One row too many: `unfold` cannot return zero rows.
        table = nn.functional.pad(self.bias_v[:end], (0, 0, reach, ahead + 1))
        # Row t: the vectors of the steps t - reach to t + ahead.
        near = table[past:].unfold(0, reach + 1 + ahead, 1)[:-1]
        band = torch.einsum("td,tdj->tj", self.bias_u[past:end], near)  # Eq. 7
        back = band[:, : self.window].flip(1)
        return torch.cat([back, band[:, self.window :]], 1)


class _Kernel(nn.Module):
    r"""The biases of AFT-conv, re-parameterised (Eq. 8):

    $$w \leftarrow \gamma\, \frac{w - \mathrm{mean}(w)}{\mathrm{std}(w)} + \beta$$

    per head, with the biased standard deviation (divided by the size of the kernel, not
    by one less). $\gamma$ and $\beta$ start at 0, so the layer starts as AFT-simple,
    and the raw kernel, which starts normal, is trained from the second optimiser step
    on. A constant kernel becomes $\beta$.
    """

    # $\gamma$ and $\beta$ of Eq. 8, one per head.
    def __init__(self, *shape: int):
        super().__init__()
        self.raw = nn.Parameter(torch.randn(shape))
        self.gamma = nn.Parameter(torch.zeros(shape[0]))
        self.beta = nn.Parameter(torch.zeros(shape[0]))

    # Eq. 8. A vector of length 1, times $\sqrt n$, has standard deviation 1; and
    # `l2_normalize` turns 0/0 into 0.
    def forward(self) -> Tensor:
        flat = self.raw.flatten(1)
        centred = flat - flat.mean(1, keepdim=True)
        # The mean is rounded: the mean of equal entries may differ from them.
        constant = flat.amax(1, keepdim=True) == flat.amin(1, keepdim=True)
        centred = torch.where(constant, 0, centred)
        unit = l2_normalize(centred) * flat.shape[1] ** 0.5
        return (self.gamma[:, None] * unit + self.beta[:, None]).view_as(self.raw)


class AFTConv(_AFT):
    """AFT with one bias per head and distance (Eq. 6, with Eq. 8).

    - `d_model`: width of the input; a multiple of `heads`.
    - `heads`: number of heads; the channels of a head share its biases.
    - `window`: a token has biases for itself and the `window - 1` tokens before it (not
      causal: and after it). All other tokens contribute with bias 0.
    - `shared_key`: one key per head and token, as in the paper, instead
      of one per channel.
    - `causal`: see past and present; False = all tokens, `forward` only.
    - Raises `ValueError` or `TypeError` for invalid sizes.

    Its state, a `WindowState`, has constant size, and there is no
    maximum sequence length.

        >>> AFTConv(d_model=8, heads=2, window=4)(torch.randn(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    # `to_k` of the base class is replaced if all channels of a head share one key.
    def __init__(
        self,
        d_model: int,
        heads: int,
        window: int = 32,
        shared_key: bool = False,
        causal: bool = True,
    ):
        super().__init__(d_model, causal)
        head_width("AFTConv", d_model, heads)
        arguments.integers("AFTConv", 1, window=window)
        arguments.flags("AFTConv", shared_key=shared_key)
        self.heads, self.window = heads, window
        self.kernel = _Kernel(heads, window if causal else 2 * window - 1)
        if shared_key:
            self.to_k = nn.Linear(d_model, heads, bias=False)

    def state_size(self, time: int = 0) -> int:
        return 2 * self.window * self.d_model

    # The kernel is the same at all positions (Eq. 6), so no count of tokens is needed.
    def _mix(self, q: Tensor, k: Tensor, v: Tensor, past: int, **options: Any) -> Any:
        q, k, v = (split_heads(x, self.heads) for x in (q, k, v))
        out: Any = ops.aft_conv(q, k, v, self.kernel(), **options)
        if options.get("return_state"):
            return out[0].flatten(-2), out[1]
        return out.flatten(-2)


class AFTConv2d(_AFT):
    """AFT-conv for images (Eq. 6, with Eq. 8): every pixel sees all.

    - `d_model`: width of the input; a multiple of `heads`.
    - `heads`: number of heads; the channels of a head share its biases.
    - `size`: height and width of the centred kernel, odd.
    - `shared_key`: one key per head and pixel, as in the paper, instead
      of one per channel.
    - Raises `ValueError` or `TypeError` for invalid sizes.

    It has no state: `prefill`, `step` and `state_size` raise.

        >>> AFTConv2d(d_model=8, heads=2, size=3)(torch.randn(1, 5, 5, 8)).shape
        torch.Size([1, 5, 5, 8])
    """

    # An even kernel would have no centre.
    def __init__(self, d_model: int, heads: int, size: int, shared_key: bool = False):
        super().__init__(d_model, causal=False)
        head_width("AFTConv2d", d_model, heads)
        arguments.integers("AFTConv2d", 1, size=size)
        arguments.flags("AFTConv2d", shared_key=shared_key)
        if size % 2 == 0:
            raise ValueError(f"AFTConv2d: expected size to be odd, got {size}")
        self.heads = heads
        self.kernel = _Kernel(heads, size, size)
        if shared_key:
            self.to_k = nn.Linear(d_model, heads, bias=False)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        implementation: str = "auto",
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Process all pixels in parallel.

        - `x`: `[batch, height, width, d_model]`.
        - `key_mask`: `bool [batch, height, width]`, True = real pixel.
        - `implementation`: as for the operations of `fwlab.ops`.
        - `cu_seqlens`: None; images are not packed.
        - Returns `[batch, height, width, d_model]`.
        - Raises `ValueError` or `TypeError` for an invalid `x`.
        """
        dims = "batch height width d_model"
        parts = self._project(x, key_mask, cu_seqlens, dims)
        q, k, v = (split_heads(part, self.heads) for part in parts)
        y = ops.aft_conv2d(
            q, k, v, self.kernel(), key_mask=key_mask, implementation=implementation
        )
        return self.to_out(y.flatten(-2))
