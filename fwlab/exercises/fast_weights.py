"""Reading a memory, writing into it, attention as writes and reads, and its error."""

import torch
from torch import Generator, Tensor

from fwlab.exercises.asking import Answer, Wrong, ask, compare, normal, orthonormal
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import (
    agrees,
    exactly,
    gradient,
    is_causal,
    shape,
    takes_heads,
)
from fwlab.exercises.solutions import linear_attention, predict_error
from fwlab.feature_maps import l2_normalize
from fwlab.ops.delta.delta import delta_step
from fwlab.ops.linear.sum import read, write

# --- read_memory ----------------------------------------------------


def _query(
    generator: Generator, value: int = 4, key: int = 4, lead: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    W = normal(generator, *lead, value, key)
    return {"W": W, "q": normal(generator, *lead, key)}


def _one_hot(generator: Generator, place: int) -> dict[str, Tensor]:
    return _query(generator) | {"q": torch.eye(4, dtype=torch.float64)[place]}


READ_MEMORY = Exercise(
    name="read_memory",
    notebook="00_start_here",
    difficulty=1,
    importance=5,
    minutes=5,
    task="**Read a memory.** Return $W q$: what the memory `W` "
    "`[..., value, key]` holds for the query `q` `[..., key]`. The dots "
    "are any leading dimensions, such as batch and heads.",
    reference=read,
    properties=(
        shape(
            "returns a tensor of the shape of a value",
            _query,
            [(3, 5), (5, 3), (1, 1)],
            catches={
                "This is q W, not W q: the query meets the columns of W, its last "
                "dimension.": lambda W, q: read(W.mT, q)
            },
        ),
        agrees(
            "with a one-hot query, returns a column of W",
            _one_hot,
            [0, 1, 2, 3],
            expected=lambda W, q: W[:, q.argmax()],
            because="The query was one-hot, with its 1 at place {place}: column "
            "{place} of W.",
            catches={
                "This takes the mean over the columns, and has to "
                "take the sum.": lambda W, q: read(W, q) / q.shape[-1],
                "This takes a softmax of the query first. Fast "
                "weights need none.": lambda W, q: read(W, torch.softmax(q, -1)),
            },
        ),
        agrees(
            "with any query, returns the sum of the columns times its entries",
            _query,
            [(4, 4), (3, 5)],
            expected=lambda W, q: (W * q).sum(1),
            because="This is W q.",
            catches={
                "This takes the column of the largest entry of the query alone. All "
                "columns count, each times its entry.": lambda W, q: (
                    torch.take_along_dim(W, q.argmax(-1)[..., None, None], -1)[..., 0]
                )
            },
        ),
        takes_heads(_query, [(2,), (2, 3), (4, 4)]),
        gradient("lets gradients through to W and q", _query, (4, 5, (2,))),
    ),
    hints=(
        "It is a matrix times a vector. Which dimension of W does the query meet?",
        "The last dimension of W is that of keys and queries; sum over it.",
        'torch.einsum("...vk,...k->...v", W, q). For plain matrices, W @ q.',
    ),
    example=_query,
)


# --- write ----------------------------------------------------------


def _pair(
    generator: Generator, value: int = 4, key: int = 4, lead: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    W, k = normal(generator, *lead, value, key), normal(generator, *lead, key)
    return {"W": W, "k": k, "v": normal(generator, *lead, value)}


def _of_size(generator: Generator, size: float) -> dict[str, Tensor]:
    return {name: size * x for name, x in _pair(generator).items()}


def _stores(answer: Answer, reference: Answer, generator: Generator) -> None:
    W, v = torch.zeros(3, 4, dtype=torch.float64), normal(generator, 3)
    for place in range(4):
        k = torch.eye(4, dtype=torch.float64)[place]
        written = ask(answer, W, W=W, k=k, v=v)
        compare(
            written[:, place],
            v,
            f"With the one-hot key {place}, column {place} of W should hold v.",
        )
        compare(read(written, k), v, "W k should be v.")


def _write_adds(answer: Answer, reference: Answer, generator: Generator) -> None:
    keys, values = orthonormal(generator, 4), normal(generator, 2, 3)
    W = values[0][:, None] * keys[0][None, :]
    written = ask(answer, W, W=W, k=keys[1], v=values[1])
    compare(
        read(written, keys[0]),
        values[0],
        "The write changed an earlier value under an orthogonal key.",
    )
    twice = ask(answer, W, W=W, k=keys[0], v=values[1])
    compare(
        read(twice, keys[0]),
        values.sum(0),
        "After two writes under one key, reading should return the sum of both values.",
    )


def _outer(v: Tensor, k: Tensor) -> Tensor:
    return v[..., :, None] * k[..., None, :]


WRITE = Exercise(
    name="write",
    notebook="01_fast_weights",
    difficulty=1,
    importance=5,
    minutes=5,
    task=r"**The outer-product write** (Eq. 17). Return $W + v \otimes "
    "k$, for `W` `[..., value, key]`, `k` `[..., key]` and `v` "
    "`[..., value]`. The dots are any leading dimensions, such as "
    "batch and heads.",
    reference=write,
    properties=(
        shape(
            "returns a tensor of the shape of W",
            _pair,
            [(3, 5), (4, 2), (1, 1)],
            catches={
                "This adds k ⊗ v, with keys along the rows. Values go along the rows, "
                "and keys along the columns, so that W k is a value.": lambda W, k, v: (
                    W + _outer(k, v)
                ),
                "This multiplies entry by entry, v * k. In v ⊗ k every entry of v "
                "meets every entry of k.": lambda W, k, v: W + v * k,
            },
        ),
        Property(
            "stores a value in an empty memory",
            _stores,
            {
                "This subtracts the pair: W - v ⊗ k in place of W + "
                "v ⊗ k.": lambda W, k, v: W - _outer(v, k)
            },
        ),
        Property(
            "keeps what is already there",
            _write_adds,
            {
                "This is the new pair alone: what W held is lost.": lambda W, k, v: (
                    _outer(v, k)
                ),
                "This is the delta rule already: it removes what the key held. Here a "
                "write only adds.": lambda W, k, v: delta_step(
                    W, k, v, torch.ones_like(k[..., 0])
                ),
            },
        ),
        agrees(
            "adds v ⊗ k, whatever their lengths",
            _of_size,
            [1e-3, 1.0, 1e3],
            because="W, k and v were multiplied by {size:g}. A write takes the key as "
            "it is, and W has no limit: is there a normalize or a clamp?",
            catches={
                "This scales the key to length 1. A write takes the key as it "
                "is.": lambda W, k, v: write(W, l2_normalize(k), v)
            },
        ),
        takes_heads(_pair, [(2,), (2, 3), (1, 4, 4)]),
        gradient("lets gradients through to W, k and v", _pair, (4, 5, (2,))),
    ),
    hints=(
        "Eq. 17 adds v ⊗ k to W. Entry (i, j) of v ⊗ k is v_i k_j.",
        "Give v a last dimension of 1 and k a second-to-last one, and "
        "multiply: broadcasting makes the matrix. Or name the indices in "
        "torch.einsum.",
        "v[..., :, None] has shape [..., value, 1], and k[..., None, :] "
        'has [..., 1, key]. In einsum: "...v,...k->...vk".',
    ),
    example=_pair,
)


# --- linear_attention -----------------------------------------------


def _sequence(
    generator: Generator,
    time: int = 5,
    key: int = 4,
    value: int = 4,
    lead: tuple[int, ...] = (),
) -> dict[str, Tensor]:
    q, k = (normal(generator, *lead, time, key) for _ in "qk")
    return {"q": q, "k": k, "v": normal(generator, *lead, time, value)}


def _only_first(x: Tensor) -> Tensor:
    """Ones at the first step, and zeros after it."""
    return torch.ones_like(x) * (torch.arange(len(x)) == 0)[:, None]


def _mean_of_pairs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    count = torch.arange(1, q.shape[-2] + 1, dtype=v.dtype)
    return linear_attention(q, k, v) / count[:, None]


def _with_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    future = torch.ones(q.shape[-2], q.shape[-2]).triu(1).bool()
    return (q @ k.mT).masked_fill(future, -torch.inf).softmax(-1) @ v


LINEAR_ATTENTION = Exercise(
    name="linear_attention",
    notebook="01_fast_weights",
    difficulty=2,
    importance=5,
    minutes=7,
    task="**Attention without softmax** (Eqs. 8-11). From queries `q`, keys `k` "
    "`[..., time, key]` and values `v` `[..., time, value]`, return "
    "$y_i = \\sum_{j \\le i} v_j\\, (k_j \\cdot q_i)$ for every step $i$, "
    "`[..., time, value]`: in a loop that writes and reads, or all steps at "
    "once.",
    reference=linear_attention,
    properties=(
        shape(
            "returns a tensor of the shape of v",
            _sequence,
            [(5, 4, 3), (1, 2, 6), (3, 5, 5)],
            catches={
                "Here W is the sum of k ⊗ v, so it answers with keys. Values belong to "
                "the rows of W: v ⊗ k.": lambda q, k, v: linear_attention(q, v, k)
            },
        ),
        is_causal(
            _sequence,
            catches={
                "This sees the future: step i reads all pairs, later ones included. It "
                "may read those up to i.": lambda q, k, v: q @ k.mT @ v
            },
        ),
        agrees(
            "at the first step, returns the first value, weighted by k · q",
            _sequence,
            [1, 5],
            of=lambda y, *_: y[0],
            expected=lambda q, k, v: v[0] * (k[0] @ q[0]),
            because="Step 0 reads a memory that holds one pair, its own.",
            catches={
                "This leaves out the pair of the step itself. Write first, then read: "
                "j goes up to i, and includes it.": lambda q, k, v: (
                    (q @ k.mT).tril(-1) @ v
                ),
                "This divides by the sum of the weights, as softmax does. Here nothing "
                "divides: weights may be negative, and may sum to 0.": lambda q, k, v: (
                    linear_attention(q, k, v)
                    / linear_attention(q, k, torch.ones_like(v))
                ),
                "There is still a softmax here, so no matrix can take the place of the "
                "list.": _with_softmax,
                "This divides by sqrt(d), a factor that the paper leaves "
                "out (Eq. 7).": lambda q, k, v: (
                    linear_attention(q, k, v) / q.shape[-1] ** 0.5
                ),
            },
        ),
        agrees(
            "at the last step, still reads the first value",
            _sequence,
            [7],
            change={"k": _only_first, "v": _only_first},
            of=lambda y, *_: y[-1],
            expected=lambda q, k, v: q[-1].sum() * v[0],
            because="Only the first pair was not 0. Nothing takes it out of the "
            "memory, and nothing divides the sum.",
            catches={
                "This reads the pair of the step alone: W was replaced, in place of "
                "added to.": lambda q, k, v: (q * k).sum(-1, keepdim=True) * v,
                "This divides by the number of pairs. A memory is a sum: nothing "
                "divides it.": _mean_of_pairs,
                "Keys and queries are swapped: this weights v_j by k_i · q_j, in place "
                "of k_j · q_i.": lambda q, k, v: linear_attention(k, q, v),
            },
        ),
        agrees(
            "weights the value of each step j up to i by k_j · q_i",
            _sequence,
            [(6, 4, 3), (6, 6, 6), (40, 3, 5)],
            because="There were {time} steps, keys of width {key}, values of {value}.",
        ),
        takes_heads(_sequence, [(2,), (2, 3), (5, 5)]),
        gradient("lets gradients through to q, k and v", _sequence, {"lead": (2,)}),
    ),
    hints=(
        "As a loop: start with W = 0. At each step, k[..., i, :] is the key of all "
        "leading dimensions: add v ⊗ k to W, as in write, then append W q to a "
        "list. torch.stack(list, -2) makes a tensor of it.",
        "All at once: q @ k.mT has the weight k_j · q_i in row i and column "
        "j. Later steps must not count.",
        ".tril() keeps the columns up to i of each row i. Multiply what is left by v.",
    ),
    example=_sequence,
)


# --- predict_error --------------------------------------------------


def _as_measured(answer: Answer, reference: Answer, generator: Generator) -> None:
    for S, d in ((2, 8), (9, 8), (33, 16), (5, 64)):
        k = l2_normalize(normal(generator, 2000, S, d))
        v = normal(generator, 2000, S, 4)
        error = k @ (k.mT @ v) - v
        measured = (error.square().sum() / v.square().sum()).item()
        predicted = ask(answer, float, S=S, d=d)
        if not abs(predicted / measured - 1) < 0.1:
            raise Wrong(
                f"S = {S}, d = {d}: 2000 memories had an error of {measured:.3g}, you "
                f"predict {predicted:.3g}."
            )


def _size(generator: Generator) -> dict[str, object]:
    S, d = torch.randint(5, 40, (2,), generator=generator).tolist()
    return {"S": S, "d": d}


PREDICT_ERROR = Exercise(
    name="predict_error",
    notebook="01_fast_weights",
    difficulty=3,
    importance=4,
    minutes=5,
    task="**Predict the error.** `S` pairs are written under random keys of "
    "length 1 and width `d`, and all are read. Return the expected squared "
    "error of a value that is read, relative to the squared length of a "
    "value.",
    reference=predict_error,
    properties=(
        agrees(
            "is 0 for one pair, which nothing disturbs",
            exactly("S", "d"),
            [(1, 1), (1, 8), (1, 64)],
            expected=lambda S, d: 0,
            because="W k is v (k · k), and k has length 1.",
            catches={
                "This counts the pair itself, too, which is read without an error: "
                "only the S - 1 others disturb it.": lambda S, d: S / d
            },
        ),
        Property(
            "agrees with memories that were filled and read, to within 10 %",
            _as_measured,
            {
                "This divides by d². The mean of (k_j · k_i)² is 1/d: the square is in "
                "it already.": lambda S, d: (S - 1) / d**2,
                "This is the length of the error, the root of what is asked: take its "
                "square.": lambda S, d: ((S - 1) / d) ** 0.5,
                "1/sqrt(d) is the typical size of k_j · k_i. The error "
                "has its square.": lambda S, d: (S - 1) / d**0.5,
                "This would be right if all S - 1 terms pointed the same way. The "
                "cross terms vanish, so squares add up, not lengths.": lambda S, d: (
                    (S - 1) ** 2 / d
                ),
                "This is what the best keys lose: d of them have room. Random keys "
                "disturb each other long before, and beyond 1.": lambda S, d: max(
                    0.0, 1 - d / S
                ),
                "This takes the first d pairs to be free. That holds for orthogonal "
                "keys; random ones overlap, even two of them.": lambda S, d: max(
                    0.0, (S - d) / d
                ),
                "This weights every other value by 1, but its weight is k_j · k_i: "
                "small in a wide memory.": lambda S, d: S - 1,
            },
        ),
        agrees(
            "is right for any S and d, large ones too",
            exactly("S", "d"),
            [(2, 1), (8, 8), (100, 64), (10_001, 10), (3, 4096)],
        ),
    ),
    hints=(
        "How many other values come in, when you read one?",
        "Each of them comes in with the weight k_j · k_i. What is the mean of "
        "its square?",
        "The squares add up, the cross terms vanish: (number of other values) "
        "times (mean of the squared weight).",
    ),
    example=_size,
)


# --- correct --------------------------------------------------------


def correct(W: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The delta rule with a write strength of 1."""
    return delta_step(W, k, v, torch.ones_like(k[..., 0]))


def _unit_pair(
    generator: Generator, value: int = 4, key: int = 4, lead: tuple[int, ...] = ()
) -> dict[str, Tensor]:
    inputs = _pair(generator, value, key, lead)
    return inputs | {"k": l2_normalize(inputs["k"])}


def _keeps_orthogonal(answer: Answer, reference: Answer, generator: Generator) -> None:
    keys, v = orthonormal(generator, 4), normal(generator, 3)
    W = normal(generator, 3, 4)
    written = ask(answer, W, W=W, k=keys[0], v=v)
    compare(
        written @ keys[1:].T,
        W @ keys[1:].T,
        "The write changed what orthogonal keys read.",
    )


CORRECT = Exercise(
    name="correct",
    task="**Correct a memory.** Return $W + (v - W k)\\,k^\\top$, the delta rule at "
    "$\\beta = 1$, for `W` `[..., value, key]`, `k` `[..., key]` and `v` "
    "`[..., value]`.",
    reference=correct,
    properties=(
        shape(
            "returns a tensor of the shape of W",
            _pair,
            [(3, 5), (5, 3), (1, 1)],
            catches={
                "This multiplies entry by entry. Every entry of the difference meets "
                "every entry of k.": lambda W, k, v: W + (v - read(W, k)) * k
            },
        ),
        agrees(
            "after it, a key of length 1 reads the new value",
            _unit_pair,
            [(3, 5), (4, 4)],
            of=lambda W, _, k, v: read(W, k),
            expected=lambda W, k, v: v,
            because="This is W k after the write; it should be v.",
            catches={
                "This adds v ⊗ k, and the old value stays. Read first, and write the "
                "difference.": write,
                "This subtracts the difference. Check the sign.": lambda W, k, v: write(
                    W, k, read(W, k) - v
                ),
                "This is the write alone: what W held is lost.": lambda W, k, v: _outer(
                    v - read(W, k), k
                ),
                "This removes what the key held, but does not write the new "
                "value.": lambda W, k, v: write(W, k, -read(W, k)),
            },
        ),
        Property(
            "keeps what orthogonal keys read",
            _keeps_orthogonal,
            {
                "This clears the memory first. Only what k reads may "
                "change.": lambda W, k, v: _outer(v, k),
            },
        ),
        agrees(
            "with any key, adds the difference times the key",
            _pair,
            [(3, 5), (4, 4)],
            because="This is W + (v - W k) k^T, with the key as it is given.",
            catches={
                "This makes the length of the key 1 first. The formula takes it as it "
                "is.": lambda W, k, v: correct(W, l2_normalize(k), v)
            },
        ),
        takes_heads(_pair, [(2,), (2, 3), (4, 4)]),
        gradient("lets gradients through to W, k and v", _pair, (4, 5, (2,))),
    ),
    hints=(
        "Two steps: first what the key reads now, W k. Then a write of the difference.",
        "old is read_memory(W, k). The matrix to add has v - old in its rows and k in "
        "its columns.",
        "W + (v - old)[..., :, None] * k[..., None, :]",
    ),
    example=_pair,
    difficulty=2,
    importance=5,
    minutes=5,
    notebook="00_start_here",
)


EXERCISES = {
    each.name: each
    for each in (READ_MEMORY, CORRECT, WRITE, LINEAR_ATTENTION, PREDICT_ERROR)
}
