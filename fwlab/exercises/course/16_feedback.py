"""Feedback Transformer."""

import torch
from torch import Tensor

from fwlab.exercises.answers import Wrong, ask, compare, normal
from fwlab.exercises.notation import exercise
from fwlab.exercises.properties import exactly
from fwlab.ops.feedback import naive

# --- chain_depth -----------------------------------------------------


def _transformer(layers):
    return lambda l, t: [(l - 1, j) for j in range(t + 1)]


def _recurrent(layers):
    return lambda l, t: [(l - 1, t), (l, t - 1)][: t + 1]


def _feedback(layers):
    return lambda l, t: [
        *((k, j) for j in range(t) for k in range(layers + 1)),
        (l - 1, t),
    ]


def _model(generator, model=_feedback, layers=3, steps=5):
    return {"reads": model(layers), "layers": layers, "steps": steps}


def _any_reading(generator, layers, steps):
    """Let each state read one below it, and some of all states of the past."""
    reads = {}
    for t in range(steps):
        for l in range(1, layers + 1):
            past = [(k, j) for j in range(t) for k in range(layers + 1)]
            chosen = torch.rand(len(past), generator=generator) < 1 / (3 + t)
            below = int(torch.randint(l, (), generator=generator))
            found = [state for state, take in zip(past, chosen, strict=True) if take]
            reads[l, t] = [(below, t), *found]
    return {"reads": lambda l, t: reads[l, t], "layers": layers, "steps": steps}


def _how_many(reads, layers, steps):
    """Count the states that a state depends on."""
    seen = {}
    for t in range(steps):
        for l in range(layers + 1):
            direct = reads(l, t) if l else []
            seen[l, t] = {*direct}.union(*(seen[state] for state in direct))
    numbers = [[len(seen[l, t]) for t in range(steps)] for l in range(layers + 1)]
    return torch.tensor(numbers)


def _few_calls(answer, reference, generator):
    layers, steps, calls = 2, 8, 0
    reads = _feedback(layers)

    def counted(l, t):
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


@exercise(_model, difficulty=3, importance=5, minutes=13)
def chain_depth(reads, layers, steps):
    """
    **The depth of the chain.** `reads(l, t)` lists the states, as pairs `(layer,
    step)`, that layer `l` reads at step `t`: only earlier steps, or lower layers of its
    own step. Layers count from 1, and 0 is the embedding; steps count from 0. For each
    state, return the number of layers on the longest chain from an embedding to it,
    `[layers + 1, steps]`, as integers.

    ✓ returns an integer for each state, [layers + 1, steps]
        shape((_transformer, 3, 5), (_feedback, 1, 1), (_recurrent, 2, 7))
    ✓ has 0 for the embeddings
        agrees((_transformer, 3, 5), (_feedback, 2, 4), of=lambda depth, *_: depth[0])
        == torch.zeros(steps)
    ! No layer was needed for row 0.
    ✗ This counts states, the embedding too. An embedding has been through no layer.
        torch.zeros(layers -> torch.ones(layers
    ✓ in a transformer, counts the layers below
        agrees((_transformer, 3, 5), (_transformer, 1, 4))
        == torch.arange(layers + 1)[:, None].expand(-1, steps)
    ! Each layer read the layer below it, at its own and all earlier steps.
    ✗ This adds up the chains of all states that are read. They are computed side by
      side: only the longest counts.
        max(depth -> sum(depth
    ✗ The layer itself is not counted: a state is one layer behind what it reads.
        1 + max(depth -> max(depth
    ✗ This counts all states that a state depends on. Those on one chain count.
        _how_many(reads, layers, steps)
    ✗ This is the chain of a recurrent network, whatever the states read.
        1 + max(depth[state] for state in reads(l, t)) -> l + t
    ✗ This is the chain of feedback, whatever the states read.
        1 + max(depth[state] for state in reads(l, t)) -> t * layers + l
    ✓ in a recurrent network, grows by one with each step
        agrees((_recurrent, 3, 5), (_recurrent, 1, 6))
        == torch.tensor([[(l + t) * (l > 0) for t in range(steps)] for l in range(layers + 1)])
    ! Each layer read the layer below it, and itself one step before.
    ✗ This is the shortest chain. A state waits for the longest one.
        max(depth -> min(depth
    ✗ This is the number of layers below, whatever the states read.
        1 + max(depth[state] for state in reads(l, t)) -> l
    ✓ with feedback, grows by all layers with each step
        agrees((_feedback, 3, 4), (_feedback, 1, 5), (_feedback, 2, 2))
        == torch.tensor([[(t * layers + l) * (l > 0) for t in range(steps)]
             for l in range(layers + 1)])
    ! Each layer read all layers of all earlier steps, and the layer below it.
    ✗ This goes layer by layer, so it meets upper layers of the past before they are
      known. Go step by step.
        t in range(steps) -> l in range(1, layers + 1)
          ; l in range(1, layers + 1) -> t in range(steps)
    ✗ This follows only the last state of each list. All of them have to be known.
        max(depth[state] for state in reads(l, t)) -> depth[reads(l, t)[-1]]
    ✓ follows any other way of reading
        agrees((3, 6), (5, 4), (2, 10), draw=_any_reading)
    ! Each state read some lower layer of its step, and a few states of the past. There
      were {layers} layers and {steps} steps.
    ✓ asks only a few times what a state reads
        _few_calls
    ? A state is known one layer after the last of the states that it reads.
    ? So its depth is 1 + the maximum over reads(l, t). Fill the table in an order in
      which all these are already there.
    ? Two loops, for t outside and for l inside, and depth[state] with state = (l, t)
      reads one entry of the table.
    """
    depth = torch.zeros(layers + 1, steps, dtype=torch.long)
    for t in range(steps):  # upper layers of the past come first
        for l in range(1, layers + 1):
            depth[l, t] = 1 + max(depth[state] for state in reads(l, t))
    return depth


