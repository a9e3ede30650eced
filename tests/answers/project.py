"""Answers to the exercises on a project of one's own."""

import contextlib
from itertools import combinations, permutations

import torch

from fwlab.exercises.project import FIELDS
from fwlab.exercises.solutions import delta_step

# --- by_luck ---------------------------------------------------------


def by_order(mine, theirs):
    """Right: every order of the runs, which counts each division equally often."""
    runs, n = torch.cat([mine, theirs]), len(mine)
    orders = torch.tensor(list(permutations(range(len(runs)))))
    return (runs[orders[:, :n]].mean(1) <= mine.mean() + 1e-9).double().mean().item()


def by_masks(mine, theirs):
    """Right: every set of runs as the bits of a number."""
    runs = torch.cat([mine, theirs])
    bits = torch.arange(2 ** len(runs))[:, None] >> torch.arange(len(runs)) & 1
    bits = bits[bits.sum(1) == len(mine)]
    return float((bits.double() @ runs <= mine.sum() + 1e-9).double().mean())


def by_hand(mine, theirs):
    """Right: run after run, in the first group or not."""
    runs = [*mine.tolist(), *theirs.tolist()]
    bar = sum(runs[: len(mine)]) + 1e-9

    def count(i, left, total):
        if left == 0:
            return int(total <= bar), 1
        if left > len(runs) - i:
            return 0, 0
        a = count(i + 1, left - 1, total + runs[i])
        b = count(i + 1, left, total)
        return a[0] + b[0], a[1] + b[1]

    below, all_of_them = count(0, len(mine), 0.0)
    return below / all_of_them


def by_difference(mine, theirs):
    """Right: compares differences of means."""
    runs, seen, n = torch.cat([mine, theirs]), mine.mean() - theirs.mean(), len(mine)
    hits = []
    for group in combinations(range(len(runs)), n):
        inside = torch.zeros(len(runs), dtype=torch.bool)
        inside[list(group)] = True
        hits.append(bool(runs[inside].mean() - runs[~inside].mean() <= seen + 1e-9))
    return sum(hits) / len(hits)


def sampled(mine, theirs, n=2000):
    """Draws divisions at random, so that the result is not exact."""
    runs, generator = torch.cat([mine, theirs]), torch.Generator().manual_seed(0)
    order = torch.rand(n, len(runs), generator=generator).argsort(1)
    groups = runs[order[:, : len(mine)]].mean(1)
    return (groups <= mine.mean() + 1e-9).double().mean().item()


def by_rank(mine, theirs, of=torch.sum):
    """Compares another number of the group than its mean."""
    runs = torch.cat([mine, theirs])
    groups = torch.stack(
        [of(torch.stack(g)) for g in combinations(runs.unbind(), len(mine))]
    )
    return (groups <= of(mine) + 1e-9).double().mean().item()


def all_or_one(mine, theirs):
    """Only knows the case of the notebook."""
    return 1 / 20 if mine.max() < theirs.min() else 1.0


def swapped(mine, theirs):
    return by_masks(theirs, mine)


# --- gain ------------------------------------------------------------


def by_loop(bar, mine):
    """Right: without PyTorch's argmin."""
    found = []
    for losses in (bar, mine):
        means = [(v.mean().item(), t) for v, t in zip(*losses, strict=True)]
        found.append(min(means, key=lambda pair: pair[0])[1].mean())
    return found[0] - found[1]


def by_sort(bar, mine):
    """Right: sorts rates by their validation loss."""
    order = [x[0].sum(1).argsort() for x in (bar, mine)]
    return bar[1][order[0][0]].mean() - mine[1][order[1][0]].mean()


def by_mask(bar, mine):
    """Right: a mask over all losses."""

    def at(x):
        means = x[0].mean(-1, keepdim=True)
        return (x[1] * (means == means.min())).sum() / x.shape[-1]

    return at(bar) - at(mine)


def by_gather(bar, mine):
    """Right: indexes both halves at once."""
    b, m = (x[:, x.mean(2)[0].argmin()].mean(1) for x in (bar, mine))
    return (b - m)[1]


