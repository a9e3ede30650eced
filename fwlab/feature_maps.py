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
    """Return True if `torch.compile`, `torch.func` or forward mode transforms a call.

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


#: Denominators below this many of the smallest normal numbers count as 0.
_LEAST = 4096


def divide(x: Tensor, total: Tensor) -> Tensor:
    """Divide by `total`; return 0 with gradient 0 wherever it is 0.

    This is how fwlab treats every empty denominator: it adds no epsilon, so results do
    not depend on the scale of the features. A total so small that the sums of its
    gradients may overflow (in float32 below 5e-35) counts as 0.

        >>> divide(torch.tensor([1.0, 0.0]), torch.tensor([4.0, 0.0]))
        tensor([0.2500, 0.0000])

    - `x`: any shape, finite.
    - `total`: a shape that broadcasts with that of `x`.
    - Returns the shape the two broadcast to.
    """
    # `x / inf` is 0, and so are its gradients. One pass over `x` is enough.
    total = denominator(total)
    recorded = torch.is_grad_enabled() and (x.requires_grad or total.requires_grad)
    if recorded and not needs_plain_formula():
        return _Quotient.apply(x, total)
    return x / total


class _Quotient(torch.autograd.Function):
    r"""Compute $y = x / t$. Autograd's gradient of $t$ is $-dy\, (y / t)$, summed up.

    Here it is $-(dy \cdot y) / t$: both $y$ and $1 / t$ may be large, so their product
    may overflow.
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
    """Return the denominator of `divide`: infinity in place of a total of 0.

        >>> denominator(torch.tensor([2.0, 0.0]))
        tensor([2., inf])

    - `total`: any shape.
    - Returns the same shape, in the dtype of `total`.
    """
    wide = torch.float32 if total.dtype.itemsize < 4 else total.dtype
    return _or_inf(total, _LEAST * torch.finfo(wide).tiny)


# In place of an empty denominator, infinity: see `divide`.
def _or_inf(total: Tensor, least: float) -> Tensor:
    none = total.detach().abs() <= least if least else total == 0
    return total.masked_fill(none, torch.inf)


def unit_range(x: Tensor) -> Tensor:
    """Scale each vector by a power of two: largest entry in [1, 2).

    Use it before an operation that ignores the length of a vector. Sums then do not
    overflow (float16 ends at 65504), and squares do not underflow (1e-30 squared is 0
    in float32). A power of two changes no digit, and it is constant almost everywhere,
    so it has no gradient.

        >>> unit_range(torch.tensor([3.0, 8.0]))
        tensor([0.3750, 1.0000])

    - `x`: `[..., width]`. Returns the same shape; 0 stays 0.
    """
    power = _power(x)
    if x.requires_grad and torch.is_grad_enabled() and _extreme(power):
        x = finite_gradient(x)
    return x / power


def finite_gradient(x: Tensor) -> Tensor:
    """Return `x`, whose gradient is at most the largest number of its dtype.

    The gradient of a tiny feature is about 1 over the feature, which may
    overflow. The slope of a feature map is about as tiny: infinity times it would be
    infinite or NaN, although the exact product is an ordinary number.

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
    """The identity; the backward pass replaces infinities."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return _saturated(dx)


# Infinities become the largest numbers, which bfloat16 has, too.
def _saturated(x: Tensor) -> Tensor:
    most = 0.99 * torch.finfo(x.dtype).max
    return x.clamp(-most, most)


def _extreme(total: Tensor) -> bool:
    """Return True if a gradient divided by one of these numbers may be infinite.

    In float16, with its small range, it always may. Other dtypes are checked on a CPU
    only, since the check would wait for a GPU.
    """
    if needs_plain_formula() or type(total) is not Tensor:  # also in a graph
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

    The normalisation of Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) in place of
    the sum of Eq. 29.

        >>> l2_normalize(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])

    - `x`: features, `[..., width]`.
    - Returns the same shape. The zero vector gives 0, with gradient 0.
    """
    return _normalized(x, 2)


def _normalized(x: Tensor, order: int) -> Tensor:
    """Divide `x` by its sums (order 1) or norms (2), without overflow or underflow."""
    if needs_plain_formula():
        x = unit_range(x)
        return divide(x, _total(x, order))
    if x.requires_grad and torch.is_grad_enabled():
        return _Normalized.apply(x, order)[0]
    return _divided(x, order)[0]


def _total(x: Tensor, order: int) -> Tensor:
    """Return the sum (order 1) or the norm (2) of each vector, `[..., 1]`."""
    if order == 1:
        return x.sum(-1, keepdim=True)
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


class _Normalized(torch.autograd.Function):
    r"""Compute $y = x / n$ with $n = \sum_j x_j$ or $n = |x|$; with $n = 0$, $y = 0$.

    One pass over the features where autograd takes four: $dx = (dy - y \cdot dy) / n$
    for the sum, $dx = (dy - y\,(y \cdot dy)) / n$ for the norm. $n$ is an output, too,
    so there are second derivatives.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: int) -> tuple[Tensor, Tensor]:
        y, total = _divided(x, order)
        ctx.save_for_backward(y, total)
        ctx.order = order
        ctx.set_materialize_grads(False)
        return y, total

    # A missing gradient is 0. The gradient of $|x|$ is $y$.
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
    """Return each vector over its total, and the total.

    A power of two changes no digit, so only vectors whose total is out of bounds need
    `unit_range`. A GPU would have to wait for this check; there all vectors get it.
    """
    if x.device.type != "cpu":
        return _by_power(x, order)
    limits = torch.finfo(x.dtype)
    if order == 1:  # a sum only has to be finite: it does not lose small terms
        total, least, most = x.sum(-1, keepdim=True), 0, limits.max
    else:  # squares must neither overflow nor vanish
        total = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        least, most = limits.tiny**0.4, limits.max**0.4
    if total.numel():
        lowest, highest = total.aminmax()
        if least < lowest.item() and highest.item() <= most:
            return x / total, total  # the usual case
    y, size = x / _or_inf(total, 0.0), total.abs()
    extreme = ~((size >= least) & (size <= most))[..., 0]  # or NaN
    if extreme.any():
        y[extreme], total[extreme] = _by_power(x[extreme], order)
    return y, total