# --- merge_memory ----------------------------------------------------


def _states(generator, count=4, size=(2, 5)):
    return {"states": normal(generator, count, *size), "w": normal(generator, count)}


def _equal(generator, logit):
    return _states(generator) | {"w": torch.full((4,), logit, dtype=torch.float64)}


def _one_state(generator, layer):
    chosen = torch.arange(4) == layer
    return _states(generator) | {"w": torch.where(chosen, 0.0, -1000.0).double()}


@exercise(_states, difficulty=1, importance=3, minutes=7)
def merge_memory(states, w):
    """
    **One memory of many layers** (Eq. f1). `states` is `[L + 1, ..., d]`, `w` is `[L +
    1]`. Return `[..., d]`.

    ✓ returns a tensor of the shape of one state
        shape((4, (2, 5)), (3, (4,)), (6, (2, 3, 4)))
    ✓ with equal logits, takes the plain mean of all states
        agrees(0.0, 2.5, draw=_equal)
        == states.mean(0)
    ! All 4 logits were {logit}; the weights should sum to one.
    ✗ This uses the logits as weights, without the softmax.
        torch.softmax(w, 0) -> w
    ✗ This is the top state alone.
        states[-1]
    ✗ This leaves out state 0, the input of the stack, which counts, too.
        states=states[1:], w=w[1:]
    ✓ with all the weight on one state, returns that state
        agrees(0, 1, 2, 3, draw=_one_state)
        == states[w.argmax()]
    ! Logit {layer} was 0, all others -1000. The first state is the input of the stack,
      the last one its output; both count.
    ✗ This is the plain mean: the logits do not count.
        states.mean(0)
    ✗ Logits and states are in opposite order here.
        w=w.flip(0)
    ✓ weights states by the softmax of the logits
        agrees((4, (2, 5)), (2, (3,)), (6, (2, 3, 4)))
    ! Eq. f1: the weights are exp(w_l) / sum of exp(w). There were {count} states of
      shape {size}.
    ✓ does not overflow for large logits
        agrees((3, (2, 4)), w=lambda w: w + 1000)
        == merge_memory(states, w - 1000)
    ! 1000 was added to all logits, which leaves the softmax unchanged.
    ✗ This takes exp of the logits themselves, which overflows. Subtract the largest
      first, or use torch.softmax.
        torch.softmax(w, 0) -> w.exp() / w.exp().sum()
    ✓ weights layers, even if other dimensions have the same size
        agrees((4, (4, 4)))
    ! Four states of shape [4, 4]: does w apply to the first dimension?
    ✓ lets gradients through to states and w
        gradient()
    ? Eq. f1: turn the logits into weights that sum to one, then add up the states, each
      times its weight.
    ? torch.softmax does not overflow. The weights belong to the first dimension of
      states.
    ? weights = torch.softmax(w, dim=0), and in einsum: "l,l...d->...d".
    """
    weights = torch.softmax(w, 0)
    return torch.einsum("l,l...->...", weights, states)  # Eq. f1


# --- feedback_attention ----------------------------------------------


