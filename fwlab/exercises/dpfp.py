"""DPFP: the features, useful shifts, how many pairs fit, and a map that does better."""

from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fwlab.exercises.asking import Answer, Wrong, ask, compare, normal
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import agrees, exactly, gradient, shape
from fwlab.exercises.solutions import dot_capacity, my_features, useful_nu
from fwlab.feature_maps import _dpfp, l2_normalize

# --- dpfp --------------------------------------------------------------


def _key(
    generator: Generator, d: int = 4, nu: int = 2, lead: tuple[int, ...] = (3,)
) -> dict[str, object]:
    return {"x": normal(generator, *lead, d), "nu": nu}


def _sorted(phi: Tensor, x: Tensor, nu: int) -> Tensor:
    return phi.sort(-1).values


def _is_positive(answer: Answer, reference: Answer, generator: Generator) -> None:
    x = normal(generator, 6, 4)
    phi = ask(answer, x.new_zeros(6, 16), x=x, nu=2)
    if (phi < 0).any():
        raise Wrong(
            f"{int((phi < 0).sum())} of {phi.numel()} features are negative. r is a "
            "ReLU."
        )


def _r(x: Tensor) -> Tensor:
    return F.relu(torch.cat([x, -x], -1))


def _rolled(r: Tensor, shifts: Iterable[int]) -> Tensor:
    return torch.cat([r * r.roll(-j, -1) for j in shifts], -1)


def _without_relu(x: Tensor, nu: int) -> Tensor:
    return _rolled(torch.cat([x, -x], -1), range(1, nu + 1))


def _entry_by_entry(x: Tensor, nu: int) -> Tensor:
    return _rolled(_r(x), range(1, nu + 1)).unflatten(-1, (nu, -1)).mT.flatten(-2)


def _rolled_over_keys(x: Tensor, nu: int) -> Tensor:
    r = _r(x)
    return torch.cat([r * r.roll(-j) for j in range(1, nu + 1)], -1)


DPFP = Exercise(
    name="dpfp",
    notebook="03_dpfp",
    difficulty=3,
    importance=4,
    minutes=7,
    task="**The features** (Eq. 37). For keys `x` `[..., d]`, return the "
    "`[..., 2 * d * nu]` products $r_i\\, r_{i+j}$ with "
    "$r = \\mathrm{ReLU}([x; -x])$: those of all $i$ for $j = 1$, then "
    "for $j = 2$, and so on up to $\\nu$. The index wraps around.",
    reference=_dpfp,
    properties=(
        shape(
            "returns 2 d nu features, [..., 2 * d * nu]",
            _key,
            [(4, 1, ()), (5, 2, (3,)), (3, 2, (2, 3))],
            catches={
                "This is Eq. 37 for the shift nu alone. The features of all shifts "
                "from 1 to nu stand side by side.": lambda x, nu: _rolled(_r(x), [nu]),
                "This adds up the shifts. Their features stand "
                "side by side.": lambda x, nu: sum(
                    _rolled(_r(x), [j]) for j in range(1, nu + 1)
                ),
            },
        ),
        Property(
            "has no negative features",
            _is_positive,
            {"The ReLU is missing: negative products remain.": _without_relu},
        ),
        agrees(
            "in the plane, has one feature above 0: that of the quadrant",
            lambda g, *x: {"x": torch.tensor(x).double(), "nu": 1},
            [(2.0, 3.0), (-2.0, 3.0), (-2.0, -3.0), (2.0, -3.0)],
            of=_sorted,
            expected=lambda x, nu: torch.tensor([0.0, 0.0, 0.0, 6.0]).double(),
            because="The key was {x}; the features are sorted here.",
            catches={
                "This takes x twice, in place of x and -x: keys with negative entries "
                "have no features.": lambda x, nu: _rolled(
                    F.relu(torch.cat([x, x], -1)), range(1, nu + 1)
                ),
                "This takes the ReLU after the product, so two negative entries give a "
                "positive feature as well.": lambda x, nu: F.relu(_without_relu(x, nu)),
                "The shifts start at 0 here: that multiplies every entry by itself. "
                "They are 1 to nu.": lambda x, nu: _rolled(_r(x), range(nu)),
            },
        ),
        agrees(
            "multiplies entries at distances 1 to nu",
            _key,
            [(3, 1), (4, 2), (5, 4), (3, 6)],
            of=_sorted,
            because="d = {d}, nu = {nu}; the features of each key are sorted here.",
            catches={
                "roll without a dimension rolls from one key into the next: use "
                "roll(-j, -1).": _rolled_over_keys
            },
        ),
        agrees(
            "has them in the order of Eq. 37, one shift after the other",
            _key,
            [(4, 1), (3, 2), (5, 4)],
            because="d = {d}, nu = {nu}: the right products, in another order.",
            catches={
                "This rolls the other way: roll(j) brings entry i - j to place i. "
                "These are the same products in another order; Eq. 37 takes entry i + "
                "j.": lambda x, nu: _rolled(_r(x), range(-1, -nu - 1, -1)),
                "This has all shifts of the first entry, then all of the second. Put "
                "whole shifts side by side, as torch.cat does.": _entry_by_entry,
            },
        ),
        gradient("lets gradients through to x", _key),
    ),
    hints=(
        "Build r first: x and -x side by side, then a ReLU. It is 2 d wide.",
        "torch.roll shifts a vector around. Which way has entry i + 1 at "
        "place i: r.roll(1, -1) or r.roll(-1, -1)?",
        "Do that for every shift from 1 to nu, and put the results side by "
        "side with torch.cat.",
    ),
    example=_key,
)


