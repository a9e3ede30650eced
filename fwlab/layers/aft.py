r"""Define the layers of the Attention Free Transformer (Zhai et al. 2021).

$Q, K, V = X W^Q, X W^K, X W^V$, then one of the operations of `fwlab.ops`, then an output
projection. No projection has a bias. The layers differ in the position bias $w$.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fwlab import arguments, ops
from fwlab.feature_maps import l2_normalize
from fwlab.layers.causal import Causal, with_state
from fwlab.layers.heads import head_width, per_head, projections
from fwlab.ops import _operation as operation


class PositionedState(NamedTuple):
    """Hold the number of past tokens, and the state of `ops.aft_local`."""

    position: int
    memory: ops.WindowState


class AFT(Causal):
    """Project inputs to queries, keys and values, and combine them in `_attend`."""

    #: The number of tokens in the state, if the state has a constant size.
    window = 1

    def __init__(self, d_model: int, causal: bool = True):
        super().__init__()
        arguments.integers(type(self).__name__, 1, d_model=d_model)
        arguments.flags(type(self).__name__, causal=causal)
        self.d_model, self.causal = d_model, causal
        sizes = [d_model] * 4
        self.to_q, self.to_k, self.to_v, self.to_out = projections(d_model, *sizes)

    def state_size(self, time: int = 0) -> int:
        return 2 * self.window * self.d_model

    def _mix(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        """Project the input, call the AFT operation, and project its output."""
        if options["return_state"] and not self.causal:
            raise ValueError(
                f"{type(self).__name__}: prefill and step need causal=True; for a "
                "whole sequence, call the layer itself"
            )
        parts = self.to_q(x), self.to_k(x), self.to_v(x)
        options |= {"causal": self.causal, "state": state}
        y, state = with_state(self._attend(*parts, **options))
        return self.to_out(y.flatten(-2) if y.dim() > x.dim() else y), state

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Call the AFT operation of this layer."""
        raise NotImplementedError


class AFTSimple(AFT):
    """Compute AFT without position biases (Eq. 5): a running mean per channel.

    - `d_model`: width of the input.
    - `causal`: see past and present; False = all tokens, `forward` only.
    - Raises `ValueError` or `TypeError` for an invalid size.

    Its state is a `RunningMean`, two scalars per channel. The order of past tokens has
    no effect.

        >>> AFTSimple(d_model=8)(torch.randn(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

    packs = skips = True

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Call `ops.aft_simple`, the running mean of Eq. 5."""
        return ops.aft_simple(q, k, v, **options)


class PositionedAFT(AFT):
    """Extend `AFT` with tables of position biases for `max_len` positions."""

    # The factors $u$ and $v$ of biases (Eq. 7) start small but not at 0: if both were
    # 0, neither factor would get a gradient.
    def __init__(self, d_model: int, causal: bool, max_len: int, factor: int | None):
        super().__init__(d_model, causal)
        factors = {} if factor is None else {"factor": factor}
        arguments.integers(type(self).__name__, 1, max_len=max_len, **factors)
        self.max_len, self.factor = max_len, factor
        if factor is not None:
            self.bias_u = nn.Parameter(0.1 * torch.randn(max_len, factor))
            self.bias_v = nn.Parameter(0.1 * torch.randn(max_len, factor))

    def position_tables(self) -> list[nn.Parameter]:
        """List the tables with one row per position. Returns one or two parameters."""
        return list(self.parameters(recurse=False))

    def _check_end(self, end: int) -> None:
        """Raise `ValueError` if the sequence is longer than the table of biases."""
        if end > self.max_len:
            raise ValueError(
                f"{type(self).__name__}: expected at most max_len={self.max_len} "
                f"tokens, the length of the bias table, got {end}"
            )


class AFTFull(PositionedAFT):
    r"""Compute AFT with a bias for every pair of positions (Eq. 2).

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

    def __init__(
        self, d_model: int, max_len: int, factor: int | None = None, causal: bool = True
    ):
        super().__init__(d_model, causal, max_len, factor)
        if factor is None:
            self.bias = nn.Parameter(torch.zeros(max_len, max_len))

    def state_size(self, time: int) -> int:  # type: ignore[override]
        return 2 * time * self.d_model

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Call `ops.aft_full` with the biases of the new queries for all keys."""
        state, past = options["state"], 0
        if state is not None:
            operation.check_state("AFTFull", state, ops.KeysAndValues)
            past = operation.time_of(state[0], 3)
        end = past + q.shape[1]
        self._check_end(end)
        if self.factor is None:
            bias = self.bias[past:end, :end]
        else:
            bias = self.bias_u[past:end] @ self.bias_v[:end].T  # Eq. 7
        return ops.aft_full(q, k, v, bias, **options)


