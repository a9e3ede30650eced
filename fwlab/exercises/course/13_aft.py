"""Attention Free Transformer."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fwlab import ops
from fwlab.exercises.answers import Wrong, ask, compare, normal
from fwlab.exercises.notation import exercise, started
from fwlab.exercises.properties import Work

# --- aft_row --------------------------------------------------------


def _row(generator, keys=5, batch=2, channels=3):
    return {
        "q": normal(generator, batch, channels),
        "k": normal(generator, batch, keys, channels),
        "v": normal(generator, batch, keys, channels),
        "w": normal(generator, keys),
    }


@exercise(_row, difficulty=2, importance=5, minutes=9)
def aft_row(q, k, v, w):
    """
    **One row of AFT** (Eq. 2). Return the output of one step, `[batch, channels]`, for
    its query `q` `[batch, channels]`, the keys `k` and values `v` that it sees,
    `[batch, keys, channels]`, and the biases `w` `[keys]`.

    ✓ returns one number per channel, [batch, channels]
        shape((5, 2, 3), (1, 1, 1), (3, 4, 2))
    ✓ with one key, returns its value times the gate
        agrees(1, (1, 1, 4))
        == v[:, 0] / (1 + (-q).exp())
    ! A single weight is 1, so only the gate is left, a sigmoid of q.
    ✗ The query is in the exponent, as in attention. In AFT it gates the result, and the
      weights do not know it.
        k + w -> q[:, None] * k + w ; torch.sigmoid(q) * ->
    ✗ The gate is missing: the mean is multiplied by a sigmoid of the query.
        torch.sigmoid(q) * ->
    ✗ This multiplies by the query itself. The gate is its sigmoid.
        torch.sigmoid(q) -> q
    ✗ This is a softmax over channels. The weights of a channel sum to one over the
      keys.
        w[:, None], 1) -> w[:, None], -1)
    ✗ This is a softmax over the batch. The weights of a channel sum to one over the
      keys.
        w[:, None], 1) -> w[:, None], 0)
    ✗ This divides by nothing: the weights of Eq. 2 sum to one.
        torch.softmax(k + w[:, None], 1) -> (k + w[:, None]).exp()
    ✗ The bias is only in the numerator. In the denominator, the exponent is K + w, too.
        k + w[:, None], 1) -> k, 1) * w.exp()[:, None]
    ✗ The bias is added to the weight, not to the exponent.
        k + w[:, None], 1) -> k, 1) + w[:, None]
    ✓ without biases, weights each channel by a softmax of its keys alone
        agrees(w=torch.zeros_like)
        == (k.exp() * v).sum(1) / k.exp().sum(1) / (1 + (-q).exp())
    ! All biases were 0.
    ✗ The gate is right, but the query is in the exponent, too. The weights do not
      depend on it.
        k + w -> q[:, None] * k + w
    ✗ Here all channels share one weight per key, as in attention. Each channel has
      weights of its own.
        k + w[:, None] -> (k + w[:, None]).sum(-1, keepdim=True)
    ✗ This multiplies keys by biases. Eq. 2 adds them.
        k + w -> k * w
    ✓ adds the bias of its position to each key, in all channels
        agrees((5, 2, 3), (3, 1, 3), (3, 3, 2))
        == torch.einsum("j,bjc->bc", w.exp(), k.exp() * v)
           / torch.einsum("j,bjc->bc", w.exp(), k.exp()) / (1 + (-q).exp())
    ! The exponent of key j is k_j + w_j, in the numerator and the denominator.
    ✗ This leaves out the biases w.
        + w[:, None] ->
    ✓ lets gradients through to q, k, v and w
        gradient()
    ? Two steps: a weighted mean of the values, then a gate. Only one of them needs q.
    ? The quotient of Eq. 2 is a softmax of K + w over the keys, dimension 1, and w[:,
      None] broadcasts with k.
    ? (torch.softmax(k + w[:, None], 1) * v).sum(1), times torch.sigmoid(q).
    """
    weights = torch.softmax(k + w[:, None], 1)  # of each channel, over the keys
    return torch.sigmoid(q) * (weights * v).sum(1)  # the query only gates


# --- local_band -----------------------------------------------------


def _band(generator, time=6, window=3):
    return {"band": normal(generator, time, window)}


def _seen(w, *inputs):
    return w.tril()


def _alike(w, band):
    """Check that a bias far below 0 hides a key, as minus infinity does."""
    return w.tril().clamp(min=-30)


def _in_window(w, band):
    return w.tril().triu(1 - band.shape[1])


def _by_hand(band):
    w = band.new_zeros(len(band), len(band))
    for t, row in enumerate(band):
        for j, bias in enumerate(row[: t + 1]):
            w[t, t - j] = bias
    return w


@exercise(_band, difficulty=2, importance=4, minutes=10, matters=_alike)
def local_band(band):
    """
    **The biases of AFT-local** (Eq. 4). Column `j` of `band` `[time, window]` holds,
    for each row, the bias of the key `j` steps back. Return all biases of the causal
    layer, `[time, time]`, row $t$, column $t'$. Above the diagonal you may write what
    you like: no row sees it.

    ✓ returns a bias for each pair of steps, [time, time]
        shape((6, 3), (1, 1), (3, 5))
    ✓ has column 0 on the diagonal: the bias of the step itself
        agrees((6, 3), (4, 1), of=lambda w, band: w.diagonal())
        == band[:, 0]
    ✗ The columns are in reverse order: column 0 is the step itself, and the last column
      is the oldest key.
        band=band.flip(1)
    ✗ The columns are taken as keys 0, 1, 2. They count steps back from the row.
        row[: t + 1] -> row[: len(w)]
          ; t + 1 - len(near) : t + 1] = near.flip(0) -> : len(near)] = near
    ✓ inside the window, has the row's own bias j steps back
        agrees((6, 3), (7, 2), of=_in_window)
        == _by_hand(band)
    ✗ This takes the bias of the key's row. A bias belongs to the row that reads.
        row[: t + 1] -> row[: len(w) - t]
          ; t, t + 1 - len(near) : t + 1] = near.flip(0) -> t : t + len(near), t] = near
    ✗ These biases are for the keys ahead, above the diagonal. Column j is j steps back.
        row[: t + 1] -> row[: len(w) - t]
          ; t + 1 - len(near) : t + 1] = near.flip(0) -> t : t + len(near)] = near
    ✓ outside the window, has what Eq. 4 says
        agrees((6, 3), (6, 1), of=_seen)
        == _by_hand(band)
    ! Look at the pairs further apart than the window: does a row still see those keys?
    ✗ Minus infinity, or a number far below 0, would hide the keys outside the window.
      Eq. 4 has 0 there: they count, by their key alone.
        len(band))  # -> len(band)) - torch.inf  #
    ✓ takes a window that is longer than the sequence
        agrees((3, 5), (1, 4), (4, 4), of=_seen)
        == _by_hand(band)
    ! There were {time} steps and {window} columns. Row t has only t + 1 keys; does a
      negative index count from the end?
    ✓ lets gradients through to the band
        gradient(of=_seen)
    ? Start with a matrix of what stands outside the window. Which number leaves a key
      as it is?
    ? Then, for each row t and each column j up to t, put band[t, j] at the key that is
      j steps back.
    ? Key t - j. With a loop: w[t, t - j] = band[t, j] for j up to min(window - 1, t), w
      starting as zeros.
    """
    w = band.new_zeros(len(band), len(band))  # outside the window: 0 (Eq. 4)
    for t, row in enumerate(band):
        near = row[: t + 1]  # a row has t + 1 keys
        w[t, t + 1 - len(near) : t + 1] = near.flip(0)
    return w


# --- conv_bias ------------------------------------------------------


def _sequence(generator, time=5, window=2, channels=3):
    return {
        "k": normal(generator, time, channels),
        "v": normal(generator, time, channels),
        "kernel": normal(generator, window),
    }


def _by_pairs(k, v, kernel):
    """With a bias for each pair of steps."""
    e = _by_hand(kernel.expand(len(k), -1)).exp().tril()
    return (e @ (k.exp() * v)) / (e @ k.exp())


def _is_short(answer, reference, generator):
    """Check that the answer holds no matrix of all pairs of steps."""
    time = 512
    inputs = _sequence(generator, time, 4, 1)
    with Work() as work:
        y = ask(answer, inputs["v"], **inputs)
    compare(y, reference(*inputs.values()), f"There were {time} steps.")
    if work.largest >= time**2 // 2:
        raise Wrong(
            f"With {time} steps, your largest tensor had {work.largest:,} numbers: one "
            "for each pair of steps. Eq. 6 needs one for each step and entry of the "
            "kernel."
        )


@exercise(_sequence, difficulty=4, importance=3, minutes=15)
def conv_bias(k, v, kernel):
    """
    **AFT-conv without a matrix of biases** (Eq. 6 without its gate). For `k` and `v`
    `[time, channels]` and one `kernel` `[window]`, whose entry `j` is the bias of the
    key `j` steps back, return the causal means `[time, channels]`. Make no matrix with
    an entry for each pair of steps. Keys are small here: nothing overflows.

    ✓ returns a tensor of the shape of v
        shape((5, 2), (1, 1), (3, 5))
    ✓ with a kernel of zeros, is the mean of all keys so far
        agrees((5, 2), (6, 3), kernel=torch.zeros_like)
        == (k.exp() * v).cumsum(0) / k.exp().cumsum(0)
    ! With all biases 0, this is AFT-simple (Eq. 5).
    ✗ The near keys are counted twice: once with exp(w), and once more in the sum over
      all keys. Eq. 6 has exp(w) - 1.
        bias.exp() - 1 -> bias.exp()
    ✗ Only keys inside the window are left. Those outside count, too, with bias 0.
        x.cumsum(0) -> 0 * x ; bias.exp() - 1 -> bias.exp()
    ✓ with one entry, gives the step itself a weight exp(w) times as large
        agrees((4, 1), (5, 1))
        == _by_pairs(k, v, kernel)
    ! The kernel had one entry: the bias of the step itself.
    ✗ The bias itself is in the convolution. It has to be exp(w) - 1.
        bias.exp() - 1 -> bias
    ✗ The window is only in the numerator. The denominator has the same weights.
        / near_and_all(k.exp()) -> / k.exp().cumsum(0)
    ✓ does not look at later steps
        is_causal()
    ✗ torch.roll turns x around: the last steps come back at the front, where zeros
      belong.
        F.pad(x, (0, 0, j, 0))[: len(x)] -> x.roll(j, 0)
    ✗ The window lies ahead of the step: pad on the left, so that it ends at the step
      itself.
        (0, 0, j, 0))[: len(x)] -> (0, 0, 0, j))[j:]
    ✓ gives entry j to the key j steps back
        agrees((6, 3), (7, 2))
        == _by_pairs(k, v, kernel)
    ✗ The kernel is flipped. PyTorch's conv1d does not reverse it: entry 0 meets the
      oldest key of the window.
        kernel=kernel.flip(0)
    ✓ takes a window that is longer than the sequence
        agrees((2, 5), (1, 3))
        == _by_pairs(k, v, kernel)
    ! There were {time} steps and {window} entries in the kernel.
    ✓ works without a matrix of all pairs of steps
        _is_short
    ✓ lets gradients through to k, v and the kernel
        gradient((5, 3))
    ? Your derivation has two sums: over the near keys, with exp(w) - 1, and over all
      keys. Numerator and denominator differ only by v.
    ? The sum over all keys is x.cumsum(0). For the near keys, add x moved by j steps,
      times exp(kernel[j]) - 1, for each j.
    ? x moved by j steps is F.pad(x, (0, 0, j, 0))[: len(x)]. Do the same for x =
      k.exp() * v and for x = k.exp(), and divide.
    """

    def near_and_all(x):
        total = x.cumsum(0)
        for j, bias in enumerate(kernel):
            moved = F.pad(x, (0, 0, j, 0))[: len(x)]  # by j steps
            total = total + (bias.exp() - 1) * moved
        return total

    return near_and_all(k.exp() * v) / near_and_all(k.exp())  # Eq. 6


# --- aft_layer ------------------------------------------------------


def _steps(generator, time=5, channels=3, values=None):
    """`values`: one number for all; None = random."""
    q, k, v = (normal(generator, time, channels) for _ in range(3))
    if values is not None:
        v = torch.full_like(v, values)
    return {"q": q, "k": k, "v": v, "w": normal(generator, time, time)}


AFT_LAYER_START = """\
def aft_layer(q, k, v, w):
    w = w * torch.ones_like(w).tril()  # causal: no weight above the diagonal
    e_k, e_w = k.exp(), w.exp()
    return torch.sigmoid(q) * (e_w @ (e_k * v)) / (e_w.mT @ e_k)"""


@exercise(_steps, difficulty=3, importance=4, minutes=10, start=AFT_LAYER_START)
def aft_layer(q, k, v, w):
    """
    **A sick layer.** For one sequence, `q`, `k` and `v` `[time, channels]` and biases
    `w` `[time, time]`, return the outputs of causal AFT-full, `[time, channels]`.

    ✓ returns an output for each step
        shape({}, {"time": 1})
    ✓ returns the gate where all values are 1
        agrees((5, 3, 1.0))
        == 1 / (1 + (-q).exp())
    ! A mean of ones is 1, whatever the weights.
    ✗ Two bugs are left. Look at rows whose values are all 1, and at rows before a key
      that changes.
        start:
    ✗ The future is gone. But numerator and denominator have different weights: their
      sums are not 1.
        e_w @ e_k -> e_w.mT @ e_k
    ✗ The gate got lost: the mean is multiplied by a sigmoid of q.
        torch.sigmoid(q) * ->
    ✓ does not look at later steps
        is_causal()
    ✗ A bias of 0 hides nothing: exp(0) is a weight of 1. What a row may not see has the
      weight 0.
        start: .mT ->
    ✗ This row sees the future and not the past: the other triangle has to go.
        .tril() -> .triu()
    ✓ follows Eq. 2
        agrees((5, 3), (1, 1), (7, 2))
        == seal(w)(q, k, v)
    ! Row t uses row t of w, its entries up to the diagonal.
    ✗ Rows and columns of w are exchanged. Row t uses row t of w.
        w=w.mT
    ✗ The future is hidden, but the biases are gone.
        w.exp() -> torch.ones_like(w)
    ✓ lets gradients through to q, k, v and w
        gradient()
    ? Set all values to 1. Each output should be its gate, so weights above and below
      the bar have to be the same.
    ? Change the last key. Earlier rows change, too: what is exp(w) above the diagonal?
    ? Take the exponential first, then .tril(); and drop the .mT.
    """
    e_k, e_w = k.exp(), w.exp().tril()  # no weight above the diagonal
    return torch.sigmoid(q) * (e_w @ (e_k * v)) / (e_w @ e_k)


#: The pictures that the hunt starts from.
LAYERS = {"a healthy layer": aft_layer, "this layer": started("aft_layer")}

# --- unseal ---------------------------------------------------------

#: Takes q, k and v `[time, channels]`, and returns the outputs.
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def seal(w: Tensor) -> Layer:
    """Hide biases.

    - `w`: `[time, time]`.
    - Returns causal AFT-full with them, for one sequence: a function of `q`, `k`
      and `v` `[time, channels]`.
    """

    def layer(q, k, v):
        return ops.aft_full(q[None], k[None], v[None], w.to(q))[0]

    return layer


def _sealed(generator, time=5, form="full"):
    w = normal(generator, time, time)
    if form == "simple":
        w = 0 * w
    elif form == "local":
        w = local_band(w[:, :2])
    elif form == "conv":
        w = local_band(w[:1, :3].expand(time, -1))
    return {"layer": seal(w), "time": time}


def _asks_little(answer, reference, generator):
    time = 6
    inputs, widths = _sealed(generator, time), []

    def counted(q, k, v):
        widths.append(v.shape[-1])
        return inputs["layer"](q, k, v)

    ask(answer, torch.zeros(time, time).double(), layer=counted, time=time)
    if len(widths) > 1 or sum(widths) > time:
        raise Wrong(
            f"With {time} steps you asked {len(widths)} times, for {sum(widths)} "
            f"channels in total; once, with {time} channels, is enough. All channels "
            "have the same biases, and may have different keys and values."
        )


@exercise(_sealed, difficulty=4, importance=3, minutes=15, matters=_seen)
def unseal(layer, time):
    """
    **Open a sealed layer.** `layer(q, k, v)` is causal AFT for one sequence: it takes
    three tensors `[time, channels]`, with any number of channels, and returns its
    outputs. Its biases are hidden. Find them by asking: return $w_{t,t'} - w_{t,t}$,
    `[time, time]`, since only differences within a row matter. Above the diagonal you
    may write what you like. Ask as rarely as you can, and with few channels.

    ✓ returns a bias for each pair of steps, [time, time]
        shape(5, 1, 3)
    ✓ finds no differences in AFT-simple
        agrees((5, "simple"), (2, "simple"), of=_seen)
        == torch.zeros(time, time).double()
    ! All biases of this layer are equal.
    ✗ These are weights. The weights of a row are a softmax of its biases: take their
      logarithm.
        weights.log() - weights.diagonal()[:, None].log() -> weights
    ✗ Rows and columns are exchanged, also those above the diagonal.
        unseal(layer, time).mT
    ✗ The diagonal is subtracted from the columns. Row t loses the number of its own
      step, so the diagonal is a column: [:, None].
        [:, None] ->
    ✗ This subtracts the weights of the diagonal, and not their logarithms.
        weights.diagonal()[:, None].log() -> weights.diagonal()[:, None]
    ✗ These are logarithms of weights. They differ from the biases by a constant per
      row: subtract the diagonal.
        - weights.diagonal()[:, None].log() ->
    ✓ finds the biases of any form
        agrees((6, "local"), (5, "conv"), (7, "full"), of=_seen)
    ! The layer was AFT-{form} with {time} steps.
    ✗ Rows and columns are exchanged: row t holds the biases that step t uses.
        unseal(layer, time).tril().mT
    ✗ The sign is wrong: a larger weight has a larger bias.
        -unseal(layer, time)
    ✗ This subtracts the first bias of each row. The task asks for differences from the
      diagonal.
        weights.diagonal()[:, None] -> weights[:, :1]
    ✓ asks once, with at most one channel per step
        _asks_little
    ? With all keys 0, what does a layer return whose values are 0, except for a 1 at
      step 3?
    ? The weight of step 3 in each row, times the gate. Channels do not disturb each
      other: give each step a channel of its own.
    ? Values torch.eye(time), keys 0, queries 50, all float64: the outputs are the
      weights. Take the logarithm, and subtract the diagonal from each row.
    """
    values = torch.eye(time, dtype=torch.float64)  # a channel for each step
    weights = layer(50 + 0 * values, 0 * values, values)  # an open gate, equal keys
    return weights.log() - weights.diagonal()[:, None].log()
