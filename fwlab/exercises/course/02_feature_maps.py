"""Feature maps."""

import torch

from fwlab.exercises.answers import Wrong, ask, compare, normal
from fwlab.exercises.course.fast_weights import linear_attention
from fwlab.exercises.notation import exercise

# --- normaliser ----------------------------------------------------------


def _features(generator, time=5, lead=()):
    phi_q, phi_k = (normal(generator, *lead, time, 4).abs() for _ in "qk")
    return {"phi_q": phi_q, "phi_k": phi_k, "v": normal(generator, *lead, time, 3)}


def _scaled(generator, scale):
    inputs = _features(generator)
    return inputs | {"phi_k": inputs["phi_k"] * scale}


@exercise(_features, difficulty=2, importance=5, minutes=7)
def normaliser(phi_q, phi_k, v):
    """
    **The normaliser** (Eqs. 17-19). From features `phi_q`, `phi_k` `[..., time,
    features]` and values `v` `[..., time, value]`, return causal linear attention
    `[..., time, value]`, with $z$.

    ✓ returns a tensor of the shape of v
        shape(5, 1, 3)
    ✓ at the first step, returns the first value
        agrees(of=lambda y, *_: y[0])
        == v[0]
    ! There is one key, so its weight is 1: z is that key's feature.
    ✗ This leaves out the key of the step itself: j goes up to i, and includes it.
        .tril() -> .tril(-1)
    ✗ This forgets z: nothing divides the sum (Eq. 18 and the lower half of 19).
        / weights.sum(-1, keepdim=True) ->
    ✗ This sees the future: every step reads all keys, later ones included.
        .tril() ->
    ✗ A softmax gives later steps a weight, too, since exp(0) is 1. The features have
      taken the place of exp.
        .tril() -> .tril().softmax(-1)
    ✗ This sums the weights of a key over queries. z . phi(q) is their sum over keys,
      the last dimension.
        weights.sum(-1, keepdim=True) -> weights.sum(-2)[..., None]
    ✗ The sum over values is causal here, but z contains all keys. At step i it contains
      those up to i.
        / weights -> / (phi_q @ phi_k.mT)
    ✗ This divides by the number of keys. Their weights differ: divide by the sum of the
      weights.
        weights.sum(-1, keepdim=True) -> torch.arange(1, v.shape[-2] + 1)[:, None]
    ✗ An epsilon was added to the denominator. Here z . phi(q) is never 0, and needs
      none.
        weights.sum(-1, keepdim=True) -> (weights.sum(-1, keepdim=True) + 1e-6)
    ✓ if all values are equal, returns that value
        agrees(v=lambda v: v[:1].expand_as(v).contiguous())
        == v
    ! Weights that sum to 1 leave equal values as they are.
    ✓ does not look at later steps
        is_causal()
    ✓ follows Eq. 19 at every step, on any leading dimensions
        agrees((6, ()), (4, (2,)), (7, (2, 3)))
        == linear_attention(phi_q, phi_k, v) / linear_attention(phi_q, phi_k, torch.ones_like(v))
    ! The leading dimensions were {lead}.
    ✗ This takes a softmax of the products. The features have taken the place of exp.
        .tril() -> .masked_fill(torch.ones_like(phi_q @ phi_k.mT).triu(1) > 0, -torch.inf)
          .softmax(-1)
    ✓ does not depend on the scale of the features
        agrees(1e-50, 1e-9, 1e9, draw=_scaled)
        == normaliser(phi_q, phi_k / phi_k.mean(), v)
    ! All features of the keys were multiplied by {scale:g}. Is an epsilon added to z .
      phi_q, or a limit set to it?
    ✗ An epsilon was added to the denominator. Here z . phi(q) is never 0, and needs
      none.
        weights.sum(-1, keepdim=True) -> (weights.sum(-1, keepdim=True) + 1e-8)
        weights.sum(-1, keepdim=True) -> (weights.sum(-1, keepdim=True) + 1e-9)
        weights.sum(-1, keepdim=True) -> (weights.sum(-1, keepdim=True) + 1e-12)
        keepdim=True) -> keepdim=True).clamp(min=1e-6)
        keepdim=True) -> keepdim=True).clamp(min=1e-8)
    ✓ lets gradients through to phi_q, phi_k and v
        gradient()
    ? The weight of key j at step i is phi_q[i] . phi_k[j] for j up to i, and 0 for
      later keys.
    ? phi_q @ phi_k.mT has all weights; .tril() keeps those of the past.
    ? z . phi_q is the sum of the weights of a row.
    """
    weights = (phi_q @ phi_k.mT).tril()
    return weights @ v / weights.sum(-1, keepdim=True)  # their sum is z · phi(q)


