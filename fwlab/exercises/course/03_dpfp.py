"""DPFP."""

from contextlib import suppress

import torch
from torch.nn import functional as F

from fwlab.exercises.answers import Wrong, ask, compare, normal
from fwlab.exercises.notation import exercise
from fwlab.exercises.properties import exactly
from fwlab.feature_maps import DPFP, l2_normalize

# --- dpfp --------------------------------------------------------------


def _key(generator, d=4, nu=2, lead=(3,)):
    return {"x": normal(generator, *lead, d), "nu": nu}


def _sorted(phi, x, nu):
    return phi.sort(-1).values


def _is_positive(answer, reference, generator):
    x = normal(generator, 6, 4)
    phi = ask(answer, x.new_zeros(6, 16), x=x, nu=2)
    if (phi < 0).any():
        raise Wrong(
            f"{int((phi < 0).sum())} of {phi.numel()} features are negative. r is a "
            "ReLU."
        )


@exercise(_key, difficulty=3, importance=4, minutes=7)
def dpfp(x, nu):
    r"""
    **The features** (Eq. 37). For keys `x` `[..., d]`, return the `[..., 2 * d * nu]`
    products $r_i\, r_{i+j}$ with $r = \mathrm{ReLU}([x; -x])$: those of all $i$ for $j
    = 1$, then for $j = 2$, and so on up to $\nu$. The index wraps around.

    ✓ returns 2 d nu features, [..., 2 * d * nu]
        shape((4, 1, ()), (5, 2, (3,)), (3, 2, (2, 3)))
    ✗ This is Eq. 37 for the shift nu alone. The features of all shifts from 1 to nu
      stand side by side.
        range(1, nu + 1) -> [nu]
    ✗ range(1, nu) stops before nu: the last shift is missing.
        range(1, nu + 1) -> range(1, nu)
    ✗ This adds up the shifts. Their features stand side by side.
        return torch.cat([ -> return sum([ ; range(1, nu + 1)], -1) -> range(1, nu + 1)])
    ✓ has no negative features
        _is_positive
    ✗ The ReLU is missing: negative products remain.
        .relu() ->
    ✗ -x.relu() is -(x.relu()), the negative of a ReLU. r has (-x).relu() there.
        torch.cat([x, -x], -1).relu() -> torch.cat([x.relu(), -x.relu()], -1)
    ✓ in the plane, has one feature above 0: that of the quadrant
        agrees(
            (2.0, 3.0),
            (-2.0, 3.0),
            (-2.0, -3.0),
            (2.0, -3.0),
            draw=lambda g, *x: {"x": torch.tensor(x).double(), "nu": 1},
            of=_sorted,
        )
        == torch.tensor([0.0, 0.0, 0.0, 6.0]).double()
    ! The key was {x}; the features are sorted here.
    ✗ This takes x twice, in place of x and -x: keys with negative entries have no
      features.
        -x -> x
    ✗ This takes the ReLU after the product, so two negative entries give a positive
      feature as well.
        .relu() -> ; range(1, nu + 1)], -1) -> range(1, nu + 1)], -1).relu()
    ✗ The shifts start at 0 here: that multiplies every entry by itself. They are 1 to
      nu.
        range(1, nu + 1) -> range(nu)
    ✓ multiplies entries at distances 1 to nu
        agrees((3, 1), (4, 2), (5, 4), (3, 6), of=_sorted)
    ! d = {d}, nu = {nu}; the features of each key are sorted here.
    ✗ roll without a dimension rolls from one key into the next: use roll(-j, -1).
        roll(-j, -1) -> roll(-j)
    ✓ has them in the order of Eq. 37, one shift after the other
        agrees((4, 1), (3, 2), (5, 4))
        == DPFP(nu)(x)
    ! d = {d}, nu = {nu}: the right products, in another order.
    ✗ This rolls the other way: roll(j) brings entry i - j to place i. These are the
      same products in another order; Eq. 37 takes entry i + j.
        roll(-j, -1) -> roll(j, -1)
    ✗ This has all shifts of the first entry, then all of the second. Put whole shifts
      side by side, as torch.cat does.
        return torch.cat -> return torch.stack
          ; range(1, nu + 1)], -1) -> range(1, nu + 1)], -1).flatten(-2)
    ✓ lets gradients through to x
        gradient()
    ? Build r first: x and -x side by side, then a ReLU. It is 2 d wide.
    ? torch.roll shifts a vector around. Which way has entry i + 1 at place i: r.roll(1,
      -1) or r.roll(-1, -1)?
    ? Do that for every shift from 1 to nu, and put the results side by side with
      torch.cat.
    """
    r = torch.cat([x, -x], -1).relu()
    # Roll by -j, so that entry i + j comes to place i.
    return torch.cat([r * r.roll(-j, -1) for j in range(1, nu + 1)], -1)


