"""AFT as a language model: windows, biases and convolutions."""

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fwlab.data.numbers import number_words
from fwlab.exercises.asking import Answer, Wrong, ask, normal
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import agrees, exactly, gradient, shape
from fwlab.exercises.solutions import (
    frozen_kernels,
    mended_kernel,
    position_shift,
    read_bias,
)

# --- position_shift -------------------------------------------------


def _call(
    generator: Generator, past: int = 4, time: int = 6, window: int = 3
) -> dict[str, Tensor | int]:
    band = normal(generator, past + time + 2, window)
    return {"band": band, "past": past, "time": time}


def _seen(w: Tensor, band: Tensor, past: int, time: int) -> Tensor:
    """Biases of later keys do not matter."""
    return torch.where(torch.ones_like(w).tril(past).bool(), w, 0)


def _hidden_outside(band: Tensor, past: int, time: int) -> Tensor:
    inside = position_shift(torch.ones_like(band), past, time) == 1
    return torch.where(inside, position_shift(band, past, time), -torch.inf)


def _row_of_the_key(band: Tensor, past: int, time: int) -> Tensor:
    keys = torch.arange(past + time)
    back = torch.arange(past, past + time)[:, None] - keys
    inside = (back >= 0) & (back < band.shape[1])
    return torch.where(inside, band[keys, back.clamp(0, band.shape[1] - 1)], 0)


def _later(band: Tensor, past: int, time: int) -> Tensor:
    """Entry n is taken for the key n + 1 steps back."""
    return F.pad(position_shift(band, past, time)[:, 1:], (0, 1))


POSITION_SHIFT = Exercise(
    name="position_shift",
    notebook="12_aft_language",
    difficulty=2,
    importance=4,
    minutes=11,
    task="**The biases of a call.** AFT-local has read `past` characters, and now reads "
    "`time` more. Row t of `band` `[max_len, window]` belongs to position t, and its "
    "entry n to the key n steps back. Return the biases $w_{t,t'}$ of this call (Eq. "
    "4), `[time, past + time]`: a row for each new character, a column for each key so "
    "far. Outside the window the bias is 0; later keys do not matter.",
    reference=position_shift,
    properties=(
        shape(
            "returns a row for each new character, a column for each key",
            _call,
            [(0, 5), (3, 4), (6, 1)],
        ),
        agrees(
            "puts entry n of a row n columns to the left of the diagonal",
            _call,
            [(0, 5, 5)],
            of=_seen,
            because="There were no characters before, and the window held all.",
            catches={
                "The band is turned around: its entry 0 is the key of the step itself, "
                "not the one furthest back.": lambda band, past, time: position_shift(
                    band.flip(1), past, time
                ),
                "This is one step off: entry 0 is the key of the step itself.": _later,
                "This takes the row of the key. The row is that of the step that "
                "reads.": _row_of_the_key,
                "These are the last rows of the band. The band goes on after "
                "this call.": lambda band, past, time: position_shift(
                    band.roll(past + time - len(band), 0), past, time
                ),
            },
        ),
        agrees(
            "has 0 outside the window",
            _call,
            [(0, 6, 2), (0, 7, 1)],
            of=_seen,
            because="The window was {window}.",
            catches={
                "A bias of -inf hides a key. Outside the window it counts with its key "
                "alone: 0.": _hidden_outside,
            },
        ),
        agrees(
            "takes the rows of the positions of these characters",
            _call,
            [(4, 6, 3), (9, 1, 4), (1, 3, 8)],
            of=_seen,
            because="{past} characters came before, so the first row is row {past} of "
            "the band, and its own key is column {past}.",
            catches={
                "past plays no part here: rows and columns are those of a call at the "
                "beginning of the text.": lambda band, past, time: F.pad(
                    position_shift(band, 0, time), (0, past)
                ),
                "The rows are right. In row t, the key of the step itself is "
                "column past + t.": lambda band, past, time: F.pad(
                    position_shift(band[past:], 0, time), (0, past)
                ),
                "These are the rows of the first characters. Position 0 is the first "
                "character of the text, not of the call.": lambda band, past, time: (
                    position_shift(band.roll(past, 0), past, time)
                ),
            },
        ),
        gradient("lets gradients through to the band", _call, of=_seen),
    ),
    hints=(
        "The new characters have the positions past to past + time - 1. How far back "
        "is column j for each of them?",
        "back = torch.arange(past, past + time)[:, None] - torch.arange(past + time) is "
        "negative for later keys, and window or more outside the window.",
        "torch.where(inside, band[rows, back.clamp(0, window - 1)], 0), where rows is a "
        "column of positions.",
    ),
    example=_call,
    matters=_seen,
)


