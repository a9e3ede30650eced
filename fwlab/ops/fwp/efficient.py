r"""# The fast weight programmer, with few states in memory

There is an activation between one step and the next, so no matrix
product covers several steps at once, and the backward pass needs the
state of every step. But it does not need all of them at the same time.

Divide the sequence into segments of about $\sqrt T$ steps. In the
forward pass, keep the state before each segment. In the backward pass,
compute the states of one segment again, and differentiate it:
$\sqrt T$ states are kept, and $\sqrt T$ belong to the current segment.
With $S$ steps per segment the number of states in memory is

$$\frac TS + S, \quad\text{minimal for}\quad S = \sqrt T \tag{a1}$$

The price is one more forward pass.

Without an activation,

$$y_i = W_0\, x_i + \sum_{j \le i} a_j\, (b_j \cdot x_i) \tag{a2}$$

is the sum rule without a normaliser, and is computed in chunks.
"""

import math
from collections.abc import Callable
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from fwlab.ops.additive import efficient as linear
from fwlab.ops.call.operators import Operator, traced
from fwlab.ops.parts import autograd, chunks

#: Steps per segment; None = the root of the number of steps. Where a
#: call is only traced, that number may not be known.
SEGMENT: int | None = None
TRACED = 32

_tanh_backward = torch.ops.aten.tanh_backward.grad_input


def _states(
    a: Tensor,
    b: Tensor,
    keep: Tensor | None,
    W: Tensor,
    activation: Callable,
) -> Tensor:
    """The states before the first step and after each step.

    - `a`, `b`: `[time, batch, heads, value or key]`.
    - Returns `[time + 1, batch, heads, value, key]`.
    """
    states = W.new_empty(len(a) + 1, *W.shape)
    states[0] = W
    steps = zip(_columns(a), _rows(b), states[1:].unbind(), strict=True)
    for i, (a_i, b_i, W_i) in enumerate(steps):
        torch.addcmul(W, a_i, b_i, out=W_i)
        if activation is torch.tanh:
            W_i.tanh_()  # Eq. 2
        else:
            W_i.copy_(activation(W_i))
        if keep is not None:
            torch.where(_real(keep, i), W_i, W, out=W_i)
        W = W_i
    return states


def _columns(a: Tensor) -> tuple[Tensor, ...]:
    r"""One column per step: times a row it is $a \otimes b$."""
    return a[..., :, None].unbind()


def _rows(b: Tensor) -> tuple[Tensor, ...]:
    """One row per step."""
    return b[..., None, :].unbind()


def _real(keep: Tensor, i: int) -> Tensor:
    """Whether step i is a real one, for each sequence."""
    return keep[:, i, None, None, None]


def _left(x: Tensor, W: Tensor) -> Tensor:
    r"""$x^\top W$ of every step.

    A row times a matrix takes less time on a CPU than a matrix times
    a column.
    """
    return (x[..., None, :] @ W)[..., 0, :]


