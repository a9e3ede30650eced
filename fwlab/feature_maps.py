r"""Feature maps $\phi$ for keys and queries, and their normalisations.

A feature map turns the last dimension of a tensor, of width `d`, into `width(d)`
features, and keeps all other dimensions. Maps work position by position, so nothing in
$\phi(k_t)$ depends on another step.

Sources: Schlag, Irie, Schmidhuber 2021 (arXiv:2102.11174), sections 4.2 and 5;
Katharopoulos et al. 2020 (arXiv:2006.16236) for ELU + 1; Choromanski et al. 2021
(arXiv:2009.14794) for FAVOR+; Peng et al. 2021 (arXiv:2103.02143) for random Fourier
features.
"""

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from fwlab import arguments


def needs_plain_formula() -> bool:
    """Return True under `torch.compile`, `torch.func` or forward-mode differentiation.

    Transformed code must not branch on values, and a custom autograd function has no
    forward-mode derivative.

        >>> needs_plain_formula()
        False

    - Returns a bool.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


#: Denominators up to this multiple of the smallest normal number count as 0.
_LEAST = 4096


def divide(x: Tensor, total: Tensor) -> Tensor:
    """Divide `x` by `total`; return 0 with gradient 0 where `total` is 0.

    fwlab treats all zero denominators like this. It adds no epsilon, so results do not
    depend on the scale of the features. A total so small that the sums of its gradients
    may overflow (in float32 below 5e-35) counts as 0.

        >>> divide(torch.tensor([1.0, 0.0]), torch.tensor([4.0, 0.0]))
        tensor([0.2500, 0.0000])

    - `x`: any shape, finite.
    - `total`: broadcastable with `x`.
    - Returns a tensor of the broadcast shape.
    """
    # `x / inf` is 0 with gradients of 0, so one pass over `x` is enough.
    total = denominator(total)
    recorded = torch.is_grad_enabled() and (x.requires_grad or total.requires_grad)
    if recorded and not needs_plain_formula():
        return _Quotient.apply(x, total)
    return x / total


class _Quotient(torch.autograd.Function):
    r"""Compute $y = x / t$, with a gradient of $t$ that does not overflow.

    Autograd computes $-dy\, (y / t)$, which overflows where $y$ and $1 / t$ are large.
    This class computes $-(dy \cdot y) / t$.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
        y = x / total
        ctx.save_for_backward(y, total)
        ctx.shape = x.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        y, total = ctx.saved_tensors
        d_total = -(dy * y).sum_to_size(total.shape) / total
        return (dy / total).sum_to_size(ctx.shape), d_total


def denominator(total: Tensor) -> Tensor:
    """Replace zeros in `total` by infinity, for the denominator of `divide`.

        >>> denominator(torch.tensor([2.0, 0.0]))
        tensor([2., inf])

    - `total`: any shape.
    - Returns the same shape, in the dtype of `total`.
    """
    wide = torch.float32 if total.dtype.itemsize < 4 else total.dtype
    return _or_inf(total, _LEAST * torch.finfo(wide).tiny)


# A quotient with infinity as its denominator is 0, as `divide` needs it.
def _or_inf(total: Tensor, least: float) -> Tensor:
    none = total.detach().abs() <= least if least else total == 0
    return total.masked_fill(none, torch.inf)


def unit_range(x: Tensor) -> Tensor:
    """Scale each vector by a power of two to a maximum magnitude in [1, 2).

    Use it before an operation that ignores the length of a vector. Sums then do not
    overflow (float16 ends at 65504), and squares do not underflow (1e-30 squared is 0
    in float32). Division by a power of two is exact. The power is constant almost
    everywhere, so it has no gradient.

        >>> unit_range(torch.tensor([3.0, 8.0]))
        tensor([0.3750, 1.0000])

    - `x`: `[..., width]`. Returns the same shape; 0 stays 0.
    """
    power = _power(x)
    if x.requires_grad and torch.is_grad_enabled() and _extreme(power):
        x = finite_gradient(x)
    return x / power


