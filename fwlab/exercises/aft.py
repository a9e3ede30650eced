"""AFT by hand: a row, its biases, and biases that are hidden."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fwlab import ops
from fwlab.exercises.asking import Answer, Wrong, ask, compare, normal
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import Work, agrees, gradient, is_causal, shape
from fwlab.exercises.solutions import aft_row, conv_bias, local_band, unseal

# --- aft_row --------------------------------------------------------


def _row(
    generator: Generator, keys: int = 5, batch: int = 2, channels: int = 3
) -> dict[str, Tensor]:
    return {
        "q": normal(generator, batch, channels),
        "k": normal(generator, batch, keys, channels),
        "v": normal(generator, batch, keys, channels),
        "w": normal(generator, keys),
    }


def _weighted(scores: Tensor, v: Tensor) -> Tensor:
    return (torch.softmax(scores, 1) * v).sum(1)


def _gated(q: Tensor, mean: Tensor) -> Tensor:
    return torch.sigmoid(q) * mean


AFT_ROW = Exercise(
    name="aft_row",
    notebook="10_aft",
    difficulty=2,
    importance=5,
    minutes=9,
    task="**One row of AFT** (Eq. 2). Return the output of one step, "
    "`[batch, channels]`, for its query `q` `[batch, channels]`, the keys `k` and "
    "values `v` that it sees, `[batch, keys, channels]`, and the biases `w` `[keys]`.",
    reference=aft_row,
    properties=(
        shape(
            "returns one number per channel, [batch, channels]",
            _row,
            [(5, 2, 3), (1, 1, 1), (3, 4, 2)],
        ),
        agrees(
            "with one key, returns its value times the gate",
            _row,
            [1, (1, 1, 4)],
            expected=lambda q, k, v, w: v[:, 0] / (1 + (-q).exp()),
            because="A single weight is 1, so only the gate is left, a sigmoid of q.",
            catches={
                "The query is in the exponent, as in attention. In AFT it gates the "
                "result, and the weights do not know it.": lambda q, k, v, w: _weighted(
                    q[:, None] * k + w[:, None], v
                ),
                "The gate is missing: the mean is multiplied by a sigmoid of the "
                "query.": lambda q, k, v, w: _weighted(k + w[:, None], v),
                "This multiplies by the query itself. The gate is its "
                "sigmoid.": lambda q, k, v, w: q * _weighted(k + w[:, None], v),
                "This is a softmax over channels. The weights of a channel sum to one "
                "over the keys.": lambda q, k, v, w: _gated(
                    q, (torch.softmax(k + w[:, None], -1) * v).sum(1)
                ),
                "This divides by nothing: the weights of Eq. 2 sum to "
                "one.": lambda q, k, v, w: _gated(
                    q, ((k + w[:, None]).exp() * v).sum(1)
                ),
                "The bias is only above the bar. Below it, the exponent is K + w, "
                "too.": lambda q, k, v, w: _gated(
                    q, (torch.softmax(k, 1) * w.exp()[:, None] * v).sum(1)
                ),
                "The bias is added to the weight, not to the "
                "exponent.": lambda q, k, v, w: _gated(
                    q, _weighted(k, v) + (w[:, None] * v).sum(1)
                ),
            },
        ),
        agrees(
            "without biases, weights each channel by a softmax of its keys alone",
            _row,
            change={"w": torch.zeros_like},
            expected=lambda q, k, v, w: (
                (k.exp() * v).sum(1) / k.exp().sum(1) / (1 + (-q).exp())
            ),
            because="All biases were 0.",
            catches={
                "The gate is right, but the query is in the exponent, too. The weights "
                "do not depend on it.": lambda q, k, v, w: _gated(
                    q, _weighted(q[:, None] * k + w[:, None], v)
                ),
                "Here all channels share one weight per key, as in attention. Each "
                "channel has weights of its own.": lambda q, k, v, w: _gated(
                    q, _weighted((k + w[:, None]).sum(-1, keepdim=True), v)
                ),
                "This multiplies keys by biases. Eq. 2 adds them.": lambda q, k, v, w: (
                    _gated(q, _weighted(k * w[:, None], v))
                ),
            },
        ),
        agrees(
            "adds the bias of its position to each key, in all channels",
            _row,
            [(5, 2, 3), (3, 1, 3), (3, 3, 2)],
            expected=lambda q, k, v, w: (
                torch.einsum("j,bjc->bc", w.exp(), k.exp() * v)
                / torch.einsum("j,bjc->bc", w.exp(), k.exp())
                / (1 + (-q).exp())
            ),
            because="The exponent of key j is k_j + w_j, above and below the bar.",
            catches={
                "This leaves out the biases w.": lambda q, k, v, w: _gated(
                    q, _weighted(k, v)
                ),
            },
        ),
        gradient("lets gradients through to q, k, v and w", _row),
    ),
    hints=(
        "Two steps: a weighted mean of the values, then a gate. Only one of them "
        "needs q.",
        "The quotient of Eq. 2 is a softmax of K + w over the keys, dimension 1, and "
        "w[:, None] broadcasts with k.",
        "(torch.softmax(k + w[:, None], 1) * v).sum(1), times torch.sigmoid(q).",
    ),
    example=_row,
)


# --- local_band -----------------------------------------------------


def _band(generator: Generator, time: int = 6, window: int = 3) -> dict[str, Tensor]:
    return {"band": normal(generator, time, window)}


def _back(band: Tensor, time: int = 0) -> Tensor:
    """How many steps key t' is behind row t: [t, t']."""
    steps = torch.arange(time or len(band))
    return steps[:, None] - steps


def _placed(
    band: Tensor, outside: float = 0.0, sign: int = 1, of_key: bool = False
) -> Tensor:
    """The solution, with a choice of mistakes."""
    back = sign * _back(band)
    inside = (back >= 0) & (back < band.shape[1])
    near = back.clamp(0, band.shape[1] - 1)
    rows = band.mT[near, torch.arange(len(band))] if of_key else band.gather(1, near)
    return torch.where(inside, rows, outside)


def _seen(w: Tensor, *inputs: Any) -> Tensor:
    return w.tril()


def _in_window(w: Tensor, band: Tensor) -> Tensor:
    back = _back(band)
    return torch.where((back >= 0) & (back < band.shape[1]), w, 0)


def _by_hand(band: Tensor) -> Tensor:
    w = band.new_zeros(len(band), len(band))
    for t, row in enumerate(band):
        for j, bias in enumerate(row[: t + 1]):
            w[t, t - j] = bias
    return w


def _first_columns(band: Tensor) -> Tensor:
    return F.pad(band, (0, max(0, len(band) - band.shape[1])))[:, : len(band)]


LOCAL_BAND = Exercise(
    name="local_band",
    notebook="10_aft",
    difficulty=2,
    importance=4,
    minutes=10,
    task="**The biases of AFT-local** (Eq. 4). Column `j` of `band` `[time, window]` "
    "holds, for each row, the bias of the key `j` steps back. Return all biases of the "
    "causal layer, `[time, time]`, row $t$, column $t'$. Above the diagonal you may "
    "write what you like: no row sees it.",
    reference=local_band,
    properties=(
        shape(
            "returns a bias for each pair of steps, [time, time]",
            _band,
            [(6, 3), (1, 1), (3, 5)],
        ),
        agrees(
            "has column 0 on the diagonal: the bias of the step itself",
            _band,
            [(6, 3), (4, 1)],
            of=lambda w, band: w.diagonal(),
            expected=lambda band: band[:, 0],
            catches={
                "The columns are in reverse order: column 0 is the step itself, and "
                "the last column is the oldest key.": lambda band: _placed(
                    band.flip(1)
                ),
                "The columns are taken as keys 0, 1, 2. They count steps back from "
                "the row.": _first_columns,
            },
        ),
        agrees(
            "inside the window, has the row's own bias j steps back",
            _band,
            [(6, 3), (7, 2)],
            of=_in_window,
            expected=_by_hand,
            catches={
                "This takes the bias of the key's row. A bias belongs to the row that "
                "reads.": lambda band: _placed(band, of_key=True),
                "These biases are for the keys ahead, above the diagonal. Column j is "
                "j steps back.": lambda band: _placed(band, sign=-1),
            },
        ),
        agrees(
            "outside the window, has what Eq. 4 says",
            _band,
            [(6, 3), (6, 1)],
            of=_seen,
            expected=_by_hand,
            because="Look at the pairs further apart than the window: does a row "
            "still see those keys?",
            catches={
                "Minus infinity would hide the keys outside the window. Eq. 4 has 0 "
                "there: they count, by their key alone.": lambda band: _placed(
                    band, -torch.inf
                ),
                "A large negative number hides the keys outside the window. Eq. 4 has "
                "0 there.": (
                    lambda band: _placed(band, -1e9),
                    lambda band: _placed(band, -1e4),
                    lambda band: _placed(band, torch.finfo(band.dtype).min),
                ),
            },
        ),
        agrees(
            "takes a window that is longer than the sequence",
            _band,
            [(3, 5), (1, 4), (4, 4)],
            of=_seen,
            expected=_by_hand,
            because="There were {time} steps and {window} columns. Row t has only "
            "t + 1 keys; does a negative index count from the end?",
        ),
        gradient("lets gradients through to the band", _band, of=_seen),
    ),
    hints=(
        "Start with a matrix of what stands outside the window. Which number leaves "
        "a key as it is?",
        "Then, for each row t and each column j up to t, put band[t, j] at the key "
        "that is j steps back.",
        "Key t - j. With a loop: w[t, t - j] = band[t, j] for j up to min(window - 1, "
        "t), w starting as zeros.",
    ),
    example=_band,
    matters=_seen,
)


# --- conv_bias ------------------------------------------------------


def _sequence(
    generator: Generator, time: int = 5, window: int = 2, channels: int = 3
) -> dict[str, Tensor]:
    return {
        "k": normal(generator, time, channels),
        "v": normal(generator, time, channels),
        "kernel": normal(generator, window),
    }


def _by_pairs(k: Tensor, v: Tensor, kernel: Tensor) -> Tensor:
    """With a bias for each pair of steps."""
    w = _by_hand(kernel.expand(len(k), -1))
    e = torch.where(_back(k) >= 0, w.exp(), 0)
    return (e @ (k.exp() * v)) / (e @ k.exp())


def _moved(x: Tensor, steps: int) -> Tensor:
    """Later by some steps, with zeros before."""
    return F.pad(x, (0, 0, steps, 0))[: len(x)]


def _convolved(
    k: Tensor,
    v: Tensor,
    kernel: Tensor,
    near: Callable[[Tensor], Tensor] = torch.expm1,
    everything: float = 1.0,
    ahead: bool = False,
    below: bool = True,
) -> Tensor:
    """The solution, with a choice of mistakes."""

    def both(x: Tensor, window: bool = True) -> Tensor:
        total = everything * x.cumsum(0)
        for j, bias in enumerate(near(kernel)[: len(x)] if window else ()):
            near_x = F.pad(x[j:], (0, 0, 0, j)) if ahead else _moved(x, j)
            total = total + bias * near_x
        return total

    return both(k.exp() * v) / both(k.exp(), below)


def _is_short(answer: Answer, reference: Answer, generator: Generator) -> None:
    """The answer holds no matrix of all pairs of steps."""
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


CONV_BIAS = Exercise(
    name="conv_bias",
    notebook="10_aft",
    difficulty=4,
    importance=3,
    minutes=15,
    task="**AFT-conv without a matrix of biases** (Eq. 6 without its gate). For `k` and "
    "`v` `[time, channels]` and one `kernel` `[window]`, whose entry `j` is the bias of "
    "the key `j` steps back, return the causal means `[time, channels]`. Make no matrix "
    "with an entry for each pair of steps. Keys are small here: nothing overflows.",
    reference=conv_bias,
    properties=(
        shape(
            "returns a tensor of the shape of v",
            _sequence,
            [(5, 2), (1, 1), (3, 5)],
        ),
        agrees(
            "with a kernel of zeros, is the mean of all keys so far",
            _sequence,
            [(5, 2), (6, 3)],
            change={"kernel": torch.zeros_like},
            expected=lambda k, v, kernel: (k.exp() * v).cumsum(0) / k.exp().cumsum(0),
            because="With all biases 0, this is AFT-simple (Eq. 5).",
            catches={
                "The near keys are counted twice: once with exp(w), and once more in "
                "the sum over all keys. Eq. 6 has exp(w) - 1.": lambda k, v, kernel: (
                    _convolved(k, v, kernel, torch.exp)
                ),
                "Only keys inside the window are left. Those outside count, too, with "
                "bias 0.": lambda k, v, kernel: _convolved(
                    k, v, kernel, torch.exp, everything=0.0
                ),
            },
        ),
        agrees(
            "with one entry, gives the step itself a weight exp(w) times as large",
            _sequence,
            [(4, 1), (5, 1)],
            expected=_by_pairs,
            because="The kernel had one entry: the bias of the step itself.",
            catches={
                "The bias itself is in the convolution. It has to be exp(w) - "
                "1.": lambda k, v, kernel: _convolved(k, v, kernel, lambda w: w),
                "The window is only above the bar. Below it, there are the same "
                "weights.": lambda k, v, kernel: _convolved(k, v, kernel, below=False),
            },
        ),
        is_causal(
            _sequence,
            catches={
                "The window lies ahead of the step: pad on the left, so that it ends "
                "at the step itself.": lambda k, v, kernel: _convolved(
                    k, v, kernel, ahead=True
                )
            },
        ),
        agrees(
            "gives entry j to the key j steps back",
            _sequence,
            [(6, 3), (7, 2)],
            expected=_by_pairs,
            catches={
                "The kernel is flipped. PyTorch's conv1d does not reverse it: entry 0 "
                "meets the oldest key of the window.": lambda k, v, kernel: _convolved(
                    k, v, kernel.flip(0)
                )
            },
        ),
        agrees(
            "takes a window that is longer than the sequence",
            _sequence,
            [(2, 5), (1, 3)],
            expected=_by_pairs,
            because="There were {time} steps and {window} entries in the kernel.",
        ),
        Property("works without a matrix of all pairs of steps", _is_short),
        gradient("lets gradients through to k, v and the kernel", _sequence, (5, 3)),
    ),
    hints=(
        "Your derivation has two sums: over the near keys, with exp(w) - 1, and over "
        "all keys. Above and below the bar they differ only by v.",
        "The sum over all keys is x.cumsum(0). For the near keys, add x moved by j "
        "steps, times exp(kernel[j]) - 1, for each j.",
        "x moved by j steps is F.pad(x, (0, 0, j, 0))[: len(x)]. Do the same for "
        "x = k.exp() * v and for x = k.exp(), and divide.",
    ),
    example=_sequence,
)


# --- aft_layer ------------------------------------------------------


def _steps(
    generator: Generator, time: int = 5, channels: int = 3, values: float | None = None
) -> dict[str, Tensor]:
    """`values`: one number for all; None = random."""
    q, k, v = (normal(generator, time, channels) for _ in range(3))
    if values is not None:
        v = torch.full_like(v, values)
    return {"q": q, "k": k, "v": v, "w": normal(generator, time, time)}


def healthy_aft(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Causal AFT-full for one sequence, as two matrix products."""
    return _products(q, k, v, w.exp().tril())