# --- read_bias ------------------------------------------------------


def _biases(generator: Generator, time: int = 6) -> dict[str, Tensor]:
    return {"w": normal(generator, time, time)}


def _none(generator: Generator, time: int) -> dict[str, Tensor]:
    return {"w": torch.zeros(time, time, dtype=torch.float64)}


def _raised(generator: Generator) -> dict[str, Tensor]:
    """A number for each row."""
    return {"w": normal(generator, 6, 1).expand(6, 6).clone()}


def _with_a_future(generator: Generator) -> dict[str, Tensor]:
    return {"w": normal(generator, 6, 6).triu(1)}


def _shares(w: Tensor) -> Tensor:
    """What each key gets."""
    return torch.softmax(w - torch.ones_like(w).triu(1) * 1e30, 1)


def _means(x: Tensor) -> Tensor:
    return torch.stack([x.diagonal(-n).mean() for n in range(len(x))])


def _keys(w: Tensor, first: int = 1) -> Tensor:
    return torch.arange(first, len(w) + first, dtype=w.dtype)[:, None]


def _ones(w: Tensor) -> Tensor:
    return torch.ones_like(w[0])


READ_BIAS = Exercise(
    name="read_bias",
    notebook="12_aft_language",
    difficulty=3,
    importance=4,
    minutes=13,
    task="**Read a bias.** If all keys are equal, row $t$ gives key $t'$ the share "
    "$a_{t,t'} = e^{w_{t,t'}} / \\sum_{s \\le t} e^{w_{t,s}}$; without a bias it is $1 / "
    "(t + 1)$. From `w` `[time, time]`, return `[time]`: entry $n$ is the mean of "
    "$(t + 1)\\, a_{t,t-n}$ over all rows $t$ that have a key $n$ steps back.",
    reference=read_bias,
    properties=(
        shape("returns a number for each distance", _biases, [6, 1, 9]),
        agrees(
            "returns 1 for every distance if there is no bias",
            _none,
            [1, 2, 7],
            expected=_ones,
            because="time was {time}, and distance n has time - n rows.",
            catches={
                "The share is not compared with the even one: "
                "row t has t + 1 keys.": lambda w: _means(_shares(w)),
                "This multiplies by t. Row t has t + 1 keys, since "
                "it sees its own.": lambda w: _means(_keys(w, 0) * _shares(w)),
                "This multiplies every row by the number of all keys. Row t sees only "
                "t + 1 of them.": lambda w: _means(len(w) * _shares(w)),
                "This divides by the number of all rows. Only time - n of them have a "
                "key n steps back.": lambda w: (
                    _means(_keys(w) * _shares(w)) * _keys(w)[:, 0].flip(0) / len(w)
                ),
                "The softmax goes over all keys. Row t sees those up to t.": lambda w: (
                    _means(_keys(w) * torch.softmax(w, 1))
                ),
                "This is the mean bias. A bias says little by itself: what counts is "
                "how it compares with the others in its row.": _means,
            },
        ),
        agrees(
            "does not change if a number is added to a row",
            _raised,
            expected=_ones,
            because="All biases of a row were equal, so all its keys get the same.",
            catches={
                "This takes the exponential of the bias, without the sum that it is "
                "divided by.": lambda w: _means(w.exp()),
            },
        ),
        agrees(
            "does not look above the diagonal",
            _with_a_future,
            expected=_ones,
            because="Only biases of later keys differ from 0.",
            catches={
                "This compares with all keys. Row t sees t + 1 of them, and only they "
                "share its weight.": lambda w: _means(len(w) * torch.softmax(w, 1)),
            },
        ),
        agrees(
            "follows any biases",
            _biases,
            [5, 8],
            catches={
                "This is a quotient of means. It should be the mean of quotients: each "
                "row compares a key with its own even share.": lambda w: (
                    _means(_shares(w)) / _means(1 / _keys(w).expand_as(w))
                ),
                "This is the last row alone. Average over all rows that have a key n "
                "steps back.": lambda w: len(w) * _shares(w)[-1].flip(0),
            },
        ),
        gradient("lets gradients through to w", _biases),
    ),
    hints=(
        "A softmax over the biases of a row, where later keys count as -inf, gives all "
        "shares.",
        "Key t - n of row t is on the diagonal n below the main one: x.diagonal(-n).",
        "share = torch.arange(1, time + 1)[:, None] * a, then "
        "share.diagonal(-n).mean() for each n.",
    ),
    example=_biases,
)


