"""Three exercises: the normaliser, random features of exp, and their range."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import Answer, Wrong, ask, compare, normal
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import agrees, gradient, is_causal, shape
from fwlab.exercises.solutions import favor, normaliser, positive_features

# --- normaliser ----------------------------------------------------------


def _features(
    generator: Generator, time: int = 5, lead: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    phi_q, phi_k = (normal(generator, *lead, time, 4).abs() for _ in "qk")
    return {"phi_q": phi_q, "phi_k": phi_k, "v": normal(generator, *lead, time, 3)}


def _scaled(generator: Generator, scale: float) -> dict[str, Tensor]:
    inputs = _features(generator)
    return inputs | {"phi_k": inputs["phi_k"] * scale}


def _products(phi_q: Tensor, phi_k: Tensor) -> Tensor:
    return (phi_q @ phi_k.mT).tril()


def _by_the_number_of_keys(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
    count = torch.arange(1.0, v.shape[-2] + 1, dtype=v.dtype)
    return _products(phi_q, phi_k) @ v / count[:, None]


def _softmax(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
    weights = _products(phi_q, phi_k)
    future = torch.ones_like(weights).triu(1).bool()
    return weights.masked_fill(future, -torch.inf).softmax(-1) @ v


NORMALISER = Exercise(
    name="normaliser",
    notebook="02_feature_maps",
    difficulty=2,
    importance=5,
    minutes=7,
    task="**The normaliser** (Eqs. 17-19). From features `phi_q`, `phi_k` "
    "`[..., time, features]` and values `v` `[..., time, value]`, return "
    "causal linear attention `[..., time, value]`, with $z$.",
    reference=normaliser,
    properties=(
        shape("returns a tensor of the shape of v", _features, [5, 1, 3]),
        agrees(
            "at the first step, returns the first value",
            _features,
            of=lambda y, *_: y[0],
            expected=lambda phi_q, phi_k, v: v[0],
            because="There is one key, so its weight is 1: z is that key's feature.",
            catches={
                "This leaves out the key of the step itself: j goes up to i, and "
                "includes it.": lambda phi_q, phi_k, v: (
                    (weights := (phi_q @ phi_k.mT).tril(-1))
                    @ v
                    / weights.sum(-1, keepdim=True)
                ),
                "This forgets z: nothing divides the sum (Eq. 18 and the lower half of "
                "19).": lambda phi_q, phi_k, v: _products(phi_q, phi_k) @ v,
                "This sees the future: every step reads all keys, "
                "later ones included.": lambda phi_q, phi_k, v: (
                    phi_q @ phi_k.mT @ v / (phi_q @ phi_k.mT).sum(-1, keepdim=True)
                ),
                "The sum over values is causal here, but z contains all keys. At step "
                "i it contains those up to i.": lambda phi_q, phi_k, v: (
                    _products(phi_q, phi_k)
                    @ v
                    / (phi_q @ phi_k.mT).sum(-1, keepdim=True)
                ),
                "This divides by the number of keys. Their weights differ: divide by "
                "the sum of the weights.": _by_the_number_of_keys,
                "An epsilon was added to the denominator. Here z . phi(q) is never 0, "
                "and needs none.": lambda phi_q, phi_k, v: (
                    _products(phi_q, phi_k)
                    @ v
                    / (_products(phi_q, phi_k).sum(-1, keepdim=True) + 1e-6)
                ),
            },
        ),
        agrees(
            "if all values are equal, returns that value",
            _features,
            change={"v": lambda v: v[:1].expand_as(v).contiguous()},
            expected=lambda phi_q, phi_k, v: v,
            because="Weights that sum to 1 leave equal values as they are.",
        ),
        is_causal(_features),
        agrees(
            "follows Eq. 19 at every step, on any leading dimensions",
            _features,
            [(6, ()), (4, (2,)), (7, (2, 3))],
            because="The leading dimensions were {lead}.",
            catches={
                "This takes a softmax of the products. The features have taken the "
                "place of exp.": _softmax
            },
        ),
        agrees(
            "does not depend on the scale of the features",
            _scaled,
            [1e-50, 1e-9, 1e9],
            expected=lambda phi_q, phi_k, v: normaliser(phi_q, phi_k / phi_k.mean(), v),
            because="All features of the keys were multiplied by {scale:g}. Is an "
            "epsilon added to z . phi_q, or a limit set to it?",
        ),
        gradient("lets gradients through to phi_q, phi_k and v", _features),
    ),
    hints=(
        "The weight of key j at step i is phi_q[i] . phi_k[j] for j up to i, "
        "and 0 for later keys.",
        "phi_q @ phi_k.mT has all weights; .tril() keeps those of the past.",
        "z . phi_q is the sum of the weights of a row.",
    ),
    example=_features,
)


# --- positive_features ---------------------------------------------------


def _keys(
    generator: Generator, size: tuple[int, ...] = (2, 4), m: int = 3
) -> dict[str, Tensor]:
    x = normal(generator, *size)
    return {"x": x, "R": normal(generator, m, x.shape[-1])}


def _are_positive(answer: Answer, reference: Answer, generator: Generator) -> None:
    inputs = _keys(generator, (20, 4))
    phi = ask(answer, reference(**inputs), **inputs)
    if not (phi > 0).all():
        bad = int((~(phi > 0)).sum())
        raise Wrong(f"{bad} of {phi.numel()} features are not above 0.")


def _estimate_exp(answer: Answer, reference: Answer, generator: Generator) -> None:
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


def _are_right(answer: Answer, reference: Answer, generator: Generator) -> None:
    for size in (((5, 4), 3), ((2, 3, 2), 5)):
        inputs = _keys(generator, *size)
        right = reference(**inputs)
        phi = ask(answer, right, **inputs)
        compare(phi.sort(-1).values, right.sort(-1).values, "They are sorted here.")
        compare(phi @ phi.mT, right @ right.mT, "Are they mixed up?")


def _along(x: Tensor, R: Tensor, log_h: Tensor | int, power: float = 0.5) -> Tensor:
    along = x @ R.mT
    return torch.cat([along, -along], -1).add(log_h).exp() / (2 * len(R)) ** power


def _square(x: Tensor) -> Tensor:
    return (x * x).sum(-1, keepdim=True)


def _sine_and_cosine(x: Tensor, R: Tensor) -> Tensor:
    along, h = x @ R.mT, (_square(x) / 2).exp()
    return h * torch.cat([along.sin(), along.cos()], -1) / math.sqrt(len(R))


POSITIVE_FEATURES = Exercise(
    name="positive_features",
    notebook="02_feature_maps",
    difficulty=2,
    importance=3,
    minutes=11,
    task="**Random features of the exponential** (Eqs. 31 and 32). Return the "
    "$2m$ features $\\frac{h(x)}{\\sqrt{2m}}\\,[e^{Rx}; e^{-Rx}]$ with "
    "$h(x) = e^{-|x|^2/2}$, for `x` `[..., d]` and directions `R` `[m, d]`, "
    "in any order.",
    reference=positive_features,
    matters=lambda phi, x, R: phi.sort(-1).values,
    properties=(
        shape(
            "returns 2 m features, [..., 2 * m]",
            _keys,
            [((4,), 3), ((2, 5), 1), ((2, 3, 4), 6)],
        ),
        Property(
            "has only positive features",
            _are_positive,
            {
                "These are sine and cosine, which estimate exp(q . k), too, but can be "
                "negative.": _sine_and_cosine
            },
        ),
        agrees(
            "for x = 0, has features whose squares sum to 1",
            _keys,
            [((4,), 1), ((4,), 4), ((4,), 9)],
            change={"x": torch.zeros_like},
            of=lambda phi, x, R: phi.square().sum(),
            expected=lambda x, R: torch.ones(()),
            because="exp(0 . 0) is 1, for m = {m} directions, too.",
            catches={
                "This sums over the features, and has to take their mean: divide by "
                "sqrt(2 m).": lambda x, R: _along(x, R, -_square(x) / 2, 0),
                "This divides by 2 m. The features of q and those of k both have the "
                "factor, so each needs its square root.": lambda x, R: _along(
                    x, R, -_square(x) / 2, 1
                ),
            },
        ),
        Property(
            "estimates exp(q . k), on average over directions",
            _estimate_exp,
            {
                "h is missing: the mean of these products is exp(|q + k|² / 2), not "
                "exp(q . k).": lambda x, R: _along(x, R, 0),
                "h takes the length of x here, and has to "
                "take its square.": lambda x, R: _along(x, R, -(_square(x) ** 0.5) / 2),
                "h is exp(-|x|²) here; half of the "
                "square belongs there.": lambda x, R: _along(x, R, -_square(x)),
            },
        ),
        Property(
            "follows Eqs. 31 and 32, features in any order",
            _are_right,
        ),
        gradient(
            "lets gradients through to x and R",
            _keys,
            of=lambda phi, x, R: phi @ phi.mT,
        ),
    ),
    hints=(
        "x @ R.mT has the products of x with all directions, [..., m].",
        "|x|² is (x * x).sum(-1, keepdim=True).",
        "torch.cat([a.exp(), (-a).exp()], -1), times h, divided by math.sqrt(2 * m).",
    ),
    example=_keys,
)


# --- favor -----------------------------------------------------------------


def _attention(
    generator: Generator, lead: tuple[int, ...] = (), length: float = 1.0
) -> dict[str, Tensor]:
    q, k = length * normal(generator, 2, *lead, 5, 4) / 2
    return {"q": q, "k": k, "R": normal(generator, 6, 4)}


def _unequal(generator: Generator, lead: tuple[int, ...]) -> dict[str, Tensor]:
    inputs = _attention(generator, lead)
    inputs["k"][..., 1, :, :] *= 80
    inputs["q"][..., 1, :, :] /= 40
    return inputs


BOTH = ("phi_q", "phi_k")


def _weights(features: Sequence[Tensor], *inputs: Tensor) -> Tensor:
    """The weights of attention that the features of queries and keys give."""
    phi_q, phi_k = features
    weights = phi_q @ phi_k.mT
    return weights / weights.sum(-1, keepdim=True)


def _above(
    q: Tensor,
    k: Tensor,
    R: Tensor,
    over_q: Any = -1,
    over_k: Any = (-2, -1),
    half: float = 0.5,
) -> tuple[Tensor, Tensor]:
    """Features above maxima over these dimensions, and of these parts of |x|²."""
    exponent_q, exponent_k = (
        torch.cat([x @ R.mT, -x @ R.mT], -1) - half * _square(x) for x in (q, k)
    )
    top_q, top_k = exponent_q.amax(over_q, True), exponent_k.amax(over_k, True)
    return (exponent_q - top_q).exp(), (exponent_k - top_k).exp()


def _plain(q: Tensor, k: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    return positive_features(q, R), positive_features(k, R)


def _with_epsilon(
    q: Tensor, k: Tensor, R: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    phi_q, phi_k = favor(q, k, R)
    return phi_q + epsilon, phi_k + epsilon


def _after_exp(q: Tensor, k: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    phi_q, phi_k = _plain(q, k, R)
    return phi_q / phi_q.amax(-1, True), phi_k / phi_k.amax((-2, -1), True)


FAVOR = Exercise(
    name="favor",
    notebook="02_feature_maps",
    difficulty=4,
    importance=2,
    minutes=17,
    task="**Keep them in range.** Return features `phi_q` and `phi_k` "
    "`[..., time, 2 * m]` of `q` and `k` `[..., time, d]` with directions "
    "`R` `[m, d]`, which give the same weights of attention as those of "
    "exercise 2, but neither overflow nor vanish. A factor that a query or "
    "all keys of a sequence share does not matter.",
    reference=favor,
    matters=_weights,
    properties=(
        shape(
            "returns phi_q and phi_k, [..., time, 2 * m] each",
            _attention,
            [(), {"lead": (2,)}, {"lead": (2, 3)}],
            names=BOTH,
        ),
        agrees(
            "changes no weight of attention",
            _attention,
            [(), {"lead": (2,)}],
            names=BOTH,
            of=_weights,
            expected=lambda q, k, R: _weights(_plain(q, k, R)),
            because="These are the weights of each query, divided by their sum, next "
            "to those of plain features.",
            catches={
                "Every key has its own maximum here, which changes its weight against "
                "the other keys. Only a factor that all keys share cancels.": partial(
                    _above, over_k=-1
                ),
                "Every feature has its own maximum over the keys here. That weights "
                "the features again.": partial(_above, over_k=-2),
                "An epsilon is added to the features. It changes every weight, and "
                "the maxima make it needless.": (
                    partial(_with_epsilon, epsilon=1e-6),
                    partial(_with_epsilon, epsilon=1e-4),
                ),
                "The exponents lack -|x|² / 2. For the keys it cannot "
                "be left out.": partial(_above, half=0.0),
            },
        ),
        agrees(
            "neither overflows nor vanishes for long keys and queries",
            _attention,
            [{"length": 20.0}, {"length": 60.0}],
            names=BOTH,
            of=_weights,
            because="Keys and queries were about {length:.0f} long. Is a maximum "
            "subtracted from the exponents, before exp?",
            catches={
                "All queries share one maximum: shorter or longer ones vanish. "
                "Subtract one for each query.": partial(_above, over_q=(-2, -1)),
                "No maximum is subtracted before exp: exp(-|x|² / 2) vanishes for long "
                "keys, and a division after it brings nothing back.": (
                    _plain,
                    _after_exp,
                ),
            },
        ),
        agrees(
            "has a maximum of its own for each sequence of a batch",
            _unequal,
            [{"lead": (2,)}, {"lead": (2, 2)}],
            names=BOTH,
            of=_weights,
            because="The leading dimensions were {lead}; at place 1 of the last of "
            "them, the keys were 80 times as long.",
            catches={
                "One maximum for the whole batch: sequences with "
                "shorter keys vanish.": partial(_above, over_k=())
            },
        ),
        gradient("lets gradients through to q and k", _attention, of=_weights),
    ),
    hints=(
        "Work with exponents: R x - |x|² / 2 and -R x - |x|² / 2. Subtract a "
        "maximum before exp.",
        "The features of a query may have any factor: it cancels when the "
        "weights are divided by their sum. Subtract the maximum of each query.",
        "The keys of a sequence must share one factor: subtract the maximum "
        "over dimensions -2 and -1.",
    ),
    example=_attention,
)


EXERCISES = {each.name: each for each in (NORMALISER, POSITIVE_FEATURES, FAVOR)}
