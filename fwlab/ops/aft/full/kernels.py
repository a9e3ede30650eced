"""# AFT-full on a GPU

The kernels are those of AFT-local, with all keys in the window: no step is older than
the window. Only the logarithm of the sum and the mean of each row are saved.
"""

import torch
from torch import Tensor

from fwlab.ops.aft.window.kernels import window


def aft_full(q: Tensor, k: Tensor, v: Tensor, w: Tensor, causal: bool) -> Tensor:
    """Compute AFT-full (Eq. 2) on a GPU, with the arguments of the naive version."""
    reach = k.shape[1] - q.shape[1] if causal else k.shape[1]
    state = q.new_zeros(2, len(q), q.shape[-1], dtype=torch.float32)
    return window((q, k, v, w[None], *state), reach)[0]
