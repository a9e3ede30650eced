r"""# The fast weight programmer, with few states alive

The activation stands between one step and the next, so no product of
matrices covers several steps at once, and the backward pass needs the
state of every step. It does not need them all at the same time.

Cut the sequence into segments of about $\sqrt T$ steps. Forward, keep
the weights before each segment. Backward, run a segment a second time
from there, and differentiate it while its states are there: $\sqrt T$
states that were kept, and $\sqrt T$ of the one segment at work. With
$S$ steps per segment the states alive are

$$\frac TS + S, \quad\text{least for}\quad S = \sqrt T \tag{a1}$$

The price is one more forward pass. What may be taken out of the loop is
taken out: all outer products of a segment are formed at once, and all
its outputs are read at once.

Without an activation nothing stands between the steps, and

$$y_i = W_0\, x_i + \sum_{j \le i} a_j\, (b_j \cdot x_i) \tag{a2}$$

is the sum rule without a normaliser, which computes it in chunks.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fwlab.ops.linear import efficient as linear

#: Steps per segment; None = the root of the number of steps.
SEGMENT: int | None = None


def _segment(
    a: Tensor,
    b: Tensor,
    x: Tensor,
    keep: Tensor | None,
    W: Tensor,
    activation: Callable,
) -> tuple[Tensor, Tensor]:
    """A stretch of the sequence, all its states in memory."""
    a, b, x = (part.to(W.dtype).transpose(0, 1) for part in (a, b, x))
    real = [None] * len(a) if keep is None else keep.unbind(1)
    states = []
    outer = a[..., :, None] * b[..., None, :]
    for write, real_t in zip(outer.unbind(0), real, strict=True):
        W_t = activation(W + write)  # Eq. 2
        if real_t is None:
            W = W_t
        else:
            W = torch.where(real_t[:, None, None, None], W_t, W)
        states.append(W)
    # No matrix product: autocast would change its backward pass.
    y = (torch.stack(states) * x[..., None, :]).sum(-1)  # Eq. 3
    return y.transpose(0, 1), W


def fwp(
    a: Tensor,
    b: Tensor,
    x: Tensor,
    keep: Tensor | None,
    W: Tensor,
    activation: Callable | None,
) -> tuple[Tensor, Tensor]:
    """Arguments and results of the naive version."""
    if activation is None:
        # Masked steps come as zeros, which write nothing.
        y, W, _ = linear.additive(x, b, a, None, None, W, None)  # (a2)
        return y, W
    outputs = []
    steps = SEGMENT or math.isqrt(a.shape[1] - 1) + 1  # (a1)
    # One cut for all: see `steps` of the sum rule's naive loop.
    cuts = [part.split(steps, 1) for part in (a, b, x)]
    real = [None] * len(cuts[0])
    if keep is not None:
        real = keep.split(steps, 1)
    for *given, real_s in zip(*cuts, real, strict=True):
        given = (*given, real_s, W, activation)
        if torch.is_grad_enabled():
            # Runs it now, and once more when its gradients are wanted.
            y, W = checkpoint(_segment, *given, use_reentrant=False)
        else:
            y, W = _segment(*given)
        outputs.append(y)
    return torch.cat(outputs, dim=1), W
