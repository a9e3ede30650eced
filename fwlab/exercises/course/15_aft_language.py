"""Biases of AFT."""

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab.data.numbers import number_words
from fwlab.exercises.answers import Wrong, ask, normal
from fwlab.exercises.course.aft import local_band
from fwlab.exercises.notation import exercise
from fwlab.exercises.properties import exactly

# --- position_shift -------------------------------------------------


def _call(generator, past=4, time=6, window=3):
    band = normal(generator, past + time + 2, window)
    return {"band": band, "past": past, "time": time}


def _seen(w, band, past, time):
    """Biases of later keys do not matter."""
    return w.tril(past)


def _alike(w, band, past, time):
    """Check that a bias far below 0 hides a key, as minus infinity does."""
    return w.tril(past).clamp(min=-30)


@exercise(_call, difficulty=2, importance=4, minutes=11, matters=_alike)
def position_shift(band, past, time):
    """
    **The biases of a call.** AFT-local has read `past` characters, and now reads `time`
    more. Row t of `band` `[max_len, window]` belongs to position t, and its entry n to
    the key n steps back. Return the biases $w_{t,t'}$ of this call (Eq. 4), `[time,
    past + time]`: a row for each new character, a column for each key so far. Outside
    the window the bias is 0; later keys do not matter.

    ✓ returns a row for each new character, a column for each key
        shape((0, 5), (3, 4), (6, 1))
    ✓ puts entry n of a row n columns to the left of the diagonal
        agrees((0, 5, 5), of=_seen)
        == local_band(band[:time])
    ! There were no characters before, and the window held all.
    ✗ The band is turned around: its entry 0 is the key of the step itself, not the one
      furthest back.
        band=band.flip(1)
    ✗ This is one step off: entry 0 is the key of the step itself.
        = rows - -> = rows - 1 -
    ✗ This takes the row of the key. The row is that of the step that reads.
        band[rows, -> band[torch.arange(past + time),
    ✗ These are the last rows of the band. The band goes on after this call.
        band[rows, -> band[rows - past - time,
    ✓ has 0 outside the window
        agrees((0, 6, 2), (0, 7, 1), of=_seen)
        == local_band(band[:time])
    ! The window was {window}.
    ✗ A bias of -inf, or far below 0, hides a key. Outside the window it counts with its
      key alone: 0.
        entries, 0 -> entries, -torch.inf
    ✓ takes the rows of the positions of these characters
        agrees((4, 6, 3), (9, 1, 4), (1, 3, 8), of=_seen)
        == local_band(band[: past + time])[past:]
    ! {past} characters came before, so the first row is row {past} of the band, and its
      own key is column {past}.
    ✗ past plays no part here: rows and columns are those of a call at the beginning of
      the text.
        arange(past, past + time) -> arange(time)
    ✗ The rows are right. In row t, the key of the step itself is column past + t.
        = rows - -> = rows - past -
    ✗ These are the rows of the first characters. Position 0 is the first character of
      the text, not of the call.
        band[rows, -> band[rows - past,
    ✓ lets gradients through to the band
        gradient(of=_seen)
    ? The new characters have the positions past to past + time - 1. How far back is
      column j for each of them?
    ? back = torch.arange(past, past + time)[:, None] - torch.arange(past + time) is
      negative for later keys, and window or more outside the window.
    ? torch.where(inside, band[rows, back.clamp(0, window - 1)], 0), where rows is a
      column of positions.
    """
    rows = torch.arange(past, past + time)[:, None]
    back = rows - torch.arange(past + time)
    inside = (back >= 0) & (back < band.shape[1])
    entries = band[rows, back.clamp(0, band.shape[1] - 1)]
    return torch.where(inside, entries, 0)  # Eq. 4


# --- read_bias ------------------------------------------------------


def _biases(generator, time=6):
    return {"w": normal(generator, time, time)}


def _none(generator, time):
    return {"w": torch.zeros(time, time, dtype=torch.float64)}


def _raised(generator):
    """Draw a number for each row."""
    return {"w": normal(generator, 6, 1).expand(6, 6).clone()}


def _with_a_future(generator):
    return {"w": normal(generator, 6, 6).triu(1)}


def _by_rows(w):
    """Compare each row with its own even share, before the means."""
    seen = [row[: t + 1].exp() for t, row in enumerate(w)]
    shares = [row / row.mean() for row in seen]
    every = [[row[-1 - n] for row in shares[n:]] for n in range(len(w))]
    return torch.stack([torch.stack(each).mean() for each in every])


