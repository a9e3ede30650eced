"""# AFT-full on a GPU

The window contains all keys: the kernels are those of AFT-local, and no
step is older than the window. They keep only the logarithm of the sum
and the mean of each row.
"""

import torch
from torch import Tensor

from fwlab.ops.aft.window.kernels import Window, operator
from fwlab.ops.call.operators import traced
from fwlab.ops.parts import autograd


def causal(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Row $t$ sees past and present; called as the naive version."""
    return _seeing(k.shape[1] - q.shape[1], q, k, v, w)


def not_causal(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Every row sees all steps; called as the naive version."""
    return _seeing(k.shape[1], q, k, v, w)


def _seeing(
    reach: int, q: Tensor, k: Tensor, v: Tensor, w: Tensor
) -> Tensor:
    """Row t sees the keys up to t + `reach`."""
    state = q.new_zeros(2, len(q), q.shape[-1], dtype=torch.float32)
    keep = autograd.will_go_back(q, k, v, w)
    run = operator if traced(q) else Window.apply
    y, *_ = run(q, k, v, w[None], *state, reach, keep)
    return y  # Eq. 2
