"""What a layer may see: chains, one memory of all layers, and attention to it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import Answer, Wrong, ask, compare, normal
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import agrees, exactly, gradient, shape
from fwlab.exercises.solutions import chain_depth, cheap_mask, feedback_step
from fwlab.ops.feedback.naive import (
    feedback_attention,
    merge_memory,
    sinusoids,
)

# --- chain_depth -----------------------------------------------------

#: A state: its layer, 0 = the embedding, and its step.
State = tuple[int, int]
Reads = Callable[[int, int], list[State]]


def _transformer(layers: int) -> Reads:
    return lambda l, t: [(l - 1, j) for j in range(t + 1)]


def _recurrent(layers: int) -> Reads:
    return lambda l, t: [(l - 1, t), (l, t - 1)][: t + 1]


def _feedback(layers: int) -> Reads:
    return lambda l, t: [
        *((k, j) for j in range(t) for k in range(layers + 1)),
        (l - 1, t),
    ]


def _model(
    generator: Generator,
    model: Callable[[int], Reads] = _feedback,
    layers: int = 3,
    steps: int = 5,
) -> dict[str, Any]:
    return {"reads": model(layers), "layers": layers, "steps": steps}


def _any_reading(generator: Generator, layers: int, steps: int) -> dict[str, Any]:
    """Each state reads one below it, and some of all states of the past."""
    reads: dict[State, list[State]] = {}
    for t in range(steps):
        for l in range(1, layers + 1):
            past = [(k, j) for j in range(t) for k in range(layers + 1)]
            chosen = torch.rand(len(past), generator=generator) < 1 / (3 + t)
            below = int(torch.randint(l, (), generator=generator))
            found = [state for state, take in zip(past, chosen, strict=True) if take]
            reads[l, t] = [(below, t), *found]
    return {"reads": lambda l, t: reads[l, t], "layers": layers, "steps": steps}


def _depths(
    reads: Reads,
    layers: int,
    steps: int,
    rule: Callable[[list[Tensor]], Any] = max,
    by_layer: bool = False,
    first: int = 0,
) -> Tensor:
    """The solution, with another way to combine chains, order, or first number."""
    depth = torch.full((layers + 1, steps), first)
    order = [(l, t) for t in range(steps) for l in range(1, layers + 1)]
    for l, t in sorted(order) if by_layer else order:
        depth[l, t] = 1 + rule([depth[state] for state in reads(l, t)])
    return depth


def _formula(of: Callable[[Tensor, Tensor, int], Tensor]) -> Answer:
    """A table by a formula in l, t and L, whatever the states read."""

    def table(reads: Reads, layers: int, steps: int) -> Tensor:
        l, t = torch.arange(layers + 1)[:, None], torch.arange(steps)
        return of(l, t, layers) * (l > 0)

    return table


def _how_many(reads: Reads, layers: int, steps: int) -> Tensor:
    """The number of states that a state depends on."""
    seen: dict[State, set[State]] = {}
    for t in range(steps):
        for l in range(layers + 1):
            direct = reads(l, t) if l else []
            seen[l, t] = {*direct}.union(*(seen[state] for state in direct))
    numbers = [[len(seen[l, t]) for t in range(steps)] for l in range(layers + 1)]
    return torch.tensor(numbers)


def _few_calls(answer: Answer, reference: Answer, generator: Generator) -> None:
    layers, steps, calls = 2, 8, 0
    reads = _feedback(layers)

    def counted(l: int, t: int) -> list[State]:
        nonlocal calls
        calls += 1
        return reads(l, t)

    expected = reference(reads, layers, steps)
    compare(ask(answer, expected, reads=counted, layers=layers, steps=steps), expected)
    if calls > 10 * layers * steps:
        raise Wrong(
            f"Your function asks {calls:,} times what a state reads; there are "
            f"{layers * steps} states. Keep the depth of each state that you know."
        )


CHAIN_DEPTH = Exercise(
    name="chain_depth",
    notebook="13_feedback",
    difficulty=3,
    importance=5,
    minutes=13,
    task="**The depth of the chain.** `reads(l, t)` lists the states, as pairs "
    "`(layer, step)`, that layer `l` reads at step `t`: only earlier steps, or lower "
    "layers of its own step. Layers count from 1, and 0 is the embedding; steps count "
    "from 0. For each state, return the number of layers on the longest chain from an "
    "embedding to it, `[layers + 1, steps]`, as integers.",
    reference=chain_depth,
    properties=(
        shape(
            "returns an integer for each state, [layers + 1, steps]",
            _model,
            [(_transformer, 3, 5), (_feedback, 1, 1), (_recurrent, 2, 7)],
        ),
        agrees(
            "has 0 for the embeddings",
            _model,
            [(_transformer, 3, 5), (_feedback, 2, 4)],
            of=lambda depth, *_: depth[0],
            expected=lambda reads, layers, steps: torch.zeros(steps),
            because="No layer was needed for row 0.",
            catches={
                "This counts states, the embedding too. An embedding has been through "
                "no layer.": partial(_depths, first=1)
            },
        ),
        agrees(
            "in a transformer, counts the layers below",
            _model,
            [(_transformer, 3, 5), (_transformer, 1, 4)],
            expected=_formula(lambda l, t, L: l + 0 * t),
            because="Each layer read the layer below it, at its own and all earlier "
            "steps.",
            catches={
                "This adds up the chains of all states that are read. They are computed "
                "side by side: only the longest counts.": partial(_depths, rule=sum),
                "This counts all states that a state depends on. Those on one chain "
                "count.": _how_many,
                "This is the chain of a recurrent network, whatever the states "
                "read.": _formula(lambda l, t, L: l + t),
                "This is the chain of feedback, whatever the states read.": _formula(
                    lambda l, t, L: t * L + l
                ),
            },
        ),
        agrees(
            "in a recurrent network, grows by one with each step",
            _model,
            [(_recurrent, 3, 5), (_recurrent, 1, 6)],
            expected=_formula(lambda l, t, L: l + t),
            because="Each layer read the layer below it, and itself one step before.",
            catches={
                "This is the shortest chain. A state waits for the longest "
                "one.": partial(_depths, rule=min),
                "This is the number of layers below, whatever the states "
                "read.": _formula(lambda l, t, L: l + 0 * t),
            },
        ),
        agrees(
            "with feedback, grows by all layers with each step",
            _model,
            [(_feedback, 3, 4), (_feedback, 1, 5), (_feedback, 2, 2)],
            expected=_formula(lambda l, t, L: t * L + l),
            because="Each layer read all layers of all earlier steps, and the layer "
            "below it.",
            catches={
                "This goes layer by layer, so it meets upper layers of the past before "
                "they are known. Go step by step.": partial(_depths, by_layer=True),
                "This follows only the last state of each list. All of them have to be "
                "known.": partial(_depths, rule=lambda chains: chains[-1]),
            },
        ),
        agrees(
            "follows any other way of reading",
            _any_reading,
            [(3, 6), (5, 4), (2, 10)],
            because="Each state read some lower layer of its step, and a few states of "
            "the past. There were {layers} layers and {steps} steps.",
        ),
        Property("asks only a few times what a state reads", _few_calls),
    ),
    hints=(
        "A state is known one layer after the last of the states that it reads.",
        "So its depth is 1 + the maximum over reads(l, t). Fill the table in an order "
        "in which all these are already there.",
        "Two loops, for t outside and for l inside, and depth[state] with state = (l, "
        "t) reads one entry of the table.",
    ),
    example=_model,
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
        "naive.sinusoids(distances, features) @ positions.T has a row r for each.",
        'content = torch.einsum("bhd,bjhd->bhj", q, k) and position = '
        'torch.einsum("bhd,jd->bhj", q, r). A softmax over nothing is empty, '
        "and an empty sum is 0: no special case.",
    ),
    example=_problem,
)


# --- feedback_step ---------------------------------------------------


def _cache(
    generator: Generator, past: int = 3, layers: int = 2, width: int = 4
) -> dict[str, Any]:
    """A step of a small stack, in which it matters what is read, and in which order."""
    own = normal(generator, layers, width, width)
    W_k, W_v = normal(generator, 2, width, width)

    def layer(l: int, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        back = torch.arange(len(keys), 0, -1)
        weights = torch.softmax(keys @ x - 0.3 * back, 0)
        return x + torch.tanh(own[l] @ x + weights @ values)

    def project(m: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(W_k @ m), torch.tanh(W_v @ m)

    return {
        "x": normal(generator, width),
        "keys": normal(generator, past, width),
        "values": normal(generator, past, width),
        "w": normal(generator, layers + 1),
        "layer": layer,
        "project": project,
    }


def _only(generator: Generator, state: int) -> dict[str, Any]:
    """All the weight of the memory is on one state."""
    chosen = torch.arange(3) == state
    return _cache(generator) | {"w": torch.where(chosen, 0.0, -1000.0).double()}


Step = tuple[Tensor, Tensor, Tensor]


def _cached(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    w: Tensor,
    layer: Answer,
    project: Answer,
    late: bool = False,
    newest_first: bool = False,
    sees_itself: bool = False,
    from_input: bool = False,
    downwards: bool = False,
    memory: Callable[[Tensor, Tensor], Tensor] = merge_memory,
) -> Step:
    """The solution, with a choice of mistakes.

    - `late`: a state is kept before its layer instead of after it.
    """
    read, states = [keys, values], [x]
    if sees_itself:
        read = [torch.cat([x, m[None]]) for x, m in zip(read, project(x), strict=True)]
    for l in range(len(w) - 1):
        y = layer(len(w) - 2 - l if downwards else l, x, *read)
        states.append(x if late else y)
        x = x if from_input and l < len(w) - 2 else y
    new = project(memory(torch.stack(states), w))
    pairs = [
        torch.cat([m[None], old] if newest_first else [old, m[None]])
        for old, m in zip((keys, values), new, strict=True)
    ]
    return x, pairs[0], pairs[1]


def _merged_late(
    x: Tensor, keys: Tensor, values: Tensor, w: Tensor, layer: Answer, project: Answer
) -> Step:
    states = [x]
    for l in range(len(w) - 1):
        states.append(layer(l, states[-1], keys, values))
    each = zip(*map(project, states), strict=True)
    k, v = (merge_memory(torch.stack(part), w)[None] for part in each)
    return states[-1], torch.cat([keys, k]), torch.cat([values, v])


sick_step = partial(_cached, late=True, newest_first=True)
"""The step of the bug hunt, with both of its bugs."""
_RESULTS = ("x", "keys", "values")

FEEDBACK_STEP = Exercise(
    name="feedback_step",
    notebook="13_feedback",
    difficulty=3,
    importance=4,
    minutes=11,
    task="**A sick cache.** `x` `[d]` is the embedding of a step, `keys` and `values` "
    "`[past, d]` come from the memories before it, oldest first, and `w` `[L + 1]` has "
    "the logits of Eq. f1. `layer(l, x, keys, values)` returns the output of one of the "
    "`L` layers, with `l` from 0, and `project(m)` the key and the value of a memory. "
    "Return the output of the top layer, and the keys and values for the next step.",
    start="""\