def _problem(generator, past=5, batch=2, heads=3, key=4):
    return {
        "q": normal(generator, batch, heads, key),
        "k": normal(generator, batch, past, heads, key),
        "v": normal(generator, batch, past, heads, key),
        "positions": normal(generator, key, 6),
    }


def _is_general(answer, reference, generator):
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


@exercise(_problem, difficulty=3, importance=4, minutes=17)
def feedback_attention(q, k, v, positions):
    """
    **Attend to the past** (Eqs. f4 and f5). `q` is `[batch, heads, key]`; `k` and `v`
    are `[batch, past, heads, key]`, oldest first, the last one being 1 step back;
    `positions` is $P$, `[key, features]`. `naive.sinusoids(distances, features)` gives
    $s$ of Eq. f3 as `[past, features]`. Return what each head reads, `[batch, heads,
    key]`; with `past = 0` it is 0.

    ✓ returns a tensor of the shape of q
        shape((5, 2, 3, 4), (1, 1, 1, 2), (3, 4, 2, 5))
    ✓ with one memory, returns its value
        agrees(1)
        == v[:, 0]
    ! The softmax over a single score is 1 for any score.
    ✗ This softmax is over the heads. The weights of a head sum to one over the
      memories.
        key**0.5, -1) -> key**0.5, 1)
    ✓ with a zero query, returns the mean of the values
        agrees(q=torch.zeros_like)
        == v.mean(1)
    ! All scores are 0, so all weights are 1/5. Is the softmax over the memories?
    ✓ without positions, is scaled dot-product attention
        agrees(positions=torch.zeros_like)
    ! positions was 0, so scores are q . k / sqrt(key). Do you keep heads apart, and
      divide the scores?
    ✗ The scores are not divided by sqrt(key) here.
        / key**0.5 ->
    ✗ This divides the scores by key, not by its square root.
        key**0.5 -> key
    ✗ Only the score of the distance is divided by sqrt(key). Eq. f4 divides the sum.
        (content + position) / key**0.5 -> content + position / key**0.5
    ✓ measures distances from the query: the last memory is 1 step back
        agrees(k=torch.zeros_like)
    ! All keys were 0, so scores are q . P s(distance) / sqrt(key), with distances 5, 4,
      3, 2, 1 from the oldest to the newest.
    ✗ This leaves out positions: near and far memories count the same.
        positions=0 * positions
    ✗ Only the score of the key is divided by sqrt(key). Eq. f4 divides the sum.
        (content + position) / key**0.5 -> content / key**0.5 + position
    ✗ The last memory has distance 0 here. It is 1 step back: the step itself is not
      among the memories.
        past, 0, -1 -> past - 1, -1, -1
    ✗ The distances run the wrong way here: the first memory is the oldest.
        past, 0, -1 -> 1, past + 1
    ✓ adds both scores, and divides both by sqrt(key)
        agrees(7)
    ! Eq. f4.
    ✓ without any memory, returns 0
        agrees(0)
        == 0 * q
    ! This is the first step of a sequence: an empty sum.
    ✓ works for any sizes, longer pasts, and large scores
        _is_general
    ✓ lets gradients through to q, k, v and positions
        gradient()
    ? Two scores per memory, Eq. f4: one compares the query with its key, the other with
      the vector r of its distance. Add, divide, softmax, and take the weighted mean of
      the values.
    ? torch.arange(past, 0, -1) gives the distances; naive.sinusoids(distances,
      features) @ positions.T has a row r for each.
    ? content = torch.einsum("bhd,bjhd->bhj", q, k) and position =
      torch.einsum("bhd,jd->bhj", q, r). A softmax over nothing is empty, and an empty
      sum is 0: no special case.
    """
    past, (key, features) = k.shape[1], positions.shape
    back = torch.arange(past, 0, -1, dtype=q.dtype)  # the last one is 1 step back
    r = naive.sinusoids(back, features) @ positions.T
    content = torch.einsum("bhd,bjhd->bhj", q, k)
    position = torch.einsum("bhd,jd->bhj", q, r)
    weights = torch.softmax((content + position) / key**0.5, -1)  # Eq. f4
    return torch.einsum("bhj,bjhd->bhd", weights, v)  # Eq. f5


# --- feedback_step ---------------------------------------------------


def _cache(generator, past=3, layers=2, width=4):
    """Run a step of a small stack, in which it matters what is read in which order."""
    own = normal(generator, layers, width, width)
    W_k, W_v = normal(generator, 2, width, width)

    def layer(l, x, keys, values):
        back = torch.arange(len(keys), 0, -1)
        weights = torch.softmax(keys @ x - 0.3 * back, 0)
        return x + torch.tanh(own[l] @ x + weights @ values)

    def project(m):
        return torch.tanh(W_k @ m), torch.tanh(W_v @ m)

    return {
        "x": normal(generator, width),
        "keys": normal(generator, past, width),
        "values": normal(generator, past, width),
        "w": normal(generator, layers + 1),
        "layer": layer,
        "project": project,
    }


