"""Answers to the exercises of notebook 11."""

import numpy as np
import torch

NO_GRADIENT = {"break_it"}


def with_tricks(right, changed, trick):
    """The solution with other inputs for some tricks."""
    k, v, w = right(trick)
    if trick in changed:
        k, w = (x + 0 * y for x, y in zip(changed[trick], (k, w), strict=True))
    return k, v, w


def loud(k, v, w):
    """Ten times as large: still finite, and still wrong."""
    return 10 * k, v, 10 * w


def small(trick):
    """About as small as they can be."""
    k, w = torch.zeros(8).double(), torch.zeros(8, 8).double()
    v = torch.tensor([-1.0, 1] * 4).double()
    sizes = {"no maximum": 43.4, "plus epsilon": -5.9}
    if trick in sizes:
        return k + sizes[trick], v, w + sizes[trick]
    if trick == "clamped keys":
        k[0], k[1] = 30, 30.3
    elif trick == "tile maximum":
        k[0], w[0, 0], k[1:4], w[0, 1:4] = -26, -26, 26, 26
    elif trick == "maximum over time":
        k = torch.tensor([-52.0] * 4 + [52] * 4).double()
    else:
        k = torch.tensor([-52.0, 52] * 4).double()
        w = -k.expand(8, -1).clone()
    return k, v, w


def below(trick):
    """With exponentials that vanish, in place of some that are infinite."""
    k, v, w = small(trick)
    if trick == "no maximum":
        k, w = k - 96.5, w - 96.5
    return k, v, w


def in_numpy(trick):
    rng = np.random.default_rng(0)
    inputs = small(trick)
    return tuple(
        torch.from_numpy(x.numpy() * (1 + 0 * rng.random(x.shape))) for x in inputs
    )


def streamed(k, v, log_sum=-torch.inf):
    """By running log-sum-exp."""
    total, mean, y = torch.full_like(k[0], log_sum), torch.zeros_like(v[0]), []
    for k_t, v_t in zip(k, v, strict=True):
        total = torch.logaddexp(total, k_t)
        share = (k_t - total).exp()
        mean = mean + share * (v_t - mean)
        y.append(mean)
    return torch.stack(y)


def rows(k, v):
    return torch.stack(
        [(k[: t + 1].softmax(0) * v[: t + 1]).sum(0) for t in range(len(k))]
    )


def masked(k, v):
    scores = k[None].expand(len(k), -1, -1)
    future = torch.ones(len(k), len(k)).triu(1)[..., None] > 0
    return torch.einsum(
        "tuc,uc->tc", scores.masked_fill(future, -torch.inf).softmax(1), v
    )


def mean_by_sorting(k, v, w):
    """Keys from the largest to the smallest."""
    scores, order = (k + w).sort(1, descending=True)
    top = scores[:, :1]
    e = (scores - torch.where(top == -torch.inf, 0, top)).exp()
    below = e.sum(1)
    mean = (e * v.gather(1, order)).sum(1) / torch.where(below == 0, 1, below)
    return mean


def mean_by_logsumexp(k, v, w):
    scores = k + w
    total = scores.masked_fill((scores == -torch.inf).all(1, True), 0).logsumexp(
        1, True
    )
    return torch.einsum("bkc,bkc->bc", (scores - total).exp(), v)


def mean_by_columns(k, v, w):
    """A loop over channels and sequences."""
    result = []
    for scores, values in zip(
        (k + w).transpose(1, 2).flatten(0, 1),
        v.transpose(1, 2).flatten(0, 1),
        strict=True,
    ):
        real = scores > -torch.inf
        if real.any():
            result.append(scores[real].softmax(0) @ values[real])
        else:
            result.append(0 * values.sum())
    return torch.stack(result).view(len(k), -1)


def step_by_sigmoid(log_sum, mean, k, v):
    nothing = (log_sum == -torch.inf) & (k == -torch.inf)
    a, b = log_sum.masked_fill(nothing, 0.0), k.masked_fill(nothing, 0.0)
    share = torch.sigmoid(b - a) * ~nothing
    total = torch.logaddexp(a, b).masked_fill(nothing, -torch.inf)
    return total, (1 - share) * mean * ~nothing + share * v


