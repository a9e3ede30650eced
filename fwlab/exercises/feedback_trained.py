"""A feedback transformer, trained."""

from fwlab.exercises.exercise import Exercise

EXERCISES: dict[str, Exercise] = {}