def _only(generator, state):
    """Put all the weight of the memory on one state."""
    chosen = torch.arange(3) == state
    return _cache(generator) | {"w": torch.where(chosen, 0.0, -1000.0).double()}


RESULTS = ("x", "keys", "values")

START = """\
from fwlab.ops.feedback.naive import merge_memory


def feedback_step(x, keys, values, w, layer, project):
    states = [x]
    for l in range(len(w) - 1):
        states.append(x)
        x = layer(l, x, keys, values)
    k, v = project(merge_memory(torch.stack(states), w))
    keys = torch.cat([k[None], keys])
    values = torch.cat([v[None], values])
    return x, keys, values"""


@exercise(_cache, difficulty=3, importance=4, minutes=11, returns=RESULTS, start=START)
def feedback_step(x, keys, values, w, layer, project):
    """
    **A sick cache.** `x` `[d]` is the embedding of a step, `keys` and `values` `[past,
    d]` come from the memories before it, oldest first, and `w` `[L + 1]` has the logits
    of Eq. f1. `layer(l, x, keys, values)` returns the output of one of the `L` layers,
    with `l` from 0, and `project(m)` the key and the value of a memory. Return the
    output of the top layer, and the keys and values for the next step.

    ✓ returns x, and keys and values with one more row
        shape((3, 2, 4), (0, 1, 3), (5, 3, 2))
    ✓ runs all layers, each on the output of the one before
        agrees(only=("x",))
    ! This is x. All layers of a step read the same keys and values.
    ✗ The step reads its own memory, which is made only after its layers.
        layer(l, states[-1], keys, values) -> layer(l, states[-1],
          *(torch.cat([a, b[None]]) for a, b in zip((keys, values), project(x))))
    ✗ Every layer gets the embedding here. It gets the output of the layer below it.
        states[-1], keys -> x, keys
    ✗ The layers run from the top down.
        layer(l, -> layer(len(w) - 2 - l,
    ✓ leaves the earlier keys and values in their places
        agrees(
            of=lambda step, x, keys, *_: torch.stack([y[: len(keys)] for y in step[1:]])
        )
    ! Distances are counted from the end: the newest is the last.
    ✗ Two bugs are left: one in the place of the new memory, one in what it is made of.
        start:
    ✗ The newest memory is the first here. Attention takes the last one for 1 step back.
        keys, k[None] -> k[None], keys ; values, v[None] -> v[None], values
    ✓ with all the weight on one state, remembers this state
        agrees(0, 1, 2, draw=_only)
    ! All the weight was on state {state} of 0, 1, 2; this is the result {name}.
    ✗ The input is among the states twice, and the output of the top layer is missing.
        torch.stack(states) -> torch.stack([x, *states[:-1]])
    ✗ The memory is the top state alone. Eq. f1 takes a mean of all states.
        merge_memory(torch.stack(states), w) -> states[-1]
    ✗ The memory is the embedding alone: nothing is fed back.
        merge_memory(torch.stack(states), w) -> x
    ✗ The memory is the plain mean: the logits do not count.
        merge_memory(torch.stack(states), w) -> torch.stack(states).mean(0)
    ✗ The logits are used as weights, without the softmax.
        merge_memory(torch.stack(states), w) -> w @ torch.stack(states)
    ✓ merges first, and then projects once
        agrees((3, 2, 4), (1, 2, 6))
    ! This is the result {name}. `project` may be any function, such as one with a norm.
    ✗ This projects every state and merges the keys and values. That is not the same,
      and costs more.
        project(merge_memory(torch.stack(states), w)) ->
          (merge_memory(torch.stack(each), w) for each in zip(*map(project, states)))
    ✓ works at the first step, and for any number of layers
        agrees((0, 1, 3), (0, 4, 2), (7, 5, 3))
    ! There were {past} memories and {layers} layers.
    ✓ lets gradients through to x, keys, values and w
        gradient()
    ? Two symptoms, two bugs: the top layer is never seen, and things go wrong once two
      memories have an order.
    ? Which states are in the list when there are two layers? Write them down, in their
      order.
    ? Append x after the layer, not before it; and put the new row at the end:
      torch.cat([keys, k[None]]).
    """
    states = [x]
    for l in range(len(w) - 1):
        states.append(layer(l, states[-1], keys, values))
    k, v = project(merge_memory(torch.stack(states), w))
    return states[-1], torch.cat([keys, k[None]]), torch.cat([values, v[None]])


