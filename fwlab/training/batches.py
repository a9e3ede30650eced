"""Which part of a text each optimiser step reads."""

from typing import NamedTuple

import torch
from torch import Tensor

from fwlab.training.config import Config


class Batch(NamedTuple):
    """What one optimiser step reads.

    - `inputs`, `targets`: `int64 [windows, time]`, the same window and the
      one that begins a character later.
    - `begins`: whether these windows continue nothing that was read before.
    """

    inputs: Tensor
    targets: Tensor
    begins: bool


def batch(tokens: Tensor, config: Config, step: int) -> Batch:
    """The windows of a step, of all processes together.

    They depend on nothing but the arguments: a run that was stopped goes on
    where it was, whatever has happened since.

    - `tokens`: the training text, `[characters]`.
    - `step`: number of optimiser steps so far, from 0.
    """
    if config.carry:
        return _in_order(tokens, config, step)
    length = config.block_at(step)
    generator = torch.Generator().manual_seed(config.seed + 1_000_003 * step)
    starts = torch.randint(len(tokens) - length, (config.batch,), generator=generator)
    return _cut(tokens[starts[:, None] + torch.arange(length + 1)], begins=True)


def _in_order(tokens: Tensor, config: Config, step: int) -> Batch:
    """The next window of each row of the text, and again from the beginning."""
    rows, length = in_rows(tokens, config.batch), config.block
    start = step % ((rows.shape[1] - 1) // length) * length
    return _cut(rows[:, start : start + length + 1], begins=start == 0)


def in_rows(tokens: Tensor, rows: int) -> Tensor:
    """A text cut into pieces of equal length; what is left over is dropped.

    - `tokens`: `[characters]`.
    - Returns `[rows, characters // rows]`.
    """
    length = len(tokens) // rows
    return tokens[: rows * length].view(rows, length)


def _cut(windows: Tensor, begins: bool) -> Batch:
    windows = windows.long()
    return Batch(windows[:, :-1], windows[:, 1:], begins)
