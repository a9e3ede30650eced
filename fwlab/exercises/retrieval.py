"""Three exercises: the loss of retrieval, its bound, and what a key holds last."""

import math
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fwlab.data.retrieval import _last_values, law, loss
from fwlab.exercises import pairs
from fwlab.exercises.asking import Answer, Wrong, ask, compare, normal
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import Mode, agrees, exactly, gradient, shape
from fwlab.exercises.solutions import few_features
from fwlab.feature_maps import DPFP, l2_normalize, sum_normalize
from fwlab.ops.delta.delta import delta_step

# --- retrieval_loss ------------------------------------------------------


def _queries(
    generator: Generator, size: tuple[int, ...] = (2, 3, 4)
) -> dict[str, Tensor]:
    wanted = torch.randint(size[-1], size[:-1], generator=generator)
    return {"found": normal(generator, *size), "wanted": wanted}


def _one_hot(
    generator: Generator, off: int, size: tuple[int, ...]
) -> dict[str, Tensor]:
    wanted = _queries(generator, size)["wanted"]
    found = F.one_hot((wanted + off) % size[-1], size[-1]).double()
    return {"found": found, "wanted": wanted}


def _loss_of_nothing(answer: Answer, reference: Answer, generator: Generator) -> None:
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


def _errors(found: Tensor, wanted: Tensor) -> Tensor:
    return found - F.one_hot(wanted, found.shape[-1])


def _cross_entropy(found: Tensor, wanted: Tensor) -> Tensor:
    logits = found.flatten(0, -2) if found.dim() > 2 else found
    return F.cross_entropy(logits, wanted.flatten())


RETRIEVAL_LOSS = Exercise(
    name="retrieval_loss",
    notebook="06_retrieval",
    difficulty=2,
    importance=3,
    minutes=7,
    task="**The loss.** `found` `[..., symbols]` is what reading has returned "
    "for each query, and `wanted` `[...]` says which one-hot vector it "
    "should be, from 0 to `symbols - 1`. Return the mean of "
    "$\\tfrac12 |v - \\hat v|^2$ over all queries: one number, a tensor "
    "of shape `[]`.",
    reference=loss,
    properties=(
        shape(
            "returns one number, a tensor of shape []",
            _queries,
            [((3, 4),), ((2, 3, 4),), ((1, 4),)],
        ),
        agrees(
            "is 0 if reading returns the wanted values",
            _one_hot,
            [(0, (3, 2)), (0, (3, 5))],
            expected=lambda found, wanted: 0 * found.sum(),
            catches={
                "This subtracts the number of the value from every entry. What is "
                "wanted is its one-hot vector.": lambda found, wanted: (
                    (found - wanted[..., None]).square().sum(-1).mean() / 2
                ),
                "This is cross-entropy. What is read is compared as it is, without a "
                "softmax.": _cross_entropy,
            },
        ),
        Property(
            "is ½ if reading returns zeros, for any number of values and queries",
            _loss_of_nothing,
            {
                "The half is missing: finding nothing "
                "would cost 1.": lambda found, wanted: (
                    _errors(found, wanted).square().sum(-1).mean()
                ),
                "This takes the mean over the entries of the vectors, too, so more "
                "values would make the task look easier. "
                "Sum over them.": lambda found, wanted: (
                    _errors(found, wanted).square().mean() / 2
                ),
                "This sums over the queries. Take their mean, so that the loss does "
                "not grow with the batch.": lambda found, wanted: (
                    _errors(found, wanted).square().sum() / 2
                ),
            },
        ),
        agrees(
            "is 1 if reading returns another value",
            _one_hot,
            [(1, (6, 4))],
            expected=lambda found, wanted: 0 * found.sum() + 1,
            because="Two entries are wrong by 1: one has to be there, and the other "
            "one must not.",
            catches={
                "This takes the length of the error, and has to "
                "take its square.": lambda found, wanted: (
                    _errors(found, wanted).norm(dim=-1).mean() / 2
                )
            },
        ),
        agrees(
            "is the mean over queries, on any leading dimensions",
            _queries,
            [((5, 3),), ((2, 3, 6),), ((2, 1, 4, 5),)],
            because="found had the shape {size}.",
            catches={
                "This takes absolute values, and has "
                "to take squares.": lambda found, wanted: (
                    _errors(found, wanted).abs().sum(-1).mean() / 2
                )
            },
        ),
        gradient("lets gradients through to found", _queries),
    ),
    hints=(
        "F.one_hot(wanted, found.shape[-1]) makes the vectors that are wanted.",
        "Square the difference, sum over the last dimension, halve, and take "
        "the mean of what is left.",
        "(found - F.one_hot(...)).square().sum(-1).mean() / 2",
    ),
    example=_queries,
)


