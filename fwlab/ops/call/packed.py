r"""Packed sequences: documents of any length, one after another.

An operation computes sequences of equal length, each with a state of its own. So every
document becomes a row of a batch, padded with steps that change no state, and the
results go back to their places. Documents of similar length share a batch: all batches
together have at most twice as many steps as the documents, and there are at most $1 +
\log_2(\text{longest} / \text{shortest})$ of them.
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
            f"{op}: expected cu_seqlens with values, got a tensor on the device 'meta'"
        )
    # Not `tolist`, which `torch.func` cannot call in PyTorch 2.6.
    borders = [int(border) for border in cu_seqlens.cpu()]
    if borders[0] != 0:
        raise ValueError(f"{op}: expected cu_seqlens to begin with 0, got {borders[0]}")
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

    A batch takes documents while at least half of its steps are real. So the longest
    one of the next batch is less than half as long. Empty documents are in no batch.
    """
    order = sorted(
        (i for i, length in enumerate(lengths) if length),
        key=lengths.__getitem__,
        reverse=True,
    )
    groups: list[list[int]] = []
    padded = real = 0
    for i in order:
        real += lengths[i]
        if groups:
            padded += lengths[groups[-1][0]]
        if groups and padded <= 2 * real:
            groups[-1].append(i)
        else:
            groups.append([i])
            padded = real = lengths[i]
    return groups


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
    shapes = [(len(g), max(lengths[i] for i in g)) for g in groups]
    # The rows of all groups are one after another.
    row, total = [0] * len(lengths), 0
    for group, (_, longest) in zip(groups, shapes, strict=True):
        for i in group:
            row[i], total = total, total + longest
    by_step = torch.cat(
        [
            torch.arange(start, start + length)
            for start, length in zip(row, lengths, strict=True)
        ]
    )

    def run(**tensors: Any) -> tuple[Tensor, ...]:
        device = next(iter(tensors.values())).device
        order, place = by_group.to(device), by_step.to(device)
        parts: dict[str, Sequence[Tensor]] = {}
        for name, x in tensors.items():
            if name in states:
                x = x.index_select(0, order)
                parts[name] = x.split([*map(len, groups), len(idle)])
            elif isinstance(x, Tensor):
                rows = x.new_full((total, *x.shape[2:]), fills.get(name, 0)).index_copy(
                    0, place, x.flatten(0, 1)
                )
                parts[name] = [
                    part.unflatten(0, shape)
                    for part, shape in zip(
                        rows.split([*map(math.prod, shapes)]), shapes, strict=True
                    )
                ]
        computed = [
            compute(**tensors | {n: part[i] for n, part in parts.items()})
            for i in range(len(groups))
        ]
        y = torch.cat([rows.flatten(0, 1) for rows, *_ in computed])
        unchanged = [parts[n][-1] for n in states if n in parts]
        after = (
            torch.cat(each).index_select(0, order.argsort())
            for each in zip(*(after for _, *after in computed), unchanged, strict=True)
        )
        return y.index_select(0, place)[None], *after

    return run