def _by_power(x: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """Divide vectors by their totals, computed in `unit_range`; return both."""
    power = _power(x)
    x = x / power
    total = _total(x, order)
    return x / _or_inf(total, 0.0), total * power


class FeatureMap(nn.Module):
    """The base class of all feature maps: a map knows its width."""

    #: Whether `scaled` returns a scale.
    scales = False

    def forward(self, x: Tensor) -> Tensor:
        """Compute features, in float32 or higher precision if directions are random.

        - `x`: `[..., d]`.
        - Returns `[..., width(d)]`, in the dtype of `x`.
        """
        raise NotImplementedError

    def width(self, d: int) -> int:
        """Return the number of features of a key.

        - `d`: width of the key, at least 1.
        - Returns the width of the output of `forward`.
        """
        like = next(chain(self.parameters(), self.buffers()), torch.empty(0))
        return self(like.new_empty(0, d)).shape[-1]

    def scaled(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        r"""Return features that stay in range, and the logarithm of their scale.

        $\phi(x)$ = features $\cdot\, e^{\text{scale}}$. If the scale cancels later, the
        features alone are enough. Autograd treats the scale as a constant.

        - `x`: `[..., d]`.
        - Returns `[..., width]` and `[...]`, or None instead of the latter if $\phi$
          needs no scale to stay in range.
        """
        return self(x), None


class Identity(FeatureMap):
    r"""$\phi(x) = x$: the fast weights of 1991, and of Gated DeltaNet.

    >>> Identity()(torch.tensor([-1.0, 2.0]))
    tensor([-1.,  2.])
    """

    def forward(self, x: Tensor) -> Tensor:
        return x


class ReLU(FeatureMap):
    r"""$\phi(x) = \max(x, 0)$.

    >>> ReLU()(torch.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x)


class ELU1(FeatureMap):
    r"""$\phi(x) = \mathrm{ELU}(x) + 1$, always positive.

    Katharopoulos et al. 2020; Eq. 30 of Schlag et al. 2021, who call it "linear". It
    equals $x + 1$ for $x > 0$ and $e^x$ otherwise.

        >>> ELU1()(torch.tensor([0.0, 2.0]))
        tensor([1., 3.])
    """

    def forward(self, x: Tensor) -> Tensor:
        recorded = x.requires_grad and torch.is_grad_enabled()
        return _ELU1.apply(x) if recorded and not needs_plain_formula() else _elu1(x)


# Eq. 30.
def _elu1(x: Tensor) -> Tensor:
    # Not elu(x) + 1: for x << 0, rounding would lose exp(x), and
    # a feature of exactly 0 would have no gradient.
    return x.clamp(max=0).exp() + F.relu(x)


class _ELU1(torch.autograd.Function):
    r"""Compute ELU + 1 in fewer passes; keep only $\phi$, as $\phi' = \min(\phi, 1)$."""

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
    r"""Deterministic parameter-free projection (Eq. 37).

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
    at $2d(d-1)$; a larger `nu` is accepted, but adds width for nothing. A key of width
    1 has no useful shift: all its features are zero.

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
    """Compute Eq. 37: a shift of $r$ is a slice of $r$ and its first entries."""
    n = 2 * x.shape[-1]
    first = [x[..., :nu]] if 2 * nu <= n else [x, -x]
    r = torch.cat([x, -x, *first], -1).relu_()
    parts = [r[..., :n] * r[..., j % n :][..., :n] for j in range(1, nu + 1)]
    return torch.cat(parts, -1)


class _DPFP(torch.autograd.Function):
    """Compute `_dpfp` in half the passes over the features; keep only `x`."""

    # Each shift is written into its place in the result: there is
    # nothing to concatenate.
    @staticmethod
    def forward(ctx: Any, x: Tensor, nu: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.nu = nu
        r, n = _rectified(x, nu), 2 * x.shape[-1]
        phi = x.new_empty(*x.shape[:-1], nu * n)
        for j, part in enumerate(phi.split(n, -1), 1):
            torch.mul(r[..., :n], r[..., j % n :][..., :n], out=part)
        return phi

    # Each product has two factors, and each factor gets the gradient of
    # the product times the other one. $r$ is computed again, so that
    # only `x` has to be kept.
    @staticmethod
    def backward(ctx: Any, d_phi: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative
            phi = _dpfp(x, ctx.nu)
            return torch.autograd.grad(phi, x, d_phi, create_graph=True)[0], None
        r, n = _rectified(x, ctx.nu), 2 * x.shape[-1]
        dr = d_phi.new_zeros(r.shape)
        for j, part in enumerate(d_phi.split(n, -1), 1):
            first, second = slice(n), slice(j % n, j % n + n)
            dr[..., first].addcmul_(part, r[..., second])
            dr[..., second].addcmul_(part, r[..., first])
        # The first entries were used twice.
        more = dr.shape[-1] - n
        dr[..., :more] += dr[..., n:]
        # ReLU lets the gradient pass where r is above 0.
        dr = torch.ops.aten.threshold_backward(dr[..., :n], r[..., :n], 0)
        positive, negative = dr.chunk(2, -1)
        return positive - negative, None


def _rectified(x: Tensor, nu: int) -> Tensor:
    """Compute $r$ of Eq. 37 `[..., 2 * d]` and repeat its first `nu` entries.

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
    r"""The base class of maps with random directions.

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
        """Draw new directions, in place.

        Values that were written with the old directions cannot be read with the new
        ones: start again from an empty state.

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
    r"""Draw rows, each distributed as $\mathcal N(0, I_d)$.

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
    r"""FAVOR+: positive random features of the softmax kernel (Eqs. 31-32).

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
        """Return features as they are; or, `scaled`, features and their scale."""
        with torch.autocast(x.device.type, enabled=False):
            wide = _at_least_float32(x)
            if self.stabilize:
                wide = wide * self.d**-0.25
            omega = self.omega.to(wide.dtype)
            # The gradient of the directions has no formula by hand.
            plain = needs_plain_formula() or (
                omega.requires_grad and torch.is_grad_enabled()
            )
            compute = _favor if plain else _FAVOR.apply
            phi, scale = compute(wide, omega, scaled)
            return phi.to(x.dtype), scale


def _favor(x: Tensor, omega: Tensor, scaled: bool) -> tuple[Tensor, Tensor | None]:
    r"""Compute Eq. 31 with the factor $1/\sqrt{2m}$ as a logarithm.

    The exponents are $\pm\omega x - |x|^2/2$ plus that logarithm.

    With `scaled`, the scale is the largest exponent of a key, so that its largest
    feature is 1. This uses one key alone: nothing of it depends on another step.
    """
    along = x @ omega.mT
    rest = (x * x).sum(-1, keepdim=True) / 2 + math.log(2 * len(omega)) / 2
    exponents = torch.cat([along, -along], -1) - rest
    if not scaled:
        return exponents.exp(), None
    # Constant to autograd: it cancels later, so no gradient is lost.
    top = exponents.detach().amax(-1, keepdim=True)
    return (exponents - top).exp(), top[..., 0]


class _FAVOR(torch.autograd.Function):
    r"""Compute `_favor` in fewer passes over the features.

    A feature below the smallest normal number (2e-308 in float64, 1e-38 in float32)
    becomes 0. It would be subnormal: a processor computes such numbers, and with them,
    many times more slowly, and their digits are not those of its precision. `divide`
    takes a total of this size for 0, too; next to any larger total, such a feature is
    lost in the rounding error, and so is its gradient, which is proportional to it.
    """

    # Exponents are written into their place in the result. The scale is
    # $\max |\omega x|$ less the rest, so the rest cancels.
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
        # Not -inf: its exponential takes three times as long.
        least = torch.finfo(x.dtype).tiny
        torch.threshold_(phi.clamp_(math.log(least) + 0.5).exp_(), 2 * least, 0.0)
        ctx.save_for_backward(x, omega, phi)
        ctx.scaled = scaled
        if not scaled:
            return phi, None
        scale = (top - rest)[..., 0]
        ctx.mark_non_differentiable(scale)
        return phi, scale

    # With the gradients $g_\pm = d\phi_\pm\, \phi_\pm$ of the exponents,
    # $dx = \Omega^\top (g_+ - g_-) - x \sum (g_+ + g_-)$.
    @staticmethod
    def backward(ctx: Any, d_phi: Tensor, _: Any) -> tuple[Tensor, None, None]:
        x, omega, phi = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative
            phi = _favor(x, omega, ctx.scaled)[0]
            return torch.autograd.grad(phi, x, d_phi, create_graph=True)[0], None, None
        # In the order of `phi`, however the gradient came.
        g = phi * d_phi
        total = g.sum(-1, keepdim=True)
        positive, negative = g.chunk(2, -1)
        dx = positive.sub_(negative) @ omega
        return dx.addcmul_(x, total, value=-1), None, None


class RandomFourier(RandomFeatures):
    r"""Random Fourier features of Random Feature Attention.

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
"""The values of `key_norm` in layers."""