def _products(
    q: Tensor, k: Tensor, v: Tensor, e: Tensor, below: Tensor | None = None
) -> Tensor:
    e_k = k.exp()
    return torch.sigmoid(q) * (e @ (e_k * v)) / ((e if below is None else below) @ e_k)


def sick_aft(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """The layer of the bug hunt, with both of its bugs."""
    e = w.tril().exp()
    return _products(q, k, v, e, e.mT)


#: The pictures that the hunt starts from.
LAYERS = {"a healthy layer": healthy_aft, "this layer": sick_aft}

AFT_LAYER = Exercise(
    name="aft_layer",
    notebook="10_aft",
    difficulty=3,
    importance=4,
    minutes=10,
    task="**A sick layer.** For one sequence, `q`, `k` and `v` `[time, channels]` and "
    "biases `w` `[time, time]`, return the outputs of causal AFT-full, "
    "`[time, channels]`.",
    start="""\
def aft_layer(q, k, v, w):
    w = w * torch.ones_like(w).tril()  # causal: no weight above the diagonal
    e_k, e_w = k.exp(), w.exp()
    return torch.sigmoid(q) * (e_w @ (e_k * v)) / (e_w.mT @ e_k)""",
    reference=healthy_aft,
    properties=(
        shape("returns an output for each step", _steps, [{}, {"time": 1}]),
        agrees(
            "returns the gate where all values are 1",
            _steps,
            [(5, 3, 1.0)],
            expected=lambda q, k, v, w: 1 / (1 + (-q).exp()),
            because="A mean of ones is 1, whatever the weights.",
            catches={
                "Two bugs are left. Look at rows whose values are all 1, and at rows "
                "before a key that changes.": sick_aft,
                "The future is gone. But above and below the bar stand different "
                "weights: their sums are not 1.": lambda q, k, v, w: _products(
                    q, k, v, w.exp().tril(), w.exp().tril().mT
                ),
                "The gate got lost: the mean is multiplied by a sigmoid of "
                "q.": lambda q, k, v, w: healthy_aft(50 + 0 * q, k, v, w),
            },
        ),
        is_causal(
            _steps,
            catches={
                "A bias of 0 hides nothing: exp(0) is a weight of 1. What a row may "
                "not see has the weight 0.": lambda q, k, v, w: _products(
                    q, k, v, w.tril().exp()
                ),
                "This row sees the future and not the past: the other triangle has to "
                "go.": lambda q, k, v, w: _products(q, k, v, w.exp().triu()),
            },
        ),
        agrees(
            "follows Eq. 2",
            _steps,
            [(5, 3), (1, 1), (7, 2)],
            because="Row t uses row t of w, its entries up to the diagonal.",
            catches={
                "Rows and columns of w are exchanged. Row t uses row t of "
                "w.": lambda q, k, v, w: _products(q, k, v, w.mT.exp().tril()),
                "The future is hidden, but the biases are gone.": lambda q, k, v, w: (
                    _products(q, k, v, torch.ones_like(w).tril())
                ),
            },
        ),
        gradient("lets gradients through to q, k, v and w", _steps),
    ),
    hints=(
        "Set all values to 1. Each output should be its gate, so weights above and "
        "below the bar have to be the same.",
        "Change the last key. Earlier rows change, too: what is exp(w) above the "
        "diagonal?",
        "Take the exponential first, then .tril(); and drop the .mT.",
    ),
    example=_steps,
)


# --- unseal ---------------------------------------------------------

#: Takes q, k and v `[time, channels]`, and returns the outputs.
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def seal(w: Tensor) -> Layer:
    """Hide biases.

    - `w`: `[time, time]`.
    - Returns causal AFT-full with them, for one sequence: a function of `q`, `k`
      and `v` `[time, channels]`.
    """

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y: Tensor = ops.aft_full(q[None], k[None], v[None], w.to(q))[0]
        return y

    return layer


def _sealed(generator: Generator, time: int = 5, form: str = "full") -> dict[str, Any]:
    w = normal(generator, time, time)
    if form == "simple":
        w = 0 * w
    elif form == "local":
        w = local_band(w[:, :2])
    elif form == "conv":
        w = local_band(w[:1, :3].expand(time, -1))
    return {"layer": seal(w), "time": time}


def _asks_little(answer: Answer, reference: Answer, generator: Generator) -> None:
    time = 6
    inputs, widths = _sealed(generator, time), []

    def counted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        widths.append(v.shape[-1])
        y: Tensor = inputs["layer"](q, k, v)
        return y

    ask(answer, torch.zeros(time, time).double(), layer=counted, time=time)
    if len(widths) > 1 or sum(widths) > time:
        raise Wrong(
            f"With {time} steps you asked {len(widths)} times, for {sum(widths)} "
            f"channels in total; once, with {time} channels, is enough. All channels "
            "have the same biases, and may have different keys and values."
        )


def _log_weights(layer: Layer, time: int) -> Tensor:
    eye = torch.eye(time, dtype=torch.float64)
    return layer(50 + 0 * eye, 0 * eye, eye).clamp(min=1e-30).log()


UNSEAL = Exercise(
    name="unseal",
    notebook="10_aft",
    difficulty=4,
    importance=3,
    minutes=15,
    task="**Open a sealed layer.** `layer(q, k, v)` is causal AFT for one sequence: it "
    "takes three tensors `[time, channels]`, with any number of channels, and "
    "returns its outputs. Its biases are hidden. Find them by asking: return "
    r"$w_{t,t'} - w_{t,t}$, `[time, time]`, since only differences within a row "
    "matter. Above the diagonal you may write what you like. Ask as rarely as you can, "
    "and with few channels.",
    reference=unseal,
    properties=(
        shape(
            "returns a bias for each pair of steps, [time, time]",
            _sealed,
            [5, 1, 3],
        ),
        agrees(
            "finds no differences in AFT-simple",
            _sealed,
            [(5, "simple"), (2, "simple")],
            of=lambda w, *inputs: w.tril(),
            expected=lambda layer, time: torch.zeros(time, time).double(),
            because="All biases of this layer are equal.",
            catches={
                "These are weights. The weights of a row are a softmax of its biases: "
                "take their logarithm.": lambda layer, time: _log_weights(
                    layer, time
                ).exp(),
                "These are logarithms of weights. They differ from the biases by a "
                "constant per row: subtract the diagonal.": _log_weights,
            },
        ),
        agrees(
            "finds the biases of any form",
            _sealed,
            [(6, "local"), (5, "conv"), (7, "full")],
            of=lambda w, *inputs: w.tril(),
            because="The layer was AFT-{form} with {time} steps.",
            catches={
                "Rows and columns are exchanged: row t holds the biases that step t "
                "uses.": lambda layer, time: unseal(layer, time).tril().mT,
                "The sign is wrong: a larger weight has a larger "
                "bias.": lambda layer, time: -unseal(layer, time).tril(),
                "This subtracts the first bias of each row. The task asks for "
                "differences from the diagonal.": lambda layer, time: (
                    unseal(layer, time) - unseal(layer, time)[:, :1]
                ),
            },
        ),
        Property("asks once, with at most one channel per step", _asks_little),
    ),
    hints=(
        "With all keys 0, what does a layer return whose values are 0, except for a 1 "
        "at step 3?",
        "The weight of step 3 in each row, times the gate. Channels do not disturb "
        "each other: give each step a channel of its own.",
        "Values torch.eye(time), keys 0, queries 50, all float64: the outputs are the "
        "weights. Take the logarithm, and subtract the diagonal from each row.",
    ),
    example=_sealed,
    matters=lambda w, *inputs: w.tril(),
)


EXERCISES = {
    each.name: each for each in (AFT_ROW, LOCAL_BAND, CONV_BIAS, AFT_LAYER, UNSEAL)
}