def at_shared_rate(bar, mine):
    """The best rate of the bar for both."""
    best = bar[0].mean(1).argmin()
    return bar[1, best].mean() - mine[1, best.clamp(max=mine.shape[1] - 1)].mean()


def of_each_seed(bar, mine):
    """Each seed chooses a rate of its own."""

    def at(x):
        return x[1].gather(0, x[0].argmin(0)[None]).mean()

    return at(bar) - at(mine)


def over_rates(bar, mine):
    return bar[1].mean() - mine[1].mean()


def least_of_all(bar, mine):
    return bar[1].mean(1).min() - mine[1].min()


# --- unequal ---------------------------------------------------------


def in_booleans(a, b):
    """Right: booleans, field by field."""
    result = []
    for name in FIELDS:
        x, y = a.get(name), b.get(name)
        if x is None or y is None:
            result.append(True)
        elif name == "seeds":
            result.append(set(x) != set(y))
        elif name == "rates":
            result.append(len(set(x)) != len(set(y)))
        else:
            result.append(x != y)
    return torch.tensor(result)


def by_exceptions(a, b):
    """Right: what is missing raises an error."""
    kinds = [lambda x: x] * 2 + [frozenset] + [lambda x: x] * 2
    kinds.append(lambda x: len(frozenset(x)))
    result = torch.ones(6, dtype=torch.int64)
    for i, (name, kind) in enumerate(zip(FIELDS, kinds, strict=True)):
        with contextlib.suppress(KeyError):
            result[i] = int(kind(a[name]) != kind(b[name]))
    return result


def by_cases(a, b):
    """Right: a match for each kind of entry."""

    def comparable(record, name):
        match name, record.get(name):
            case _, None:
                return object()  # equals nothing else
            case "seeds", seeds:
                return sorted(set(seeds))
            case "rates", rates:
                return len(dict.fromkeys(rates))
            case _, value:
                return value

    return torch.tensor([comparable(a, n) != comparable(b, n) for n in FIELDS]).float()


def by_sets(a, b):
    """Right: what is shared, as sets of items."""

    def items(r):
        r = dict(r)
        if "seeds" in r:
            r["seeds"] = frozenset(r["seeds"])
        if "rates" in r:
            r["rates"] = len(set(r["rates"]))
        return set(r.items())

    shared = {name for name, _ in items(a) & items(b)}
    return torch.tensor([name not in shared for name in FIELDS]).double()


def plain(a, b):
    return torch.tensor([a.get(name) != b.get(name) for name in FIELDS]).double()


def raising(a, b):
    return torch.tensor([a[name] != b[name] for name in FIELDS]).double()


def nearly(a, b):
    """Forgives a per cent of the parameters."""
    result = in_booleans(a, b)
    x, y = a.get("parameters", 0), b.get("parameters", 1)
    result[0] = not 0.99 < x / y < 1.01
    return result


def only(a, b, name):
    """Looks at all but one entry."""
    result = in_booleans(a, b)
    result[list(FIELDS).index(name)] = False
    return result


def turned(a, b):
    return in_booleans(a, b).flip(0)


# --- my_step ---------------------------------------------------------


def away(W, k, v, by=0.1, strength=0.7, shrink=0.0, normed=False):
    """Right: writes less along directions that are used, in several ways."""
    old = (W @ k[..., None])[..., 0]
    size = W.square().sum((-1, -2))[..., None]
    used = (W.mT @ old[..., None])[..., 0]
    used = 8 * used / (1e-9 + size) if normed else used / v.square().sum(-1)[..., None]
    m = k - by * used
    m = m / (m * k).sum(-1, keepdim=True)
    s = strength / (1 + shrink * size / v.square().sum(-1)[..., None])
    return W + (s * (v - old))[..., :, None] * m[..., None, :]


def by_system(W, k, v):
    """Right: solves with the used directions."""
    H = torch.eye(8).double() + 0.15 * W.mT @ W / v.square().sum(-1)[..., None, None]
    m = torch.linalg.solve(H, k[..., None])[..., 0]
    m = m / (m * k).sum(-1, keepdim=True)
    old = torch.einsum("...vk,...k->...v", W, k)
    return W + 0.7 * torch.einsum("...v,...k->...vk", v - old, m)


