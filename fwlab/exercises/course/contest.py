"""A contest of rules that takes seconds: equal parameters, data and seeds.

The task is that of the retrieval experiments, made small. A stream of 16 pairs of
symbols is written into one memory; keys come again with new values. Then the
memory is asked for one of its keys, and has to name the newest value.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

#: Takes `W` `[..., value, key]`, `k` `[..., key]` and `v` `[..., value]`; returns
#: the new memory.
Step = Callable[[Tensor, Tensor, Tensor], Tensor]

SYMBOLS, TIME, BATCH, WINDOWS = 8, 16, 32, 500


def contest(
    step: Step,
    rates: Sequence[float] = (0.03, 0.1, 0.3),
    seeds: Sequence[int] = (0, 1, 2),
    *,
    width: int = 6,
    steps: int = 120,
) -> dict[str, Any]:
    """Train a small layer with a rule, once for each rate and seed.

    Each key symbol has a trained strength between 0 and 1: how far the memory goes
    from W to what the rule returns. So all rules have the same parameters.

    - `step`: the rule. It has to work on any leading dimensions.
    - `rates`: the learning rates to try.
    - `seeds`: each draws the initial weights and the training streams.
    - `width`: of keys and values; a wider layer has more parameters.
    - `steps`: optimiser steps.
    - Returns a record. `validation` and `test` hold a loss for each rate and seed;
      the rest says what was compared, as `fairness` reads it.
    """
    held_out = [_streams(seed, WINDOWS) for seed in (10**6, 10**6 + 1)]
    losses, size = [], 0
    for rate in rates:
        weights = [_start(seed, width) for seed in seeds]
        theta = [torch.stack(w).requires_grad_() for w in zip(*weights, strict=True)]
        size = sum(w[0].numel() for w in theta)
        adam = torch.optim.Adam(theta, lr=rate)
        slower = torch.optim.lr_scheduler.LinearLR(adam, 1, 0.05, steps)
        with torch.enable_grad():
            for i in range(steps):
                batches = [_streams(steps * seed + i, BATCH) for seed in seeds]
                adam.zero_grad()
                _losses(step, theta, batches).sum().backward()
                adam.step()
                slower.step()
        with torch.no_grad():
            both = [_losses(step, theta, [part] * len(seeds)) for part in held_out]
        losses.append([[round(x, 4) for x in part.tolist()] for part in both])
    seen = b"".join(x.numpy().tobytes() for part in held_out for x in part)
    return {
        "parameters": size,
        "data": hashlib.sha256(seen).hexdigest(),
        "seeds": [*seeds],
        "tokens": steps * BATCH * TIME,
        "windows": WINDOWS,
        "rates": [*rates],
        "validation": [part for part, _ in losses],
        "test": [part for _, part in losses],
    }


def best(record: dict[str, Any]) -> tuple[float, list[float]]:
    """Return the rate with the smallest mean validation loss, and its test losses."""
    means = [sum(losses) / len(losses) for losses in record["validation"]]
    chosen = means.index(min(means))
    return record["rates"][chosen], record["test"][chosen]


def _streams(seed: int, n: int) -> list[Tensor]:
    """Keys and values `[n, time]`, a key that is asked for, and its newest value."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randint(SYMBOLS, (2, n, TIME), generator=generator)
    row = torch.arange(n)
    ask = keys[row, torch.randint(TIME, (n,), generator=generator)]
    newest = ((keys == ask[:, None]) * torch.arange(1, TIME + 1)).argmax(1)
    return [keys, values, ask, values[row, newest]]


def _start(seed: int, width: int) -> list[Tensor]:
    """Embeddings of keys, queries and values; strengths; what reads the symbol."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(SYMBOLS, width)] * 3 + [(SYMBOLS,), (SYMBOLS, width)]
    scales = [width**-0.5] * 3 + [1.0, 1.0]
    return [
        scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape, scale in zip(shapes, scales, strict=True)
    ]


def _losses(step: Step, theta: list[Tensor], batches: list[list[Tensor]]) -> Tensor:
    """Return the mean loss of each seed, `[seeds]`."""
    K, Q, V, strength, out = theta
    keys, values, ask, wanted = map(torch.stack, zip(*batches, strict=True))
    seed = torch.arange(len(keys))[:, None]
    W = K.new_zeros(*ask.shape, V.shape[-1], K.shape[-1])
    for key, value in zip(keys.unbind(-1), values.unbind(-1), strict=True):
        new = step(W, K[seed, key], V[seed, value])
        W = W + strength[seed, key].sigmoid()[..., None, None] * (new - W)
    y = torch.einsum("snvk,snk->snv", W, Q[seed, ask])
    scores = torch.einsum("snv,scv->snc", y, out)
    each = F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="none")
    return each.reshape(wanted.shape).mean(1)
