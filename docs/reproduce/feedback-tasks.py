"""Train on four tasks of the Feedback Transformer: copy, reverse, count, random walk.

The first two need attention to positions, the others a state that every token changes.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from answers import UNASKED, Batch, columns, growing, loss, right
from frame import Point, Points, main, order
from matplotlib.figure import Figure

from fwlab import plots
from fwlab.fit import SETUP, fit
from fwlab.models import LanguageModel

TITLE = "Feedback: copy, reverse, count, and a random walk"
SOURCE = "Fan et al. 2020, small tasks"
COST = "quick: 4 min of one core; full: 20 min"

#: Number of symbols in copy and reverse. The next token marks the start of answers.
SYMBOLS = 8
#: Number of ticks after which a count restarts at 0.
MODULUS = 10
#: Rows and columns of the walk, and number of actions: step ahead, turn left, right.
SIDE, ACTIONS = 8, 3
BATCH, TEST = 32, 256
STEPS = {True: 400, False: 1000}
#: Learning rates of the first seed, and the rate of all other seeds.
RATES, CHOSEN = (1e-3, 3e-3), 3e-3
#: Mixers of the models. The transformer has rotary positions.
MIXERS = {"feedback": "feedback", "transformer": "softmax"}


def copy(batch: int, length: int) -> Batch:
    """Sample random symbols, with the same symbols as answers."""
    symbols = torch.randint(SYMBOLS, (batch, length))
    return symbols, symbols


def reverse(batch: int, length: int) -> Batch:
    """Sample random symbols, with the symbols in reverse order as answers."""
    symbols = torch.randint(SYMBOLS, (batch, length))
    return symbols, symbols.flip(1)


def count(batch: int, length: int) -> Batch:
    """Sample ticks and pauses, with the number of ticks so far as answers."""
    ticks = torch.randint(2, (batch, length))
    return ticks, ticks.cumsum(1) % MODULUS


def walk(batch: int, length: int) -> Batch:
    """Sample the actions of a walk on a grid, with the resulting positions as answers.

    The walk starts in a corner. A step into a wall has no effect.
    """
    actions = torch.randint(ACTIONS, (batch, length))
    ahead = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 0]])
    turn = torch.tensor([0, -1, 1])[actions].cumsum(1) % len(ahead)
    place, places = torch.zeros(batch, 2, dtype=torch.long), []
    for t in range(length):
        moves = (actions[:, t] == 0)[:, None] * ahead[turn[:, t]]
        place = (place + moves).clamp(0, SIDE - 1)
        places.append(place[:, 0] * SIDE + place[:, 1])
    return actions, torch.stack(places, 1)


class Task(NamedTuple):
    """Hold a task, its number of answers and its sequence lengths.

    - `draw`: returns inputs, and an answer for each input.
    - `answers`: number of distinct answers.
    - `after`: True if answers follow all inputs, False if they follow each input.
    - `near`, `far`: longest length in training, and length of a longer test.
    """

    draw: Callable[[int, int], Batch]
    answers: int
    after: bool
    near: int
    far: int


TASKS = {
    "copy": Task(copy, SYMBOLS, True, 12, 18),
    "reverse": Task(reverse, SYMBOLS, True, 12, 18),
    "count": Task(count, MODULUS, False, 24, 48),
    "walk": Task(walk, SIDE * SIDE, False, 24, 48),
}


def points(quick: bool) -> list[Point]:
    return [
        {"task": task, "model": model, "layers": 2, "lr": lr, "seed": seed}
        | {"steps": STEPS[quick] * (2 if task == "walk" else 1)}  # Walks take longer.
        for seed in (1, 2, 3)
        for task in (("reverse", "count") if quick else TASKS)
        for model in MIXERS
        for lr in ((CHOSEN,) if quick or seed > 1 else RATES)
    ]


def run(point: Point) -> Point:
    torch.manual_seed(point["seed"])
    task, steps = TASKS[point["task"]], point["steps"]
    model = LanguageModel(
        *(max(task.answers, SYMBOLS + 1), MIXERS[point["model"]]),
        *(point["layers"], 2, 64),
        **({"softmax": {"rope": 1.0}} if point["model"] == "transformer" else {}),
    )

    def drawn(step: int) -> Batch:
        longest = growing(step, steps, task.near)
        return asked(task, BATCH, int(torch.randint(2, longest + 1, ())))

    curve = fit(model, drawn, loss, steps, point["lr"]).curve
    tests = task.near, task.near, task.far
    chosen, near, far = (score(model, asked(task, TEST, n)) for n in tests)
    return {
        **{"chosen_by": chosen, "near": near, "far": far, "curve": curve},
        "parameters": model.num_parameters(),
    }


def asked(task: Task, batch: int, length: int) -> Batch:
    """Sample sequences of a task, with answers after each input or after all inputs.

    In the second case, each answer is the input for the next answer.
    """
    inputs, answers = task.draw(batch, length)
    if not task.after:
        return inputs, answers
    begin = torch.full((batch, 1), SYMBOLS)
    nothing = torch.full((batch, length), UNASKED)
    tokens = torch.cat([inputs, begin, answers[:, :-1]], 1)
    return tokens, torch.cat([nothing, answers], 1)


def score(model: LanguageModel, batch: Batch) -> float:
    """Return the accuracy of a model on a batch, in percent."""
    return round(100 * right(model, *batch).mean().item(), 2)


# --- Claims and figures -------------------------------------------------


def claims(points: Points):
    """Yield the published claims that feedback beats a transformer at two lengths."""
    for name, some in points(lr=CHOSEN).by("task").items():
        for at in ("near", "far"):
            yield order(
                f"{name}, length {getattr(TASKS[name], at)}: "
                "feedback above a transformer of as many layers",
                [some(model=model)[at] for model in MIXERS],
                "above (Fan et al. 2020)",
                sign=">",
                spec=".1f",
                protocol="tasks and sizes of our own",
            )


def draw(points: Points) -> Figure:
    rows = {
        f"{task}: {model}": own
        for (task, model), own in points(lr=CHOSEN).by("task", "model").items()
    }
    figure, (ax,) = plots.panels(1.4 + 0.3 * len(rows))
    columns(ax, rows, {"near": "length of training", "far": "longer"})
    ax.set(xlabel="right answers, %", xlim=(0, 103))
    plots.legend(figure, ax, columns=2)
    return figure


setup = SETUP | {"batch": BATCH, "heads": 2, "width": 64}

if __name__ == "__main__":
    main(__file__)
