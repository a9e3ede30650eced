"""Two exercises: one stable row of AFT, and a stable running mean."""

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
from fwlab.ops.aft.full.naive import mean_of
from fwlab.ops.aft.simple.naive import running_step

# --- mean_of ---------------------------------------------------------


def _row(
    generator: Generator, keys: int = 5, batch: int = 2, channels: int = 3
) -> dict[str, Tensor]:
    return {
        "k": normal(generator, batch, keys, channels),
        "v": normal(generator, batch, keys, channels),
        "w": normal(generator, keys, 1),
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


def _mean_leaves_out_masked(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """leaves out keys of -inf, however small the others are"""
    row = _row(generator, keys=2)
    row["k"] = torch.full_like(row["k"], -1e30)
    row["k"][:, 0], row["w"] = -torch.inf, torch.zeros_like(row["w"])
    compare(
        ask(answer, row["v"][:, 0], **row),
        row["v"][:, 1],
        "The first key was -inf, the second -1e30: only the second value counts. "
        "Is -inf replaced by a finite number?",
    )


def _mean_of_nothing(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns 0 where no key is visible, with a gradient of 0"""
    row = _row(generator)
    row["k"][0, :, 0] = -torch.inf
    row["k"][1, ::2, 1] = -torch.inf
    expected = reference(**row)
    because = "In one channel all keys were -inf, which means masked: 0 / 0."
    compare(ask(answer, expected, **row), expected, because)
    because = "A NaN that you replace only afterwards comes back in the backward pass."
    compare_gradients(answer, reference, generator, because, **row)


def _mean_of_channels(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """This is a softmax over channels. The weights of a channel sum to one
    over the keys: dimension 1 of k.
    """
    return (torch.softmax(k + w, -1) * v).sum(1)


def _plain_mean(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """This is the plain mean of the values: keys and biases do not count."""
    return v.mean(1)


def _no_biases(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """This leaves out the biases w."""
    return _softmax_mean(k, v, 0 * w)


def _biases_twice(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """This has exp(w) only above the fraction bar; it belongs below, too."""
    return (torch.softmax(k, 1) * w.exp() * v).sum(1)


def _no_maximum(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """This is Eq. 2 to the letter: exp of a large exponent overflows."""
    return _quotient((k + w).exp(), v)


def _one_maximum(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """This subtracts one maximum for everything. Each channel of each sequence
    needs its own.
    """
    return _quotient((k + w - (k + w).max()).exp(), v)


def _two_maxima(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """This subtracts the maximum of k and that of w separately."""
    return _quotient((k - k.amax(1, True)).exp() * (w - w.amax(0)).exp(), v)


def _softmax_mean(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """A softmax over nothing but -inf is NaN."""
    return (torch.softmax(k + w, 1) * v).sum(1)


def _quotient(e: Tensor, v: Tensor) -> Tensor:
    return (e * v).sum(1) / e.sum(1)


# --- running_step ----------------------------------------------------


def _ask_step(answer: Answer, **given: Tensor) -> tuple[Tensor, Tensor]:
    pair: tuple[Tensor, Tensor] = ask(
        answer, {"log_sum": given["log_sum"], "mean": given["mean"]}, **given
    )
    return pair


def _step(generator: Generator, *shape: int) -> dict[str, Tensor]:
    names = ("log_sum", "mean", "k", "v")
    return {name: normal(generator, *(shape or (2, 3))) for name in names}


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
    k, v = normal(generator, 6, 2, 3), normal(generator, 6, 2, 3)
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
    because = "log_sum was -inf: there was no key before, so only the new one counts."
    for shift in (0.0, -1e30):
        given = _step(generator)
        given["k"] = given["k"] + shift
        given["log_sum"] = torch.full_like(given["k"], -torch.inf)
        given["mean"] = torch.zeros_like(given["v"])
        log_sum, mean = _ask_step(answer, **given)
        compare(log_sum, given["k"], because)
        compare(mean, given["v"], because)


def _step_skips_masked(answer: Answer, reference: Answer, generator: Generator) -> None:
    """changes nothing where the key is -inf, even if there was no key before"""
    for row in (0, 1):  # row 1: there was a key before
        given = _step(generator, 2, 4)
        given["k"][:, ::2] = -torch.inf
        given["log_sum"][0], given["mean"][0] = -torch.inf, 0
        log_sum, mean = _ask_step(answer, **given)
        wanted = reference(*given.values())
        because = "Channels 0 and 2 of k were -inf: masked."
        if row == 0:
            because += " So was log_sum: is there inf - inf?"
        real = wanted[0][row] > -torch.inf
        compare(mean[row], wanted[1][row], because)
        compare(log_sum[row][real], wanted[0][row][real], because)
        if not (log_sum[row][~real] == -torch.inf).all():
            raise Wrong(
                "log_sum and k were both -inf: expected log_sum to stay -inf, got "
                f"{log_sum[row][~real][0]:.4g}."
            )


def _step_has_masked_gradient(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """has gradients without NaN where keys are -inf"""
    given = _step(generator, 2, 4)
    given["k"][:, ::2] = -torch.inf
    given["log_sum"][0], given["mean"][0] = -torch.inf, 0
    # Where both are -inf, a mean of 0 may be kept, or be made again.
    seen = (given["k"] > -torch.inf) | (given["log_sum"] > -torch.inf)

    def mean(result: tuple[Tensor, Tensor]) -> Tensor:
        return result[1][seen]

    because = "A NaN that you replace only afterwards comes back in the backward pass."
    compare_gradients(answer, reference, generator, because, mean, **given)


def _step_has_gradient(answer: Answer, reference: Answer, generator: Generator) -> None:
    """lets gradients through to log_sum, mean, k and v"""
    compare_gradients(answer, reference, generator, CUT, **_step(generator))


def _plain_sum(
    log_sum: Tensor, mean: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """This adds logarithms, which multiplies: log_sum is the logarithm of a sum
    of exponentials.
    """
    return log_sum + k, mean + v


def _halfway(
    log_sum: Tensor, mean: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Here the mean always moves halfway to v. How far depends on the weight of
    the new key among all keys.
    """
    return torch.logaddexp(log_sum, k), (mean + v) / 2


def _weighted_sum(
    log_sum: Tensor, mean: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """This adds exp(k) v to the mean without dividing by the sum."""
    return torch.logaddexp(log_sum, k), mean + k.exp() * v


def _of_sums(
    log_sum: Tensor, mean: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """This forms exp(log_sum) and exp(k), which overflow or vanish."""
    old, new = log_sum.exp(), k.exp()
    return (old + new).log(), (old * mean + new * v) / (old + new)


def _by_the_old(
    log_sum: Tensor, mean: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """This divides by the old sum: exp(k - log_sum) overflows if the new key is
    far larger. Subtract the larger of the two.
    """
    new = (k - log_sum).exp()
    return log_sum + torch.log1p(new), (mean + new * v) / (1 + new)


def _from_infinity(
    log_sum: Tensor, mean: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """This is right for finite numbers; -inf - -inf is NaN."""
    total = torch.logaddexp(log_sum, k)
    return total, (log_sum - total).exp() * mean + (k - total).exp() * v


EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise
    for exercise in (
        Exercise(
            "mean_of",
            (
                "**One row that does not break** (Eq. 2 without its gate). "
                r"Return the mean of the values `v` with weights $\exp(K + w)$, "
                "for `k`, `v` `[batch, keys, channels]` and `w` `[keys, 1]`. "
                r"Any input with finite $K + w$. A key of $-\infty$ is not seen, "
                "and a row that sees nothing gives 0."
            ),
            (mean_of,),
            (
                _mean_has_shape,
                _mean_of_one,
                _mean_weights_keys,
                _mean_weights_biases,
                _mean_of_large_keys,
                _mean_keeps_channels,
                _mean_takes_one_maximum,
                _mean_leaves_out_masked,
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
            _row,
            {
                _mean_of_channels: _mean_of_one,
                _plain_mean: _mean_weights_keys,
                _no_biases: _mean_weights_biases,
                _biases_twice: _mean_of_one,
                _no_maximum: _mean_of_large_keys,
                _one_maximum: _mean_keeps_channels,
                _two_maxima: _mean_takes_one_maximum,
                _softmax_mean: _mean_of_nothing,
            },
        ),
        Exercise(
            "running_step",
            (
                "**The running log-sum-exp** (section 4). Take one more key and "
                "value into `(log_sum, mean)` and return both, all of one "
                r"shape. It starts from $(-\infty, 0)$, and a key of $-\infty$ "
                "changes nothing."
            ),
            (running_step,),
            (
                _step_has_shape,
                _step_counts,
                _step_is_a_softmax,
                _step_is_stable,
                _step_keeps_or_forgets,
                _step_from_nothing,
                _step_skips_masked,
                _step_has_gradient,
                _step_has_masked_gradient,
            ),
            (
                "The old sum is exp(log_sum), the old weighted sum exp(log_sum) mean. "
                "Add exp(k) and exp(k) v, divide, and take the logarithm.",
                "Never form exp(log_sum) or exp(k): subtract the larger of the two "
                "from both first, and add it to the logarithm at the end.",
                "Where both are -inf, subtract 0 instead; the sum is then 0, and "
                "torch.where must replace it before the division.",
            ),
            _step,
            {
                _plain_sum: _step_counts,
                _halfway: _step_is_a_softmax,
                _weighted_sum: _step_counts,
                _of_sums: _step_is_stable,
                _by_the_old: _step_keeps_or_forgets,
                _from_infinity: _step_skips_masked,
            },
        ),
    )
}
