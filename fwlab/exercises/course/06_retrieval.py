"""Retrieval."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab.data.retrieval import last_values, law, loss
from fwlab.exercises.answers import Wrong, ask, compare, normal
from fwlab.exercises.course import pairs
from fwlab.exercises.notation import exercise
from fwlab.exercises.properties import Mode, exactly
from fwlab.feature_maps import DPFP, l2_normalize, sum_normalize
from fwlab.ops.delta.delta import delta_step

# --- retrieval_loss ------------------------------------------------------


def _queries(generator, size=(2, 3, 4)):
    wanted = torch.randint(size[-1], size[:-1], generator=generator)
    return {"found": normal(generator, *size), "wanted": wanted}


def _one_hot(generator, off, size):
    wanted = _queries(generator, size)["wanted"]
    found = F.one_hot((wanted + off) % size[-1], size[-1]).double()
    return {"found": found, "wanted": wanted}


def _loss_of_nothing(answer, reference, generator):
    for lead, symbols in (((3,), 4), ((1,), 7), ((2, 5), 3)):
        inputs = _queries(generator, (*lead, symbols))
        inputs["found"] = torch.zeros_like(inputs["found"])
        half = torch.full((), 0.5).double()
        compare(
            ask(answer, half, **inputs),
            half,
            f"There were {math.prod(lead)} queries and {symbols} values. The squared "
            "error of a query is summed over the vector, and halved.",
        )


@exercise(_queries, difficulty=2, importance=3, minutes=7)
def retrieval_loss(found, wanted):
    r"""
    **The loss.** `found` `[..., symbols]` is what reading has returned for each query,
    and `wanted` `[...]` says which one-hot vector it should be, from 0 to `symbols -
    1`. Return the mean of $\tfrac12 |v - \hat v|^2$ over all queries: one number, a
    tensor of shape `[]`.

    ✓ returns one number, a tensor of shape []
        shape(((3, 4),), ((2, 3, 4),), ((1, 4),))
    ✓ is 0 if reading returns the wanted values
        agrees((0, (3, 2)), (0, (3, 5)), draw=_one_hot)
        == 0 * found.sum()
    ✗ This subtracts the number of the value from every entry. What is wanted is its
      one-hot vector.
        F.one_hot(wanted, found.shape[-1]) -> wanted[..., None]
    ✗ This is cross-entropy. What is read is compared as it is, without a softmax.
        F.cross_entropy(found.flatten(0, -2), wanted.flatten())
    ✓ is ½ if reading returns zeros, for any number of values and queries
        _loss_of_nothing
    ✗ The half is missing: finding nothing would cost 1.
        / 2 ->
    ✗ This takes the mean over the entries of the vectors, too, so more values would
      make the task look easier. Sum over them.
        .sum(-1).mean() -> .mean()
        .sum(-1).mean() / 2 -> .mean()
    ✗ This sums over the queries. Take their mean, so that the loss does not grow with
      the batch.
        .sum(-1).mean() -> .sum()
    ✓ is 1 if reading returns another value
        agrees((1, (6, 4)), draw=_one_hot)
        == 0 * found.sum() + 1
    ! Two entries are wrong by 1: one has to be there, and the other one must not.
    ✗ This takes the length of the error, and has to take its square.
        .sum(-1) -> .sum(-1).sqrt()
    ✓ is the mean over queries, on any leading dimensions
        agrees(((5, 3),), ((2, 3, 6),), ((2, 1, 4, 5),))
        == loss(found, wanted)
    ! found had the shape {size}.
    ✗ This takes absolute values, and has to take squares.
        error * error -> error.abs()
    ✓ lets gradients through to found
        gradient()
    ? F.one_hot(wanted, found.shape[-1]) makes the vectors that are wanted.
    ? Square the difference, sum over the last dimension, halve, and take the mean of
      what is left.
    ? (found - F.one_hot(...)).square().sum(-1).mean() / 2
    """
    error = found - F.one_hot(wanted, found.shape[-1])
    return (error * error).sum(-1).mean() / 2


# --- capacity ------------------------------------------------------------


def _is_a_loss(answer, reference, generator):
    for S, features in ((24, 16), (16, 16), (8, 64), (500, 1)):
        yours = ask(answer, float, S=S, features=features)
        if not 0 <= yours <= 0.5:
            raise Wrong(
                f"S = {S}, features = {features}: got {yours:.4g}. Squares are never "
                "negative, and returning zeros costs ½."
            )


def _capacity_example(generator):
    features = int(torch.randint(4, 20, (), generator=generator))
    more = int(torch.randint(1, 2 * features, (), generator=generator))
    return {"S": features + more, "features": features}


@exercise(
    exactly("S", "features"),
    example=_capacity_example,
    difficulty=2,
    importance=4,
    minutes=5,
)
def capacity(S, features):
    """
    **The law.** Return the smallest loss that a memory with `features` features can
    have after `S` pairs, as a number.

    ✓ returns a number from 0 to ½
        _is_a_loss
    ✗ The half of the loss is missing.
        / 2 ->
    ✗ This is negative below capacity, where nothing is lost.
        max(0, S - features) -> (S - features)
    ✗ This counts what is lost in all. The loss is the mean over the S queries.
        / S ->
    ✗ This divides by the number of features. The loss is a mean over S queries.
        / S -> / features
    ✓ is 0 up to capacity
        agrees((16, 16), (3, 16), (1, 1), (63, 64))
        == 0
    ! There is room for all of them.
    ✗ This is the part that is kept. The loss is the part that is lost.
        max(0, S - features) -> min(S, features)
    ✗ The fraction is upside down: of S directions, as many are kept as there are
      features.
        max(0, S - features) / S -> max(0, features - S) / features
    ✓ is a quarter at twice the capacity
        agrees((32, 16), (2, 1), (128, 64))
        == 0.25
    ! Half of the directions are lost.
    ✗ Beyond capacity, not everything is lost: as many directions as features are still
      kept.
        max(0, S - features) / S -> (features < S)
    ✓ follows the law at any size
        agrees((24, 16), (17, 16), (600, 64), (5, 1), (100, 99))
        == law(S, features)
    ! S - features of S directions are lost, and each costs ½.
    ✗ Beyond capacity, this is the part that is kept. The loss is the part that is lost.
        max(0, S - features) -> (features < S) * features
    ? With at least S features nothing has to be lost.
    ? Otherwise the squared errors of all S queries add up to S - features.
    ? Divide by S for the mean, and by 2 for the half of the loss.
    """
    # S - features of S directions are lost, and each costs 1/2.
    return max(0, S - features) / S / 2


# --- make_batch ----------------------------------------------------------


def _pairs(generator, batch=2, time=12, symbols=5):
    keys, values = torch.randint(symbols, (2, batch, time), generator=generator)
    return {"keys": keys, "values": values, "symbols": symbols}


def _each_once(generator, symbols):
    keys, values = torch.rand(2, 1, symbols, generator=generator).argsort(-1)
    return {"keys": keys, "values": values, "symbols": symbols}


def _listed(generator, keys, values, symbols):
    both = torch.tensor([[keys], [values]])
    return {"keys": both[0], "values": both[1], "symbols": symbols}


class _Backwards(Mode):
    """Writes several values at once in the opposite order.

    PyTorch promises no order, if a place comes twice.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.scatter.src, torch.ops.aten.scatter_.src):
            x, dim, index, source = args
            source = source[tuple(slice(size) for size in index.shape)]
            args = (x, dim, index.flip(dim), source.flip(dim))
        elif function is torch.ops.aten.index_put_.default and not any(args[3:]):
            x, indices, source = args[:3]
            if len(indices) == x.dim() and all(
                isinstance(i, Tensor) and i.dtype == torch.int64 for i in indices
            ):
                indices = torch.broadcast_tensors(*indices)
                source, every = source.expand_as(indices[0]), [*range(indices[0].dim())]
                args = (x, [i.flip(every) for i in indices], source.flip(every))
        return function(*args, **(kwargs or {}))