# --- useful_nu -----------------------------------------------------------


def _width(generator: Generator) -> dict[str, object]:
    return {"d": int(torch.randint(5, 20, (), generator=generator))}


USEFUL_NU = Exercise(
    name="useful_nu",
    notebook="03_dpfp",
    difficulty=3,
    importance=2,
    minutes=5,
    task="**Useful shifts.** Return the largest $\\nu$ for which the last "
    "shift still adds something new, as a function of the width `d` of "
    "the keys.",
    reference=useful_nu,
    properties=(
        shape("returns an integer", exactly("d"), [4]),
        agrees(
            "in the plane, finds one useful shift",
            exactly("d"),
            [2],
            expected=lambda d: 1,
            because="Shift 2 multiplies x by -x, and shift 3 is shift 1 "
            "with its factors swapped.",
            catches={
                "This is the range that the paper gives. Shift d is always 0, and the "
                "shifts above it repeat those below.": lambda d: 2 * d - 1,
                "Shift 2 d is no shift at all: it multiplies every "
                "entry by itself.": lambda d: 2 * d,
                "Shift d multiplies r(k_i) by r(-k_i), one of which is 0.": lambda d: d,
            },
        ),
        agrees(
            "finds the largest shift that adds rank, for any width",
            exactly("d"),
            [1, 3, 4, 8, 33],
            because="Count shifts whose products are neither always 0 nor seen before.",
        ),
    ),
    hints=(
        "Write down r for d = 2: x, y, -x, -y. Multiply neighbours at "
        "distance 1, 2, 3.",
        "At distance d stand k_i and -k_i. Is there a key for which both are above 0?",
    ),
    example=_width,
)


# --- dot_capacity --------------------------------------------------------


def _sizes(generator: Generator) -> dict[str, object]:
    d, nu = torch.randint(2, 12, (2,), generator=generator).tolist()
    return {"d": d, "nu": nu}


DOT_CAPACITY = Exercise(
    name="dot_capacity",
    notebook="03_dpfp",
    difficulty=2,
    importance=2,
    minutes=5,
    task="**Room for pairs.** How many keys can have orthogonal features? "
    "Return the rank that the features of keys of width `d` can have, "
    "for any `nu`.",
    reference=dot_capacity,
    properties=(
        shape("returns an integer", exactly("d", "nu"), [(4, 1)]),
        agrees(
            "counts one dimension for each feature, while all shifts are useful",
            exactly("d", "nu"),
            [(2, 1), (8, 3), (64, 2)],
            because="2 d products for each of nu shifts.",
            catches={
                "This counts k, but not -k: r has 2 d entries.": lambda d, nu: (
                    d * min(nu, d - 1)
                ),
                "This is the width of the keys. The features of "
                "the keys decide.": lambda d, nu: d,
            },
        ),
        agrees(
            "stops growing where shifts are no longer useful",
            exactly("d", "nu"),
            [(8, 7), (8, 8), (8, 15), (3, 5), (1, 1)],
            because="Features that are 0 or stand there twice make no room.",
            catches={
                "This is the number of features. Above nu = d - 1 they only repeat, or "
                "are always 0, so there is room for fewer pairs.": lambda d, nu: (
                    2 * d * nu
                )
            },
        ),
    ),
    hints=(
        "There are 2 d products for each shift.",
        "But only some shifts are useful: see useful_nu.",
    ),
    example=_sizes,
)


