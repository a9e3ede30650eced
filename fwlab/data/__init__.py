"""Text corpora, and their characters as tokens."""

from fwlab.data.characters import Characters
from fwlab.data.corpus import CORPORA, CorpusError, corpus

__all__ = ["CORPORA", "Characters", "CorpusError", "corpus"]
