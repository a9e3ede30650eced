"""Feedback memory: each layer attends to past results of all layers."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fwlab import arguments
from fwlab.ops.call import checks, launcher
from fwlab.ops.call.call import Call, Operation
from fwlab.ops.call.operators import traced
from fwlab.ops.feedback import efficient, naive
from fwlab.ops.feedback.weights import FeedbackWeights
from fwlab.ops.parts import autograd

#: Maximum channels per head, and per token, in the kernels.
MAX_KEY, MAX_WIDTH = 256, 8192


# A program of the kernels holds whole rows, so their widths are
# limited.
def _refuses(
    d: int = 0,
    key: int = 0,
    features: int = 0,
    time: int = 0,
    past: int = 0,
    dropout: bool = False,
    **others: Any,
) -> str | None:
    if dropout:
        return "the kernels have no dropout"
    for name, size, maximum in (
        ("d", d, MAX_WIDTH),
        ("key", key, MAX_KEY),
        ("features", features, MAX_KEY),
    ):
        if size > maximum:
            return (
                f"the kernels take {name} up to {maximum}, got {size}"
            )
    # An offset among the memories of a head has 32 bits.
    if (past + time) * max(key, features) >= 2**31:
        return f"there is no kernel for {past + time} memories"
    return None


FEEDBACK = Operation(
    name="feedback",
    folder="feedback",
    implementations={
        "naive": naive.feedback,
        "efficient": efficient.feedback,
        "triton": launcher.Kernel(
            "fwlab.ops.feedback.kernels",
            "feedback",
            minimum=(7, 5),
            refuses=_refuses,
        ),
    },
)


class FeedbackState(NamedTuple):
    """The memories of all steps so far, as keys and values.

    - `k`, `v`: `[batch, past, groups, heads, key]`, oldest first;
      `groups` is the number of layers, or 1 in the shared form.
    - `mask`: `bool [batch, past]`, True = a real memory; None if all
      are. A sequence with fewer memories than others has them at the
      end.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None


def feedback(
    x: Tensor,
    weights: FeedbackWeights,
    *,
    heads: int,
    factors: Tensor | None = None,
    key_mask: Tensor | None = None,
    state: FeedbackState | None = None,
    return_state: bool = False,
    implementation: str = "auto",
) -> Tensor | tuple[Tensor, FeedbackState]:
    r"""A stack of layers that attend to memories of all layers.

    $m_t = \sum_{l=0}^{L} \mathrm{softmax}(w)_l\, x_t^l$, and each layer
    of step $t$ attends to $m_j$ for all $j < t$: not to its own step,
    and without a maximum distance. Pre-norm, MLP with GELU, no biases,
    no norm at the end.

    - `x`: `[batch, time, d]`, the inputs $x_t^0$.
    - `weights`: a `FeedbackWeights`. Its shapes determine the number of
      layers, and whether they share the projections of the memory.
    - `heads`: heads per layer; divides `d`.
    - `factors`: for dropout, `[batch, time, layers, 2 * d + d_ff]`, each
      entry 0 or 1 / (1 - the probability of 0). The first `d` multiply
      what the attention of a layer adds to its input, the next `d_ff`
      the result of GELU, and the last `d` what the MLP adds. They are
      constants: no gradient flows to them. None = no dropout.
    - `key_mask`: `bool [batch, time]`, True = real token. Masked steps
      do not count: they make no memory, distances skip them, and they
      return 0.
    - `state`: the `FeedbackState` of an earlier call; None = no memories.
      float32 for half-precision inputs.
    - `return_state`: return `(y, state)` instead of `y`.
    - `implementation`: "auto", "naive", "efficient" or "triton".
    - Returns `y` `[batch, time, d]`, the $x_t^L$, in the dtype of `x`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    At the first step there is no memory to attend to, and the result of
    the attention is 0. With at most one memory, the attention weights
    do not depend on the query, so the gradients of `to_q` and
    `positions` are 0 (and without any memory, those of all weights of
    the attention).

    A layer holds the weights, and trains them.

        >>> from fwlab.layers import FeedbackTransformer
        >>> stack = FeedbackTransformer(d_model=4, heads=2, layers=1)
        >>> x = torch.zeros(1, 3, 4)
        >>> ops.feedback(x, stack.weights(), heads=2).shape
        torch.Size([1, 3, 4])

    Source: Fan et al. 2020 (arXiv:2002.09402).
    """
    inputs = {"x": (x, "batch time d"), **_named(weights)}
    if factors is not None:
        inputs["factors"] = (factors, "batch time layers factors")
    call = Call(
        FEEDBACK,
        inputs,
        like="x",
        key_mask=key_mask,
        return_state=return_state,
    )
    _check_layers(call.name, heads, call.sizes)
    dropout, start = factors is not None, _start(call, state, heads)
    past = start.k.shape[1]
    name, compute = call.choose(
        implementation, "x", dropout=dropout, past=past
    )
    if not x.numel():
        factors = None  # nothing to drop
    elif dropout and name == "naive":
        compute = _one_by_one
    converted = weights._replace(
        **{
            name: w.to(call.dtype)
            for name, w in weights._asdict().items()
            if w is not None
        }
    )

    # Real tokens are moved to the front, so that all sequences of a
    # batch have memories without gaps.
    def run() -> tuple[Tensor, Any]:
        wide, order = call.masked(x.to(call.dtype)), None
        by_step = []
        if factors is not None:
            by_step.append(factors.detach().to(call.dtype))
        if key_mask is not None:  # real tokens first, in their order
            order = torch.argsort(~key_mask, dim=1, stable=True)
            wide, *by_step = (_take(s, order) for s in (wide, *by_step))
        y, k, v = compute(wide, converted, heads, *start, *by_step)
        if order is not None:
            y = _take(y, order.argsort(1))
        if not return_state:
            return y, None
        return y, _pack(k, v, start.mask, key_mask)

    return call.run(run, start, return_state)


