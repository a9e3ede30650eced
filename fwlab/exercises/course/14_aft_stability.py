"""Stability of AFT."""

import torch
from torch import Tensor

from fwlab.exercises.answers import (
    Answer,
    Wrong,
    ask,
    compare,
    compare_gradients,
    normal,
)
from fwlab.exercises.notation import exercise, started

# --- break_it --------------------------------------------------------
#
# Each trick computes the means of causal AFT for one channel. It takes k and v `[time]`
# and w `[time, time]`, and returns the mean of each row.


def no_maximum(k: Tensor, v: Tensor, w: Tensor, epsilon: float = 0.0) -> Tensor:
    """Eq. 2 as it stands."""
    e = (k.exp() * w.exp()).tril()
    return (e @ v) / (e.sum(1) + epsilon)


def plus_epsilon(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Add a small number to the denominator."""
    return no_maximum(k, v, w, epsilon=1e-6)


def clamped_keys(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Let no key be large."""
    return no_maximum(k.clamp(-60, 30), v, w)


def maximum_over_time(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Subtract the largest key of all steps, and the largest bias that each row sees."""
    return no_maximum(k - k.max(), v, w - seen(w).amax(1, True))


def running_maximum(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Subtract the largest key that each row sees, and its largest bias."""
    return no_maximum(k - k.cummax(0)[0][:, None], v, w - seen(w).amax(1, True))


def tile_maximum(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Subtract the largest k + w of each row, with keys up to the end of its tile."""
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
    """Return the largest error of a row in float32; infinite if a row is not finite."""
    k, v, w = (x.detach().float() for x in (k, v, w))
    exact = seen(k.double() + w.double()).softmax(1) @ v.double()
    error = (trick(k, v, w).double() - exact).abs().max().item()
    return error if error == error else float("inf")


def _all_of(answer):
    like = {"k": torch.zeros(8), "v": torch.zeros(8), "w": torch.zeros(8, 8)}
    like = {name: x.double() for name, x in like.items()}
    return {trick: ask(answer, like, trick=trick) for trick in TRICKS}


def _returns_inputs(answer, reference, generator):
    _all_of(answer)


def _are_finite(answer, reference, generator):
    for trick, inputs in _all_of(answer).items():
        for name, x in zip("kvw", inputs, strict=True):
            if not x.float().isfinite().all():
                raise Wrong(
                    f"For {trick!r}, {name} is not finite in float32. NaN out of NaN "
                    "is no find."
                )
        if inputs[1].abs().max() > 1:
            raise Wrong(f"For {trick!r}, a value is outside of [-1, 1].")


def _breaks(trick):
    def holds(answer, reference, generator):
        error = error_of(TRICKS[trick], *_all_of(answer)[trick])
        if error <= 0.1:
            raise Wrong(
                f"For these inputs, {trick!r} is right in float32: its largest error "
                f"is {error:.1g}. An error above 0.1 counts, and so does NaN."
            )

    return holds


def _are_small(answer, reference, generator):
    for trick, (k, _, w) in _all_of(answer).items():
        size = max(k.abs().max(), w.abs().max())
        if size > 60:
            raise Wrong(
                f"For {trick!r}, a key or bias has the size {size:.4g}. 60 is enough: "
                "keys and biases can work together, and one can be positive where the "
                "other is negative."
            )


@exercise(difficulty=4, importance=4, minutes=20)
def break_it(trick):
    """
    **Break it.** `trick` is the name of one of the six tricks. Return keys `k` `[8]`,
    values `v` `[8]` and biases `w` `[8, 8]`, all float64 and finite, for which it fails
    in float32: a result is NaN or infinite, or is off by more than 0.1. Values are from
    -1 to 1. Keep the largest size among keys and biases small: 60 is enough for all
    six, and less for some.

    ✓ returns k [8], v [8] and w [8, 8] for each trick
        _returns_inputs
    ✓ returns finite numbers, and values from -1 to 1
        _are_finite
    ✓ breaks 'no maximum'
        _breaks("no maximum")
    ✓ breaks 'plus epsilon'
        _breaks("plus epsilon")
    ✓ breaks 'clamped keys'
        _breaks("clamped keys")
    ✓ breaks 'maximum over time'
        _breaks("maximum over time")
    ✓ breaks 'running maximum'
        _breaks("running maximum")
    ✓ breaks 'tile maximum'
        _breaks("tile maximum")
    ✓ needs no key or bias beyond 60
        _are_small
    ? Take one trick at a time, and ask what it subtracts. From which row's point of
      view is that the wrong number?
    ? exp(x) is infinite above 88.7 and 0 below -104. With keys and biases of size a, k
      + w reaches 2 a; relative to what is subtracted, some tricks reach 4 a.
    ? Sizes that are enough: no maximum 44 (keys and biases), epsilon 6, clamp 31 (two
      keys above 30), over time and running 52, tile 26.
    """
    k, w = torch.zeros(8).double(), torch.zeros(8, 8).double()
    v = torch.tensor([1.0, -1]).double().repeat(4)
    if trick == "no maximum":  # 8 e^88 is infinite
        k, w = k + 44, w + 44
    elif trick == "plus epsilon":  # e^-12 is about as small as 1e-6
        k, w = k - 6, w - 6
    elif trick == "clamped keys":  # both count as 30
        k[0], k[1] = 30, 31
    elif trick == "maximum over time":  # e^-104 is 0
        k[:7], k[7] = -52, 52
    elif trick == "running maximum":  # row 1: k + w is 0 twice
        k[0], k[1], w[1, 0], w[1, 1] = -52, 52, 52, -52
    else:  # row 0 has the exponent -52, and its tile 52
        k[:1], k[1:], w[:, :1], w[:, 1:] = -26, 26, -26, 26
    return k, v, w


# --- mean_of ---------------------------------------------------------


def _row(generator, keys=5, batch=2, channels=3):
    return {
        "k": normal(generator, batch, keys, channels),
        "v": normal(generator, batch, keys, channels),
        "w": normal(generator, keys, 1),
    }


def _shifted(inputs, shift, *names):
    return inputs | {name: inputs[name] + shift for name in names}


#: What is added to the keys of each channel of each sequence.
FAR = torch.tensor([[0.0, 2000.0, -2000.0], [900.0, -900.0, 0.0]])


def _mean_of_nothing(answer, reference, generator):
    row = _row(generator)
    row["k"][0, :, 0] = -torch.inf
    row["k"][1, ::2, 1] = -torch.inf
    expected = reference(**row)
    because = "In one channel all keys were -inf, which means masked: 0 / 0."
    compare(ask(answer, expected, **row), expected, because)
    because = "A NaN that you replace only afterwards comes back in the backward pass."
    compare_gradients(answer, reference, generator, because, **row)


@exercise(_row, difficulty=4, importance=4, minutes=11)
def mean_of(k, v, w):
    r"""
    **One row that does not break** (Eq. 2 without its gate). Return the mean of the
    values `v` with weights $\exp(K + w)$, for `k`, `v` `[batch, keys, channels]` and
    `w` `[keys, 1]`. Any input with finite $K + w$. A key of $-\infty$ is not seen, and
    a row that sees nothing gives 0.

    ✓ returns a tensor of the shape of one step, [batch, channels]
        shape((5, 2, 3), (1, 1, 1), (3, 4, 2))
    ✓ with one key, returns its value
        agrees(1)
        == v[:, 0]
    ! A single weight is 1 for any exponent.
    ✗ This is a softmax over channels. The weights of a channel sum to one over the
      keys: dimension 1 of k.
        exponent), 1) -> exponent), -1)
    ✗ This has exp(w) only above the fraction bar; it belongs below, too.
        (torch.softmax(k, 1) * w.exp() * v).sum(1)
    ✓ without biases, weights by the softmax of the keys over time
        agrees(w=torch.zeros_like)
        == (torch.softmax(k, 1) * v).sum(1)
    ! Each channel has its own weights, which sum to one over the keys (dimension 1 of
      k).
    ✗ This is the plain mean of the values: keys and biases do not count.
        v.mean(1)
    ✓ adds the bias of its position to each key
        agrees()
    ! Eq. 2: the exponent is K + w in the denominator, too.
    ✗ This leaves out the biases w.
        w=0 * w
    ✓ does not overflow or underflow for large keys
        agrees(1000.0, -1000.0, draw=lambda g, shift: _shifted(_row(g), shift, "k"))
        == (torch.softmax(k - k.mean() + w, 1) * v).sum(1)
    ! {shift:+g} was added to all keys, which leaves the mean unchanged. Do you subtract
      the maximum exponent?
    ✗ This is Eq. 2 to the letter: exp of a large exponent overflows.
        ((e := (k + w).exp()) * v).sum(1) / e.sum(1)
    ✓ keeps channels and sequences of different magnitude apart
        agrees(k=lambda k: k + FAR[:, None])
    ! The keys of one channel were 2000 larger than those of another. Does each channel
      of each sequence have its own maximum?
    ✗ This subtracts one maximum for everything. Each channel of each sequence needs its
      own.
        ((e := (k + w - (k + w).max()).exp()) * v).sum(1) / e.sum(1)
    ✓ subtracts the maximum of k + w, not one maximum of each
        agrees(
            2,
            k=lambda k: 0 * k + torch.tensor([[-1000.0], [0.0]]),
            w=lambda w: 0 * w + torch.tensor([[0.0], [-1000.0]]),
        )
        == v.mean(1)
    ! k was (-1000, 0) and w was (0, -1000): both exponents are -1000, and the result is
      the plain mean. If you subtract max(k) and max(w) separately, both terms become 0.
    ✗ This subtracts the maximum of k and that of w separately.
        ((e := (k - k.amax(1, True) + w - w.amax(0)).exp()) * v).sum(1) / e.sum(1)
    ✓ leaves out keys of -inf, however small the others are
        agrees(
            2,
            k=lambda k: 0 * k + torch.tensor([[-torch.inf], [-1e30]]),
            w=torch.zeros_like,
        )
        == v[:, 1]
    ! The first key was -inf, the second -1e30: only the second value counts. Is -inf
      replaced by a finite number?
    ✓ returns 0 where no key is visible, with a gradient of 0
        _mean_of_nothing
    ✗ A softmax over nothing but -inf is NaN.
        (torch.softmax(k + w, 1) * v).sum(1)
    ? The quotient of Eq. 2 is a softmax of K + w over the keys, applied to the values:
      Eq. 3.
    ? torch.softmax subtracts the maximum for you, channel by channel. Apply it over
      dimension 1, the keys.
    ? A softmax over nothing but -inf is NaN. Find those rows; with torch.where, replace
      their exponents by 0 before the softmax, and their mean by 0 after it.
    """
    exponent = k + w
    nothing = (exponent == -torch.inf).all(1, keepdim=True)
    weights = torch.softmax(torch.where(nothing, 0, exponent), 1)
    return torch.where(nothing[:, 0], 0, (weights * v).sum(1))  # Eq. 2


# --- running_step ----------------------------------------------------


PAIR = ("log_sum", "mean")


def _ask_step(answer, **inputs):
    pair: tuple[Tensor, Tensor] = ask(answer, {n: inputs[n] for n in PAIR}, **inputs)
    return pair


def _step(generator, *size):
    return {n: normal(generator, *(size or (2, 3))) for n in (*PAIR, "k", "v")}


def _masked_step(generator, masked):
    """Channels 0 and 2 are masked in these sequences; the first sequence had no key
    before.
    """
    inputs = _step(generator, 2, 4)
    inputs["k"][masked, ::2] = -torch.inf
    inputs["log_sum"][0], inputs["mean"][0] = -torch.inf, 0
    return inputs


def _step_counts(answer, reference, generator):
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


def _step_is_a_softmax(answer, reference, generator):
    k, v = normal(generator, 6, 2, 3), normal(generator, 6, 2, 3)
    log_sum, mean = k[0], v[0]
    for k_t, v_t in zip(k[1:], v[1:], strict=True):
        log_sum, mean = _ask_step(answer, log_sum=log_sum, mean=mean, k=k_t, v=v_t)
    compare(log_sum, torch.logsumexp(k, 0), "This is log_sum after 6 keys.")
    compare(mean, (torch.softmax(k, 0) * v).sum(0), "This is the mean after 6 keys.")


def _step_skips_masked(answer, reference, generator):
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


def _gradients_of_nothing(answer, reference, generator):
    """Check that a gradient is finite where both are -inf: 0, or 1 for the mean."""
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


@exercise(_step, difficulty=4, importance=4, minutes=17, returns=PAIR)
def running_step(log_sum, mean, k, v):
    r"""
    **The running log-sum-exp** (n1). Take one more key and value into `(log_sum, mean)`
    and return both, all of one shape. It starts from $(-\infty, 0)$, and a key of
    $-\infty$ changes nothing.

    ✓ returns a tensor of the shape of log_sum, and another of the shape of mean
        shape((2, 3), (1, 1), (4, 2))
    ✓ adds up exponentials: the same key twice adds log 2
        _step_counts
    ✗ This adds logarithms, which multiplies: log_sum is the logarithm of a sum of
      exponentials.
        log_sum + k, mean + v
    ✗ This adds exp(k) v to the mean without dividing by the sum.
        return log_sum, (old * mean + new * v) / total -> return log_sum, mean + k.exp() * v
    ✓ step by step, gives the softmax mean of all keys
        _step_is_a_softmax
    ✗ Here the mean always moves halfway to v. How far depends on the weight of the new
      key among all keys.
        (old * mean + new * v) / total -> (mean + v) / 2
    ✓ does not overflow or underflow, for keys of either sign
        agrees(
            1000.0,
            -1000.0,
            draw=lambda g, shift: _shifted(_step(g), shift, "log_sum", "k"),
        )
    ! {shift:+g} was added to log_sum and k.
    ✗ This forms exp(log_sum) and exp(k), which overflow or vanish.
        torch.maximum(log_sum, k).detach() -> 0 * k
    ✓ lets a far larger key take over, and ignores a far smaller one
        agrees(2000.0, -2000.0, draw=lambda g, shift: _shifted(_step(g), shift, "k"))
        == (k, v) if k.mean() > 0 else (log_sum, mean)
    ! The new key was about {shift:+g} from the old log_sum.
    ✗ This divides by the old sum: exp(k - log_sum) overflows if the new key is far
      larger. Subtract the larger of the two.
        torch.maximum(log_sum, k).detach() -> log_sum
    ✓ starts from nothing, (-inf, 0)
        agrees(
            0.0,
            -1e30,
            draw=lambda g, shift: _shifted(_step(g), shift, "k"),
            log_sum=lambda x: torch.full_like(x, -torch.inf),
            mean=torch.zeros_like,
        )
        == (k, v)
    ! log_sum was -inf: there was no key before, so only the new one counts.
    ✓ changes nothing where the key is -inf, even if there was no key before
        _step_skips_masked
    ✗ This is right for finite numbers; -inf - -inf is NaN.
        (t := torch.logaddexp(log_sum, k)), (log_sum - t).exp() * mean + (k - t).exp() * v
    ✗ One masked channel stops all channels here. Each channel has a mask of its own.
        (log_sum, mean) if (k == -torch.inf).any() else running_step(log_sum, mean, k, v)
    ✓ lets gradients through to log_sum, mean, k and v
        gradient()
    ✓ has gradients without NaN where log_sum or the key is -inf
        gradient((slice(1, None),), draw=_masked_step, of=lambda y, *_: y[1])
    ! A NaN that you replace only afterwards comes back in the backward pass.
    ✓ and none where both are -inf
        _gradients_of_nothing
    ? The old sum is exp(log_sum), the old weighted sum exp(log_sum) mean. Add exp(k)
      and exp(k) v, divide, and take the logarithm.
    ? Never form exp(log_sum) or exp(k): subtract the larger of the two from both first,
      and add it to the logarithm at the end.
    ? Where both are -inf, subtract 0 instead; the sum is then 0, and torch.where must
      replace it before the division.
    """
    top = torch.maximum(log_sum, k).detach()
    top = torch.where(top == -torch.inf, 0, top)  # no inf - inf
    old, new = (log_sum - top).exp(), (k - top).exp()
    nothing = old + new == 0
    total = torch.where(nothing, 1, old + new)
    log_sum = torch.where(nothing, -torch.inf, top + total.log())
    return log_sum, (old * mean + new * v) / total


# --- stream_mean -----------------------------------------------------


def _stream(generator, time=6, channels=3, shift=0.0):
    k = normal(generator, time, channels) + shift
    return {"k": k, "v": normal(generator, time, channels)}


def _growing(generator, by=1.0, time=6):
    """Keys in order: each is larger than the one before."""
    inputs = _stream(generator, time)
    steps = by * torch.arange(time).double()
    return inputs | {"k": steps[:, None].expand_as(inputs["v"]).clone()}


START = """\
def stream_mean(k, v):
    top, above, below = 0 * k[0], 0, 0
    y = []
    for k_t, v_t in zip(k, v):
        new_top = torch.maximum(top, k_t)
        above = above * (top - new_top).exp() + (k_t - new_top).exp() * v_t
        below = below + (k_t - new_top).exp()
        top = new_top
        y.append(above / below)
    return torch.stack(y)"""


@exercise(_stream, difficulty=3, importance=4, minutes=10, start=START)
def stream_mean(k, v):
    """
    **A sick stream.** For finite keys `k` and values `v` `[time, channels]`, return for
    each step the mean of the values so far with weights $e^K$, `[time, channels]`. It
    carries a running maximum, and two sums in units of it.

    ✓ returns a mean for each step
        shape((6, 3), (1, 1))
    ✓ is the plain mean so far if all keys are equal, of any size
        agrees(
            3.0,
            0.0,
            800.0,
            draw=lambda g, key: _stream(g) | {"k": torch.full((6, 3), key).double()},
        )
        == v.cumsum(0) / torch.arange(1, len(v) + 1)[:, None]
    ! All keys were {key:g}.
    ✗ Without a maximum, exp(800) overflows.
        ((e := k.exp()) * v).cumsum(0) / e.cumsum(0)
    ✗ The values are summed up, and never divided by the weights.
        stream_mean(k, v) * (k - k.cummax(0)[0]).exp().cumsum(0)
    ✓ keeps the weights of old keys when a larger one comes
        agrees(1.0, 0.1, 2.0, draw=_growing)
        == (k.exp() * v).cumsum(0) / k.exp().cumsum(0)
    ! Each key was {by:g} larger than the one before, so the maximum changed at every
      step.
    ✗ Two bugs are left. Look at keys that grow, then at keys that are all -800.
        start:
    ✗ The maximum starts right, but the denominator stays in units of the old one.
        below * old + new -> below + new
    ✗ This forgets: when a larger key comes, the old sums are dropped.
        torch.where(k > torch.cat([k[:1], k.cummax(0)[0][:-1]]), v, stream_mean(k, v))
    ✓ takes keys that are all very negative
        agrees(-800.0, -1e5, draw=lambda g, key: _stream(g, shift=key))
    ! All keys were around {key:g}. What is the maximum of no keys?
    ✗ The maximum starts at 0, as if there were a key 0: smaller ones vanish beside it.
        -torch.inf) -> 0.0)
    ✗ The maximum starts at a finite number. No key is -inf.
        -torch.inf) -> -60.0)
    ✓ is not disturbed by a far larger key that comes later
        agrees(k=lambda k: torch.cat([k[:-1], k[-1:] + 2000]))
    ! The last key was around 2000.
    ✗ One maximum for all steps lets the future in: earlier keys vanish beside a later
      one.
        ((e := (k - k.amax(0)).exp()) * v).cumsum(0) / e.cumsum(0)
    ✓ lets gradients through to k and v
        gradient()
    ? Give it keys 0, 1, 2, 3. After which step is it wrong, and what did that step do
      to the sums?
    ? Both sums are in units of exp(top). When top changes, both have to be converted.
      And which top is right before any key has come?
    ? below = below * (top - new_top).exp() + ..., and top starts as
      torch.full_like(k[0], -torch.inf).
    """
    top = torch.full_like(k[0], -torch.inf)  # of no keys
    above, below, y = 0, 0, []
    for k_t, v_t in zip(k, v, strict=True):
        new_top = torch.maximum(top, k_t)
        old, new = (top - new_top).exp(), (k_t - new_top).exp()
        above, below, top = above * old + new * v_t, below * old + new, new_top
        y.append(above / below)
    return torch.stack(y)


#: The curves that the hunt starts from.
STREAMS = {"healthy": stream_mean, "this one": started("stream_mean")}