# --- useful_nu -----------------------------------------------------------


def _width(generator):
    return {"d": int(torch.randint(5, 20, (), generator=generator))}


def _rank(d, nu):
    """Return the rank of the features of many keys."""
    keys = normal(torch.Generator().manual_seed(0), 4 * d * nu, d)
    return int(torch.linalg.matrix_rank(DPFP(nu)(keys)))


@exercise(_width, difficulty=3, importance=2, minutes=5)
def useful_nu(d):
    r"""
    **Useful shifts.** Return the largest $\nu$ for which the last shift still adds
    something new, as a function of the width `d` of the keys.

    ✓ returns an integer
        shape(4, draw=exactly("d"))
    ✓ in the plane, finds one useful shift
        agrees(2, draw=exactly("d"))
        == 1
    ! Shift 2 multiplies x by -x, and shift 3 is shift 1 with its factors swapped.
    ✗ This is the range that the paper gives. Shift d is always 0, and the shifts above
      it repeat those below.
        d - 1 -> 2 * d - 1
    ✗ Shift 2 d is no shift at all: it multiplies every entry by itself.
        d - 1 -> 2 * d
    ✗ Shift d multiplies r(k_i) by r(-k_i), one of which is 0.
        d - 1 -> d
    ✓ finds the largest shift that adds rank, for any width
        agrees(1, 3, 4, 8, 9, draw=exactly("d"))
        == max([0, *(nu for nu in range(1, 2 * d) if _rank(d, nu) == 2 * d * nu)])
    ! Count shifts whose products are neither always 0 nor seen before.
    ? Write down r for d = 2: x, y, -x, -y. Multiply neighbours at distance 1, 2, 3.
    ? At distance d stand k_i and -k_i. Is there a key for which both are above 0?
    """
    # Shift d multiplies r(k_i) by r(-k_i), which is 0, and shift 2d - j
    # repeats shift j.
    return d - 1


# --- dot_capacity --------------------------------------------------------


def _sizes(generator):
    d, nu = torch.randint(2, 12, (2,), generator=generator).tolist()
    return {"d": d, "nu": nu}


@exercise(_sizes, difficulty=2, importance=2, minutes=5)
def dot_capacity(d, nu):
    """
    **Room for pairs.** How many keys can have orthogonal features? Return the rank that
    the features of keys of width `d` can have, for any `nu`.

    ✓ returns an integer
        shape((4, 1), draw=exactly("d", "nu"))
    ✓ counts one dimension for each feature, while all shifts are useful
        agrees((2, 1), (8, 3), (64, 2), draw=exactly("d", "nu"))
        == _rank(d, nu)
    ! 2 d products for each of nu shifts.
    ✗ This counts k, but not -k: r has 2 d entries.
        2 * d -> d
    ✗ This is the width of the keys. The features of the keys decide.
        d
    ✓ stops growing where shifts are no longer useful
        agrees((8, 7), (8, 8), (8, 15), (3, 5), (1, 1), draw=exactly("d", "nu"))
        == _rank(d, nu)
    ! Features that are 0 or stand there twice make no room.
    ✗ Shift d is counted here. It multiplies r(k_i) by r(-k_i), one of which is 0.
        useful_nu(d) -> d
    ✗ This is the number of features. Above nu = d - 1 they only repeat, or are always
      0, so there is room for fewer pairs.
        min(nu, useful_nu(d)) -> nu
    ? There are 2 d products for each shift.
    ? But only some shifts are useful: see useful_nu.
    """
    return 2 * d * min(nu, useful_nu(d))


