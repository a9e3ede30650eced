"""Writing as online regression."""

from fwlab.exercises.exercise import Exercise

EXERCISES: dict[str, Exercise] = {}
