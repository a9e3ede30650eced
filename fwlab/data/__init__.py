"""Text corpora, their characters or words as tokens, and synthetic tasks."""

from fwlab.data.corpus import CORPORA, CorpusError, corpus, splits
from fwlab.data.numbers import number_words
from fwlab.data.packing import Packed, packed, packed_rows
from fwlab.data.programs import Programs, programs
from fwlab.data.retrieval import Retrieval, retrieval
from fwlab.data.texts import Splits, Text
from fwlab.data.tokens import Tokens, token_file
from fwlab.data.vocabulary import Characters, Vocabulary, Words

__all__ = [
    "CORPORA",
    "Characters",
    "CorpusError",
    "Packed",
    "Programs",
    "Retrieval",
    "Splits",
    "Text",
    "Tokens",
    "Vocabulary",
    "Words",
    "corpus",
    "number_words",
    "packed",
    "packed_rows",
    "programs",
    "retrieval",
    "splits",
    "token_file",
]
