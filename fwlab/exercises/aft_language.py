"""AFT as a language model: windows, biases and convolutions."""

from fwlab.exercises.exercise import Exercise

EXERCISES: dict[str, Exercise] = {}
