"""A rule of your own."""

from fwlab.exercises.exercise import Exercise

EXERCISES: dict[str, Exercise] = {}
