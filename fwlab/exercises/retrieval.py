"""Three exercises: the loss of retrieval, its bound, and what a key holds last."""

import math
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fwlab.data.retrieval import _last_values, law, loss
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

# --- retrieval_loss ------------------------------------------------------


def _found(generator: Generator, *lead: int, symbols: int = 4) -> dict[str, Tensor]:
    wanted = torch.randint(symbols, lead, generator=generator)
    return {"found": normal(generator, *lead, symbols), "wanted": wanted}


def _ask_loss(answer: Answer, **given: Tensor) -> Tensor:
    loss: Tensor = ask(answer, given["found"].new_zeros(()), **given)
    return loss


def _loss_is_a_number(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns one number, a tensor of shape []"""
    for lead in ((3,), (2, 3), (1,)):
        _ask_loss(answer, **_found(generator, *lead))


def _loss_of_the_right_value(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """is 0 if reading returns the wanted values"""
    for symbols in (2, 5):
        given = _found(generator, 3, symbols=symbols)
        given["found"] = F.one_hot(given["wanted"], symbols).double()
        compare(_ask_loss(answer, **given), torch.zeros(()).double())


def _loss_of_nothing(answer: Answer, reference: Answer, generator: Generator) -> None:
    """is ½ if reading returns zeros, for any number of values and queries"""
    for lead, symbols in (((3,), 4), ((1,), 7), ((2, 5), 3)):
        given = _found(generator, *lead, symbols=symbols)
        given["found"] = torch.zeros_like(given["found"])
        compare(
            _ask_loss(answer, **given),
            torch.full((), 0.5).double(),
            f"There were {math.prod(lead)} queries and {symbols} values. The squared "
            "error of a query is summed over the vector, and halved.",
        )


def _loss_of_a_wrong_value(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """is 1 if reading returns another value"""
    given = _found(generator, 6)
    given["found"] = F.one_hot((given["wanted"] + 1) % 4, 4).double()
    compare(
        _ask_loss(answer, **given),
        torch.ones(()).double(),
        "Two entries are wrong by 1: one has to be there, and the other one must not.",
    )


def _loss_is_right(answer: Answer, reference: Answer, generator: Generator) -> None:
    """is the mean over queries, on any leading dimensions"""
    for lead, symbols in (((5,), 3), ((2, 3), 6), ((2, 1, 4), 5)):
        given = _found(generator, *lead, symbols=symbols)
        because = f"found had the shape {list(given['found'].shape)}."
        compare(_ask_loss(answer, **given), reference(**given), because)


def _loss_has_gradient(answer: Answer, reference: Answer, generator: Generator) -> None:
    """lets gradients through to found"""
    compare_gradients(answer, reference, generator, CUT, **_found(generator, 2, 3))


def _loss_example(generator: Generator) -> dict[str, Tensor]:
    return _found(generator, 2, 3)


def _errors(found: Tensor, wanted: Tensor) -> Tensor:
    return found - F.one_hot(wanted, found.shape[-1])


def _without_half(found: Tensor, wanted: Tensor) -> Tensor:
    """The half is missing: finding nothing would cost 1."""
    return _errors(found, wanted).square().sum(-1).mean()


def _mean_over_entries(found: Tensor, wanted: Tensor) -> Tensor:
    """This takes the mean over the entries of the vectors, too, so more values
    would make the task look easier. Sum over them.
    """
    return _errors(found, wanted).square().mean() / 2


def _sum_over_queries(found: Tensor, wanted: Tensor) -> Tensor:
    """This sums over the queries. Take their mean, so that the loss does not grow
    with the batch.
    """
    return _errors(found, wanted).square().sum() / 2


def _without_one_hot(found: Tensor, wanted: Tensor) -> Tensor:
    """This subtracts the number of the value from every entry. What is wanted is
    its one-hot vector.
    """
    return (found - wanted[..., None]).square().sum(-1).mean() / 2


def _cross_entropy(found: Tensor, wanted: Tensor) -> Tensor:
    """This is cross-entropy. What is read is compared as it is, without a softmax."""
    logits = found.flatten(0, -2) if found.dim() > 2 else found
    return F.cross_entropy(logits, wanted.flatten())


def _absolute(found: Tensor, wanted: Tensor) -> Tensor:
    """This takes absolute values, and has to take squares."""
    return _errors(found, wanted).abs().sum(-1).mean() / 2


def _not_squared(found: Tensor, wanted: Tensor) -> Tensor:
    """This takes the length of the error, and has to take its square."""
    return _errors(found, wanted).norm(dim=-1).mean() / 2


# --- capacity ------------------------------------------------------------


def _same_loss(
    answer: Answer, reference: Answer, sizes: tuple[tuple[int, int], ...], because: str
) -> None:
    for S, features in sizes:
        found = ask(answer, float, S=S, features=features)
        expected = reference(S, features)
        if abs(found - expected) > 1e-9:
            raise Wrong(
                f"S = {S}, features = {features}: expected {expected:.4g}, got "
                f"{found:.4g}. {because}"
            )


def _capacity_is_a_loss(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """returns a number from 0 to ½"""
    for S, features in ((24, 16), (16, 16), (8, 64), (500, 1)):
        found = ask(answer, float, S=S, features=features)
        if not 0 <= found <= 0.5:
            raise Wrong(
                f"S = {S}, features = {features}: got {found:.4g}. Squares are never "
                "negative, and returning zeros costs ½."
            )


def _capacity_below(answer: Answer, reference: Answer, generator: Generator) -> None:
    """is 0 up to capacity"""
    sizes = ((16, 16), (3, 16), (1, 1), (63, 64))
    _same_loss(answer, reference, sizes, "There is room for all of them.")


def _capacity_at_twice(answer: Answer, reference: Answer, generator: Generator) -> None:
    """is a quarter at twice the capacity"""
    sizes = ((32, 16), (2, 1), (128, 64))
    _same_loss(answer, reference, sizes, "Half of the directions are lost.")


def _capacity_is_right(answer: Answer, reference: Answer, generator: Generator) -> None:
    """follows the law at any size"""
    _same_loss(
        answer,
        reference,
        ((24, 16), (17, 16), (600, 64), (5, 1), (100, 99)),
        "S - features of S directions are lost, and each costs ½.",
    )


def _capacity_example(generator: Generator) -> dict[str, int]:
    features = int(torch.randint(4, 20, (), generator=generator))
    more = int(torch.randint(1, 2 * features, (), generator=generator))
    return {"S": features + more, "features": features}


def _whole(S: int, features: int) -> float:
    """The half of the loss is missing."""
    return max(0.0, 1 - features / S)


def _share_kept(S: int, features: int) -> float:
    """This is the part that is kept. The loss is the part that is lost."""
    return min(0.5, 0.5 * features / S)


def _below_zero(S: int, features: int) -> float:
    """This is negative below capacity, where nothing is lost."""
    return 0.5 * (1 - features / S)


def _upside_down(S: int, features: int) -> float:
    """The fraction is upside down: of S directions, as many are kept as there are
    features.
    """
    return max(0.0, 0.5 * (1 - S / features))


def _number_lost(S: int, features: int) -> float:
    """This counts what is lost in all. The loss is the mean over the S queries."""
    return max(0.0, 0.5 * (S - features))


def _mean_over_features(S: int, features: int) -> float:
    """This divides by the number of features. The loss is a mean over S queries."""
    return max(0.0, 0.5 * (S - features) / features)


def _all_or_nothing(S: int, features: int) -> float:
    """Beyond capacity, not everything is lost: as many directions as features are
    still kept.
    """
    return 0.5 * (features < S)


# --- make_batch ----------------------------------------------------------


def _pairs(
    generator: Generator, batch: int = 1, time: int = 12, symbols: int = 5
) -> dict[str, object]:
    keys, values = torch.randint(symbols, (2, batch, time), generator=generator)
    return {"keys": keys, "values": values, "symbols": symbols}


def _batch_of(keys: list[int], values: list[int], symbols: int) -> dict[str, object]:
    return {
        "keys": torch.tensor([keys]),
        "values": torch.tensor([values]),
        "symbols": symbols,
    }


def _compare_batch(
    answer: Answer, reference: Answer, because: str, /, **given: object
) -> None:
    expected = reference(**given)
    found = ask(answer, expected, **given)
    compare(found.double(), expected.double(), because)


def _batch_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns integers, [batch, symbols]"""
    for batch, time, symbols in ((2, 6, 4), (1, 1, 3), (3, 4, 8)):
        given = _pairs(generator, batch, time, symbols)
        ask(answer, torch.full((batch, symbols), -1), **given)


def _batch_without_returns(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """has the value of each key, if each came once"""
    for symbols in (4, 7):
        keys, values = torch.rand(2, 1, symbols, generator=generator).argsort(-1)
        because = "The result at place s belongs to key s, not to step s."
        given = {"keys": keys, "values": values, "symbols": symbols}
        _compare_batch(answer, reference, because, **given)


def _batch_of_missing_keys(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """has -1 for a key that never came"""
    for keys, values in (([2, 0], [1, 3]), ([3], [0])):
        because = f"The keys were {keys}, of 4. Value 0 is a value, too."
        _compare_batch(answer, reference, because, **_batch_of(keys, values, 4))


def _batch_of_returns(answer: Answer, reference: Answer, generator: Generator) -> None:
    """has the last value of a key that came back"""
    for keys, values in (
        ([1, 0, 1], [2, 0, 1]),
        ([0, 0, 0, 1], [1, 1, 0, 2]),
        ([2, 1, 2, 2, 0], [0, 2, 1, 2, 1]),
    ):
        because = f"The keys were {keys}, and their values {values}."
        _compare_batch(answer, reference, because, **_batch_of(keys, values, 3))


def _batch_of_long_sequences(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """keeps sequences of any length apart"""
    for batch, time, symbols in ((4, 12, 5), (7, 3, 9), (2, 60, 4)):
        because = f"There were {batch} sequences of {time} steps."
        given = _pairs(generator, batch, time, symbols)
        _compare_batch(answer, reference, because, **given)


class _Backwards(TorchDispatchMode):
    """Where many values are written at once, the last one goes first.

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


def _batch_in_any_order(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """does not depend on the order in which one call writes its values"""
    given = _pairs(generator, 3, 12, 4)
    expected = reference(**given)
    with _Backwards():
        found = ask(answer, expected, **given)
    compare(
        found.double(),
        expected.double(),
        "When one scatter or one assignment writes several values to the same place, "
        "PyTorch does not promise which one stays. Here it was not the last.",
    )


def _batch_example(generator: Generator) -> dict[str, object]:
    return _pairs(generator, 2)


def _pick(keys: Tensor, values: Tensor, symbols: int, of: str) -> Tensor:
    """The value at one of the steps at which each key came, by what is wanted."""
    result = torch.full((len(keys), symbols), -1)
    for row, (all_keys, all_values) in enumerate(
        zip(keys.tolist(), values.tolist(), strict=True)
    ):
        for s in range(symbols):
            mine = [v for k, v in zip(all_keys, all_values, strict=True) if k == s]
            if mine:
                result[row, s] = {
                    "first": mine[0],
                    "frequent": max(mine, key=mine.count),
                    "sum": sum(mine),
                    "largest": max(mine),
                    "of the sequence": all_values[-1],
                    "step": len(all_keys) - 1 - all_keys[::-1].index(s),
                }[of]
    return result


def _first_value(keys: Tensor, values: Tensor, symbols: int) -> Tensor:
    """This is the first value of each key. When a key comes back, its new value
    counts.
    """
    return _pick(keys, values, symbols, "first")


def _most_frequent(keys: Tensor, values: Tensor, symbols: int) -> Tensor:
    """This is the most frequent value of each key. Only the last one counts."""
    return _pick(keys, values, symbols, "frequent")


def _sum_of_values(keys: Tensor, values: Tensor, symbols: int) -> Tensor:
    """This adds up the values of a key, as a sum would. Only the last one counts."""
    return _pick(keys, values, symbols, "sum")


def _largest(keys: Tensor, values: Tensor, symbols: int) -> Tensor:
    """This is the largest value of each key. Only the last one counts."""
    return _pick(keys, values, symbols, "largest")


def _last_of_the_sequence(keys: Tensor, values: Tensor, symbols: int) -> Tensor:
    """This is the last value of the sequence, for every key. Each key has a last
    value of its own.
    """
    return _pick(keys, values, symbols, "of the sequence")


def _last_step(keys: Tensor, values: Tensor, symbols: int) -> Tensor:
    """This is the step at which each key came last. What is wanted is its value."""
    return _pick(keys, values, symbols, "step")


def _zero_for_never(keys: Tensor, values: Tensor, symbols: int) -> Tensor:
    """Keys that never came have 0 here, which is a value. They need -1."""
    return _last_values(keys, values, symbols).clamp(min=0)


EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise
    for exercise in (
        Exercise(
            "retrieval_loss",
            (
                "**The loss.** `found` `[..., symbols]` is what reading has returned "
                "for each query, and `wanted` `[...]` says which one-hot vector it "
                "should be, from 0 to `symbols - 1`. Return the mean of "
                "$\\tfrac12 |v - \\hat v|^2$ over all queries: one number, a tensor "
                "of shape `[]`."
            ),
            (loss,),
            (
                _loss_is_a_number,
                _loss_of_the_right_value,
                _loss_of_nothing,
                _loss_of_a_wrong_value,
                _loss_is_right,
                _loss_has_gradient,
            ),
            (
                "F.one_hot(wanted, found.shape[-1]) makes the vectors that are wanted.",
                "Square the difference, sum over the last dimension, halve, and take "
                "the mean of what is left.",
                "(found - F.one_hot(...)).square().sum(-1).mean() / 2",
            ),
            _loss_example,
            {
                _without_half: _loss_of_nothing,
                _mean_over_entries: _loss_of_nothing,
                _sum_over_queries: _loss_of_nothing,
                _without_one_hot: _loss_of_the_right_value,
                _cross_entropy: _loss_of_the_right_value,
                _absolute: _loss_is_right,
                _not_squared: _loss_of_a_wrong_value,
            },
        ),
        Exercise(
            "capacity",
            (
                "**The law.** Return the smallest loss that a memory with `features` "
                "features can have after `S` pairs, as a number."
            ),
            (law,),
            (
                _capacity_is_a_loss,
                _capacity_below,
                _capacity_at_twice,
                _capacity_is_right,
            ),
            (
                "With at least S features nothing has to be lost.",
                "Otherwise the squared errors of all S queries add up to S - features.",
                "Divide by S for the mean, and by 2 for the half of the loss.",
            ),
            _capacity_example,
            {
                _whole: _capacity_is_a_loss,
                _share_kept: _capacity_below,
                _below_zero: _capacity_is_a_loss,
                _upside_down: _capacity_below,
                _number_lost: _capacity_is_a_loss,
                _mean_over_features: _capacity_is_a_loss,
                _all_or_nothing: _capacity_at_twice,
            },
        ),
        Exercise(
            "make_batch",
            (
                "**What should reading return?** For sequences of `keys` and `values` "
                "`[batch, time]`, both integers from 0 to `symbols - 1`, return the "
                "value that each of the `symbols` keys holds at the end, "
                "`[batch, symbols]`: the one that it got last, and -1 if it never "
                "came."
            ),
            (_last_values,),
            (
                _batch_has_shape,
                _batch_without_returns,
                _batch_of_missing_keys,
                _batch_of_returns,
                _batch_of_long_sequences,
                _batch_in_any_order,
            ),
            (
                "Start from a tensor full of -1, and go through the steps in order.",
                "At step t, put values[:, t] at the places keys[:, t] of all rows; "
                "what was there before is overwritten.",
                "result[torch.arange(len(keys)), keys[:, t]] = values[:, t]. (One "
                "scatter for all steps is a trap: if a place comes twice, PyTorch "
                "does not promise which value stays.)",
            ),
            _batch_example,
            {
                _first_value: _batch_of_returns,
                _most_frequent: _batch_of_returns,
                _sum_of_values: _batch_of_returns,
                _largest: _batch_of_returns,
                _last_of_the_sequence: _batch_without_returns,
                _last_step: _batch_without_returns,
                _zero_for_never: _batch_of_missing_keys,
            },
        ),
    )
}
