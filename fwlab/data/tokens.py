"""The tokens of a text, in a file that is mapped into memory."""

import hashlib
import io
import json
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fwlab.data.corpus import CorpusError
from fwlab.data.texts import Text
from fwlab.data.vocabulary import Vocabulary
from fwlab.files import replacing

#: At the start of a file: its format, the SHA-256 of what it was made of,
#: and how many tokens and borders follow. Numbers follow at multiples of 8.
_HEADER = struct.Struct("<8s32sqq")
_FORMAT = b"fwlab\0\0\1"


class Tokens(NamedTuple):
    """The tokens of a text.

    - `tokens`: indices into the vocabulary, int16 if it has at most 32,768
      entries, otherwise int32, `[tokens]`. Any index works as for every
      tensor; `.long()` gives what a model expects.
    - `borders`: where the documents begin, and the number of tokens last,
      `int64 [documents + 1]`.
    """

    tokens: Tensor
    borders: Tensor


def token_file(text: Text, vocabulary: Vocabulary, path: str | Path | None) -> Tokens:
    """The tokens of a text, made once and then mapped into memory.

    However large the text is, about a megabyte of it is in memory at a
    time, and its tokens need none: the file is mapped. The file is
    complete or not there at all. It is made again if it is truncated, or
    if it was made of another text or vocabulary.

        >>> token_file(Text(("a", "ba")), Characters("ab"), path=None).borders
        tensor([0, 1, 3])

    - `text`: at least one token.
    - `vocabulary`: knows every character or word of the text.
    - `path`: path of the file; None = keep the tokens in memory.
    - Returns a `Tokens`. Changes to its tensors never reach the file.
    - Raises `ValueError` for an unknown character or word, and
      `CorpusError` if there are no tokens or the file cannot be written.
    """
    dtype = np.dtype("<i2" if len(vocabulary) <= 1 << 15 else "<i4")
    if path is None:
        memory = io.BytesIO()
        borders = _write(memory, text, vocabulary, dtype)
        tokens = np.frombuffer(memory.getbuffer(), dtype)
        return Tokens(torch.from_numpy(tokens), torch.tensor(borders))
    path = Path(path)
    made_of = hashlib.sha256(
        json.dumps(
            [
                text.sha256(),
                # The documents.
                text.articles,
                [
                    len(p) if isinstance(p, str) else p.stop - p.start
                    for p in text.parts
                ],
                type(vocabulary).__name__,
                vocabulary.vocabulary,
            ]
        ).encode()
    ).digest()
    if (mapped := _map(path, made_of, dtype)) is not None:
        return mapped
    try:
        with replacing(path) as part, part.open("wb") as file:
            file.seek(_HEADER.size)
            borders = _write(file, text, vocabulary, dtype)
            file.write(b"\0" * (-file.tell() % 8))
            file.write(np.array(borders, "<i8").tobytes())
            file.seek(0)
            file.write(_HEADER.pack(_FORMAT, made_of, borders[-1], len(borders)))
    except OSError as error:
        why = error.strerror.lower() if error.strerror else str(error)
        raise CorpusError(f"cannot write the token file {path}: {why}") from None
    made = _map(path, made_of, dtype)
    if made is None:
        raise CorpusError(f"the token file {path} changed while it was made; try again")
    return made


def _write(
    file: BinaryIO, text: Text, vocabulary: Vocabulary, dtype: np.dtype
) -> list[int]:
    """Write the tokens, and return the borders."""
    borders = [0]
    for document in text.documents():
        count = borders[-1]
        for piece in document:
            tokens = vocabulary.encode(piece)
            file.write(tokens.numpy().astype(dtype).tobytes())
            count += len(tokens)
        if count > borders[-1]:
            borders.append(count)
    if len(borders) == 1:
        raise CorpusError("expected a text of at least one token, got an empty one")
    return borders


def _map(path: Path, made_of: bytes, dtype: np.dtype) -> Tokens | None:
    """The tokens of a file, or None if it is not the expected one."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
        size = path.stat().st_size
    except FileNotFoundError:
        return None
    except OSError as error:
        why = (error.strerror or type(error).__name__).lower()
        raise CorpusError(f"cannot read the token file {path}: {why}") from None
    if len(header) < _HEADER.size:
        return None
    format, source, count, documents = _HEADER.unpack(header)
    at = _HEADER.size + count * dtype.itemsize
    at += -at % 8
    if (format, source, at + 8 * documents) != (_FORMAT, made_of, size):
        return None
    # "c": copy on write, so that a tensor can be written to, but not the file.
    tokens = np.memmap(path, dtype, "c", _HEADER.size, (count,))
    borders = np.fromfile(path, "<i8", documents, offset=at)
    return Tokens(torch.from_numpy(tokens), torch.from_numpy(borders))