from fwlab.ops.feedback.naive import merge_memory


def feedback_step(x, keys, values, w, layer, project):
    states = [x]
    for l in range(len(w) - 1):
        states.append(x)
        x = layer(l, x, keys, values)
    k, v = project(merge_memory(torch.stack(states), w))
    keys = torch.cat([k[None], keys])
    values = torch.cat([v[None], values])
    return x, keys, values""",
    reference=feedback_step,
    properties=(
        shape(
            "returns x, and keys and values with one more row",
            _cache,
            [(3, 2, 4), (0, 1, 3), (5, 3, 2)],
            names=_RESULTS,
        ),
        agrees(
            "runs all layers, each on the output of the one before",
            _cache,
            names=_RESULTS,
            only=("x",),
            because="This is x. All layers of a step read the same keys and values.",
            catches={
                "The step reads its own memory, which is made only after its "
                "layers.": partial(_cached, sees_itself=True),
                "Every layer gets the embedding here. It gets the output of the layer "
                "below it.": partial(_cached, from_input=True),
                "The layers run from the top down.": partial(_cached, downwards=True),
            },
        ),
        agrees(
            "leaves the earlier keys and values in their places",
            _cache,
            names=_RESULTS,
            of=lambda step, x, keys, *_: torch.stack(
                [y[: len(keys)] for y in step[1:]]
            ),
            because="Distances are counted from the end: the newest is the last.",
            catches={
                "Two bugs are left: one in the place of the new memory, one in what it "
                "is made of.": sick_step,
                "The newest memory is the first here. Attention takes the last one for "
                "1 step back.": partial(_cached, newest_first=True),
            },
        ),
        agrees(
            "with all the weight on one state, remembers this state",
            _only,
            [0, 1, 2],
            names=_RESULTS,
            because="All the weight was on state {state} of 0, 1, 2; this is the result "
            "{name}.",
            catches={
                "The input is among the states twice, and the output of the top layer "
                "is missing.": partial(_cached, late=True),
                "The memory is the top state alone. Eq. f1 takes a mean of all "
                "states.": partial(_cached, memory=lambda states, w: states[-1]),
                "The memory is the embedding alone: nothing is fed back.": partial(
                    _cached, memory=lambda states, w: states[0]
                ),
                "The memory is the plain mean: the logits do not count.": partial(
                    _cached, memory=lambda states, w: states.mean(0)
                ),
                "The logits are used as weights, without the softmax.": partial(
                    _cached, memory=lambda states, w: _weighted(w, states)
                ),
            },
        ),
        agrees(
            "merges first, and then projects once",
            _cache,
            [(3, 2, 4), (1, 2, 6)],
            names=_RESULTS,
            because="This is the result {name}. `project` may be any function, such as "
            "one with a norm.",
            catches={
                "This projects every state and merges the keys and values. That is not "
                "the same, and costs more.": _merged_late
            },
        ),
        agrees(
            "works at the first step, and for any number of layers",
            _cache,
            [(0, 1, 3), (0, 4, 2), (7, 5, 3)],
            names=_RESULTS,
            because="There were {past} memories and {layers} layers.",
        ),
        gradient("lets gradients through to x, keys, values and w", _cache),
    ),
    hints=(
        "Two symptoms, two bugs: the top layer is never seen, and things go wrong once "
        "two memories have an order.",
        "Which states are in the list when there are two layers? Write them down, in "
        "their order.",
        "Append x after the layer, not before it; and put the new row at the end: "
        "torch.cat([keys, k[None]]).",
    ),
    example=_cache,
)


# --- cheap_mask ------------------------------------------------------

STEPS, LONGEST = 12, 4


def ages(mask: Tensor) -> Tensor:
    """How many steps back the newest memory is that each step reads.

    - `mask`: `bool [steps, steps]`; row t = the memories that step t reads.
    - Returns `[steps]`: for a step that reads none, as if there were one before the
      first step.
    """
    t = torch.arange(len(mask))
    newest = torch.where(mask, t, -1).amax(1)
    return t - newest


def _placed(*places: int) -> Tensor:
    """A step reads all earlier ones with a lower place in their chain."""
    place = torch.tensor(places)
    return (place < place[:, None]).tril(-1)


def _blocks(size: int) -> Callable[[int], Tensor]:
    return lambda steps: _placed(*(t // size for t in range(steps)))


def _lag(steps: int, lags: Sequence[int]) -> Tensor:
    t = torch.arange(steps)
    return torch.isin(t[:, None] - t, torch.tensor(lags))


def _asked_for_mask(answer: Answer) -> Tensor:
    mask: Tensor = ask(answer, torch.ones(STEPS, STEPS).bool(), steps=STEPS)
    return mask


def _is_causal(answer: Answer, reference: Answer, generator: Generator) -> None:
    mask = _asked_for_mask(answer)
    if (early := mask.triu().nonzero()).numel():
        t, j = early[0].tolist()
        raise Wrong(
            f"Step {t} reads the memory of step {j}, which is not there yet: a memory "
            "is made after all layers of its step."
        )


def _has_short_chains(answer: Answer, reference: Answer, generator: Generator) -> None:
    mask = _asked_for_mask(answer)
    chain: list[int] = []
    for row in mask:
        chain.append(
            1 + max((n for n, m in zip(chain, row, strict=False) if m), default=0)
        )
    if max(chain) > LONGEST:
        t = next(t for t, n in enumerate(chain) if n > LONGEST)
        raise Wrong(
            f"A chain of {chain[t]} steps ends at step {t}, and the longest has "
            f"{max(chain)}; {LONGEST} are allowed."
        )


def _is_fresh(answer: Answer, reference: Answer, generator: Generator) -> None:
    yours, blocks = (
        int(ages(mask).sum()) for mask in (_asked_for_mask(answer), _blocks(3)(STEPS))
    )
    if yours >= blocks:
        raise Wrong(
            f"The mean age of your memories is {yours / STEPS:.2f} steps; that of the "
            f"blocks is {blocks / STEPS:.2f}."
        )


CHEAP_MASK = Exercise(
    name="cheap_mask",
    notebook="13_feedback",
    difficulty=5,
    importance=3,
    minutes=20,
    task="**A third of the rounds.** A step no longer reads all earlier memories, but "
    "only some. Return which, for `steps` = 12, as booleans `[steps, steps]`: row `t` "
    "is True at the steps whose memories step `t` reads. No chain of steps, each "
    "reading the one before it, may have more than 4. The *age* of step `t` is the "
    "distance to the newest memory that it reads, and `t + 1` if it reads none. The "
    "mean age has to be below 2, that of the blocks.",
    reference=cheap_mask,
    properties=(
        shape("returns booleans, [steps, steps]", exactly("steps"), [STEPS]),
        Property(
            "reads only memories of earlier steps",
            _is_causal,
            {
                "The diagonal is True, but the memory of a step is made after its "
                "layers.": lambda steps: torch.ones(steps, steps).tril().bool(),
                "Rows and columns are swapped: row t is what step t "
                "reads.": lambda steps: _blocks(3)(steps).mT,
            },
        ),
        Property(
            "has no chain of more than 4 steps",
            _has_short_chains,
            {
                "This is all of feedback: every step waits for the one "
                "before.": lambda steps: torch.ones(steps, steps).tril(-1).bool(),
                "Each step reads only the one before. But all steps are on one chain "
                "then, as with full feedback.": partial(_lag, lags=[1]),
                "Each step reads the last four. That limits how far it looks, not how "
                "long the chain gets.": partial(_lag, lags=[1, 2, 3, 4]),
            },
        ),
        Property(
            "has younger memories than blocks of three steps",
            _is_fresh,
            {
                "These are the blocks themselves: the same age is not "
                "below it.": _blocks(3),
                "No step reads a memory: this is not feedback.": lambda steps: (
                    torch.zeros(steps, steps).bool()
                ),
                "Each step reads the one three steps back: three chains side by side, "
                "and every memory is three steps old.": partial(_lag, lags=[3]),
                "The first four steps use up the chain. All later ones read memories "
                "that get older and older.": lambda steps: _placed(
                    *(min(t, 3) for t in range(steps))
                ),
            },
        ),
    ),
    hints=(
        "Give each step a place from 1 to 4 in its chain. It may read every earlier "
        "step with a lower place. Blocks are 1 1 1 2 2 2 3 3 3 4 4 4.",
        "Places need not grow. A step with place 1 or 2 between later ones has an old "
        "memory itself, but is a young memory for all steps after it.",
        "Let Python try random lists of places: of a thousand, about four are good "
        "enough. Nearly all of these end with 4, and have no 1 after the "
        "seventh step.",
    ),
    example=lambda generator: {"steps": STEPS},
)


EXERCISES = {
    each.name: each
    for each in (
        CHAIN_DEPTH,
        MERGE_MEMORY,
        FEEDBACK_ATTENTION,
        FEEDBACK_STEP,
        CHEAP_MASK,
    )
}
