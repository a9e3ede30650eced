"""The Attention Free Transformer: a gated mean per channel."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab.ops import autograd, checks, dispatch, gpu
from fwlab.ops.aft import efficient, naive
from fwlab.ops.operation import Operation


def _looks_ahead(
    capability: tuple[int, int],
    *,
    causal: bool = True,
    batch: int = 0,
    time: int = 0,
    channels: int = 0,
    **others: Any,
) -> str | None:
    if not causal:
        return "there is no kernel for causal=False"
    if batch > 65535:  # programs in the second direction of a grid
        return f"the kernels take 65535 sequences at most, not {batch}"
    if time * channels >= 2**31:  # numbers of a sequence, in 32 bits
        return "a sequence of so many numbers has no kernel"
    return None


MODULES: dict[str, Any] = {"naive": naive, "efficient": efficient}
KERNELS: dict[str, Any] = {
    "triton": gpu.Kernel(
        "fwlab.ops.aft.kernels", least=(7, 5), refuses=_looks_ahead
    )
}


def _record(name: str, mixer: str | None, **forms: Any) -> Operation:
    return Operation(name, "aft", forms, mixer)


AFT_SIMPLE = _record("aft_simple", "aft-simple", **MODULES, **KERNELS)
AFT_LOCAL = _record("aft_local", "aft-local", **MODULES, **KERNELS)
AFT_CONV = _record("aft_conv", "aft-conv", **MODULES, **KERNELS)
AFT_FULL = _record(
    "aft_full", "aft-full", naive=naive, **KERNELS, efficient=efficient
)
AFT_CONV2D = _record("aft_conv2d", None, **MODULES)
TABLES = {
    op.name: op.implementations
    for op in (AFT_SIMPLE, AFT_FULL, AFT_LOCAL, AFT_CONV, AFT_CONV2D)
}


class RunningMean(NamedTuple):
    """The memory of AFT-simple, per channel.

    - `log_sum`: `[batch, channels]`, logarithm of the sum of the
      exponentials of all keys so far; empty = `-inf`.
    - `mean`: `[batch, channels]`, the mean of their values; empty = 0.
    """

    log_sum: Tensor
    mean: Tensor


class KeysAndValues(NamedTuple):
    """The growing memory of AFT-full.

    - `k`, `v`: `[batch, past, channels]`; a masked key is `-inf`.
    """

    k: Tensor
    v: Tensor


class WindowState(NamedTuple):
    """The memory of AFT-local and AFT-conv, of constant size.

    - `k`, `v`: `[batch, window - 1, channels]`, the last steps; a key
      that is masked or before the beginning is `-inf`.
    - `log_sum`, `mean`: `[batch, channels]`, the running mean of
      everything older.
    """

    k: Tensor
    v: Tensor
    log_sum: Tensor
    mean: Tensor


def aft_simple(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    key_mask: Tensor | None = None,
    state: RunningMean | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, RunningMean]:
    r"""AFT-simple: a running mean of values, weighed by keys (Eq. 5).

    $y_t = \sigma(q_t) \odot \sum_{t' \le t} e^{k_{t'}} v_{t'} \,/\,
    \sum_{t' \le t} e^{k_{t'}}$, for each channel on its own.

    - `q`, `k`, `v`: `[batch, time, channels]`.
    - `causal`: see past and present; False: all steps.
    - `key_mask`: `bool [batch, time]`, True = real token. Masked steps
      are seen by nobody and return 0.
    - `state`: the `RunningMean` of an earlier call (only `causal`);
      None = nothing seen yet. float32 for half-precision inputs.
    - `return_state`: return `(y, state)` in place of `y`.
    - `implementation`: "auto", "naive", "efficient", or on a GPU
      "triton" (only `causal`).
    - Returns `y` `[batch, time, channels]` in the dtype of `v`. A step
      that may see nothing returns 0.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Exact for any finite `k`, up to the rounding of exponents: a key or
    the logarithm of a sum of size $x$ is known to $2^{-24} x$ in
    float32, where equal keys of $10^7$ may count as one. The sum of
    $|v|$ over time must be finite as well. No key of a later step
    changes an earlier output by one bit.

    Source: Zhai et al. 2021 (arXiv:2105.14103).
    """
    call = _Call(
        "aft_simple", q, k, v, causal, key_mask, implementation
    )
    batch, _, channels = call.q.shape
    names = RunningMean._fields
    start = call.state(
        RunningMean,
        state,
        return_state,
        dict.fromkeys(names, (batch, channels)),
    )

    def compute(form: ModuleType) -> tuple[Tensor, Any]:
        if causal:
            y, *after = form.simple(call.q, call.k, call.v, *start)
            return y, RunningMean(*after)
        mean = naive.mean_of(call.k, call.v, 0.0)
        return torch.sigmoid(call.q) * mean[:, None], None

    return call.run(compute, start, return_state)


def aft_full(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    *,
    causal: bool = True,
    key_mask: Tensor | None = None,
    state: KeysAndValues | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, KeysAndValues]:
    r"""AFT-full: every pair of positions has a bias (Eq. 2).

    $y_t = \sigma(q_t) \odot \sum_{t'} e^{k_{t'} + w_{t,t'}} v_{t'} \,/\,
    \sum_{t'} e^{k_{t'} + w_{t,t'}}$.

    - `q`, `k`, `v`: `[batch, time, channels]`.
    - `bias`: $w$, `[time, past + time]`; rows are the steps of this
      call, columns past (those of the state) and present keys.
    - `causal`, `key_mask`, `return_state`, `implementation`: as for
      `aft_simple`. A masked step uses up its row and its column.
    - `state`: the `KeysAndValues` of an earlier call (only `causal`).
    - Returns `y` `[batch, time, channels]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Exact, as `aft_simple` is, wherever $k + w$ is finite in the
    precision of the computation: float32 for half-precision inputs.
    Where that sum overflows the result is not defined. With a key and
    a bias of 3e38 in float32, "naive" and "efficient" give NaN, and
    "triton" may give a number.

    Source: Zhai et al. 2021 (arXiv:2105.14103).
    """
    call = _Call(
        "aft_full", q, k, v, causal, key_mask, implementation, bias=bias
    )
    batch, time, channels = call.q.shape
    past = 0
    if state is not None:
        checks.state_kind(call.op, state, KeysAndValues)
        past = checks.time_of(state[0], 3)
    start = call.state(
        KeysAndValues,
        state,
        return_state,
        {"k": (batch, past, channels), "v": (batch, past, channels)},
    )
    call.shape("bias", bias, [time, past + time], "time, past + time")

    def compute(form: ModuleType) -> tuple[Tensor, Any]:
        after = KeysAndValues(
            torch.cat([start.k, call.k], 1),
            torch.cat([start.v, call.v], 1),
        )
        last = past if causal else None
        w = bias[None].to(call.dtype)
        y = form.rows(call.q, *after, w, last)
        return y, KeysAndValues(*(x.to(call.dtype) for x in after))

    return call.run(compute, start, return_state)


def aft_local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Tensor,
    *,
    causal: bool = True,
    key_mask: Tensor | None = None,
    state: WindowState | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, WindowState]:
    r"""AFT-local: biases within a window, and 0 outside (Eq. 4).

    - `q`, `k`, `v`: `[batch, time, channels]`.
    - `band`: `[time, window]`, column $j$ = the key $j$ steps back; not
      causal `[time, 2 * window - 1]`, the further columns being the keys
      1, 2, … steps ahead. Outside the window the bias is 0, not
      $-\infty$: every step is still seen.
    - `causal`, `key_mask`, `return_state`, `implementation`: as for
      `aft_simple`. A masked step uses up its place in the window.
    - `state`: the `WindowState` of an earlier call (only `causal`).
    - Returns `y` `[batch, time, channels]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Exact wherever $k + w$ is finite; beyond that not defined, as for
    `aft_full`.

    Source: Zhai et al. 2021 (arXiv:2105.14103).
    """
    call = _Call(
        "aft_local",
        q,
        k,
        v,
        causal,
        key_mask,
        implementation,
        band=band,
    )
    time = call.q.shape[1]
    width = call.width("band", band, "time, window")
    call.shape("band", band, [time, width], "time, window")
    return _window(call, band[None], state, return_state)


def aft_conv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    *,
    causal: bool = True,
    key_mask: Tensor | None = None,
    state: WindowState | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, WindowState]:
    r"""AFT-conv: per head, one bias for each distance (Eq. 6).

    - `q`, `v`: `[batch, time, heads, channels]`.
    - `k`: the same, or with one channel per head (the paper's form).
    - `kernel`: `[heads, window]` with columns as in the band of
      `aft_local`; not causal `[heads, 2 * window - 1]`.
    - `causal`, `key_mask`, `return_state`, `implementation`: as for
      `aft_simple`. A masked step uses up its place in the window.
    - `state`: the `WindowState` of an earlier call (only `causal`), its
      channels being those of all heads, side by side.
    - Returns `y` `[batch, time, heads, channels]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Exact wherever $k + w$ is finite; beyond that not defined, as for
    `aft_full`.

    Source: Zhai et al. 2021 (arXiv:2105.14103).
    """
    op = "aft_conv"
    flat = _heads_side_by_side(op, q, k, v, "batch time heads channels")
    call = _Call(
        op, *flat, causal, key_mask, implementation, kernel=kernel
    )
    heads = q.shape[2]
    width = call.width("kernel", kernel, "heads, window")
    call.shape("kernel", kernel, [heads, width], "heads, window")
    out = _window(call, kernel[:, None], state, return_state)
    if return_state:
        return out[0].view(v.shape), out[1]
    return out.view(v.shape)


def aft_conv2d(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    *,
    key_mask: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    r"""AFT-conv for images: one bias for each offset (Eq. 6).

    Not causal: every pixel sees all others, those within the centred
    kernel with its bias, the rest with bias 0.

    - `q`, `v`: `[batch, height, width, heads, channels]`.
    - `k`: the same, or with one channel per head (the paper's form).
    - `kernel`: `[heads, size, size]`, `size` odd; its middle is the
      pixel itself.
    - `key_mask`: `bool [batch, height, width]`, True = real pixel.
    - `implementation`: "auto", "naive" or "efficient".
    - Returns `[batch, height, width, heads, channels]`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Exact wherever $k + w$ is finite; beyond that not defined, as for
    `aft_full`.

    Source: Zhai et al. 2021 (arXiv:2105.14103).
    """
    op = "aft_conv2d"
    flat = _heads_side_by_side(
        op, q, k, v, "batch height width heads channels"
    )
    batch, height, width, heads, _ = v.shape
    if key_mask is not None:
        pixels = {"batch": batch, "height": height, "width": width}
        checks.mask(op, "key_mask", key_mask, q, **pixels)
        key_mask = key_mask.flatten(1)
    call = _Call(
        op, *flat, False, key_mask, implementation, kernel=kernel
    )
    size = kernel.shape[-1] if kernel.dim() else 0
    call.shape(
        "kernel", kernel, [heads, size, size], "heads, size, size"
    )
    if size % 2 == 0:
        raise ValueError(
            f"{op}: kernel has size {size}, but an odd size was wanted"
        )

    def compute(form: ModuleType) -> tuple[Tensor, Any]:
        w = kernel.to(call.dtype)
        return form.image(
            call.q, call.k, call.v, w, height, width
        ), None

    return call.run(compute, None, False).view(v.shape)


def _window(
    call: "_Call",
    band: Tensor,
    state: WindowState | None,
    return_state: bool,
) -> Any:
    batch, time, channels = call.q.shape
    steps = band.shape[-1] - 1 if call.causal else 0
    last, running = (batch, steps, channels), (batch, channels)
    shape: dict[str, tuple[int, ...]] = {"k": last, "v": last}
    shape |= {"log_sum": running, "mean": running}
    start = call.state(WindowState, state, return_state, shape)

    def compute(form: ModuleType) -> tuple[Tensor, Any]:
        k = torch.cat([start.k, call.k], 1)
        v = torch.cat([start.v, call.v], 1)
        y, log_sum, mean = form.window(
            call.q,
            k,
            v,
            band.to(call.dtype),
            start.log_sum,
            start.mean,
            call.causal,
        )
        k, v = (x[:, time:].to(call.dtype) for x in (k, v))
        return y, WindowState(k, v, log_sum, mean)

    return call.run(compute, start, return_state)


class _Call:
    """Arguments of one call, checked, masked, and in the precision that
    the chosen form reads."""

    def __init__(
        self,
        op: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        key_mask: Tensor | None,
        implementation: str,
        **weights: Tensor,
    ):
        dims = "batch time channels"
        sizes = checks.shapes(op, q=(q, dims), k=(k, dims), v=(v, dims))
        for name, weight in weights.items():
            if not isinstance(weight, Tensor):
                raise TypeError(
                    f"{op}: {name} must be a tensor, not {type(weight).__name__}"
                )
        self.dtype = checks.compute_dtype(op, q=q, k=k, v=v, **weights)
        self.op, self.causal, self.key_mask = op, causal, key_mask
        _, self.form = dispatch.choose(
            op,
            TABLES[op],
            implementation,
            *(q, k, v),
            causal=causal,
            **sizes,
        )
        self.weights, self.out = weights, v.dtype
        if key_mask is not None:
            batch, time = sizes["batch"], sizes["time"]
            checks.mask(
                op, "key_mask", key_mask, q, batch=batch, time=time
            )
            seen = key_mask[..., None]
            # A key of -inf is seen by nobody.
            q, v = torch.where(seen, q, 0), torch.where(seen, v, 0)
            k = torch.where(seen, k, -torch.inf)
        if self.form in (naive, efficient):
            q, k, v = (x.to(self.dtype) for x in (q, k, v))
        self.q, self.k, self.v = q, k, v  # kernels convert themselves

    def width(self, name: str, weight: Tensor, dims: str) -> int:
        """The last size of a band or kernel; both sides of 0 are even."""
        width = weight.shape[-1] if weight.dim() else 0
        if width < 1 or not (self.causal or width % 2):
            wanted = (
                "at least 1" if self.causal else "odd (2 * window - 1)"
            )
            raise ValueError(
                f"{self.op}: {name} has shape {list(weight.shape)} ([{dims}]), but "
                f"the last size must be {wanted}"
            )
        return width

    def shape(
        self, name: str, weight: Tensor, wanted: list[int], dims: str
    ) -> None:
        if list(weight.shape) != wanted:
            raise ValueError(
                f"{self.op}: {name} has shape {list(weight.shape)}, but {wanted} "
                f"was wanted ([{dims}])"
            )

    def state(
        self,
        kind: Callable,
        state: Any,
        return_state: bool,
        shapes: dict[str, tuple[int, ...]],
    ) -> Any:
        """The state that was given, or an empty one."""
        if not self.causal and (state is not None or return_state):
            raise ValueError(
                f"{self.op}: a state needs causal=True; without it every step "
                "sees all others"
            )
        if state is None:
            empty = {
                "k": -torch.inf,
                "log_sum": -torch.inf,
                "v": 0,
                "mean": 0,
            }
            return kind(
                *(
                    self.q.new_full(
                        shape,
                        empty[name],
                        dtype=self.v.dtype
                        if name in ("k", "v")
                        else self.dtype,
                    )
                    for name, shape in shapes.items()
                )
            )
        checks.state_kind(self.op, state, kind)
        for (part, shape), given in zip(
            shapes.items(), state, strict=True
        ):
            checks.state_part(
                self.op,
                f"state.{part}",
                given,
                shape,
                self.dtype,
                self.q,
            )
        return kind(*state)

    @torch.compiler.disable
    def run(
        self, compute: Callable, start: Any, return_state: bool
    ) -> Any:
        """Call `compute` with the chosen form, in full precision."""
        with autograd.full_precision(self.q):
            if self.q.shape[1] == 0:  # still a function of its inputs
                given = (self.q, self.v, *self.weights.values())
                y = self.k * sum(x.sum().to(self.dtype) for x in given)
                after = start
            else:
                y, after = compute(self.form)
            if self.key_mask is not None:
                y = torch.where(self.key_mask[..., None], y, 0)
            y = y.to(self.out)
        return (y, after) if return_state else y


def _heads_side_by_side(
    op: str, q: Tensor, k: Tensor, v: Tensor, dims: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`[batch, ..., heads, channels]` to `[batch, time, channels]`."""
    if (
        isinstance(k, Tensor)
        and isinstance(q, Tensor)
        and k.dim() == q.dim()
        and k.shape[-1] == 1
    ):
        k = k.expand(*k.shape[:-1], q.shape[-1])
    checks.shapes(op, q=(q, dims), k=(k, dims), v=(v, dims))
    q, k, v = (x.flatten(-2).flatten(1, -2) for x in (q, k, v))
    return q, k, v