class AFTLocal(PositionedAFT):
    r"""Compute AFT with biases within a window (Eq. 4).

    - `window`: $s$; a token has biases for itself and the $s - 1$ tokens before it (not
      causal: and after it). All other tokens contribute with bias 0.
    - `d_model`, `max_len`, `factor`, `causal`: as in `AFTFull`, but without a `factor`
      the biases are a band of `max_len` by `window`.
    - Raises `ValueError` or `TypeError` for invalid sizes.

    Its state, a `PositionedState`, has constant size.

        >>> AFTLocal(d_model=8, max_len=100, window=4).state_size()
        64
    """

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

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Call `ops.aft_local` with the window biases of the new queries (Eq. 4)."""
        state, past = options["state"], 0
        if state is not None:
            operation.check_state("AFTLocal", state, PositionedState)
            past, options["state"] = state
            if not isinstance(past, int | torch.SymInt):
                raise TypeError(
                    "AFTLocal: expected state.position to be an integer, got "
                    f"{type(past).__name__}"
                )
        end = past + q.shape[1]
        self._check_end(end)
        band = self._factorised(past, end) if self.factor else self.band[past:end]
        y, memory = with_state(ops.aft_local(q, k, v, band, **options))
        return (y, PositionedState(end, memory)) if options["return_state"] else y

    def _factorised(self, past: int, end: int) -> Tensor:
        r"""Compute rows `past` to `end` of factorised biases, $u_t \cdot v_{t'}$."""
        reach = self.window - 1
        ahead = 0 if self.causal else reach
        # The table has an additional row, because `unfold` cannot return zero rows.
        table = nn.functional.pad(self.bias_v[:end], (0, 0, reach, ahead + 1))
        # Row t contains the vectors of the steps t - reach to t + ahead.
        near = table[past:].unfold(0, reach + 1 + ahead, 1)[:-1]
        band = torch.einsum("td,tdj->tj", self.bias_u[past:end], near)  # Eq. 7
        back = band[:, : self.window].flip(1)
        return torch.cat([back, band[:, self.window :]], 1)


class Kernel(nn.Module):
    r"""Normalise the raw biases of AFT-conv (Eq. 8).

    $$w \leftarrow \gamma\, \frac{w - \mathrm{mean}(w)}{\mathrm{std}(w)} + \beta$$

    per head, with the biased standard deviation (divided by the size of the kernel, not
    by one less). $\gamma$ and $\beta$ start at 0, so the layer starts as AFT-simple,
    and the raw kernel, which starts normal, is trained from the second optimiser step
    on. A constant kernel becomes $\beta$.
    """

    def __init__(self, *shape: int):
        super().__init__()
        self.raw = nn.Parameter(torch.randn(shape))
        self.gamma = nn.Parameter(torch.zeros(shape[0]))
        self.beta = nn.Parameter(torch.zeros(shape[0]))

    def forward(self) -> Tensor:
        """Return the normalised biases (Eq. 8), in the shape of the raw kernel."""
        # A vector of length $\sqrt n$ and mean 0 has standard deviation 1.
        # `l2_normalize` returns 0 for 0/0.
        flat = self.raw.flatten(1)
        centred = flat - flat.mean(1, keepdim=True)
        # Because of rounding, the mean of equal entries may differ from the entries.
        constant = flat.amax(1, keepdim=True) == flat.amin(1, keepdim=True)
        centred = torch.where(constant, 0, centred)
        unit = l2_normalize(centred) * flat.shape[1] ** 0.5
        return (self.gamma[:, None] * unit + self.beta[:, None]).view_as(self.raw)


class AFTConv(AFT):
    """Compute AFT with one bias per head and distance (Eqs. 6 and 8).

    - `d_model`: width of the input; a multiple of `heads`.
    - `heads`: number of heads; the channels of a head share its biases.
    - `window`, `causal`: as in `AFTLocal`.
    - `shared_key`: use one key per head and token, as in the paper, not per channel.
    - Raises `ValueError` or `TypeError` for invalid sizes.

    Its state, a `WindowState`, has constant size. There is no maximum sequence length.

        >>> AFTConv(d_model=8, heads=2, window=4)(torch.randn(1, 5, 8)).shape
        torch.Size([1, 5, 8])
    """

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
        self.kernel = Kernel(heads, window if causal else 2 * window - 1)
        if shared_key:
            self.to_k = nn.Linear(d_model, heads, bias=False)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Call `ops.aft_conv` with the kernel, which all positions share (Eq. 6)."""
        q, k, v = per_head(q, k, v, heads=self.heads)
        return ops.aft_conv(q, k, v, self.kernel(), **options)


class AFTConv2d(AFT):
    """Compute AFT-conv on images (Eqs. 6 and 8); every pixel sees all pixels.

    - `size`: height and width of the centred kernel, odd.
    - `d_model`, `heads`, `shared_key`: as in `AFTConv`; pixels are tokens.
    - Raises `ValueError` or `TypeError` for invalid sizes.

    Inputs are `[batch, height, width, d_model]`, and a `key_mask` is `[batch, height,
    width]`. It has no state: `prefill`, `step` and `state_size` raise.

        >>> AFTConv2d(d_model=8, heads=2, size=3)(torch.randn(1, 5, 5, 8)).shape
        torch.Size([1, 5, 5, 8])
    """

    dims = "batch height width d_model"

    def state_size(self, time: int = 0) -> int:
        return Causal.state_size(self, time)

    def __init__(self, d_model: int, heads: int, size: int, shared_key: bool = False):
        super().__init__(d_model, causal=False)
        head_width("AFTConv2d", d_model, heads)
        arguments.integers("AFTConv2d", 1, size=size)
        arguments.flags("AFTConv2d", shared_key=shared_key)
        arguments.require("AFTConv2d", size % 2, f"size to be odd, got {size}")
        self.heads = heads
        self.kernel = Kernel(heads, size, size)
        if shared_key:
            self.to_k = nn.Linear(d_model, heads, bias=False)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Call `ops.aft_conv2d` with the kernel, which all pixels share."""
        q, k, v = per_head(q, k, v, heads=self.heads)
        options = {name: options[name] for name in ("key_mask", "implementation")}
        return ops.aft_conv2d(q, k, v, self.kernel(), **options)
