"""Text corpora and the characters they are made of."""

from fwlab.data.characters import Characters
from fwlab.data.corpus import CORPORA, CorpusError, corpus

__all__ = ["CORPORA", "Characters", "CorpusError", "corpus"]
