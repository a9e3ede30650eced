"""Answers to the exercises of notebook 10."""

import torch
from torch.nn import functional as F

from fwlab import ops

NO_GRADIENT = {"unseal"}


def fraction(q, k, v, w, above=0.0):
    """Eq. 2 as it is printed."""
    e = (k + w[:, None]).exp()
    return torch.sigmoid(q) * ((e * v).sum(1) + above) / e.sum(1)


def one_by_one(q, k, v, w):
    rows = []
    for b in range(len(q)):
        columns = [
            torch.softmax(k[b, :, c] + w, 0) @ v[b, :, c] for c in range(q.shape[1])
        ]
        rows.append(torch.stack(columns) / (1 + torch.exp(-q[b])))
    return torch.stack(rows)


def two_products(q, k, v, w):
    above, below = (
        torch.einsum("j,bjc->bc", w.exp(), x) for x in (k.exp() * v, k.exp())
    )
    return above / below * torch.sigmoid(q)


def running(q, k, v, w):
    log_sum, mean = k[:, 0] + w[0], v[:, 0]
    for j in range(1, len(w)):
        total = torch.logaddexp(log_sum, k[:, j] + w[j])
        mean = mean + (k[:, j] + w[j] - total).exp() * (v[:, j] - mean)
        log_sum = total
    return torch.sigmoid(q) * mean


def by_index(band):
    time, window = band.shape
    back = torch.arange(time)[:, None] - torch.arange(time)
    rows = torch.arange(time)[:, None].expand(-1, time)
    inside = (back >= 0) & (back < window)
    return torch.where(inside, band[rows, back.clamp(0, window - 1)], 0)


def by_diagonals(band):
    time, window = band.shape
    return sum(
        (
            torch.diag_embed(band[j:, j], -j)[:time, :time]
            for j in range(min(time, window))
        ),
        torch.zeros(time, time).double(),
    )


def by_one_hot(band):
    time, window = band.shape
    back = torch.arange(time)[:, None] - torch.arange(time)
    at = back[..., None] == torch.arange(window)
    return torch.einsum("tuj,tj->tu", at.double(), band)


def hidden_above(band):
    """Minus infinity above the diagonal, which does not matter."""
    future = torch.ones(len(band), len(band)).triu(1) > 0
    return by_index(band).masked_fill(future, -torch.inf)


def wrapped(band):
    """Negative indices count from the end."""
    w = band.new_zeros(len(band), len(band))
    for t, row in enumerate(band):
        for j, bias in enumerate(row):
            w[t, (t - j) % len(band)] = bias
    return w


def moved(x, j):
    return F.pad(x, (0, 0, j, 0))[: len(x)]


def near(x, kernel):
    return sum(b * moved(x, j) for j, b in enumerate(kernel))


def by_conv1d(k, v, kernel):
    flipped = (kernel.exp() - 1).flip(0)[None, None]

    def conv(x):
        padded = F.pad(x.mT[:, None], (len(kernel) - 1, 0))
        return F.conv1d(padded, flipped)[:, 0].mT

    e = k.exp()
    return (conv(e * v) + (e * v).cumsum(0)) / (conv(e) + e.cumsum(0))


def by_fourier(k, v, kernel):
    size = 2 * (len(k) + len(kernel))
    response = torch.ones(len(k)).double()
    response = torch.cat([response, response.new_zeros(len(kernel))])
    response = response + F.pad(kernel.expm1(), (0, len(k)))

    def conv(x):
        both = torch.fft.rfft(x, size, 0) * torch.fft.rfft(response, size)[:, None]
        return torch.fft.irfft(both, size, 0)[: len(x)]

    return conv(k.exp() * v) / conv(k.exp())


def window_and_rest(k, v, kernel):
    """Near keys, and the sum of all older ones."""

    def both(x):
        older = moved(x.cumsum(0), len(kernel))
        return near(x, kernel.exp()) + older

    return both(k.exp() * v) / both(k.exp())


