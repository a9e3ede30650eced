"""Turn the text of a run into tokens, and choose the part that each step reads.

The choice depends only on the configuration and the number of the step: a run that was
stopped continues where it was.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fwlab import data
from fwlab.data import CorpusError, Splits, Text, Tokens, Vocabulary
from fwlab.training.config import Config

#: Number of characters above which the tokens of a text are mapped from a file.
LARGE = 2**26
#: Maximum number of logits in a validation batch, which take 1 GiB in float32.
LOGITS = 2**28


def run_text(
    config: Config, text: str | None, vocabulary: Vocabulary | None = None
) -> tuple[Vocabulary, Tokens, Tokens, str]:
    """Load the text of a run, and return vocabulary, tokens and SHA-256.

    - `text`: a text to use instead of `config.corpus`.
    - `vocabulary`: the vocabulary of an earlier part of the run.
    - Returns the vocabulary, the training text and the validation text as tokens, and
      the SHA-256 of the whole text.
    - Raises `CorpusError` if a split is shorter than a window.
    """
    parts = data.splits(config.corpus) if text is None else Splits.of(text)
    sha256 = parts.sha256()
    if vocabulary is None and config.tokens == "words":
        vocabulary = data.Words.of(parts.train.pieces())
    elif vocabulary is None:
        pieces = (part.pieces() for part in parts if part is not None)
        vocabulary = data.Characters.of(chain.from_iterable(pieces))
    train, valid = (_tokens(config, part, vocabulary) for part in parts[:2])
    sizes = len(train.tokens), len(valid.tokens)
    if min(sizes) < config.block + 1:
        raise CorpusError(
            f"expected at least block + 1 = {config.block + 1} {config.tokens} to train "
            "on, and as many to validate on (a tenth of a text that is cut), got "
            f"{sizes[0]} and {sizes[1]}"
        )
    least = config.batch * (config.block + 1)
    if config.carry and sizes[0] < least:
        raise CorpusError(
            f"expected at least batch * (block + 1) = {least} {config.tokens} to train "
            f"on in order, got {sizes[0]}"
        )
    return vocabulary, train, valid, sha256


def _tokens(config: Config, text: Text, vocabulary: Vocabulary) -> Tokens:
    if sum(map(len, text.documents)) < LARGE:
        tokens, borders = data.token_file(text, vocabulary, None)
        return Tokens(tokens.long(), borders)
    import pooch

    name = f"{text.sha256()[:16]}-{len(text.documents)}-{config.tokens}"
    path = Path(pooch.os_cache("fwlab"), "tokens", name)
    return data.token_file(text, vocabulary, path)


class Batch(NamedTuple):
    """Hold the windows or documents that a model reads at once.

    - `inputs`, `targets`: `int64 [windows, time]`: the tokens, and the one after each
      of them; -100 = no target.
    - `cu_seqlens`: the borders of packed documents, or None.
    - `begins`: True if these windows continue nothing that was read before.
    """

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None = None
    begins: bool = True


def batch(text: Tokens, config: Config, step: int, part: int, parts: int) -> Batch:
    """Return one of the micro-batches of an optimiser step.

    - `text`: the training text.
    - `step`: number of optimiser steps so far, from 0.
    - `part`: index of the part, from 0 to `parts - 1`; `config.batch` is a multiple of
      `parts`.
    """
    rows = config.batch // parts
    here = slice(part * rows, (part + 1) * rows)
    if config.pack:
        # Each part is one row, so that every document is in one part only.
        length, row = rows * config.block, step * parts + part
        return Batch(*data.packed(*text, length, row, config.seed))
    if config.carry:
        # Take the next window of each row of the text, and restart at the end.
        ordered, length = in_rows(text.tokens, config.batch)[here], config.block
        start = step % ((ordered.shape[1] - 1) // length) * length
        window = ordered[:, start : start + length + 1].long()
        return Batch(window[:, :-1], window[:, 1:], begins=start == 0)
    length = config.block_at(step)
    generator = torch.Generator().manual_seed(config.seed + 1_000_003 * step)
    count = len(text.tokens) - length
    starts = torch.randint(count, (config.batch,), generator=generator)[here]
    return _windows(text.tokens, starts, length)


def all_batches(
    text: Tokens, config: Config, vocabulary: int, windows: int | None, rows: int
) -> Iterator[Batch]:
    """Split a validation text into batches, from the beginning of the text.

    - `vocabulary`: number of different tokens.
    - `windows`: as in `Trainer.evaluate`.
    - `rows`: with `config.carry`, the number of pieces of the text that are read side
      by side.
    """
    block = config.block
    at_once = max(1, min(128, LOGITS // (vocabulary * block)))
    if config.carry:
        ordered = in_rows(text.tokens, rows).long()
        if windows is not None:
            ordered = ordered[:, : windows * block + 1]
        # The number of steps per part, 1024, does not change the result.
        for start in range(0, ordered.shape[1] - 1, 1024):
            part = ordered[:, start : start + 1025]
            yield Batch(part[:, :-1], part[:, 1:], begins=start == 0)
    elif config.pack:
        count = data.packed_rows(text.borders, at_once * block)
        if windows is not None:
            count = min(count, -(-windows // at_once))
        for row in range(count):
            yield Batch(*data.packed(*text, at_once * block, row))
    else:
        count = (len(text.tokens) - 1) // block
        starts = torch.arange(count)
        if windows is not None and windows < count:
            starts = torch.linspace(0, count - 1, windows).long()
        for part in (starts * block).split(at_once):
            yield _windows(text.tokens, part, block)


def _windows(tokens: Tensor, starts: Tensor, length: int) -> Batch:
    windows = tokens[starts[:, None] + torch.arange(length + 1)].long()
    return Batch(windows[:, :-1], windows[:, 1:])


def in_rows(tokens: Tensor, rows: int) -> Tensor:
    """Split the tokens of a text into rows of equal length, and drop the rest.

    - `tokens`: `[tokens]`.
    - Returns `[rows, tokens // rows]`.
    """
    length = len(tokens) // rows
    return tokens[: rows * length].view(rows, length)
