"""Answers to the exercises of notebook 12."""

import math

import torch
from torch.nn import functional as F

NO_GRADIENT = {"frozen_kernels"}


def place_by_place(band, past, time):
    w = band.new_zeros(time, past + time)
    for t in range(time):
        for n in range(min(band.shape[1], past + t + 1)):
            w[t, past + t - n] = band[past + t, n]
    return w


def wrapped(band, past, time):
    """Negative columns count from the end: keys that come later."""
    w = band.new_zeros(time, past + time)
    for t in range(time):
        for n in range(min(band.shape[1], past + time)):
            w[t, (past + t - n) % (past + time)] = band[past + t, n]
    return w


def by_diagonals(band, past, time):
    everything = sum(
        torch.diag_embed(band[n : past + time, n], -n)[: past + time, : past + time]
        for n in range(min(band.shape[1], past + time))
    )
    return everything[past:]


def by_one_hot(band, past, time):
    back = torch.arange(past, past + time)[:, None] - torch.arange(past + time)
    at = back[..., None] == torch.arange(band.shape[1])
    return torch.einsum("tun,tn->tu", at.double(), band[past : past + time])


def hidden_later(band, past, time):
    later = torch.ones(time, past + time).triu(past + 1).bool()
    return by_one_hot(band, past, time).masked_fill(later, -torch.inf)


def on_both_sides(band, past, time):
    """The distance without its sign would be fine: later keys do not matter."""
    back = torch.arange(past, past + time)[:, None] - torch.arange(past + time)
    at = back.abs()[..., None] == torch.arange(band.shape[1])
    return torch.einsum("tun,tn->tu", at.double(), band[past : past + time])


def moved(w, columns):
    return torch.roll(w, columns, 1)


def clamped(band, past, time):
    """Outside the window, the last entry goes on."""
    back = torch.arange(past, past + time)[:, None] - torch.arange(past + time)
    rows = band[past : past + time]
    return rows.gather(1, back.clamp(0, band.shape[1] - 1))


def shares(w):
    e = w.exp().tril()
    return e / e.sum(1, keepdim=True)


def counted(w):
    return torch.arange(1, len(w) + 1).double()[:, None]


def means(x):
    return torch.stack([x.diagonal(-n).mean() for n in range(len(x))])


def row_by_row(w):
    found = [[] for _ in w]
    for t, row in enumerate(w):
        even = torch.softmax(row[: t + 1], 0) * (t + 1)
        for n in range(t + 1):
            found[n].append(even[t - n])
    return torch.stack([sum(each) / len(each) for each in found])


def against_the_mean(w):
    """exp(w) over the mean of exp(w) in the row: the same quotient."""
    return means(w.exp().tril() / (w.exp().tril().sum(1, keepdim=True) / counted(w)))


def in_logarithms(w):
    later = torch.ones_like(w).triu(1).bool()
    total = torch.logsumexp(w.masked_fill(later, -math.inf), 1, keepdim=True)
    return means((w - total + counted(w).log()).exp())


def by_matrix(w):
    """Sums along diagonals as a product with all places."""
    time = len(w)
    back = torch.arange(time)[:, None] - torch.arange(time)
    at = (back[..., None] == torch.arange(time)).double()
    return torch.einsum("tu,tun->n", counted(w) * shares(w), at) / at.sum((0, 1))


def unit(raw, dim=1):
    return (raw - raw.mean(dim, keepdim=True)) / raw.std(
        dim, correction=0, keepdim=True
    )


def head_by_head(raw, gamma, beta):
    rows = zip(raw, gamma, beta, strict=True)
    return torch.stack([g * unit(r, 0) + b for r, g, b in rows])


def by_layer_norm(raw, gamma, beta):
    return gamma[:, None] * F.layer_norm(raw, raw.shape[1:], eps=0) + beta[:, None]


def by_length(raw, gamma, beta):
    centred = raw - raw.mean(1, keepdim=True)
    length = centred.square().sum(1).sqrt() / raw.shape[1] ** 0.5
    return torch.einsum("h,hn->hn", gamma / length, centred) + beta.unsqueeze(1)


def transposed(raw, gamma, beta):
    columns = raw.T
    squares = (columns * columns).mean(0) - columns.mean(0) ** 2
    return ((columns - columns.mean(0)) / squares.sqrt() * gamma + beta).T


def tap(heads, window, height=5.0, first=1):
    n = torch.arange(heads) + first
    return height * F.one_hot(n % window, window).double()


def in_pairs(heads, window):
    """Two keys for each head."""
    n = torch.arange(window) // 2
    return 5.0 * (n == torch.arange(heads)[:, None])


