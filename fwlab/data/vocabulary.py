"""Convert text to tokens: one per character, or one per word."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Tokens for the end of a line, and for words that are not in the vocabulary.
END, UNKNOWN = "<eos>", "<unk>"


class Vocabulary:
    """Convert between tokens and numbers (base class of `Characters` and `Words`).

        >>> Characters("ab").vocabulary, Words(["<eos>", "ab"]).vocabulary
        (['a', 'b'], ['<eos>', 'ab'])

    - `vocabulary`: the tokens, each once.
    """

    #: Functions that split a text into tokens, and join tokens to a text.
    _cut: Any
    _join: Any

    def __init__(self, vocabulary: Iterable[str]):
        self.vocabulary = list(vocabulary)
        self._index = {token: i for i, token in enumerate(self.vocabulary)}

    def __len__(self) -> int:
        return len(self.vocabulary)

    @property
    def start(self) -> str:
        """Return the default prompt: a line break, or else the first character."""
        return "\n"

    def encode(self, text: str) -> Tensor:
        """Convert text to token numbers.

        - `text`: any number of known characters, or of words and lines.
        - Returns `int64 [tokens]`, indices into the vocabulary, from 0. The end of a
          line counts as a word.
        - Raises `ValueError` for an unknown character or word, naming it, if the
          vocabulary has no `<unk>`.
        """
        parts = self._cut(text)
        tokens = list(map(self._index.get, parts, repeat(self._index.get(UNKNOWN))))
        if None in tokens:
            raise ValueError(
                f"expected only the {len(self)} {type(self).__name__.lower()} that this "
                f"model knows, got {parts[tokens.index(None)]!r}"
            )
        return torch.from_numpy(np.array(tokens, dtype=np.int64))

    def decode(self, tokens: Tensor) -> str:
        """Convert token numbers to text.

        - `tokens`: `int64 [tokens]`, from 0 to the size of the vocabulary minus 1.
        - Returns the text; with one blank between words, and none at the beginning and
          end of lines.
        """
        return self._join(self.vocabulary[i] for i in tokens.tolist())


class Characters(Vocabulary):
    """Convert between numbers and characters, numbered in code point order.

        >>> Characters("hello").encode("hole")
        tensor([1, 3, 2, 0])

    - `alphabet`: the characters; duplicates and order do not matter. A
      string, or a list of single characters.
    """

    _cut = staticmethod(str)
    _join = staticmethod("".join)

    def __init__(self, alphabet: Iterable[str]):
        self.alphabet = "".join(sorted(set(alphabet)))
        super().__init__(self.alphabet)

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Characters":
        """Return the vocabulary of the characters of a text.

        - `texts`: the text in pieces.
        - Returns the vocabulary.
        """
        return cls(set().union(*texts))

    @property
    def start(self) -> str:
        return "\n" if "\n" in self._index else self.alphabet[0]


class Words(Vocabulary):
    r"""Convert between numbers and words separated by spaces or newlines.

    - `vocabulary`: the words by token number, each once: `<eos>`, the end
      of a line, among them, and `<unk>` if there are to be unknown words.
    - Raises `ValueError` for words that are missing or given twice.

    WikiText is made for these tokens: its words, and signs such as commas,
    are between blanks, and its rare words are `<unk>` already.

        >>> Words(["<eos>", "be", "to"]).encode("to be\n")
        tensor([2, 1, 0])
    """

    def __init__(self, vocabulary: Sequence[str]):
        super().__init__(vocabulary)
        if len(self._index) < len(self.vocabulary):
            twice, _ = Counter(self.vocabulary).most_common(1)[0]
            raise ValueError(
                f"expected vocabulary without duplicates, got {twice!r} twice"
            )
        if END not in self._index:
            raise ValueError(f"expected vocabulary to have {END!r}, got none")

    @classmethod
    def of(cls, texts: Iterable[str], minimum: int = 1) -> "Words":
        """Return the vocabulary of the words of a text.

        - `texts`: the text in pieces, none of which ends within a word.
        - `minimum`: how often a word must occur, at least 1; all others
          are unknown.
        - Returns the vocabulary: `<eos>`, `<unk>`, and then the words, the
          most frequent first, and the first of equally frequent ones.
        - Raises `ValueError` if `minimum` is out of range.
        """
        if minimum < 1:
            raise ValueError(f"expected minimum to be at least 1, got {minimum}")
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text.split())
        for special in (END, UNKNOWN):
            counts.pop(special, None)
        words = (word for word, count in counts.most_common() if count >= minimum)
        return cls([END, UNKNOWN, *words])

    def _cut(self, text: str) -> Sequence[str]:
        return text.replace("\n", f" {END} ").split()

    def _join(self, parts: Iterable[str]) -> str:
        lines = " ".join("\n" if word == END else word for word in parts)
        return re.sub(" ?\n ?", "\n", lines)
