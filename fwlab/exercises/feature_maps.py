"""Three exercises: the normaliser, random features of exp, and keeping them in range."""

import math

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import (
    CUT,
    Answer,
    Wrong,
    ask,
    compare,
    compare_gradients,
    normal,
)
from fwlab.exercises.exercise import Exercise

# --- normaliser ----------------------------------------------------------


def normaliser(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
    """Eqs. 17 to 19, all steps at once."""
    weights = (phi_q @ phi_k.mT).tril()
    return weights @ v / weights.sum(-1, keepdim=True)


def _features(
    generator: Generator, lead: tuple[int, ...] = (), time: int = 5
) -> dict[str, Tensor]:
    return {
        "phi_q": normal(generator, *lead, time, 4).abs(),
        "phi_k": normal(generator, *lead, time, 4).abs(),
        "v": normal(generator, *lead, time, 3),
    }


def _normaliser_has_shape(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """returns a tensor of the shape of v"""
    for lead, time in (((), 5), ((), 1), ((), 3)):
        given = _features(generator, lead, time)
        ask(answer, given["v"], **given)


def _normaliser_of_one(answer: Answer, reference: Answer, generator: Generator) -> None:
    """at the first step, returns the first value"""
    given = _features(generator)
    compare(
        ask(answer, given["v"], **given)[0],
        given["v"][0],
        "There is one key, so its weight is 1: z is that key's feature. Does step i "
        "read its own key, too?",
    )


def _normaliser_takes_means(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """if all values are equal, returns that value"""
    given = _features(generator)
    given["v"] = given["v"][:1].expand_as(given["v"]).contiguous()
    compare(
        ask(answer, given["v"], **given),
        given["v"],
        "Weights that sum to 1 leave equal values as they are.",
    )


def _normaliser_is_causal(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """does not look at later steps"""
    given = _features(generator)
    later = {name: x.clone() for name, x in given.items()}
    for x in later.values():
        x[3:] = x[3:] * 2 + 1
    compare(
        ask(answer, given["v"], **later)[:3],
        ask(answer, given["v"], **given)[:3],
        "Only steps 3 and 4 were changed, and steps 0 to 2 changed with them.",
    )


def _normaliser_is_right(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """follows Eq. 19 at every step, on any leading dimensions"""
    for lead, time in (((), 6), ((2,), 4), ((2, 3), 7)):
        given = _features(generator, lead, time)
        expected = reference(**given)
        because = f"The leading dimensions were {list(lead)}."
        compare(ask(answer, expected, **given), expected, because)


def _normaliser_ignores_scale(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """does not depend on the scale of the features"""
    given = _features(generator)
    expected = reference(**given)
    for scale in (1e-50, 1e-9, 1e9):
        scaled = {**given, "phi_k": given["phi_k"] * scale}
        compare(
            ask(answer, expected, **scaled),
            expected,
            f"All features of the keys were multiplied by {scale:g}. Is an epsilon "
            "added to z . phi_q, or a limit set to it?",
        )


def _normaliser_has_gradient(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """lets gradients through to phi_q, phi_k and v"""
    compare_gradients(answer, reference, generator, CUT, **_features(generator))


def _without_z(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
    """This forgets z: nothing divides the sum (Eq. 18 and the lower half of 19)."""
    return (phi_q @ phi_k.mT).tril() @ v


def _sees_the_future(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
    """This sees the future: every step reads all keys, later ones included."""
    weights = phi_q @ phi_k.mT
    return weights @ v / weights.sum(-1, keepdim=True)


def _all_of_z(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
    """The sum over values is causal here, but z contains all keys. At step i it
    contains those up to i.
    """
    weights = phi_q @ phi_k.mT
    return weights.tril() @ v / weights.sum(-1, keepdim=True)


def _by_the_number_of_keys(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
    """This divides by the number of keys. Their weights differ: divide by the
    sum of the weights.
    """
    weights = (phi_q @ phi_k.mT).tril()
    count = torch.arange(1.0, len(weights[0]) + 1, dtype=v.dtype)
    return weights @ v / count[:, None]


def _with_epsilon(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
    """An epsilon was added to the denominator. Here z . phi(q) is never 0, and
    needs none.
    """
    weights = (phi_q @ phi_k.mT).tril()
    return weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)


def _softmax(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
    """This takes a softmax of the products. The features have taken the place
    of exp.
    """
    weights = (phi_q @ phi_k.mT).tril()
    future = torch.ones_like(weights).triu(1).bool()
    return weights.masked_fill(future, -torch.inf).softmax(-1) @ v


# --- positive_features ---------------------------------------------------


def positive_features(x: Tensor, R: Tensor) -> Tensor:
    """Eqs. 31 and 32, with the mean over 2 m features."""
    along = x @ R.mT
    h = (-(x * x).sum(-1, keepdim=True) / 2).exp()
    features = torch.cat([along.exp(), (-along).exp()], -1)
    return h * features / math.sqrt(2 * len(R))


def _keys(generator: Generator, *shape: int, m: int = 3) -> dict[str, Tensor]:
    x = normal(generator, *(shape or (2, 4)))
    return {"x": x, "R": normal(generator, m, x.shape[-1])}


def _positive_have_shape(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """returns 2 m features, [..., 2 * m]"""
    for shape, m in (((4,), 3), ((2, 5), 1), ((2, 3, 4), 6)):
        given = _keys(generator, *shape, m=m)
        ask(answer, given["x"].new_zeros(*shape[:-1], 2 * m), **given)


def _positive_are_positive(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """has only positive features"""
    given = _keys(generator, 20, 4)
    phi = ask(answer, given["x"].new_zeros(20, 6), **given)
    if not (phi > 0).all():
        bad = int((~(phi > 0)).sum())
        raise Wrong(f"{bad} of {phi.numel()} features are not above 0.")


def _positive_of_zero(answer: Answer, reference: Answer, generator: Generator) -> None:
    """for x = 0, has features whose squares sum to 1"""
    for m in (1, 4, 9):
        given = _keys(generator, 4, m=m)
        given["x"] = torch.zeros(4, dtype=torch.float64)
        square = ask(answer, given["x"].new_zeros(2 * m), **given).square().sum()
        one = torch.ones((), dtype=torch.float64)
        compare(square, one, f"exp(0 . 0) is 1, for m = {m} directions, too.")


def _positive_estimate(answer: Answer, reference: Answer, generator: Generator) -> None:
    """estimates exp(q . k), on average over directions"""
    q, k = 0.7 * normal(generator, 2, 3)
    R = normal(generator, 20_000, 3)
    like = q.new_zeros(len(R) * 2)
    found = ask(answer, like, x=q, R=R) @ ask(answer, like, x=k, R=R)
    truth = (q @ k).exp()
    if not (found / truth - 1).abs() < 0.1:
        raise Wrong(
            f"With 20,000 directions, expected about {truth:.3f}, got {found:.3f}. "
            "Is h right? It makes up for the lengths of q and k."
        )


def _positive_are_right(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """follows Eqs. 31 and 32, features in any order"""
    for shape, m in (((5, 4), 3), ((2, 3, 2), 5)):
        given = _keys(generator, *shape, m=m)
        expected = reference(**given)
        found = ask(answer, expected, **given)
        compare(
            found.sort(-1).values, expected.sort(-1).values, "They are sorted here."
        )
        compare(found @ found.mT, expected @ expected.mT, "Are they mixed up?")


def _positive_have_gradient(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """lets gradients through to x and R"""

    def kernel(phi: Tensor) -> Tensor:
        return phi @ phi.mT

    given = _keys(generator)
    compare_gradients(answer, reference, generator, CUT, kernel, **given)


def _along(x: Tensor, R: Tensor, h: Tensor, scale: float) -> Tensor:
    along = x @ R.mT
    return h * torch.cat([along.exp(), (-along).exp()], -1) * scale


def _square(x: Tensor) -> Tensor:
    return (x * x).sum(-1, keepdim=True)


def _without_h(x: Tensor, R: Tensor) -> Tensor:
    """h is missing: the mean of these products is exp(|q + k|² / 2), not
    exp(q . k).
    """
    return _along(x, R, torch.ones_like(x[..., :1]), (2 * len(R)) ** -0.5)


def _whole_square(x: Tensor, R: Tensor) -> Tensor:
    """h is exp(-|x|²) here; half of the square belongs there."""
    return _along(x, R, (-_square(x)).exp(), (2 * len(R)) ** -0.5)


def _by_the_length(x: Tensor, R: Tensor) -> Tensor:
    """h takes the length of x here, and has to take its square."""
    return _along(x, R, (-x.norm(dim=-1, keepdim=True) / 2).exp(), (2 * len(R)) ** -0.5)


def _a_sum(x: Tensor, R: Tensor) -> Tensor:
    """This sums over the features, and has to take their mean: divide by
    sqrt(2 m).
    """
    return _along(x, R, (-_square(x) / 2).exp(), 1.0)


def _by_m(x: Tensor, R: Tensor) -> Tensor:
    """This divides by 2 m. The features of q and those of k both have the factor,
    so each needs its square root.
    """
    return _along(x, R, (-_square(x) / 2).exp(), 1 / (2 * len(R)))


def _sine_and_cosine(x: Tensor, R: Tensor) -> Tensor:
    """These are sine and cosine, which estimate exp(q . k), too, but can be
    negative.
    """
    along, h = x @ R.mT, (_square(x) / 2).exp()
    return h * torch.cat([along.sin(), along.cos()], -1) / math.sqrt(len(R))


# --- favor -----------------------------------------------------------------


def favor(q: Tensor, k: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """A maximum for each query, and one for all keys."""
    exponent_q, exponent_k = (
        torch.cat([x @ R.mT, -x @ R.mT], -1) - (x * x).sum(-1, keepdim=True) / 2
        for x in (q, k)
    )
    top_q = exponent_q.amax(-1, keepdim=True).detach()
    top_k = exponent_k.amax((-2, -1), keepdim=True).detach()
    return (exponent_q - top_q).exp(), (exponent_k - top_k).exp()


def _attention(
    generator: Generator, lead: tuple[int, ...] = (), length: float = 1.0
) -> dict[str, Tensor]:
    q, k = length * normal(generator, 2, *lead, 5, 4) / 2
    return {"q": q, "k": k, "R": normal(generator, 6, 4)}


def _ask_favor(answer: Answer, **given: Tensor) -> Tensor:
    """The weights of attention that the features give."""
    m = 2 * len(given["R"])
    like = {f"phi_{n}": given[n].new_zeros(*given[n].shape[:-1], m) for n in "qk"}
    return _weights(*ask(answer, like, **given))


def _weights(phi_q: Tensor, phi_k: Tensor) -> Tensor:
    weights = phi_q @ phi_k.mT
    return weights / weights.sum(-1, keepdim=True)


def _favor_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns phi_q and phi_k, [..., time, 2 * m] each"""
    for lead in ((), (2,), (2, 3)):
        _ask_favor(answer, **_attention(generator, lead))


def _favor_keeps_weights(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """changes no weight of attention"""
    for lead in ((), (2,)):
        given = _attention(generator, lead)
        phi = (positive_features(given[n], given["R"]) for n in "qk")
        compare(
            _ask_favor(answer, **given),
            _weights(*phi),
            "These are the weights of each query, divided by their sum, next to those "
            "of plain features.",
        )


def _favor_does_not_vanish(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """neither overflows nor vanishes for long keys and queries"""
    for length in (20.0, 60.0):
        given = _attention(generator, length=length)
        compare(
            _ask_favor(answer, **given),
            _weights(*reference(**given)),
            f"Keys and queries were about {length:.0f} long. Is a maximum subtracted "
            "from the exponents, before exp?",
        )


def _favor_keeps_sequences_apart(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """has a maximum of its own for each sequence of a batch"""
    for lead in ((2,), (2, 2)):
        given = _attention(generator, lead)
        given["k"][..., 1, :, :] *= 80
        given["q"][..., 1, :, :] /= 40
        compare(
            _ask_favor(answer, **given),
            _weights(*reference(**given)),
            f"The leading dimensions were {list(lead)}; at place 1 of the last of "
            "them, the keys were 80 times as long.",
        )


def _favor_has_gradient(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """lets gradients through to q and k"""

    def weights(features: tuple[Tensor, Tensor]) -> Tensor:
        return _weights(*features)

    given = _attention(generator)
    compare_gradients(answer, reference, generator, CUT, weights, **given)


def _exponents(q: Tensor, k: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    along_q, along_k = q @ R.mT, k @ R.mT
    return (
        torch.cat([along_q, -along_q], -1) - _square(q) / 2,
        torch.cat([along_k, -along_k], -1) - _square(k) / 2,
    )


def _plain(q: Tensor, k: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """No maximum is subtracted: exp(-|x|² / 2) vanishes for long keys."""
    exponent_q, exponent_k = _exponents(q, k, R)
    return exponent_q.exp(), exponent_k.exp()


def _per_key(q: Tensor, k: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """Every key has its own maximum here, which changes its weight against the
    other keys. Only a factor that all keys share cancels.
    """
    exponent_q, exponent_k = _exponents(q, k, R)
    return (
        (exponent_q - exponent_q.amax(-1, True)).exp(),
        (exponent_k - exponent_k.amax(-1, True)).exp(),
    )


def _per_feature(q: Tensor, k: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """Every feature has its own maximum over the keys here. That weights the
    features again.
    """
    exponent_q, exponent_k = _exponents(q, k, R)
    return (
        (exponent_q - exponent_q.amax(-1, True)).exp(),
        (exponent_k - exponent_k.amax(-2, True)).exp(),
    )


def _for_the_batch(q: Tensor, k: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """One maximum for the whole batch: sequences with shorter keys vanish."""
    exponent_q, exponent_k = _exponents(q, k, R)
    return (
        (exponent_q - exponent_q.amax(-1, True)).exp(),
        (exponent_k - exponent_k.max()).exp(),
    )


def _one_for_all_queries(q: Tensor, k: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """All queries share one maximum: shorter or longer ones vanish. Subtract one
    for each query.
    """
    exponent_q, exponent_k = _exponents(q, k, R)
    return (
        (exponent_q - exponent_q.amax((-2, -1), True)).exp(),
        (exponent_k - exponent_k.amax((-2, -1), True)).exp(),
    )


def _without_square(q: Tensor, k: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """The exponents lack -|x|² / 2. For the keys it cannot be left out."""
    exponent_q, exponent_k = (torch.cat([x @ R.mT, -x @ R.mT], -1) for x in (q, k))
    return (
        (exponent_q - exponent_q.amax(-1, True)).exp(),
        (exponent_k - exponent_k.amax((-2, -1), True)).exp(),
    )


def _after_exp(q: Tensor, k: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """This divides by the largest feature after exp: what has vanished does not
    come back.
    """
    phi_q, phi_k = _plain(q, k, R)
    return phi_q / phi_q.amax(-1, True), phi_k / phi_k.amax((-2, -1), True)


EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise
    for exercise in (
        Exercise(
            "normaliser",
            (
                "**The normaliser** (Eqs. 17-19). From features `phi_q`, `phi_k` "
                "`[..., time, features]` and values `v` `[..., time, value]`, return "
                "causal linear attention `[..., time, value]`, with $z$."
            ),
            (normaliser,),
            (
                _normaliser_has_shape,
                _normaliser_of_one,
                _normaliser_takes_means,
                _normaliser_is_causal,
                _normaliser_is_right,
                _normaliser_ignores_scale,
                _normaliser_has_gradient,
            ),
            (
                "The weight of key j at step i is phi_q[i] . phi_k[j] for j up to i, "
                "and 0 for later keys.",
                "phi_q @ phi_k.mT has all weights; .tril() keeps those of the past.",
                "z . phi_q is the sum of the weights of a row.",
            ),
            _features,
            {
                _without_z: _normaliser_of_one,
                _sees_the_future: _normaliser_of_one,
                _all_of_z: _normaliser_of_one,
                _by_the_number_of_keys: _normaliser_of_one,
                _with_epsilon: _normaliser_of_one,
                _softmax: _normaliser_is_right,
            },
        ),
        Exercise(
            "positive_features",
            (
                "**Random features of the exponential** (Eqs. 31 and 32). Return the "
                "$2m$ features $\\frac{h(x)}{\\sqrt{2m}}\\,[e^{Rx}; e^{-Rx}]$ with "
                "$h(x) = e^{-|x|^2/2}$, for `x` `[..., d]` and directions `R` `[m, d]`, "
                "in any order."
            ),
            (positive_features,),
            (
                _positive_have_shape,
                _positive_are_positive,
                _positive_of_zero,
                _positive_estimate,
                _positive_are_right,
                _positive_have_gradient,
            ),
            (
                "x @ R.mT has the products of x with all directions, [..., m].",
                "|x|² is (x * x).sum(-1, keepdim=True).",
                "torch.cat([a.exp(), (-a).exp()], -1), times h, divided by "
                "math.sqrt(2 * m).",
            ),
            _keys,
            {
                _without_h: _positive_estimate,
                _whole_square: _positive_estimate,
                _by_the_length: _positive_are_right,
                _a_sum: _positive_of_zero,
                _by_m: _positive_of_zero,
                _sine_and_cosine: _positive_are_positive,
            },
        ),
        Exercise(
            "favor",
            (
                "**Keep them in range.** Return features `phi_q` and `phi_k` "
                "`[..., time, 2 * m]` of `q` and `k` `[..., time, d]` with directions "
                "`R` `[m, d]`, which give the same weights of attention as those of "
                "exercise 2, but neither overflow nor vanish. A factor that a query or "
                "all keys of a sequence share does not matter."
            ),
            (favor,),
            (
                _favor_has_shape,
                _favor_keeps_weights,
                _favor_does_not_vanish,
                _favor_keeps_sequences_apart,
                _favor_has_gradient,
            ),
            (
                "Work with exponents: R x - |x|² / 2 and -R x - |x|² / 2. Subtract a "
                "maximum before exp.",
                "The features of a query may have any factor: it cancels when the "
                "weights are divided by their sum. Subtract the maximum of each query.",
                "The keys of a sequence must share one factor: subtract the maximum "
                "over dimensions -2 and -1.",
            ),
            _attention,
            {
                _plain: _favor_does_not_vanish,
                _per_key: _favor_keeps_weights,
                _per_feature: _favor_keeps_weights,
                _for_the_batch: _favor_keeps_sequences_apart,
                _one_for_all_queries: _favor_does_not_vanish,
                _without_square: _favor_keeps_weights,
                _after_exp: _favor_does_not_vanish,
            },
        ),
    )
}
