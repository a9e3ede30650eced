"""Text corpora, their characters or words as tokens, and synthetic tasks."""

from fwlab.data.characters import Characters
from fwlab.data.corpus import CORPORA, CorpusError, corpus, splits
from fwlab.data.moves import Moves, moves
from fwlab.data.numbers import number_words
from fwlab.data.programs import Programs, programs
from fwlab.data.retrieval import Retrieval, retrieval
from fwlab.data.texts import Part, Splits, Text
from fwlab.data.words import Words

__all__ = [
    "CORPORA",
    "Characters",
    "CorpusError",
    "Moves",
    "Part",
    "Programs",
    "Retrieval",
    "Splits",
    "Text",
    "Words",
    "corpus",
    "moves",
    "number_words",
    "programs",
    "retrieval",
    "splits",
]
