r"""# The fast weight programmer, with few states in memory

There is an activation between one step and the next, so no matrix product covers
several steps at once, and the backward pass needs the state of every step. But it does
not need all states at the same time.

Divide the sequence into segments of about $\sqrt T$ steps. In the forward pass, save
the state before each segment. In the backward pass, recompute the states of one segment
at a time, and differentiate it: $\sqrt T$ states are saved, and $\sqrt T$ belong to the
current segment. With $S$ steps per segment the number of states in memory is

$$\frac TS + S, \quad\text{minimal for}\quad S = \sqrt T \tag{a1}$$

The price is one more forward pass.

Without an activation,

$$y_i = W_0\, x_i + \sum_{j \le i} a_j\, (b_j \cdot x_i) \tag{a2}$$

is the sum rule without a normaliser, and is computed in chunks.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fwlab.ops._recurrence import Recurrence, is_traced
from fwlab.ops.linear.sum import sum_rule

#: Steps per segment; None = the square root of the number of steps. `TRACED` is the
#: number in traced calls, where the number of steps may be unknown.
SEGMENT: int | None = None
TRACED = 32

_tanh_backward = torch.ops.aten.tanh_backward.grad_input


def fwp(
    a: Tensor,
    b: Tensor,
    x: Tensor,
    W: Tensor,
    activation: Callable | None,
    real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the fast weight programmer, with `activation=None` for the identity.

    - `real`: `bool [batch, time]`, False = the step is masked; None = all are real.
    """
    if activation is None:  # Eq. a2; masked steps have inputs of 0 and write 0.
        same: Any = {"state": W, "return_state": True, "implementation": "efficient"}
        out: Any = sum_rule(x, b, a, normalize=False, **same)
        return out
    length = SEGMENT or math.isqrt(a.shape[1] - 1) + 1 if not is_traced(a) else TRACED
    if activation is torch.tanh:
        return tuple(_segments((a, b, x, W, real), length))
    # A graph calls the user's activation without tracing it.
    loops = torch.compiler.disable(_loops) if is_traced(a) else _loops
    return loops(a, b, x, W, activation, real, length)


def _loops(
    a: Tensor,
    b: Tensor,
    x: Tensor,
    W: Tensor,
    activation: Callable,
    real: Tensor | None,
    length: int,
) -> tuple[Tensor, Tensor]:
    """Compute segments with autograd, which also trains an activation's parameters.

    The backward pass recomputes the states of each segment here, too.
    """
    # This import is not at the top, because in torch 2.6 it loads half the compiler.
    from torch.utils.checkpoint import checkpoint

    outputs = []
    for steps in _cut(length, a, b, x, real):
        y, W = checkpoint(_loop, *steps, W, activation, use_reentrant=False)
        outputs.append(y)
    return torch.cat(outputs, dim=1), W


def _forward(x: Any, keep: bool, length: int) -> Any:
    """Compute the segments in order; with `keep`, save their initial states."""
    a, b, x, W, real = x
    y, starts = a.new_empty(a.shape, dtype=W.dtype), []
    pieces = _cut(length, a, b, x, real)
    for (a_s, b_s, x_s, real_s), y_s in zip(pieces, y.split(length, 1), strict=True):
        starts.append(W)
        a_s, b_s, x_s = (_by_time(part, W) for part in (a_s, b_s, x_s))
        states = _states(a_s, b_s, real_s, W)
        y_s.copy_(_left(x_s, states[1:].mT).transpose(0, 1))  # Eq. 3
        W = states[-1].clone()  # A view would keep all states of the segment alive.
    return (y, W), ([torch.cat(starts)] if keep else [])


def _backward(x: Any, kept: Any, gradients: Any, needed: Any, length: int) -> Any:
    """Compute the gradients of `_forward`, from the last segment to the first."""
    a, b, x, W, real = x
    dy, dW = gradients
    starts = kept[0].unflatten(0, (-1, len(a)))
    dy = W.new_zeros(a.shape) if dy is None else dy
    dW = torch.zeros_like(W) if dW is None else dW
    made = [torch.empty_like(part) for part in (a, b, x)]
    outs = [part.split(length, 1) for part in made]
    pieces = _cut(length, a, b, x, real, dy)
    for i in reversed(range(len(pieces))):
        given: Any = *pieces[i], dW, starts[i]
        *parts, dW = _segment_backward(*given)
        for part, out in zip(parts, outs, strict=True):
            out[i].copy_(part.transpose(0, 1))
    return *made, dW.clone(), None