def _one_by_one(
    x: Tensor, weights: FeedbackWeights, heads: int, k: Tensor,
    v: Tensor, mask: Tensor | None, factors: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The naive version, with other weights for every single step.

    A factor multiplies a row of the matrix before it, or a column of
    the matrix after it: the specification itself needs no dropout.
    """
    d, d_ff = weights.contract.shape[1:]
    sequences = []
    for b, steps in enumerate(x.split(1)):
        now_k, now_v, y = k[b : b + 1], v[b : b + 1], []
        real = None if mask is None else mask[b : b + 1]
        for t, x_t in enumerate(steps.split(1, 1)):
            f_z, f_h, f_y = factors[b, t].split([d, d_ff, d], -1)
            contract = weights.contract * f_h[:, None] * f_y[..., None]
            to_out = weights.to_out * f_z[..., None]
            w = weights._replace(to_out=to_out, contract=contract)
            y_t, now_k, now_v = naive.feedback(
                x_t, w, heads, now_k, now_v, real
            )
            y.append(y_t)
        sequences.append((torch.cat(y, 1), now_k, now_v))
    parts = zip(*sequences, strict=True)
    whole, k, v = (torch.cat(part) for part in parts)
    return whole, k, v


def feedback_attention(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor
) -> Tensor:
    r"""Attention of one query to older memories (a step of `feedback`).

    The score of the memory $\delta$ steps back is
    $(q \cdot k + q \cdot P s(\delta)) / \sqrt{d_{\text{key}}}$, with
    $s(\delta)$ the sines and cosines of $\omega_i \delta$.

    - `q`: `[batch, heads, key]`.
    - `k`, `v`: `[batch, past, heads, key]`, oldest first; the last one is
      1 step back. `past` may be 0, and then the result is 0.
    - `positions`: $P$, `[key, features]`, an even number of features.
    - Returns `[batch, heads, key]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    With equal scores, you read the mean of the values.

        >>> q, k = torch.zeros(1, 1, 2), torch.zeros(1, 2, 1, 2)
        >>> v = torch.tensor([[4.0, 0.0], [8.0, 2.0]])[None, :, None]
        >>> ops.feedback_attention(q, k, v, torch.zeros(2, 2))
        tensor([[[6., 1.]]])

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
    with autograd.full_precision(q):
        wide = (x.to(dtype) for x in (q, k, v, positions))
        return naive.feedback_attention(*wide).to(v.dtype)


def _named(weights: FeedbackWeights) -> dict[str, tuple[Tensor, str]]:
    """Each tensor by name, with its dimensions."""
    if not isinstance(weights, FeedbackWeights):
        raise TypeError(
            "feedback: expected weights to be a FeedbackWeights, "
            f"got {type(weights).__name__}"
        )
    dims = {
        "to_q": "layers d d",
        "to_k": "groups d d",
        "to_v": "groups d d",
        "to_out": "layers d d",
        "norm_mixer": "layers d",
        "norm_mlp": "layers d",
        "expand": "layers d_ff d",
        "contract": "layers d d_ff",
        "positions": "key features",
        "merge": "states",
    }
    if weights.norm_memory is not None:
        dims["norm_memory"] = "groups d"
    return {
        f"weights.{name}": (getattr(weights, name), shape)
        for name, shape in dims.items()
    }


def _check_layers(op: str, heads: int, sizes: dict[str, int]) -> None:
    """Check that the sizes of layers, groups and heads fit together."""
    layers, groups, d = sizes["layers"], sizes["groups"], sizes["d"]
    if layers < 1 or groups not in (1, layers):
        raise ValueError(
            f"{op}: expected weights.to_k to have 1 group (shared) or one "
            f"per layer ({layers} layers, at least 1), got {groups}"
        )
    if sizes["states"] != layers + 1:
        raise ValueError(
            f"{op}: expected weights.merge of shape [{layers + 1}] "
            f"([layers + 1]), got [{sizes['states']}]"
        )
    factors = 2 * d + sizes["d_ff"]
    if sizes.get("factors", factors) != factors:
        start = f"{sizes['batch']}, {sizes['time']}, {layers}"
        raise ValueError(
            f"{op}: expected factors of shape [{start}, {factors}] "
            "([batch, time, layers, 2 * d + d_ff]), "
            f"got [{start}, {sizes['factors']}]"
        )
    arguments.integers(op, None, heads=heads)
    if heads < 1 or d % heads:
        raise ValueError(
            f"{op}: expected heads to divide the width {d} of x, "
            f"got heads={heads}"
        )
    if sizes["key"] != d // heads:
        features = sizes["features"]
        raise ValueError(
            f"{op}: expected weights.positions of shape "
            f"[{d // heads}, {features}] ([d / heads, features]), "
            f"got [{sizes['key']}, {features}]"
        )
    _check_features(op, "weights.positions", sizes["features"])


# Sines and cosines come in pairs.
def _check_features(op: str, argument: str, features: int) -> None:
    if features < 2 or features % 2:
        raise ValueError(
            f"{op}: expected {argument} to have an even number of features "
            f"(a sine and a cosine of each wave), got {features}"
        )


def _start(
    call: Call, state: FeedbackState | None, heads: int
) -> FeedbackState:
    """The given memories, or none."""
    key = call.sizes["d"] // heads
    past = 0
    if state is not None:
        checks.state_kind(call.name, state, FeedbackState)
        past = checks.time_of(state[0], 5)
    shape = (
        call.sizes["batch"],
        past,
        call.sizes["groups"],
        heads,
        key,
    )
    memories = None if state is None else state[:2]
    k, v = call.start(_Memories, memories, {"k": shape, "v": shape})
    mask = None if state is None else state[2]
    if mask is not None:
        batch = call.sizes["batch"]
        checks.mask(
            call.name, "state.mask", mask, k, batch=batch, past=past
        )
    return FeedbackState(k, v, mask)


# What `Call.start` checks of a state: its mask is of another type.
class _Memories(NamedTuple):
    k: Tensor
    v: Tensor


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Steps of `[batch, time, ...]` in a given order per sequence."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], order]


def _pack(
    k: Tensor, v: Tensor, mask: Tensor | None, new: Tensor | None
) -> FeedbackState:
    """Drop masked memories, and move the others to the end, in order.

    - `mask`: which memories of earlier calls are real; None = all.
    - `new`: which steps of this call are real; None = all.
    """
    if mask is None and new is None:
        return FeedbackState(k, v, None)
    if traced(k) and not torch.compiler.is_dynamo_compiling():
        raise ValueError(
            "feedback: with a mask, the number of memories in the state "
            "depends on its values, which are not known where a call is "
            "only traced; expected return_state=False, got True"
        )
    if new is None:
        assert mask is not None
        new = mask.new_ones(len(k), k.shape[1] - mask.shape[1])
    if mask is None:
        mask = new.new_ones(len(k), k.shape[1] - new.shape[1])
    real = torch.cat([mask, new.sort(1, descending=True).values], dim=1)
    length = int(real.sum(1).max()) if real.numel() else 0
    order = torch.argsort(real, dim=1, stable=True)
    order = order[:, order.shape[1] - length :]
    real = real.gather(1, order)
    return FeedbackState(
        _take(k, order), _take(v, order), None if real.all() else real
    )