@exercise(_biases, difficulty=3, importance=4, minutes=13)
def read_bias(w):
    r"""
    **Read a bias.** If all keys are equal, row $t$ gives key $t'$ the share $a_{t,t'} =
    e^{w_{t,t'}} / \sum_{s \le t} e^{w_{t,s}}$; without a bias it is $1 / (t + 1)$. From
    `w` `[time, time]`, return `[time]`: entry $n$ is the mean of $(t + 1)\, a_{t,t-n}$
    over all rows $t$ that have a key $n$ steps back.

    ✓ returns a number for each distance
        shape(6, 1, 9)
    ✓ returns 1 for every distance if there is no bias
        agrees(1, 2, 7, draw=_none)
        == torch.ones_like(w[0])
    ! time was {time}, and distance n has time - n rows.
    ✗ The share is not compared with the even one: row t has t + 1 keys.
        keys * a -> a
    ✗ This multiplies by t. Row t has t + 1 keys, since it sees its own.
        keys * a -> (keys - 1) * a
    ✗ This multiplies every row by the number of all keys. Row t sees only t + 1 of
      them.
        keys * a -> time * a
    ✗ This divides by the number of all rows. Only time - n of them have a key n steps
      back.
        .mean() -> .sum() / time
    ✗ The softmax goes over all keys. Row t sees those up to t.
        w.masked_fill(later, -torch.inf) -> w
    ✗ The biases of later keys are 0 here, and exp(0) is a weight of 1. What a row may
      not see has the bias -inf.
        w.masked_fill(later, -torch.inf) -> w.tril()
    ✗ This is a softmax over the rows. The shares of a row sum to one over its keys.
        -torch.inf), 1) -> -torch.inf), 0)
    ✗ These are the diagonals above the main one, with the keys that come later.
        diagonal(-n) -> diagonal(n)
    ✗ This is a mean for each key. Entry n is about all pairs of steps that are n apart:
      a diagonal.
        torch.stack([share.diagonal(-n).mean() for n in range(time)]) -> share.mean(0)
    ✗ This is the mean bias. A bias says little by itself: what counts is how it
      compares with the others in its row.
        keys * a -> w
    ✓ does not change if a number is added to a row
        agrees(draw=_raised)
        == torch.ones_like(w[0])
    ! All biases of a row were equal, so all its keys get the same.
    ✗ This takes the exponential of the bias, without the sum that it is divided by.
        keys * a -> w.exp()
    ✓ does not look above the diagonal
        agrees(draw=_with_a_future)
        == torch.ones_like(w[0])
    ! Only biases of later keys differ from 0.
    ✗ This compares with all keys. Row t sees t + 1 of them, and only they share its
      weight.
        w.masked_fill(later, -torch.inf) -> w ; keys * a -> time * a
    ✓ follows any biases
        agrees(5, 8)
        == _by_rows(w)
    ✗ This is a quotient of means. It should be the mean of quotients: each row compares
      a key with its own even share.
        share.diagonal(-n).mean() -> a.diagonal(-n).mean() / (a / share).diagonal(-n).mean()
    ✗ This is the last row alone. Average over all rows that have a key n steps back.
        torch.stack([share.diagonal(-n).mean() for n in range(time)]) -> share[-1].flip(0)
    ✓ lets gradients through to w
        gradient()
    ? A softmax over the biases of a row, where later keys count as -inf, gives all
      shares.
    ? Key t - n of row t is on the diagonal n below the main one: x.diagonal(-n).
    ? share = torch.arange(1, time + 1)[:, None] * a, then share.diagonal(-n).mean() for
      each n.
    """
    time = len(w)
    later = torch.ones(time, time, device=w.device).triu(1).bool()
    a = torch.softmax(w.masked_fill(later, -torch.inf), 1)
    keys = torch.arange(1, time + 1, device=w.device)[:, None]  # that each row sees
    share = keys * a
    return torch.stack([share.diagonal(-n).mean() for n in range(time)])


# --- mended_kernel --------------------------------------------------


def _raw(generator, heads=3, window=5):
    """Heads whose raw kernels differ in mean and size."""
    scale, offset = normal(generator, 2, heads, 1).exp()
    return {
        "raw": scale * normal(generator, heads, window) + offset,
        "gamma": normal(generator, heads),
        "beta": normal(generator, heads),
    }


MENDED_KERNEL_START = """\
def mended_kernel(raw, gamma, beta):
    std, mean = torch.std_mean(raw, correction=0)
    return gamma[:, None] * (raw - mean) / std + beta[:, None]  # Eq. 8"""


