"""Two exercises: one stable row of AFT, and a stable running mean."""

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import (
    Answer,
    Wrong,
    ask,
    compare,
    compare_gradients,
    normal,
)
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import agrees, gradient, shape
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


def _shifted(inputs: dict[str, Tensor], shift: float, *names: str) -> dict[str, Tensor]:
    return inputs | {name: inputs[name] + shift for name in names}


#: What is added to the keys of each channel of each sequence.
FAR = torch.tensor([[0.0, 2000.0, -2000.0], [900.0, -900.0, 0.0]])


def _softmax_mean(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return (torch.softmax(k + w, 1) * v).sum(1)


def _mean_of_nothing(answer: Answer, reference: Answer, generator: Generator) -> None:
    row = _row(generator)
    row["k"][0, :, 0] = -torch.inf
    row["k"][1, ::2, 1] = -torch.inf
    expected = reference(**row)
    because = "In one channel all keys were -inf, which means masked: 0 / 0."
    compare(ask(answer, expected, **row), expected, because)
    because = "A NaN that you replace only afterwards comes back in the backward pass."
    compare_gradients(answer, reference, generator, because, **row)


def _quotient(e: Tensor, v: Tensor) -> Tensor:
    return (e * v).sum(1) / e.sum(1)


MEAN_OF = Exercise(
    name="mean_of",
    notebook="11_aft_stability",
    difficulty=4,
    importance=4,
    minutes=11,
    task="**One row that does not break** (Eq. 2 without its gate). "
    r"Return the mean of the values `v` with weights $\exp(K + w)$, "
    "for `k`, `v` `[batch, keys, channels]` and `w` `[keys, 1]`. "
    r"Any input with finite $K + w$. A key of $-\infty$ is not seen, "
    "and a row that sees nothing gives 0.",
    reference=mean_of,
    properties=(
        shape(
            "returns a tensor of the shape of one step, [batch, channels]",
            _row,
            [(5, 2, 3), (1, 1, 1), (3, 4, 2)],
        ),
        agrees(
            "with one key, returns its value",
            _row,
            [1],
            expected=lambda k, v, w: v[:, 0],
            because="A single weight is 1 for any exponent.",
            catches={
                "This is a softmax over channels. The weights of a channel sum to one "
                "over the keys: dimension 1 of k.": lambda k, v, w: (
                    torch.softmax(k + w, -1) * v
                ).sum(1),
                "This has exp(w) only above the fraction bar; it "
                "belongs below, too.": lambda k, v, w: (
                    torch.softmax(k, 1) * w.exp() * v
                ).sum(1),
            },
        ),
        agrees(
            "without biases, weights by the softmax of the keys over time",
            _row,
            change={"w": torch.zeros_like},
            expected=lambda k, v, w: (torch.softmax(k, 1) * v).sum(1),
            because="Each channel has its own weights, which sum to one over the keys "
            "(dimension 1 of k).",
            catches={
                "This is the plain mean of the values: keys and biases "
                "do not count.": lambda k, v, w: v.mean(1)
            },
        ),
        agrees(
            "adds the bias of its position to each key",
            _row,
            because="Eq. 2: the exponent is K + w in the denominator, too.",
            catches={
                "This leaves out the biases w.": lambda k, v, w: _softmax_mean(
                    k, v, 0 * w
                )
            },
        ),
        agrees(
            "does not overflow or underflow for large keys",
            lambda g, shift: _shifted(_row(g), shift, "k"),
            [1000.0, -1000.0],
            expected=lambda k, v, w: _softmax_mean(k - k.mean(), v, w),
            because="{shift:+g} was added to all keys, which leaves the mean "
            "unchanged. Do you subtract the maximum exponent?",
            catches={
                "This is Eq. 2 to the letter: exp of a "
                "large exponent overflows.": lambda k, v, w: _quotient((k + w).exp(), v)
            },
        ),
        agrees(
            "keeps channels and sequences of different magnitude apart",
            _row,
            change={"k": lambda k: k + FAR[:, None]},
            because="The keys of one channel were 2000 larger than those of another. "
            "Does each channel of each sequence have its own maximum?",
            catches={
                "This subtracts one maximum for everything. Each channel of each "
                "sequence needs its own.": lambda k, v, w: _quotient(
                    (k + w - (k + w).max()).exp(), v
                )
            },
        ),
        agrees(
            "subtracts the maximum of k + w, not one maximum of each",
            _row,
            [2],
            change={
                "k": lambda k: 0 * k + torch.tensor([[-1000.0], [0.0]]),
                "w": lambda w: 0 * w + torch.tensor([[0.0], [-1000.0]]),
            },
            expected=lambda k, v, w: v.mean(1),
            because="k was (-1000, 0) and w was (0, -1000): both exponents are -1000, "
            "and the result is the plain mean. If you subtract max(k) and "
            "max(w) separately, both terms become 0.",
            catches={
                "This subtracts the maximum of k and that "
                "of w separately.": lambda k, v, w: _quotient(
                    (k - k.amax(1, True)).exp() * (w - w.amax(0)).exp(), v
                )
            },
        ),
        agrees(
            "leaves out keys of -inf, however small the others are",
            _row,
            [2],
            change={
                "k": lambda k: 0 * k + torch.tensor([[-torch.inf], [-1e30]]),
                "w": torch.zeros_like,
            },
            expected=lambda k, v, w: v[:, 1],
            because="The first key was -inf, the second -1e30: only the second value "
            "counts. Is -inf replaced by a finite number?",
        ),
        Property(
            "returns 0 where no key is visible, with a gradient of 0",
            _mean_of_nothing,
            {"A softmax over nothing but -inf is NaN.": _softmax_mean},
        ),
    ),
    hints=(
        "The quotient of Eq. 2 is a softmax of K + w over the keys, applied "
        "to the values: Eq. 3.",
        "torch.softmax subtracts the maximum for you, channel by channel. "
        "Apply it over dimension 1, the keys.",
        "A softmax over nothing but -inf is NaN. Find those rows; with "
        "torch.where, replace their exponents by 0 before the softmax, "
        "and their mean by 0 after it.",
    ),
    example=_row,
)


# --- running_step ----------------------------------------------------


PAIR = ("log_sum", "mean")


def _ask_step(answer: Answer, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    pair: tuple[Tensor, Tensor] = ask(answer, {n: inputs[n] for n in PAIR}, **inputs)
    return pair


def _step(generator: Generator, *size: int) -> dict[str, Tensor]:
    return {n: normal(generator, *(size or (2, 3))) for n in (*PAIR, "k", "v")}


def _masked_step(generator: Generator, masked: slice) -> dict[str, Tensor]:
    """Channels 0 and 2 are masked in these sequences; the first sequence had no key
    before.
    """
    inputs = _step(generator, 2, 4)
    inputs["k"][masked, ::2] = -torch.inf
    inputs["log_sum"][0], inputs["mean"][0] = -torch.inf, 0
    return inputs


def _step_counts(answer: Answer, reference: Answer, generator: Generator) -> None:
    inputs = _step(generator)
    inputs["k"] = inputs["log_sum"].clone()
    log_sum, mean = _ask_step(answer, **inputs)
    compare(log_sum, inputs["log_sum"] + torch.log(torch.tensor(2.0).double()))
    compare(
        mean,
        (inputs["mean"] + inputs["v"]) / 2,
        "The new key has the same weight as all keys before, so the mean moves halfway "
        "to the new value.",
    )


def _step_is_a_softmax(answer: Answer, reference: Answer, generator: Generator) -> None:
    k, v = normal(generator, 6, 2, 3), normal(generator, 6, 2, 3)
    log_sum, mean = k[0], v[0]
    for k_t, v_t in zip(k[1:], v[1:], strict=True):
        log_sum, mean = _ask_step(answer, log_sum=log_sum, mean=mean, k=k_t, v=v_t)
    compare(log_sum, torch.logsumexp(k, 0), "This is log_sum after 6 keys.")
    compare(mean, (torch.softmax(k, 0) * v).sum(0), "This is the mean after 6 keys.")


def _step_skips_masked(answer: Answer, reference: Answer, generator: Generator) -> None:
    for row in (0, 1):  # row 1: there was a key before
        inputs = _masked_step(generator, slice(None))
        log_sum, mean = _ask_step(answer, **inputs)
        wanted = reference(*inputs.values())
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


def _mean(result: tuple[Tensor, Tensor], *inputs: Tensor) -> Tensor:
    return result[1]


def _of_sums(
    log_sum: Tensor, mean: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    old, new = log_sum.exp(), k.exp()
    return (old + new).log(), (old * mean + new * v) / (old + new)


def _by_the_old(
    log_sum: Tensor, mean: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    new = (k - log_sum).exp()
    return log_sum + torch.log1p(new), (mean + new * v) / (1 + new)


def _from_infinity(
    log_sum: Tensor, mean: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(log_sum, k)
    return total, (log_sum - total).exp() * mean + (k - total).exp() * v


RUNNING_STEP = Exercise(
    name="running_step",
    notebook="11_aft_stability",
    difficulty=4,
    importance=4,
    minutes=17,
    task="**The running log-sum-exp** (section 4). Take one more key and "
    "value into `(log_sum, mean)` and return both, all of one "
    r"shape. It starts from $(-\infty, 0)$, and a key of $-\infty$ "
    "changes nothing.",
    reference=running_step,
    properties=(
        shape(
            "returns a tensor of the shape of log_sum, and another of the shape of "
            "mean",
            _step,
            [(2, 3), (1, 1), (4, 2)],
            names=PAIR,
        ),
        Property(
            "adds up exponentials: the same key twice adds log 2",
            _step_counts,
            {
                "This adds logarithms, which multiplies: log_sum is the logarithm of a "
                "sum of exponentials.": lambda log_sum, mean, k, v: (
                    log_sum + k,
                    mean + v,
                ),
                "This adds exp(k) v to the mean without dividing "
                "by the sum.": lambda log_sum, mean, k, v: (
                    torch.logaddexp(log_sum, k),
                    mean + k.exp() * v,
                ),
            },
        ),
        Property(
            "step by step, gives the softmax mean of all keys",
            _step_is_a_softmax,
            {
                "Here the mean always moves halfway to v. How far depends on the "
                "weight of the new key among all keys.": lambda log_sum, mean, k, v: (
                    torch.logaddexp(log_sum, k),
                    (mean + v) / 2,
                )
            },
        ),
        agrees(
            "does not overflow or underflow, for keys of either sign",
            lambda g, shift: _shifted(_step(g), shift, "log_sum", "k"),
            [1000.0, -1000.0],
            names=PAIR,
            because="{shift:+g} was added to log_sum and k.",
            catches={
                "This forms exp(log_sum) and exp(k), which "
                "overflow or vanish.": _of_sums
            },
        ),
        agrees(
            "lets a far larger key take over, and ignores a far smaller one",
            lambda g, shift: _shifted(_step(g), shift, "k"),
            [2000.0, -2000.0],
            names=PAIR,
            expected=lambda log_sum, mean, k, v: (
                (k, v) if k.mean() > 0 else (log_sum, mean)
            ),
            because="The new key was about {shift:+g} from the old log_sum.",
            catches={
                "This divides by the old sum: exp(k - log_sum) overflows if the new "
                "key is far larger. Subtract the larger of the two.": _by_the_old
            },
        ),
        agrees(
            "starts from nothing, (-inf, 0)",
            lambda g, shift: _shifted(_step(g), shift, "k"),
            [0.0, -1e30],
            change={
                "log_sum": lambda x: torch.full_like(x, -torch.inf),
                "mean": torch.zeros_like,
            },
            names=PAIR,
            expected=lambda log_sum, mean, k, v: (k, v),
            because="log_sum was -inf: there was no key before, so only the new one "
            "counts.",
        ),
        Property(
            "changes nothing where the key is -inf, even if there was no key before",
            _step_skips_masked,
            {"This is right for finite numbers; -inf - -inf is NaN.": _from_infinity},
        ),
        gradient("lets gradients through to log_sum, mean, k and v", _step),
        gradient(
            "has gradients without NaN where log_sum or the key is -inf",
            _masked_step,
            (slice(1, None),),  # where both are, the gradient does not matter
            of=_mean,
            because="A NaN that you replace only afterwards comes back in the backward "
            "pass.",
        ),
    ),
    hints=(
        "The old sum is exp(log_sum), the old weighted sum exp(log_sum) mean. "
        "Add exp(k) and exp(k) v, divide, and take the logarithm.",
        "Never form exp(log_sum) or exp(k): subtract the larger of the two "
        "from both first, and add it to the logarithm at the end.",
        "Where both are -inf, subtract 0 instead; the sum is then 0, and "
        "torch.where must replace it before the division.",
    ),
    example=_step,
)


EXERCISES = {each.name: each for each in (MEAN_OF, RUNNING_STEP)}