# --- my_features ---------------------------------------------------------

MOST = 48
DRAWS = 200


def _features(answer: Answer, x: Tensor) -> Tensor:
    """Whatever their number, up to `MOST`."""
    width = MOST
    with suppress(Exception):  # ask will say what is wrong
        width = min(answer(x.clone()).shape[-1], MOST)
    phi: Tensor = ask(answer, x.new_zeros(*x.shape[:-1], width), x=x)
    return phi


def _has_room(answer: Answer, reference: Answer, generator: Generator) -> None:
    for lead in ((8,), (2, 8)):
        _features(answer, l2_normalize(normal(generator, *lead, 8)))


def _is_not_negative(answer: Answer, reference: Answer, generator: Generator) -> None:
    phi = _features(answer, l2_normalize(normal(generator, 200, 8)))
    if (phi < 0).any():
        raise Wrong(
            f"{int((phi < 0).any(-1).sum())} of 200 keys had features below 0. Then "
            "weights can be below 0, and their sum can be 0."
        )


def _looks_at_one_key(answer: Answer, reference: Answer, generator: Generator) -> None:
    x = l2_normalize(normal(generator, 8, 8))
    alone = torch.cat([_features(answer, key[None]) for key in x])
    compare(
        _features(answer, x), alone, "Each key was given alone, and then all together."
    )


def _mean_error(phi: Answer, x: Tensor, v: Tensor) -> float:
    """The error of reading pairs with these features, relative to the values."""
    features = phi(x)
    weights = features @ features.mT
    read = weights @ v / weights.sum(-1, keepdim=True)
    return float(((read - v).square().sum() / v.square().sum()).nan_to_num(torch.inf))


def _beats_dpfp(answer: Answer, reference: Answer, generator: Generator) -> None:
    x, v = normal(generator, 2, DRAWS, 8, 8)
    x = l2_normalize(x)
    yours = _mean_error(lambda x: _features(answer, x), x, v)
    theirs = _mean_error(lambda x: _dpfp(x, 3), x, v)
    if yours >= theirs:
        raise Wrong(
            f"In {DRAWS} memories of eight pairs, your mean error was {yours:.3f}, and "
            f"that of DPFP with three shifts {theirs:.3f}."
        )


MY_FEATURES = Exercise(
    name="my_features",
    notebook="03_dpfp",
    difficulty=4,
    importance=3,
    minutes=20,
    task="**Beat the table.** From keys `x` `[..., 8]` of length 1, return at most 48 "
    "features `[..., features]`, none below 0, with which linear attention holds eight "
    "random pairs better than with the 48 features of DPFP, $\\nu = 3$.",
    reference=my_features,
    properties=(
        Property(
            "returns at most 48 features for each key",
            _has_room,
            {
                "These are more than 48 features.": lambda x: _dpfp(x, 7),
            },
        ),
        Property(
            "has no negative features",
            _is_not_negative,
            {
                "These are the keys themselves. Half of their entries are below "
                "0.": lambda x: x.clone(),
            },
        ),
        Property(
            "gives a key the same features, whatever other keys there are",
            _looks_at_one_key,
            {
                "This compares the keys with each other. A memory gets one key after "
                "the other.": lambda x: x.softmax(-2),
            },
        ),
        Property(
            "holds eight pairs better than DPFP with three shifts",
            _beats_dpfp,
            {
                "This is DPFP with three shifts, the row to beat.": lambda x: _dpfp(
                    x, 3
                ),
                "ELU + 1 has nearly the same features for all keys.": lambda x: (
                    F.elu(x) + 1
                ),
                "This is r = ReLU([x; -x]) without products. Two keys share half of the "
                "entries above 0.": _r,
            },
        ),
    ),
    hints=(
        "The weight of a pair is phi(k) · phi(q). It should be large where k = q, and "
        "fall quickly as k turns away. Which features fall faster than those of DPFP?",
        "A power of a feature that is not negative exaggerates the large ones. Or take "
        "48 directions, and let a softmax decide which of them a key is close to.",
        "Take the 48 features of DPFP to the power of 2 or 3.",
    ),
)


EXERCISES = {each.name: each for each in (DPFP, USEFUL_NU, DOT_CAPACITY, MY_FEATURES)}
