"""AFT against numbers that were worked out by hand, with fractions.

No number here comes from a program. A key of log n counts n times, so that
every mean is a fraction; a query of 0 halves it, one of log 3 takes three
quarters, for the sigmoid of log n is n / (n + 1).
"""

from fractions import Fraction
from math import inf, log

import pytest
import torch
from accelerator import DEVICE, Accelerator
from torch import Tensor

from fwlab import ops

all_forms = pytest.mark.parametrize("implementation", ["naive", "efficient"])


def channel(*numbers: float) -> Tensor:
    """One sequence with one channel: `[1, time, 1]`."""
    return torch.tensor(numbers, dtype=torch.float64).view(1, -1, 1)


def row(*weights: float) -> list[float]:
    """Biases of one row: a key with weight n counts n times."""
    return [log(weight) for weight in weights]


def table(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def holds(found: Tensor, *wanted: str) -> None:
    exact = [float(Fraction(text)) for text in wanted]
    assert found.dtype == torch.float64
    assert found.flatten().tolist() == pytest.approx(exact, rel=1e-12, abs=1e-12)


# Three steps that count 1, 2 and 3 times, with values 6, 12 and 30; they
# pass one half, one half and three quarters of their means.
Q = channel(0, 0, log(3))
K = channel(log(1), log(2), log(3))
V = channel(6, 12, 30)


@all_forms
def test_simple(implementation):
    how = {"implementation": implementation}
    # Means: 6; (6 + 24) / 3 = 10; (6 + 24 + 90) / 6 = 20.
    y, state = ops.aft_simple(Q, K, V, return_state=True, **how)
    holds(y, "3", "5", "15")
    assert state.log_sum.item() == pytest.approx(log(6), rel=1e-12)
    holds(state.mean, "20")
    # One more step that counts 4 times: (6 * 20 + 4 * 5) / 10 = 14.
    more = channel(0), channel(log(4)), channel(5)
    holds(ops.aft_simple(*more, state=state, **how), "7")
    # Not causal, every row has the last mean.
    holds(ops.aft_simple(Q, K, V, causal=False, **how), "10", "10", "15")
    # Without the middle step: 6; -; (6 + 90) / 4 = 24.
    keep = torch.tensor([[True, False, True]])
    holds(ops.aft_simple(Q, K, V, key_mask=keep, **how), "3", "0", "18")
    whole = ops.aft_simple(Q, K, V, key_mask=keep, causal=False, **how)
    holds(whole, "12", "0", "18")


@all_forms
def test_full(implementation):
    how = {"implementation": implementation}
    # What a pair counts: the key times the entry of its row.
    bias = table(row(5, 7, 7), row(2, 3, 7), row(6, 6, 2))
    # Row 0: 6. Row 1: 2 and 6, (12 + 72) / 8 = 21/2.
    # Row 2: 6, 12 and 6, (36 + 144 + 180) / 24 = 15.
    y = ops.aft_full(Q, K, V, bias, **how)
    holds(y, "3", "21/4", "45/4")
    # Not causal, row 0: 5, 14 and 21, (30 + 168 + 630) / 40 = 207/10;
    # row 1: 2, 6 and 21, (12 + 72 + 630) / 29 = 714/29.
    y = ops.aft_full(Q, K, V, bias, causal=False, **how)
    holds(y, "207/20", "357/29", "45/4")
    # The last row alone, after the state of the first two.
    _, state = ops.aft_full(Q[:, :2], K[:, :2], V[:, :2], bias[:2, :2], return_state=True, **how)  # fmt: skip
    y = ops.aft_full(Q[:, 2:], K[:, 2:], V[:, 2:], bias[2:], state=state, **how)
    holds(y, "45/4")


@all_forms
def test_local(implementation):
    how = {"implementation": implementation}
    # The step itself counts twice, the one before it 3 times, older ones once.
    band = table(row(2, 3), row(2, 3), row(2, 3))
    # Row 0: 6. Row 1: 3 and 4, (18 + 48) / 7 = 66/7.
    # Row 2: 1, 6 and 6, (6 + 72 + 180) / 13 = 258/13.
    y, state = ops.aft_local(Q, K, V, band, return_state=True, **how)
    holds(y, "3", "33/7", "387/26")
    # Older than the next window: steps 0 and 1, with mean 10.
    assert state.log_sum.item() == pytest.approx(log(3), rel=1e-12)
    holds(state.mean, "10")
    # One more step that counts once: 3 times 10, 9 times 30, 2 times 9.
    # (30 + 270 + 18) / 14 = 159/7.
    more = channel(0), channel(0), channel(9), table(row(2, 3))
    holds(ops.aft_local(*more, state=state, **how), "159/14")
    # Not causal: itself twice, the one before 3 times, the next 5 times.
    band = table(row(2, 3, 5), row(2, 3, 5), row(2, 3, 5))
    # Row 0: 2, 10 and 3, (12 + 120 + 90) / 15 = 74/5.
    # Row 1: 3, 4 and 15, (18 + 48 + 450) / 22 = 258/11. Row 2 as before.
    y = ops.aft_local(Q, K, V, band, causal=False, **how)
    holds(y, "37/5", "129/11", "387/26")


@all_forms
def test_local_over_many_tiles(implementation):
    """Step t has the value t; each counts as in `test_local`."""
    how, last = {"implementation": implementation}, 149
    steps = channel(*range(last + 1))
    same = torch.zeros_like(steps)
    band = table(*[row(2, 3)] * (last + 1))
    y = ops.aft_local(same, same, steps, band, **how)
    # Row t: t (t + 1) / 2 for all, once more t and twice t - 1, over t + 4.
    rows = [(t * (t + 1) // 2 + 3 * t - 2, 2 * (t + 4)) for t in range(1, last + 1)]
    holds(y, "0", *(f"{total}/{count}" for total, count in rows))
    # Not causal: 149 * 150 / 2 = 11175 for all, and four times t + 1, over 157.
    band = table(*[row(2, 3, 5)] * (last + 1))
    y = ops.aft_local(same, same, steps, band, causal=False, **how)
    rows = [(11175 + 3 * t - 2 + 4 * (t + 1), 2 * 157) for t in range(1, last)]
    ends = "11179/310", f"{11175 + 3 * last - 2}/306"
    holds(y, ends[0], *(f"{total}/{count}" for total, count in rows), ends[1])


@all_forms
def test_window_of_one(implementation):
    """A bias of log 2 for the step itself; the others count as they are."""
    how = {"implementation": implementation}
    band = table(row(2), row(2), row(2))
    # 6; 1 and 4, (6 + 48) / 5 = 54/5; 1, 2 and 6, (6 + 24 + 180) / 9 = 70/3.
    holds(ops.aft_local(Q, K, V, band, **how), "3", "27/5", "35/2")


@all_forms
def test_conv_with_two_heads(implementation):
    how = {"implementation": implementation}
    q, k = (torch.stack([x, x], 2) for x in (Q, K))
    v = torch.stack([V, 2 * V], 2)  # [1, 3 steps, 2 heads, 1 channel]
    # Head 0 is the window of `test_local`, on the same values.
    # Head 1: the step itself counts once, the one before it 4 times.
    kernel = table(row(2, 3), row(1, 4))
    # Row 0: 12. Row 1: 4 and 2, (48 + 48) / 6 = 16.
    # Row 2: 1, 8 and 3, (12 + 192 + 180) / 12 = 32.
    y = ops.aft_conv(q, k, v, kernel, **how)
    holds(y[:, :, 0], "3", "33/7", "387/26")
    holds(y[:, :, 1], "6", "8", "24")
    # Not causal, head 1, the next step counts twice. Row 0: 1, 4 and 3, (12 + 96 + 180)
    # / 8 = 36. Row 1: 4, 2 and 6, (48 + 48 + 360) / 12 = 38.
    kernel = table(row(2, 3, 5), row(1, 4, 2))
    y = ops.aft_conv(q, k, v, kernel, causal=False, **how)
    holds(y[:, :, 0], "37/5", "129/11", "387/26")
    holds(y[:, :, 1], "18", "19", "24")


@all_forms
def test_image(implementation):
    """Three by three pixels with keys of 0 and values 1 to 9."""
    zeros = torch.zeros(1, 3, 3, 1, 1, dtype=torch.float64)
    v = torch.arange(1, 10, dtype=torch.float64).view(1, 3, 3, 1, 1)
    # Twice what is left of a pixel, 3 times what is below it, 4 times what is
    # above and right of it; 5 times the pixel itself.
    kernel = table(row(1, 1, 4), row(2, 5, 1), row(1, 3, 1))[None]
    y = ops.aft_conv2d(zeros, zeros, v, kernel, implementation=implementation)
    # The sum of all values is 45, of all weights 9. Pixel 5, in the middle: 45 + 4 * 5
    # + 4 + 2 * 8 + 3 * 3 = 94 over 9 + 4 + 1 + 2 + 3 = 19. Pixel 1: itself and 4 below:
    # 45 + 4 + 2 * 4 = 57 over 15. Pixel 3: itself, 2 and 6: 45 + 12 + 2 + 12 = 71 over
    # 16. Pixel 7: itself and 5: 45 + 28 + 15 = 88 over 16. Pixel 9: itself and 8: 45 +
    # 36 + 8 = 89 over 14.
    found = y.flatten()[[0, 2, 4, 6, 8]]
    holds(found, "57/30", "71/32", "94/38", "88/32", "89/28")


@all_forms
def test_image_with_a_wider_kernel(implementation):
    """The same pixels, and a kernel that reaches two of them away."""
    zeros = torch.zeros(1, 3, 3, 1, 1, dtype=torch.float64)
    v = torch.arange(1, 10, dtype=torch.float64).view(1, 3, 3, 1, 1)
    # Twice what is two above a pixel, 6 times what is two right of it; 5
    # times the pixel itself.
    kernel = table(
        row(1, 1, 2, 1, 1),
        row(1, 1, 1, 1, 1),
        row(1, 1, 5, 1, 6),
        row(1, 1, 1, 1, 1),
        row(1, 1, 1, 1, 1),
    )[None]
    y = ops.aft_conv2d(zeros, zeros, v, kernel, implementation=implementation)
    # Pixel 1: itself and 3, 45 + 4 + 5 * 3 = 64 over 9 + 4 + 5 = 18.
    # Pixel 5: itself, 45 + 4 * 5 = 65 over 13.
    # Pixel 7: itself, 9 and 1, 45 + 28 + 5 * 9 + 1 = 119 over 19.
    holds(y.flatten()[[0, 4, 6]], "64/36", "65/26", "119/38")


def test_tables_are_where_the_inputs_are():
    """On a device that refuses tensors of the CPU, as a GPU does."""
    how = {"implementation": "naive"}
    three = table(*[row(2, 3, 5)] * 3)
    zeros = torch.zeros(1, 3, 3, 1, 1, dtype=torch.float64)
    v = torch.arange(1, 10, dtype=torch.float64).view(1, 3, 3, 1, 1)
    with Accelerator():
        q, k, values, band = (x.to(DEVICE) for x in (Q, K, V, three))
        # The numbers of `test_local`.
        y = ops.aft_local(q, k, values, band[:, :2], **how)
        holds(y.cpu(), "3", "33/7", "387/26")
        y = ops.aft_local(q, k, values, band, causal=False, **how)
        holds(y.cpu(), "37/5", "129/11", "387/26")
        # Without any bias, every pixel sees the mean of 1 to 9.
        zeros, v = zeros.to(DEVICE), v.to(DEVICE)
        holds(
            ops.aft_conv2d(zeros, zeros, v, zeros[0, ..., 0, 0][None], **how).cpu(),
            *["5/2"] * 9,
        )


@all_forms
def test_huge_keys_and_biases(implementation):
    """A thousand more on every key changes no mean; and where the exponents
    are far apart, the largest one takes all.
    """
    how = {"implementation": implementation}
    for shift in (1e3, -1e3):
        holds(ops.aft_simple(Q, K + shift, V, **how), "3", "5", "15")
        band = table(row(2, 3), row(2, 3), row(2, 3))
        y = ops.aft_local(Q, K + shift, V, band, **how)
        holds(y, "3", "33/7", "387/26")
    steep = channel(0, 1e5, -1e5)
    holds(ops.aft_simple(Q, steep, V, **how), "3", "6", "9")
    # Keys and biases of 1e5 that cancel: all exponents of a row are equal.
    bias = table([0, -1e5, 1e5], [0, -1e5, 1e5], [0, -1e5, 1e5])
    # Means: 6; (6 + 12) / 2 = 9; (6 + 12 + 30) / 3 = 16.
    holds(ops.aft_full(Q, steep, V, bias, **how), "3", "9/2", "12")


@all_forms
def test_keys_that_count_the_same(implementation):
    """The second key counts as much as all that was there, so does the third."""
    k = channel(log(1), log(1), log(2))
    # Means: 6; (6 + 12) / 2 = 9; (6 + 12 + 60) / 4 = 39/2.
    y = ops.aft_simple(Q, k, V, implementation=implementation)
    holds(y, "3", "9/2", "117/8")


@all_forms
def test_a_channel_without_keys(implementation):
    """The first channel is as ever; no key of the second one counts."""
    how = {"implementation": implementation}
    q, v = Q.expand(1, 3, 2), V.expand(1, 3, 2)
    k = torch.cat([K, torch.full_like(K, -inf)], 2)
    y, state = ops.aft_simple(q, k, v, return_state=True, **how)
    holds(y, "3", "0", "5", "0", "15", "0")
    assert state.log_sum[0, 1] == -inf
    holds(state.mean, "20", "0")
    y = ops.aft_simple(q, k, v, causal=False, **how)
    holds(y, "10", "0", "10", "0", "15", "0")
    bias = table(row(5, 7, 7), row(2, 3, 7), row(6, 6, 2))
    y = ops.aft_full(q, k, v, bias, **how)
    holds(y, "3", "0", "21/4", "0", "45/4", "0")
    y = ops.aft_full(q, k, v, bias, causal=False, **how)
    holds(y, "207/20", "0", "357/29", "0", "45/4", "0")
    band = table(row(2, 3), row(2, 3), row(2, 3))
    y, state = ops.aft_local(q, k, v, band, return_state=True, **how)
    holds(y, "3", "0", "33/7", "0", "387/26", "0")
    assert state.log_sum[0, 1] == -inf
    holds(state.mean, "10", "0")
    band = table(row(2, 3, 5), row(2, 3, 5), row(2, 3, 5))
    y = ops.aft_local(q, k, v, band, causal=False, **how)
    holds(y, "37/5", "0", "129/11", "0", "387/26", "0")


@all_forms
def test_nothing_to_see(implementation):
    how = {"implementation": implementation}
    none = torch.zeros(1, 3, dtype=torch.bool)
    for causal in (True, False):
        y = ops.aft_simple(Q, K, V, key_mask=none, causal=causal, **how)
        holds(y, "0", "0", "0")
        y = ops.aft_full(Q, K, V, table(*[row(1, 2, 3)] * 3), key_mask=none, causal=causal, **how)  # fmt: skip
        holds(y, "0", "0", "0")
