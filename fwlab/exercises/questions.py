"""Questions to predict before a result is shown."""

from itertools import pairwise
from typing import Any

from fwlab.exercises.course import asked
from fwlab.exercises.exercise import Question, joined


def _question(name: str, fields: dict[str, Any]) -> Question:
    """A question from its table.

    - Raises `ValueError` if no answer is right, or a tempting one is no choice.
    """
    fields = joined(fields)
    truth, choices = fields["truth"], fields.get("choices", ())
    tolerance = fields.get("tolerance", 0.0)
    tempting = {
        key if choices else float(key): why for key, why in fields["tempting"].items()
    }
    if choices and {truth, *tempting} != {*choices}:
        raise ValueError(f"{name}: expected truth and tempting to be the choices")
    if not choices and not (tolerance > 0 and isinstance(truth, float)):
        raise ValueError(f"{name}: expected choices, or a number with a tolerance")
    given = [] if choices else sorted([truth, *tempting])
    if any(abs(a - b) <= tolerance for a, b in pairwise(given)):
        raise ValueError(f"{name}: expected numbers further apart than the tolerance")
    return Question(**fields | {"name": name, "tempting": tempting})


QUESTIONS = {name: _question(name, fields) for name, fields in asked(False).items()}
"""Every question by name."""
