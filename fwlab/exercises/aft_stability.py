"""AFT that does not overflow, and inputs that break code which does."""

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
from fwlab.exercises.solutions import break_it
from fwlab.ops.aft.full.naive import mean_of
from fwlab.ops.aft.simple.naive import running_step

# --- break_it --------------------------------------------------------
#
# Each trick computes the means of causal AFT for one channel. It takes k and v `[time]`
# and w `[time, time]`, and returns the mean of each row.


def no_maximum(k: Tensor, v: Tensor, w: Tensor, epsilon: float = 0.0) -> Tensor:
    """Eq. 2 as it stands."""
    e = (k.exp() * w.exp()).tril()
    return (e @ v) / (e.sum(1) + epsilon)


def plus_epsilon(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """The same with a small number below the bar."""
    return no_maximum(k, v, w, epsilon=1e-6)


def clamped_keys(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """No key may be large."""
    return no_maximum(k.clamp(-60, 30), v, w)


def maximum_over_time(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """The largest key of all steps, and the largest bias that each row sees."""
    return no_maximum(k - k.max(), v, w - seen(w).amax(1, True))


def running_maximum(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """The largest key that each row sees, and its largest bias."""
    return no_maximum(k - k.cummax(0)[0][:, None], v, w - seen(w).amax(1, True))


def tile_maximum(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """The largest k + w of each row, with all keys up to the end of its tile of 4."""
    tile = torch.arange(len(k)) // 4
    scores = k + w
    top = seen(scores, tile[:, None] >= tile).amax(1, True)
    return no_maximum(0 * k, v, scores - top)


def seen(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """-inf in place of what a row does not see: by default, later keys."""
    mask = torch.ones_like(x).tril() > 0 if mask is None else mask
    return x.masked_fill(~mask, -torch.inf)


#: Ways to compute AFT, by name.
TRICKS = {
    f.__name__.replace("_", " "): f
    for f in (
        no_maximum,
        plus_epsilon,
        clamped_keys,
        maximum_over_time,
        running_maximum,
        tile_maximum,
    )
}


def error_of(trick: Answer, k: Tensor, v: Tensor, w: Tensor) -> float:
    """The largest error of a row in float32; infinite if a row is not finite."""
    k, v, w = (x.detach().float() for x in (k, v, w))
    exact = seen(k.double() + w.double()).softmax(1) @ v.double()
    error = (trick(k, v, w).double() - exact).abs().max().item()
    return error if error == error else float("inf")


def _all_of(answer: Answer) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    like = {"k": torch.zeros(8), "v": torch.zeros(8), "w": torch.zeros(8, 8)}
    like = {name: x.double() for name, x in like.items()}
    return {trick: ask(answer, like, trick=trick) for trick in TRICKS}


def _returns_inputs(answer: Answer, reference: Answer, generator: Generator) -> None:
    _all_of(answer)


def _are_finite(answer: Answer, reference: Answer, generator: Generator) -> None:
    for trick, inputs in _all_of(answer).items():
        for name, x in zip("kvw", inputs, strict=True):
            if not x.float().isfinite().all():
                raise Wrong(
                    f"For {trick!r}, {name} is not finite in float32. NaN out of NaN "
                    "is no find."
                )
        if inputs[1].abs().max() > 1:
            raise Wrong(f"For {trick!r}, a value is outside of [-1, 1].")


def _breaks(trick: str) -> Property:
    def holds(answer: Answer, reference: Answer, generator: Generator) -> None:
        error = error_of(TRICKS[trick], *_all_of(answer)[trick])
        if error <= 0.1:
            raise Wrong(
                f"For these inputs, {trick!r} is right in float32: its largest error "
                f"is {error:.1g}. An error above 0.1 counts, and so does NaN."
            )

    return Property(f"breaks {trick!r}", holds)


def _are_small(answer: Answer, reference: Answer, generator: Generator) -> None:
    for trick, (k, _, w) in _all_of(answer).items():
        size = max(k.abs().max(), w.abs().max())
        if size > 60:
            raise Wrong(
                f"For {trick!r}, a key or bias has the size {size:.4g}. 60 is enough: "
                "keys and biases can work together, and one can be positive where the "
                "other is negative."
            )


BREAK_IT = Exercise(
    name="break_it",
    notebook="11_aft_stability",
    difficulty=4,
    importance=4,
    minutes=20,
    task="**Break it.** `trick` is the name of one of the six tricks. Return keys `k` "
    "`[8]`, values `v` `[8]` and biases `w` `[8, 8]`, all float64 and finite, for which "
    "it fails in float32: a result is NaN or infinite, or is off by more than 0.1. "
    "Values are from -1 to 1. Keep the largest size among keys and biases small: 60 is "
    "enough for all six, and less for some.",
    reference=break_it,
    properties=(
        Property("returns k [8], v [8] and w [8, 8] for each trick", _returns_inputs),
        Property("returns finite numbers, and values from -1 to 1", _are_finite),
        *map(_breaks, TRICKS),
        Property("needs no key or bias beyond 60", _are_small),
    ),
    hints=(
        "Take one trick at a time, and ask what it subtracts. From which row's point "
        "of view is that the wrong number?",
        "exp(x) is infinite above 88.7 and 0 below -104. With keys and biases of size "
        "a, k + w reaches 2 a; relative to what is subtracted, some tricks reach 4 a.",
        "Sizes that are enough: no maximum 44 (keys and biases), epsilon 6, clamp 31 "
        "(two keys above 30), over time and running 52, tile 26.",
    ),
)


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


def _skip_all(
    log_sum: Tensor, mean: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    masked = (k == -torch.inf).any()
    return (log_sum, mean) if masked else running_step(log_sum, mean, k, v)


def _gradients_of_nothing(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """Where both are -inf, a gradient may be 0, or 1 for the mean: it is finite."""
    inputs = _masked_step(generator, slice(None))
    leaves = [x.requires_grad_() for x in inputs.values()]
    _, mean = _ask_step(answer, **inputs)
    found = torch.autograd.grad(mean.sum(), leaves, materialize_grads=True)
    for name, x in zip(inputs, found, strict=True):
        if not x.isfinite().all():
            raise Wrong(
                f"The gradient of {name} is NaN or infinite where log_sum and k are "
                "both -inf. What torch.where does not choose is still differentiated: "
                "replace its inputs, not its result."
            )


RUNNING_STEP = Exercise(
    name="running_step",
    notebook="11_aft_stability",
    difficulty=4,
    importance=4,
    minutes=17,
    task="**The running log-sum-exp** (n1). Take one more key and "
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
            {
                "This is right for finite numbers; -inf - -inf is NaN.": _from_infinity,
                "One masked channel stops all channels here. Each channel has a mask "
                "of its own.": _skip_all,
            },
        ),
        gradient("lets gradients through to log_sum, mean, k and v", _step),
        gradient(
            "has gradients without NaN where log_sum or the key is -inf",
            _masked_step,
            (slice(1, None),),
            of=_mean,
            because="A NaN that you replace only afterwards comes back in the backward "
            "pass.",
        ),
        Property("and none where both are -inf", _gradients_of_nothing),
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


# --- stream_mean -----------------------------------------------------


def _stream(
    generator: Generator, time: int = 6, channels: int = 3, shift: float = 0.0
) -> dict[str, Tensor]:
    k = normal(generator, time, channels) + shift
    return {"k": k, "v": normal(generator, time, channels)}


def _growing(generator: Generator, by: float = 1.0, time: int = 6) -> dict[str, Tensor]:
    """Keys in order: each is larger than the one before."""
    inputs = _stream(generator, time)
    steps = by * torch.arange(time).double()
    return inputs | {"k": steps[:, None].expand_as(inputs["v"]).clone()}


def healthy_stream(k: Tensor, v: Tensor) -> Tensor:
    """AFT-simple without its gate, with a running maximum and two sums."""
    return _streamed(k, v)


def _streamed(
    k: Tensor, v: Tensor, start: float = -torch.inf, below_too: bool = True
) -> Tensor:
    top = torch.full_like(k[0], start)
    above = below = torch.zeros_like(k[0])
    y = []
    for k_t, v_t in zip(k, v, strict=True):
        new_top = torch.maximum(top, k_t)
        shrunk, new = (top - new_top).exp(), (k_t - new_top).exp()
        above = above * shrunk + new * v_t
        below = below * (shrunk if below_too else 1) + new
        top = new_top
        y.append(above / below)
    return torch.stack(y)


def sick_stream(k: Tensor, v: Tensor) -> Tensor:
    """The code of the bug hunt, with both of its bugs."""
    return _streamed(k, v, 0.0, below_too=False)


#: The curves that the hunt starts from.
STREAMS = {"healthy": healthy_stream, "this one": sick_stream}


def _cumulative(k: Tensor, v: Tensor) -> Tensor:
    e = k.exp()
    return (e * v).cumsum(0) / e.cumsum(0)


def _forgets(k: Tensor, v: Tensor) -> Tensor:
    before = torch.cat([k[:1], k.cummax(0)[0][:-1]])
    return torch.where(k > before, v, healthy_stream(k, v))


def _mean_so_far(k: Tensor, v: Tensor) -> Tensor:
    steps = torch.arange(1, len(v) + 1, device=v.device)
    return v.cumsum(0) / steps[:, None]


STREAM_MEAN = Exercise(
    name="stream_mean",
    notebook="11_aft_stability",
    difficulty=3,
    importance=4,
    minutes=10,
    task="**A sick stream.** For finite keys `k` and values `v` `[time, channels]`, "
    r"return for each step the mean of the values so far with weights $e^K$, "
    "`[time, channels]`. It carries a running maximum, and two sums in units of it.",
    start="""\
def stream_mean(k, v):
    top, above, below = 0 * k[0], 0, 0
    y = []
    for k_t, v_t in zip(k, v):
        new_top = torch.maximum(top, k_t)
        above = above * (top - new_top).exp() + (k_t - new_top).exp() * v_t
        below = below + (k_t - new_top).exp()
        top = new_top
        y.append(above / below)
    return torch.stack(y)""",
    reference=healthy_stream,
    properties=(
        shape("returns a mean for each step", _stream, [(6, 3), (1, 1)]),
        agrees(
            "is the plain mean so far if all keys are equal, of any size",
            lambda g, key: _stream(g) | {"k": torch.full((6, 3), key).double()},
            [3.0, 0.0, 800.0],
            expected=_mean_so_far,
            because="All keys were {key:g}.",
            catches={
                "Without a maximum, exp(800) overflows.": _cumulative,
                "The values are summed up, and never divided by the "
                "weights.": lambda k, v: (
                    healthy_stream(k, v) * ((k - k.cummax(0)[0]).exp().cumsum(0))
                ),
            },
        ),
        agrees(
            "keeps the weights of old keys when a larger one comes",
            _growing,
            [1.0, 0.1, 2.0],
            expected=_cumulative,
            because="Each key was {by:g} larger than the one before, so the maximum "
            "changed at every step.",
            catches={
                "Two bugs are left. Look at keys that grow, then at keys that are all "
                "-800.": sick_stream,
                "The maximum starts right, but the sum below the bar stays in units "
                "of the old one.": lambda k, v: _streamed(k, v, below_too=False),
                "This forgets: when a larger key comes, the old sums are "
                "dropped.": _forgets,
            },
        ),
        agrees(
            "takes keys that are all very negative",
            lambda g, key: _stream(g, shift=key),
            [-800.0, -1e5],
            because="All keys were around {key:g}. What is the maximum of no keys?",
            catches={
                "The maximum starts at 0, as if there were a key 0: smaller ones "
                "vanish beside it.": lambda k, v: _streamed(k, v, 0.0),
                "The maximum starts at a finite number. No key is -inf.": lambda k, v: (
                    _streamed(k, v, -60.0)
                ),
            },
        ),
        agrees(
            "is not disturbed by a far larger key that comes later",
            _stream,
            change={"k": lambda k: torch.cat([k[:-1], k[-1:] + 2000])},
            because="The last key was around 2000.",
            catches={
                "One maximum for all steps lets the future in: earlier keys vanish "
                "beside a later one.": lambda k, v: _cumulative(k - k.amax(0), v)
            },
        ),
        gradient("lets gradients through to k and v", _stream),
    ),
    hints=(
        "Give it keys 0, 1, 2, 3. After which step is it wrong, and what did that step "
        "do to the sums?",
        "Both sums are in units of exp(top). When top changes, both have to be "
        "converted. And which top is right before any key has come?",
        "below = below * (top - new_top).exp() + ..., and top starts as "
        "torch.full_like(k[0], -torch.inf).",
    ),
    example=_stream,
)


EXERCISES = {each.name: each for each in (BREAK_IT, MEAN_OF, RUNNING_STEP, STREAM_MEAN)}
