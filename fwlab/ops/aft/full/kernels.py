"""# AFT-full on a GPU

The window contains all keys: the kernels are those of AFT-local, and no step is older
than the window. They keep only the logarithm of the sum and the mean of each row.
"""

import torch
from torch import Tensor

from fwlab.ops.aft.window.kernels import window


def aft_full(q: Tensor, k: Tensor, v: Tensor, w: Tensor, causal: bool) -> Tensor:
    """Return Eq. 2: every row sees all steps, or if `causal` past and present."""
    reach = k.shape[1] - q.shape[1] if causal else k.shape[1]
    state = q.new_zeros(2, len(q), q.shape[-1], dtype=torch.float32)
    return window((q, k, v, w[None], *state), reach)[0]