def step_by_step(k, v, kernel):
    """Two sums that go along, and the few latest keys."""
    y, above, below = [], 0, 0
    for t in range(len(k)):
        above, below = above + k[t].exp() * v[t], below + k[t].exp()
        a, b = above, below
        for j in range(min(len(kernel), t + 1)):
            more = (kernel[j].exp() - 1) * k[t - j].exp()
            a, b = a + more * v[t - j], b + more
        y.append(a / b)
    return torch.stack(y)


def all_pairs(k, v, kernel):
    back = torch.arange(len(k))[:, None] - torch.arange(len(k))
    inside = (back >= 0) & (back < len(kernel))
    w = torch.where(inside, kernel[back.clamp(0, len(kernel) - 1)], 0)
    e = w.exp().tril()
    return (e @ (k.exp() * v)) / (e @ k.exp())


def softmax_rows(q, k, v, w):
    future = torch.ones_like(w, dtype=torch.bool).triu(1)
    scores = (k + w[..., None]).masked_fill(future[..., None], -torch.inf)
    return torch.sigmoid(q) * (scores.softmax(1) * v).sum(1)


def row_by_row(q, k, v, w):
    return torch.stack(
        [
            torch.sigmoid(q[t])
            * (torch.softmax(k[: t + 1] + w[t, : t + 1, None], 0) * v[: t + 1]).sum(0)
            for t in range(len(q))
        ]
    )


def by_logarithms(q, k, v, w):
    hidden = (
        torch.ones_like(w).triu(1).masked_fill(torch.ones_like(w).triu(1) > 0, -1e300)
    )
    scores = k[None] + (w + hidden)[..., None]
    weights = (scores - scores.logsumexp(1, keepdim=True)).exp()
    return torch.einsum("tc,tuc,uc->tc", q.sigmoid(), weights, v)


def by_op(q, k, v, w):
    return ops.aft_full(q[None], k[None], v[None], w, implementation="naive")[0]


def products(q, k, v, e, below=None):
    below = e if below is None else below
    return torch.sigmoid(q) * (e @ (k.exp() * v)) / (below @ k.exp())


def one_at_a_time(layer, time, width=1):
    """Ask for each step."""
    eye = torch.eye(time).double()
    weights = torch.stack(
        [layer(*(0 * eye[:, :1],) * 2, eye[:, j : j + 1])[:, 0] for j in range(time)], 1
    )
    return (weights / weights.diagonal()[:, None]).log()


def too_wide(layer, time):
    eye = torch.eye(time).double().repeat(1, 2)
    weights = layer(0 * eye, 0 * eye, eye)[:, :time]
    return (weights / weights.diagonal()[:, None]).log()


def half_open(layer, time):
    """The gate cancels in the quotient."""
    eye = torch.eye(time).double()
    weights = layer(0 * eye, 0 * eye, eye)
    return (weights / weights.diagonal()[:, None]).log()


def without_the_last_channel(layer, time):
    """Weights sum to 1: the last step needs no channel."""
    eye = torch.eye(time).double()[:, : max(1, time - 1)]
    known = 2 * layer(0 * eye, 0 * eye, eye)
    weights = torch.cat([known, 1 - known.sum(1, keepdim=True)], 1)[:, :time]
    return (weights / weights.diagonal()[:, None]).log()


def loud_values(layer, time):
    values = 1000 * torch.eye(time).double()
    weights = layer(values + 60, 0 * values + 3, values)
    w = weights.log()
    return w - torch.diag(w)[:, None]


def by_what_is_missing(layer, time):
    """All values are 1 but one: what is missing is its weight."""
    eye = torch.eye(time).double()
    y = 2 * layer(0 * eye, 0 * eye, 1 - eye)  # 1 minus the weight of the step
    weights = 1 - y
    w = weights.log()
    return w - w.diagonal()[:, None]


