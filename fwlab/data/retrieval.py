"""Draw associative retrieval tasks: key-value pairs, and the last value of each key."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Retrieval(NamedTuple):
    """Hold sequences of key-value pairs, and the last value of each key.

    - `keys`: the key of each step, from 0 to `symbols` - 1,
      `[batch, length]`.
    - `values`: the value of each step, `[batch, length]`.
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
    """Draw a batch of the synthetic tasks of Schlag et al. 2021 (section 6.1).

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
    - `generator`: on the CPU; None = PyTorch's default generator.
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
    return Retrieval(keys, values, last_values(keys, values, symbols))


def last_values(keys: Tensor, values: Tensor, symbols: int) -> Tensor:
    """Return the most recent value of each key, or -1 for a key that does not occur."""
    step = torch.arange(keys.shape[1]).expand_as(keys)
    never = torch.full((len(keys), symbols), -1)
    last = never.scatter_reduce(1, keys, step, "amax")
    if not keys.shape[1]:
        return never
    return values.gather(1, last.clamp(min=0)).masked_fill(last < 0, -1)


def loss(found: Tensor, wanted: Tensor) -> Tensor:
    """Return half the squared error against one-hot values, averaged over queries.

    Retrieving nothing has a loss of 0.5.
    """
    return (found - F.one_hot(wanted, found.shape[-1])).square().sum(-1).mean() / 2


def law(S: float, features: int) -> float:
    """Return the lowest possible loss for `S` pairs and a given number of features.

    Retrieved values are a linear map of the values, of rank at most `features`,
    and every direction of the identity that the map lacks costs 0.5.
    """
    return max(0.0, 0.5 * (1 - features / S))


def columns(table: str) -> dict[str, dict[int, float]]:
    """Parse a text table of losses with a column per name and a row per S.

    - `table`: lines of words; the first has the names, and "-" means no number.
    - Returns the numbers of each name by S.
    """
    (_, *names), *rows = (line.split() for line in table.strip().splitlines())
    return {
        name: {int(row[0]): float(row[at]) for row in rows if row[at] != "-"}
        for at, name in enumerate(names, 1)
    }


#: Figure 2 of Schlag et al. 2021: final losses of setting 1 in the authors' logs.
#: Each loss is the result of a single seed.
#: Softmax losses of at most 0.001 are left out, including all those for S up to 340.
FIGURE_2 = columns("""
  S  linear  dpfp-1  dpfp-2  dpfp-3  favor-64  favor-128  favor-512  softmax
 20  0.0009  0.0008  0.0003  0.0005    0.1300     0.0797     0.0453        -
 40  0.0008  0.0003  0.0006  0.0009    0.2982     0.2102     0.0762        -
 60  0.0246  0.0004  0.0010  0.0005    0.4926     0.4849     0.4090        -
 80  0.1101  0.0002  0.0006  0.0007    0.5002     0.4999     0.5000        -
100  0.1715  0.0002  0.0005  0.0005    0.5000     0.5000     0.5000        -
120  0.2324  0.0086  0.0003  0.0005    0.5000     0.5000     0.5002        -
140  0.2724  0.0532  0.0005  0.0009    0.5000     0.5000     0.5000        -
160  0.3012  0.1023  0.0004  0.0002    0.5000     0.5000     0.5000        -
180  0.3225  0.1431  0.0003  0.0004    0.5000     0.5000     0.5000        -
200  0.3426  0.1751  0.0004  0.0009    0.5000     0.5000     0.5000        -
240  0.3658  0.2297  0.0005  0.0005    0.5000     0.5000     0.5000        -
260  0.3797  0.2715  0.0097  0.0004    0.5000     0.5000     0.5000        -
280  0.3911  0.2840  0.0456  0.0009    0.5000     0.5000     0.5000        -
300  0.4001  0.2881  0.0681  0.0003    0.5000     0.5000     0.5000        -
340  0.4110  0.3466  0.1303  0.0001    0.5000     0.5000     0.5000        -
360  0.4214  0.3389  0.1599  0.0045    0.5000     0.5000     0.5000   0.0268
380  0.4012  0.3378  0.1485  0.0088    0.5000     0.5000     0.5000        -
400  0.4222  0.3464  0.1662  0.0361    0.5000     0.5000     0.5000        -
460       -       -       -       -         -          -          -   0.0089
500  0.4343  0.3886  0.2806  0.1718    0.5000     0.5000     0.5000   0.1741
520       -       -       -       -         -          -          -   0.0089
540       -       -       -       -         -          -          -   0.0446
560       -       -       -       -         -          -          -   0.0357
580       -       -       -       -         -          -          -   0.0313
600  0.4517  0.4177  0.3263  0.2012    0.5000     0.5000     0.5000   0.0536
""")
