"""Feedback memory: each layer attends to past results of all layers."""

from typing import Annotated, Any, NamedTuple, Unpack

import torch
from torch import Tensor

from fwlab import arguments
from fwlab.ops import _operation as operation
from fwlab.ops import _triton
from fwlab.ops._operation import Kernel, Options
from fwlab.ops._recurrence import full_precision, is_traced
from fwlab.ops.feedback import efficient, naive
from fwlab.ops.feedback.weights import FeedbackWeights

#: The minimum compute capability; the kernels do not need tensor cores.
MINIMUM = (7, 5)
#: Maximum numbers of channels per head and per token: a program loads complete rows.
MAX_KEY, MAX_WIDTH = 256, 8192
#: How error messages describe the required columns of the position weights.
WAVES = "an even number of features (a sine and a cosine of each wave)"


def why_not(
    x: Tensor | None = None,
    weights: Any = None,
    heads: int = 1,
    k: Tensor | None = None,
    v: Tensor | None = None,
    mask: Tensor | None = None,
    factors: Tensor | None = None,
) -> str | None:
    """Return the reason why the kernels cannot compute these inputs, or None.

    - The arguments are as in `naive.feedback`; without `x`, check only this machine.
    """
    if x is None or k is None:
        return _triton.why_not(minimum=MINIMUM)
    if reason := _triton.why_not(x.device, {x.dtype}, MINIMUM):
        return reason
    if factors is not None:
        return "the kernels have no dropout"
    d, features, key = x.shape[-1], weights.positions.shape[-1], k.shape[-1]
    for name, size, maximum in (
        ("d", d, MAX_WIDTH),
        ("key", key, MAX_KEY),
        ("features", features, MAX_KEY),
    ):
        if size > maximum:
            return f"the kernels take {name} up to {maximum}, got {size}"
    # The offsets of memories within a head have 32 bits.
    memories = k.shape[1] + x.shape[1]
    if memories * max(key, features) >= 2**31:
        return f"there is no kernel for {memories} memories"
    return None


def load() -> Any:
    """Import the Triton kernels, and return the function that launches them."""
    _triton.imported("fwlab.ops.feedback.kernels")
    from fwlab.ops.feedback.kernels import feedback

    return feedback


FORMS = {
    "naive": naive.feedback,
    "efficient": efficient.feedback,
    "triton": Kernel(load, why_not),
}


