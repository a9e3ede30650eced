"""AFT-local and AFT-conv: a bias within a window, and 0 outside."""

import math
from typing import Annotated, Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from fwlab.ops import _operation as operation
from fwlab.ops import _triton
from fwlab.ops._operation import Kernel, Options, Steps
from fwlab.ops.aft.limits import not_causal, why_not
from fwlab.ops.aft.window import efficient, naive


def load() -> Any:
    """Import the Triton kernels, and return the function that launches them."""
    _triton.imported("fwlab.ops.aft.window.kernels")
    from fwlab.ops.aft.window import kernels

    return kernels.causal


FORMS = {
    "naive": naive.causal,
    "efficient": efficient.causal,
    "triton": Kernel(load, why_not),
}
NOT_CAUSAL = {
    "naive": naive.not_causal,
    "efficient": efficient.not_causal,
    "triton": Kernel(load, not_causal),
}
IMAGES = {"naive": naive.image, "efficient": efficient.image}

Heads = Annotated[Tensor, "batch time heads channels"]
Pixels = Annotated[Tensor, "batch height width heads channels"]


class WindowState(NamedTuple):
    """Hold the state of AFT-local and AFT-conv, of constant size.

    - `k`, `v`: `[batch, window - 1, channels]`, the most recent steps; a key that is
      masked or before the start is `-inf`.
    - `log_sum`, `mean`: `[batch, channels]`, the running mean of all older steps.
    """

    k: Tensor
    v: Tensor
    log_sum: Tensor
    mean: Tensor


class ImageOptions(TypedDict, total=False):
    """Declare the keyword options of `aft_conv2d` and their types."""

    key_mask: Tensor | None
    implementation: str


@operation.operation(FORMS, like="v", fills={"k": -math.inf})
def aft_local(
    q: Steps,
    k: Steps,
    v: Steps,
    band: Annotated[Tensor, "time window"],
    *,
    causal: bool = True,
    **options: Unpack[Options],
) -> tuple[Tensor, Any]:
    r"""Compute AFT-local: gated means of values with biases in a window (Eq. 4).

    - `q`, `k`, `v`: `[batch, time, channels]`.
    - `band`: `[time, window]`, column $j$ = the key $j$ steps back; if not causal
      `[time, 2 * window - 1]`, and the other columns are the keys 1, 2, … steps ahead.
      Outside the window the bias is 0, not $-\infty$: a row still sees every step.
    - `causal`, `key_mask`, `return_state`, `implementation`: as for `aft_simple`. A
      masked step still has its place in the window.
    - `state`: the `WindowState` of an earlier call (only `causal`).
    - Returns `y` `[batch, time, channels]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    The result is exact wherever $k + w$ is finite, and undefined elsewhere.

    A window of one step: a bias for the step itself.

        >>> q = k = torch.zeros(1, 2, 1)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1)
        >>> band = torch.full((2, 1), 3.0).log()
        >>> ops.aft_local(q, k, v, band).flatten()
        tensor([2.0000, 3.5000])

    Source: Zhai et al. 2021 (arXiv:2105.14103).
    """
    return _window("aft_local", q, k, v, band[None], causal, options)


@operation.operation(FORMS, like="v", fills={"k": -math.inf})
def aft_conv(
    q: Heads,
    k: Annotated[Tensor, "batch time heads keys"],
    v: Heads,
    kernel: Annotated[Tensor, "heads window"],
    *,
    causal: bool = True,
    **options: Unpack[Options],
) -> tuple[Tensor, Any]:
    r"""Compute AFT-conv: gated means of values with a bias for each distance (Eq. 6).

    - `q`, `v`: `[batch, time, heads, channels]`.
    - `k`: the same, or with one channel per head (the paper's form).
    - `kernel`: `[heads, window]` with columns as in the band of `aft_local`; if not
      causal `[heads, 2 * window - 1]`.
    - `causal`, `key_mask`, `return_state`, `implementation`: as for `aft_simple`. A
      masked step still has its place in the window.
    - `state`: the `WindowState` of an earlier call (only `causal`), with the channels
      of all heads side by side.
    - Returns `y` `[batch, time, heads, channels]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    The result is exact wherever $k + w$ is finite, and undefined elsewhere.

    One head, and a window of one step.

        >>> q = k = torch.zeros(1, 2, 1, 1)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 2, 1, 1)
        >>> kernel = torch.full((1, 1), 3.0).log()
        >>> ops.aft_conv(q, k, v, kernel).flatten()
        tensor([2.0000, 3.5000])

    Source: Zhai et al. 2021 (arXiv:2105.14103).
    """
    flat = _heads_side_by_side("aft_conv", q, k, v)
    y, state = _window("aft_conv", *flat, kernel[:, None], causal, options)
    return y.view(v.shape), state


