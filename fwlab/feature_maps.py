r"""Feature maps $\phi$ for keys and queries, and their normalisations.

A feature map turns the last dimension of a tensor from `d` into
`width(d)` numbers; all other dimensions stay. Maps work position by
position, so nothing in $\phi(k_t)$ depends on another step.

Sources: Schlag, Irie, Schmidhuber 2021 (arXiv:2102.11174), sections 4.2
and 5; Katharopoulos et al. 2020 (arXiv:2006.16236) for ELU + 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def divide(x: Tensor, total: Tensor) -> Tensor:
    """`x / total`, and 0 with gradient 0 wherever `total` is exactly 0.

    This is fwlab's one rule for empty denominators: no epsilon is added,
    so results do not depend on the scale of the features.
    """
    empty = total == 0
    return torch.where(empty, 0, x / torch.where(empty, 1, total))


def unit_range(x: Tensor) -> Tensor:
    """Scale each vector by a power of two to a largest entry in [1, 2).

    For what does not depend on the length of a vector: afterwards its
    sums do not overflow (float16 ends at 65504) and its squares do not
    underflow (1e-30 squared is 0 in float32). A power of two changes no
    digit, and being constant almost everywhere it has no gradient.

    - `x`: `[..., width]`. Returns the same shape; 0 stays 0.
    """
    if x.shape[-1] == 0:
        return x
    top = x.detach().abs().amax(-1, keepdim=True)
    wide = top.float() if top.dtype.itemsize < 4 else top
    exponent = torch.frexp(wide).exponent.to(wide.dtype)
    return x / torch.exp2(exponent - 1).to(x.dtype)


def sum_normalize(x: Tensor) -> Tensor:
    r"""Divide features by their sum (Schlag et al. 2021, Eq. 29).

    $\phi'(k) = \phi(k) \,/\, \sum_j \phi(k)_j$, which balances what one
    step of the delta rule writes and removes (their Eqs. 41-52).

    - `x`: features, `[..., width]`. Signed features are allowed: the sum
      may then be negative.
    - Returns the same shape. A vector whose sum is 0 gives 0, with
      gradient 0.
    """
    x = unit_range(x)
    return divide(x, x.sum(-1, keepdim=True))


def l2_normalize(x: Tensor) -> Tensor:
    r"""Divide features by their Euclidean norm.

    The normalisation of Gated DeltaNet (Yang et al. 2024,
    arXiv:2412.06464) in place of the sum of Eq. 29.

    - `x`: features, `[..., width]`.
    - Returns the same shape. The zero vector gives 0, with gradient 0.
    """
    x = unit_range(x)
    square = (x * x).sum(-1, keepdim=True)
    empty = square == 0
    # sqrt has an infinite slope at 0: keep it away from there.
    norm = torch.where(empty, 1, square).sqrt()
    return torch.where(empty, 0, x / norm)


class FeatureMap(nn.Module):
    """What all feature maps have in common: they know their width."""

    def width(self, d: int) -> int:
        """Number of features of a key of width `d`."""
        raise NotImplementedError


class ELU1(FeatureMap):
    r"""$\phi(x) = \mathrm{ELU}(x) + 1$, always positive.

    Katharopoulos et al. 2020; Eq. 30 of Schlag et al. 2021, who call it
    "linear". It equals $x + 1$ for $x > 0$ and $e^x$ otherwise.

    - Input `[..., d]`, output `[..., d]`.
    """

    def width(self, d: int) -> int:
        return d

    def forward(self, x: Tensor) -> Tensor:
        # Not elu(x) + 1: that loses exp(x) to rounding for x << 0, and
        # a feature of exactly 0 would lose its gradient.
        return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


class DPFP(FeatureMap):
    r"""Deterministic parameter-free projection (Eq. 37).

    With $r = \mathrm{ReLU}([k; -k])$ of length $2d$, each shift
    $j = 1 \dots \nu$ contributes the $2d$ products $r_i \, r_{i+j}$, the
    index counted round the circle. At least half of $r$ is zero, so for
    $\nu = 1$ and symmetric keys only a quarter of the features are not.

    - `nu`: number of shifts, an integer of at least 1.
    - Input `[..., d]`, output `[..., 2 * d * nu]`.
    - Raises `ValueError` for a `nu` below 1.

    **Which `nu` are useful.** $1 \dots d-1$. The paper allows
    $\nu \le 2d-1$, but shift $d$ multiplies $r(k_i)$ with $r(-k_i)$,
    which is always zero, and shift $2d - j$ gives the products of shift
    $j$ once more. The rank of the features therefore stops growing at
    $2d(d-1)$; a larger `nu` is accepted and costs width for nothing.
    A key of width 1 has no useful shift: all its features are zero.

    Features are products: in low precision they underflow before any
    normalisation, in float16 for keys below about 0.01.

    The authors' Listing 1 rolls the other way and reads $r_{i-j}$: the
    same set of products in another order.
    """

    def __init__(self, nu: int = 1):
        super().__init__()
        if isinstance(nu, bool) or not isinstance(nu, int) or nu < 1:
            raise ValueError(f"nu must be an integer of at least 1, not {nu!r}")
        self.nu = nu

    def width(self, d: int) -> int:
        return 2 * d * self.nu

    def forward(self, x: Tensor) -> Tensor:
        r = F.relu(torch.cat([x, -x], dim=-1))
        return torch.cat([r * r.roll(-j, -1) for j in range(1, self.nu + 1)], dim=-1)

    def extra_repr(self) -> str:
        return f"nu={self.nu}"


#: What `key_norm` may name, in layers.
KEY_NORMS: dict[str | None, Callable[[Tensor], Tensor]] = {
    "sum": sum_normalize,
    "l2": l2_normalize,
    None: nn.Identity(),
}