# --- positive_features ---------------------------------------------------


def _keys(generator, size=(2, 4), m=3):
    x = normal(generator, *size)
    return {"x": x, "R": normal(generator, m, x.shape[-1])}


def _are_positive(answer, reference, generator):
    inputs = _keys(generator, (20, 4))
    phi = ask(answer, reference(**inputs), **inputs)
    if not (phi > 0).all():
        bad = int((~(phi > 0)).sum())
        raise Wrong(f"{bad} of {phi.numel()} features are not above 0.")


def _estimate_exp(answer, reference, generator):
    q, k = 0.7 * normal(generator, 2, 3)
    R = normal(generator, 1000, 3)
    like = q.new_zeros(len(R) * 2)
    estimate = ask(answer, like, x=q, R=R) @ ask(answer, like, x=k, R=R)
    truth = (q @ k).exp()
    if not (estimate / truth - 1).abs() < 0.1:
        raise Wrong(
            f"With 1000 directions, expected about {truth:.3f}, got {estimate:.3f}. "
            "Is h right? It makes up for the lengths of q and k."
        )


def _are_right(answer, reference, generator):
    for size in (((5, 4), 3), ((2, 3, 2), 5)):
        inputs = _keys(generator, *size)
        right = reference(**inputs)
        phi = ask(answer, right, **inputs)
        compare(phi.sort(-1).values, right.sort(-1).values, "They are sorted here.")
        compare(phi @ phi.mT, right @ right.mT, "Are they mixed up?")


def _sorted(phi, x, R):
    return phi.sort(-1).values


@exercise(_keys, difficulty=2, importance=3, minutes=11, matters=_sorted)
def positive_features(x, R):
    r"""
    **Random features of the exponential** (Eqs. 31 and 32). Return the $2m$ features
    $\frac{h(x)}{\sqrt{2m}}\,[e^{Rx}; e^{-Rx}]$ with $h(x) = e^{-|x|^2/2}$, for `x`
    `[..., d]` and directions `R` `[m, d]`, in any order.

    ✓ returns 2 m features, [..., 2 * m]
        shape(((4,), 3), ((2, 5), 1), ((2, 3, 4), 6))
    ✓ has only positive features
        _are_positive
    ✗ These are sine and cosine, which estimate exp(q . k), too, but can be negative.
        (-(x -> ((x ; along.exp(), (-along).exp() -> along.sin(), along.cos()
          ; (2 * len(R)) -> len(R)
    ✓ for x = 0, has features whose squares sum to 1
        agrees(((4,), 1), ((4,), 4), ((4,), 9), x=torch.zeros_like,
               of=lambda phi, *_: phi.square().sum())
        == torch.ones(())
    ! exp(0 . 0) is 1, for m = {m} directions, too.
    ✗ This sums over the features, and has to take their mean: divide by sqrt(2 m).
        / (2 * len(R)) ** 0.5 ->
    ✗ This divides by sqrt(m), but there are 2 m features.
        (2 * len(R)) -> len(R)
    ✗ This divides by 2 m. The features of q and those of k both have the factor, so
      each needs its square root.
        ** 0.5 ->
    ✓ estimates exp(q . k), on average over directions
        _estimate_exp
    ✗ h is missing: the mean of these products is exp(|q + k|² / 2), not exp(q . k).
        h * features -> features
    ✗ The sign in h is wrong: this makes the features of long keys even larger.
        (-(x * x) -> ((x * x)
    ✗ h takes the length of x here, and has to take its square.
        (x * x).sum(-1, keepdim=True) -> x.norm(dim=-1, keepdim=True)
    ✗ h is exp(-|x|²) here; half of the square belongs there.
        keepdim=True) / 2 -> keepdim=True)
    ✓ follows Eqs. 31 and 32, features in any order
        _are_right
    ✗ h takes the length of all keys together here. Each key has its own.
        .sum(-1, keepdim=True) -> .sum()
    ✓ lets gradients through to x and R
        gradient(of=lambda phi, x, R: phi @ phi.mT)
    ? x @ R.mT has the products of x with all directions, [..., m].
    ? |x|² is (x * x).sum(-1, keepdim=True).
    ? torch.cat([a.exp(), (-a).exp()], -1), times h, divided by math.sqrt(2 * m).
    """
    along = x @ R.mT
    h = (-(x * x).sum(-1, keepdim=True) / 2).exp()
    features = torch.cat([along.exp(), (-along).exp()], -1)
    return h * features / (2 * len(R)) ** 0.5


