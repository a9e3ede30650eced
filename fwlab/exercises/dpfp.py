"""Three exercises: the features, which shifts are useful, and how many pairs fit."""

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

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
from fwlab.feature_maps import _dpfp

# --- dpfp --------------------------------------------------------------


def _dpfp_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns 2 d nu features, [..., 2 * d * nu]"""
    for shape, nu in (((4,), 1), ((3, 5), 2), ((2, 3, 3), 2)):
        x = normal(generator, *shape)
        ask(answer, x.new_zeros(*shape[:-1], 2 * shape[-1] * nu), x=x, nu=nu)


def _dpfp_is_positive(answer: Answer, reference: Answer, generator: Generator) -> None:
    """has no negative features"""
    x = normal(generator, 6, 4)
    phi = ask(answer, x.new_zeros(6, 16), x=x, nu=2)
    if (phi < 0).any():
        raise Wrong(
            f"{int((phi < 0).sum())} of {phi.numel()} features are negative. r is a ReLU."
        )


def _dpfp_of_the_plane(answer: Answer, reference: Answer, generator: Generator) -> None:
    """in the plane, has one feature above 0: that of the quadrant"""
    for x in ((2.0, 3.0), (-2.0, 3.0), (-2.0, -3.0), (2.0, -3.0)):
        key = torch.tensor(x, dtype=torch.float64)
        phi = ask(answer, key.new_zeros(4), x=key, nu=1)
        compare(
            phi.sort().values,
            torch.tensor([0.0, 0.0, 0.0, 6.0]).double(),
            f"The key was {list(x)}; the features are sorted here.",
        )


def _dpfp_has_products(answer: Answer, reference: Answer, generator: Generator) -> None:
    """multiplies entries at distances 1 to nu"""
    for d, nu in ((3, 1), (4, 2), (5, 4), (3, 6)):
        x = normal(generator, 7, d)
        expected = reference(x, nu)
        found = ask(answer, expected, x=x, nu=nu)
        compare(
            found.sort(-1).values,
            expected.sort(-1).values,
            f"d = {d}, nu = {nu}; the features of each key are sorted here.",
        )


def _dpfp_is_in_order(answer: Answer, reference: Answer, generator: Generator) -> None:
    """has them in the order of Eq. 37, one shift after the other"""
    for d, nu in ((4, 1), (3, 2), (5, 4)):
        x = normal(generator, 7, d)
        expected = reference(x, nu)
        because = f"d = {d}, nu = {nu}: the right products, in another order."
        compare(ask(answer, expected, x=x, nu=nu), expected, because)


def _dpfp_has_gradient(answer: Answer, reference: Answer, generator: Generator) -> None:
    """lets gradients through to x"""

    x = normal(generator, 3, 4)
    compare_gradients(answer, reference, generator, CUT, x=x, nu=2)


def _key(generator: Generator) -> dict[str, object]:
    return {"x": normal(generator, 3, 4), "nu": 2}


def _r(x: Tensor) -> Tensor:
    return F.relu(torch.cat([x, -x], -1))


def _without_relu(x: Tensor, nu: int) -> Tensor:
    """The ReLU is missing: negative products remain."""
    r = torch.cat([x, -x], -1)
    return torch.cat([r * r.roll(-j, -1) for j in range(1, nu + 1)], -1)


def _without_minus(x: Tensor, nu: int) -> Tensor:
    """This takes x twice, in place of x and -x: keys with negative entries have
    no features.
    """
    r = F.relu(torch.cat([x, x], -1))
    return torch.cat([r * r.roll(-j, -1) for j in range(1, nu + 1)], -1)


def _relu_of_products(x: Tensor, nu: int) -> Tensor:
    """This takes the ReLU after the product, so two negative entries give a
    positive feature as well.
    """
    return F.relu(_without_relu(x, nu))


def _from_shift_zero(x: Tensor, nu: int) -> Tensor:
    """The shifts start at 0 here: that multiplies every entry by itself. They
    are 1 to nu.
    """
    r = _r(x)
    return torch.cat([r * r.roll(-j, -1) for j in range(nu)], -1)


def _only_one_shift(x: Tensor, nu: int) -> Tensor:
    """This is Eq. 37 for the shift nu alone. The features of all shifts from 1
    to nu stand side by side.
    """
    r = _r(x)
    return r * r.roll(-nu, -1)


def _rolled_the_other_way(x: Tensor, nu: int) -> Tensor:
    """This rolls the other way: roll(j) brings entry i - j to place i. These are
    the same products in another order; Eq. 37 takes entry i + j.
    """
    r = _r(x)
    return torch.cat([r * r.roll(j, -1) for j in range(1, nu + 1)], -1)


def _entry_by_entry(x: Tensor, nu: int) -> Tensor:
    """This has all shifts of the first entry, then all of the second. Put whole
    shifts side by side, as torch.cat does.
    """
    r = _r(x)
    return torch.stack([r * r.roll(-j, -1) for j in range(1, nu + 1)], -1).flatten(-2)


def _rolled_over_keys(x: Tensor, nu: int) -> Tensor:
    """roll without a dimension rolls from one key into the next: use
    roll(-j, -1).
    """
    r = _r(x)
    return torch.cat([r * r.roll(-j) for j in range(1, nu + 1)], -1)


def _summed(x: Tensor, nu: int) -> Tensor:
    """This adds up the shifts. Their features stand side by side."""
    return sum((_r(x) * _r(x).roll(-j, -1) for j in range(2, nu + 1)), _dpfp(x, 1))


# --- useful_nu -----------------------------------------------------------


def useful_nu(d: int) -> int:
    """Shift d multiplies r(k_i) by r(-k_i), which is 0; shift 2 d - j repeats
    shift j.
    """
    return d - 1


def _useful_is_an_integer(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """returns an integer"""
    ask(answer, int, d=4)


def _useful_in_the_plane(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """in the plane, finds one useful shift"""
    if (found := ask(answer, int, d=2)) != 1:
        raise Wrong(
            f"d = 2: got {found}. Shift 2 multiplies x by -x, and shift 3 is shift 1 "
            "with its factors swapped."
        )


def _useful_is_right(answer: Answer, reference: Answer, generator: Generator) -> None:
    """finds the largest shift that adds rank, for any width"""
    for d in (1, 3, 4, 8, 33):
        if (found := ask(answer, int, d=d)) != reference(d):
            raise Wrong(
                f"d = {d}: expected {reference(d)}, got {found}. Count shifts whose "
                "products are neither always 0 nor seen before."
            )


def _width(generator: Generator) -> dict[str, object]:
    return {"d": int(torch.randint(5, 20, (), generator=generator))}


def _as_in_the_paper(d: int) -> int:
    """This is the range that the paper gives. Shift d is always 0, and the
    shifts above it repeat those below.
    """
    return 2 * d - 1


def _all_of_them(d: int) -> int:
    """Shift 2 d is no shift at all: it multiplies every entry by itself."""
    return 2 * d


def _one_too_many(d: int) -> int:
    """Shift d multiplies r(k_i) by r(-k_i), one of which is 0."""
    return d


# --- dot_capacity --------------------------------------------------------


def dot_capacity(d: int, nu: int) -> int:
    """2 d features for each useful shift."""
    return 2 * d * min(nu, d - 1)


def _capacity_is_an_integer(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """returns an integer"""
    ask(answer, int, d=4, nu=1)


def _capacity_counts_features(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """counts one dimension for each feature, while all shifts are useful"""
    for d, nu in ((2, 1), (8, 3), (64, 2)):
        _same_number(answer, reference, d, nu, "2 d products for each of nu shifts.")


def _capacity_stops_growing(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """stops growing where shifts are no longer useful"""
    for d, nu in ((8, 7), (8, 8), (8, 15), (3, 5), (1, 1)):
        because = "Features that are 0 or stand there twice make no room."
        _same_number(answer, reference, d, nu, because)


def _same_number(
    answer: Answer, reference: Answer, d: int, nu: int, because: str
) -> None:
    found, expected = ask(answer, int, d=d, nu=nu), reference(d, nu)
    if found != expected:
        raise Wrong(f"d = {d}, nu = {nu}: expected {expected}, got {found}. {because}")


def _sizes(generator: Generator) -> dict[str, object]:
    d, nu = torch.randint(2, 12, (2,), generator=generator).tolist()
    return {"d": d, "nu": nu}


def _all_features(d: int, nu: int) -> int:
    """This is the number of features. Above nu = d - 1 they only repeat, or are
    always 0, so there is room for fewer pairs.
    """
    return 2 * d * nu


def _half_the_features(d: int, nu: int) -> int:
    """This counts k, but not -k: r has 2 d entries."""
    return d * min(nu, d - 1)


def _width_of_keys(d: int, nu: int) -> int:
    """This is the width of the keys. The features of the keys decide."""
    return d


EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise
    for exercise in (
        Exercise(
            "dpfp",
            (
                "**The features** (Eq. 37). For keys `x` `[..., d]`, return the "
                "`[..., 2 * d * nu]` products $r_i\\, r_{i+j}$ with "
                "$r = \\mathrm{ReLU}([x; -x])$: those of all $i$ for $j = 1$, then "
                "for $j = 2$, and so on up to $\\nu$. The index wraps around."
            ),
            (_dpfp,),
            (
                _dpfp_has_shape,
                _dpfp_is_positive,
                _dpfp_of_the_plane,
                _dpfp_has_products,
                _dpfp_is_in_order,
                _dpfp_has_gradient,
            ),
            (
                "Build r first: x and -x side by side, then a ReLU. It is 2 d wide.",
                "torch.roll shifts a vector around. Which way has entry i + 1 at "
                "place i: r.roll(1, -1) or r.roll(-1, -1)?",
                "Do that for every shift from 1 to nu, and put the results side by "
                "side with torch.cat.",
            ),
            _key,
            {
                _without_relu: _dpfp_is_positive,
                _without_minus: _dpfp_of_the_plane,
                _relu_of_products: _dpfp_of_the_plane,
                _from_shift_zero: _dpfp_of_the_plane,
                _only_one_shift: _dpfp_has_shape,
                _rolled_the_other_way: _dpfp_is_in_order,
                _entry_by_entry: _dpfp_is_in_order,
                _rolled_over_keys: _dpfp_has_products,
                _summed: _dpfp_has_shape,
            },
        ),
        Exercise(
            "useful_nu",
            (
                "**Useful shifts.** Return the largest $\\nu$ for which the last "
                "shift still adds something new, as a function of the width `d` of "
                "the keys."
            ),
            (useful_nu,),
            (_useful_is_an_integer, _useful_in_the_plane, _useful_is_right),
            (
                "Write down r for d = 2: x, y, -x, -y. Multiply neighbours at "
                "distance 1, 2, 3.",
                "At distance d stand k_i and -k_i. Is there a key for which both "
                "are above 0?",
            ),
            _width,
            {
                _as_in_the_paper: _useful_in_the_plane,
                _all_of_them: _useful_in_the_plane,
                _one_too_many: _useful_in_the_plane,
            },
        ),
        Exercise(
            "dot_capacity",
            (
                "**Room for pairs.** How many keys can have orthogonal features? "
                "Return the rank that the features of keys of width `d` can have, "
                "for any `nu`."
            ),
            (dot_capacity,),
            (
                _capacity_is_an_integer,
                _capacity_counts_features,
                _capacity_stops_growing,
            ),
            (
                "There are 2 d products for each shift.",
                "But only some shifts are useful: see useful_nu.",
            ),
            _sizes,
            {
                _all_features: _capacity_stops_growing,
                _half_the_features: _capacity_counts_features,
                _width_of_keys: _capacity_counts_features,
            },
        ),
    )
}