# --- capacity ------------------------------------------------------------


def _is_a_loss(answer: Answer, reference: Answer, generator: Generator) -> None:
    for S, features in ((24, 16), (16, 16), (8, 64), (500, 1)):
        loss = ask(answer, float, S=S, features=features)
        if not 0 <= loss <= 0.5:
            raise Wrong(
                f"S = {S}, features = {features}: got {loss:.4g}. Squares are never "
                "negative, and returning zeros costs ½."
            )


def _capacity_example(generator: Generator) -> dict[str, int]:
    features = int(torch.randint(4, 20, (), generator=generator))
    more = int(torch.randint(1, 2 * features, (), generator=generator))
    return {"S": features + more, "features": features}


CAPACITY = Exercise(
    name="capacity",
    notebook="06_retrieval",
    difficulty=2,
    importance=4,
    minutes=5,
    task="**The law.** Return the smallest loss that a memory with `features` "
    "features can have after `S` pairs, as a number.",
    reference=law,
    properties=(
        Property(
            "returns a number from 0 to ½",
            _is_a_loss,
            {
                "The half of the loss is missing.": lambda S, features: max(
                    0.0, 1 - features / S
                ),
                "This is negative below capacity, where "
                "nothing is lost.": lambda S, features: 0.5 * (1 - features / S),
                "This counts what is lost in all. The loss is the mean over the S "
                "queries.": lambda S, features: max(0.0, 0.5 * (S - features)),
                "This divides by the number of features. The loss is a mean over S "
                "queries.": lambda S, features: max(
                    0.0, 0.5 * (S - features) / features
                ),
            },
        ),
        agrees(
            "is 0 up to capacity",
            exactly("S", "features"),
            [(16, 16), (3, 16), (1, 1), (63, 64)],
            expected=lambda S, features: 0,
            because="There is room for all of them.",
            catches={
                "This is the part that is kept. The loss is the part "
                "that is lost.": lambda S, features: min(0.5, 0.5 * features / S),
                "The fraction is upside down: of S directions, as many are kept as "
                "there are features.": lambda S, features: max(
                    0.0, 0.5 * (1 - S / features)
                ),
            },
        ),
        agrees(
            "is a quarter at twice the capacity",
            exactly("S", "features"),
            [(32, 16), (2, 1), (128, 64)],
            expected=lambda S, features: 0.25,
            because="Half of the directions are lost.",
            catches={
                "Beyond capacity, not everything is lost: as many directions as "
                "features are still kept.": lambda S, features: 0.5 * (features < S)
            },
        ),
        agrees(
            "follows the law at any size",
            exactly("S", "features"),
            [(24, 16), (17, 16), (600, 64), (5, 1), (100, 99)],
            because="S - features of S directions are lost, and each costs ½.",
        ),
    ),
    hints=(
        "With at least S features nothing has to be lost.",
        "Otherwise the squared errors of all S queries add up to S - features.",
        "Divide by S for the mean, and by 2 for the half of the loss.",
    ),
    example=_capacity_example,
)


# --- make_batch ----------------------------------------------------------