def finite_gradient(x: Tensor) -> Tensor:
    """Return `x` unchanged, but clamp its gradient to the finite range of its dtype.

    The gradient of a tiny feature is about 1 over the feature, which may overflow. The
    derivative of the feature map is about as tiny. Their exact product is an ordinary
    number, but infinity times the derivative is infinite or NaN.

        >>> x = torch.tensor([1e-40], requires_grad=True)
        >>> y = finite_gradient(x) / 1e-40
        >>> y.sum().backward()
        >>> x.grad.isfinite()
        tensor([True])

    - `x`: any shape. Returns the same.
    """
    recorded = x.requires_grad and torch.is_grad_enabled()
    return _FiniteGradient.apply(x) if recorded and not needs_plain_formula() else x


class _FiniteGradient(torch.autograd.Function):
    """Compute the identity, and clamp infinite gradients in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return _saturated(dx)


# This bound stays finite when it is rounded to bfloat16.
def _saturated(x: Tensor) -> Tensor:
    most = 0.99 * torch.finfo(x.dtype).max
    return x.clamp(-most, most)


def _extreme(total: Tensor) -> bool:
    """Return True if a gradient that is divided by `total` may overflow.

    float16 always returns True, because its range is small. Other dtypes are checked
    only on a CPU, since the check would synchronise with a GPU, and never in a graph.
    """
    if needs_plain_formula() or type(total) is not Tensor:
        return False
    if total.dtype == torch.float16:
        return True
    if not total.is_cpu or not total.numel():
        return False
    return total.detach().abs().amin().item() < torch.finfo(total.dtype).tiny ** 0.75


def _power(x: Tensor) -> Tensor:
    """Return the power of two that `unit_range` divides by, `[..., 1]`."""
    if x.shape[-1] == 0:
        return x.new_ones(*x.shape[:-1], 1)
    top = x.detach().abs().amax(-1, keepdim=True)
    wide = top.float() if top.dtype.itemsize < 4 else top
    exponent = torch.frexp(wide).exponent.to(wide.dtype)
    return torch.exp2(exponent - 1).to(x.dtype)


def sum_normalize(x: Tensor) -> Tensor:
    r"""Divide features by their sum (Schlag et al. 2021, Eq. 29).

    $\phi'(k) = \phi(k) \,/\, \sum_j \phi(k)_j$, which balances what a step of the delta
    rule writes against what it removes (Eqs. 41-51).

        >>> sum_normalize(torch.tensor([1.0, 3.0]))
        tensor([0.2500, 0.7500])

    - `x`: features, `[..., width]`. Signed features are allowed: the sum may then be
      negative.
    - Returns the same shape. A vector whose sum is 0 gives 0, with gradient 0.
    """
    return _normalized(x, 1)


def l2_normalize(x: Tensor) -> Tensor:
    r"""Divide features by their Euclidean norm.

    Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) divides by this norm instead of
    the sum of Eq. 29.

        >>> l2_normalize(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])

    - `x`: features, `[..., width]`.
    - Returns the same shape. The zero vector gives 0, with gradient 0.
    """
    return _normalized(x, 2)


def _normalized(x: Tensor, order: int) -> Tensor:
    """Divide each vector by its sum (order 1) or L2 norm (2), without overflow."""
    if needs_plain_formula():
        x = unit_range(x)
        return divide(x, _total(x, order))
    if x.requires_grad and torch.is_grad_enabled():
        return _Normalized.apply(x, order)[0]
    return _divided(x, order)[0]


def _total(x: Tensor, order: int) -> Tensor:
    """Return the sum (order 1) or the L2 norm (2) of each vector, `[..., 1]`."""
    if order == 1:
        return x.sum(-1, keepdim=True)
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


class _Normalized(torch.autograd.Function):
    r"""Divide each vector by its sum or its L2 norm $n$; return 0 where $n = 0$.

    The backward pass reads the features once, where autograd reads them four times:
    $dx = (dy - y \cdot dy) / n$ for the sum, $dx = (dy - y\,(y \cdot dy)) / n$ for the
    norm. $n$ is also an output, so that second derivatives exist.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: int) -> tuple[Tensor, Tensor]:
        y, total = _divided(x, order)
        ctx.save_for_backward(y, total)
        ctx.order = order
        ctx.set_materialize_grads(False)
        return y, total

    # A gradient of None is 0. The gradient of the norm $|x|$ is $y$.
    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dn: Tensor | None) -> Any:
        (y, total), by_sum = ctx.saved_tensors, ctx.order == 1
        dx = dn
        if dn is not None:
            dx = dn.expand_as(y) if by_sum else dn * y
        if dy is not None:
            along = (dy * y).sum(-1, keepdim=True)
            rest = dy - along if by_sum else torch.addcmul(dy, y, along, value=-1)
            rest = rest.div_(_or_inf(total, 0.0))
            rest = _saturated(rest) if _extreme(total) else rest
            dx = rest if dx is None else dx + rest
        return dx, None


