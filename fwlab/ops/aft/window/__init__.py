"""AFT-local and AFT-conv: a bias within a window, and 0 outside."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab.ops.aft.call import AFTCall, refuses
from fwlab.ops.aft.window import efficient, naive
from fwlab.ops.call import checks, launcher
from fwlab.ops.call.call import Operation

AFT_LOCAL = Operation(
    name="aft_local",
    folder="aft/window",
    implementations={
        "naive": naive,
        "efficient": efficient,
        "triton": launcher.Kernel(
            "fwlab.ops.aft.window.kernels",
            minimum=(7, 5),
            refuses=refuses,
        ),
    },
)
AFT_CONV = replace(AFT_LOCAL, name="aft_conv")
AFT_CONV2D = Operation(
    name="aft_conv2d",
    folder="aft/window",
    implementations={"naive": naive, "efficient": efficient},
)


class WindowState(NamedTuple):
    """The state of AFT-local and AFT-conv, of constant size.

    - `k`, `v`: `[batch, window - 1, channels]`, the most recent steps; a
      key that is masked or before the start is `-inf`.
    - `log_sum`, `mean`: `[batch, channels]`, the running mean of
      all older steps.
    """

    k: Tensor
    v: Tensor
    log_sum: Tensor
    mean: Tensor


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
    - `band`: `[time, window]`, column $j$ = the key $j$ steps back; if
      not causal `[time, 2 * window - 1]`, and the other columns are the
      keys 1, 2, … steps ahead. Outside the window the bias is 0, not
      $-\infty$: a row still sees every step.
    - `causal`, `key_mask`, `return_state`, `implementation`: as for
      `aft_simple`. A masked step still has its place in the window.
    - `state`: the `WindowState` of an earlier call (only `causal`).
    - Returns `y` `[batch, time, channels]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    The result is exact wherever $k + w$ is finite, and undefined
    elsewhere.

    A window of one step: a bias for the step itself.

        >>> q = k = torch.zeros(1, 2, 1)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1)
        >>> band = torch.full((2, 1), 3.0).log()
        >>> ops.aft_local(q, k, v, band).flatten()
        tensor([2.0000, 3.5000])

    Source: Zhai et al. 2021 (arXiv:2105.14103).
    """
    call = AFTCall(
        AFT_LOCAL, q, k, v, causal, key_mask, implementation, band=band
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
      `aft_local`; if not causal `[heads, 2 * window - 1]`.
    - `causal`, `key_mask`, `return_state`, `implementation`: as for
      `aft_simple`. A masked step still has its place in the window.
    - `state`: the `WindowState` of an earlier call (only `causal`), with
      the channels of all heads side by side.
    - Returns `y` `[batch, time, heads, channels]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    The result is exact wherever $k + w$ is finite, and undefined
    elsewhere.

    One head, and a window of one step.

        >>> q = k = torch.zeros(1, 2, 1, 1)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> kernel = torch.full((1, 1), 3.0).log()
        >>> ops.aft_conv(q, k, v, kernel).flatten()
        tensor([2.0000, 3.5000])

    Source: Zhai et al. 2021 (arXiv:2105.14103).
    """
    op = "aft_conv"
    flat = _heads_side_by_side(op, q, k, v, "batch time heads channels")
    call = AFTCall(
        AFT_CONV, *flat, causal, key_mask, implementation, kernel=kernel
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

    Not causal: every pixel sees all pixels. The centred kernel holds
    the biases of the pixels within it; all others have bias 0.

    - `q`, `v`: `[batch, height, width, heads, channels]`.
    - `k`: the same, or with one channel per head (the paper's form).
    - `kernel`: `[heads, size, size]` with an odd `size`; its centre is
      the bias of the pixel itself.
    - `key_mask`: `bool [batch, height, width]`, True = real pixel.
    - `implementation`: "auto", "naive" or "efficient".
    - Returns `[batch, height, width, heads, channels]`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    The result is exact wherever $k + w$ is finite, and undefined
    elsewhere.

    Without a bias, all pixels count the same.

        >>> q = k = torch.zeros(1, 1, 2, 1, 1)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 1, 2, 1, 1)
        >>> ops.aft_conv2d(q, k, v, torch.zeros(1, 1, 1)).flatten()
        tensor([3., 3.])

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
    call = AFTCall(
        AFT_CONV2D,
        *flat,
        False,
        key_mask,
        implementation,
        kernel=kernel,
    )
    size = kernel.shape[-1] if kernel.dim() else 0
    call.shape(
        "kernel", kernel, [heads, size, size], "heads, size, size"
    )
    if size % 2 == 0:
        raise ValueError(
            f"{op}: expected kernel of odd size, got size {size}"
        )

    # An image is whole: there is no state.
    def run() -> tuple[Tensor, Any]:
        w = kernel.to(call.dtype)
        return call.form.image(
            call.q, call.k, call.v, w, height, width
        ), None

    return call.run(run, None, False).view(v.shape)


# `aft_local` and `aft_conv`: a band of biases, its first column that of
# the step itself. Keys of the last steps are kept for their biases, and
# older ones as a running mean.
def _window(
    call: AFTCall,
    band: Tensor,
    state: WindowState | None,
    return_state: bool,
) -> Any:
    batch, time, channels = call.q.shape
    length = band.shape[-1] - 1 if call.causal else 0
    recent, running = (batch, length, channels), (batch, channels)
    shape: dict[str, tuple[int, ...]] = {"k": recent, "v": recent}
    shape |= {"log_sum": running, "mean": running}
    # A whole sequence without a state needs no copy of keys and values.
    whole = call.form is efficient and call.causal
    whole = whole and state is None and not return_state
    start: Any = None
    if not whole:
        start = call.before(WindowState, state, return_state, shape)

    def run() -> tuple[Tensor, Any]:
        w = band.to(call.dtype)
        if not call.causal:
            return call.form.not_causal(call.q, call.k, call.v, w), None
        if whole:
            return efficient.whole(call.q, call.k, call.v, w), None
        k = torch.cat([start.k, call.k], 1)
        v = torch.cat([start.v, call.v], 1)
        y, *older = call.form.causal(
            call.q, k, v, w, start.log_sum, start.mean
        )
        k, v = (x[:, time:].to(call.dtype) for x in (k, v))
        return y, WindowState(k, v, *older)

    return call.run(run, start, return_state)


def _heads_side_by_side(
    op: str, q: Tensor, k: Tensor, v: Tensor, dims: str
) -> tuple[Tensor, Tensor, Tensor]:
    """`[batch, ..., heads, channels]` to `[batch, time, channels]`."""
    checks.shapes(op, q=(q, None), k=(k, None))
    if k.dim() == q.dim() and k.shape[-1] == 1:
        k = k.expand(*k.shape[:-1], q.shape[-1])
    checks.shapes(op, q=(q, dims), k=(k, dims), v=(v, dims))
    q, k, v = (x.flatten(-2).flatten(1, -2) for x in (q, k, v))
    return q, k, v
