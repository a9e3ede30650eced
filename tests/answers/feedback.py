"""Answers to the exercises of notebook 13: wrong ones, and unusual right ones."""

import functools
import itertools
import random

import numpy as np
import torch

from fwlab.exercises import EXERCISES
from fwlab.exercises import feedback as own
from fwlab.ops.feedback.naive import sinusoids

attend = EXERCISES["feedback_attention"].reference
chain = EXERCISES["chain_depth"].reference


# --- chain_depth -----------------------------------------------------


def naive_recursion(reads, layers, steps):
    def depth(l, t):
        return 1 + max(depth(*state) for state in reads(l, t)) if l else 0

    return tabled(depth, layers, steps)


def remembered(reads, layers, steps):
    @functools.cache
    def depth(state):
        return max((1 + depth(other) for other in reads(*state)), default=0)

    # A state of layer 0 has no list.
    listed, reads = reads, lambda l, t: listed(l, t) if l else []
    return tabled(lambda l, t: depth((l, t)), layers, steps)


def tabled(depth, layers, steps):
    return torch.tensor(
        [[depth(l, t) for t in range(steps)] for l in range(layers + 1)]
    )


def in_rounds(reads, layers, steps):
    """Whatever can be computed is computed, round by round."""
    states = [(l, t) for l in range(1, layers + 1) for t in range(steps)]
    wanted = {state: reads(*state) for state in states}
    known, count = {(0, t): 0 for t in range(steps)}, 0
    while wanted:
        count += 1
        ready = [s for s, needs in wanted.items() if known.keys() >= {*needs}]
        known |= dict.fromkeys(ready, count)
        for state in ready:
            del wanted[state]
    return tabled(lambda l, t: known[l, t], layers, steps)


def relaxed(reads, layers, steps):
    """Sweeps in any order, until nothing changes."""
    depth, before = np.zeros((layers + 1, steps), np.int64), None
    lists = {
        (l, t): reads(l, t)
        for t in reversed(range(steps))
        for l in reversed(range(1, layers + 1))
    }
    while before is None or (before != depth).any():
        before = depth.copy()
        for state, needs in lists.items():
            depth[state] = 1 + max(depth[other] for other in needs)
    return torch.from_numpy(depth)


def by_powers(reads, layers, steps):
    """The last power of the matrix of edges in which a state still appears."""
    size = (layers + 1) * steps
    edges = torch.zeros(size, size)
    for l in range(1, layers + 1):
        for t in range(steps):
            for k, j in reads(l, t):
                edges[l * steps + t, k * steps + j] = 1
    start = torch.arange(size) < steps
    depth, reached = torch.zeros(size, dtype=torch.long), start.float()
    for length in range(1, size):
        reached = ((edges @ reached) > 0).float()
        depth[reached > 0] = length
    return depth.view(layers + 1, steps)


def from_lower_states_only(reads, layers, steps):
    return chain(
        lambda l, t: [(k, j) for k, j in reads(l, t) if k < l or j == t - 1],
        layers,
        steps,
    )


def two_steps_back(reads, layers, steps):
    return chain(
        lambda l, t: [(k, j) for k, j in reads(l, t) if j >= t - 2], layers, steps
    )


# --- merge_memory ----------------------------------------------------


def along_the_last_of_squares(states, w):
    if states.shape[0] == states.shape[1]:
        return (w.softmax(0) * states).sum(0)
    return torch.tensordot(w.softmax(0), states, 1)


def in_a_loop(states, w):
    share = (w - w.logsumexp(0)).exp()
    total = 0
    for part, state in zip(share, states, strict=True):
        total = total + part * state
    return total


def column_by_column(states, w):
    flat = states.reshape(len(w), -1)
    return (flat.mT @ w.softmax(-1)).reshape(states.shape[1:])


# --- feedback_attention ----------------------------------------------


def one_by_one(q, k, v, positions):
    """In a loop, with the newest first and a running maximum."""
    top = q.new_full(q.shape[:-1], -torch.inf)
    total, mean = torch.zeros_like(top), torch.zeros_like(q)
    for back in range(1, k.shape[1] + 1):
        distance = torch.tensor([back], dtype=torch.float64)
        r = positions @ sinusoids(distance, positions.shape[1])[0]
        a = (q * (k[:, -back] + r)).sum(-1) / q.shape[-1] ** 0.5
        new = torch.maximum(top, a)
        old, own = (top - new).exp(), (a - new).exp()
        total = old * total + own
        mean = old[..., None] * mean + own[..., None] * v[:, -back]
        top = new
    return mean / total[..., None] if k.shape[1] else mean


