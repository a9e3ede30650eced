r"""The kernels of flash-linear-attention, behind the calls of fwlab.

flash-linear-attention (https://github.com/fla-org) has kernels for the
same two recurrences, used and measured by many. Here they get the
arguments of ours. What differs:

- it multiplies queries by $K^{-1/2}$ unless told otherwise;
- a state is `[batch, heads, key, value]`;
- it takes the logarithm of a decay;
- it divides by $z$ in the precision of the inputs, so $z$ is computed here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fwlab.feature_maps import divide
from fwlab.ops.call import launcher
from fwlab.ops.parts import autograd
from fwlab.transforms import constant

OLDEST = (0, 6)
"""The oldest release with these functions."""

WIDEST = 256
"""The maximum width of the keys of a rule that corrects."""

SMALLEST = 1e-11
r"""Smaller decays are raised to this.

Logarithms are summed up in a chunk, and the difference of two sums that
are $-\infty$ is not a number.
"""


def version() -> launcher.Version | None:
    """The version of flash-linear-attention; None = not installed."""
    # fla-core contains only the operations.
    return launcher.version("flash-linear-attention") or launcher.version("fla-core")


@constant
def missing() -> str | None:
    """Why it cannot run on this machine at all; None = it can."""
    if (version() or ()) < OLDEST:
        return (
            f"flash-linear-attention {launcher.dotted(OLDEST)} or newer "
            'is not installed (pip install "fwlab[fla]")'
        )
    if launcher.stands_in():  # it launches its kernels itself
        return "flash-linear-attention needs a GPU"
    return None


@dataclass(frozen=True)
class Borrowed(launcher.Kernel):
    """The entry of flash-linear-attention in the table of an operation.

    - `auto`: whether "auto" may choose it.
    """

    auto: bool = True

    def refusal(
        self, device: torch.device, dtypes: set[torch.dtype], **sizes: Any
    ) -> str | None:
        """Why it cannot compute this; None = it can."""
        if device.type != launcher.device_type():
            return (
                f"flash-linear-attention needs a GPU, but the tensors are on {device}"
            )
        return missing() or super().refusal(device, dtypes, **sizes)


def refuses(
    full: bool = False,
    normalize: bool = False,
    gates: tuple[str, ...] = (),
    **_: Any,
) -> str | None:
    """What the additive rules cannot have, in words."""
    if full:
        return "fwlab calls flash-linear-attention in half precision only"
    if normalize and gates:
        return (
            "flash-linear-attention has no kernel for normalize=True "
            f"with {' and '.join(gates)}"
        )
    return None


def refuses_to_correct(
    full: bool = False,
    normalize: bool = False,
    key: int = 0,
    **_: Any,
) -> str | None:
    """What the rules that correct cannot have, in words."""
    if normalize:
        return "flash-linear-attention has no kernel for normalize=True"
    if key > WIDEST:
        return f"flash-linear-attention takes keys of width up to {WIDEST}, got {key}"
    return refuses(full)


def additive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    strength: Tensor | None,
    W: Tensor,
    z: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Arguments and results of the chunked version."""
    from fla.ops.simple_gla import chunk_simple_gla

    if strength is not None:
        v = (strength * v).to(v.dtype)
    y, W = _called(chunk_simple_gla, q, k, v, W, g=_logarithm(decay))
    if z is None:
        return y, W
    # Without a decay, a running sum is all that is needed.
    totals = z[:, None] + k.to(z.dtype).cumsum(1)
    total = (q * totals).sum(-1, keepdim=True)
    return divide(y, total), W, totals[:, -1]


def correcting(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, strength: Tensor, W: Tensor
) -> tuple[Tensor, Tensor]:
    """Arguments and results of the chunked version."""
    beta = strength[..., 0]
    if decay is None:
        from fla.ops.delta_rule import chunk_delta_rule

        return _called(chunk_delta_rule, q, k, v, W, beta=beta)
    if decay.shape[-1] == 1:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return _called(
            chunk_gated_delta_rule, *(q, k, v, W), g=_logarithm(decay), beta=beta
        )
    from fla.ops.kda import chunk_kda

    g = decay.clamp(min=SMALLEST).log()
    return _called(chunk_kda, q, k, v, W, g=g, beta=beta)


def _logarithm(decay: Tensor | None) -> Tensor | None:
    """The logarithm of a decay `[..., 1]`."""
    if decay is None:
        return None
    return decay[..., 0].clamp(min=SMALLEST).log()


def _called(
    function: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    W: Tensor,
    **gates: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Results of a function of flash-linear-attention."""
    y, W = function(
        *(q, k, v),
        scale=1.0,
        initial_state=W.mT.contiguous(),
        output_final_state=True,
        **gates,
    )
    return _Once.apply(y), _Once.apply(W.mT)


class _Once(torch.autograd.Function):
    """The same tensor, which can be differentiated only once.

    Without it, a second derivative would be wrong without an error.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """A view of `x`."""
        return x.view_as(x)

    @staticmethod
    @autograd.backward_pass
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        """The gradient as it comes."""
        return dx


ADDITIVE = Borrowed(__name__, "additive", refuses=refuses)
# The derivative of a logarithm divides by the decay, here by 1 - beta. So close to 1
# the gradient of beta loses digits, and at 1 a part of it is missing.
GATED = replace(ADDITIVE, auto=False)
CORRECTING = Borrowed(__name__, "correcting", refuses=refuses_to_correct)
