"""Questions to predict before a result is shown: questions.toml."""

import tomllib
from pathlib import Path
from typing import Any

from fwlab.exercises.exercise import Question


def _question(name: str, fields: dict[str, Any]) -> Question:
    """A question from its table.

    - Raises `ValueError` if no answer is right, or a tempting one is no choice.
    """
    truth, choices = fields.pop("truth"), tuple(fields.pop("choices", ()))
    tolerance = fields.pop("tolerance", 0.0)
    tempting = {
        key if choices else float(key): _joined(why)
        for key, why in fields.pop("tempting").items()
    }
    texts = {key: _joined(text) for key, text in fields.items()}
    if choices and {truth, *tempting} != {*choices}:
        raise ValueError(f"{name}: expected truth and tempting to be the choices")
    if not choices and not (tolerance > 0 and isinstance(truth, float)):
        raise ValueError(f"{name}: expected choices, or a number with a tolerance")
    return Question(
        name=name,
        truth=truth,
        choices=choices,
        tempting=tempting,
        tolerance=tolerance,
        **texts,
    )


def _joined(text: str) -> str:
    return " ".join(text.split())


QUESTIONS = {
    name: _question(name, fields)
    for name, fields in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text("utf-8")
    ).items()
}
"""Every question by name."""
