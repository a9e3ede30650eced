"""Which part of a text each optimiser step reads.

It follows from the configuration and the number of the step alone: a run
that was stopped continues where it was.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fwlab.data import Tokens, packed
from fwlab.training.config import Config


class Batch(NamedTuple):
    """The windows or documents that are read at once.

    - `inputs`, `targets`: `int64 [windows, time]`: the tokens, and the one
      after each of them; -100 = no target.
    - `cu_seqlens`: the borders of packed documents, or None.
    - `begins`: whether these windows continue nothing that was read before.
    """

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None
    begins: bool

    def to(self, device: torch.device) -> "Batch":
        inputs, targets, borders, begins = self
        if borders is not None:
            borders = borders.to(device)
        return Batch(inputs.to(device), targets.to(device), borders, begins)


def batch(text: Tokens, config: Config, step: int, part: int, parts: int) -> Batch:
    """An equal share of the windows of a step.

    - `text`: the training text.
    - `step`: number of optimiser steps so far, from 0.
    - `part`: which share, from 0 to `parts - 1`; `config.batch` is a multiple
      of `parts`.
    """
    rows = config.batch // parts
    if config.pack:
        # A row for each share, so that every document is in one of them.
        length, row = rows * config.block, step * parts + part
        return Batch(*packed(*text, length, row, config.seed), begins=True)
    here = slice(part * rows, (part + 1) * rows)
    if config.carry:
        return _in_order(text.tokens, config, step, here)
    length = config.block_at(step)
    generator = torch.Generator().manual_seed(config.seed + 1_000_003 * step)
    count = len(text.tokens) - length
    starts = torch.randint(count, (config.batch,), generator=generator)[here]
    windows = text.tokens[starts[:, None] + torch.arange(length + 1)]
    return _cut(windows, begins=True)


def _in_order(tokens: Tensor, config: Config, step: int, here: slice) -> Batch:
    """The next window of each row of the text, and again from the beginning."""
    rows, length = in_rows(tokens, config.batch)[here], config.block
    start = step % ((rows.shape[1] - 1) // length) * length
    return _cut(rows[:, start : start + length + 1], begins=start == 0)


def in_rows(tokens: Tensor, rows: int) -> Tensor:
    """A text cut into pieces of equal length; what is left over is dropped.

    - `tokens`: `[tokens]`.
    - Returns `[rows, tokens // rows]`.
    """
    length = len(tokens) // rows
    return tokens[: rows * length].view(rows, length)


def _cut(windows: Tensor, begins: bool) -> Batch:
    windows = windows.long()
    return Batch(windows[:, :-1], windows[:, 1:], None, begins)
