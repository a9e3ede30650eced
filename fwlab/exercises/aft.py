"""Two exercises: one stable row of AFT, and a stable running mean."""

from typing import Any

import torch
from torch import Generator, Tensor

from fwlab.exercises.checker import (
    CUT,
    Answer,
    Exercise,
    Wrong,
    ask,
    compare,
    compare_gradients,
)
from fwlab.ops.aft.full.naive import mean_of
from fwlab.ops.aft.simple.naive import running_step


def _random(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# --- mean_of ---------------------------------------------------------


def _row(
    generator: Generator, keys: int = 5, batch: int = 2, channels: int = 3
) -> dict[str, Tensor]:
    return {
        "k": _random(generator, batch, keys, channels),
        "v": _random(generator, batch, keys, channels),
        "w": _random(generator, keys, 1),
    }


def _mean_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns a tensor of the shape of one step, [batch, channels]"""
    for keys, batch, channels in ((5, 2, 3), (1, 1, 1), (3, 4, 2)):
        row = _row(generator, keys, batch, channels)
        ask(answer, row["v"][:, 0], **row)


def _mean_of_one(answer: Answer, reference: Answer, generator: Generator) -> None:
    """with one key, returns its value"""
    row = _row(generator, keys=1)
    compare(
        ask(answer, row["v"][:, 0], **row),
        row["v"][:, 0],
        "A single weight is 1 for any exponent.",
    )


def _mean_weights_keys(answer: Answer, reference: Answer, generator: Generator) -> None:
    """without biases, weights by the softmax of the keys over time"""
    row = _row(generator)
    row["w"] = torch.zeros_like(row["w"])
    expected = (torch.softmax(row["k"], 1) * row["v"]).sum(1)
    compare(
        ask(answer, expected, **row),
        expected,
        "Each channel has its own weights, which sum to one over the keys "
        "(dimension 1 of k).",
    )


def _mean_weights_biases(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """adds the bias of its position to each key"""
    row = _row(generator)
    compare(
        ask(answer, row["v"][:, 0], **row),
        reference(**row),
        "Eq. 2: the exponent is K + w in the denominator, too.",
    )


def _mean_of_large_keys(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """does not overflow or underflow for large keys"""
    for shift in (1000.0, -1000.0):
        row = _row(generator)
        expected = reference(**row)
        compare(
            ask(answer, expected, **{**row, "k": row["k"] + shift}),
            expected,
            f"{shift:+g} was added to all keys, which leaves the mean unchanged. Do you "
            "subtract the maximum exponent?",
        )


def _mean_keeps_channels(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """keeps channels and sequences of different magnitude apart"""
    row = _row(generator)
    expected = reference(**row)
    far = torch.tensor([[0.0, 2000.0, -2000.0], [900.0, -900.0, 0.0]]).double()
    compare(
        ask(answer, expected, **{**row, "k": row["k"] + far[:, None]}),
        expected,
        "The keys of one channel were 2000 larger than those of another. Does each "
        "channel of each sequence have its own maximum?",
    )


def _mean_takes_one_maximum(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """subtracts the maximum of k + w, not one maximum of each"""
    row = _row(generator, keys=2)
    row["k"] = torch.tensor([-1000.0, 0.0]).double()[None, :, None].repeat(2, 1, 3)
    row["w"] = torch.tensor([[0.0], [-1000.0]]).double()
    compare(
        ask(answer, row["v"][:, 0], **row),
        row["v"].mean(1),
        "k was (-1000, 0) and w was (0, -1000): both exponents are -1000, and the "
        "result is the plain mean. If you subtract max(k) and max(w) separately, "
        "both terms become 0.",
    )


def _mean_of_nothing(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns 0 where no key is visible, with a gradient of 0"""
    row = _row(generator)
    row["k"][0] = -torch.inf
    expected = reference(**row)
    because = "All keys of the first sequence were -inf, which means masked: 0/0."
    compare(ask(answer, expected, **row), expected, because)
    because = "A NaN that you replace only afterwards comes back in the backward pass."
    compare_gradients(answer, reference, generator, because, **row)


# --- running_step ----------------------------------------------------


def _ask_step(answer: Answer, **given: Tensor) -> tuple[Tensor, Tensor]:
    """Like `ask`, for an answer that is a pair of tensors."""
    like = torch.stack([given["log_sum"], given["mean"]])
    complaint = ""

    def stacked(*arguments: Tensor) -> Any:
        nonlocal complaint
        pair = answer(*arguments)
        complaint = "" if pair is None else _no_pair(pair, list(like.shape[1:]))
        return like if complaint else pair and torch.stack(list(pair))

    log_sum, mean = ask(stacked, like, **given)
    if complaint:
        raise Wrong(complaint)
    return log_sum, mean


def _no_pair(pair: Any, shape: list[int]) -> str:
    """What is wrong with a result that should be (log_sum, mean)."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        kind = type(pair).__name__
        return f"Expected a pair, (log_sum, mean), got a {kind}."
    for name, part in zip(("log_sum", "mean"), pair, strict=True):
        if not isinstance(part, Tensor):
            return f"Expected {name} to be a tensor, got a {type(part).__name__}."
        if list(part.shape) != shape:
            return f"Expected {name} of shape {shape}, got {list(part.shape)}."
    return ""


def _step(generator: Generator, *shape: int) -> dict[str, Tensor]:
    names = ("log_sum", "mean", "k", "v")
    return {name: _random(generator, *(shape or (2, 3))) for name in names}


def _step_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns a tensor of the shape of log_sum, and another of the shape of mean"""
    for shape in ((2, 3), (1, 1), (4, 2)):
        _ask_step(answer, **_step(generator, *shape))


def _step_counts(answer: Answer, reference: Answer, generator: Generator) -> None:
    """adds up exponentials: the same key twice adds log 2"""
    given = _step(generator)
    given["k"] = given["log_sum"].clone()
    log_sum, mean = _ask_step(answer, **given)
    compare(log_sum, given["log_sum"] + torch.log(torch.tensor(2.0).double()))
    compare(
        mean,
        (given["mean"] + given["v"]) / 2,
        "The new key has the same weight as all keys before, so the mean moves halfway "
        "to the new value.",
    )


def _step_is_a_softmax(answer: Answer, reference: Answer, generator: Generator) -> None:
    """step by step, gives the softmax mean of all keys"""
    k, v = _random(generator, 6, 2, 3), _random(generator, 6, 2, 3)
    log_sum, mean = k[0], v[0]
    for k_t, v_t in zip(k[1:], v[1:], strict=True):
        log_sum, mean = _ask_step(answer, log_sum=log_sum, mean=mean, k=k_t, v=v_t)
    compare(log_sum, torch.logsumexp(k, 0), "This is log_sum after 6 keys.")
    compare(mean, (torch.softmax(k, 0) * v).sum(0), "This is the mean after 6 keys.")


def _step_is_stable(answer: Answer, reference: Answer, generator: Generator) -> None:
    """does not overflow or underflow, for keys of either sign"""
    for shift in (1000.0, -1000.0):
        given = _step(generator)
        expected = reference(*given.values())
        far = {n: x + shift if n in ("log_sum", "k") else x for n, x in given.items()}
        log_sum, mean = _ask_step(answer, **far)
        because = f"{shift:+g} was added to log_sum and k."
        compare(log_sum - shift, expected[0], because)
        compare(mean, expected[1], because)


def _step_keeps_or_forgets(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """lets a far larger key take over, and ignores a far smaller one"""
    for shift in (2000.0, -2000.0):
        given = _step(generator)
        given["k"] = given["k"] + shift
        log_sum, mean = _ask_step(answer, **given)
        winner = ("k", "v") if shift > 0 else ("log_sum", "mean")
        because = f"The new key was about {shift:+g} from the old log_sum."
        compare(log_sum, given[winner[0]], because)
        compare(mean, given[winner[1]], because)


def _step_from_nothing(answer: Answer, reference: Answer, generator: Generator) -> None:
    """starts from nothing, (-inf, 0)"""
    given = _step(generator)
    given["log_sum"] = torch.full_like(given["k"], -torch.inf)
    given["mean"] = torch.zeros_like(given["v"])
    log_sum, mean = _ask_step(answer, **given)
    because = "log_sum was -inf: there was no key before, so only the new one counts."
    compare(log_sum, given["k"], because)
    compare(mean, given["v"], because)


def _step_skips_masked(answer: Answer, reference: Answer, generator: Generator) -> None:
    """changes nothing for a key of -inf, even if there was no key before"""
    given = _step(generator)
    given["k"] = torch.full_like(given["k"], -torch.inf)
    log_sum, mean = _ask_step(answer, **given)
    compare(log_sum, given["log_sum"], "k was -inf: a masked step.")
    compare(mean, given["mean"], "k was -inf: a masked step.")
    given["log_sum"], given["mean"] = given["k"].clone(), torch.zeros_like(given["v"])
    log_sum, mean = _ask_step(answer, **given)
    compare(mean, given["mean"], "log_sum and k were both -inf: is there inf - inf?")
    if not (log_sum == -torch.inf).all():
        raise Wrong(
            "log_sum and k were both -inf: expected log_sum to stay -inf, got "
            f"{log_sum.flatten()[0]:.4g}."
        )


def _step_has_gradient(answer: Answer, reference: Answer, generator: Generator) -> None:
    """lets gradients through to log_sum, mean, k and v"""

    def stacked(step: Answer) -> Answer:
        return lambda *given: torch.stack(list(step(*given)))

    given = _step(generator)
    compare_gradients(stacked(answer), stacked(reference), generator, CUT, **given)


EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise
    for exercise in (
        Exercise(
            "mean_of",
            (mean_of,),
            (
                _mean_has_shape,
                _mean_of_one,
                _mean_weights_keys,
                _mean_weights_biases,
                _mean_of_large_keys,
                _mean_keeps_channels,
                _mean_takes_one_maximum,
                _mean_of_nothing,
            ),
            (
                "The quotient of Eq. 2 is a softmax of K + w over the keys, applied "
                "to the values: Eq. 3.",
                "torch.softmax subtracts the maximum for you, channel by channel. "
                "Apply it over dimension 1, the keys.",
                "A softmax over nothing but -inf is NaN. Find those rows; with "
                "torch.where, replace their exponents by 0 before the softmax, "
                "and their mean by 0 after it.",
            ),
        ),
        Exercise(
            "running_step",
            (running_step,),  # type: ignore[arg-type]
            (
                _step_has_shape,
                _step_counts,
                _step_is_a_softmax,
                _step_is_stable,
                _step_keeps_or_forgets,
                _step_from_nothing,
                _step_skips_masked,
                _step_has_gradient,
            ),
            (
                "The old sum is exp(log_sum), the old weighted sum exp(log_sum) mean. "
                "Add exp(k) and exp(k) v, divide, and take the logarithm.",
                "Never form exp(log_sum) or exp(k): subtract the larger of the two "
                "from both first, and add it to the logarithm at the end.",
                "Where both are -inf, subtract 0 instead; the sum is then 0, and "
                "torch.where must replace it before the division.",
            ),
        ),
    )
}
