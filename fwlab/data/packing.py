"""Pack documents of any length into rows of one length, without padding."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

#: The placeholder where a token has no target; `cross_entropy` ignores it.
NO_TARGET = -100


class Packed(NamedTuple):
    """Hold a batch of one row that is filled with documents.

    - `inputs`: tokens, `int64 [1, length]`.
    - `targets`: the token after each of them in the same document; -100,
      which `torch.nn.functional.cross_entropy` skips, for the last one of
      a document. `int64 [1, length]`.
    - `cu_seqlens`: where the documents begin in the row, and `length`
      last, `int32 [documents + 1]`. Other libraries use the same name.
    """

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor


def packed_rows(borders: Tensor, length: int) -> int:
    """Return the number of rows in an epoch, which contains every document once.

        >>> packed_rows(torch.tensor([0, 3, 8]), length=4)
        2

    - `borders`: borders of the documents, as from `token_file`.
    - `length`: length of a row, at least 1.
    - Returns the number of rows in an epoch.
    - Raises `ValueError` if `length` is out of range.
    """
    if length < 1:
        raise ValueError(f"expected length to be at least 1, got {length}")
    return -(-int(borders[-1]) // length)


def packed(
    tokens: Tensor, borders: Tensor, length: int, row: int, seed: int | None = None
) -> Packed:
    """Return one row of concatenated documents, with the target of each token.

    The documents of an epoch are put in an order and joined, and the whole
    is cut into rows. A document that does not fit continues in the next
    row, where it counts as a new one, so its state starts again. In each
    epoch, every token is an input exactly once, and a target exactly once,
    except the first token of each document, which is never a target. The
    last row of an epoch ends with zeros without targets, as a document of
    their own, unless the tokens fill it.

        >>> row = packed(torch.arange(8), torch.tensor([0, 3, 8]), 4, row=0)
        >>> print("inputs ", *row.inputs[0].tolist())
        inputs  0 1 2 3
        >>> print("targets", *row.targets[0].tolist())
        targets 1 2 -100 4

    - `tokens`, `borders`: as from `token_file`.
    - `length`: tokens in the row, at least 1.
    - `row`: from 0; an epoch has `packed_rows(borders, length)` rows, and
      the next one follows.
    - `seed`: determines, with the number of the epoch, the order of the
      documents; None = the order in the text.
    - Returns a `Packed`.
    - Raises `ValueError` for a number out of range, and for borders that
      are not those of the tokens.
    """
    if not len(tokens):
        raise ValueError("expected tokens to have at least 1 token, got 0")
    if (int(borders[0]), int(borders[-1])) != (0, len(tokens)):
        raise ValueError(
            f"expected borders from 0 to {len(tokens)}, the number of tokens, got "
            f"{int(borders[0])} to {int(borders[-1])}"
        )
    if row < 0:
        raise ValueError(f"expected row to be at least 0, got {row}")
    epoch, row = divmod(row, packed_rows(borders, length))
    sizes = borders.diff()
    order = torch.arange(len(sizes))
    if seed is not None:
        # Seed per epoch, so that a resumed run gets the same rows.
        generator = torch.Generator().manual_seed(seed + 1_000_003 * epoch)
        order = torch.randperm(len(sizes), generator=generator)
    ends = sizes[order].cumsum(0)
    step = torch.arange(row * length, min((row + 1) * length, len(tokens)))
    document = torch.searchsorted(ends, step, right=True)
    # For each token of the row, the index of this token in the text.
    index = borders[1:][order[document]] - ends[document] + step
    last = step + 1 == ends[document]
    inputs = tokens[index].long()
    targets = tokens[index + (~last).long()].long().masked_fill(last, NO_TARGET)
    rest = length - len(step)
    inside = ends[(ends > step[0]) & (ends < (row + 1) * length)] - step[0]
    first, end = torch.tensor([0]), torch.tensor([length])
    return Packed(
        F.pad(inputs, (0, rest))[None],
        F.pad(targets, (0, rest), value=NO_TARGET)[None],
        torch.cat([first, inside.unique(), end]).int(),
    )
