"""Rules since 2021."""

from fwlab.exercises.exercise import Exercise

EXERCISES: dict[str, Exercise] = {}