def _pairs(
    generator: Generator, batch: int = 2, time: int = 12, symbols: int = 5
) -> dict[str, object]:
    keys, values = torch.randint(symbols, (2, batch, time), generator=generator)
    return {"keys": keys, "values": values, "symbols": symbols}


def _each_once(generator: Generator, symbols: int) -> dict[str, object]:
    keys, values = torch.rand(2, 1, symbols, generator=generator).argsort(-1)
    return {"keys": keys, "values": values, "symbols": symbols}


def _listed(
    generator: Generator, keys: list[int], values: list[int], symbols: int
) -> dict[str, object]:
    both = torch.tensor([[keys], [values]])
    return {"keys": both[0], "values": both[1], "symbols": symbols}


class _Backwards(Mode):
    """Writes several values at once in the opposite order.

    PyTorch promises no order, if a place comes twice.
    """

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
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


def _in_any_order(answer: Answer, reference: Answer, generator: Generator) -> None:
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


def _pick(keys: Tensor, values: Tensor, symbols: int, of: str) -> Tensor:
    """The value at one of the steps at which each key came, by what is wanted."""
    result = torch.full((len(keys), symbols), -1)
    for row, (all_keys, all_values) in enumerate(
        zip(keys.tolist(), values.tolist(), strict=True)
    ):
        for s in range(symbols):
            own = [v for k, v in zip(all_keys, all_values, strict=True) if k == s]
            if own:
                result[row, s] = {
                    "first": own[0],
                    "frequent": max(own, key=own.count),
                    "sum": sum(own),
                    "largest": max(own),
                    "of the sequence": all_values[-1],
                    "step": len(all_keys) - 1 - all_keys[::-1].index(s),
                }[of]
    return result


MAKE_BATCH = Exercise(
    name="make_batch",
    notebook="06_retrieval",
    difficulty=3,
    importance=3,
    minutes=13,
    task="**What should reading return?** For sequences of `keys` and `values` "
    "`[batch, time]`, both integers from 0 to `symbols - 1`, return the "
    "value that each of the `symbols` keys holds at the end, "
    "`[batch, symbols]`: the one that it got last, and -1 if it never "
    "came.",
    reference=_last_values,
    properties=(
        shape(
            "returns integers, [batch, symbols]",
            _pairs,
            [(2, 6, 4), (1, 1, 3), (3, 4, 8)],
        ),
        agrees(
            "has the value of each key, if each came once",
            _each_once,
            [4, 7],
            because="The result at place s belongs to key s, not to step s.",
            catches={
                "This is the last value of the sequence, for every key. Each key has a "
                "last value of its own.": partial(_pick, of="of the sequence"),
                "This is the step at which each key came last. What is wanted is its "
                "value.": partial(_pick, of="step"),
            },
        ),
        agrees(
            "has -1 for a key that never came",
            _listed,
            [([2, 0], [1, 3], 4), ([3], [0], 4)],
            because="The keys were {keys}, of 4. Value 0 is a value, too.",
            catches={
                "Keys that never came have 0 here, which is a value. "
                "They need -1.": lambda keys, values, symbols: _last_values(
                    keys, values, symbols
                ).clamp(min=0)
            },
        ),
        agrees(
            "has the last value of a key that came back",
            _listed,
            [
                ([1, 0, 1], [2, 0, 1], 3),
                ([0, 0, 0, 1], [1, 1, 0, 2], 3),
                ([2, 1, 2, 2, 0], [0, 2, 1, 2, 1], 3),
            ],
            because="The keys were {keys}, and their values {values}.",
            catches={
                "This is the first value of each key. When a key comes back, its new "
                "value counts.": partial(_pick, of="first"),
                "This is the most frequent value of each key. Only the last one "
                "counts.": partial(_pick, of="frequent"),
                "This adds up the values of a key, as a sum would. Only the last one "
                "counts.": partial(_pick, of="sum"),
                "This is the largest value of each key. Only the "
                "last one counts.": partial(_pick, of="largest"),
            },
        ),
        agrees(
            "keeps sequences of any length apart",
            _pairs,
            [(4, 12, 5), (7, 3, 9), (2, 60, 4)],
            because="There were {batch} sequences of {time} steps.",
        ),
        Property(
            "does not depend on the order in which one call writes its values",
            _in_any_order,
        ),
    ),
    hints=(
        "Start from a tensor full of -1, and go through the steps in order.",
        "At step t, put values[:, t] at the places keys[:, t] of all rows; "
        "what was there before is overwritten.",
        "result[torch.arange(len(keys)), keys[:, t]] = values[:, t]. (One "
        "scatter for all steps is a trap: if a place comes twice, PyTorch "
        "does not promise which value stays.)",
    ),
    example=_pairs,
)


