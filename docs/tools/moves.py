"""Draw texts about people who move, with questions about where they are."""

import random
from typing import NamedTuple

import torch
from torch import Tensor

NAMES = (
    *("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana"),
    *("Ivo", "Joy", "Kai", "Lena", "Max", "Nora", "Otto", "Pia"),
)
PLACES = (
    *("Accra", "Bern", "Cairo", "Dakar", "Delhi", "Hanoi", "Kyoto", "Lima"),
    *("Milan", "Oslo", "Paris", "Quito", "Rome", "Sofia", "Tunis", "Zagreb"),
)
#: The vocabulary: the index of a word is its token.
WORDS = (*NAMES, *PLACES, "is", "in", ".", "Where", "?")


class Moves(NamedTuple):
    """Hold a batch of texts with questions, each tensor `[batch, time]`.

    - `tokens`: indices into `WORDS`; shorter rows end with more full stops.
    - `labels`: at the `?` of a question, the token of its answer; -1 elsewhere.
    - `moved`: at the `?` of a question, how often that person has moved; -1 elsewhere.
    """

    tokens: Tensor
    labels: Tensor
    moved: Tensor


def moves(batch: int, sentences: int, people: int, rng: random.Random) -> Moves:
    """Generate random texts that state facts, change facts and ask for facts.

    "Ada is in Rome . Ben is in Oslo . Ada is in Lima . Where is Ada ? Lima ."
    A change is worded like a first fact, so nothing in the sentence itself
    marks it as a change.

    - `sentences`: number of statements and questions per text.
    - `people`: number of people in each text, 1 to 16.
    """
    made = [_text(sentences, people, rng) for _ in range(batch)]
    numbers = {word: i for i, word in enumerate(WORDS)}
    time = max(len(words) for words, _ in made)
    tokens = torch.full((batch, time), numbers["."])
    labels, moved = torch.full((2, batch, time), -1)
    for row, (words, answers) in enumerate(made):
        tokens[row, : len(words)] = torch.tensor([numbers[word] for word in words])
        for at, times in answers.items():
            labels[row, at] = tokens[row, at + 1]
            moved[row, at] = times
    return Moves(tokens, labels, moved)


def _text(
    sentences: int, people: int, rng: random.Random
) -> tuple[list[str], dict[int, int]]:
    """Return the words of a text and, by the index of each `?`, the number of moves."""
    names = rng.sample(NAMES, people)
    at: dict[str, str] = {}
    moved: dict[str, int] = {}
    words: list[str] = []
    answers: dict[int, int] = {}
    for _ in range(sentences):
        if at and rng.random() < 0.4:
            name = rng.choice(list(at))
            words += ["Where", "is", name, "?", at[name], "."]
            answers[len(words) - 3] = moved[name]
        else:
            name = rng.choice(names)
            at[name] = rng.choice([place for place in PLACES if place != at.get(name)])
            moved[name] = moved.get(name, -1) + 1
            words += [name, "is", "in", at[name], "."]
    return words, answers
