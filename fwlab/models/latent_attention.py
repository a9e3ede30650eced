"""Softmax attention whose keys and values come from a few shared channels."""

from typing import Any

import torch
from torch import Tensor, nn

from fwlab import ops
from fwlab.layers.causal import Causal, with_state


class LatentAttention(Causal):
    r"""Multi-head latent attention (DeepSeek-V2), without positions.

    $c = \mathrm{RMSNorm}(W_c x)$ has few channels; keys and values of all heads are
    linear in it. A part of each key is the same for all heads. Kimi Linear has such
    layers, and no positions in them.

    - `d_model`, `heads`: as for `SoftmaxAttention`.
    - `latent`: channels of $c$.
    - `own`, `shared`: width of the part of a key that a head makes of $c$, and of the
      part that all heads share.
    - `value`: width of a value.

    Its state is a `KeyValueCache` of the keys and values of all heads.
    """

    one_token = "auto"
    skips = True

    def __init__(
        self, d_model: int, heads: int, latent: int, own: int, shared: int, value: int
    ):
        super().__init__()
        self.d_model, self.heads = d_model, heads
        self.latent, self.sizes = latent, (own, shared, value)
        self.to_q = nn.Linear(d_model, heads * (own + shared), bias=False)
        self.to_latent = nn.Linear(d_model, latent + shared, bias=False)
        self.latent_norm = nn.RMSNorm(latent, 1e-6)
        self.to_kv = nn.Linear(latent, heads * (own + value), bias=False)
        self.to_out = nn.Linear(heads * value, d_model, bias=False)

    def state_size(self, time: int) -> int:  # type: ignore[override]
        """Number of scalars in the state of one sequence after `time` tokens."""
        own, shared, value = self.sizes
        return time * self.heads * (own + shared + value)

    def _mix(self, x: Tensor, state: Any, **options: Any) -> tuple[Tensor, Any]:
        """Make keys and values from shared channels, and attend."""
        own, shared, value = self.sizes
        latent, rest = self.to_latent(x).split([self.latent, shared], -1)
        kv = self.to_kv(self.latent_norm(latent)).unflatten(-1, (self.heads, -1))
        k, v = kv.split([own, value], -1)
        k = torch.cat([k, rest.unsqueeze(2).expand(-1, -1, self.heads, -1)], -1)
        q = self.to_q(x).unflatten(-1, (self.heads, -1))
        y, state = with_state(ops.softmax_attention(q, k, v, state=state, **options))
        return self.to_out(y.flatten(-2)), state
