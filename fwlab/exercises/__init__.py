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

from fwlab.exercises.answers import Wrong, ask, compare, compare_gradients
from fwlab.exercises.blackboard import from_editor
from fwlab.exercises.checking import (
    assert_correct,
    check,
    golf,
    hint,
    mine,
    show,
    solution,
    yours_or,
)
from fwlab.exercises.notation import EXERCISES, Exercise, exercise, started
from fwlab.exercises.properties import exactly
from fwlab.exercises.questions import (
    DERIVATIONS,
    QUESTIONS,
    Question,
    check_formula,
    predict,
    predictions,
    quiz,
    reveal,
)

from fwlab.exercises.course import TOPICS  # isort: skip  (fills EXERCISES)
from fwlab.exercises.course.pairs import eight_pairs, score, scoreboard

__all__ = [
    "DERIVATIONS",
    "EXERCISES",
    "QUESTIONS",
    "TOPICS",
    "Exercise",
    "Question",
    "Wrong",
    "ask",
    "assert_correct",
    "check",
    "check_formula",
    "compare",
    "compare_gradients",
    "eight_pairs",
    "exactly",
    "exercise",
    "from_editor",
    "golf",
    "hint",
    "mine",
    "predict",
    "predictions",
    "quiz",
    "reveal",
    "score",
    "scoreboard",
    "show",
    "solution",
    "started",
    "yours_or",
]
