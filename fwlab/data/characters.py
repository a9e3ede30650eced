"""Text as numbers: one token per character."""

import torch
from torch import Tensor


class Characters:
    """The distinct characters of a text, in code point order.

    - `alphabet`: the characters; duplicates and order do not matter.
    """

    def __init__(self, alphabet: str):
        self.alphabet = "".join(sorted(set(alphabet)))
        self._index = {c: i for i, c in enumerate(self.alphabet)}

    def __len__(self) -> int:
        return len(self.alphabet)

    @property
    def start(self) -> str:
        """A prompt for who has none: a line break, or the first character."""
        return "\n" if "\n" in self._index else self.alphabet[0]

    def encode(self, text: str) -> Tensor:
        """Text to numbers.

        - `text`: any number of known characters.
        - Returns `int64 [characters]`, places in the alphabet, from 0.
        - Raises `ValueError` for an unknown character, naming it.
        """
        unknown = sorted(set(text) - set(self._index))
        if unknown:
            raise ValueError(
                f"the text contains {unknown[0]!r}, which is not one of the "
                f"{len(self)} characters this model knows"
            )
        return torch.tensor([self._index[c] for c in text], dtype=torch.int64)

    def decode(self, tokens: Tensor) -> str:
        """Numbers back to text.

        - `tokens`: `int64 [characters]`, from 0 to the size of the
          alphabet less 1.
        - Returns the text.
        """
        return "".join(self.alphabet[i] for i in tokens.tolist())