def _shapes(x: Any, keep: bool, length: int) -> Any:
    """Return empty tensors with the shapes of the results of `_forward`."""
    a, _, _, W, _ = x
    n = -(-a.shape[1] // length)
    starts = [W.new_empty(n * W.shape[0], *W.shape[1:])] if keep else []
    return (a.new_empty(a.shape, dtype=W.dtype), torch.empty_like(W)), starts


#: The recurrence with tanh as its activation.
_segments = Recurrence(
    "fwp",
    "Tensor a, Tensor b, Tensor x, Tensor W, Tensor? real",
    "SymInt length",
    _forward,
    _backward,
    _shapes,
)


def _states(a: Tensor, b: Tensor, real: Tensor | None, W: Tensor) -> Tensor:
    """Return the states before the first step and after each step.

    - `a`, `b`: `[time, batch, heads, value or key]`.
    - Returns `[time + 1, batch, heads, value, key]`.
    """
    states = W.new_empty(len(a) + 1, *W.shape)
    states[0] = W
    columns, rows = a[..., None].unbind(), b[..., None, :].unbind()
    for i, (a_i, b_i) in enumerate(zip(columns, rows, strict=True)):
        W_i = states[i + 1]
        torch.addcmul(W, a_i, b_i, out=W_i).tanh_()  # Eq. 2
        if real is not None:
            torch.where(real[:, i, None, None, None], W_i, W, out=W_i)
        W = W_i
    return states


def _segment_backward(
    a: Tensor, b: Tensor, x: Tensor, real: Tensor | None, dy: Tensor, dW: Tensor,
    W: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    r"""Return the gradients of a segment that begins with the state $W$.

    Let $P_i = W_{i-1} + a_i \otimes b_i$, so that $W_i = \sigma(P_i)$. Each state is
    read once, and the next step starts from it:

    $$dW_i = dy_i \otimes x_i + dP_{i+1} \tag{a3}$$
    $$dP_i = \sigma'(P_i)\; dW_i \tag{a4}$$
    $$da_i = dP_i\, b_i, \quad db_i = dP_i^\top a_i, \quad
      dx_i = W_i^\top dy_i \tag{a5}$$

    The derivative of tanh is $1 - W_i^2$.

    - `dW`: the gradient of the state after the segment; the gradient of $W$ is
      the last result.
    """
    a, b, x, dy = (_by_time(part, W) for part in (a, b, x, dy))
    states = _states(a, b, real, W)
    dP, later, dW = torch.empty_like(states[1:]), dW, dW.clone()
    columns, rows = dy[..., None].unbind(), x[..., None, :].unbind()
    steps = zip(columns, rows, dP.unbind(), states[1:].unbind(), strict=True)
    for i, (dy_i, x_i, dP_i, W_i) in reversed([*enumerate(steps)]):
        torch.addcmul(later, dy_i, x_i, out=dW)  # (a3)
        _tanh_backward(dW, W_i, grad_input=dP_i)  # (a4)
        later = dP_i
        if real is not None:
            later = torch.where(real[:, i, None, None, None], dP_i, dW)
    da = _left(b, dP.mT)  # (a5)
    return da, _left(a, dP), _left(dy, states[1:]), later


def _loop(
    a: Tensor, b: Tensor, x: Tensor, real: Tensor | None, W: Tensor, activation: Any
) -> tuple[Tensor, Tensor]:
    """Compute the steps of one segment with operations that autograd differentiates."""
    a, b, x = (_by_time(part, W) for part in (a, b, x))
    states = []
    for i, (a_i, b_i) in enumerate(zip(a[..., None], b[..., None, :], strict=True)):
        W_i = activation(torch.addcmul(W, a_i, b_i))  # Eq. 2
        W = W_i if real is None else torch.where(real[:, i, None, None, None], W_i, W)
        states.append(W)
    return _left(x, torch.stack(states).mT).transpose(0, 1), W  # Eq. 3


def _cut(length: int, *sequences: Tensor | None) -> list[tuple[Any, ...]]:
    """Split sequences `[batch, time, ...]` into segments; None stays None."""
    n = next(-(-x.shape[1] // length) for x in sequences if x is not None)
    cuts = ([None] * n if x is None else x.split(length, 1) for x in sequences)
    return [*zip(*cuts, strict=True)]


def _by_time(x: Tensor, W: Tensor) -> Tensor:
    """Return `x` as `[time, batch, ...]`, in the dtype of the state `W`."""
    return x.transpose(0, 1).to(W.dtype)


def _left(x: Tensor, W: Tensor) -> Tensor:
    r"""Return the product $x^\top W$ at every step.

    On a CPU, a row vector times a matrix is faster than a matrix times a column vector.
    """
    return (x[..., None, :] @ W)[..., 0, :]
