"""Exercises that answer back.

```python
from fwlab.exercises import check, hint, solution

def delta_step(W, k, v, beta):
    ...

check(delta_step)      # True or False, and says why
hint("delta_step")     # a push; hint("delta_step", 2) is a stronger one
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
"""Every exercise by its name."""

__all__ = ["EXERCISES", "Exercise", "assert_correct", "check", "hint", "solution"]
