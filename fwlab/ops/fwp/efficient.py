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
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fwlab.ops.additive import efficient as linear
from fwlab.ops.parts import autograd

#: Steps per segment; None = the root of the number of steps.
SEGMENT: int | None = None

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
    """Of each sequence, whether step i is a real one."""
    return keep[:, i, None, None, None]


def _left(x: Tensor, W: Tensor) -> Tensor:
    r"""$x^\top W$ of every step.

    A row times a matrix takes less time on a CPU than a matrix times
    a column.
    """
    return (x[..., None, :] @ W)[..., 0, :]


class _Segment(torch.autograd.Function):
    """One segment; the backward pass computes its states again."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        x: Tensor,
        keep: Tensor | None,
        W: Tensor,
        activation: Callable,
    ) -> tuple[Tensor, Tensor]:
        """Keep the inputs, and no state but the first."""
        ctx.save_for_backward(a, b, x, keep, W)
        ctx.activation = activation
        a, b, x = (_by_time(part, W) for part in (a, b, x))
        states = _states(a, b, keep, W, activation)
        y = _left(x, states[1:].mT)  # Eq. 3
        return y.transpose(0, 1), states[-1].clone()

    @staticmethod
    @autograd.backward_pass
    def backward(
        ctx: Any, dy: Tensor, dW: Tensor
    ) -> tuple[Tensor | None, ...]:
        r"""Let $P_i = W_{i-1} + a_i \otimes b_i$, so that
        $W_i = \sigma(P_i)$. Each state is read once, and the next step
        starts from it:

        $$dW_i = dy_i \otimes x_i + dP_{i+1} \tag{a3}$$
        $$dP_i = \sigma'(P_i)\; dW_i \tag{a4}$$
        $$da_i = dP_i\, b_i, \quad db_i = dP_i^\top a_i, \quad
          dx_i = W_i^\top dy_i \tag{a5}$$

        The derivative of tanh is $1 - W_i^2$. Autograd computes that
        of any other $\sigma$.
        """
        a, b, x, keep, W = ctx.saved_tensors
        kinds = [part.dtype for part in (a, b, x)]
        a, b, x, dy = (_by_time(part, W) for part in (a, b, x, dy))
        states = _states(a, b, keep, W, ctx.activation)
        dP, later, dW = torch.empty_like(states[1:]), dW, dW.clone()
        steps = zip(
            _columns(dy), _rows(x), dP.unbind(), states[1:].unbind(),
            strict=True,
        )  # fmt: skip
        for i, (dy_i, x_i, dP_i, W_i) in reversed([*enumerate(steps)]):
            torch.addcmul(later, dy_i, x_i, out=dW)  # (a3)
            if ctx.activation is torch.tanh:
                _tanh_backward(dW, W_i, grad_input=dP_i)  # (a4)
            else:
                P = _before(a[i], b[i], states[i])
                dP_i.copy_(_pull_back(ctx.activation, P, dW))
            later = dP_i
            if keep is not None:
                later = torch.where(_real(keep, i), dP_i, dW)
        da = _left(b, dP.mT)  # (a5)
        db = _left(a, dP)
        dx = _left(dy, states[1:])
        da, db, dx = (
            part.transpose(0, 1).to(kind)
            for part, kind in zip((da, db, dx), kinds, strict=True)
        )
        return da, db, dx, None, later.clone(), None


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
    a: Tensor,
    b: Tensor,
    x: Tensor,
    keep: Tensor | None,
    W: Tensor,
    activation: Callable,
) -> tuple[Tensor, Tensor]:
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
        y, _, W = linear.remember(x, b, a, None, None, W)  # (a2)
        return y, W
    length = SEGMENT or math.isqrt(a.shape[1] - 1) + 1  # (a1)
    cuts = [part.split(length, 1) for part in (a, b, x)]
    masks = (
        [None] * len(cuts[0]) if real is None else real.split(length, 1)
    )
    run: Callable = _Segment.apply
    if torch.is_grad_enabled() and _learns(activation, W):
        # Autograd also finds the activation's parameters, and it has
        # second derivatives.
        # Not imported above: torch 2.6 loads half a compiler with it.
        from torch.utils.checkpoint import checkpoint

        run = partial(checkpoint, _loop, use_reentrant=False)

    outputs = []
    for a_s, b_s, x_s, real_s in zip(*cuts, masks, strict=True):
        y, W = run(a_s, b_s, x_s, real_s, W, activation)
        outputs.append(y)
    return torch.cat(outputs, dim=1), W