def _in_any_order(answer, reference, generator):
    inputs = _pairs(generator, 3, 12, 4)
    expected = reference(**inputs)
    with _Backwards():
        held = ask(answer, expected, **inputs)
    compare(
        held.double(),
        expected.double(),
        "When one scatter or one assignment writes several values to the same place, "
        "PyTorch does not promise which one stays. Here it was not the last.",
    )


@exercise(_pairs, difficulty=3, importance=3, minutes=13)
def make_batch(keys, values, symbols):
    """
    **What should reading return?** For sequences of `keys` and `values` `[batch,
    time]`, both integers from 0 to `symbols - 1`, return the value that each of the
    `symbols` keys holds at the end, `[batch, symbols]`: the one that it got last, and
    -1 if it never came.

    ✓ returns integers, [batch, symbols]
        shape((2, 6, 4), (1, 1, 3), (3, 4, 8))
    ✓ has the value of each key, if each came once
        agrees(4, 7, draw=_each_once)
        == values.gather(1, keys.argsort())
    ! The result at place s belongs to key s, not to step s.
    ✗ This is the last value of the sequence, for every key. Each key has a last value
      of its own.
        values[:, t] -> values[:, -1]
    ✗ This is the step at which each key came last. What is wanted is its value.
        values[:, t] -> t
    ✓ has -1 for a key that never came
        agrees(([2, 0], [1, 3], 4), ([3], [0], 4), draw=_listed)
    ! The keys were {keys}, of 4. Value 0 is a value, too.
    ✗ Keys that never came have 0 here, which is a value. They need -1.
        symbols), -1) -> symbols), 0)
    ✓ has the last value of a key that came back
        agrees(
            ([1, 0, 1], [2, 0, 1], 3),
            ([0, 0, 0, 1], [1, 1, 0, 2], 3),
            ([2, 1, 2, 2, 0], [0, 2, 1, 2, 1], 3),
            draw=_listed,
        )
    ! The keys were {keys}, and their values {values}.
    ✗ This is the first value of each key. When a key comes back, its new value counts.
        range(keys.shape[1]) -> reversed(range(keys.shape[1]))
    ✗ This is the most frequent value of each key. Only the last one counts.
        torch.tensor([[max(own, key=own.count) if (own := v[k == s].tolist()) else -1
          for s in range(symbols)] for k, v in zip(keys, values)])
    ✗ This adds up the values of a key, as a sum would. Only the last one counts.
        = values[:, t] -> = values[:, t] + held[rows, keys[:, t]].clamp(min=0)
    ✗ This is the largest value of each key. Only the last one counts.
        = values[:, t] -> = values[:, t].maximum(held[rows, keys[:, t]])
    ✓ keeps sequences of any length apart
        agrees((4, 12, 5), (7, 3, 9), (2, 60, 4))
        == last_values(keys, values, symbols)
    ! There were {batch} sequences of {time} steps.
    ✗ This writes into all rows at once. Row b of the result belongs to sequence b.
        held[rows, -> held[:,
    ✓ does not depend on the order in which one call writes its values
        _in_any_order
    ? Start from a tensor full of -1, and go through the steps in order.
    ? At step t, put values[:, t] at the places keys[:, t] of all rows; what was there
      before is overwritten.
    ? result[torch.arange(len(keys)), keys[:, t]] = values[:, t]. (One scatter for all
      steps is a trap: if a place comes twice, PyTorch does not promise which value
      stays.)
    """
    held = torch.full((len(keys), symbols), -1)
    rows = torch.arange(len(keys))
    for t in range(keys.shape[1]):
        held[rows, keys[:, t]] = values[:, t]
    return held