class FeedbackState(NamedTuple):
    """Hold the memories of all past steps, as keys and values.

    - `k`, `v`: `[batch, past, groups, heads, key]`, oldest first; `groups` is the
      number of layers, or 1 in the shared form.
    - `mask`: `bool [batch, past]`, True = a real memory; None if all are real. A
      sequence with fewer memories is padded at the beginning.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None


@operation.operation(FORMS, like="x")
def feedback(
    x: Annotated[Tensor, "batch time d"],
    weights: FeedbackWeights,
    *,
    heads: int,
    factors: Annotated[Tensor, "batch time layers factors"] | None = None,
    **options: Unpack[Options],
) -> tuple[Tensor, Any]:
    r"""Compute a stack of layers that attend to feedback memories of past steps.

    $m_t = \sum_{l=0}^{L} \mathrm{softmax}(w)_l\, x_t^l$, and each layer of step $t$
    attends to $m_j$ for all $j < t$: not to its own step, and without a maximum
    distance. The stack has pre-norms, GELU MLPs, no biases, and no final norm.

    - `x`: `[batch, time, d]`, the inputs $x_t^0$.
    - `weights`: a `FeedbackWeights`. Its shapes determine the number of layers, and
      whether they share the projections of the memory.
    - `heads`: heads per layer; divides `d`.
    - `factors`: for dropout, `[batch, time, layers, 2 * d + d_ff]`, each entry 0 or 1 /
      (1 - the probability of 0). The first `d` multiply what the attention of a layer
      adds to its input, the next `d_ff` the result of GELU, and the last `d` what the
      MLP adds. They are constants, without gradients. None = no dropout.
    - `key_mask`: `bool [batch, time]`, True = real token. Masked steps are skipped:
      they have no memory, distances do not count them, and they return 0.
    - `state`: the `FeedbackState` of an earlier call; None = no memories. float32 for
      half-precision inputs.
    - `return_state`: return `(y, state)` instead of `y`.
    - `implementation`: "auto", "naive", "efficient" or "triton".
    - Returns `y` `[batch, time, d]`, the $x_t^L$, in the dtype of `x`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    At the first step there is no memory to attend to, and the result of the attention
    is 0. With at most one memory, the attention weights do not depend on the query, so
    the gradients of `to_q` and `positions` are 0 (and without any memory, the gradients
    of all parameters of the attention).

    A `FeedbackTransformer` has the weights as parameters.

        >>> from fwlab.layers import FeedbackTransformer
        >>> stack = FeedbackTransformer(d_model=4, heads=2, layers=1)
        >>> x = torch.zeros(1, 3, 4)
        >>> ops.feedback(x, stack.weights(), heads=2).shape
        torch.Size([1, 3, 4])

    Source: Fan et al. 2020 (arXiv:2002.09402).
    """
    key_mask, state = options["key_mask"], options["state"]
    w = _check(x, weights, heads, factors)
    dtype = torch.promote_types(x.dtype, torch.float32)
    past = memories(x, state, len(w.to_k), heads)
    if not x.numel():
        parts = [part for part in w if part is not None]
        return operation.empty(x, *parts), past
    converted = {n: p.to(dtype) for n, p in w._asdict().items() if p is not None}
    wide, w = x.to(dtype), w._replace(**converted)
    steps, order = [wide], None
    if factors is not None:
        steps.append(factors.detach().to(dtype))
    if key_mask is not None:
        # Real tokens are moved to the front, so that memories have no gaps.
        order = torch.argsort(~key_mask, dim=1, stable=True)
        steps = [_take(part, order) for part in steps]
    wide, *factor = steps
    given = wide, w, heads, *past, *factor
    form = options["implementation"]
    compute = operation.choose("feedback", FORMS, form, x, *given)
    y, k, v = compute(*given)
    if order is not None:
        y = _take(y, order.argsort(1))
    keep = options["return_state"]
    return y, _pack(k, v, past.mask, key_mask) if keep else None


def feedback_attention(
    q: Annotated[Tensor, "batch heads key"],
    k: Annotated[Tensor, "batch past heads key"],
    v: Annotated[Tensor, "batch past heads key"],
    positions: Annotated[Tensor, "key features"],
) -> Tensor:
    r"""Compute the attention of one query to older memories, as part of `feedback`.

    The score of the memory $\delta$ steps back is $(q \cdot k + q \cdot P s(\delta)) /
    \sqrt{d_{\text{key}}}$, with $s(\delta)$ the sines and cosines of $\omega_i \delta$.

    - `q`: `[batch, heads, key]`.
    - `k`, `v`: `[batch, past, heads, key]`, oldest first; the last one is 1 step back.
      `past` may be 0, and then the result is 0.
    - `positions`: $P$, `[key, features]`, an even number of features.
    - Returns `[batch, heads, key]` in the dtype of `v`.
    - Raises `ValueError` or `TypeError`, naming the argument.

    With equal scores, you read the mean of the values.

        >>> q, k = torch.zeros(1, 1, 2), torch.zeros(1, 2, 1, 2)
        >>> v = torch.tensor([[4.0, 0.0], [8.0, 2.0]])[None, :, None]
        >>> ops.feedback_attention(q, k, v, torch.zeros(2, 2))
        tensor([[[6., 1.]]])

    Source: Fan et al. 2020 (arXiv:2002.09402); the sinusoids are those of
    Transformer-XL (arXiv:1901.02860).
    """
    op = "feedback_attention"
    given = {"q": q, "k": k, "v": v, "positions": positions}
    sizes = operation.match(op, given, operation.annotated(feedback_attention).names)
    dtype = operation.precision(op, given)
    if (features := sizes["features"]) < 2 or features % 2:
        raise ValueError(f"{op}: expected positions to have {WAVES}, got {features}")
    with full_precision(q):
        wide = (x.to(dtype) for x in given.values())
        return naive.feedback_attention(*wide).to(v.dtype)


DIMS = {
    "x": ("batch", "time", "d"),
    **{
        f"weights.{n}": d for n, d in operation.annotated(FeedbackWeights).names.items()
    },
    "factors": ("batch", "time", "layers", "factors"),
}


def _check(x: Tensor, weights: Any, heads: int, factors: Tensor | None) -> Any:
    """Check the arguments of `feedback`; return the weights, or raise an error."""
    op = "feedback"
    if not isinstance(weights, FeedbackWeights):
        raise TypeError(
            f"{op}: expected weights to be a FeedbackWeights, "
            f"got {type(weights).__name__}"
        )
    parts = {"to_q": weights.to_q, **weights._asdict()}  # `to_q` defines `layers`.
    if weights.norm_memory is None:
        del parts["norm_memory"]
    given = {"x": x, **{f"weights.{name}": part for name, part in parts.items()}}
    if factors is not None:
        given["factors"] = factors
    sizes = operation.match(op, given, DIMS)
    operation.precision(op, given)
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
    wanted = 2 * d + sizes["d_ff"]
    if factors is not None and sizes["factors"] != wanted:
        raise ValueError(
            f"{op}: expected factors of shape {[*factors.shape[:3], wanted]} "
            f"([batch, time, layers, 2 * d + d_ff]), got {[*factors.shape]}"
        )
    if type(heads) is not int:
        arguments.integers(op, None, heads=heads)
    if heads < 1 or d % heads:
        raise ValueError(
            f"{op}: expected heads to divide the width {d} of x, got heads={heads}"
        )
    features = sizes["features"]
    if sizes["key"] != d // heads:
        raise ValueError(
            f"{op}: expected weights.positions of shape [{d // heads}, {features}] "
            f"([d / heads, features]), got [{sizes['key']}, {features}]"
        )
    if features < 2 or features % 2:
        raise ValueError(
            f"{op}: expected weights.positions to have {WAVES}, got {features}"
        )
    return weights


def memories(x: Tensor, state: Any, groups: int, heads: int) -> FeedbackState:
    """Check and return the memories of `state`; return empty memories if it is None."""
    batch, _, d = x.shape
    memory = groups, heads, d // heads
    if state is None:
        dtype = torch.promote_types(x.dtype, torch.float32)
        k = x.new_zeros(batch, 0, *memory, dtype=dtype)
        return FeedbackState(k, k, None)
    shape = batch, operation.time_of(state, 5), *memory
    shapes = shape, shape, shape[:2]
    return operation.check_parts("feedback", state, FeedbackState, shapes, x)


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Reorder the steps of `x` `[batch, time, ...]` by indices `[batch, steps]`."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], order]


def _pack(
    k: Tensor, v: Tensor, mask: Tensor | None, new: Tensor | None
) -> FeedbackState:
    """Drop masked memories, and move real memories to the end without reordering them.

    - `mask`: which memories of earlier calls are real; None = all.
    - `new`: which steps of this call are real; None = all.
    """
    if mask is None and new is None:
        return FeedbackState(k, v, None)
    if is_traced(k) and not torch.compiler.is_dynamo_compiling():
        raise ValueError(
            "feedback: with a mask, the number of memories in the state "
            "depends on its values, which are not known where a call is "
            "only traced; expected return_state=False, got True"
        )
    # `k.new_ones` would have no readable values where `vmap` maps over k.
    real = torch.ones(k.shape[:2], dtype=torch.bool, device=k.device)
    if mask is not None:
        real[:, : mask.shape[1]] = mask
    if new is not None:
        real[:, k.shape[1] - new.shape[1] :] = new.sort(1, descending=True).values
    length = int(real.sum(1).max()) if real.numel() else 0
    order = torch.argsort(real, dim=1, stable=True)
    order = order[:, order.shape[1] - length :]
    real = real.gather(1, order)
    return FeedbackState(_take(k, order), _take(v, order), None if real.all() else real)
