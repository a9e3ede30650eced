"""Text as tokens: one per character."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Characters:
    """The distinct characters of a text, in code point order.

    - `alphabet`: the characters; duplicates and order do not matter. A
      string, or a list of single characters.
    """

    def __init__(self, alphabet: Iterable[str]):
        self.alphabet = "".join(sorted(set(alphabet)))
        self._index = {c: i for i, c in enumerate(self.alphabet)}

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Characters":
        """The characters of a text.

        - `texts`: the text in pieces.
        - Returns the vocabulary.
        """
        return cls(set().union(*texts))

    def __len__(self) -> int:
        return len(self.alphabet)

    @property
    def vocabulary(self) -> list[str]:
        """The characters by token number."""
        return list(self.alphabet)

    @property
    def start(self) -> str:
        """The default prompt: a line break, or the first character."""
        return "\n" if "\n" in self._index else self.alphabet[0]

    def encode(self, text: str) -> Tensor:
        """Turn text into tokens.

        - `text`: any number of known characters.
        - Returns `int64 [characters]`, indices into the alphabet, from 0.
        - Raises `ValueError` for an unknown character, naming it.
        """
        unknown = sorted(set(text) - set(self._index))
        if unknown:
            raise ValueError(
                f"expected only the {len(self)} characters that this model knows, "
                f"got {unknown[0]!r}"
            )
        return torch.tensor([self._index[c] for c in text], dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """Turn tokens back into text.

        - `tokens`: `int64 [characters]`, from 0 to the size of the
          alphabet minus 1.
        - Returns the text.
        """
        return "".join(self.alphabet[i] for i in tokens.tolist())