# --- cheap_mask ------------------------------------------------------

STEPS, LONGEST = 12, 4


def ages(mask: Tensor) -> Tensor:
    """Count how many steps back the newest memory is that each step reads.

    - `mask`: `bool [steps, steps]`; row t = the memories that step t reads.
    - Returns `[steps]`: for a step that reads none, as if there were one before the
      first step.
    """
    t = torch.arange(len(mask))
    newest = torch.where(mask, t, -1).amax(1)
    return t - newest


def _asked_for_mask(answer):
    return ask(answer, torch.ones(STEPS, STEPS).bool(), steps=STEPS)


def _is_causal(answer, reference, generator):
    mask = _asked_for_mask(answer)
    if (early := mask.triu().nonzero()).numel():
        t, j = early[0].tolist()
        raise Wrong(
            f"Step {t} reads the memory of step {j}, which is not there yet: a memory "
            "is made after all layers of its step."
        )


def _has_short_chains(answer, reference, generator):
    mask = _asked_for_mask(answer)
    chain = []
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


def _is_fresh(answer, reference, generator):
    yours = int(ages(_asked_for_mask(answer)).sum())
    if yours >= 2 * STEPS:
        raise Wrong(
            f"The mean age of your memories is {yours / STEPS:.2f} steps; that of the "
            "blocks is 2.00."
        )


@exercise(lambda _: {"steps": STEPS}, difficulty=5, importance=3, minutes=20)
def cheap_mask(steps):
    """
    **A third of the rounds.** A step no longer reads all earlier memories, but only
    some. Return which, for `steps` = 12, as booleans `[steps, steps]`: row `t` is True
    at the steps whose memories step `t` reads. No chain of steps, each reading the one
    before it, may have more than 4. The *age* of step `t` is the distance to the newest
    memory that it reads, and `t + 1` if it reads none. The mean age has to be below 2,
    that of the blocks.

    ✓ returns booleans, [steps, steps]
        shape(STEPS, draw=exactly("steps"))
    ✓ reads only memories of earlier steps
        _is_causal
    ✗ The diagonal is True, but the memory of a step is made after its layers.
        torch.ones(steps, steps).tril().bool()
    ✗ Rows and columns are swapped: row t is what step t reads.
        [1, 2, 1, 2, 3, 4, 2, 3, 4, 3, 4, 4] -> range(12)
          ; place < -> place // 3 < ; [:, None]).tril(-1) -> [:, None] // 3).mT
    ✓ has no chain of more than 4 steps
        _has_short_chains
    ✗ This is all of feedback: every step waits for the one before.
        torch.ones(steps, steps).tril(-1).bool()
    ✗ Each step reads only the one before. But all steps are on one chain then, as with
      full feedback.
        torch.ones(steps, steps).bool().tril(-1).triu(-1)
    ✗ Each step reads the last four. That limits how far it looks, not how long the
      chain gets.
        torch.ones(steps, steps).bool().tril(-1).triu(-4)
    ✓ has younger memories than blocks of three steps
        _is_fresh
    ✗ These are the blocks themselves: the same age is not below it.
        [1, 2, 1, 2, 3, 4, 2, 3, 4, 3, 4, 4] -> [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    ✗ No step reads a memory: this is not feedback.
        torch.zeros(steps, steps).bool()
    ✗ Each step reads the one three steps back: three chains side by side, and every
      memory is three steps old.
        torch.ones(steps, steps).bool().tril(-3).triu(-3)
    ✗ The first four steps use up the chain. All later ones read memories that get older
      and older.
        [1, 2, 1, 2, 3, 4, 2, 3, 4, 3, 4, 4] -> [1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4]
    ? Give each step a place from 1 to 4 in its chain. It may read every earlier step
      with a lower place. Blocks are 1 1 1 2 2 2 3 3 3 4 4 4.
    ? Places need not grow. A step with place 1 or 2 between later ones has an old
      memory itself, but is a young memory for all steps after it.
    ? Let Python try random lists of places: of a thousand, about four are good enough.
      Nearly all of these end with 4, and have no 1 after the seventh step.
    """
    # The place of each step in its chain: a new one may begin at any time.
    place = torch.tensor([1, 2, 1, 2, 3, 4, 2, 3, 4, 3, 4, 4])
    return (place < place[:, None]).tril(-1)  # row t: earlier, with a lower place