def normed(W, k, v):
    """Right: used directions on the scale of the memory."""
    return away(W, k, v, 0.06, normed=True)


def shrinking(W, k, v):
    """Right: and the more is stored, the shorter the step."""
    return away(W, k, v, 0.1, 0.8, 0.05)


def gently(W, k, v):
    return away(W, k, v, by=0.06)


def step(W, k, v, strength):
    return delta_step(W, k, v, torch.ones_like(k[..., 0]) * strength)


def by_size(W, k, v):
    """Shorter steps into a full memory: better on average, by luck in most draws."""
    size = W.square().sum((-1, -2)) / v.square().sum(-1)
    return step(W, k, v, 1 / (1 + size / 8))


def of_a_batch(W, k, v):
    """The size of all memories together."""
    return step(W, k, v, 1 / (1 + W.norm()))


WRONG = {
    "by_luck": {
        "torch.tensor(right(mine, theirs)).double()": "returns 1/20",
        "bool(mine.mean() < theirs.mean())": "returns 1/20",
        "0.0": "returns 1/20",
        "swapped(*inputs)": "returns 1/20",
        "sampled(*inputs)": "returns 1/20",
        "1 / len(mine) ** 2": "returns 1/20",
        "1 / 20": "returns 1 if",
        "by_rank(mine, theirs, torch.max)": "for any runs",
        "by_rank(mine, theirs, torch.median)": "returns 1/20",
        "all_or_one(*inputs)": "for any runs",
    },
    "gain": {
        "right(bar, mine).item()": "returns a number as",
        "bar[1].mean(1) - mine[1].mean(1)": "returns a number as",
        "least_of_all(*inputs)": "with one rate",
        "right(bar, mine) / right(bar, mine).abs()": "with one rate",
        "right(bar, mine).abs()": "with one rate",
        "right(bar.flip(0), mine.flip(0))": "with one rate",
        "over_rates(*inputs)": "validation loss choose",
        "at_shared_rate(*inputs)": "validation loss choose",
        "of_each_seed(*inputs)": "validation loss choose",
    },
    "unequal": {
        "right(a, b).sum()": "returns six",
        "right(a, b)[:5]": "returns six",
        "torch.ones(6)": "in a record and its copy",
        "torch.zeros(6)": "however little",
        "turned(*inputs)": "however little",
        "nearly(*inputs)": "however little",
        "only(a, b, 'data')": "however little",
        "only(a, b, 'seeds')": "sets of seeds",
        "plain(*inputs)": "sets of seeds",
        "only(a, b, 'rates')": "counts different",
        "raising(*inputs)": "sets of seeds",
        "right(a, b) if right(a, b).sum() < 2 else torch.ones(6)": "several differences",
    },
    "my_step": {
        "W[..., :4]": "shape of W",
        "of_a_batch(*inputs)": "as if it were alone",
        "W": "beats the delta rule",
        "by_size(*inputs)": "beats the delta rule",
        "away(W, k, v, 0.5)": "beats the delta rule",
        "away(W, k, v, 0.1, 1.0)": "beats the delta rule",
        "0.95 * step(W, k, v, 0.7)": "beats the delta rule",
        "step(W, k, v, 0.8)": "beats the delta rule",
        "W + (v - (W @ k[..., None])[..., 0])[..., None] * torch.relu(k)[..., None, :]": (
            "beats the delta rule"
        ),
        "step(W, k.sign() / 8**0.5, v, 0.7)": "beats the delta rule",
    },
}
TOLD = {
    "by_luck": {
        "1 - swapped(mine, theirs)": "no result has probability 0",
        "2 * right(mine, theirs) if right(mine, theirs) < 0.5 else 1.0": "both directions",
    },
    "gain": {"by_loop(mine, bar)": "The sign is turned around"},
}
RIGHT = {
    "by_luck": [by_masks, by_hand, by_difference, by_order],
    "gain": [by_loop, by_sort, by_mask, by_gather],
    "unequal": [in_booleans, by_exceptions, by_cases, by_sets],
    "my_step": [by_system, normed, shrinking, gently],
}
NO_GRADIENT = {"by_luck", "gain", "unequal", "my_step"}
