"""Two exercises: one memory from all layers, and attention to the past."""

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import (
    CUT,
    Answer,
    ask,
    compare,
    compare_gradients,
    normal,
)
from fwlab.exercises.exercise import Exercise
from fwlab.ops.feedback.naive import (
    feedback_attention,
    merge_memory,
    sinusoids,
    softmax,
)

# --- merge_memory ----------------------------------------------------


def _merge_has_shape(answer: Answer, reference: Answer, generator: Generator) -> None:
    """returns a tensor of the shape of one state"""
    for layers, shape in ((3, (2, 5)), (2, (4,)), (5, (2, 3, 4))):
        states = normal(generator, layers + 1, *shape)
        ask(answer, states[0], states=states, w=normal(generator, layers + 1))


def _merge_starts_as_mean(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """with equal logits, takes the plain mean of all states"""
    states = normal(generator, 4, 2, 5)
    for logit in (0.0, 2.5):
        w = torch.full((4,), logit, dtype=torch.float64)
        compare(
            ask(answer, states[0], states=states, w=w),
            states.mean(0),
            f"All {len(w)} logits were {logit}; the weights should sum to one.",
        )


def _merge_selects(answer: Answer, reference: Answer, generator: Generator) -> None:
    """with all the weight on one state, returns that state"""
    states = normal(generator, 4, 2, 5)
    for layer in range(4):
        w = torch.full((4,), -1000.0, dtype=torch.float64)
        w[layer] = 0
        compare(
            ask(answer, states[0], states=states, w=w),
            states[layer],
            f"Logit {layer} was 0, all others -1000. The first state is the input of "
            "the stack, the last one its output; both count.",
        )


def _merge_is_softmax(answer: Answer, reference: Answer, generator: Generator) -> None:
    """weights states by the softmax of the logits"""
    for count, shape in ((4, (2, 5)), (2, (3,)), (6, (2, 3, 4))):
        states, w = normal(generator, count, *shape), normal(generator, count)
        compare(
            ask(answer, states[0], states=states, w=w),
            reference(states, w),
            "Eq. f1: the weights are exp(w_l) / sum of exp(w). There were "
            f"{count} states of shape {list(shape)}.",
        )


def _merge_is_stable(answer: Answer, reference: Answer, generator: Generator) -> None:
    """does not overflow for large logits"""
    states, w = normal(generator, 3, 2, 4), normal(generator, 3)
    compare(
        ask(answer, states[0], states=states, w=w + 1000),
        reference(states, w),
        "1000 was added to all logits, which leaves the softmax unchanged.",
    )


def _merge_takes_square(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """weights layers, even if other dimensions have the same size"""
    states, w = normal(generator, 4, 4, 4), normal(generator, 4)
    compare(
        ask(answer, states[0], states=states, w=w),
        reference(states, w),
        "Four states of shape [4, 4]: does w apply to the first dimension?",
    )


def _merge_has_gradient(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """lets gradients through to states and w"""
    given = {"states": normal(generator, 4, 2, 5), "w": normal(generator, 4)}
    compare_gradients(answer, reference, generator, CUT, **given)


def _states(generator: Generator) -> dict[str, Tensor]:
    return {"states": normal(generator, 4, 2, 5), "w": normal(generator, 4)}


def _weighted(weights: Tensor, states: Tensor) -> Tensor:
    return torch.einsum("l,l...->...", weights, states)


def _logits_as_weights(states: Tensor, w: Tensor) -> Tensor:
    """This uses the logits as weights, without the softmax."""
    return _weighted(w, states)


def _plain_mean(states: Tensor, w: Tensor) -> Tensor:
    """This is the plain mean: the logits do not count."""
    return states.mean(0)


def _top_only(states: Tensor, w: Tensor) -> Tensor:
    """This is the top state alone."""
    return states[-1]


def _without_input(states: Tensor, w: Tensor) -> Tensor:
    """This leaves out state 0, the input of the stack, which counts, too."""
    return _weighted(torch.softmax(w[1:], 0), states[1:])


def _upside_down(states: Tensor, w: Tensor) -> Tensor:
    """Logits and states are in opposite order here."""
    return _weighted(torch.softmax(w.flip(0), 0), states)


def _overflows(states: Tensor, w: Tensor) -> Tensor:
    """This takes exp of the logits themselves, which overflows. Subtract the
    largest first, or use torch.softmax.
    """
    return _weighted(w.exp() / w.exp().sum(), states)


# --- feedback_attention ----------------------------------------------


def _problem(
    generator: Generator, past: int, batch: int = 2, heads: int = 3, key: int = 4
) -> dict[str, Tensor]:
    return {
        "q": normal(generator, batch, heads, key),
        "k": normal(generator, batch, past, heads, key),
        "v": normal(generator, batch, past, heads, key),
        "positions": normal(generator, key, 6),
    }


def _attention_has_shape(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """returns a tensor of the shape of q"""
    for past, batch, heads, key in ((5, 2, 3, 4), (1, 1, 1, 2), (3, 4, 2, 5)):
        given = _problem(generator, past, batch, heads, key)
        ask(answer, given["q"], **given)


def _attention_of_one(answer: Answer, reference: Answer, generator: Generator) -> None:
    """with one memory, returns its value"""
    given = _problem(generator, 1)
    compare(
        ask(answer, given["q"], **given),
        given["v"][:, 0],
        "The softmax over a single score is 1 for any score.",
    )


def _attention_is_a_mean(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """with a zero query, returns the mean of the values"""
    given = _problem(generator, 5)
    given["q"] = torch.zeros_like(given["q"])
    compare(
        ask(answer, given["q"], **given),
        given["v"].mean(1),
        "All scores are 0, so all weights are 1/5. Is the softmax over the memories?",
    )


def _attention_compares(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """without positions, is scaled dot-product attention"""
    given = _problem(generator, 5)
    given["positions"] = torch.zeros_like(given["positions"])
    compare(
        ask(answer, given["q"], **given),
        reference(*given.values()),
        "positions was 0, so scores are q . k / sqrt(key). Do you keep heads apart, "
        "and divide the scores?",
    )


def _attention_knows_distances(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """measures distances from the query: the last memory is 1 step back"""
    given = _problem(generator, 5)
    given["k"] = torch.zeros_like(given["k"])
    compare(
        ask(answer, given["q"], **given),
        reference(*given.values()),
        "All keys were 0, so scores are q . P s(distance) / sqrt(key), with "
        "distances 5, 4, 3, 2, 1 from the oldest to the newest.",
    )


def _attention_does_both(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """adds both scores, and divides both by sqrt(key)"""
    given = _problem(generator, 7)
    compare(ask(answer, given["q"], **given), reference(*given.values()), "Eq. f4.")


def _attention_of_nothing(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """without any memory, returns 0"""
    given = _problem(generator, 0)
    compare(
        ask(answer, given["q"], **given),
        torch.zeros_like(given["q"]),
        "This is the first step of a sequence: an empty sum.",
    )


def _attention_has_gradient(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """lets gradients through to q, k, v and positions"""
    given = _problem(generator, 5)
    compare_gradients(answer, reference, generator, CUT, **given)


def _attention_is_general(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    """works for any sizes, longer pasts, and large scores"""
    for past, batch, heads, key in ((40, 1, 1, 2), (17, 3, 4, 6), (2, 2, 2, 2)):
        given = _problem(generator, past, batch, heads, key)
        expected = reference(*given.values())
        sizes = f"batch {batch}, past {past}, heads {heads}, width {key}."
        compare(ask(answer, expected, **given), expected, f"The sizes were {sizes}")
        given["q"] = given["q"] * 1000
        compare(
            ask(answer, expected, **given),
            reference(*given.values()),
            "The query was multiplied by 1000. Does your softmax overflow?",
        )


def _example(generator: Generator) -> dict[str, Tensor]:
    return _problem(generator, 5)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    distances: Tensor,
    positions: Tensor,
    scale: float | None = None,
    dim: int = 2,
) -> Tensor:
    r = sinusoids(distances.double(), positions.shape[1]) @ positions.T
    a = torch.einsum("bhd,bjhd->bhj", q, k) + torch.einsum("bhd,jd->bhj", q, r)
    a = torch.softmax(a / (scale or q.shape[-1] ** 0.5), dim)
    return torch.einsum("bhj,bjhd->bhd", a, v)


def _back(k: Tensor) -> Tensor:
    return torch.arange(k.shape[1], 0, -1)


def _no_scale(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """The scores are not divided by sqrt(key) here."""
    return _attend(q, k, v, _back(k), positions, scale=1)


def _by_width(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """This divides the scores by key, not by its square root."""
    return _attend(q, k, v, _back(k), positions, scale=q.shape[-1])


def _over_heads(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """This softmax is over the heads. The weights of a head sum to one over
    the memories.
    """
    return _attend(q, k, v, _back(k), positions, dim=1)


def _no_positions(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """This leaves out positions: near and far memories count the same."""
    return _attend(q, k, v, _back(k), 0 * positions)


def _from_zero(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """The last memory has distance 0 here. It is 1 step back: the step itself
    is not among the memories.
    """
    return _attend(q, k, v, _back(k) - 1, positions)


def _forwards(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """The distances run the wrong way here: the first memory is the oldest."""
    return _attend(q, k, v, _back(k).flip(0), positions)


EXERCISES: dict[str, Exercise] = {
    exercise.name: exercise
    for exercise in (
        Exercise(
            "merge_memory",
            (
                "**One memory of many layers** (Eq. f1). `states` is `[L + 1, "
                "..., d]`, `w` is `[L + 1]`. Return `[..., d]`."
            ),
            (merge_memory,),
            (
                _merge_has_shape,
                _merge_starts_as_mean,
                _merge_selects,
                _merge_is_softmax,
                _merge_is_stable,
                _merge_takes_square,
                _merge_has_gradient,
            ),
            (
                "Eq. f1: turn the logits into weights that sum to one, then add up "
                "the states, each times its weight.",
                "torch.softmax does not overflow. The weights belong to the first "
                "dimension of states.",
                'weights = torch.softmax(w, dim=0), and in einsum: "l,l...d->...d".',
            ),
            _states,
            {
                _logits_as_weights: _merge_starts_as_mean,
                _plain_mean: _merge_selects,
                _top_only: _merge_starts_as_mean,
                _without_input: _merge_starts_as_mean,
                _upside_down: _merge_selects,
                _overflows: _merge_is_stable,
            },
        ),
        Exercise(
            "feedback_attention",
            (
                "**Attend to the past** (Eqs. f4 and f5). `q` is `[batch, "
                "heads, key]`; `k` and `v` are `[batch, past, heads, key]`, "
                "oldest first, the last one being 1 step back; `positions` is "
                "$P$, `[key, features]`. `naive.sinusoids(distances, features)` "
                "gives $s$ of Eq. f3 as `[past, features]`. With `past = 0` the "
                "result is 0."
            ),
            (feedback_attention, softmax, sinusoids),
            (
                _attention_has_shape,
                _attention_of_one,
                _attention_is_a_mean,
                _attention_compares,
                _attention_knows_distances,
                _attention_does_both,
                _attention_of_nothing,
                _attention_is_general,
                _attention_has_gradient,
            ),
            (
                "Two scores per memory, Eq. f4: one compares the query with its key, "
                "the other with the vector r of its distance. Add, divide, softmax, "
                "and take the weighted mean of the values.",
                "torch.arange(past, 0, -1) gives the distances; "
                "sinusoids(distances, features) @ positions.T has a row r for each.",
                'content = torch.einsum("bhd,bjhd->bhj", q, k) and position = '
                'torch.einsum("bhd,jd->bhj", q, r). A softmax over nothing is empty, '
                "and an empty sum is 0: no special case.",
            ),
            _example,
            {
                _no_scale: _attention_compares,
                _by_width: _attention_compares,
                _over_heads: _attention_of_one,
                _no_positions: _attention_knows_distances,
                _from_zero: _attention_knows_distances,
                _forwards: _attention_knows_distances,
            },
        ),
    )
}