# --- mended_kernel --------------------------------------------------


def _raw(generator: Generator, heads: int = 3, window: int = 5) -> dict[str, Tensor]:
    """Heads whose raw kernels differ in mean and size."""
    scale, offset = normal(generator, 2, heads, 1).exp()
    return {
        "raw": scale * normal(generator, heads, window) + offset,
        "gamma": normal(generator, heads),
        "beta": normal(generator, heads),
    }


def _over_all_heads(raw: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    std, mean = torch.std_mean(raw, correction=0)
    return gamma[:, None] * (raw - mean) / std + beta[:, None]


MENDED_KERNEL = Exercise(
    name="mended_kernel",
    notebook="12_aft_language",
    difficulty=2,
    importance=3,
    minutes=7,
    task="**Find the bug.** From `raw` `[heads, window]`, `gamma` `[heads]` and `beta` "
    "`[heads]`, this function is meant to return the biases of Eq. 8, `[heads, "
    "window]`, with the standard deviation that divides by the number of entries. It "
    "has a single mistake. Mend it in place.",
    start="""\
def mended_kernel(raw, gamma, beta):
    std, mean = torch.std_mean(raw, correction=0)
    return gamma[:, None] * (raw - mean) / std + beta[:, None]  # Eq. 8""",
    reference=mended_kernel,
    properties=(
        shape("returns the shape of raw", _raw, [(3, 5), (1, 4), (5, 2)]),
        agrees(
            "follows Eq. 8 for one head",
            _raw,
            [(1, 7), (1, 3)],
            catches={
                "This standard deviation divides by one less than the number of entries. "
                "It takes correction=0.": lambda raw, gamma, beta: (
                    gamma[:, None]
                    * (raw - raw.mean(1, keepdim=True))
                    / raw.std(1, keepdim=True)
                    + beta[:, None]
                ),
            },
        ),
        agrees(
            "follows Eq. 8 for several heads",
            _raw,
            [(3, 5), (4, 4), (6, 2)],
            because="There were {heads} heads.",
            catches={"This is the function as you found it.": _over_all_heads},
        ),
        gradient("lets gradients through to raw, gamma and beta", _raw),
    ),
    hints=(
        "Change the raw kernel of one head, and look at another head.",
        "torch.std_mean without a dimension returns one mean of all entries. How many "
        "means does Eq. 8 need?",
        "torch.std_mean(raw, 1, correction=0, keepdim=True): a mean for each row, which "
        "broadcasts with raw.",
    ),
    example=_raw,
)


# --- frozen_kernels -------------------------------------------------

#: Biases that fade with the distance, each head at its rate.
_RATES = (2.0, 1.0, 0.5, 0.25)


def fading(heads: int, window: int) -> Tensor:
    """The biases to beat: 5, and less with every step back."""
    rates = torch.tensor(_RATES)[torch.arange(heads) % 4, None]
    return 5 - rates * torch.arange(window)


def _error(w: Tensor, text: str, time: int = 32) -> float:
    """The squared error of a linear model of the next character, on the second half.

    It gets each character, and for each head the mean of all characters so far,
    weighted by AFT-conv with keys of 0.
    """
    symbols = sorted(set(text))
    tokens = torch.tensor([symbols.index(c) for c in text]).unfold(0, time + 1, time)
    x = F.one_hot(tokens, len(symbols)).double()
    back = torch.arange(time)[:, None] - torch.arange(time)
    near = w.double()[:, back.clamp(0, w.shape[1] - 1)]
    bias = torch.where(back < w.shape[1], near, 0).masked_fill(back < 0, -torch.inf)
    means = torch.einsum("hts,bsc->bthc", bias.softmax(-1), x[:, :-1])
    given = torch.cat([x[:, :-1], means.flatten(2)], -1).flatten(0, 1)
    wanted = x[:, 1:].flatten(0, 1)
    half = len(given) // 2
    X, Y = given[:half], wanted[:half]
    ridge = 0.1 * torch.eye(X.shape[1], dtype=X.dtype)
    W = torch.linalg.solve(X.T @ X + ridge, X.T @ Y)
    return (given[half:] @ W - wanted[half:]).square().sum(-1).mean().item()


def _finite(answer: Answer, reference: Answer, generator: Generator) -> None:
    for heads, window in ((4, 16), (2, 8)):
        w = ask(answer, fading(heads, window), heads=heads, window=window)
        if not torch.isfinite(w).all():
            raise Wrong(
                "A bias is infinite or NaN. Training needs finite ones; a difference of "
                "6 is a factor of 400 already."
            )


def _beats_fading(answer: Answer, reference: Answer, generator: Generator) -> None:
    drawn = torch.randint(1_000_000, (100,), generator=generator)
    text = " ".join(number_words(number) for number in drawn.tolist())
    w = ask(answer, fading(4, 16), heads=4, window=16)
    yours, bar = _error(w, text), _error(fading(4, 16), text)
    if not yours < bar:
        raise Wrong(
            f"With your biases the error is {yours:.3f}; that to beat is {bar:.3f}. "
            "Which characters help to guess the next one, and could each head bring "
            "something else?"
        )


def _one_tap(heads: int, window: int) -> Tensor:
    return F.one_hot(torch.ones(heads, dtype=torch.int64), window) * 6.0


FROZEN_KERNELS = Exercise(
    name="frozen_kernels",
    notebook="12_aft_language",
    difficulty=3,
    importance=4,
    minutes=15,
    task="**Biases by hand.** Return biases for AFT-conv, `[heads, window]`: entry "
    "(i, n) is what head i adds to the key n steps back. They will stay as they are "
    "while everything else is trained. `check` does not train: it fits a linear model "
    "to a text of numbers in words. With 4 heads and a window of 16, its error has to "
    "be below that with the biases 5 - 2n, 5 - n, 5 - n/2, 5 - n/4.",
    reference=frozen_kernels,
    properties=(
        shape(
            "returns biases of shape [heads, window]",
            exactly("heads", "window"),
            [(4, 16), (2, 8), (3, 4)],
        ),
        Property("returns finite biases", _finite),
        Property(
            "beats biases that fade",
            _beats_fading,
            {
                "Without biases this is AFT-simple: all four heads return the same mean "
                "of all characters.": lambda heads, window: torch.zeros(heads, window),
                "All heads look at the same character. Together they know no more than "
                "one of them.": _one_tap,
                "These biases are largest far back. Entry 0 is the key of the step "
                "itself.": lambda heads, window: frozen_kernels(heads, window).flip(1),
                "These are the biases to beat.": fading,
            },
        ),
    ),
    hints=(
        "A head returns one mean. The less it mixes, the more it tells: what is the "
        "weight of a key whose bias is 6 above all others?",
        "The character itself is known without any head, by the residual connection. "
        "Which ones are useful next?",
        "Head i looks at a single character: a bias of 6 at n = i + 1, and 0 elsewhere.",
    ),
    example=lambda generator: {"heads": 4, "window": 16},
)


EXERCISES = {
    each.name: each
    for each in (POSITION_SHIFT, READ_BIAS, MENDED_KERNEL, FROZEN_KERNELS)
}