# --- few_features --------------------------------------------------------


def _unit_keys(generator: Generator, *lead: int) -> dict[str, Tensor]:
    return {"x": l2_normalize(normal(generator, *(lead or (8,)), 8))}


def _row(x: Tensor) -> Tensor:
    """The best row of the table that was not trained."""
    return l2_normalize(DPFP(nu=3)(x))


def _by_itself(answer: Answer, reference: Answer, generator: Generator) -> None:
    x = _unit_keys(generator)["x"]
    together = ask(answer, x.new_zeros(8, 48), x=x)
    compare(
        ask(answer, x.new_zeros(1, 48), x=x[3:4]),
        together[3:4],
        "These are the features of a key alone, and of the same key among eight. A "
        "memory gets its keys one after another.",
    )


def _beats_the_row(answer: Answer, reference: Answer, generator: Generator) -> None:
    def asked(x: Tensor) -> Tensor:
        features: Tensor = ask(answer, x.new_zeros(len(x), 48), x=x)
        return features

    yours, row = pairs.score(pairs.delta(asked)), pairs.score(pairs.delta(_row))
    if not (yours[0] < row[0] and yours[1] < row[1]):
        raise Wrong(
            f"Your errors are {yours[0]:.3f} and {yours[1]:.3f}; those to beat are "
            f"{row[0]:.3f} and {row[1]:.3f}."
        )


def _on_other_keys(answer: Answer, reference: Answer, generator: Generator) -> None:
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


FEW_FEATURES = Exercise(
    name="few_features",
    notebook="06_retrieval",
    difficulty=4,
    importance=2,
    minutes=15,
    task="**Beat the table.** Return features of the keys `x` `[..., 8]`, "
    "`[..., 48]`: with the delta rule at `beta` = 1 and one pass over the pairs, they "
    'should have smaller errors than the row "delta rule, DPFP, L2 norm". Each key has '
    "length 1 and gets its features by itself, without training.",
    reference=few_features,
    properties=(
        shape("returns 48 features for each key", _unit_keys, [(8,), (1,), (2, 3)]),
        Property("gives a key its features by itself", _by_itself),
        Property(
            "beats the row, before and after four values are replaced",
            _beats_the_row,
            {
                "This is the row itself: the same error is not a smaller one.": _row,
                "These features sum to 1, so one write stores only a part of the "
                "value.": lambda x: sum_normalize(DPFP(nu=3)(x) ** 3),
                "These features have no fixed length, so a write stores too much or "
                "too little.": (DPFP(nu=3), lambda x: DPFP(nu=3)(x) ** 3),
            },
        ),
        Property("beats it on keys that it has not seen", _on_other_keys),
    ),
    hints=(
        "Start from the row, l2_normalize(DPFP(nu=3)(x)), and print the 8 x 8 matrix "
        "of products between the features of different keys: it should be smaller.",
        "What makes large features larger and small ones smaller, so that each key is "
        "left with a few features of its own?",
        "Raise the features to a power before you normalise their length.",
    ),
    example=_unit_keys,
)


EXERCISES = {
    each.name: each for each in (RETRIEVAL_LOSS, CAPACITY, MAKE_BATCH, FEW_FEATURES)
}
