"""Split texts into documents, and into parts for training, validation and test."""

import hashlib
import re
from collections.abc import Iterator
from typing import NamedTuple

#: Minimum number of characters in a piece of a long document.
PIECE = 1 << 20
#: The end of a WikiText article, before the title of the next article.
#: A title has blank lines around it, unlike other lines that begin and end with "=".
_END = re.compile(r"\n \n(?= = [^=\n].* = \n \n)")


class Text(NamedTuple):
    r"""Hold a text as a sequence of documents.

        >>> list(Text(("one\n", "two\n")).pieces())
        ['one\n', 'two\n']

    - `documents`: the documents, one after the other.
    """

    documents: tuple[str, ...]

    @classmethod
    def of_articles(cls, text: str) -> "Text":
        """Split a text of WikiText into articles, one document per article.

        - `text`: articles; each begins with its title, a line ` = Title = ` between
          blank lines.
        - Returns the text with an article as a document.
        """
        starts = [0, *(end.end() for end in _END.finditer(text)), len(text)]
        return cls(tuple(map(text.__getitem__, map(slice, starts, starts[1:]))))

    def pieces(self) -> Iterator[str]:
        """Iterate over the text, about a million characters at a time.

        - Returns an iterator over documents, or over parts of a longer one that end
          with a line.
        """
        for document in self.documents:
            yield from pieces(document)

    def sha256(self) -> str:
        """Compute the SHA-256 of the text.

        - Returns 64 hexadecimal digits, as for the whole text in UTF-8.
        """
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(piece.encode())
        return digest.hexdigest()


class Splits(NamedTuple):
    """Hold the texts for training, validation and test.

    - `train`, `valid`: for training, and for validation.
    - `test`: for the final result; None = there is none.
    """

    train: Text
    valid: Text
    test: Text | None

    @classmethod
    def of(cls, text: Text | str) -> "Splits":
        """Split a text: 90 % of its characters for training, the rest for validation.

        - `text`: at least one character; a document may be cut in two.
        - Returns the splits, with `test=None`.
        """
        documents = (text,) if isinstance(text, str) else text.documents
        left = int(0.9 * sum(map(len, documents)))
        train, valid = [], []
        for document in documents:
            at = max(0, min(left, len(document)))
            if begin := document[:at]:
                train.append(begin)
            if rest := document[at:]:
                valid.append(rest)
            left -= len(document)
        return cls(Text(tuple(train)), Text(tuple(valid)), None)

    def sha256(self) -> str:
        """Compute the SHA-256 of the concatenated splits.

        - Returns 64 hexadecimal digits. The splits of a text have the same digits as
          the text itself.
        """
        texts = (text.documents for text in self if text is not None)
        return Text(sum(texts, ())).sha256()


def pieces(document: str) -> Iterator[str]:
    """Split a document at line ends into pieces of about a million characters."""
    start = 0
    while start < len(document):
        end = document.find("\n", start + PIECE) + 1 or len(document)
        yield document[start:end]
        start = end