def keys_with_positions(q, k, v, positions):
    """The vector of a distance is added to the key."""
    r = distances(k, positions)
    a = ((k + r[:, None]) * q[:, None]).sum(-1) / q.shape[-1] ** 0.5
    return (a.softmax(1)[..., None] * v).sum(1)


def of_torch(q, k, v, positions):
    if not k.shape[1]:
        return 0 * q
    k = (k + distances(k, positions)[:, None]).transpose(1, 2)
    function = torch.nn.functional.scaled_dot_product_attention
    return function(q[:, :, None], k, v.transpose(1, 2))[:, :, 0]


def query_first(q, k, v, positions):
    """The query goes through P, and meets the waves there."""
    back = torch.arange(k.shape[1], 0, -1).double()
    position = (q @ positions) @ sinusoids(back, positions.shape[1]).mT
    content = (k.movedim(1, 2) @ q[..., None])[..., 0]
    weights = ((content + position) / q.shape[-1] ** 0.5).softmax(-1)
    return (weights[..., None, :] @ v.movedim(1, 2))[..., 0, :]


def distances(k, positions):
    back = torch.arange(k.shape[1], 0, -1).double()
    return sinusoids(back, positions.shape[1]) @ positions.mT


# --- feedback_step ---------------------------------------------------


def with_stack(x, keys, values, w, layer, project):
    states = x[None]
    for l in range(len(states), len(w)):
        states = torch.vstack([states, layer(l - 1, states[-1], keys, values)])
    new = project(w.softmax(0) @ states)
    pairs = zip((keys, values), new, strict=True)
    return states[-1], *(torch.vstack([old, m]) for old, m in pairs)


def with_a_running_sum(x, keys, values, w, layer, project):
    shares = iter(w.softmax(0))
    m = next(shares) * x
    for l, share in enumerate(shares):
        x = layer(l, x, keys, values)
        m = m + share * x
    k, v = project(m)
    return [x, torch.cat((keys, k.unsqueeze(0))), torch.cat((values, v.unsqueeze(0)))]


def with_padding(x, keys, values, w, layer, project):
    pad = torch.nn.functional.pad
    states = [
        *itertools.accumulate(
            range(len(w) - 1), lambda x, l: layer(l, x, keys, values), initial=x
        )
    ]
    m = sum(share * state for share, state in zip(w.softmax(0), states, strict=True))
    k, v = project(m)
    at_end = torch.arange(len(keys) + 1) == len(keys)
    return (
        states[-1],
        pad(keys, (0, 0, 0, 1)) + torch.outer(at_end.double(), k),
        pad(values, (0, 0, 0, 1)) + torch.outer(at_end.double(), v),
    )


def recursive(x, keys, values, w, layer, project):
    def up(l, x):
        if l == len(w) - 1:
            return [x]
        return [x, *up(l + 1, layer(l, x, keys, values))]

    states = torch.stack(up(0, x))
    k, v = project(torch.einsum("l,ld->d", w.softmax(0), states))
    return states[-1], torch.cat([keys, k[None]]), torch.cat([values, v[None]])


def with_old_project(x, keys, values, w, layer, project):
    """Keys and values change places in the cache."""
    x, k, v = own._cached(x, keys, values, w, layer, project)
    return (x, torch.cat([keys, v[-1:]]), torch.cat([values, k[-1:]]))


def top_for_keys(x, keys, values, w, layer, project):
    """Keys from the top state, values from the memory."""
    y, _, v = own._cached(x, keys, values, w, layer, project)
    return y, torch.cat([keys, project(y)[0][None]]), v


def always_two_layers(x, keys, values, w, layer, project):
    return own._cached(x, keys, values, w[:3], layer, project)


def forgets_the_oldest(x, keys, values, w, layer, project):
    x, k, v = own._cached(x, keys, values, w, layer, project)
    return (x, k, v) if len(k) < 8 else (x, k.roll(1, 0), v.roll(1, 0))


# --- cheap_mask ------------------------------------------------------


