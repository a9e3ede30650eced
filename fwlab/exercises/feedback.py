"""Two exercises: one memory from all layers, and attention to the past."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import Answer, ask, compare, normal
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import agrees, gradient, shape
from fwlab.ops.feedback.naive import (
    feedback_attention,
    merge_memory,
    sinusoids,
)

# --- merge_memory ----------------------------------------------------


def _states(
    generator: Generator, count: int = 4, size: tuple[int, ...] = (2, 5)
) -> dict[str, Tensor]:
    return {"states": normal(generator, count, *size), "w": normal(generator, count)}


def _equal(generator: Generator, logit: float) -> dict[str, Tensor]:
    return _states(generator) | {"w": torch.full((4,), logit, dtype=torch.float64)}


def _one_state(generator: Generator, layer: int) -> dict[str, Tensor]:
    chosen = torch.arange(4) == layer
    return _states(generator) | {"w": torch.where(chosen, 0.0, -1000.0).double()}


def _weighted(weights: Tensor, states: Tensor) -> Tensor:
    return torch.einsum("l,l...->...", weights, states)


MERGE_MEMORY = Exercise(
    name="merge_memory",
    notebook="13_feedback",
    difficulty=1,
    importance=3,
    minutes=7,
    task="**One memory of many layers** (Eq. f1). `states` is `[L + 1, "
    "..., d]`, `w` is `[L + 1]`. Return `[..., d]`.",
    reference=merge_memory,
    properties=(
        shape(
            "returns a tensor of the shape of one state",
            _states,
            [(4, (2, 5)), (3, (4,)), (6, (2, 3, 4))],
        ),
        agrees(
            "with equal logits, takes the plain mean of all states",
            _equal,
            [0.0, 2.5],
            expected=lambda states, w: states.mean(0),
            because="All 4 logits were {logit}; the weights should sum to one.",
            catches={
                "This uses the logits as weights, "
                "without the softmax.": lambda states, w: _weighted(w, states),
                "This is the top state alone.": lambda states, w: states[-1],
                "This leaves out state 0, the input of the stack, "
                "which counts, too.": lambda states, w: _weighted(
                    torch.softmax(w[1:], 0), states[1:]
                ),
            },
        ),
        agrees(
            "with all the weight on one state, returns that state",
            _one_state,
            [0, 1, 2, 3],
            expected=lambda states, w: states[w.argmax()],
            because="Logit {layer} was 0, all others -1000. The first state is the "
            "input of the stack, the last one its output; both count.",
            catches={
                "This is the plain mean: the logits do not count.": lambda states, w: (
                    states.mean(0)
                ),
                "Logits and states are in opposite order here.": lambda states, w: (
                    _weighted(torch.softmax(w.flip(0), 0), states)
                ),
            },
        ),
        agrees(
            "weights states by the softmax of the logits",
            _states,
            [(4, (2, 5)), (2, (3,)), (6, (2, 3, 4))],
            because="Eq. f1: the weights are exp(w_l) / sum of exp(w). There were "
            "{count} states of shape {size}.",
        ),
        agrees(
            "does not overflow for large logits",
            _states,
            [(3, (2, 4))],
            change={"w": lambda w: w + 1000},
            expected=lambda states, w: merge_memory(states, w - 1000),
            because="1000 was added to all logits, which leaves the softmax unchanged.",
            catches={
                "This takes exp of the logits themselves, which overflows. Subtract "
                "the largest first, or use torch.softmax.": lambda states, w: _weighted(
                    w.exp() / w.exp().sum(), states
                )
            },
        ),
        agrees(
            "weights layers, even if other dimensions have the same size",
            _states,
            [(4, (4, 4))],
            because="Four states of shape [4, 4]: does w apply to the first dimension?",
        ),
        gradient("lets gradients through to states and w", _states),
    ),
    hints=(
        "Eq. f1: turn the logits into weights that sum to one, then add up "
        "the states, each times its weight.",
        "torch.softmax does not overflow. The weights belong to the first "
        "dimension of states.",
        'weights = torch.softmax(w, dim=0), and in einsum: "l,l...d->...d".',
    ),
    example=_states,
)


# --- feedback_attention ----------------------------------------------


def _problem(
    generator: Generator, past: int = 5, batch: int = 2, heads: int = 3, key: int = 4
) -> dict[str, Tensor]:
    return {
        "q": normal(generator, batch, heads, key),
        "k": normal(generator, batch, past, heads, key),
        "v": normal(generator, batch, past, heads, key),
        "positions": normal(generator, key, 6),
    }


def _is_general(answer: Answer, reference: Answer, generator: Generator) -> None:
    for past, batch, heads, key in ((40, 1, 1, 2), (17, 3, 4, 6), (2, 2, 2, 2)):
        inputs = _problem(generator, past, batch, heads, key)
        expected = reference(*inputs.values())
        sizes = f"batch {batch}, past {past}, heads {heads}, width {key}."
        compare(ask(answer, expected, **inputs), expected, f"The sizes were {sizes}")
        inputs["q"] = inputs["q"] * 1000
        compare(
            ask(answer, expected, **inputs),
            reference(*inputs.values()),
            "The query was multiplied by 1000. Does your softmax overflow?",
        )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    distances: Callable[[Tensor], Tensor] = lambda back: back,
    power: float = 0.5,
    dim: int = 2,
) -> Tensor:
    """The solution, with other distances, scale or dimension of the softmax."""
    back = distances(torch.arange(k.shape[1], 0, -1))
    r = sinusoids(back.double(), positions.shape[1]) @ positions.T
    a = torch.einsum("bhd,bjhd->bhj", q, k) + torch.einsum("bhd,jd->bhj", q, r)
    a = torch.softmax(a / q.shape[-1] ** power, dim)
    return torch.einsum("bhj,bjhd->bhd", a, v)


FEEDBACK_ATTENTION = Exercise(
    name="feedback_attention",
    notebook="13_feedback",
    difficulty=3,
    importance=4,
    minutes=17,
    task="**Attend to the past** (Eqs. f4 and f5). `q` is `[batch, "
    "heads, key]`; `k` and `v` are `[batch, past, heads, key]`, "
    "oldest first, the last one being 1 step back; `positions` is "
    "$P$, `[key, features]`. `naive.sinusoids(distances, features)` "
    "gives $s$ of Eq. f3 as `[past, features]`. With `past = 0` the "
    "result is 0.",
    reference=feedback_attention,
    properties=(
        shape(
            "returns a tensor of the shape of q",
            _problem,
            [(5, 2, 3, 4), (1, 1, 1, 2), (3, 4, 2, 5)],
        ),
        agrees(
            "with one memory, returns its value",
            _problem,
            [1],
            expected=lambda q, k, v, positions: v[:, 0],
            because="The softmax over a single score is 1 for any score.",
            catches={
                "This softmax is over the heads. The weights of a head sum to one over "
                "the memories.": partial(_attend, dim=1)
            },
        ),
        agrees(
            "with a zero query, returns the mean of the values",
            _problem,
            change={"q": torch.zeros_like},
            expected=lambda q, k, v, positions: v.mean(1),
            because="All scores are 0, so all weights are 1/5. Is the softmax over the "
            "memories?",
        ),
        agrees(
            "without positions, is scaled dot-product attention",
            _problem,
            change={"positions": torch.zeros_like},
            because="positions was 0, so scores are q . k / sqrt(key). Do you keep "
            "heads apart, and divide the scores?",
            catches={
                "The scores are not divided by sqrt(key) here.": partial(
                    _attend, power=0
                ),
                "This divides the scores by key, not by its square root.": partial(
                    _attend, power=1
                ),
            },
        ),
        agrees(
            "measures distances from the query: the last memory is 1 step back",
            _problem,
            change={"k": torch.zeros_like},
            because="All keys were 0, so scores are q . P s(distance) / sqrt(key), "
            "with distances 5, 4, 3, 2, 1 from the oldest to the newest.",
            catches={
                "This leaves out positions: near and far memories "
                "count the same.": lambda q, k, v, positions: _attend(
                    q, k, v, 0 * positions
                ),
                "The last memory has distance 0 here. It is 1 step back: the step "
                "itself is not among the memories.": partial(
                    _attend, distances=lambda back: back - 1
                ),
                "The distances run the wrong way here: the first memory "
                "is the oldest.": partial(_attend, distances=lambda back: back.flip(0)),
            },
        ),
        agrees(
            "adds both scores, and divides both by sqrt(key)",
            _problem,
            [7],
            because="Eq. f4.",
        ),
        agrees(
            "without any memory, returns 0",
            _problem,
            [0],
            expected=lambda q, k, v, positions: 0 * q,
            because="This is the first step of a sequence: an empty sum.",
        ),
        Property("works for any sizes, longer pasts, and large scores", _is_general),
        gradient("lets gradients through to q, k, v and positions", _problem),
    ),
    hints=(
        "Two scores per memory, Eq. f4: one compares the query with its key, "
        "the other with the vector r of its distance. Add, divide, softmax, "
        "and take the weighted mean of the values.",
        "torch.arange(past, 0, -1) gives the distances; "
        "sinusoids(distances, features) @ positions.T has a row r for each.",
        'content = torch.einsum("bhd,bjhd->bhj", q, k) and position = '
        'torch.einsum("bhd,jd->bhj", q, r). A softmax over nothing is empty, '
        "and an empty sum is 0: no special case.",
    ),
    example=_problem,
)


EXERCISES = {each.name: each for each in (MERGE_MEMORY, FEEDBACK_ATTENTION)}
