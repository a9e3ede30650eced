"""The layer of models that people run."""

from fwlab.exercises.exercise import Exercise

EXERCISES: dict[str, Exercise] = {}