@exercise(_raw, difficulty=2, importance=3, minutes=7, start=MENDED_KERNEL_START)
def mended_kernel(raw, gamma, beta):
    """
    **Find the bug.** From `raw` `[heads, window]`, `gamma` `[heads]` and `beta`
    `[heads]`, this function is meant to return the biases of Eq. 8, `[heads, window]`,
    with the standard deviation that divides by the number of entries. It has a single
    mistake. Mend it in place.

    ✓ returns the shape of raw
        shape((3, 5), (1, 4), (5, 2))
    ✓ follows Eq. 8 for one head
        agrees((1, 7), (1, 3))
        == gamma * (raw - raw.mean()) / (raw - raw.mean()).square().mean().sqrt() + beta
    ✗ This takes mean and deviation over the heads, dimension 0. Each head has its own,
      over its window: dimension 1.
        raw, 1, -> raw, 0,
    ✗ This divides by the variance. Eq. 8 has its square root.
        / std -> / std**2
    ✗ This standard deviation divides by one less than the number of entries. It takes
      correction=0.
        correction=0 -> correction=1
    ✓ follows Eq. 8 for several heads
        agrees((3, 5), (4, 4), (6, 2))
        == gamma[:, None] * F.layer_norm(raw, raw.shape[1:], eps=0) + beta[:, None]
    ! There were {heads} heads.
    ✗ This is the function as you found it.
        start:
    ✓ lets gradients through to raw, gamma and beta
        gradient()
    ? Change the raw kernel of one head, and look at another head.
    ? torch.std_mean without a dimension returns one mean of all entries. How many means
      does Eq. 8 need?
    ? torch.std_mean(raw, 1, correction=0, keepdim=True): a mean for each row, which
      broadcasts with raw.
    """
    std, mean = torch.std_mean(raw, 1, correction=0, keepdim=True)  # of each head
    unit = (raw - mean) / std
    return gamma[:, None] * unit + beta[:, None]  # Eq. 8


# --- frozen_kernels -------------------------------------------------


def fading(heads: int, window: int) -> Tensor:
    """Return the biases to beat: from 5 down with every step back, at a rate of each head."""
    rates = 2.0 / 2 ** (torch.arange(heads)[:, None] % 4)  # 2, 1, 1/2, 1/4
    return 5 - rates * torch.arange(window)


def _error(w, text, time=32):
    """Return the squared error of a linear model of characters on the second half.

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


def _finite(answer, reference, generator):
    for heads, window in ((4, 16), (2, 8)):
        w = ask(answer, fading(heads, window), heads=heads, window=window)
        if not torch.isfinite(w).all():
            raise Wrong(
                "A bias is infinite or NaN. Training needs finite ones; a difference of "
                "6 is a factor of 400 already."
            )


def _beats_fading(answer, reference, generator):
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


@exercise(
    exactly("heads", "window"),
    example=lambda generator: {"heads": 4, "window": 16},
    difficulty=3,
    importance=4,
    minutes=15,
    open=True,
)
def frozen_kernels(heads, window):
    """
    **Biases by hand.** Return biases for AFT-conv, `[heads, window]`: entry (i, n) is
    what head i adds to the key n steps back. They will stay as they are while
    everything else is trained. `check` does not train: your heads average the letters
    of a text (numbers in words), and a linear model guesses the next letter from these
    averages. With 4 heads and a window of 16, its squared error has to be below that
    with the biases 5 - 2n, 5 - n, 5 - n/2, 5 - n/4.

    ✓ returns biases of shape [heads, window]
        shape((4, 16), (2, 8), (3, 4))
    ✓ returns finite biases
        _finite
    ✓ beats biases that fade
        _beats_fading
    ✗ Without biases this is AFT-simple: all four heads return the same mean of all
      characters.
        6.0 -> 0.0
    ✗ All heads look at the same character. Together they know no more than one of them.
        (i + 1) % window -> 1
    ✗ These biases are largest far back. Entry 0 is the key of the step itself.
        return w -> return w.flip(1)
    ✗ These are the biases to beat.
        fading(heads, window)
    ? A head returns one mean. The less it mixes, the more it tells: what is the weight
      of a key whose bias is 6 above all others?
    ? The character itself is known without any head, by the residual connection. Which
      ones are useful next?
    ? Head i looks at a single character: a bias of 6 at n = i + 1, and 0 elsewhere.
    """
    w = torch.zeros(heads, window)
    for i in range(heads):
        w[i, (i + 1) % window] = 6.0  # one key for each head
    return w
