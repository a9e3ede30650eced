"""Feedback memory: every layer sees what all layers made of the past."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab.ops import checks, chunks, gpu
from fwlab.ops.feedback import efficient, naive
from fwlab.ops.feedback.naive import FeedbackWeights

#: The most channels per head, and per token, of the kernels.
WIDEST, WIDEST_TOKEN = 256, 8192


def _refuses(
    capability: tuple[int, int],
    d: int = 0,
    key: int = 0,
    features: int = 0,
    **others: Any,
) -> str | None:
    for name, size, most in (
        ("d", d, WIDEST_TOKEN),
        ("key", key, WIDEST),
        ("features", features, WIDEST),
    ):
        if size > most:
            return f"the kernels take {name} up to {most}, not {size}"
    return None


FEEDBACK: dict[str, Any] = {
    "naive": naive.feedback,
    "efficient": efficient.feedback,
    "triton": gpu.Kernel(
        "fwlab.ops.feedback.kernels",
        "feedback",
        least=(7, 5),
        refuses=_refuses,
    ),
}


class FeedbackState(NamedTuple):
    """The memories of all steps so far, as keys and values.

    - `k`, `v`: `[batch, past, groups, heads, key]`, oldest first;
      `groups` is the number of layers, or 1 in the shared form.
    - `mask`: `bool [batch, past]`, True = a real memory; None while all
      are. Where sequences have different numbers of memories, those of
      the shorter ones stand at the end.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None


@torch.compiler.disable
def feedback(
    x: Tensor,
    weights: FeedbackWeights,
    *,
    heads: int,
    key_mask: Tensor | None = None,
    state: FeedbackState | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, FeedbackState]:
    r"""A stack of layers that attend to a memory of all layers.

    $m_t = \sum_{l=0}^{L} \mathrm{softmax}(w)_l\, x_t^l$, and each layer
    of step $t$ attends to $m_j$ for all $j < t$: not to its own step,
    and without a longest distance. Pre-norm, MLP with GELU, no biases,
    no norm at the end.

    - `x`: `[batch, time, d]`, the inputs $x_t^0$.
    - `weights`: a `FeedbackWeights`, whose shapes say how many layers
      there are and whether they share the projections of the memory.
    - `heads`: heads per layer; divides `d`.
    - `key_mask`: `bool [batch, time]`, True = real token. Masked steps
      are as if they were not there: no memory is made of them, distances
      do not count them, and they return 0.
    - `state`: the `FeedbackState` of an earlier call; None = no memories.
      Float32 for half-precision inputs.
    - `return_state`: return `(y, state)` in place of `y`.
    - `implementation`: "auto", "naive", "efficient" or "triton".
    - Returns `y` `[batch, time, d]`, the $x_t^L$, in the dtype of `x`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    At the first step there is nothing to attend to, and the attention
    gives 0. With no more than one memory in sight the softmax has
    nothing to choose from: then the gradients of `to_q` and `positions`
    are 0 (and with none, those of all that attention is made of).

    Source: Fan et al. 2020 (arXiv:2002.09402).
    """
    op = "feedback"
    given, sizes = _check_weights(op, weights, x)
    _check_heads(op, heads, sizes)
    named = {
        f"weights.{name}": tensor for name, tensor in given.items()
    }
    dtype = checks.compute_dtype(op, x=x, **named)
    compute = gpu.choose(op, FEEDBACK, implementation, x, **sizes)
    batch, time = sizes["batch"], sizes["time"]
    if key_mask is not None:
        checks.mask(op, "key_mask", key_mask, x, batch=batch, time=time)
    shape = [sizes["groups"], heads, sizes["d"] // heads]
    k, v, mask = _unpack(op, state, batch, shape, dtype, x)

    # Autocast would push the sums below into half precision.
    with chunks.full_precision(x):
        wide, real = x.to(dtype), key_mask
        if real is not None:  # real tokens first, in their order
            order = torch.argsort(~real, dim=1, stable=True)
            wide = torch.where(real[..., None], wide, 0)
            wide = _take(wide, order)
        given = {name: w.to(dtype) for name, w in given.items()}
        if time == 0:  # empty, and still a function of its inputs
            y = wide * sum(w.sum() for w in given.values())
        else:
            wide_weights = FeedbackWeights(**given)
            y, k, v = compute(wide, wide_weights, heads, k, v, mask)
        if real is not None:
            y = torch.where(
                real[..., None], _take(y, order.argsort(1)), 0
            )
    y = y.to(x.dtype)
    if not return_state:
        return y
    if real is None and mask is None:
        return y, FeedbackState(k, v, None)
    if real is None:
        real = torch.ones(
            batch, time, dtype=torch.bool, device=x.device
        )
    return y, _pack(k, v, mask, real)


def feedback_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor
) -> Tensor:
    r"""One query against the memories before it (a step of `feedback`).

    The score of the memory $\delta$ steps back is
    $(q \cdot k + q \cdot P s(\delta)) / \sqrt{d_{\text{key}}}$, with
    $s(\delta)$ the sines and cosines of $\omega_i \delta$.

    - `q`: `[batch, heads, key]`.
    - `k`, `v`: `[batch, past, heads, key]`, oldest first; the last one is
      1 step back. `past` may be 0, and then the result is 0.
    - `positions`: $P$, `[key, features]`, an even number of features.
    - Returns `[batch, heads, key]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    Source: Fan et al. 2020 (arXiv:2002.09402); the sinusoids are those
    of Transformer-XL (arXiv:1901.02860).
    """
    op = "feedback_attention"
    sizes = checks.shapes(
        op,
        q=(q, "batch heads key"),
        k=(k, "batch past heads key"),
        v=(v, "batch past heads key"),
        positions=(positions, "key features"),
    )
    dtype = checks.compute_dtype(op, q=q, k=k, v=v, positions=positions)
    _check_features(op, "positions", sizes["features"])
    with chunks.full_precision(q):
        wide = (x.to(dtype) for x in (q, k, v, positions))
        return naive.feedback_attention(*wide).to(v.dtype)


