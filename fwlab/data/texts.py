"""Texts that may be larger than memory: documents, loaded in pieces."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

#: Bytes that are loaded at a time; a line is never cut.
PIECE = 1 << 20
#: The end of a WikiText article. Blank lines tell a title from the few
#: lines of text that also begin and end with "=".
_END = re.compile(r"\n \n(?= = [^=\n].* = \n \n)")


class Part(NamedTuple):
    """A file, or a part of one.

    - `path`: path of the file, which is in UTF-8. CRLF and CR end a line as LF does,
      and become LF.
    - `start`, `stop`: where the part begins, and where it ends, in bytes. A byte order
      mark is not part of the text, so `start` is 3 in a file with one.
    """

    path: Path
    start: int
    stop: int


@dataclass(frozen=True)
class Text:
    r"""A text of documents. Nothing is loaded before it is needed.

        >>> list(Text(("one\n", "two\n")).pieces())
        ['one\n', 'two\n']

    - `parts`: texts, or parts of files, each of them a document.
    - `articles`: whether a part holds articles of WikiText instead, each
      of them a document. An article begins with its title, a line
      ` = Title = ` between blank lines.
    """

    parts: tuple[str | Part, ...]
    articles: bool = False

    def documents(self) -> Iterator[Iterator[str]]:
        """The documents, one after the other.

        - Returns an iterator over the documents. Each is an iterator over
          its pieces, which end with a line, as in `pieces`.
        """
        for part in self.parts:
            if self.articles:
                yield from (iter([article]) for article in _articles(_pieces(part)))
            else:
                yield _pieces(part)

    def pieces(self) -> Iterator[str]:
        """The text in pieces, without the borders of documents.

        - Returns an iterator over about a megabyte at a time: whole lines,
          except at the end of a document. What is in memory already comes
          in one piece.
        """
        return chain.from_iterable(map(_pieces, self.parts))

    def sha256(self) -> str:
        """The SHA-256 of the text.

        - Returns 64 hexadecimal digits, as for the whole text in UTF-8.
        """
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(piece.encode())
        return digest.hexdigest()


class Splits(NamedTuple):
    """A text to train on, and texts to measure the loss on.

    - `train`, `valid`: for training, and for validation.
    - `test`: for the final result; None = there is none.
    """

    train: Text
    valid: Text
    test: Text | None

    @classmethod
    def of(cls, text: Text | str) -> "Splits":
        """Cut a text: the first 90 % of its characters are for training.

        - `text`: at least one character; a document may be cut in two.
        - Returns the splits, with `test=None`.
        """
        text = Text((text,)) if isinstance(text, str) else text
        sizes = [sum(map(len, _pieces(part))) for part in text.parts]
        left = int(0.9 * sum(sizes))
        train: list[str | Part] = []
        valid: list[str | Part] = []
        for part, size in zip(text.parts, sizes, strict=True):
            if size <= left:
                train.append(part)
            elif left <= 0:
                valid.append(part)
            else:
                begin, rest = _cut(part, left)
                train.append(begin)
                valid.append(rest)
            left -= size
        return cls(
            Text(tuple(train), text.articles), Text(tuple(valid), text.articles), None
        )

    def sha256(self) -> str:
        """The SHA-256 of all splits, one after the other.

        - Returns 64 hexadecimal digits. Those of a text that was cut are
          those of the whole text.
        """
        return Text(
            tuple(part for text in self if text is not None for part in text.parts)
        ).sha256()


def unix_lines(text: str) -> str:
    """End every line with LF, as `open` does."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _pieces(part: str | Part) -> Iterator[str]:
    """The lines of a part, about a megabyte at a time."""
    if isinstance(part, str):
        yield part
        return
    for block in _blocks(part):
        yield unix_lines(block.decode())


def _blocks(part: Part) -> Iterator[bytes]:
    """The same as bytes, as they are in the file."""
    with part.path.open("rb") as file:
        file.seek(part.start)
        left, line = part.stop - part.start, b""
        while left and (block := file.read(min(PIECE, left))):
            left -= len(block)
            end = block.rfind(b"\n") + 1
            if end:
                yield line + block[:end]
                line = b""
            line += block[end:]
        if line:
            yield line


def _articles(pieces: Iterator[str]) -> Iterator[str]:
    article = ""
    for piece in pieces:
        # An article, or its end, may go on in the next piece.
        article += piece
        start = 0
        for end in _END.finditer(article):
            yield article[start : end.end()]
            start = end.end()
        article = article[start:]
    yield article


def _cut(part: str | Part, characters: int) -> tuple[str | Part, str | Part]:
    """Cut a part after a number of characters, less than it has."""
    if isinstance(part, str):
        return part[:characters], part[characters:]
    at = part.start
    for block in _blocks(part):
        raw = block.decode()
        size = len(unix_lines(raw))
        if size >= characters:
            for pair in re.finditer("\r\n", raw):  # one character of the text
                characters += pair.start() < characters
            at += len(raw[:characters].encode())
            break
        at += len(block)
        characters -= size
    return part._replace(stop=at), part._replace(start=at)