# --- my_features ---------------------------------------------------------

MOST = 48
DRAWS = 200


def _features(answer, x):
    """Whatever their number, up to `MOST`."""
    width = MOST
    with suppress(Exception):  # ask will say what is wrong
        width = min(answer(x.clone()).shape[-1], MOST)
    return ask(answer, x.new_zeros(*x.shape[:-1], width), x=x)


def _has_room(answer, reference, generator):
    for lead in ((8,), (2, 8)):
        _features(answer, l2_normalize(normal(generator, *lead, 8)))


def _is_not_negative(answer, reference, generator):
    phi = _features(answer, l2_normalize(normal(generator, 200, 8)))
    if (phi < 0).any():
        raise Wrong(
            f"{int((phi < 0).any(-1).sum())} of 200 keys had features below 0. Then "
            "weights can be below 0, and their sum can be 0."
        )


def _looks_at_one_key(answer, reference, generator):
    x = l2_normalize(normal(generator, 8, 8))
    alone = torch.cat([_features(answer, key[None]) for key in x])
    compare(
        _features(answer, x), alone, "Each key was given alone, and then all together."
    )


def _mean_error(phi, x, v):
    """Return the error of reading pairs with these features, relative to the values."""
    features = phi(x)
    weights = features @ features.mT
    read = weights @ v / weights.sum(-1, keepdim=True)
    return float(((read - v).square().sum() / v.square().sum()).nan_to_num(torch.inf))


def _beats_dpfp(answer, reference, generator):
    x, v = normal(generator, 2, DRAWS, 8, 8)
    x = l2_normalize(x)
    yours = _mean_error(lambda x: _features(answer, x), x, v)
    theirs = _mean_error(DPFP(3), x, v)
    if yours >= theirs:
        raise Wrong(
            f"In {DRAWS} memories of eight pairs, your mean error was {yours:.3f}, and "
            f"that of DPFP with three shifts {theirs:.3f}."
        )


@exercise(difficulty=4, importance=3, minutes=20, open=True)
def my_features(x):
    r"""
    **Beat the table.** From keys `x` `[..., 8]` of length 1, return at most 48 features
    `[..., features]`, none below 0, with which linear attention holds eight random
    pairs better than with the 48 features of DPFP, $\nu = 3$.

    ✓ returns at most 48 features for each key
        _has_room
    ✗ These are more than 48 features.
        dpfp(x, 3) ** 3 -> dpfp(x, 7)
    ✓ has no negative features
        _is_not_negative
    ✗ These are the keys themselves. Half of their entries are below 0.
        x
    ✓ gives a key the same features, whatever other keys there are
        _looks_at_one_key
    ✗ This compares the keys with each other. A memory gets one key after the other.
        x.softmax(-2)
    ✓ holds eight pairs better than DPFP with three shifts
        _beats_dpfp
    ✗ This is DPFP with three shifts, the row to beat.
        ** 3 ->
    ✗ ELU + 1 has nearly the same features for all keys.
        F.elu(x) + 1
    ✗ This is r = ReLU([x; -x]) without products. Two keys share half of the entries
      above 0.
        torch.cat([x, -x], -1).relu()
    ? The weight of a pair is phi(k) · phi(q). It should be large where k = q, and fall
      quickly as k turns away. Which features fall faster than those of DPFP?
    ? A power of a feature that is not negative exaggerates the large ones. Or take 48
      directions, and let a softmax decide which of them a key is close to.
    ? Take the 48 features of DPFP to the power of 2 or 3.
    """
    # A power makes large products larger, so a key weights itself more.
    return dpfp(x, 3) ** 3