WRONG = {
    "aft_row": {
        "right(q, k, v, w).sum(-1)": "one number per channel",
        "right(q, k, v, 2 * w)": "adds the bias",
        "right(q, k, v, w.flip(0))": "adds the bias",
        "right(q, k, v, -w)": "adds the bias",
        "right(q, k[:1].expand_as(k), v, w)": "without biases",
        "right(q, v, k, w)": "with one key",
        "torch.tanh(q) * right(50 + 0 * q, k, v, w)": "with one key",
        "right(-q, k, v, w)": "with one key",
        "fraction(*inputs, 1e-3)": "with one key",
    },
    "local_band": {
        "band": "a bias for each pair",
        "by_index(band).T": "inside the window",
        "by_index(band) - 1 + (by_index(band) != 0)": "outside the window",
        "by_index(band) / (len(band) >= band.shape[1])": "longer than the sequence",
        "wrapped(band)": "longer than the sequence",
        "by_index(band[:1].expand_as(band))": "on the diagonal",
        "by_index(band.exp())": "on the diagonal",
        "by_index(torch.cat([band[:, :1], 0 * band[:, 1:]], 1))": "inside the window",
    },
    "conv_bias": {
        "right(*inputs).sum(0)": "of the shape of v",
        "v.cumsum(0) / torch.arange(1, len(v) + 1).double()[:, None]": "kernel of zeros",
        "right(k, v, kernel / 2)": "with one entry",
        "right(k, v, -kernel)": "with one entry",
        "right(k.flip(0), v.flip(0), kernel).flip(0)": "kernel of zeros",
        "right(k, v, kernel[:1])": "entry j to the key",
        "right(k, v, torch.cat([kernel[:1], 0 * kernel[1:-1], kernel[1:]])[:len(kernel)])": (
            "entry j to the key"
        ),
        "by_conv1d(*inputs) / (len(kernel) <= len(k))": "longer than the sequence",
        "all_pairs(*inputs)": "without a matrix",
    },
    "aft_layer": {
        "right(*inputs).sum(-1)": "an output for each step",
        "products(q, k, v, w.exp().tril(-1))": "all values are 1",
        "products(q, k, v, w.exp().tril(), torch.ones_like(w).tril())": "all values are 1",
        "products(q, k, v, w.masked_fill(torch.ones_like(w).triu() > 0, 0).exp())": (
            "later steps"
        ),
        "products(q, k, v, w.exp())": "later steps",
        "right(q, k, v, w.relu())": "follows Eq. 2",
        "products(q, k, v, (w - w.mean(-1, True).mT).exp().tril())": "follows Eq. 2",
        "products(q, v, k, w.exp().tril())": "all values are 1",
    },
    "unseal": {
        "half_open(*inputs)[0]": "a bias for each pair",
        "half_open(*inputs).exp()": "no differences",
        "half_open(*inputs).tril() * 2": "of any form",
        "right(*inputs).tril().clamp(min=0)": "of any form",
        "0 * right(*inputs).tril()": "of any form",
        "right(*inputs).tril() - right(*inputs).tril().mean(-1, True)": "of any form",
        "one_at_a_time(*inputs)": "asks once",
        "too_wide(*inputs)": "asks once",
    },
}
TOLD = {
    "local_band": {
        "by_index(band).masked_fill(by_index(band) == 0, -torch.inf)": "would hide",
    },
    "conv_bias": {
        "by_conv1d(k, v, kernel.flip(0))": "The kernel is flipped",
        "all_pairs(*inputs)": "one for each pair of steps",
    },
    "aft_layer": {
        "products(q, k, v, (w * torch.ones_like(w).tril()).exp())": "hides nothing",
    },
    "unseal": {
        "one_at_a_time(*inputs)": "you asked 6 times, for 6 channels",
        "(2 * half_open(*inputs).softmax(-1)).log() - 0.6931471805599453": "constant per row",
    },
}
RIGHT = {
    "aft_row": [fraction, one_by_one, two_products, running],
    "local_band": [by_index, by_diagonals, by_one_hot, hidden_above],
    "conv_bias": [by_conv1d, by_fourier, window_and_rest, step_by_step],
    "aft_layer": [softmax_rows, row_by_row, by_op, by_logarithms],
    "unseal": [half_open, without_the_last_channel, loud_values, by_what_is_missing],
}