def _divided(x: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """Divide each vector by its sum or norm; return the quotients and the totals.

    Division by a power of two is exact, so only vectors whose total is out of bounds
    need `unit_range`. On a GPU, all vectors are scaled: a check would synchronise.
    """
    if x.device.type != "cpu":
        return _by_power(x, order)
    limits = torch.finfo(x.dtype)
    if order == 1:  # A sum must only be finite; it does not lose small terms.
        total, least, most = x.sum(-1, keepdim=True), 0, limits.max
    else:  # Squares must neither overflow nor underflow.
        total = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        least, most = limits.tiny**0.4, limits.max**0.4
    if total.numel():
        lowest, highest = total.aminmax()
        if least < lowest.item() and highest.item() <= most:
            return x / total, total
    y, size = x / _or_inf(total, 0.0), total.abs()
    extreme = ~((size >= least) & (size <= most))[..., 0]  # NaN also counts as extreme.
    if extreme.any():
        y[extreme], total[extreme] = _by_power(x[extreme], order)
    return y, total


def _by_power(x: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """Divide vectors by their sum or norm, after scaling them by powers of two."""
    power = _power(x)
    x = x / power
    total = _total(x, order)
    return x / _or_inf(total, 0.0), total * power


class FeatureMap(nn.Module):
    """Map keys and queries to features. The base class of all feature maps."""

    #: True if `scaled` returns a scale.
    scales = False

    def forward(self, x: Tensor) -> Tensor:
        """Compute the features of keys or queries, random features in at least float32.

        - `x`: `[..., d]`.
        - Returns `[..., width(d)]`, in the dtype of `x`.
        """
        raise NotImplementedError

    def width(self, d: int) -> int:
        """Return the number of features of a key of width `d`.

        - `d`: width of the key, at least 1.
        - Returns the width of the output of `forward`.
        """
        like = next(chain(self.parameters(), self.buffers()), torch.empty(0))
        return self(like.new_empty(0, d)).shape[-1]

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        r"""Return features that do not overflow, and the logarithm of their scale.

        $\phi(x)$ = features $\cdot\, e^{\text{scale}}$. If the scale cancels later, the
        features alone are enough. Autograd treats the scale as a constant.

        - `x`: `[..., d]`.
        - Returns the features `[..., width]` and the scale `[...]`, or None in place of
          the scale if $\phi$ needs none.
        """
        return self(x), None


class Identity(FeatureMap):
    r"""Return keys and queries unchanged, $\phi(x) = x$, as Gated DeltaNet does.

    >>> Identity()(torch.tensor([-1.0, 2.0]))
    tensor([-1.,  2.])
    """

    def forward(self, x: Tensor) -> Tensor:
        return x


class ReLU(FeatureMap):
    r"""Apply a ReLU, $\phi(x) = \max(x, 0)$.

    >>> ReLU()(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


class ELU1(FeatureMap):
    r"""Apply $\phi(x) = \mathrm{ELU}(x) + 1$, which is always positive.

    The map is $x + 1$ for $x > 0$ and $e^x$ otherwise (Katharopoulos et al. 2020; Eq.
    30 of Schlag et al. 2021, who call it "linear").

        >>> ELU1()(torch.tensor([0.0, 2.0]))
        tensor([1., 3.])
    """

    def forward(self, x: Tensor) -> Tensor:
        recorded = x.requires_grad and torch.is_grad_enabled()
        return _ELU1.apply(x) if recorded and not needs_plain_formula() else _elu1(x)


# This function computes ELU + 1 (Eq. 30).
def _elu1(x: Tensor) -> Tensor:
    # `F.elu(x) + 1` would round exp(x) away for x << 0, and a feature of exactly 0
    # would have no gradient.
    return x.clamp(max=0).exp() + F.relu(x)


class _ELU1(torch.autograd.Function):
    r"""Compute ELU + 1 and save only $\phi$, because $\phi' = \min(\phi, 1)$."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        phi = x.clamp(max=0).exp().add_(x.clamp(min=0))
        ctx.save_for_backward(phi)
        return phi

    @staticmethod
    def backward(ctx: Any, d_phi: Tensor) -> Tensor:
        (phi,) = ctx.saved_tensors
        return d_phi * phi.clamp(max=1)


class DPFP(FeatureMap):
    r"""Apply the deterministic parameter-free projection (Eq. 37).

    With $r = \mathrm{ReLU}([k; -k])$ of length $2d$, each shift $j = 1 \dots \nu$
    contributes the $2d$ products $r_i \, r_{i+j}$, where the index wraps around. At
    least half of $r$ is zero, so with $\nu = 1$ and symmetric keys only a quarter of
    the features are nonzero.

    - `nu`: number of shifts, an integer of at least 1.
    - The output has `2 * d * nu` features.
    - Raises `ValueError` for a `nu` below 1, and `TypeError` for one that is not an
      integer.

    **Which `nu` are useful.** $1 \dots d-1$. The paper allows $\nu \le 2d-1$, but shift
    $d$ multiplies $r(k_i)$ with $r(-k_i)$, which is always zero, and shift $2d - j$
    repeats the products of shift $j$. The rank of the features therefore stops growing
    at $2d(d-1)$; a larger `nu` is accepted, but adds only redundant features. A key of
    width 1 has no useful shift: all its features are zero.

    Features are products. In low precision they underflow before any normalisation: in
    float16, for keys below about 0.01. (A layer that normalises makes them in float32.)

    The authors' Listing 1 rolls the other way and takes $r_{i-j}$: the same set of
    products in another order.

        >>> DPFP(nu=1)(torch.tensor([2.0, 3.0]))
        tensor([6., 0., 0., 0.])
    """

    def __init__(self, nu: int = 1):
        super().__init__()
        arguments.integers("DPFP", 1, nu=nu)
        self.nu = nu

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and torch.is_grad_enabled() and not needs_plain_formula():
            return _DPFP.apply(x, self.nu)
        return _dpfp(x, self.nu)

    def extra_repr(self) -> str:
        return f"nu={self.nu}"


def _dpfp(x: Tensor, nu: int) -> Tensor:
    """Compute DPFP (Eq. 37) with operations that autograd differentiates."""
    n = 2 * x.shape[-1]
    first = [x[..., :nu]] if 2 * nu <= n else [x, -x]
    r = torch.cat([x, -x, *first], -1).relu_()
    parts = [r[..., :n] * r[..., j % n :][..., :n] for j in range(1, nu + 1)]
    return torch.cat(parts, -1)


class _DPFP(torch.autograd.Function):
    """Compute `_dpfp` with half as many passes over the features; save only `x`."""

    # Each shift is written directly into the result, so nothing is concatenated.
    @staticmethod
    def forward(ctx: Any, x: Tensor, nu: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.nu = nu
        r, n = _rectified(x, nu), 2 * x.shape[-1]
        phi = x.new_empty(*x.shape[:-1], nu * n)
        for j, part in enumerate(phi.split(n, -1), 1):
            torch.mul(r[..., :n], r[..., j % n :][..., :n], out=part)
        return phi

    # The gradient of each factor of a product is the gradient of the product times
    # the other factor. $r$ is recomputed, so that only `x` has to be saved.
    @staticmethod
    def backward(ctx: Any, d_phi: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # A second derivative is requested.
            phi = _dpfp(x, ctx.nu)
            return torch.autograd.grad(phi, x, d_phi, create_graph=True)[0], None
        r, n = _rectified(x, ctx.nu), 2 * x.shape[-1]
        dr = d_phi.new_zeros(r.shape)
        for j, part in enumerate(d_phi.split(n, -1), 1):
            first, second = slice(n), slice(j % n, j % n + n)
            dr[..., first].addcmul_(part, r[..., second])
            dr[..., second].addcmul_(part, r[..., first])
        # The first entries of $r$ are repeated, so their two gradients are added.
        more = dr.shape[-1] - n
        dr[..., :more] += dr[..., n:]
        # The gradient passes through the ReLU where $r$ is above 0.
        dr = torch.ops.aten.threshold_backward(dr[..., :n], r[..., :n], 0)
        positive, negative = dr.chunk(2, -1)
        return positive - negative, None


def _rectified(x: Tensor, nu: int) -> Tensor:
    """Compute $r$ of DPFP (Eq. 37), `[..., 2 * d]`, and repeat its first `nu` entries.

    Every shift is then a slice of the result.
    """
    d = x.shape[-1]
    more = min(nu, 2 * d - 1)
    r = x.new_empty(*x.shape[:-1], 2 * d + more)
    torch.clamp(x, min=0, out=r[..., :d])
    torch.neg(x, out=r[..., d : 2 * d]).clamp_(min=0)
    r[..., 2 * d :] = r[..., :more]
    return r


class RandomFeatures(FeatureMap):
    r"""Draw random directions for features. The base class of random feature maps.

    - `d`: width of the keys, at least 1.
    - `directions`: number of random directions $\omega$, at least 1.
    - `orthogonal`: draw blocks of `d` orthogonal directions.
    - `seed`: seed of the first draw; None = PyTorch's own generator.
    - Raises `ValueError` for sizes below 1, `TypeError` for a wrong type.

    The directions are a buffer `[directions, d]`: they are moved and saved with the
    model, are not trained, and change only in `redraw`.
    """

    omega: Tensor

    def __init__(self, d: int, directions: int, orthogonal: bool, seed: int | None):
        super().__init__()
        name = type(self).__name__
        arguments.integers(name, 1, d=d, directions=directions)
        arguments.flags(name, orthogonal=orthogonal)
        self.d, self.directions, self.orthogonal = d, directions, orthogonal
        self.register_buffer("omega", torch.empty(directions, d))
        self.redraw(seed)

    def redraw(self, seed: int | None = None) -> None:
        """Draw new random directions in place.

        Values that were written with the old directions cannot be read with the new
        directions: start again from an empty state.

        - `seed`: the same seed gives the same directions; None = PyTorch's own
          generator.
        """
        generator = None
        if seed is not None:
            arguments.integers(type(self).__name__, None, seed=seed)
            generator = torch.Generator().manual_seed(seed)
        draw = gaussian_directions(self.directions, self.d, self.orthogonal, generator)
        self.omega.copy_(draw)

    def width(self, d: int) -> int:
        """Return the number of features of a key: two per direction.

        - `d`: width of the key; must equal that of the directions.
        - Returns `2 * directions`.
        - Raises `ValueError` for any other `d`.
        """
        if d != self.d:
            raise ValueError(
                f"{type(self).__name__}: expected keys of width {self.d}, the width "
                f"of its directions, got {d}"
            )
        return 2 * self.directions

    def extra_repr(self) -> str:
        return f"d={self.d}, directions={self.directions}, orthogonal={self.orthogonal}"


def gaussian_directions(
    count: int, d: int, orthogonal: bool, generator: torch.Generator | None = None
) -> Tensor:
    r"""Draw random directions, one per row, from the distribution $\mathcal N(0, I_d)$.

    Orthogonal rows come in blocks of `d` (Choromanski et al. 2021, section 3.2). This
    lowers the variance of the estimate and keeps it unbiased: each block is a uniformly
    drawn rotation, and each row has the length of an independent Gaussian vector. The
    columns of $Q$ take the signs of $R$'s diagonal; otherwise LAPACK's $Q$ is not
    uniform.

        >>> gaussian_directions(3, d=2, orthogonal=True).shape
        torch.Size([3, 2])

    - `count`: number of rows, 0 or more.
    - `d`: width of a row, at least 1.
    - `orthogonal`: the rows of a block are orthogonal; False = all rows are
      independent.
    - `generator`: on the CPU; None = PyTorch's own.
    - Returns `[count, d]`, float32, on the CPU.
    """
    if not orthogonal:
        return torch.randn(count, d, generator=generator, device="cpu")
    blocks = -(-count // d)
    square, other = torch.randn(
        2, blocks, d, d, generator=generator, dtype=torch.float64, device="cpu"
    )
    Q, R = torch.linalg.qr(square)
    Q = Q * torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1, 1)[:, None]
    rows = Q.mT * other.norm(dim=-1, keepdim=True)
    return rows.flatten(0, 1)[:count].float()


class FAVOR(RandomFeatures):
    r"""Compute FAVOR+, positive random features of the softmax kernel (Eqs. 31-32).

    $\phi(x) = \frac{h(x)}{\sqrt{2m}} [e^{\Omega x}; e^{-\Omega x}]$ with $h(x) =
    e^{-|x|^2/2}$, so that $\phi(q) \cdot \phi(k)$ is $e^{q \cdot k}$ on average over
    $\Omega$.

        >>> (FAVOR(d=4, directions=16)(torch.randn(4)) > 0).sum()
        tensor(32)

    - `d`, `directions`, `orthogonal`, `seed`: as in `RandomFeatures`; $m$ rows of
      $\Omega$ are the directions.
    - `stabilize`: first scale inputs by $d^{-1/4}$, so that the kernel is $e^{q \cdot k
      / \sqrt d}$ as in softmax attention, and let layers carry the largest exponent as
      a logarithm (`scaled`). Without it you get the features as printed in the paper:
      in float32 they underflow for keys longer than about 13, and training breaks down.
    - The output has `2 * directions` positive features.
    - Raises `ValueError` and `TypeError` as `RandomFeatures` does.

    Source: Choromanski et al. 2021 (arXiv:2009.14794), Lemma 1 (the hyperbolic form);
    equation numbers from Schlag et al. 2021.
    """

    def __init__(
        self,
        d: int,
        directions: int = 64,
        orthogonal: bool = True,
        stabilize: bool = True,
        seed: int | None = None,
    ):
        super().__init__(d, directions, orthogonal, seed)
        arguments.flags("FAVOR", stabilize=stabilize)
        self.stabilize = self.scales = stabilize

    def forward(self, x: Tensor) -> Tensor:
        return self._features(x, False)[0]

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._features(x, self.stabilize)

    def _features(self, x: Tensor, scaled: bool) -> tuple[Tensor, Tensor | None]:
        """Return features, and the logarithm of their scale (None without `scaled`)."""
        with torch.autocast(x.device.type, enabled=False):
            wide = _at_least_float32(x)
            if self.stabilize:
                wide = wide * self.d**-0.25
            omega = self.omega.to(wide.dtype)
            # `_FAVOR` does not compute gradients of the directions.
            plain = needs_plain_formula() or (
                omega.requires_grad and torch.is_grad_enabled()
            )
            compute = _favor if plain else _FAVOR.apply
            phi, scale = compute(wide, omega, scaled)
            return phi.to(x.dtype), scale


def _favor(x: Tensor, omega: Tensor, scaled: bool) -> tuple[Tensor, Tensor | None]:
    r"""Compute FAVOR+ (Eq. 31) with operations that autograd differentiates.

    The exponents are $\pm\omega x - |x|^2/2$ plus the logarithm of $1/\sqrt{2m}$.

    With `scaled`, the scale is the largest exponent of a key, so that its largest
    feature is 1. The scale of a key does not depend on any other step.
    """
    along = x @ omega.mT
    rest = (x * x).sum(-1, keepdim=True) / 2 + math.log(2 * len(omega)) / 2
    exponents = torch.cat([along, -along], -1) - rest
    if not scaled:
        return exponents.exp(), None
    # The maximum is detached: it cancels later, so no gradient is lost.
    top = exponents.detach().amax(-1, keepdim=True)
    return (exponents - top).exp(), top[..., 0]


class _FAVOR(torch.autograd.Function):
    r"""Compute `_favor` with fewer passes over the features.

    Features below the smallest normal number (2e-308 in float64, 1e-38 in float32) are
    set to 0. Arithmetic with subnormal numbers is many times slower on a processor, and
    less precise. `divide` treats a total of this size as 0, too. In a larger total,
    such a feature is lost in the rounding error, and so is its gradient, which is
    proportional to the feature.
    """

    # Exponents are written directly into the result. The scale is $\max |\omega x|$
    # minus `rest`, so `rest` cancels in the exponents.
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, omega: Tensor, scaled: bool
    ) -> tuple[Tensor, Tensor | None]:
        along = x @ omega.mT
        rest = (x * x).sum(-1, keepdim=True) / 2 + math.log(2 * len(omega)) / 2
        top = torch.linalg.vector_norm(along, math.inf, -1, True) if scaled else rest
        phi = x.new_empty(*x.shape[:-1], 2 * len(omega))
        positive, negative = phi.chunk(2, -1)
        torch.sub(along, top, out=positive)
        torch.sub(-top, along, out=negative)
        # Exponents are clamped, as the exponential of -inf takes three times as long.
        least = torch.finfo(x.dtype).tiny
        torch.threshold_(phi.clamp_(math.log(least) + 0.5).exp_(), 2 * least, 0.0)
        ctx.save_for_backward(x, omega, phi)
        ctx.scaled = scaled
        if not scaled:
            return phi, None
        scale = (top - rest)[..., 0]
        ctx.mark_non_differentiable(scale)
        return phi, scale

    # The gradients of the exponents are $g_\pm = d\phi_\pm\, \phi_\pm$. Therefore
    # $dx = \Omega^\top (g_+ - g_-) - x \sum (g_+ + g_-)$.
    @staticmethod
    def backward(ctx: Any, d_phi: Tensor, _: Any) -> tuple[Tensor, None, None]:
        x, omega, phi = ctx.saved_tensors
        if torch.is_grad_enabled():  # A second derivative is requested.
            phi = _favor(x, omega, ctx.scaled)[0]
            return torch.autograd.grad(phi, x, d_phi, create_graph=True)[0], None, None
        # The product has the memory layout of `phi`, whatever layout the gradient has.
        g = phi * d_phi
        total = g.sum(-1, keepdim=True)
        positive, negative = g.chunk(2, -1)
        dx = positive.sub_(negative) @ omega
        return dx.addcmul_(x, total, value=-1), None, None


class RandomFourier(RandomFeatures):
    r"""Compute the random Fourier features of Random Feature Attention.

    $\phi(x) = \frac{1}{\sqrt m} [\sin \Omega \hat x; \cos \Omega \hat x]$ with $\hat x
    = x / |x|$ and rows $\omega_i = \sigma \odot \tilde\omega_i$, $\tilde\omega_i \sim
    \mathcal N(0, I)$. The features have length 1, and the mean of $\phi(x) \cdot
    \phi(y)$ is the Gaussian kernel $e^{-|\sigma \odot (\hat x - \hat y)|^2 / 2}$. The
    features are signed, so their sums can be small or negative.

        >>> RandomFourier(d=4, directions=16)(torch.randn(4)).shape
        torch.Size([32])

    - `d`, `directions`, `orthogonal`, `seed`: as in `RandomFeatures`; $m$ rows of
      $\Omega$ are the directions.
    - `bandwidth`: initial value of the trained vector $\sigma$ (Eq. 8 of the source); a
      larger value makes the kernel narrower.
    - The output has `2 * directions` features. The zero vector has no direction and
      counts as $\hat x = 0$.
    - Raises `ValueError` and `TypeError` as `RandomFeatures` does, also for a
      `bandwidth` that is not a finite number above 0.

    Source: Peng et al. 2021 (arXiv:2103.02143), section 3.1.
    """

    def __init__(
        self,
        d: int,
        directions: int = 64,
        orthogonal: bool = False,
        bandwidth: float = 1.0,
        seed: int | None = None,
    ):
        super().__init__(d, directions, orthogonal, seed)
        wanted, fits = "a finite number above 0", lambda size: 0 < size < math.inf
        arguments.numbers("RandomFourier", wanted, fits, bandwidth=bandwidth)
        self.bandwidth = nn.Parameter(torch.full((d,), float(bandwidth)))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            unit = l2_normalize(_at_least_float32(x))
            omega = (self.bandwidth * self.omega).to(unit.dtype)
            along = unit @ omega.mT
            both = torch.cat([along.sin(), along.cos()], -1)
            return (both * self.directions**-0.5).to(x.dtype)


# Exponentials and sines in half precision lose too many digits.
def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype.itemsize >= 4 else x.float()


KEY_NORMS: dict[str | None, Callable[[Tensor], Tensor]] = {
    "sum": sum_normalize,
    "l2": l2_normalize,
    None: nn.Identity(),
}
"""The normalisations of features, by the values of `key_norm` in layers."""