class _Segments(torch.autograd.Function):
    """Compute segment after segment; the backward pass computes their
    states again.
    """

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, x: Tensor, keep: Tensor | None,
        W: Tensor, length: int, back: bool, activation: Callable,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Keep the inputs, and the state before each segment if a
        backward pass may follow.
        """
        pieces = _cut(length, a, b, x, keep)
        starts = W.new_empty(len(pieces) if back else 0, *W.shape)
        y, start = a.new_empty(a.shape, dtype=W.dtype), W
        parts = zip(pieces, y.split(length, 1), strict=True)
        for i, ((a_s, b_s, x_s, keep_s), y_s) in enumerate(parts):
            if back:
                starts[i] = start
            a_s, b_s, x_s = (
                _by_time(part, W) for part in (a_s, b_s, x_s)
            )
            states = _states(a_s, b_s, keep_s, start, activation)
            y_s.copy_(
                _left(x_s, states[1:].mT).transpose(0, 1)
            )  # Eq. 3
            start = states[-1]
        ctx.save_for_backward(a, b, x, keep, starts.flatten(0, 1))
        ctx.options = length, back, activation
        ctx.set_materialize_grads(False)
        return y, start.clone()

    @staticmethod
    @autograd.backward_pass
    def backward(
        ctx: Any, dy: Tensor | None, dW: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """From the last segment to the first."""
        a, b, x, keep, starts = ctx.saved_tensors
        length, _, activation = ctx.options
        starts = starts.unflatten(0, (-1, len(a)))
        if dy is None:
            dy = starts.new_zeros(a.shape)
        dW = torch.zeros_like(starts[0]) if dW is None else dW
        pieces = _cut(length, a, b, x, keep, dy)
        gradients = [torch.empty_like(part) for part in (a, b, x)]
        outs = [part.split(length, 1) for part in gradients]
        for i in reversed(range(len(pieces))):
            inputs: Any = (*pieces[i], dW, starts[i], activation)
            *parts, dW = _backward(*inputs)
            for part, out in zip(parts, outs, strict=True):
                out[i].copy_(part.transpose(0, 1))
        return *gradients, None, dW.clone(), None, None, None


def _cut(
    length: int, *sequences: Tensor | None
) -> list[tuple[Any, ...]]:
    """Cut sequences `[batch, time, ...]` into segments of `length`.

    - Returns a tuple for each segment; a missing sequence is None.
    """
    cuts = (
        repeat(None) if x is None else x.split(length, 1)
        for x in sequences
    )
    return [*zip(*cuts, strict=False)]


def _backward(
    a: Tensor, b: Tensor, x: Tensor, keep: Tensor | None, dy: Tensor,
    dW: Tensor, W: Tensor, activation: Callable,
) -> tuple[Tensor, ...]:  # fmt: skip
    r"""The gradients of a segment that begins with the state $W$.

    Let $P_i = W_{i-1} + a_i \otimes b_i$, so that $W_i = \sigma(P_i)$.
    Each state is read once, and the next step starts from it:

    $$dW_i = dy_i \otimes x_i + dP_{i+1} \tag{a3}$$
    $$dP_i = \sigma'(P_i)\; dW_i \tag{a4}$$
    $$da_i = dP_i\, b_i, \quad db_i = dP_i^\top a_i, \quad
      dx_i = W_i^\top dy_i \tag{a5}$$

    The derivative of tanh is $1 - W_i^2$. Autograd computes that of any
    other $\sigma$.

    - `dW`: the gradient of the state after the segment; that of the
      state before it is the last result.
    """
    a, b, x, dy = (_by_time(part, W) for part in (a, b, x, dy))
    states = _states(a, b, keep, W, activation)
    dP, later, dW = torch.empty_like(states[1:]), dW, dW.clone()
    steps = zip(
        _columns(dy), _rows(x), dP.unbind(), states[1:].unbind(),
        strict=True,
    )  # fmt: skip
    for i, (dy_i, x_i, dP_i, W_i) in reversed([*enumerate(steps)]):
        torch.addcmul(later, dy_i, x_i, out=dW)  # (a3)
        if activation is torch.tanh:
            _tanh_backward(dW, W_i, grad_input=dP_i)  # (a4)
        else:
            P = _before(a[i], b[i], states[i])
            dP_i.copy_(_pull_back(activation, P, dW))
        later = dP_i
        if keep is not None:
            later = torch.where(_real(keep, i), dP_i, dW)
    da = _left(b, dP.mT)  # (a5)
    return da, _left(a, dP), _left(dy, states[1:]), later


def _shapes(
    a: Tensor, b: Tensor, x: Tensor, keep: Tensor | None, W: Tensor,
    length: int, back: bool, activation: Callable,
) -> tuple[Any, Any]:  # fmt: skip
    """What `_Segments` returns and what it saves, without data."""
    y = a.new_empty(a.shape, dtype=W.dtype)
    n = chunks.count(a.shape[1], length) if back else 0
    starts = W.new_empty(n * W.shape[0], *W.shape[1:])
    return (y, torch.empty_like(W)), (a, b, x, keep, starts)


_operator = Operator(
    "fwp",
    _Segments,
    "Tensor a, Tensor b, Tensor x, Tensor? keep, Tensor W, "
    "SymInt length, bool back",
    2,
    torch.tanh,
    shapes=_shapes,
)


def _by_time(x: Tensor, W: Tensor) -> Tensor:
    """Time first, in the dtype of the state."""
    return x.transpose(0, 1).to(W.dtype)


def _before(a: Tensor, b: Tensor, W: Tensor) -> Tensor:
    r"""The argument of the activation, $W_{i-1} + a_i \otimes b_i$."""
    return torch.addcmul(W, a[..., :, None], b[..., None, :])


def _pull_back(activation: Callable, P: Tensor, dW: Tensor) -> Tensor:
    """The gradient through any activation, by autograd."""
    P.requires_grad_()
    with torch.enable_grad():
        W = activation(P.clone())  # may change it in place
    if not W.requires_grad:  # a constant
        return torch.zeros_like(P)
    return torch.autograd.grad(W, P, dW)[0]


def _learns(activation: Callable, W: Tensor) -> bool:
    """Whether an activation has parameters of its own."""
    with torch.enable_grad():
        return activation(W.detach().clone()).requires_grad


def _loop(
    a: Tensor, b: Tensor, x: Tensor, keep: Tensor | None, W: Tensor,
    activation: Callable,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A segment that autograd can differentiate."""
    a, b, x = (_by_time(part, W) for part in (a, b, x))
    y = []
    for i in range(len(a)):
        W_i = activation(_before(a[i], b[i], W))  # Eq. 2
        W = W_i if keep is None else torch.where(_real(keep, i), W_i, W)
        y.append((W @ x[i][..., None])[..., 0])  # Eq. 3
    return torch.stack(y, 1), W


def fwp(
    a: Tensor,
    b: Tensor,
    x: Tensor,
    W: Tensor,
    activation: Callable | None,
    real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of the naive version; `activation` None is
    the identity.
    """
    if activation is None:
        # Masked steps come as zeros, which write nothing.
        y, _, W = linear.memory(x, b, a, None, None, W)()  # (a2)
        return y, W
    if activation is not torch.tanh and torch.compiler.is_compiling():
        # Anyone's function: it is called, not traced.
        return torch.compiler.disable(_segments)(
            a, b, x, W, activation, real
        )
    return _segments(a, b, x, W, activation, real)


def _segments(
    a: Tensor, b: Tensor, x: Tensor, W: Tensor, activation: Callable,
    real: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """All segments, one after the other."""
    # The root of an unknown number is no size.
    if traced(a) and activation is torch.tanh:
        back = autograd.will_go_back(a, b, x, W)
        return _operator(a, b, x, real, W, SEGMENT or TRACED, back)
    length = SEGMENT or math.isqrt(a.shape[1] - 1) + 1  # (a1)
    if not (torch.is_grad_enabled() and _learns(activation, W)):
        back = autograd.will_go_back(a, b, x, W)
        return _Segments.apply(
            a, b, x, real, W, length, back, activation
        )
    # Autograd also finds the activation's parameters, and it has second
    # derivatives.
    # Not imported above: torch 2.6 loads half a compiler with it.
    from torch.utils.checkpoint import checkpoint

    outputs = []
    for piece in _cut(length, a, b, x, real):
        y, W = checkpoint(
            _loop, *piece, W, activation, use_reentrant=False
        )
        outputs.append(y)
    return torch.cat(outputs, dim=1), W
