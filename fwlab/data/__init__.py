"""Text corpora, their characters as tokens, and synthetic tasks."""

from fwlab.data.characters import Characters
from fwlab.data.corpus import CORPORA, CorpusError, corpus
from fwlab.data.moves import Moves, moves
from fwlab.data.numbers import number_words
from fwlab.data.programs import Programs, programs
from fwlab.data.retrieval import Retrieval, retrieval

__all__ = [
    "CORPORA",
    "Characters",
    "CorpusError",
    "Moves",
    "Programs",
    "Retrieval",
    "corpus",
    "moves",
    "number_words",
    "programs",
    "retrieval",
]
