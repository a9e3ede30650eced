"""Associative retrieval: pairs of keys and values, and what each key holds."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Retrieval(NamedTuple):
    """Sequences of pairs.

    - `keys`: the key of each step, from 0 to `symbols` - 1,
      `[batch, length]`.
    - `values`: the value of each step, likewise.
    - `answers`: the most recent value of each key after the whole
      sequence, `[batch, symbols]`; -1 for a key that does not occur.
    """

    keys: Tensor
    values: Tensor
    answers: Tensor


def retrieval(
    batch: int,
    symbols: int,
    length: int | None = None,
    *,
    repeat: bool = False,
    generator: torch.Generator | None = None,
) -> Retrieval:
    """The synthetic tasks of Schlag et al. 2021 (section 6.1).

    Setting 1 tests the capacity of a memory: every key occurs at most
    once. Setting 2 (`repeat=True`) tests whether it can be updated: keys
    return with new values, and the most recent one counts.

        >>> generator = torch.Generator().manual_seed(1)
        >>> task = retrieval(1, symbols=4, length=6, repeat=True, generator=generator)
        >>> print("keys  ", *task.keys[0].tolist())
        keys   1 3 0 0 3 1
        >>> print("values", *task.values[0].tolist())
        values 3 1 3 0 0 1
        >>> print("what keys 0 to 3 hold:", *task.answers[0].tolist())
        what keys 0 to 3 hold: 0 1 -1 0

    - `batch`: number of sequences, 0 or more.
    - `symbols`: number of different keys, and of different values, at
      least 1.
    - `length`: steps per sequence; None = `symbols`.
    - `repeat`: draw keys and values with replacement; False = without.
    - `generator`: on the CPU; None = PyTorch's own.
    - Returns a `Retrieval`.
    - Raises `ValueError` for sizes that do not fit.
    """
    length = symbols if length is None else length
    for name, size, least in (("batch", batch, 0), ("symbols", symbols, 1)):
        if size < least:
            raise ValueError(f"expected {name} to be at least {least}, got {size}")
    if length < 0 or (length > symbols and not repeat):
        most = "" if repeat else f" to {symbols}, the number of symbols"
        raise ValueError(f"expected length to be from 0{most}, got {length}")
    shape = (2, batch, length if repeat else symbols)
    if repeat:
        keys, values = torch.randint(symbols, shape, generator=generator)
    else:
        keys, values = torch.rand(shape, generator=generator).argsort(-1)[..., :length]
    return Retrieval(keys, values, _last_values(keys, values, symbols))


def _last_values(keys: Tensor, values: Tensor, symbols: int) -> Tensor:
    """The most recent value of each key, -1 for a key that does not occur."""
    step = torch.arange(keys.shape[1]).expand_as(keys)
    never = torch.full((len(keys), symbols), -1)
    last = never.scatter_reduce(1, keys, step, "amax")
    if not keys.shape[1]:
        return never
    return values.gather(1, last.clamp(min=0)).masked_fill(last < 0, -1)


def loss(found: Tensor, wanted: Tensor) -> Tensor:
    """Half the squared error against one-hot values, mean over queries.

    Finding nothing costs 0.5.
    """
    return (found - F.one_hot(wanted, found.shape[-1])).square().sum(-1).mean() / 2


def law(S: float, features: int) -> float:
    """The smallest loss of a memory with this many features, after S pairs.

    What is retrieved depends on the values by a matrix of that rank at most,
    and every direction of the identity that it lacks costs 0.5.
    """
    return max(0.0, 0.5 * (1 - features / S))
