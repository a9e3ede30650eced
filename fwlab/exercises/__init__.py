"""Exercises that check your answers.

```python
from fwlab.exercises import check, hint, solution

def delta_step(W, k, v, beta):
    ...

check(delta_step)      # True or False, and prints why
hint("delta_step")     # a nudge; hint("delta_step", 2) reveals more
solution("delta_step") # the source of fwlab's own function
```
"""

from fwlab.exercises import aft, fast_weights, feedback
from fwlab.exercises.checker import Exercise, assert_correct, check, hint, solution

EXERCISES: dict[str, Exercise] = {
    **fast_weights.EXERCISES,
    **aft.EXERCISES,
    **feedback.EXERCISES,
}
"""Every exercise by name."""

__all__ = ["EXERCISES", "Exercise", "assert_correct", "check", "hint", "solution"]