# --- favor -----------------------------------------------------------------


def _attention(generator, lead=(), length=1.0):
    q, k = length * normal(generator, 2, *lead, 5, 4) / 2
    return {"q": q, "k": k, "R": normal(generator, 6, 4)}


def _unequal(generator, lead):
    inputs = _attention(generator, lead)
    inputs["k"][..., 1, :, :] *= 80
    inputs["q"][..., 1, :, :] /= 40
    return inputs


def _weights(features, *inputs):
    """Return the weights of attention that the features of queries and keys give."""
    phi_q, phi_k = features
    weights = phi_q @ phi_k.mT
    return weights / weights.sum(-1, keepdim=True)


@exercise(
    _attention,
    difficulty=4,
    importance=2,
    minutes=17,
    returns=("phi_q", "phi_k"),
    matters=_weights,
)
def favor(q, k, R):
    """
    **Keep them in range.** Return features `phi_q` and `phi_k` `[..., time, 2 * m]` of
    `q` and `k` `[..., time, d]` with directions `R` `[m, d]`, which give the same
    weights of attention as those of exercise 2, but neither overflow nor vanish. A
    factor that a query or all keys of a sequence share does not matter.

    ✓ returns phi_q and phi_k, [..., time, 2 * m] each
        shape((), {"lead": (2,)}, {"lead": (2, 3)})
    ✓ changes no weight of attention
        agrees((), {"lead": (2,)}, of=_weights)
        == _weights((positive_features(q, R), positive_features(k, R)))
    ! These are the weights of each query, divided by their sum, next to those of plain
      features.
    ✗ Every key has its own maximum here, which changes its weight against the other
      keys. Only a factor that all keys share cancels.
        (-2, -1) -> -1
    ✗ Every feature has its own maximum over the keys here. That weights the features
      again.
        (-2, -1) -> -2
    ✗ An epsilon is added to the features. It changes every weight, and the maxima make
      it needless.
        [phi + 1e-6 for phi in favor(q, k, R)]
        [phi + 1e-4 for phi in favor(q, k, R)]
    ✗ The exponents lack -|x|² / 2. For the keys it cannot be left out.
        - (x * x).sum(-1, keepdim=True) / 2 ->
    ✓ neither overflows nor vanishes for long keys and queries
        agrees({"length": 20.0}, {"length": 60.0}, of=_weights)
    ! Keys and queries were about {length:.0f} long. Is a maximum subtracted from the
      exponents, before exp?
    ✗ All queries share one maximum: shorter or longer ones vanish. Subtract one for
      each query.
        of_q.amax(-1 -> of_q.amax((-2, -1)
    ✗ No maximum is subtracted before exp: exp(-|x|² / 2) vanishes for long keys, and a
      division after it brings nothing back.
        positive_features(q, R), positive_features(k, R)
        exponents(q), exponents(k) -> positive_features(q, R), positive_features(k, R)
          ; (of_q - top_q.detach()).exp() -> of_q / top_q
          ; (of_k - top_k.detach()).exp() -> of_k / top_k
    ✓ has a maximum of its own for each sequence of a batch
        agrees({"lead": (2,)}, {"lead": (2, 2)}, draw=_unequal, of=_weights)
    ! The leading dimensions were {lead}; at place 1 of the last of them, the keys were
      80 times as long.
    ✗ One maximum for the whole batch: sequences with shorter keys vanish.
        (-2, -1) -> ()
    ✓ lets gradients through to q and k
        gradient(of=_weights)
    ? Work with exponents: R x - |x|² / 2 and -R x - |x|² / 2. Subtract a maximum before
      exp.
    ? The features of a query may have any factor: it cancels when the weights are
      divided by their sum. Subtract the maximum of each query.
    ? The keys of a sequence must share one factor: subtract the maximum over dimensions
      -2 and -1.
    """

    def exponents(x):
        along = x @ R.mT
        return torch.cat([along, -along], -1) - (x * x).sum(-1, keepdim=True) / 2

    of_q, of_k = exponents(q), exponents(k)
    top_q = of_q.amax(-1, keepdim=True)  # one for each query
    top_k = of_k.amax((-2, -1), keepdim=True)  # one for all keys
    return (of_q - top_q.detach()).exp(), (of_k - top_k.detach()).exp()