def up_to(heads, window):
    """All keys up to a distance: the heads differ by one key each."""
    return 5.0 * (torch.arange(window) < torch.arange(2, heads + 2)[:, None])


def in_lists(heads, window):
    w = [[-3.0] * window for _ in range(heads)]
    for i, row in enumerate(w):
        row[(i + 1) % window] = 4.0
    return torch.tensor(w)


WRONG = {
    "position_shift": {
        "right(band, past, time)[:, past:]": "returns a row for each",
        "right(band, past, time).T": "returns a row for each",
        "right(band, 0, past + time)": "returns a row for each",
        "right(band.roll(1, 1), past, time)": "puts entry n",
        "right(band.flip(0), past, time)": "puts entry n",
        "moved(right(band, past, time), 1)": "puts entry n",
        "clamped(band, past, time)": "has 0",
        "right(band, past, time) - 1e4 * (right(0 * band + 1, past, time) == 0)": "has 0",
        "right(band.roll(1, 0), past, time) if past else right(band, past, time)": "takes the rows",
        "moved(right(band, past, time), -past)": "takes the rows",
    },
    "read_bias": {
        "shares(w) * counted(w)": "returns a number",
        "means(shares(w)).sum()": "returns a number",
        "means(shares(w).T * counted(w))": "returns 1",
        "means(counted(w) * shares(w)).flip(0)[torch.randperm(len(w))] + 1": "returns 1",
        "(counted(w) * shares(w)).mean(0)": "returns 1",
        "means(counted(w).log() * shares(w))": "returns 1",
        "means(w).exp()": "does not change",
        "means((w - w.mean()).exp())": "does not change",
        "means(counted(w) * torch.softmax(w.T, 1).T) * 0 + means(w - w[:, :1]) + 1 + means(w)": "does not change",
        "means((w - w.mean(1, keepdim=True)).exp())": "does not look",
        "means(w.exp() / w.exp().mean(1, keepdim=True))": "does not look",
        "means((counted(w) * shares(w)).log()).exp()": "follows any",
        "(1 + right(w)) / 2": "follows any",
    },
    "mended_kernel": {
        "right(raw, gamma, beta).T": "returns the shape",
        "right(raw, gamma, beta).sum(1)": "returns the shape",
        "gamma[:, None] * unit(raw)": "follows Eq. 8 for one",
        "gamma[:, None] * (unit(raw) + beta[:, None])": "follows Eq. 8 for one",
        "gamma[:, None] * (raw - raw.mean(1, keepdim=True)) / raw.var(1, correction=0, keepdim=True) + beta[:, None]": "follows Eq. 8 for one",
        "gamma[:, None] * F.normalize(raw - raw.mean(1, keepdim=True)) + beta[:, None]": "follows Eq. 8 for one",
        "gamma[:, None] * torch.softmax(raw, 1) + beta[:, None]": "follows Eq. 8 for one",
        "gamma[:, None] * (raw - raw.mean(1, keepdim=True)) / raw.std(correction=0) + beta[:, None]": "follows Eq. 8 for several",
        "gamma[:, None] * (raw - raw.mean()) / raw.std(1, correction=0, keepdim=True) + beta[:, None]": "follows Eq. 8 for several",
        "gamma.mean() * unit(raw) + beta[:, None]": "follows Eq. 8 for several",
        "gamma[:, None] * unit(raw) + beta.mean()": "follows Eq. 8 for several",
    },
    "frozen_kernels": {
        "torch.zeros(window, heads)": "returns biases of",
        "torch.zeros(4, 16)": "returns biases of",
        "tap(heads, window).log()": "returns finite",
        "tap(heads, window, math.inf) * 0": "returns finite",
        "tap(heads, window, 1.0)": "beats",
        "-tap(heads, window)": "beats",
        "tap(heads, window, first=8)": "beats",
        "tap(heads, window).roll(-4, 1)": "beats",
        "-0.5 * torch.arange(window).expand(heads, -1).double()": "beats",
        "torch.ones(heads, window)": "beats",
        "(0.1 * torch.arange(heads * window)).reshape(heads, window)": "beats",
    },
}
TOLD: dict[str, dict[str, str]] = {}
RIGHT = {
    "position_shift": [
        place_by_place,
        wrapped,
        by_diagonals,
        by_one_hot,
        hidden_later,
        on_both_sides,
    ],
    "read_bias": [row_by_row, against_the_mean, in_logarithms, by_matrix],
    "mended_kernel": [head_by_head, by_layer_norm, by_length, transposed],
    "frozen_kernels": [tap, in_pairs, up_to, in_lists],
}
