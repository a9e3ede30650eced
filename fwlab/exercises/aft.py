"""The Attention Free Transformer."""

from fwlab.exercises.exercise import Exercise

EXERCISES: dict[str, Exercise] = {}
