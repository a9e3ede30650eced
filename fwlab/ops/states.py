"""Define the states that a recurrence carries from one call to the next."""

from typing import Any, NamedTuple

from torch import Tensor


class NormalizedState(NamedTuple):
    """Hold the fast weights and the normaliser of Eq. 18.

    - `W`: `[batch, heads, value, key]`, the fast weights.
    - `z`: `[batch, heads, key]`, the sum of all keys written so far.

    A decay multiplies both by the same factor, so their quotient is unchanged unless
    one of them underflows.
    """

    W: Tensor
    z: Tensor


class ScaledState(NamedTuple):
    r"""Hold the state of a rule whose features have a scale (stabilised FAVOR+).

    - `memory`: the state of the rule, divided by `exp(log_scale)`.
    - `log_scale`: `[batch, heads]`, the running maximum of the logarithm of the scales
      of keys; $-\infty$ before the first key.
    """

    memory: Tensor | NormalizedState
    log_scale: Tensor


class ConvState(NamedTuple):
    """Hold the state of a layer with short convolutions.

    - `memory`: the state of the layer without convolutions.
    - `inputs`: `[batch, size - 1, channels]`, the projections of the last tokens, which
      the next convolutions see; 0 before the first token; in float32 if the layer
      computes in half precision.
    """

    memory: Tensor | NormalizedState | ScaledState
    inputs: Tensor


class KeyValueCache(NamedTuple):
    """Hold the growing state of softmax attention (Eqs. 5 and 6).

    - `k`: `[batch, past, heads, key]`.
    - `v`: `[batch, past, heads, value]`.
    - `mask`: `bool [batch, past]`, True = real token; None if all tokens are real.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None


def separate(state: Any, every: bool = False) -> Any:
    """Clone tensors in a state that require gradients, so that callers may edit them.

    The backward pass may need the original tensors.

    - `every`: also clone tensors that do not require gradients.
    """
    if isinstance(state, tuple):
        made = [separate(part, every) for part in state]
        same = all(a is b for a, b in zip(made, state, strict=True))
        return state if same else type(state)(*made)
    shared = isinstance(state, Tensor) and (every or state.requires_grad)
    return state.clone() if shared else state


def detach(state: Any) -> Any:
    """Return a state whose tensors are detached from the autograd graph.

    Call this between the segments of a stream to stop gradients there (truncated
    backpropagation through time).

    - `state`: a tensor, an integer, None, or any nesting of tuples, named tuples, lists
      and dicts of them.
    - Returns the same structure.
    - Raises `TypeError` if the state contains anything else.

        >>> W = torch.zeros(1, 2, 4, 4, requires_grad=True)
        >>> ops.detach((W, None))[0].requires_grad
        False
    """
    if isinstance(state, Tensor):
        return state.detach()
    if isinstance(state, dict):
        return {name: detach(part) for name, part in state.items()}
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*map(detach, state))
    if isinstance(state, tuple | list):
        return type(state)(map(detach, state))
    if state is None or isinstance(state, int):
        return state
    raise TypeError(
        "expected a state made of tensors, integers, None, tuples, lists "
        f"and dicts, got {type(state).__name__}"
    )
