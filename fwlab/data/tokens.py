"""Keep the tokens of a text in a file that is mapped into memory."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fwlab.data.corpus import CorpusError
from fwlab.data.texts import Text, pieces
from fwlab.data.vocabulary import Vocabulary
from fwlab.files import replacing


class Tokens(NamedTuple):
    """Hold the tokens of a text, and the borders of its documents.

    - `tokens`: indices into the vocabulary, int16 if it has at most 32,768 entries,
      otherwise int32, `[tokens]`. Any index works as for every tensor; `.long()` gives
      what a model expects.
    - `borders`: where the documents with tokens begin, and the number of tokens last,
      `int64 [documents + 1]`.
    """

    tokens: Tensor
    borders: Tensor


def token_file(text: Text, vocabulary: Vocabulary, path: str | Path | None) -> Tokens:
    """Return the tokens of a text from a memory-mapped file, which is written once.

    The file is always complete. It is written again if it was truncated, or if the text
    or the vocabulary has changed.

        >>> token_file(Text(("a", "ba")), Characters("ab"), path=None).borders
        tensor([0, 1, 3])

    - `text`: at least one token.
    - `vocabulary`: knows every character or word of the text.
    - `path`: path of the safetensors file; None = keep the tokens in memory.
    - Returns a `Tokens`. Changes to its tensors never reach the file.
    - Raises `ValueError` for an unknown character or word, and `CorpusError` if there
      are no tokens or the file cannot be written.
    """
    if path is None:
        return _tokens(text, vocabulary)
    from safetensors.torch import save as serialize

    sizes = list(map(len, text.documents))
    kind, words = type(vocabulary).__name__, vocabulary.vocabulary
    made_of = json.dumps([text.sha256(), sizes, kind, words]).encode()
    expected = {"made_of": hashlib.sha256(made_of).hexdigest()}
    path = Path(path)
    if (mapped := _map(path, expected)) is not None:
        return mapped
    tokens = _tokens(text, vocabulary)
    try:
        with replacing(path) as part:
            part.write_bytes(serialize(tokens._asdict(), expected))
    except OSError as error:
        why = error.strerror.lower() if error.strerror else str(error)
        raise CorpusError(f"cannot write the token file {path}: {why}") from None
    return _map(path, expected) or tokens


def _tokens(text: Text, vocabulary: Vocabulary) -> Tokens:
    """Encode a text in memory, or raise `CorpusError` if there are no tokens."""
    dtype = torch.int16 if len(vocabulary) <= 1 << 15 else torch.int32
    parts, sizes = [torch.zeros(0, dtype=dtype)], [0]
    for document in text.documents:
        new = [vocabulary.encode(piece).to(dtype) for piece in pieces(document)]
        if size := sum(map(len, new)):
            sizes.append(size)
        parts += new
    if len(sizes) == 1:
        raise CorpusError("expected a text of at least one token, got an empty one")
    return Tokens(torch.cat(parts), torch.tensor(sizes).cumsum(0))


def _map(path: Path, expected: dict[str, str]) -> Tokens | None:
    """Map a token file into memory, or return None if its metadata differ."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            if file.metadata() == expected:
                return Tokens(*map(file.get_tensor, Tokens._fields))
    except (FileNotFoundError, SafetensorError):
        pass
    except OSError as error:
        why = (error.strerror or type(error).__name__).lower()
        raise CorpusError(f"cannot read the token file {path}: {why}") from None
    return None