def _check_weights(
    op: str, weights: FeedbackWeights, x: Tensor
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Hold every tensor to its shape; they come back by name."""
    if not isinstance(weights, FeedbackWeights):
        raise TypeError(
            f"{op}: weights must be a FeedbackWeights, not {type(weights).__name__}"
        )
    w = weights
    given = {
        "to_q": (w.to_q, "layers d d"),
        "to_k": (w.to_k, "groups d d"),
        "to_v": (w.to_v, "groups d d"),
        "to_out": (w.to_out, "layers d d"),
        "norm_mixer": (w.norm_mixer, "layers d"),
        "norm_mlp": (w.norm_mlp, "layers d"),
        "expand": (w.expand, "layers d_ff d"),
        "contract": (w.contract, "layers d d_ff"),
        "positions": (w.positions, "key features"),
        "merge": (w.merge, "states"),
    }
    if w.norm_memory is not None:
        given["norm_memory"] = (w.norm_memory, "groups d")
    named = {f"weights.{name}": pair for name, pair in given.items()}
    sizes = checks.shapes(op, x=(x, "batch time d"), **named)
    layers, groups = sizes["layers"], sizes["groups"]
    if layers < 1 or groups not in (1, layers):
        raise ValueError(
            f"{op}: weights.to_k has {groups} groups, but 1 (shared) or as many as "
            f"there are layers ({layers}, at least 1) were wanted"
        )
    if sizes["states"] != layers + 1:
        raise ValueError(
            f"{op}: weights.merge has shape [{sizes['states']}], but [{layers + 1}] "
            "was wanted ([layers + 1])"
        )
    _check_features(op, "weights.positions", sizes["features"])
    return {name: tensor for name, (tensor, _) in given.items()}, sizes


def _check_heads(op: str, heads: int, sizes: dict[str, int]) -> None:
    if isinstance(heads, bool) or not isinstance(heads, int):
        raise TypeError(
            f"{op}: heads must be an integer, not {heads!r}"
        )
    if heads < 1 or sizes["d"] % heads:
        raise ValueError(
            f"{op}: heads must divide the width {sizes['d']} of x, not heads={heads}"
        )
    key = sizes["d"] // heads
    if sizes["key"] != key:
        raise ValueError(
            f"{op}: weights.positions has shape [{sizes['key']}, {sizes['features']}], "
            f"but [{key}, {sizes['features']}] was wanted ([d / heads, features])"
        )


def _check_features(op: str, argument: str, features: int) -> None:
    if features < 2 or features % 2:
        raise ValueError(
            f"{op}: {argument} has {features} features, but an even number was "
            "wanted (a sine and a cosine of each wave)"
        )


def _unpack(
    op: str,
    state: FeedbackState | None,
    batch: int,
    shape: list[int],
    dtype: torch.dtype,
    like: Tensor,
) -> FeedbackState:
    if state is None:
        empty = torch.zeros(
            batch, 0, *shape, dtype=dtype, device=like.device
        )
        return FeedbackState(empty, empty, None)
    checks.state_kind(op, state, FeedbackState)
    k, v, mask = state
    past = checks.steps(k, 5)
    for name, part in (("k", k), ("v", v)):
        wanted = [batch, past, *shape]
        checks.state_part(
            op, f"state.{name}", part, wanted, dtype, like
        )
    if mask is not None:
        checks.mask(
            op, "state.mask", mask, like, batch=batch, past=past
        )
    return FeedbackState(k, v, mask)


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Steps of `[batch, time, ...]` in the order of each sequence."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], order]


def _pack(
    k: Tensor, v: Tensor, mask: Tensor | None, new: Tensor
) -> FeedbackState:
    """Drop what is no memory; the rest stands at the end, in order."""
    past = k.shape[1] - new.shape[1]
    if mask is None:
        mask = new.new_ones(len(new), past)
    real = torch.cat([mask, new.sort(1, descending=True).values], dim=1)
    most = int(real.sum(1).max()) if real.numel() else 0
    order = torch.argsort(real, dim=1, stable=True)
    order = order[:, order.shape[1] - most :]
    real = real.gather(1, order)
    return FeedbackState(
        _take(k, order), _take(v, order), None if real.all() else real
    )