@operation.operation(
    IMAGES,
    like="v",
    options=ImageOptions,
    defaults={"key_mask": None, "implementation": "auto"},
    fills={"k": -math.inf},
    steps=("batch", "height", "width"),
)
def aft_conv2d(
    q: Pixels,
    k: Annotated[Tensor, "batch height width heads keys"],
    v: Pixels,
    kernel: Annotated[Tensor, "heads size size"],
    **options: Unpack[ImageOptions],
) -> tuple[Tensor, Any]:
    r"""Compute AFT-conv on images: gated means with a bias for each offset (Eq. 6).

    Not causal: every pixel sees all pixels. The centred kernel holds the biases of the
    pixels within it; all others have bias 0.

    - `q`, `v`: `[batch, height, width, heads, channels]`.
    - `k`: the same, or with one channel per head (the paper's form).
    - `kernel`: `[heads, size, size]` with an odd `size`; its centre is the bias of the
      pixel itself.
    - `key_mask`: `bool [batch, height, width]`, True = real pixel.
    - `implementation`: "auto", "naive" or "efficient".
    - Returns `[batch, height, width, heads, channels]`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    The result is exact wherever $k + w$ is finite, and undefined elsewhere.

    Without a bias, all pixels count the same.

        >>> q = k = torch.zeros(1, 1, 2, 1, 1)
        >>> v = torch.tensor([4.0, 8.0]).view(1, 1, 2, 1, 1)
        >>> ops.aft_conv2d(q, k, v, torch.zeros(1, 1, 1)).flatten()
        tensor([3., 3.])

    Source: Zhai et al. 2021 (arXiv:2105.14103).
    """
    op, (_, height, width, *_), size = "aft_conv2d", v.shape, kernel.shape[-1]
    if size % 2 == 0:
        raise ValueError(f"{op}: expected kernel of odd size, got size {size}")
    flat = _heads_side_by_side(op, q, k, v)
    if not v.numel():
        return operation.empty(v, q, k, kernel), None
    compute, *x = operation.prepare(
        op, IMAGES, options["implementation"], *flat, kernel
    )
    return compute(*x, height, width).view(v.shape), None


def _window(
    op: str, q: Tensor, k: Tensor, v: Tensor, band: Tensor, causal: bool, options: Any
) -> tuple[Tensor, Any]:
    """Check the arguments of AFT-local or AFT-conv; compute outputs and final state.

    The state has the keys of the last steps and a running mean of all older steps.
    """
    width = band.shape[-1]
    if width < 1 or not (causal or width % 2):
        name, rows = ("band", "time") if op == "aft_local" else ("kernel", "heads")
        size = "at least 1" if causal else "odd (2 * window - 1)"
        raise ValueError(
            f"{op}: expected {name} of shape [{rows}, window] whose width is {size}, "
            f"got {[max(band.shape[:2]), width]}"
        )
    state, keep, fresh = options["state"], options["return_state"], False
    forms = FORMS if causal else NOT_CAUSAL
    compute, *x = operation.prepare(op, forms, options["implementation"], q, k, v, band)
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k, v, band = *x[:3], x[3].to(dtype)
    (batch, time, channels), length = v.shape, band.shape[-1] - 1
    if v.numel() and not causal:
        return compute(q, k, v, band), None
    if v.numel() and compute is efficient.causal and state is None and not keep:
        return efficient.causal_without_state(q, k, v, band), None
    recent, running = (batch, length, channels), (batch, channels)
    if state is None:
        fresh, state = True, tuple(operation.unseen(v, recent, running))
    shapes = recent, recent, running, running
    state = operation.check_parts(op, state, WindowState, shapes, v)
    if not v.numel():
        return operation.empty(v, q, k, band), state
    # A new state has the dtype of the inputs, as a kernel requires.
    past = [part.to(v.dtype) if fresh else part for part in state[:2]]
    k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
    y, *older = compute(q, k, v, band, state.log_sum, state.mean)
    return y, WindowState(k[:, time:].to(dtype), v[:, time:].to(dtype), *older)


def _heads_side_by_side(
    op: str, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Flatten `[batch, ..., heads, channels]` to `[batch, time, channels]`."""
    if k.shape[-1] not in (1, q.shape[-1]):
        raise ValueError(
            f"{op}: expected k of shape {[*q.shape]}, or with 1 channel per head, "
            f"got {[*k.shape]}"
        )
    k = k.expand(q.shape)
    q, k, v = (x.flatten(-2).flatten(1, -2) for x in (q, k, v))
    return q, k, v
