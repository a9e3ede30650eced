r"""Packed sequences: documents of any length, one after another.

An operation computes sequences of equal length, each with a state of
its own. So every document becomes a row of a batch, padded with steps
that change no state, and the results go back to their places. Documents
of similar length share a batch: all batches together have at most twice
as many steps as the documents, and there are at most
$1 + \log_2(\text{longest} / \text{shortest})$ of them.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

#: Takes tensors by name, and returns `y` and the states after it.
Compute = Callable[..., tuple[Tensor, ...]]


def lengths(op: str, cu_seqlens: Tensor, time: int) -> list[int]:
    """The length of each document; this waits for the device."""
    if cu_seqlens.is_meta:
        raise ValueError(
            f"{op}: expected cu_seqlens with values, got a tensor on "
            "the device 'meta'"
        )
    borders = cu_seqlens.tolist()
    if borders[0] != 0:
        raise ValueError(
            f"{op}: expected cu_seqlens to begin with 0, "
            f"got {borders[0]}"
        )
    for start, stop in pairwise(borders):
        if stop < start:
            raise ValueError(
                f"{op}: expected cu_seqlens never to decrease, "
                f"got {start} before {stop}"
            )
    if borders[-1] != time:
        raise ValueError(
            f"{op}: expected cu_seqlens to end with the number of "
            f"steps, {time}, got {borders[-1]}"
        )
    return [b - a for a, b in pairwise(borders)]


def batches(lengths: Sequence[int]) -> list[list[int]]:
    """The documents that share a batch, as indices, longest first.

    A batch takes documents while at least half of its steps are real.
    So the longest one of the next batch is less than half as long.
    Empty documents are in no batch.
    """
    order = sorted(
        (i for i, length in enumerate(lengths) if length),
        key=lengths.__getitem__,
        reverse=True,
    )
    found: list[list[int]] = []
    padded = real = 0
    for i in order:
        real += lengths[i]
        if found:
            padded += lengths[found[-1][0]]
        if found and padded <= 2 * real:
            found[-1].append(i)
        else:
            found.append([i])
            padded = real = lengths[i]
    return found


def by_document(
    compute: Compute,
    lengths: Sequence[int],
    states: Collection[str],
    fills: Mapping[str, float],
) -> Compute:
    """The same computation for each document on its own.

    - `compute`: takes tensors `[batch, time, ...]` and states
      `[batch, ...]`, all by name, and returns `y` and the states.
    - `lengths`: those of the documents.
    - `states`: the names of the states, in their order.
    - `fills`: the values of padded steps, by name, where not 0.
    - Returns a function that takes and returns tensors
      `[1, time, ...]` and states `[documents, ...]`.
    """
    every = list(range(len(lengths)))
    groups = batches(lengths) or [every]
    idle = sorted({*every}.difference(*groups))  # empty documents
    by_group = torch.tensor([i for g in [*groups, idle] for i in g])
    sizes = [[lengths[i] for i in group] for group in groups]
    steps = torch.arange(sum(lengths)).split(list(lengths))
    by_step = torch.cat([steps[i] for i in by_group])

    def run(**given: Any) -> tuple[Tensor, ...]:
        device = next(iter(given.values())).device
        order, time = by_group.to(device), by_step.to(device)
        places = [_places(size).to(device) for size in sizes]
        parts: dict[str, Sequence[Tensor]] = {}
        for name, x in given.items():
            if name in states:
                x = x.index_select(0, order)
                parts[name] = x.split([*map(len, groups), len(idle)])
            elif isinstance(x, Tensor):
                x = x.flatten(0, 1).index_select(0, time)
                parts[name] = [
                    _rows(part, place, size, fills.get(name, 0))
                    for part, place, size in zip(
                        x.split([*map(sum, sizes)]),
                        places,
                        sizes,
                        strict=True,
                    )
                ]
        found = [
            compute(**given | {n: part[i] for n, part in parts.items()})
            for i in range(len(groups))
        ]
        y = torch.cat(
            [
                rows.flatten(0, 1).index_select(0, place)
                for (rows, *_), place in zip(found, places, strict=True)
            ]
        ).index_select(0, time.argsort())
        unchanged = [parts[n][-1] for n in states if n in parts]
        after = (
            torch.cat(each).index_select(0, order.argsort())
            for each in zip(
                *(after for _, *after in found), unchanged, strict=True
            )
        )
        return y[None], *after

    return run


def _places(lengths: list[int]) -> Tensor:
    """Where the real steps are in padded rows, one row after another."""
    steps = torch.arange(max(lengths))
    real = steps < torch.tensor(lengths)[:, None]
    return real.flatten().nonzero()[:, 0]


def _rows(
    x: Tensor, place: Tensor, lengths: list[int], fill: float
) -> Tensor:
    """`[steps, ...]` as padded rows `[documents, longest, ...]`."""
    shape = (len(lengths), max(lengths))
    padded = x.new_full((math.prod(shape), *x.shape[1:]), fill)
    return padded.index_copy(0, place, x).unflatten(0, shape)