# --- few_features --------------------------------------------------------


def _unit_keys(generator, *lead):
    return {"x": l2_normalize(normal(generator, *(lead or (8,)), 8))}


def _row(x):
    """Return the best row of the table that was not trained."""
    return l2_normalize(DPFP(nu=3)(x))


def _by_itself(answer, reference, generator):
    x = _unit_keys(generator)["x"]
    together = ask(answer, x.new_zeros(8, 48), x=x)
    compare(
        ask(answer, x.new_zeros(1, 48), x=x[3:4]),
        together[3:4],
        "These are the features of a key alone, and of the same key among eight. A "
        "memory gets its keys one after another.",
    )


def _beats_the_row(answer, reference, generator):
    def asked(x):
        features: Tensor = ask(answer, x.new_zeros(len(x), 48), x=x)
        return features

    yours, row = pairs.score(pairs.delta(asked)), pairs.score(pairs.delta(_row))
    if not (yours[0] < row[0] and yours[1] < row[1]):
        raise Wrong(
            f"Your errors are {yours[0]:.3f} and {yours[1]:.3f}; those to beat are "
            f"{row[0]:.3f} and {row[1]:.3f}."
        )


def _on_other_keys(answer, reference, generator):
    errors = torch.zeros(2)
    for _ in range(20):
        x, v = _unit_keys(generator)["x"], normal(generator, 8, 8)
        features = (ask(answer, x.new_zeros(8, 48), x=x), _row(x))
        for i, phi in enumerate(features):
            W = torch.zeros_like(v @ phi)
            for phi_t, v_t in zip(phi, v, strict=True):
                W = delta_step(W, phi_t, v_t, phi.new_tensor(1.0))
            errors[i] += (phi @ W.mT - v).square().sum() / v.square().sum() / 20
    if not errors[0] < errors[1]:
        raise Wrong(
            f"On 20 other sets of eight keys, your mean error is {errors[0]:.3f}, and "
            f"that of the row {errors[1]:.3f}. Do your features know the eight keys?"
        )


@exercise(_unit_keys, difficulty=4, importance=2, minutes=15, open=True)
def few_features(x):
    """
    **Beat the table.** Return features of the keys `x` `[..., 8]`, `[..., 48]`: with
    the delta rule at `beta` = 1 and one pass over the pairs, they should have smaller
    errors than the row "delta rule, DPFP, L2 norm". Each key has length 1 and gets its
    features by itself, without training.

    ✓ returns 48 features for each key
        shape((8,), (1,), (2, 3))
    ✓ gives a key its features by itself
        _by_itself
    ✓ beats the row, before and after four values are replaced
        _beats_the_row
    ✗ This is the row itself: the same error is not a smaller one.
        ** 3 ->
    ✗ These features sum to 1, so one write stores only a part of the value.
        l2_normalize -> sum_normalize
    ✗ These features have no fixed length, so a write stores too much or too little.
        l2_normalize ->
        l2_normalize -> ; ** 3 ->
    ✓ beats it on keys that it has not seen
        _on_other_keys
    ? Start from the row, l2_normalize(DPFP(nu=3)(x)), and print the 8 x 8 matrix of
      products between the features of different keys: it should be smaller.
    ? What makes large features larger and small ones smaller, so that each key is left
      with a few features of its own?
    ? Raise the features to a power before you normalise their length.
    """
    # A power makes large features larger, so different keys overlap less.
    return l2_normalize(DPFP(nu=3)(x) ** 3)
