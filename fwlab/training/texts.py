"""The text of a run as tokens."""

from itertools import chain
from pathlib import Path
from typing import NamedTuple

from fwlab.data import (
    Characters,
    CorpusError,
    Splits,
    Text,
    Tokens,
    Vocabulary,
    Words,
    splits,
    token_file,
)
from fwlab.training.config import Config

#: Tokens of a longer text, in bytes, are mapped into memory from a file.
LARGE = 2**26


class RunText(NamedTuple):
    """The text of a run.

    - `vocabulary`: the tokens by number.
    - `train`, `valid`: for training, and for validation.
    - `sha256`: of all text, so that results identify what they were
      trained on.
    """

    vocabulary: Vocabulary
    train: Tokens
    valid: Tokens
    sha256: str


def run_text(
    config: Config, text: str | None, vocabulary: Vocabulary | None = None
) -> RunText:
    """Load the text of a run.

    - `text`: a text to use instead of `config.corpus`.
    - `vocabulary`: the vocabulary of an earlier part of the run.
    - Raises `CorpusError` if a split is shorter than a window.
    """
    parts = splits(config.corpus) if text is None else Splits.of(text)
    sha256 = parts.sha256()
    if vocabulary is None:
        vocabulary = _vocabulary(config, parts)
    train, valid = (_tokens(config, part, vocabulary, sha256) for part in parts[:2])
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
    return RunText(vocabulary, train, valid, sha256)


def _vocabulary(config: Config, parts: Splits) -> Vocabulary:
    if config.tokens == "words":
        return Words.of(parts.train.pieces())
    texts = (text.pieces() for text in parts if text is not None)
    return Characters.of(chain.from_iterable(texts))


def _tokens(config: Config, text: Text, vocabulary: Vocabulary, sha256: str) -> Tokens:
    size = sum(
        len(part) if isinstance(part, str) else part.stop - part.start
        for part in text.parts
    )
    if size < LARGE:
        tokens = token_file(text, vocabulary, None)
        return tokens._replace(tokens=tokens.tokens.long())
    import pooch

    first = text.parts[0]
    start = 0 if isinstance(first, str) else first.start
    name = f"{sha256[:16]}-{config.tokens}-{len(text.parts)}-{start}-{size}"
    return token_file(text, vocabulary, Path(pooch.os_cache("fwlab"), "tokens", name))
