"""Text corpora, their characters as tokens, and synthetic tasks."""

from fwlab.data.characters import Characters
from fwlab.data.corpus import CORPORA, CorpusError, corpus
from fwlab.data.numbers import number_words
from fwlab.data.programs import Programs, programs
from fwlab.data.retrieval import Retrieval, retrieval

__all__ = [
    "CORPORA",
    "Characters",
    "CorpusError",
    "Programs",
    "Retrieval",
    "corpus",
    "number_words",
    "programs",
    "retrieval",
]