def step_by_stacking(log_sum, mean, k, v):
    both, values = torch.stack([log_sum, k]), torch.stack([mean, v])
    nothing = (both == -torch.inf).all(0)
    both = both.masked_fill(nothing, 0.0)
    total = both.logsumexp(0).masked_fill(nothing, -torch.inf)
    return total, (both.softmax(0) * values).sum(0) * ~nothing


def step_by_softplus(log_sum, mean, k, v):
    """The larger one first."""
    large, small = torch.maximum(log_sum, k), torch.minimum(log_sum, k)
    nothing = large == -torch.inf
    gap = (small - large.masked_fill(nothing, 0.0)).masked_fill(nothing, 0.0)
    less = gap.exp() / (1 + gap.exp())
    share = torch.where(k >= log_sum, 1 - less, less) * ~nothing
    total = (large.masked_fill(nothing, 0.0) + gap.exp().log1p()).masked_fill(
        nothing, -torch.inf
    )
    return total, torch.where(nothing, 0.0, mean + share * (v - mean))


def streaming(k, v, start=None, rescale=True, shift=0.0):
    top = torch.full_like(k[0], -torch.inf) if start is None else start
    sums, y = torch.zeros(2, *k.shape[1:]).double(), []
    for k_t, v_t in zip(k, v, strict=True):
        new_top = torch.maximum(top, k_t) + shift
        weight = (k_t - new_top).exp()
        sums = sums * ((top - new_top).exp() if rescale else 1.0)
        sums = sums + weight * torch.stack([v_t, torch.ones_like(v_t)])
        top = new_top
        y.append(sums[0] / sums[1])
    return torch.stack(y)


ZEROS = torch.zeros(8).double(), torch.zeros(8, 8).double()
LARGE = ZEROS[0] + 90, ZEROS[1]


def unless_negative(k, v):
    return streamed(k.clamp(min=-700), v)


WRONG = {
    "break_it": {
        "right(trick)[:2]": "v [8] and w [8, 8]",
        "[x[:4] for x in right(trick)]": "v [8] and w [8, 8]",
        "[x + torch.nan for x in right(trick)]": "returns finite numbers",
        "[x * torch.inf for x in right(trick)]": "returns finite numbers",
        "[10 * x for x in right(trick)]": "returns finite numbers",
        "[0 * x for x in right(trick)]": "breaks 'no maximum'",
        "[x / 2 for x in right(trick)]": "breaks 'no maximum'",
        "with_tricks(right, {'plus epsilon': ZEROS}, trick)": "breaks 'plus epsilon'",
        "with_tricks(right, {'clamped keys': ZEROS}, trick)": "breaks 'clamped keys'",
        "with_tricks(right, {'maximum over time': LARGE}, trick)": (
            "breaks 'maximum over time'"
        ),
        "with_tricks(right, {'running maximum': LARGE}, trick)": (
            "breaks 'running maximum'"
        ),
        "with_tricks(right, {'tile maximum': LARGE}, trick)": "breaks 'tile maximum'",
        "loud(*right(trick))": "beyond 60",
    },
    "stream_mean": {
        "streamed(*inputs).sum(0)": "a mean for each step",
        "v.cummax(0)[0]": "all keys are equal",
        "v.cumsum(0) / torch.arange(1, len(v) + 1).double()[:, None]": "old keys",
        "streaming(*inputs, rescale=False)": "old keys",
        "streamed(2 * k, v)": "old keys",
        "streaming(*inputs, start=0 * k[0])": "very negative",
        "streamed(*inputs, log_sum=-100.0)": "very negative",
        "unless_negative(*inputs)": "very negative",
        "rows(k - k.amax(), v) + 0 / (k - k.amax()).exp()": "far larger key",
    },
}
TOLD = {
    "break_it": {
        "[x + torch.nan for x in right(trick)]": "NaN out of NaN is no find",
        "loud(*right(trick))": "keys and biases can work together",
    },
}
RIGHT = {
    "break_it": [
        small,
        below,
        in_numpy,
        lambda trick: [x.clone() for x in small(trick)],
    ],
    "mean_of": [mean_by_sorting, mean_by_logsumexp, mean_by_columns],
    "running_step": [step_by_sigmoid, step_by_stacking, step_by_softplus],
    "stream_mean": [streamed, rows, masked, streaming],
}