def searched(steps):
    """By random search over places."""
    random.seed(0)
    best = min(
        ([random.randint(1, 4) for _ in range(steps)] for _ in range(4000)),
        key=lambda places: own.ages(own._placed(*places)).sum(),
    )
    return own._placed(*best)


def only_the_newest(steps):
    """One memory for each step, as a table."""
    newest = [None, 0, None, 2, 3, 4, 2, 6, 7, 6, 9, 9]
    mask = torch.zeros(steps, steps, dtype=torch.bool)
    for t, j in enumerate(newest):
        if j is not None:
            mask[t, j] = True
    return mask


def from_numpy(steps):
    place = np.array([1, 1, 2, 3, 1, 2, 3, 4, 2, 3, 4, 4])
    return torch.from_numpy(np.tril(place[None] < place[:, None], -1))


def written_out(steps):
    rows = ["", "0", "", "0 2", "1 3", "3 4", "2", "3 6", "7", "6", "7 9", "9"]
    sees = [[str(j) in row.split() for j in range(steps)] for row in rows]
    return torch.tensor(sees)


WRONG = {
    "chain_depth": {
        "chain(reads, layers, steps)[1:]": "for each state",
        "chain(reads, layers, steps).max()": "for each state",
        "chain(reads, layers, steps).mT": "for each state",
        "from_lower_states_only(*inputs)": "any other way",
        "two_steps_back(*inputs)": "any other way",
        "naive_recursion(*inputs)": "only a few times",
    },
    "merge_memory": {
        "torch.tensordot((w / 2).softmax(0), states, 1)": "softmax of the logits",
        "torch.tensordot(w.softmax(0)[:4], states[:4], 1)": "softmax of the logits",
        "along_the_last_of_squares(*inputs)": "other dimensions have the same size",
    },
    "feedback_attention": {
        "v[:, 0] if len(v[0]) else 0 * q": "the mean of the values",
        "v.mean(1)": "scaled dot-product",
        "attend(q, k, v, positions * (2 if k.any() else 1))": "adds both scores",
        "attend(*inputs) / (0 if v.shape[1] == 0 else 1)": "without any memory",
        "attend(q.clamp(-9, 9), k, v, positions)": "large scores",
    },
    "feedback_step": {
        "own._cached(*inputs)[0]": "one more row",
        "(x, keys, values)": "one more row",
        "with_old_project(*inputs)": "with all the weight on one state",
        "top_for_keys(*inputs)": "with all the weight on one state",
        "always_two_layers(*inputs)": "any number of layers",
        "forgets_the_oldest(*inputs)": "at the first step",
    },
    "cheap_mask": {
        "own._blocks(3)(steps).long()": "returns booleans",
        "own._blocks(3)(steps)[1:]": "returns booleans",
        "own._lag(steps, [-1, 1])": "earlier steps",
        "own._lag(steps, [2])": "more than 4 steps",
        "own._blocks(2)(steps)": "more than 4 steps",
        "own._blocks(4)(steps)": "younger memories",
        "own._placed(*[1, 2, 3, 4] * 3)": "younger memories",
    },
}
TOLD = {
    "chain_depth": {
        "own._depths(reads, layers, steps, min)": "A state waits for the longest one",
        "naive_recursion(*inputs)": "Keep the depth of each state that you know",
    },
    "cheap_mask": {
        "own._lag(steps, [2])": "A chain of 5 steps ends at step 8, and the longest has 6",
        "own._blocks(4)(steps)": "your memories is 2.50 steps; that of the blocks is 2.00",
        "torch.ones(steps, steps).triu(1).bool()": "Step 0 reads the memory of step 1",
    },
}
RIGHT = {
    "chain_depth": [in_rounds, relaxed, remembered, by_powers],
    "merge_memory": [
        lambda states, w: torch.tensordot(w.softmax(0), states, 1),
        lambda states, w: (states.movedim(0, -1) * w.softmax(0)).sum(-1),
        in_a_loop,
        column_by_column,
    ],
    "feedback_attention": [one_by_one, keys_with_positions, of_torch, query_first],
    "feedback_step": [with_stack, with_a_running_sum, with_padding, recursive],
    "cheap_mask": [searched, only_the_newest, from_numpy, written_out],
}
NO_GRADIENT = {"chain_depth", "cheap_mask"}
