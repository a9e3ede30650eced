"""Exercises that check your answers.

```python
from fwlab.exercises import check, hint, show, solution

def delta_step(W, k, v, beta):
    ...

check(delta_step)      # True or False, and prints why
show(delta_step)       # draws your result, the target, and the difference
hint("delta_step")     # a nudge; hint("delta_step", 2) reveals more
solution("delta_step") # one way to write it, ready to paste
```
"""

from fwlab.exercises import (
    aft,
    aft_language,
    aft_stability,
    delta_rule,
    dpfp,
    fast_weights,
    feature_maps,
    feedback,
    feedback_trained,
    memory,
    normalisation,
    project,
    regression,
    retrieval,
    since_2021,
    to_qwen,
    transformer,
)
from fwlab.exercises.asking import Wrong, ask, compare, compare_gradients
from fwlab.exercises.checker import assert_correct, check, show
from fwlab.exercises.exercise import Exercise, Property, Question
from fwlab.exercises.formulas import DERIVATIONS, Derivation, check_formula
from fwlab.exercises.helping import hint, solution
from fwlab.exercises.pairs import eight_pairs, score, scoreboard
from fwlab.exercises.predicting import predict, predictions, quiz, reveal
from fwlab.exercises.properties import agrees, gradient, shape
from fwlab.exercises.questions import QUESTIONS
from fwlab.exercises.using import golf, yours_or

#: Exercises by topic; `fwlab exercises export` writes a notebook for each.
TOPICS = {
    "Fast weights": fast_weights.EXERCISES,
    "Feature maps": feature_maps.EXERCISES,
    "DPFP": dpfp.EXERCISES,
    "The delta rule": delta_rule.EXERCISES,
    "Normalisation": normalisation.EXERCISES,
    "Retrieval": retrieval.EXERCISES,
    "A transformer": transformer.EXERCISES,
    "Memory": memory.EXERCISES,
    "Attention Free Transformer": aft.EXERCISES,
    "Stability": aft_stability.EXERCISES,
    "Biases of AFT": aft_language.EXERCISES,
    "Feedback Transformer": feedback.EXERCISES,
    "Feedback trained": feedback_trained.EXERCISES,
    "Since 2021": since_2021.EXERCISES,
    "Layers of today": to_qwen.EXERCISES,
    "Regression": regression.EXERCISES,
    "A project": project.EXERCISES,
}

EXERCISES: dict[str, Exercise] = {
    name: exercise for topic in TOPICS.values() for name, exercise in topic.items()
}
"""Every exercise by name."""

__all__ = [
    "DERIVATIONS",
    "EXERCISES",
    "QUESTIONS",
    "Derivation",
    "Exercise",
    "Property",
    "Question",
    "Wrong",
    "agrees",
    "ask",
    "assert_correct",
    "check",
    "check_formula",
    "compare",
    "compare_gradients",
    "eight_pairs",
    "golf",
    "gradient",
    "hint",
    "predict",
    "predictions",
    "quiz",
    "reveal",
    "score",
    "scoreboard",
    "shape",
    "show",
    "solution",
    "yours_or",
]
